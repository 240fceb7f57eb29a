#include "vector.h"

enum { BLOCK_SIZE = 16, PARALLEL_FROM = 1 << 14 /* elements */ };

static void rotate(element *head, const float *cos, const float *sin, long half) {
    for (long i = 0; i < half; i += 16) {
        long n = least(16, half - i);
        f32x16 c = {0}, s = {0};
        memcpy(&c, cos + i, n * sizeof(float));
        memcpy(&s, sin + i, n * sizeof(float));
        f32x16 low = load_part(head + i, n), high = load_part(head + half + i, n);
        store_part(head + i, low * c - high * s, n);
        store_part(head + half + i, high * c + low * s, n);
    }
}

/* qkv [tokens, heads + 2 * kv_heads, dim], rotated in place; caches [blocks, kv_heads, 16, dim]. */
void rope_write_kv(element *qkv, const float *cos_sin, const int64_t *positions, const int64_t *slots,
                   element *k_cache, element *v_cache, long tokens, long heads, long kv_heads, long dim,
                   int threads) {
    long width = (heads + 2 * kv_heads) * dim;
#pragma omp parallel for num_threads(threads) if (tokens * width >= PARALLEL_FROM)
    for (long t = 0; t < tokens; t++) {
        if (slots[t] < 0) continue;
        const float *cos = cos_sin + positions[t] * dim, *sin = cos + dim / 2;
        element *row = qkv + t * width, *keys = row + heads * dim, *values = keys + kv_heads * dim;
        for (long h = 0; h < heads + kv_heads; h++) rotate(row + h * dim, cos, sin, dim / 2);
        long block = slots[t] / BLOCK_SIZE, offset = slots[t] % BLOCK_SIZE;
        for (long h = 0; h < kv_heads; h++) {
            long target = ((block * kv_heads + h) * BLOCK_SIZE + offset) * dim;
            memcpy(k_cache + target, keys + h * dim, dim * sizeof(element));
            memcpy(v_cache + target, values + h * dim, dim * sizeof(element));
        }
    }
}
