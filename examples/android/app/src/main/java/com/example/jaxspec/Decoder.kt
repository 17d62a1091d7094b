package com.example.jaxspec

import com.google.ai.edge.litert.Accelerator
import com.google.ai.edge.litert.CompiledModel
import com.google.ai.edge.litert.TensorBuffer
import org.json.JSONObject
import java.io.Closeable
import java.io.File

const val PLAIN = "decode"
private const val FORMAT = 2 // of manifests
private const val OUT = "o_" // an output o_NAME is the next call's input NAME
private const val REPORT = "report" // an output of files with several trees
private val STEP = Regex("step(_[0-9]+)?") // whole steps of greedy decoding

/** A tree that the file has a step for: its signature, its tokens per step if known, its parents. */
class Tree(val signature: String, val tokensPerStep: Double?, val parents: IntArray)

/** What one call added: tokens, the tree's drafted tokens if the file tells them (the pending one first). */
class Round(val choice: String, val tokens: IntArray, val drafted: IntArray, val accepted: Int)

/**
 * Decodes with `model.tflite` and `manifest.json` of `jaxspec export tflite` or `export web`.
 *
 * The `profile.json` of `export web` adds chats, and the tokens that each tree is expected to give.
 * Greedy, one text at a time. Caches stay in LiteRT's buffers; each state has two, which take turns
 * as input and output, so the app copies none.
 */
class Decoder(folder: File, gpu: Boolean, threads: Int) : Closeable {
    private val manifest = JSONObject(File(folder, "manifest.json").readText())
    private val signatures = manifest.getJSONObject("signatures")
    private val profile = File(folder, "profile.json").let { if (it.isFile) JSONObject(it.readText()) else JSONObject() }.also {
        val bytes = it.optJSONObject("files")?.optJSONObject("model.tflite")?.getLong("bytes")
        require(bytes == null || bytes == File(folder, "model.tflite").length()) { "profile.json is of another model.tflite: delete it." }
        require(manifest.optInt("jaxspec_manifest") == FORMAT) { "manifest.json is of another version of jaxspec: export again." }
        require(signatures.has(PLAIN)) { "This file has no decode: the app runs causal models only." }
    }
    private val buffers = HashMap<String, Array<TensorBuffer>>()
    private val model: CompiledModel

    val capacity = manifest.getInt("capacity") // of the caches, in tokens: the longest text
    val stops = ints(manifest, "stop_token_ids").toSet()
    val trees: List<Tree> = signatures.keys().asSequence().filter { STEP.matches(it) }.sortedBy { it.drop(5).toIntOrNull() ?: 0 }.map(::treeOf).toList()
    val depth = trees.maxOfOrNull { depthOf(it.parents) } ?: 0 // a step writes depth + 1 rows

    /** Texts before and behind a message, as the model's chats have them; null: it has no chats. */
    val chat: Pair<String, String>? = profile.optJSONObject("chat")?.let { Pair(it.getString("open"), it.getString("reply")) }

    /** Ids; the last one is pending, the others are in the caches. */
    var text = IntArray(0)
        private set
    private var recent = 0 // tokens at the end that the drafter has yet to read; 0: it lacks more

    init {
        // One accelerator alone: with both, the CPU computes in silence what the GPU refuses.
        val options = CompiledModel.Options(if (gpu) Accelerator.GPU else Accelerator.CPU)
        if (gpu) {
            // Left to itself the GPU computes in half precision, in which nothing was tested.
            options.gpuOptions =
                CompiledModel.GpuOptions(precision = CompiledModel.GpuOptions.Precision.FP32)
        } else {
            // Packed weights in a file: all signatures share one copy. LiteRT does not check whose they are.
            val packed = "packed-${manifest.getString("checksum").take(16)}"
            folder.listFiles { file -> file.name.startsWith("packed-") && file.name != packed }?.forEach(File::delete)
            options.cpuOptions = CompiledModel.CpuOptions(numThreads = threads, xnnPackWeightCachePath = File(folder, packed).path)
        }
        // By its path, so that the file is mapped: an asset of this size would be copied.
        model = CompiledModel.create(File(folder, "model.tflite").path, options)
    }

