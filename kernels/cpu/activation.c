#include "vector.h"

enum { TILE = 512, PARALLEL_FROM = 1 << 13 }; /* elements */

/* gate_up [rows, 2 * width] -> out [rows, width] */
void silu_mul(element *out, const element *gate_up, long rows, long width, int threads) {
    long tiles = (width + TILE - 1) / TILE;
#pragma omp parallel for num_threads(threads) if (rows * width >= PARALLEL_FROM)
    for (long item = 0; item < rows * tiles; item++) {
        long row = item / tiles, first = item % tiles * TILE, last = least(first + TILE, width);
        const element *gate = gate_up + row * 2 * width, *up = gate + width;
        for (long i = first; i < last; i += 16) {
            f32x16 g = load_part(gate + i, last - i);
            f32x16 gated = g / (1.0f + exp16(-g)) * load_part(up + i, last - i);
            store_part(out + row * width + i, gated, last - i);
        }
    }
}
