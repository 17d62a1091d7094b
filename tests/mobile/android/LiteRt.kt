// The part of LiteRT 2.3.0's Kotlin API that examples/android calls, without code: for the compiler.
package com.google.ai.edge.litert

enum class Accelerator { NONE, CPU, GPU, NPU }

class LiteRtException(message: String) : Exception(message)

class TensorBuffer : AutoCloseable {
    fun writeInt(data: IntArray): Unit = TODO()
    fun writeFloat(data: FloatArray): Unit = TODO()
    fun readInt(): IntArray = TODO()
    override fun close(): Unit = TODO()
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

    class Options(vararg accelerators: Accelerator) {
        var cpuOptions: CpuOptions? = null
        var gpuOptions: GpuOptions? = null
    }

    fun createInputBuffer(inputName: String, signature: String? = null): TensorBuffer = TODO()
    fun createOutputBuffer(outputName: String, signature: String? = null): TensorBuffer = TODO()
    fun run(inputs: Map<String, TensorBuffer>, outputs: Map<String, TensorBuffer>, signature: String? = null): Unit = TODO()
    override fun close(): Unit = TODO()

    companion object {
        fun create(filePath: String, options: Options): CompiledModel = TODO()
    }
}
