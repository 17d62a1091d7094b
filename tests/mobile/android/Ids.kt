// Reads a line of JSON for each text; prints the ids, or why there are none.
import com.example.jaxspec.Tokenizer
import java.io.File
import org.json.JSONArray

fun main(words: Array<String>) {
    val tokenizer = Tokenizer(File(words[0]))
    for (line in System.`in`.bufferedReader(Charsets.UTF_8).lineSequence()) {
        val ids = tokenizer.encode(JSONArray(line).getString(0), true)
        println(ids.joinToString(",", "[", "]"))
    }
}
