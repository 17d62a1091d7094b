package android.text

interface Spanned : CharSequence {
    companion object {
        const val SPAN_EXCLUSIVE_EXCLUSIVE = 33
    }
}

class SpannableStringBuilder : Spanned {
    override val length: Int get() = TODO()
    override fun get(index: Int): Char = TODO()
    override fun subSequence(startIndex: Int, endIndex: Int): CharSequence = TODO()
    fun append(text: CharSequence): SpannableStringBuilder = TODO()
    fun setSpan(what: Any, start: Int, end: Int, flags: Int): Unit = TODO()
}
