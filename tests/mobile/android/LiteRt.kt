// The part of LiteRT 2.3.0's Kotlin API that examples/android calls. Each call is a line to the test,
// which answers with a line: it holds the buffers and runs the file with LiteRT's Python package.
package com.google.ai.edge.litert

import org.json.JSONArray
import org.json.JSONObject

private var made = 0

private fun ask(vararg request: Any?): JSONArray {
    println(JSONArray(request))
    return JSONArray(readln())
}

enum class Accelerator { NONE, CPU, GPU, NPU }

class LiteRtException(message: String) : Exception(message)

class TensorBuffer internal constructor(private val input: Boolean, private val name: String, private val signature: String?) : AutoCloseable {
    internal val id = made++

    init {
        ask("buffer", id, input, signature, name)
    }

    fun writeInt(data: IntArray) {
        ask("write", id, JSONArray(data))
    }

    fun writeFloat(data: FloatArray) {
        ask("write", id, JSONArray(data))
    }

    fun readInt(): IntArray = ask("read", id).let { IntArray(it.length(), it::getInt) }

    override fun close() {
        ask("close", id)
    }
}

class CompiledModel private constructor() : AutoCloseable {
    data class CpuOptions(
        val numThreads: Int? = null,
        val xnnPackFlags: Int? = null,
        val xnnPackWeightCachePath: String? = null,
    )

    data class GpuOptions(
        val constantTensorSharing: Boolean? = null,
        val infiniteFloatCapping: Boolean? = null,
        val benchmarkMode: Boolean? = null,
        val allowSrcQuantizedFcConvOps: Boolean? = null,
        val precision: Precision? = null,
    ) {
        enum class Precision { DEFAULT, FP16, FP32 }
    }

    class Options(vararg val accelerators: Accelerator) {
        var cpuOptions: CpuOptions? = null
        var gpuOptions: GpuOptions? = null
    }

    fun createInputBuffer(inputName: String, signature: String? = null) = TensorBuffer(true, inputName, signature)

    fun createOutputBuffer(outputName: String, signature: String? = null) = TensorBuffer(false, outputName, signature)

    fun run(inputs: Map<String, TensorBuffer>, outputs: Map<String, TensorBuffer>, signature: String? = null) {
        ask("run", signature, JSONObject(inputs.mapValues { it.value.id }), JSONObject(outputs.mapValues { it.value.id }))
    }

    override fun close() {
        ask("close")
    }

    companion object {
        fun create(filePath: String, options: Options): CompiledModel {
            val packed = options.cpuOptions?.xnnPackWeightCachePath
            ask("open", filePath, JSONArray(options.accelerators.map { it.name }), packed)
            return CompiledModel()
        }
    }
}
