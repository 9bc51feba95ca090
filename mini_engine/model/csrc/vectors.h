// Vectors of floats, as wide as this processor's registers, in the notation that gcc and clang share: `+` and `*` work on all lanes.
//
// Every kernel promises the same of its numbers: an output is summed in one fixed order, whatever else is in the step. So a request's
// answer is the same to the last bit alone and in a crowd, whole and in chunks.
//
// Stands at form 6 of a request.    vLLM: csrc/cpu/cpu_types_*.hpp

#pragma once

#include <math.h>
#include <stdint.h>

#if defined __AVX512BW__
enum { LANES = 16, MAX_ROWS = 12 };  // 32 registers: MAX_ROWS * VECTORS sums, the weights, a broadcast
#elif defined __AVX2__
enum { LANES = 8, MAX_ROWS = 6 };  // 16 registers
#else
enum { LANES = 4, MAX_ROWS = 12 };  // NEON: 32 registers
#endif

enum {
    VECTORS = 2,
    PANEL = VECTORS * LANES,  // outputs computed together, whose weights lie side by side
    GROUP = 16,               // tokens whose KV lies together, in one block or in a part of one
};

// aligned(4): may start at any float; may_alias: may look at an array of floats. `(group){} + x` is x in all lanes; a comparison gives ~0
// or 0 for each lane. A group may be wider than a register: the compiler splits it.
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float group __attribute__((vector_size(4 * GROUP), aligned(4), may_alias));
typedef int32_t igroup __attribute__((vector_size(4 * GROUP), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))

// Lane by lane: a where the comparison held, else b.
INLINE group blend(igroup held, group a, group b) { return (group)(((igroup)a & held) | ((igroup)b & ~held)); }

// e^x to about one unit in the last place, after Cephes' expf: 2^n times a polynomial of what is left. Below -87.3 it is 0, above 88.3
// infinity.
INLINE group exp_group(group x) {
    const group shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: what is added rounds to an integer, in the low bits
    const group n = shifted - 12582912.0f;
    const group r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts, the first exact times n
    group p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const igroup power = ((igroup)shifted + (127 - 0x4B400000)) << 23;  // 0x4B400000: the bits of 1.5 * 2^23
    const group result = blend(x > 88.3f, (group){} + INFINITY, p * (group)power);
    return blend(x < -87.3f, (group){}, result);  // NaN is neither
}

INLINE float sum_group(group x) {
    float lanes[GROUP];
    *(group *)lanes = x;
    for (int half = GROUP / 2; half; half /= 2)
        for (int j = 0; j < half; j++) lanes[j] += lanes[j + half];
    return lanes[0];
}

// Rows of the next tile when `left` are left: at most `most`, and the tiles about equally large.
INLINE int tile_rows(long left, long most) {
    const long tiles = (left + most - 1) / most;
    return (int)((left + tiles - 1) / tiles);
}

// F(1) to F(most) by the value of `rows`: inside it is a constant, so loops over rows are unrolled and their sums live in registers.
#define CASE(constant, most, F) case constant: if (constant <= most) F(constant); break
#define WITH_CONSTANT(rows, most, F) \
    switch (rows) { \
        CASE(1, most, F); CASE(2, most, F); CASE(3, most, F); CASE(4, most, F); CASE(5, most, F); CASE(6, most, F); \
        CASE(7, most, F); CASE(8, most, F); CASE(9, most, F); CASE(10, most, F); CASE(11, most, F); CASE(12, most, F); \
    }
