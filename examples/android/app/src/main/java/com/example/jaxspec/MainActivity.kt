package com.example.jaxspec

import android.app.Activity
import android.os.Bundle
import android.text.SpannableStringBuilder
import android.text.Spanned
import android.text.style.BackgroundColorSpan
import android.view.ViewGroup.LayoutParams
import android.widget.Button
import android.widget.EditText
import android.widget.HorizontalScrollView
import android.widget.LinearLayout
import android.widget.ScrollView
import android.widget.TextView
import java.io.File
import java.util.concurrent.Executors

/**
 * One screen: a prompt, the text as it grows (drafted tokens are marked), its speed, the step's
 * tree, and what this phone measured. The folder of `jaxspec export web` is read from the app's own
 * folder for files, into which `adb push` can write.
 */
class MainActivity : Activity() {
    private val worker = Executors.newSingleThreadExecutor() // of all calls of LiteRT
    private lateinit var shown: TextView
    private lateinit var speed: TextView
    private lateinit var measured: TextView
    private lateinit var tree: TreeView
    private lateinit var send: Button
    private var decoder: Decoder? = null
    private var tokenizer: Tokenizer? = null
    private var choice = PLAIN

    override fun onCreate(savedInstanceState: Bundle?) {
        super.onCreate(savedInstanceState)
        shown = TextView(this).apply { textSize = 16f }
        speed = TextView(this)
        measured = TextView(this)
        tree = TreeView(this)
        val prompt = EditText(this).apply { setText("Emma reads 20 pages a day. How many pages does she read in 5 days?") }
        send = Button(this).apply {
            text = "Send"
            isEnabled = false
            setOnClickListener {
                isEnabled = false
                val asked = prompt.text.toString()
                worker.execute { guarded { answer(asked) } }
            }
        }
        val column = LinearLayout(this).apply {
            orientation = LinearLayout.VERTICAL
            setPadding(24, 24, 24, 24)
        }
        val scrolled = HorizontalScrollView(this).apply {
            isScrollbarFadingEnabled = false
            addView(tree)
        }
        for (view in listOf(prompt, send, shown, speed, scrolled, measured)) {
            column.addView(view, LinearLayout.LayoutParams(LayoutParams.MATCH_PARENT, LayoutParams.WRAP_CONTENT))
        }
        setContentView(ScrollView(this).apply { addView(column) })
        worker.execute { guarded { open() } }
    }

    override fun onDestroy() {
        worker.execute { decoder?.close() }
        worker.shutdown()
        super.onDestroy()
    }

    private fun open() {
        val folder = File(getExternalFilesDir(null), "model")
        require(File(folder, "model.tflite").isFile) {
            "There is no model: adb push FOLDER/. $folder, with a FOLDER of jaxspec export web."
        }
        say("Opening the model.")
        val made = Tokenizer(File(folder, "tokenizer.json"))
        val opened = Decoder(folder, gpu = false, threads = 2)
        say("Measuring this phone: plain decoding and each tree, in turns.")
        val speeds = measure(opened, made.encode("one, two, three, one, two,", true))
        tokenizer = made
        decoder = opened
        choice = speeds.entries.maxByOrNull { it.value }!!.key
        val lines = speeds.entries.joinToString("\n") { (name, value) ->
            "${if (name == choice) "\u2192" else " "} $name: %.1f tokens/s expected".format(value)
        }
        runOnUiThread {
            measured.text = lines
            shown.text = ""
            send.isEnabled = true
        }
    }

    private fun answer(asked: String) {
        val decoder = decoder!!
        val tokenizer = tokenizer!!
        val chat = decoder.chat
        val prompt = if (chat == null) tokenizer.encode(asked, true) else tokenizer.encode(chat.first + asked + chat.second, false)
        val text = ArrayList<Pair<Int, Boolean>>() // ids, and whether they were drafted
        text.add(Pair(decoder.begin(prompt), false))
        var ended = text[0].first in decoder.stops
        var calls = 0
        val begin = System.nanoTime()
        while (!ended && text.size < MOST && decoder.fits(PLAIN)) {
            val round = decoder.advance(if (decoder.fits(choice)) choice else PLAIN)
            calls++
            for ((place, token) in round.tokens.withIndex()) {
                if (ended || text.size == MOST) break
                text.add(Pair(token, place < round.accepted))
                ended = token in decoder.stops
            }
            val seconds = (System.nanoTime() - begin) / 1e9
            show(text.toList(), round, (text.size - 1) / seconds, (text.size - 1).toDouble() / calls)
        }
        runOnUiThread { send.isEnabled = true }
    }

    private fun show(text: List<Pair<Int, Boolean>>, round: Round, perSecond: Double, perCall: Double) {
        val tokenizer = tokenizer!!
        val words = SpannableStringBuilder()
        for (index in text.indices) {
            val (id, drafted) = text[index]
            val start = words.length
            words.append(tokenizer.decode(intArrayOf(id)))
            if (drafted) words.setSpan(BackgroundColorSpan(0x330B5CAD), start, words.length, Spanned.SPAN_EXCLUSIVE_EXCLUSIVE)
        }
        val parents = decoder!!.trees.firstOrNull { it.signature == round.choice }?.parents ?: IntArray(0)
        val names = round.drafted.map { tokenizer.decode(intArrayOf(it)) }
        val path = acceptedPath(parents, round.drafted, round.tokens)
        runOnUiThread {
            shown.text = words
            speed.text = "%.1f tokens/s, %.2f tokens a call".format(perSecond, perCall)
            tree.show(parents, names, path)
        }
    }

    /** The nodes of the emitted tokens but the last, from the root down. */
    private fun acceptedPath(parents: IntArray, drafted: IntArray, tokens: IntArray): Set<Int> {
        val path = linkedSetOf(0)
        var last = 0
        for (token in tokens.dropLast(1)) {
            last = parents.indices.firstOrNull { parents[it] == last && drafted[it] == token } ?: break
            path.add(last)
        }
        return path
    }

    private fun say(text: String) = runOnUiThread { shown.text = text }

    private fun guarded(work: () -> Unit) {
        try {
            work()
        } catch (error: Exception) {
            say("${error.message}")
            runOnUiThread { send.isEnabled = decoder != null }
        }
    }

    private companion object {
        const val MOST = 256 // tokens of an answer
    }
}