    override fun close() {
        for (pair in buffers.values) for (buffer in pair) buffer.close()
        model.close()
    }

    /** Reads a prompt in parts; returns the token after it. */
    fun begin(prompt: IntArray): Int {
        require(prompt.isNotEmpty() && prompt.size < capacity) {
            "This file takes 1 to ${capacity - 1} tokens, got ${prompt.size}."
        }
        val sizes = signatures.keys().asSequence().filter { it.startsWith("prefill_") }.map { it.drop(8).toInt() }.sorted().toList()
        var at = 0
        var name = ""
        while (at < prompt.size) {
            val size = sizes.firstOrNull { it >= prompt.size - at } ?: sizes.last()
            // The last part may overlap what was read: reading a token again changes nothing.
            val first = maxOf(0, minOf(at, capacity - size))
            val end = minOf(first + size, prompt.size)
            name = "prefill_$size"
            call(
                name,
                mapOf(
                    "prompt" to prompt.copyOfRange(first, end).copyOf(size),
                    "count" to intArrayOf(end - first),
                    "length" to intArrayOf(first),
                    "following" to intArrayOf(if (end < prompt.size) prompt[end] else 0),
                ),
            )
            at = first + size
        }
        val next = read(name, OUT + "pending")[0]
        text = prompt + next
        recent = 1
        return next
    }

    /** True if a step still fits: LiteRT overwrites rows in silence. */
    fun fits(choice: String): Boolean = text.size < capacity && (choice == PLAIN || text.size + depth <= capacity)

    /** Emits tokens: one with PLAIN, up to a tree's depth + 1 with the signature of a tree. */
    fun advance(choice: String): Round {
        val values = inputs(choice)
        call(choice, values)
        if (choice == PLAIN) {
            val token = read(PLAIN, OUT + "pending")
            text += token
            recent = 0 // the drafter does not follow; so a text stays with plain decoding
            return Round(PLAIN, token, IntArray(0), 0)
        }
        val tokens: IntArray
        var drafted = IntArray(0)
        if (REPORT in outputs(choice)) {
            val report = read(choice, REPORT) // count, the rows of o_tokens, the drafted tokens
            tokens = report.copyOfRange(1, 1 + report[0])
            drafted = report.copyOfRange(1 + depth + 1, report.size)
        } else {
            tokens = read(choice, OUT + "tokens").copyOf(read(choice, OUT + "count")[0])
        }
        text += tokens
        recent = tokens.size
        return Round(choice, tokens, drafted, tokens.size - 1)
    }

    /** Returns the milliseconds of one call; only its time counts, and the text is begun anew. */
    fun time(choice: String): Double {
        val begin = System.nanoTime()
        call(choice, inputs(choice))
        read(choice, if (choice == PLAIN) OUT + "pending" else if (REPORT in outputs(choice)) REPORT else OUT + "count")
        return (System.nanoTime() - begin) / 1e6
    }

    private fun inputs(choice: String): Map<String, IntArray> {
        check(choice == PLAIN || recent > 0) { "Behind plain decoding a step needs the text read anew." }
        val given = mutableMapOf("length" to intArrayOf(text.size - 1), "pending" to intArrayOf(text.last()))
        if (choice != PLAIN) {
            given["tokens"] = text.copyOfRange(text.size - recent, text.size)
            given["count"] = intArrayOf(recent)
            given["text"] = text // only lookup takes it
        }
        return given
    }

    private fun treeOf(signature: String): Tree {
        val listed = manifest.getJSONObject("trees").optJSONArray(signature) ?: manifest.getJSONArray("paths")
        val paths = (0 until listed.length()).map { at -> listed.getJSONArray(at).let { path -> (0 until path.length()).map(path::getInt) } }
        val places = mapOf(emptyList<Int>() to 0) + paths.mapIndexed { at, path -> path to at + 1 }
        val parents = intArrayOf(-1) + paths.map { places.getValue(it.dropLast(1)) }
        val known = profile.optJSONArray("trees")
        val entry = (0 until (known?.length() ?: 0)).map { known!!.getJSONObject(it) }.firstOrNull { it.getString("signature") == signature }
        return Tree(signature, entry?.getDouble("tokens_per_step"), parents)
    }

