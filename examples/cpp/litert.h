// The functions of LiteRT's C API that this program calls, as libLiteRt.so of version 2.3.0 exports
// them. LiteRT's own headers (litert/c) declare the same and may be included instead.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
typedef struct LiteRtEnvironmentT* LiteRtEnvironment;
typedef struct LiteRtModelT* LiteRtModel;
typedef struct LiteRtSignatureT* LiteRtSignature;
typedef struct LiteRtTensorT* LiteRtTensor;
typedef struct LiteRtOptionsT* LiteRtOptions;
typedef struct LiteRtOpaqueOptionsT* LiteRtOpaqueOptions;
typedef struct LiteRtCompiledModelT* LiteRtCompiledModel;
typedef struct LiteRtTensorBufferT* LiteRtTensorBuffer;
typedef struct LiteRtTensorBufferRequirementsT* LiteRtTensorBufferRequirements;
typedef struct LiteRtEnvOption LiteRtEnvOption;

typedef int LiteRtStatus;  // 0: all is well
typedef size_t LiteRtParamIndex;
enum { kLiteRtHwAcceleratorCpu = 1, kLiteRtHwAcceleratorGpu = 2 };
typedef enum { kLiteRtElementTypeFloat32 = 1, kLiteRtElementTypeInt32 = 2 } LiteRtElementType;
typedef enum {
  kLiteRtTensorBufferLockModeRead = 0,
  kLiteRtTensorBufferLockModeWrite = 1,
} LiteRtTensorBufferLockMode;

typedef struct {
  unsigned int rank : 7;
  bool has_strides : 1;
  int32_t dimensions[8];
  uint32_t strides[8];
} LiteRtLayout;
typedef struct {
  LiteRtElementType element_type;
  LiteRtLayout layout;
} LiteRtRankedTensorType;

LiteRtStatus LiteRtCreateEnvironment(int num_options, const LiteRtEnvOption* options,
                                     LiteRtEnvironment* environment);
void LiteRtDestroyEnvironment(LiteRtEnvironment environment);

LiteRtStatus LiteRtCreateModelFromFile(LiteRtEnvironment environment, const char* path,
                                       LiteRtModel* model);
void LiteRtDestroyModel(LiteRtModel model);
LiteRtStatus LiteRtGetModelMetadata(LiteRtModel model, const char* key, const void** data,
                                    size_t* size);
LiteRtStatus LiteRtGetNumModelSignatures(LiteRtModel model, LiteRtParamIndex* count);
LiteRtStatus LiteRtGetModelSignature(LiteRtModel model, LiteRtParamIndex index,
                                     LiteRtSignature* signature);
LiteRtStatus LiteRtGetSignatureKey(LiteRtSignature signature, const char** key);
LiteRtStatus LiteRtGetNumSignatureInputs(LiteRtSignature signature, LiteRtParamIndex* count);
LiteRtStatus LiteRtGetSignatureInputName(LiteRtSignature signature, LiteRtParamIndex index,
                                         const char** name);
LiteRtStatus LiteRtGetSignatureInputTensorByIndex(LiteRtSignature signature, LiteRtParamIndex index,
                                                  LiteRtTensor* tensor);
LiteRtStatus LiteRtGetNumSignatureOutputs(LiteRtSignature signature, LiteRtParamIndex* count);
LiteRtStatus LiteRtGetSignatureOutputName(LiteRtSignature signature, LiteRtParamIndex index,
                                          const char** name);
LiteRtStatus LiteRtGetSignatureOutputTensorByIndex(LiteRtSignature signature,
                                                   LiteRtParamIndex index, LiteRtTensor* tensor);
LiteRtStatus LiteRtGetRankedTensorType(LiteRtTensor tensor, LiteRtRankedTensorType* type);

LiteRtStatus LiteRtCreateOptions(LiteRtOptions* options);
void LiteRtDestroyOptions(LiteRtOptions options);
LiteRtStatus LiteRtSetOptionsHardwareAccelerators(LiteRtOptions options, int accelerators);
LiteRtStatus LiteRtCreateOpaqueOptions(const char* identifier, void* payload,
                                       void (*destroy)(void* payload),
                                       LiteRtOpaqueOptions* options);
LiteRtStatus LiteRtAddOpaqueOptions(LiteRtOptions options, LiteRtOpaqueOptions added);

LiteRtStatus LiteRtCreateCompiledModel(LiteRtEnvironment environment, LiteRtModel model,
                                       LiteRtOptions options, LiteRtCompiledModel* compiled);
void LiteRtDestroyCompiledModel(LiteRtCompiledModel compiled);
LiteRtStatus LiteRtCompiledModelIsFullyAccelerated(LiteRtCompiledModel compiled, bool* fully);
LiteRtStatus LiteRtGetCompiledModelInputBufferRequirements(
    LiteRtCompiledModel compiled, LiteRtParamIndex signature, LiteRtParamIndex input,
    LiteRtTensorBufferRequirements* requirements);
LiteRtStatus LiteRtGetCompiledModelOutputBufferRequirements(
    LiteRtCompiledModel compiled, LiteRtParamIndex signature, LiteRtParamIndex output,
    LiteRtTensorBufferRequirements* requirements);
LiteRtStatus LiteRtRunCompiledModel(LiteRtCompiledModel compiled, LiteRtParamIndex signature,
                                    size_t num_inputs, LiteRtTensorBuffer* inputs,
                                    size_t num_outputs, LiteRtTensorBuffer* outputs);

LiteRtStatus LiteRtCreateManagedTensorBufferFromRequirements(
    LiteRtEnvironment environment, const LiteRtRankedTensorType* type,
    LiteRtTensorBufferRequirements requirements, LiteRtTensorBuffer* buffer);
void LiteRtDestroyTensorBuffer(LiteRtTensorBuffer buffer);
LiteRtStatus LiteRtGetTensorBufferPackedSize(LiteRtTensorBuffer buffer, size_t* bytes);
LiteRtStatus LiteRtLockTensorBuffer(LiteRtTensorBuffer buffer, void** memory,
                                    LiteRtTensorBufferLockMode mode);
LiteRtStatus LiteRtUnlockTensorBuffer(LiteRtTensorBuffer buffer);
}
