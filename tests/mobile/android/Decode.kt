// Continues a prompt of ids with plain decoding and with each step of a file, as the app does.
import com.example.jaxspec.Decoder
import com.example.jaxspec.PLAIN
import com.example.jaxspec.measure
import java.io.File
import org.json.JSONArray
import org.json.JSONObject

fun main(words: Array<String>) {
    val decoder = Decoder(File(words[0]), gpu = false, threads = 1)
    val most = words[1].toInt()
    val prompts = words.drop(2).map { JSONArray(it).let { ids -> IntArray(ids.length(), ids::getInt) } }
    val texts = JSONObject()
    val drafted = JSONObject() // by the first step on the first prompt
    for (choice in listOf(PLAIN) + decoder.trees.map { it.signature }) {
        val of = JSONArray()
        for (prompt in prompts) {
            decoder.begin(prompt)
            val counts = JSONArray(listOf(1))
            while (decoder.text.size - prompt.size < most && decoder.fits(PLAIN)) {
                val round = decoder.advance(if (decoder.fits(choice)) choice else PLAIN)
                counts.put(round.tokens.size)
                if (!drafted.has(choice)) drafted.put(choice, JSONArray(round.drafted))
            }
            val text = decoder.text.take(decoder.capacity).drop(prompt.size) // the last step may end behind it
            of.put(JSONObject().put("tokens", JSONArray(text)).put("counts", counts))
        }
        texts.put(choice, of)
    }
    val parents = JSONObject(decoder.trees.associate { it.signature to JSONArray(it.parents) })
    val speeds = measure(decoder, prompts[0], rounds = 1).keys
    decoder.close()
    val expected = decoder.trees.mapNotNull { tree -> tree.tokensPerStep?.let { tree.signature to it } }
    val chat = decoder.chat?.toList() ?: emptyList()
    val said = JSONObject().put("texts", texts).put("parents", parents).put("drafted", drafted)
    println(said.put("measured", JSONArray(speeds)).put("expected", JSONObject(expected.toMap())).put("chat", JSONArray(chat)))
}
