// The matrix products with weights of 8 bits, and activations quantised at each call: one scale for each row, so that a row's numbers
// never depend on its neighbours, and two terms, the second for what the first rounded away. A decoder's activations have outliers, and
// one term costs five times more quality than the weights do. Twice the arithmetic, but a quarter of the bytes to read.
//
//      panel p   [in4 / 4][PANEL][4]   w[i][j][0..4) = 128 + round(W[p * PANEL + j][4 i .. 4 i + 4) / scale[p * PANEL + j])
//
// in4 is `in` rounded up to 4; what is past W is 128, a weight of 0.
//
// Stands at form 6 of a request.    vLLM: csrc/cpu/sgl-kernels/gemm_int8.cpp

#include <string.h>
#include "linear.h"
#if defined __AVX2__
#include <immintrin.h>
#endif

enum {
    LEVELS = 63,  // a level is in [-63, 63]: without VNNI, two products of 8 bits are added in 16
    TERMS = 2,    // of an activation: its nearest level, and what that rounded away in units of scale / (2 * LEVELS)
};

typedef int32_t four_levels __attribute__((aligned(1), may_alias));

// sums[j] + the product of weights[j]'s four unsigned bytes and the levels' four signed ones. The instructions multiply unsigned by signed,
// so weights are stored as w + 128: the sum of (w + 128) * level is that of w * level, plus 128 times the sum of the levels, which
// tile_i8 takes out again. VNNI adds four products in 32 bits; before it, two are added in 16 bits, then two of those in 32.
INLINE ivec dot4(ivec sums, ivec weights, ivec levels) {
#if defined __AVX512VNNI__
    return (ivec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)levels);
#elif defined __AVX512BW__
    return sums + (ivec)_mm512_madd_epi16(_mm512_maddubs_epi16((__m512i)weights, (__m512i)levels), _mm512_set1_epi16(1));
#elif defined __AVX2__
    return sums + (ivec)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)weights, (__m256i)levels), _mm256_set1_epi16(1));
#else
    for (int byte = 0; byte < 32; byte += 8) sums += ((weights >> byte) & 255) * ((levels << (24 - byte)) >> 24);
    return sums;
#endif
}

// A row x [in] as levels [TERMS][in4], zeros past `in`, and their sums [TERMS]. x ~ scale * (levels[0] + levels[1] / (2 * LEVELS)).
static void quantize_row(const float *x, long in, long in4, int8_t *levels, float *scale, int32_t *totals) {
    int32_t peak = 0;  // the largest magnitude, compared as bits: NaN is above infinity, and not lost
    for (long i = 0; i < in; i++) {
        int32_t bits;
        memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff;
        peak = bits > peak ? bits : peak;
    }
    memcpy(scale, &peak, 4);
    *scale = *scale < 1e-30f ? 1e-30f : *scale / LEVELS;  // a row of zeros stays one
    memset(levels, 0, TERMS * in4);
    totals[0] = totals[1] = 0;
    if (!isfinite(*scale)) return;  // 0 times that is NaN
    for (long i = 0; i < in; i++) {
        const float exact = x[i] / *scale, nearest = rintf(exact), rest = rintf((exact - nearest) * (2 * LEVELS));
        levels[i] = (int8_t)nearest;
        levels[in4 + i] = (int8_t)rest;
        totals[0] += levels[i];
        totals[1] += levels[in4 + i];
    }
}

// levels [n][TERMS][in4], scales [n], totals [n][TERMS], panel [in4 / 4][PANEL][4], weight_scales [PANEL]
INLINE void tile_i8(
    const int rows, const int8_t *levels, const float *scales, const int32_t *totals, long in4, const uint8_t *panel,
    const float *weight_scales, const Target *to, long row
) {
    ivec sums[MAX_ROWS / TERMS][TERMS][VECTORS] = {0};
    levels += row * TERMS * in4;
    for (long i = 0; i < in4; i += 4, panel += 4 * PANEL) {
        const ivec w0 = *(const ivec *)panel, w1 = *(const ivec *)(panel + 4 * LANES);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
            for (int term = 0; term < TERMS; term++) {
                const ivec four = (ivec){} + *(const four_levels *)(levels + (r * TERMS + term) * in4 + i);
                sums[r][term][0] = dot4(sums[r][term][0], w0, four);
                sums[r][term][1] = dot4(sums[r][term][1], w1, four);
            }
    }
    for (int r = 0; r < rows; r++) {
        const int32_t *first = (const int32_t *)sums[r][0], *rest = (const int32_t *)sums[r][1], *total = totals + (row + r) * TERMS;
        float values[PANEL];
        for (int j = 0; j < PANEL; j++) {
            const float sum = (float)(first[j] - 128 * total[0]) + (float)(rest[j] - 128 * total[1]) / (2 * LEVELS);
            values[j] = sum * scales[row + r] * weight_scales[j];
        }
        store(to, row + r, values);
    }
}

// x [n][in], weight [panels] as above, weight_scales [panels * PANEL], bias [out] or null, y [n][out];
// scratch: n * (TERMS * (in4 + 4) + 4) bytes for levels, scales and totals
void linear_i8(
    const float *x, long n, long in, const uint8_t *weight, const float *weight_scales, const float *bias, float *y, long out,
    int accumulate, int8_t *scratch, int threads
) {
    const long panels = (out + PANEL - 1) / PANEL, in4 = (in + 3) / 4 * 4;
    float *scales = (float *)(scratch + n * TERMS * in4);
    int32_t *totals = (int32_t *)(scales + n);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (long row = 0; row < n; row++)
            quantize_row(x + row * in, in, in4, scratch + row * TERMS * in4, scales + row, totals + row * TERMS);
#pragma omp for schedule(static)
        for (long p = 0; p < panels; p++) {
            const Target to = target(y, bias, out, p, accumulate);
            for (long row = 0; row < n;) {
                const int rows = tile_rows(n - row, MAX_ROWS / TERMS);
#define TILE(constant) tile_i8(constant, scratch, scales, totals, in4, weight + p * in4 * PANEL, weight_scales + p * PANEL, &to, row)
                WITH_CONSTANT(rows, MAX_ROWS / TERMS, TILE);
                row += rows;
            }
        }
    }
}
