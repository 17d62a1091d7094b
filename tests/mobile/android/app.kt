package android.app

open class Activity : android.content.Context() {
    open fun onCreate(savedInstanceState: android.os.Bundle?): Unit = TODO()
    open fun onDestroy(): Unit = TODO()
    fun setContentView(view: android.view.View): Unit = TODO()
    fun runOnUiThread(action: () -> Unit): Unit = TODO()
}
