package android.content.res

class Resources {
    val displayMetrics: android.util.DisplayMetrics get() = TODO()
}
