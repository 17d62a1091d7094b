package com.example.jaxspec

import java.io.File
import org.json.JSONArray
import org.json.JSONObject

/**
 * Reads tokenizer.json: byte-level BPE, as Llama 3, Qwen, SmolLM and the shipped models have it, and
 * BPE of characters with a fallback to bytes, as Llama 2 and Vicuna.
 *
 * What a file has and this class does not cover raises `IllegalArgumentException`.
 */
class Tokenizer(file: File) {
    /** A way to split: at digits, or by GPT-2's pattern or the later one of Llama 3 and Qwen. */
    private class Split(val words: Boolean, val modern: Boolean, val digits: Int)

    private val spelled = Array(256) { "" } // the character that stands for a byte in the vocabulary
    private val byteOf = HashMap<Int, Int>()
    private val vocabulary = HashMap<String, Int>()
    private val bytes = HashMap<Int, ByteArray>()
    private val merges = HashMap<Long, IntArray>() // rank, and id of the whole
    private val added = ArrayList<Pair<String, Int>>()
    private val splits = ArrayList<Split>()
    private val before = ArrayList<Int>()
    private val after = ArrayList<Int>()
    private var byteLevel = false
    private var wholeWords = false
    private var composes = false

    /** True if every text is written with a space before it, which reading leaves out. */
    var beginsWithSpace = false
        private set

    init {
        var others = 256
        for (byte in 0..255) {
            val printable = byte in 33..126 || byte in 161..172 || byte in 174..255
            val code = if (printable) byte else others++
            spelled[byte] = String(Character.toChars(code))
            byteOf[code] = byte
        }
        val described = JSONObject(file.readText())
        beginsWithSpace = described.getJSONObject("model").optBoolean("byte_fallback")
        if (beginsWithSpace) demandCharacters(described) else readBytes(described)
        readModel(described.getJSONObject("model"))
        described.optJSONArray("added_tokens")?.let { readAdded(it) }
        described.optJSONObject("post_processor")?.let { readAround(it) }
    }

    /** Llama 2's: a space before the text, spaces as U+2581, no splits, and the reverse in decoding. */
    private fun demandCharacters(described: JSONObject) {
        val steps = described.optJSONObject("normalizer")?.optJSONArray("normalizers") ?: JSONArray()
        val first = steps.optJSONObject(0) ?: JSONObject()
        val second = steps.optJSONObject(1) ?: JSONObject()
        demand(
            steps.length() == 2 && first.optString("type") == "Prepend" && first.optString("prepend") == SPACE &&
                second.optString("type") == "Replace" && second.optJSONObject("pattern")?.optString("String") == " " &&
                second.optString("content") == SPACE,
            "this normalizer next to byte_fallback",
        )
        demand(described.isNull("pre_tokenizer"), "a pre_tokenizer next to byte_fallback")
        demand(!described.getJSONObject("model").optBoolean("ignore_merges"), "ignore_merges next to byte_fallback")
        val decoders = described.optJSONObject("decoder")?.optJSONArray("decoders") ?: JSONArray()
        val names = (0 until decoders.length()).map { decoders.getJSONObject(it).getString("type") }
        demand(names == listOf("Replace", "ByteFallback", "Fuse", "Strip"), "this decoder next to byte_fallback")
    }

    private fun readBytes(described: JSONObject) {
        described.optJSONObject("normalizer")?.let {
            demand(it.getString("type") == "NFC", "normalizer ${it.getString("type")}")
            composes = true
        }
        readSplits(described.getJSONObject("pre_tokenizer"))
        demand(byteLevel, "a pre_tokenizer without ByteLevel")
        demand(described.getJSONObject("decoder").getString("type") == "ByteLevel", "this decoder")
    }

    /** Ids of a text; special tokens that are spelled in it count as such. */
    fun encode(text: String, around: Boolean): IntArray {
        val ids = ArrayList<Int>()
        if (around) ids.addAll(before)
        val rest = StringBuilder()
        var at = 0
        while (at < text.length) {
            val found = added.firstOrNull { text.startsWith(it.first, at) } // the longest first
            if (found == null) {
                rest.append(text[at++])
                continue
            }
            encodePlain(rest.toString(), ids)
            rest.setLength(0)
            ids.add(found.second)
            at += found.first.length
        }
        encodePlain(rest.toString(), ids)
        if (around) ids.addAll(after)
        return ids.toIntArray()
    }

    /** Bytes that an id adds to a text; none for special tokens. A character may take several ids. */
    fun bytes(id: Int): ByteArray = bytes[id] ?: ByteArray(0)

    private fun demand(covered: Boolean, what: String) =
        require(covered) { "tokenizer.json: $what is not covered by this reader." }

