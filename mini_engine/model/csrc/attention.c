// Paged attention: norm and rotate q and k, write k and v to their slots, then each token reads its own request's blocks.
//
// A layer's KV cache is [num_slots / GROUP][num_kv_heads] of 2 * GROUP * head_dim floats: what one head keeps of GROUP neighbouring slots.
// K lies transposed, so that the scores of GROUP tokens are one vector and nothing is added up across lanes.
//
//      K  [head_dim][GROUP]
//      V  [GROUP][head_dim]
//
// The query rows of a tile are some tokens of one request times the heads that share a KV head, so each K and V that is loaded serves
// them all. Softmax runs along (max and sum so far, as in flash attention), KEYS tokens at a time from position 0, whatever tile or chunk a
// token is in: so its sums are added in the same order.
//
// Stands at form 6 of a request.    vLLM: csrc/cpu/cpu_attn_impl.hpp, csrc/cpu/pos_encoding.cpp

#include <string.h>
#include "layers.h"
#include "vectors.h"

enum {
    KEYS = 8 * GROUP,
    MAX_TILE = MAX_ROWS * PANEL / GROUP < 12 ? MAX_ROWS * PANEL / GROUP : 12,  // query rows whose sums fit the registers
    MAX_HEAD_DIM = 256,
};

// One step, the same for all layers.
typedef struct {
    long num_tokens, num_heads, num_kv_heads, head_dim, block_size, table_width;
    const int64_t *rows, *positions;  // [num_tokens]: of the block table, and in the request; a request's tokens are neighbours
    const int32_t *block_table;       // [rows][table_width] block ids
    const float *cos, *sin;           // [num_tokens][head_dim]; sin is negative in the first half
    float eps;
    int threads;
} Step;

// Where kv_head keeps K [head_dim][GROUP] of the GROUP slots around `position`, and behind it V [GROUP][head_dim].
INLINE float *kv_of(const Step *s, float *cache, long row, long position, long kv_head) {
    const long block = s->block_table[row * s->table_width + position / s->block_size];
    const long slot = block * s->block_size + position % s->block_size;
    return cache + (slot / GROUP * s->num_kv_heads + kv_head) * 2 * GROUP * s->head_dim;
}

static void rotate(float *x, const float *cos, const float *sin, long size) {
    float rotated[MAX_HEAD_DIM];
    const long half = size / 2;
    for (long i = 0; i < half; i++) rotated[i] = x[i] * cos[i] + x[i + half] * sin[i];
    for (long i = half; i < size; i++) rotated[i] = x[i] * cos[i] + x[i - half] * sin[i];
    memcpy(x, rotated, size * sizeof *x);
}

// q and k of one token normed (norm [num_heads + num_kv_heads][head_dim], or null) and rotated in place; k and v to their slot.
static void write_token(const Step *s, long token, float *qkv, const float *norm, float *cache) {
    const long size = s->head_dim, position = s->positions[token];
    for (long head = 0; head < s->num_heads + s->num_kv_heads; head++) {
        float *x = qkv + head * size;
        if (norm) rms_norm_row(x, norm + head * size, x, size, s->eps);
        rotate(x, s->cos + token * size, s->sin + token * size, size);
    }
    for (long head = 0; head < s->num_kv_heads; head++) {
        const float *k = qkv + (s->num_heads + head) * size, *v = k + s->num_kv_heads * size;
        float *keys = kv_of(s, cache, s->rows[token], position, head), *values = keys + GROUP * size;
        for (long i = 0; i < size; i++) keys[i * GROUP + position % GROUP] = k[i];
        memcpy(values + position % GROUP * size, v, size * sizeof *v);
    }
}

// Row r is token r / heads of the tile, head r % heads. weights[r][j] is for position first + j, j in [0, KEYS).
typedef struct {
    float q[MAX_TILE][MAX_HEAD_DIM];     // scaled
    float sums[MAX_TILE][MAX_HEAD_DIM];  // weights times values so far
    float max[MAX_TILE], total[MAX_TILE];
    long context[MAX_TILE];              // tokens that each row sees
    float weights[MAX_TILE][KEYS];       // scores, then weights
} Tile;

// Scores of GROUP keys [head_dim][GROUP], to weights[r][at]. Asks for what is read next on the way, this group's values and the next
// group's keys: blocks lie anywhere, nobody else could know.
INLINE void scores(const int rows, Tile *t, long size, const float *keys, const float *next_keys, long at) {
    group sums[MAX_TILE] = {0};
    for (long i = 0; i < size; i++) {
        __builtin_prefetch(keys + (size + i) * GROUP, 0, 2);
        __builtin_prefetch(next_keys + i * GROUP, 0, 2);
        const group k = *(const group *)(keys + i * GROUP);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) sums[r] += k * t->q[r][i];
    }
    for (int r = 0; r < rows; r++) *(group *)(t->weights[r] + at) = sums[r];
}

// sums += weights[r][at + j] times values [j][head_dim], j in [0, count), for GROUP of the head's numbers from `column`. A token that a row
// must not see weighs 0: nothing, as long as its values are finite.
INLINE void weigh(const int rows, Tile *t, long size, const float *values, long at, long count, long column) {
    group sums[MAX_TILE];
    for (int r = 0; r < rows; r++) sums[r] = *(group *)(t->sums[r] + column);
    for (long j = 0; j < count; j++) {
        const group v = *(const group *)(values + j * size + column);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) sums[r] += v * t->weights[r][at + j];
    }
    for (int r = 0; r < rows; r++) *(group *)(t->sums[r] + column) = sums[r];
}

