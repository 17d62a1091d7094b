package android.widget

import android.content.Context
import android.view.View
import android.view.ViewGroup

open class TextView(context: Context) : View(context) {
    var text: CharSequence = ""
    var textSize: Float = 0f
}

open class Button(context: Context) : TextView(context)

class CheckBox(context: Context) : Button(context) {
    var isChecked: Boolean = false
}

class EditText(context: Context) : View(context) { // its text is of another type than a TextView's
    val text: CharSequence get() = TODO()
    fun setText(text: CharSequence): Unit = TODO()
}

class ScrollView(context: Context) : ViewGroup(context)

class HorizontalScrollView(context: Context) : ViewGroup(context)

class LinearLayout(context: Context) : ViewGroup(context) {
    var orientation: Int = 0

    class LayoutParams(width: Int, height: Int) : ViewGroup.LayoutParams()

    companion object {
        const val VERTICAL = 1
    }
}
