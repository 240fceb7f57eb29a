/* Matrices as the files of adapters hold them, copied into the layout of rank pages and rounded to `element`. */
#include "vector.h"

enum { FLOAT32, FLOAT16, BFLOAT16 }; /* of a source; kernels/packing.py numbers them so */
enum { TILE = 16 };

/* One matrix; steps are in elements, the offset in bytes. Neither source nor target need be aligned. */
typedef struct {
    int64_t file, offset, dtype, ranks, columns, rank_step, column_step, target, target_step;
} Copy;

ALWAYS_INLINE f32x16 from_half(u16x16 half) {
    u32x16 words = __builtin_convertvector(half, u32x16), magnitude = (words & 0x7fff) << 13;
    f32x16 finite = (f32x16)magnitude * 0x1p112f; /* of subnormal ones, too */
    f32x16 rest = (f32x16)(magnitude | 0x7f800000);
    u32x16 value = (u32x16)choose((i32x16)((words & 0x7c00) == 0x7c00), rest, finite);
    return (f32x16)(value | (words & 0x8000) << 16);
}

/* n (at most 16) words, zeros after them; what is behind them in memory is not read. */
ALWAYS_INLINE u16x16 load_halves(const char *p, long n) {
    u16x16 words = {0};
    if (n == 8) { /* as often; to fill half a vector in memory, and then load it, takes four times as long */
        uint16_t eight __attribute__((vector_size(16)));
        memcpy(&eight, p, sizeof eight);
        return (u16x16){eight[0], eight[1], eight[2], eight[3], eight[4], eight[5], eight[6], eight[7]};
    }
    memcpy(&words, p, n * sizeof words[0]);
    return words;
}

/* n (at most 16) numbers, zeros after them. */
ALWAYS_INLINE f32x16 load_source(const char *p, long dtype, long n) {
    if (dtype == FLOAT32) {
        f32x16 x = {0};
        memcpy(&x, p, n * sizeof x[0]);
        return x;
    }
    u16x16 half = load_halves(p, n);
    return dtype == FLOAT16 ? from_half(half) : (f32x16)(__builtin_convertvector(half, u32x16) << 16);
}

/* As store16, but subnormal numbers stay what they are where the machine's own instruction drops them. */
ALWAYS_INLINE void round_to(element *target, f32x16 x, long n) {
#if ELEMENT_BFLOAT16
    u32x16 bits = (u32x16)x;
    u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    u32x16 quiet_nan = (bits >> 16) | 0x40;
    u16x16 half = __builtin_convertvector(((u32x16)(x == x) & rounded) | ((u32x16)(x != x) & quiet_nan),
                                          u16x16);
    memcpy(target, &half, n * sizeof(element));
#else
    memcpy(target, &x, n * sizeof(element));
#endif
}

ALWAYS_INLINE void copy_rows(const char *source, const Copy *c, long dtype, long size, element *target) {
    for (long k = 0; k < c->ranks; k++) {
        const char *row = source + k * c->rank_step * size;
        element *out = target + k * c->target_step;
        long j = 0;
        for (; j + TILE <= c->columns; j += TILE) round_to(out + j, load_source(row + j * size, dtype, TILE), TILE);
        if (j < c->columns) round_to(out + j, load_source(row + j * size, dtype, c->columns - j), c->columns - j);
    }
}

#ifdef __AVX512F__
/* Changes blocks of `d` lanes between vectors that lie `d` apart. */
ALWAYS_INLINE void exchange(f32x16 *tile, const int d) {
    i32x16 upper = (lane_ids() & d) != 0;
    i32x16 low = lane_ids() + (upper & (TILE - d)), high = lane_ids() + (upper & TILE) + (~upper & d);
#pragma GCC unroll 16
    for (int i = 0; i < TILE; i++)
        if (!(i & d)) {
            f32x16 first = tile[i], second = tile[i + d];
            tile[i] = __builtin_shuffle(first, second, low);
            tile[i + d] = __builtin_shuffle(first, second, high);
        }
}

static void transpose(f32x16 *tile) {
    exchange(tile, 8);
    exchange(tile, 4);
    exchange(tile, 2);
    exchange(tile, 1);
}
#else
static void transpose(f32x16 *tile) {
    float rows[TILE][TILE];
    for (int i = 0; i < TILE; i++)
        for (int j = 0; j < TILE; j++) rows[j][i] = tile[i][j];
    memcpy(tile, rows, sizeof rows);
}
#endif

ALWAYS_INLINE void load_tile(f32x16 *tile, const char *source, long step, long dtype, long ranks, long columns) {
    for (long j = 0; j < columns; j++) tile[j] = load_source(source + j * step, dtype, ranks);
}

/* A column's ranks lie side by side: 16 columns of up to 16 ranks are turned at a time. */
ALWAYS_INLINE void copy_columns(const char *source, const Copy *c, long dtype, long size, element *target) {
    f32x16 tile[TILE] = {0};
    long step = c->column_step * size;
    for (long rank = 0; rank < c->ranks; rank += TILE)
        for (long column = 0; column < c->columns; column += TILE) {
            const char *from = source + column * step + rank * size;
            element *to = target + rank * c->target_step + column;
            long ranks = least(TILE, c->ranks - rank), columns = least(TILE, c->columns - column);
            if (ranks == TILE) /* sizes that the compiler knows */
                load_tile(tile, from, step, dtype, TILE, columns);
            else if (ranks == TILE / 2)
                load_tile(tile, from, step, dtype, TILE / 2, columns);
            else
                load_tile(tile, from, step, dtype, ranks, columns);
            transpose(tile);
            if (columns == TILE)
                for (long k = 0; k < ranks; k++) round_to(to + k * c->target_step, tile[k], TILE);
            else
                for (long k = 0; k < ranks; k++) round_to(to + k * c->target_step, tile[k], columns);
        }
}

ALWAYS_INLINE void copy(const char *source, const Copy *c, long dtype, long size, element *target) {
    if (c->column_step == 1)
        copy_rows(source, c, dtype, size, target);
    else
        copy_columns(source, c, dtype, size, target);
}

/* Either step of a source must be 1. With one thread it runs in the calling one alone. */
void pack(const char *const *files, const Copy *copies, long num_copies, element *target, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long i = 0; i < num_copies; i++) {
        const Copy *c = copies + i;
        const char *source = files[c->file] + c->offset;
        switch (c->dtype) {
            case FLOAT32: copy(source, c, FLOAT32, 4, target + c->target); break;
            case FLOAT16: copy(source, c, FLOAT16, 2, target + c->target); break;
            default: copy(source, c, BFLOAT16, 2, target + c->target);
        }
    }
}
