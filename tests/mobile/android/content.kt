package android.content

open class Context {
    val resources: android.content.res.Resources get() = TODO()
    fun getExternalFilesDir(type: String?): java.io.File? = TODO()
}
