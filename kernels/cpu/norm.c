#include "vector.h"

enum { PARALLEL_FROM = 1 << 15 }; /* elements: below, one thread is done before a second has woken */

/* One row; with a residual it becomes residual + x, rounded, and the norm is of what was stored. */
static void norm_row(element *out, const element *x, element *residual, const element *weight, long width,
                     float eps) {
    f32x16 squares[2] = {{0}, {0}};
    for (long i = 0; i < width; i += 16) {
        f32x16 h = load_part(x + i, width - i);
        if (residual) {
            store_part(residual + i, load_part(residual + i, width - i) + h, width - i);
            h = load_part(residual + i, width - i);
        }
        squares[(i >> 4) & 1] += h * h;
    }
    const element *source = residual ? residual : x;
    float scale = 1.0f / sqrtf(sum_lanes(squares[0] + squares[1]) / width + eps);
    for (long i = 0; i < width; i += 16) {
        long n = width - i;
        store_part(out + i, load_part(source + i, n) * scale * load_part(weight + i, n), n);
    }
}

/* residual may be NULL; the others are [rows, width]. */
void rms_norm(element *out, const element *x, element *residual, const element *weight, long rows, long width,
              float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width >= PARALLEL_FROM)
    for (long r = 0; r < rows; r++)
        norm_row(out + r * width, x + r * width, residual ? residual + r * width : residual, weight, width,
                 eps);
}