    private fun depthOf(parents: IntArray): Int {
        val depths = IntArray(parents.size)
        for (node in 1 until parents.size) depths[node] = depths[parents[node]] + 1
        return depths.max()
    }

    private fun outputs(name: String): Set<String> = signatures.getJSONObject(name).getJSONObject("outputs").keys().asSequence().toSet()

    /** Runs a signature on the state, after some of it is set to new values. */
    private fun call(name: String, values: Map<String, IntArray>) {
        val described = signatures.getJSONObject(name)
        val inputs = HashMap<String, TensorBuffer>()
        for (input in described.getJSONObject("inputs").keys()) {
            inputs[input] = state(name, input, true)[0]
            values[input]?.let { inputs.getValue(input).writeInt(it.copyOf(sizeOf(described.getJSONObject("inputs").getJSONObject(input)))) }
        }
        val written = outputs(name).associateWith { state(name, it, false) }
        model.run(inputs, written.mapValues { it.value[1] }, name)
        for (pair in written.values) pair.reverse() // buffers take turns
    }

    private fun read(name: String, output: String): IntArray = state(name, output, false)[0].readInt()

    /** Both buffers of a state, or of an output that no call takes: its value, and the spare one. */
    private fun state(signature: String, name: String, input: Boolean): Array<TensorBuffer> {
        val entry = signatures.getJSONObject(signature).getJSONObject(if (input) "inputs" else "outputs").getJSONObject(name)
        val shape = ints(entry, "shape")
        val kept = if (input) name else if (name.startsWith(OUT)) name.drop(OUT.length) else "$signature/$name"
        return buffers.getOrPut("$kept ${shape.joinToString(",")}") {
            Array(2) {
                val made = if (input) model.createInputBuffer(name, signature) else model.createOutputBuffer(name, signature)
                // LiteRT does not clear it: rows that no call has written would stay as they are.
                val size = sizeOf(entry)
                if (entry.getString("dtype") == "int32") made.writeInt(IntArray(size)) else made.writeFloat(FloatArray(size))
                made
            }
        }
    }

    private fun sizeOf(entry: JSONObject): Int = ints(entry, "shape").fold(1) { product, side -> product * side }

    private fun ints(from: JSONObject, name: String): IntArray {
        val list = from.getJSONArray(name)
        return IntArray(list.length()) { list.getInt(it) }
    }
}

/**
 * Times plain decoding and each tree in turns; returns tokens per second.
 *
 * Without a profile the tokens of a step are counted here, on the continuation of this prompt. So
 * take one whose continuation repeats as little as your texts do.
 */
fun measure(decoder: Decoder, prompt: IntArray, rounds: Int = 15): Map<String, Double> {
    val expected = mapOf(PLAIN to 1.0) + decoder.trees.associate { it.signature to (it.tokensPerStep ?: counted(decoder, prompt, it.signature)) }
    decoder.begin(prompt)
    val times = expected.keys.associateWith { ArrayList<Double>() }
    repeat(2 * rounds) { round ->
        for (choice in expected.keys) {
            val milliseconds = decoder.time(choice)
            if (round >= rounds) times.getValue(choice).add(milliseconds) // the first half warms up
        }
    }
    return expected.mapValues { 1000 * it.value / times.getValue(it.key).sorted()[rounds / 2] }
}

/** Returns the tokens of a step, the bonus included, over up to 16 steps. */
private fun counted(decoder: Decoder, prompt: IntArray, choice: String): Double {
    decoder.begin(prompt)
    val counts = ArrayList<Int>()
    while (counts.size < 16 && decoder.fits(choice) && decoder.text.last() !in decoder.stops) counts.add(decoder.advance(choice).tokens.size)
    return if (counts.isEmpty()) 1.0 else counts.average()
}