    private fun readSplits(step: JSONObject) {
        when (val type = step.getString("type")) {
            "Sequence" -> step.getJSONArray("pretokenizers").let { steps ->
                for (each in 0 until steps.length()) readSplits(steps.getJSONObject(each))
            }
            "Digits" -> splits.add(Split(false, false, if (step.optBoolean("individual_digits")) 1 else Int.MAX_VALUE))
            "ByteLevel" -> {
                demand(!step.optBoolean("add_prefix_space"), "add_prefix_space")
                byteLevel = true
                if (step.optBoolean("use_regex", true)) splits.add(Split(true, false, 0))
            }
            "Split" -> {
                demand(step.getString("behavior") == "Isolated" && !step.optBoolean("invert"), "this Split")
                val pattern = step.getJSONObject("pattern").optString("Regex")
                val start = """(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"""
                val end = """| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
                demand(pattern == start + end || pattern == "$start{1,3}$end", "the pattern $pattern")
                splits.add(Split(true, true, if (pattern == start + end) 1 else 3))
            }
            else -> demand(false, "pre_tokenizer $type")
        }
    }

    private fun readModel(model: JSONObject) {
        demand(model.getString("type") == "BPE", "model ${model.getString("type")}")
        for (name in listOf("dropout", "continuing_subword_prefix", "end_of_word_suffix")) {
            demand(model.isNull(name) || model.optString(name).isEmpty(), name)
        }
        wholeWords = model.optBoolean("ignore_merges")
        val pieces = model.getJSONObject("vocab")
        for (piece in pieces.keys()) {
            val id = pieces.getInt(piece)
            vocabulary[piece] = id
            bytes[id] = if (beginsWithSpace) bytesOfCharacters(piece) else codePoints(piece).flatMap { code ->
                byteOf[code]?.let { listOf(it.toByte()) } ?: String(Character.toChars(code)).toByteArray().toList()
            }.toByteArray()
        }
        val pairs = model.getJSONArray("merges")
        for (rank in 0 until pairs.length()) {
            val pair = pairs.optJSONArray(rank)
            val left = pair?.getString(0) ?: pairs.getString(rank).substringBefore(' ')
            val right = pair?.getString(1) ?: pairs.getString(rank).substringAfter(' ')
            merges[pairOf(idOf(left), idOf(right))] = intArrayOf(rank, idOf(left + right))
        }
    }

    private fun bytesOfCharacters(piece: String): ByteArray {
        val isByte = piece.length == 6 && piece.startsWith("<0x")
        return if (isByte) byteArrayOf(piece.substring(3, 5).toInt(16).toByte()) else piece.replace(SPACE, " ").toByteArray()
    }

    private fun readAdded(tokens: JSONArray) {
        for (index in 0 until tokens.length()) {
            val token = tokens.getJSONObject(index)
            for (name in listOf("lstrip", "rstrip", "single_word")) demand(!token.optBoolean(name), "an added token with $name")
            demand(!(beginsWithSpace && token.optBoolean("normalized")), "an added token that is normalized")
            val content = token.getString("content")
            val id = token.getInt("id")
            if (content.isNotEmpty()) added.add(Pair(content, id))
            bytes[id] = if (token.optBoolean("special")) ByteArray(0) else content.toByteArray()
        }
        added.sortByDescending { it.first.length }
    }

    private fun readAround(step: JSONObject) {
        when (val type = step.getString("type")) {
            "Sequence" -> step.getJSONArray("processors").let { steps ->
                for (each in 0 until steps.length()) readAround(steps.getJSONObject(each))
            }
            "TemplateProcessing" -> {
                val parts = step.getJSONArray("single")
                var behind = false
                for (index in 0 until parts.length()) {
                    val special = parts.getJSONObject(index).optJSONObject("SpecialToken")
                    if (special == null) {
                        behind = true
                        continue
                    }
                    val ids = step.getJSONObject("special_tokens").getJSONObject(special.getString("id")).getJSONArray("ids")
                    for (each in 0 until ids.length()) (if (behind) after else before).add(ids.getInt(each))
                }
            }
            else -> demand(type == "ByteLevel", "post_processor $type") // which moves offsets only
        }
    }

    private fun pairOf(left: Int, right: Int): Long = (left.toLong() shl 32) or right.toLong()

    private fun idOf(piece: String): Int =
        requireNotNull(vocabulary[piece]) { "The model's tokenizer has no token for \"$piece\"." }

    private fun codePoints(text: String): List<Int> {
        val found = ArrayList<Int>()
        var at = 0
        while (at < text.length) {
            val code = text.codePointAt(at)
            found.add(code)
            at += Character.charCount(code)
        }
        return found
    }

    private fun encodeCharacters(text: String, ids: MutableList<Int>) {
        if (text.isEmpty()) return
        val parts = codePoints(SPACE + text.replace(" ", SPACE)).flatMap { code ->
            val character = String(Character.toChars(code))
            vocabulary[character]?.let { listOf(it) } ?: character.toByteArray().map { idOf("<0x%02X>".format(it)) }
        }
        mergeParts(parts.toMutableList(), ids)
    }

    private fun encodePlain(text: String, ids: MutableList<Int>) {
        if (beginsWithSpace) return encodeCharacters(text, ids)
        val composed = if (composes) java.text.Normalizer.normalize(text, java.text.Normalizer.Form.NFC) else text
        var pieces = listOf(codePoints(composed))
        for (split in splits) {
            pieces = pieces.flatMap { piece ->
                val finer = ArrayList<List<Int>>()
                var at = 0
                while (at < piece.size) {
                    val end = if (split.words) endOfWord(piece, at, split) else endOfDigits(piece, at, split)
                    finer.add(piece.subList(at, end))
                    at = end
                }
                finer
            }
        }
        for (piece in pieces) if (piece.isNotEmpty()) merge(piece, ids)
    }

    private fun isLetter(code: Int) = Character.isLetter(code)

    private fun isNumber(code: Int) = when (Character.getType(code).toByte()) {
        Character.DECIMAL_DIGIT_NUMBER, Character.LETTER_NUMBER, Character.OTHER_NUMBER -> true
        else -> false
    }

    /** Unicode's white space, which is more than Java's. */
    private fun isSpace(code: Int) =
        code in 9..13 || code == 0x85 || code == 0xA0 || code == 0x202F || (Character.isWhitespace(code) && code !in 0x1C..0x1F) || code == 0x2007

    private fun isOther(code: Int) = !isLetter(code) && !isNumber(code) && !isSpace(code)

    private fun run(text: List<Int>, at: Int, most: Int = Int.MAX_VALUE, belongs: (Int) -> Boolean): Int {
        var end = at
        while (end < text.size && end - at < most && belongs(text[end])) end++
        return end
    }

    private fun endOfDigits(text: List<Int>, at: Int, split: Split): Int =
        if (isNumber(text[at])) run(text, at, split.digits, ::isNumber) else run(text, at) { !isNumber(it) }

    /** The end of the piece that the pattern finds at `at`; as `end_of_word` of the C++ host. */
    private fun endOfWord(text: List<Int>, at: Int, split: Split): Int {
        fun holds(place: Int, belongs: (Int) -> Boolean) = place < text.size && belongs(text[place])
        fun lineEnd(place: Int) = holds(place) { it == 13 || it == 10 }
        if (text[at] == '\''.code) {
            for (ending in listOf("s", "t", "re", "ve", "m", "ll", "d")) {
                val same = ending.indices.all { place -> holds(at + 1 + place) { folded(it, split.modern) == ending[place].code } }
                if (same) return at + 1 + ending.length
            }
        }
        if (split.modern) {
            val first = if (lineEnd(at) || isLetter(text[at]) || isNumber(text[at])) at else at + 1
            if (holds(first, ::isLetter)) return run(text, first, belongs = ::isLetter)
            if (isNumber(text[at])) return run(text, at, split.digits, ::isNumber)
        }
        val first = if (text[at] == ' '.code) at + 1 else at
        if (!split.modern) {
            if (holds(first, ::isLetter)) return run(text, first, belongs = ::isLetter)
            if (holds(first, ::isNumber)) return run(text, first, belongs = ::isNumber)
        }
        if (holds(first, ::isOther)) {
            val end = run(text, first, belongs = ::isOther)
            return if (split.modern) run(text, end) { it == 13 || it == 10 } else end
        }
        val end = run(text, at, belongs = ::isSpace)
        if (split.modern) for (last in end downTo at + 1) if (lineEnd(last - 1)) return last
        // White space leaves its last character to the word behind it.
        return if (end < text.size && end - at > 1) end - 1 else end
    }

    private fun folded(code: Int, anyCase: Boolean): Int = when {
        !anyCase -> code
        code in 'A'.code..'Z'.code -> code or 32
        code == 0x17F -> 's'.code // the long s
        else -> code
    }

    private fun merge(piece: List<Int>, ids: MutableList<Int>) {
        val text = piece.joinToString("") { String(Character.toChars(it)) }.toByteArray()
        val names = text.map { spelled[it.toInt() and 255] }
        val known = if (wholeWords) vocabulary[names.joinToString("")] else null
        if (known != null) {
            ids.add(known)
            return
        }
        mergeParts(names.map { idOf(it) }.toMutableList(), ids)
    }

    private fun mergeParts(parts: MutableList<Int>, ids: MutableList<Int>) {
        while (parts.size > 1) {
            var best: IntArray? = null
            var place = 0
            for (at in 0 until parts.size - 1) {
                val found = merges[pairOf(parts[at], parts[at + 1])] ?: continue
                if (best == null || found[0] < best[0]) {
                    best = found
                    place = at
                }
            }
            if (best == null) break
            parts[place] = best[1]
            parts.removeAt(place + 1)
        }
        ids.addAll(parts)
    }

    private companion object {
        const val SPACE = "\u2581"
    }
}

/** The text of ids that arrive one by one: characters, as soon as they are whole. */
class GrowingText(private val tokenizer: Tokenizer) {
    private var held = ByteArray(0)
    private var begun = false

    fun push(id: Int): String {
        held += tokenizer.bytes(id)
        if (!begun && held.isNotEmpty()) {
            if (tokenizer.beginsWithSpace && held[0] == ' '.code.toByte()) held = held.copyOfRange(1, held.size)
            begun = true
        }
        val text = String(held, Charsets.UTF_8)
        if (text.endsWith('\uFFFD')) return "" // the last one lacks some of its bytes
        held = ByteArray(0)
        return text
    }
}
