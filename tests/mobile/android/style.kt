package android.text.style

class BackgroundColorSpan(color: Int)
