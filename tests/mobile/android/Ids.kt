// Reads a line of JSON for each text; prints its ids, and the bytes of the text that grows from them.
import com.example.jaxspec.GrowingText
import com.example.jaxspec.Tokenizer
import java.io.File
import org.json.JSONArray

fun main(words: Array<String>) {
    val tokenizer = Tokenizer(File(words[0]))
    for (line in System.`in`.bufferedReader(Charsets.UTF_8).lineSequence()) {
        val ids = tokenizer.encode(JSONArray(line).getString(0), true)
        val growing = GrowingText(tokenizer)
        val text = ids.joinToString("") { growing.push(it) }.toByteArray().map { it.toInt() and 255 }
        println("[${ids.toList()}, $text]")
    }
}
