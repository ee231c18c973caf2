/* Runs draft steps of an ONNX file: arm64_steps MODEL STEPS RESULTS KV_HEADS ROW_HEADS HEAD_DIM.
 *
 * STEPS and RESULTS as of android_demo/engines, Steps.kt. An error is one line on standard error. */
#include <onnxruntime_c_api.h>
#include <stdio.h>
#include <stdlib.h>

static const OrtApi *api;

static void must(OrtStatus *status) {
    if (!status) return;
    fprintf(stderr, "%s\n", api->GetErrorMessage(status));
    exit(1);
}

int main(int count, char **arguments) {
    if (count != 7) return 2;
    const char *inputs[] = {"tokens", "positions", "wanted", "sa_mask", "sa_keys", "sa_values", "row_keys",
                            "row_values"};
    const char *outputs[] = {"logits", "new_keys", "new_values"};
    int64_t heads = atoi(arguments[4]), row_heads = atoi(arguments[5]), width = atoi(arguments[6]);
    FILE *steps = fopen(arguments[2], "rb"), *results = fopen(arguments[3], "wb");
    if (!steps || !results) return 2;
    OrtEnv *environment;
    OrtSessionOptions *options;
    OrtSession *session;
    OrtMemoryInfo *memory;
    api = OrtGetApiBase()->GetApi(ORT_API_VERSION);
    must(api->CreateEnv(ORT_LOGGING_LEVEL_ERROR, "", &environment));
    must(api->CreateSessionOptions(&options));
    must(api->SetIntraOpNumThreads(options, 1));
    must(api->CreateSession(environment, arguments[1], options, &session));
    must(api->CreateCpuMemoryInfo(OrtDeviceAllocator, OrtMemTypeDefault, &memory));
    int32_t sizes[4];
    while (fread(sizes, 4, 4, steps) == 4) {
        int64_t n = sizes[0], wanted = sizes[1], past = sizes[2], rows = sizes[3];
        int64_t shapes[8][3] = {{n}, {n}, {wanted}, {n, past + n}, {past, heads, width}, {past, heads, width},
                                {rows, row_heads, width}, {rows, row_heads, width}};
        const int dimensions[8] = {1, 1, 1, 2, 3, 3, 3, 3};
        OrtValue *values[8], *found[3] = {0};
        void *data[8];
        for (int i = 0; i < 8; i++) {
            size_t bytes = i < 3 ? 8 : 4;
            for (int d = 0; d < dimensions[i]; d++) bytes *= shapes[i][d];
            data[i] = malloc(bytes + 1);
            if (fread(data[i], 1, bytes, steps) != bytes) return 2;
            ONNXTensorElementDataType type =
                i < 3 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
            must(api->CreateTensorWithDataAsOrtValue(memory, data[i], bytes, shapes[i], dimensions[i], type,
                                                     &values[i]));
        }
        must(api->Run(session, 0, inputs, (const OrtValue *const *)values, 8, outputs, 3, found));
        for (int i = 0; i < 3; i++) {
            OrtTensorTypeAndShapeInfo *shape;
            size_t size;
            void *result;
            must(api->GetTensorTypeAndShape(found[i], &shape));
            must(api->GetTensorShapeElementCount(shape, &size));
            must(api->GetTensorMutableData(found[i], &result));
            fwrite(result, 4, size, results);
            api->ReleaseTensorTypeAndShapeInfo(shape);
            api->ReleaseValue(found[i]);
        }
        for (int i = 0; i < 8; i++) {
            api->ReleaseValue(values[i]);
            free(data[i]);
        }
    }
    return fclose(results) ? 2 : 0;
}
