#include "vector.h"

enum { RANK_PAGE = 16, GAIN_ROW = 14, SHIFT_ROW = 15, TILE = 512, PARALLEL_FROM = 1 << 13 }; /* elements */

/* y[rows] += y[rows] * gain + shift, by the vectors in each row's page of b [pages, RANK_PAGE, out]. */
void lora_vectors(element *y, const element *b, const int64_t *rows, const int64_t *pages, long num_rows,
                  long out, int threads) {
    long tiles = (out + TILE - 1) / TILE;
#pragma omp parallel for num_threads(threads) if (num_rows * out >= PARALLEL_FROM)
    for (long item = 0; item < num_rows * tiles; item++) {
        long row = item / tiles, first = item % tiles * TILE, last = least(first + TILE, out);
        element *target = y + rows[row] * out;
        const element *page = b + pages[row] * RANK_PAGE * out;
        const element *gain = page + GAIN_ROW * out, *shift = page + SHIFT_ROW * out;
        for (long i = first; i < last; i += 16) {
            f32x16 x = load_part(target + i, last - i);
            f32x16 scaled = x + (x * load_part(gain + i, last - i) + load_part(shift + i, last - i));
            store_part(target + i, scaled, last - i);
        }
    }
}
