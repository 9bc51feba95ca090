// What stands between the matrix products: RMS norm and SiLU. A few rows are done by one thread: waking a second takes as long.
//
// Stands at form 6 of a request.    vLLM: csrc/cpu/layernorm.cpp, csrc/cpu/activation.cpp

#include "layers.h"
#include "vectors.h"

enum { ROWS_FOR_THREADS = 8 };

void rms_norm_row(const float *x, const float *weight, float *y, long size, float eps) {
    group squares = {0};
    long i = 0;
    for (; i + GROUP <= size; i += GROUP) squares += *(const group *)(x + i) * *(const group *)(x + i);
    float sum = sum_group(squares);
    for (; i < size; i++) sum += x[i] * x[i];
    const float scale = 1 / sqrtf(sum / (float)size + eps);
    for (i = 0; i < size; i++) y[i] = x[i] * scale * weight[i];
}

// x, y [n][size], weight [size]
void rms_norm(const float *x, const float *weight, float *y, long n, long size, float eps, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (n >= ROWS_FOR_THREADS)
    for (long row = 0; row < n; row++) rms_norm_row(x + row * size, weight, y + row * size, size, eps);
}

// gate_up [n][2][size] → y [n][size]: gate / (1 + e^-gate) * up
void silu_and_mul(const float *gate_up, float *y, long n, long size, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (n >= ROWS_FOR_THREADS)
    for (long row = 0; row < n; row++) {
        const float *gate = gate_up + row * 2 * size, *up = gate + size;
        float *to = y + row * size;
        for (long i = 0; i < size; i += GROUP) {
            const long width = size - i < GROUP ? size - i : GROUP;
            float lanes[GROUP] = {0};
            for (long j = 0; j < width; j++) lanes[j] = -gate[i + j];
            *(group *)lanes = exp_group(*(group *)lanes) + 1.0f;
            for (long j = 0; j < width; j++) to[i + j] = gate[i + j] / lanes[j] * up[i + j];
        }
    }
}
