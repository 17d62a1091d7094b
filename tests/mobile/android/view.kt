package android.view

import android.content.Context
import android.graphics.Canvas

open class View(context: Context) {
    val resources: android.content.res.Resources get() = TODO()
    var isEnabled: Boolean = true
    var isScrollbarFadingEnabled: Boolean = true
    var fitsSystemWindows: Boolean = false
    open fun onMeasure(widthMeasureSpec: Int, heightMeasureSpec: Int): Unit = TODO()
    open fun onDraw(canvas: Canvas): Unit = TODO()
    fun setMeasuredDimension(width: Int, height: Int): Unit = TODO()
    fun requestLayout(): Unit = TODO()
    fun invalidate(): Unit = TODO()
    fun setPadding(left: Int, top: Int, right: Int, bottom: Int): Unit = TODO()
    fun setOnClickListener(listener: (View) -> Unit): Unit = TODO()
}

open class ViewGroup(context: Context) : View(context) {
    fun addView(child: View): Unit = TODO()
    fun addView(child: View, params: LayoutParams): Unit = TODO()

    open class LayoutParams {
        companion object {
            const val MATCH_PARENT = -1
            const val WRAP_CONTENT = -2
        }
    }
}
