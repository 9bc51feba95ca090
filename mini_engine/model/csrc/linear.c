// The matrix products in float32: most of a step.
//
//      panel p   [in][PANEL]   w[i][j] = W[p * PANEL + j][i]; past W's last row: zeros
//
// Stands at form 6 of a request.    vLLM: csrc/cpu/dnnl_kernels.cpp; the panels: csrc/cpu/sgl-kernels/gemm.cpp

#include "linear.h"

long panel_size(void) { return PANEL; }

// `rows` is a constant wherever this is inlined, so the sums live in registers.
INLINE void tile_f32(const int rows, const float *x, long in, const float *panel, const Target *to, long row) {
    vec sums[MAX_ROWS][VECTORS] = {0};
    for (long i = 0; i < in; i++, panel += PANEL) {
        const vec w0 = *(const vec *)panel, w1 = *(const vec *)(panel + LANES);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            sums[r][0] += w0 * x[(row + r) * in + i];
            sums[r][1] += w1 * x[(row + r) * in + i];
        }
    }
    for (int r = 0; r < rows; r++) store(to, row + r, (const float *)sums[r]);
}

// x [n][in], weight [panels] as above, bias [out] or null, y [n][out]
void linear_f32(const float *x, long n, long in, const float *weight, const float *bias, float *y, long out, int accumulate, int threads) {
    const long panels = (out + PANEL - 1) / PANEL;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long p = 0; p < panels; p++) {
        const Target to = target(y, bias, out, p, accumulate);
        for (long row = 0; row < n;) {
            const int rows = tile_rows(n - row, MAX_ROWS);
#define TILE(constant) tile_f32(constant, x, in, weight + p * in * PANEL, &to, row)
            WITH_CONSTANT(rows, MAX_ROWS, TILE);
            row += rows;
        }
    }
}
