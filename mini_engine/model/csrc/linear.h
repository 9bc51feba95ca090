// What both kinds of matrix product share: y (+)= x W^T + b, computed in panels of PANEL outputs.
//
// At few rows a product takes as long as reading its weights, so they are read once, in order, from a layout made for it: a panel's
// weights by input. At many rows it takes as long as its arithmetic, so some rows at a time keep their sums in registers while the panel
// comes from the cache.
//
// Stands at form 6 of a request.    vLLM: csrc/cpu/sgl-kernels/gemm.h

#pragma once

#include "vectors.h"

// Where a panel's sums go: rows of `stride`, of which the panel has the first `width` columns.
typedef struct {
    float *y;
    const float *bias;
    long stride;
    int width, accumulate;
} Target;

INLINE Target target(float *y, const float *bias, long out, long panel, int accumulate) {
    const long first = panel * PANEL, width = out - first < PANEL ? out - first : PANEL;
    return (Target){y + first, bias ? bias + first : 0, out, (int)width, accumulate};
}

// sums [PANEL]
INLINE void store(const Target *to, long row, const float *sums) {
    float *y = to->y + row * to->stride;
    for (int j = 0; j < to->width; j++) y[j] = sums[j] + (to->bias ? to->bias[j] : 0) + (to->accumulate ? y[j] : 0);
}
