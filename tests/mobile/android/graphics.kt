package android.graphics

open class PathEffect

class DashPathEffect(intervals: FloatArray, phase: Float) : PathEffect()

class Paint(flags: Int) {
    var textSize: Float = 0f
    var strokeWidth: Float = 0f
    var color: Int = 0
    var isFakeBoldText: Boolean = false
    var pathEffect: PathEffect? = null

    companion object {
        const val ANTI_ALIAS_FLAG = 1
    }
}

class Canvas {
    fun drawText(text: String, x: Float, y: Float, paint: Paint): Unit = TODO()
    fun drawLine(startX: Float, startY: Float, stopX: Float, stopY: Float, paint: Paint): Unit = TODO()
}