// Scores of `count` keys from `first` to weights e^(score - max); what was summed under a smaller max is scaled down.
static void softmax_row(Tile *t, int r, long first, long count, long size) {
    float *weights = t->weights[r];
    const long seen = t->context[r] - first, end = (count + GROUP - 1) / GROUP * GROUP;  // [0, count) and up to whole groups
    for (long j = seen > 0 ? seen : 0; j < end; j++) weights[j] = -INFINITY;  // its weight is an exact 0
    group largest = (group){} + t->max[r];
    for (long j = 0; j < end; j += GROUP) largest = blend(*(group *)(weights + j) > largest, *(group *)(weights + j), largest);
    float max = largest[0];
    for (int j = 1; j < GROUP; j++) max = largest[j] > max ? largest[j] : max;
    const float scale = expf(t->max[r] - max);
    group total = {0};
    for (long j = 0; j < end; j += GROUP) {
        *(group *)(weights + j) = exp_group(*(group *)(weights + j) - max);
        total += *(group *)(weights + j);
    }
    t->max[r] = max;
    t->total[r] = t->total[r] * scale + sum_group(total);
    for (long i = 0; i < size; i++) t->sums[r][i] *= scale;
}

// Heads [head, head + heads), all of kv_head, of tokens [token, token + tokens), neighbours in one request.
static void attend(
    const Step *s, const float *qkv, float *cache, float *out, long token, long tokens, long head, long heads, long kv_head
) {
    const long size = s->head_dim, width = (s->num_heads + 2 * s->num_kv_heads) * size, row = s->rows[token];
    const long rows = tokens * heads, context = s->positions[token + tokens - 1] + 1;  // of the last token, the longest
    const float scale = 1 / sqrtf((float)size);
    Tile t;  // some 30 KB, of which the used part is filled
    for (int r = 0; r < rows; r++) {
        const float *q = qkv + (token + r / heads) * width + (head + r % heads) * size;
        for (long i = 0; i < size; i++) t.q[r][i] = q[i] * scale;
        memset(t.sums[r], 0, size * sizeof *t.sums[r]);
        t.max[r] = -INFINITY, t.total[r] = 0, t.context[r] = s->positions[token + r / heads] + 1;
    }
    const float *next = kv_of(s, cache, row, 0, kv_head);
    for (long first = 0; first < context; first += KEYS) {
        const long count = context - first < KEYS ? context - first : KEYS;
        for (long j = 0; j < count; j += GROUP) {
            const float *keys = next;
            if (first + j + GROUP < context) next = kv_of(s, cache, row, first + j + GROUP, kv_head);
#define SCORES(constant) scores(constant, &t, size, keys, next, j)
            WITH_CONSTANT(rows, MAX_TILE, SCORES);
        }
        for (int r = 0; r < rows; r++) softmax_row(&t, r, first, count, size);
        for (long j = 0; j < count; j += GROUP) {
            const float *values = kv_of(s, cache, row, first + j, kv_head) + GROUP * size;
            const long left = count - j < GROUP ? count - j : GROUP;
            for (long column = 0; column < size; column += GROUP) {
#define WEIGH(constant) weigh(constant, &t, size, values, j, left, column)
                WITH_CONSTANT(rows, MAX_TILE, WEIGH);
            }
        }
    }
    for (int r = 0; r < rows; r++) {
        float *to = out + ((token + r / heads) * s->num_heads + head + r % heads) * size;
        for (long i = 0; i < size; i++) to[i] = t.sums[r][i] / t.total[r];
    }
}

// qkv [num_tokens][num_heads + 2 num_kv_heads][head_dim], overwritten → out [num_tokens][num_heads][head_dim]. All of the step is written
// before any of it is read: a request that hits the prefix another one computes in the same step reads finished KV.
void attention(const Step *s, float *qkv, const float *norm, float *cache, float *out) {
    const long size = s->head_dim, width = (s->num_heads + 2 * s->num_kv_heads) * size, shared = s->num_heads / s->num_kv_heads;
    const long heads_per_tile = shared < MAX_TILE ? shared : MAX_TILE, tokens_per_tile = MAX_TILE / heads_per_tile;
#pragma omp parallel num_threads(s->threads)
    {
#pragma omp for schedule(static)
        for (long token = 0; token < s->num_tokens; token++) write_token(s, token, qkv + token * width, norm, cache);
#pragma omp for collapse(2) schedule(dynamic)
        for (long token = 0; token < s->num_tokens; token++)
            for (long kv_head = 0; kv_head < s->num_kv_heads; kv_head++) {
                // A tile starts where position % tokens_per_tile is 0, or at a request's first token in the step: so each turn can tell
                // alone whether it begins one, and how long it is.
                const long row = s->rows[token], position = s->positions[token];
                if (token > 0 && s->rows[token - 1] == row && position % tokens_per_tile) continue;
                long tokens = 1;
                while (token + tokens < s->num_tokens && s->rows[token + tokens] == row && (position + tokens) % tokens_per_tile) tokens++;
                for (long head = kv_head * shared; head < (kv_head + 1) * shared; head += heads_per_tile) {
                    const long left = (kv_head + 1) * shared - head, heads = left < heads_per_tile ? left : heads_per_tile;
                    attend(s, qkv, cache, out, token, tokens, head, heads, kv_head);
                }
            }
    }
}
