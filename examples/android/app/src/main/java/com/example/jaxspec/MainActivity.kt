package com.example.jaxspec

import android.app.Activity
import android.os.Bundle
import android.text.SpannableStringBuilder
import android.text.Spanned
import android.text.style.BackgroundColorSpan
import android.view.ViewGroup.LayoutParams
import android.widget.Button
import android.widget.CheckBox
import android.widget.EditText
import android.widget.HorizontalScrollView
import android.widget.LinearLayout
import android.widget.ScrollView
import android.widget.TextView
import java.io.File
import java.util.concurrent.Executors

/**
 * One screen: a prompt, the text as it grows (drafted tokens are marked), its speed, the step's
 * tree, and what this phone measured. The folder of `jaxspec export` is read from the app's own
 * folder for files, into which `adb push` can write.
 */
class MainActivity : Activity() {
    private val worker = Executors.newSingleThreadExecutor() // of all calls of LiteRT
    private lateinit var shown: TextView
    private lateinit var speed: TextView
    private lateinit var measured: TextView
    private lateinit var drawn: TreeView
    private lateinit var send: Button
    private lateinit var stop: Button
    private lateinit var gpu: CheckBox
    private var decoder: Decoder? = null
    private var tokenizer: Tokenizer? = null
    private var choice = PLAIN
    @Volatile private var stopped = false

    override fun onCreate(savedInstanceState: Bundle?) {
        super.onCreate(savedInstanceState)
        shown = TextView(this).apply { textSize = 16f }
        speed = TextView(this)
        measured = TextView(this)
        drawn = TreeView(this)
        val prompt = EditText(this).apply { setText(QUESTION) }
        send = Button(this).apply {
            text = "Send"
            isEnabled = false
            setOnClickListener {
                val asked = prompt.text.toString()
                start { answer(asked) }
            }
        }
        stop = Button(this).apply {
            text = "Stop"
            isEnabled = false
            setOnClickListener { stopped = true }
        }
        gpu = CheckBox(this).apply {
            text = "GPU"
            setOnClickListener {
                val asked = isChecked
                start { open(asked) }
            }
        }
        val column = LinearLayout(this).apply {
            orientation = LinearLayout.VERTICAL
            setPadding(24, 24, 24, 24)
        }
        val scrolled = HorizontalScrollView(this).apply {
            isScrollbarFadingEnabled = false
            addView(drawn)
        }
        for (view in listOf(gpu, prompt, send, stop, shown, speed, scrolled, measured)) {
            column.addView(view, LinearLayout.LayoutParams(LayoutParams.MATCH_PARENT, LayoutParams.WRAP_CONTENT))
        }
        setContentView(ScrollView(this).apply {
            fitsSystemWindows = true // from Android 15 on, a screen lies below the bars otherwise
            addView(column)
        })
        start { open(false) }
    }

    override fun onDestroy() {
        stopped = true
        worker.execute { decoder?.close() }
        worker.shutdown()
        super.onDestroy()
    }

    /** Opens the model, anew if there is one, and measures what is fastest. */
    private fun open(gpu: Boolean) {
        decoder?.close()
        decoder = null
        choice = PLAIN
        val folder = File(getExternalFilesDir(null), "model")
        require(File(folder, "model.tflite").isFile) {
            "There is no model: adb push FOLDER/. $folder, with a FOLDER of jaxspec export."
        }
        say("Opening the model.")
        val made = Tokenizer(File(folder, "tokenizer.json"))
        tokenizer = made
        val opened = Decoder(folder, gpu, threads = 2)
        decoder = opened
        say("Measuring this phone: plain decoding and each tree, in turns.")
        val speeds = measure(opened, made.encode(QUESTION, true))
        choice = speeds.entries.maxByOrNull { it.value }!!.key
        val lines = speeds.entries.joinToString("\n") { (name, value) ->
            "${if (name == choice) "\u2192" else " "} $name: %.1f tokens/s expected".format(value)
        }
        runOnUiThread {
            measured.text = lines
            shown.text = ""
        }
    }

    private fun answer(asked: String) {
        val decoder = decoder!!
        val tokenizer = tokenizer!!
        val chat = decoder.chat
        val prompt = if (chat == null) tokenizer.encode(asked, true) else tokenizer.encode(chat.first + asked + chat.second, false)
        runOnUiThread {
            shown.text = ""
            stop.isEnabled = true
        }
        val text = ArrayList<Pair<String, Boolean>>() // of each token, and whether it was drafted
        val growing = GrowingText(tokenizer)
        var ended = false
        fun add(tokens: IntArray, accepted: Int) {
            for ((place, token) in tokens.withIndex()) {
                if (ended) break
                text.add(Pair(growing.push(token), place < accepted))
                ended = token in decoder.stops || text.size == minOf(MOST, decoder.capacity - prompt.size)
            }
            show(text)
        }
        add(intArrayOf(decoder.begin(prompt)), 0)
        var calls = 0
        val begin = System.nanoTime()
        while (!ended && !stopped && decoder.fits(PLAIN)) {
            val round = decoder.advance(if (decoder.fits(choice)) choice else PLAIN)
            calls++
            add(round.tokens, round.accepted)
            val seconds = (System.nanoTime() - begin) / 1e9
            report(round, (text.size - 1) / seconds, (text.size - 1).toDouble() / calls)
        }
    }

    private fun show(text: List<Pair<String, Boolean>>) {
        val words = SpannableStringBuilder()
        for ((piece, drafted) in text) {
            val start = words.length
            words.append(piece)
            if (drafted) words.setSpan(BackgroundColorSpan(0x330B5CAD), start, words.length, Spanned.SPAN_EXCLUSIVE_EXCLUSIVE)
        }
        runOnUiThread { shown.text = words }
    }

    private fun report(round: Round, perSecond: Double, perCall: Double) {
        val tree = decoder!!.trees.firstOrNull { it.signature == round.choice }
        val parents = if (tree == null || round.drafted.isEmpty()) IntArray(0) else tree.parents // nothing to draw
        val names = round.drafted.map { String(tokenizer!!.bytes(it), Charsets.UTF_8) }
        val path = acceptedPath(parents, round.drafted, round.tokens)
        runOnUiThread {
            speed.text = "%.1f tokens/s, %.2f tokens a call".format(perSecond, perCall)
            drawn.show(parents, names, path)
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

    /** Runs work on the worker's thread; meanwhile nothing else can be asked for. */
    private fun start(work: () -> Unit) {
        stopped = false
        send.isEnabled = false
        gpu.isEnabled = false
        worker.execute {
            try {
                work()
            } catch (error: Throwable) { // also an OutOfMemoryError, which a large tokenizer may end in
                say(error.message ?: "$error")
            }
            val opened = decoder != null
            runOnUiThread {
                send.isEnabled = opened
                stop.isEnabled = false
                gpu.isEnabled = true
            }
        }
    }

    private companion object {
        const val MOST = 256 // tokens of an answer
        const val QUESTION = "Emma reads 20 pages a day. How many pages does she read in 5 days?"
    }
}
