package android.util

class DisplayMetrics {
    @JvmField val density: Float = 1f
}
