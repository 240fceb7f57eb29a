/* Low-rank adapters of grouped rows: shrink v = scale * x . A^T, then expand y += v . B.
 *
 * Each adapter's pages are read once in a step, by whichever threads take their tiles; only live ranks are. The
 * order of the sums of one row is fixed: by input column in shrink, by page and rank row in expand.
 */
#include <omp.h>

#include "shares.h"
#include "vector.h"

enum {
    RANK_PAGE = 16,
    SHRINK_RANKS = 8, /* rank rows that are multiplied together in registers */
    SHRINK_ROWS = 2,
    ROW_TILE = 64,    /* rows of x that a unit of shrink takes: they stay in the second-level cache */
    EXPAND_ROWS = 4,
    PACKED_ROWS = 6,   /* the same, of a segment that is long enough to repay packing its B */
    PACKED_FROM = 24,  /* rows of such a segment */
    PACKED_PAGES = 4,  /* at most, of its adapter */
    PACKED_TILES = 8,  /* packed at once: rows of y lie far apart, so a visit to one should be long */
    EXPAND_VECTORS = 4,
    COLUMN_TILE = EXPAND_VECTORS * 16,
    WIDE_TILE = 4 * COLUMN_TILE, /* columns to a tile: for a page's B to stream from memory */
    READ_COST = 4, /* to read weights, in rows that they are multiplied with */
    LINE_ELEMENTS = 64 / sizeof(element),
    PARALLEL_FROM = 1 << 15, /* multiplications */
};

typedef struct {
    const element *x, *a, *b;
    element *y;
    float *shrunk; /* [rows of the plan, max_pages, projections, RANK_PAGE] */
    const float *scales;
    const int64_t *splits;
    const int32_t *rows, *segment_starts, *segment_pages, *segment_ranks;
    long num_segments, max_pages, num_projections, in, out;
    long threads; /* that share the tiles */
} Problem;

ALWAYS_INLINE long live_ranks(const Problem *p, long segment, long page) {
    long live = p->segment_ranks[segment] - page * RANK_PAGE;
    if (p->segment_pages[segment * p->max_pages + page] < 0) return 0;
    return least(live, RANK_PAGE);
}

ALWAYS_INLINE float scale_of(const Problem *p, long segment, long page, long projection) {
    return p->scales[p->segment_pages[segment * p->max_pages + page] * p->num_projections + projection];
}

ALWAYS_INLINE float *shrunk_row(const Problem *p, long entry, long page, long projection) {
    return p->shrunk + ((entry * p->max_pages + page) * p->num_projections + projection) * RANK_PAGE;
}

ALWAYS_INLINE long num_rows(const Problem *p, long segment) {
    return p->segment_starts[segment + 1] - p->segment_starts[segment];
}

ALWAYS_INLINE void dot_step(const element **x, int rows, const element **rank, long d, long n, f32x16 *acc) {
    u32x16 words[SHRINK_ROWS];
    for (int r = 0; r < rows; r++) words[r] = load_words(x[r] + d, n);
#pragma GCC unroll 8
    for (int k = 0; k < SHRINK_RANKS; k++) {
        u32x16 weights = load_words(rank[k] + d, n);
        for (int r = 0; r < rows; r++)
            acc[r * SHRINK_RANKS + k] = multiply_add(acc[r * SHRINK_RANKS + k], weights, words[r]);
    }
}

/* Up to SHRINK_RANKS rank rows of a projection's A in a page, and the rows of x that they meet. */
typedef struct {
    long segment, page, projection, rank, first, last;
} ShrinkTile;

/* The tile's rank rows; one beyond the last repeats it. */
ALWAYS_INLINE long rank_rows(const Problem *p, const ShrinkTile *t, const element **rank) {
    long id = p->segment_pages[t->segment * p->max_pages + t->page];
    long ranks = least(SHRINK_RANKS, live_ranks(p, t->segment, t->page) - t->rank);
    const element *a = p->a + ((id * p->num_projections + t->projection) * RANK_PAGE + t->rank) * p->in;
    for (long k = 0; k < SHRINK_RANKS; k++) rank[k] = a + least(k, ranks - 1) * p->in;
    return ranks;
}

/* `rows` rows (one beyond the last repeats it) times rank rows; meanwhile those `ahead` come into the cache. */
ALWAYS_INLINE void dot_products(const Problem *p, const element **x, int rows, const element **rank,
                                const element **ahead, f32x16 *acc) {
    for (int i = 0; i < rows * SHRINK_RANKS; i++) acc[i] = splat(0);
    long whole = p->in / WORD_ELEMENTS * WORD_ELEMENTS;
    for (long d = 0; d < whole; d += WORD_ELEMENTS) {
#pragma GCC unroll 8
        for (int k = 0; k < SHRINK_RANKS; k++) __builtin_prefetch(ahead[k] + d, 0, 2);
        dot_step(x, rows, rank, d, WORD_ELEMENTS, acc);
    }
    if (whole < p->in) dot_step(x, rows, rank, whole, p->in - whole, acc);
}

/* `next` is the tile that this thread will take then. */
static void shrink_tile(const Problem *p, const ShrinkTile *t, const ShrinkTile *next) {
    float scale = scale_of(p, t->segment, t->page, t->projection);
    const element *rank[SHRINK_RANKS], *ahead[SHRINK_RANKS];
    long ranks = rank_rows(p, t, rank);
    rank_rows(p, next, ahead);
    for (long entry = t->first; entry < t->last; entry += SHRINK_ROWS) {
        long rows = least(SHRINK_ROWS, t->last - entry);
        const element *x[SHRINK_ROWS];
        f32x16 acc[SHRINK_ROWS * SHRINK_RANKS];
        for (long r = 0; r < rows; r++) x[r] = p->x + p->rows[entry + r] * p->in;
        if (rows == SHRINK_ROWS)
            dot_products(p, x, SHRINK_ROWS, rank, ahead, acc);
        else
            dot_products(p, x, 1, rank, ahead, acc);
        for (long r = 0; r < rows; r++) {
            float *out = shrunk_row(p, entry + r, t->page, t->projection) + t->rank;
            for (long k = 0; k < ranks; k++) out[k] = sum_lanes(acc[r * SHRINK_RANKS + k]) * scale;
        }
    }
}

/* A projection's tiles in one page of a segment: blocks of rank rows, times blocks of rows. */
ALWAYS_INLINE Run shrink_run(const Problem *p, long segment, long page, long projection) {
    long blocks = parts(live_ranks(p, segment, page), SHRINK_RANKS), rows = num_rows(p, segment);
    if (blocks <= 0 || scale_of(p, segment, page, projection) == 0) return (Run){0, 0};
    return (Run){blocks * parts(rows, ROW_TILE), READ_COST + least(rows, ROW_TILE)};
}

ALWAYS_INLINE ShrinkTile shrink_tile_at(const Problem *p, long segment, long page, long projection, long index) {
    long row_blocks = parts(num_rows(p, segment), ROW_TILE);
    long first = p->segment_starts[segment] + index % row_blocks * ROW_TILE;
    return (ShrinkTile){segment, page, projection, index / row_blocks * SHRINK_RANKS, first,
                        least(first + ROW_TILE, p->segment_starts[segment + 1])};
}

/* This thread's share of the tiles. Each is computed when the next is known. */
static void shrink(const Problem *p, long thread) {
    long total = 0;
    for (long n = 0; n < p->num_segments; n++)
        for (long page = 0; page < p->max_pages; page++)
            for (long m = 0; m < p->num_projections; m++) total += cost_of(shrink_run(p, n, page, m));
    Share share = share_of(total, thread, p->threads);
    ShrinkTile found = {.segment = -1};
    for (long n = 0; n < p->num_segments; n++)
        for (long page = 0; page < p->max_pages; page++)
            for (long m = 0; m < p->num_projections; m++) {
                Range tiles = take(&share, shrink_run(p, n, page, m));
                for (long i = tiles.first; i < tiles.last; i++) {
                    ShrinkTile next = shrink_tile_at(p, n, page, m, i);
                    if (found.segment >= 0) shrink_tile(p, &found, &next);
                    found = next;
                }
            }
    if (found.segment >= 0) shrink_tile(p, &found, &found);
}

/* y[rows of entries, columns from `column` on] += their shrunk rows times the segment's B. */
ALWAYS_INLINE void expand_rows(const Problem *p, long segment, long projection, long column, long width,
                               long entry, int rows) {
    f32x16 acc[EXPAND_ROWS][EXPAND_VECTORS] = {0};
    for (long page = 0; page < p->max_pages; page++) {
        long live = live_ranks(p, segment, page);
        if (live <= 0 || scale_of(p, segment, page, projection) == 0) continue;
        long id = p->segment_pages[segment * p->max_pages + page];
        const element *b = p->b + id * RANK_PAGE * p->out + column;
        const float *v[EXPAND_ROWS];
        for (int r = 0; r < rows; r++) v[r] = shrunk_row(p, entry + r, page, projection);
        for (long k = 0; k < live; k++) {
#pragma GCC unroll 4
            for (int c = 0; c < EXPAND_VECTORS; c += 2) {
                Twin weights = load_twin(b + k * p->out + c * 16, width - c * 16);
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++) {
                    acc[r][c] += v[r][k] * weights.a;
                    acc[r][c + 1] += v[r][k] * weights.b;
                }
            }
        }
    }
    for (int r = 0; r < rows; r++) {
        element *y = p->y + p->rows[entry + r] * p->out + column;
        for (int c = 0; c < EXPAND_VECTORS; c += 2) {
            Twin sum = in_order((Twin){acc[r][c], acc[r][c + 1]});
            long left = width - c * 16;
            store_part(y + c * 16, load_part(y + c * 16, left) + sum.a, left);
            store_part(y + c * 16 + 16, load_part(y + c * 16 + 16, left - 16) + sum.b, left - 16);
        }
    }
}

ALWAYS_INLINE void expand_columns(const Problem *p, long segment, long projection, long column, long width) {
    long last = p->segment_starts[segment + 1];
    for (long entry = p->segment_starts[segment]; entry < last; entry += EXPAND_ROWS) switch (last - entry) {
            case 1: expand_rows(p, segment, projection, column, width, entry, 1); break;
            case 2: expand_rows(p, segment, projection, column, width, entry, 2); break;
            case 3: expand_rows(p, segment, projection, column, width, entry, 3); break;
            default: expand_rows(p, segment, projection, column, width, entry, EXPAND_ROWS);
        }
}

/* Some columns of a projection, of all rows of a segment. */
typedef struct {
    long segment, projection, column, width;
} ExpandTile;

/* Brings a tile's B into the cache, from the `column`-th of its columns on: as many as are computed at once. */
ALWAYS_INLINE void prefetch_columns(const Problem *p, const ExpandTile *t, long column) {
    if (column >= t->width) return;
    for (long page = 0; page < p->max_pages; page++) {
        long live = live_ranks(p, t->segment, page), id = p->segment_pages[t->segment * p->max_pages + page];
        for (long k = 0; k < live; k++) {
            const element *b = p->b + (id * RANK_PAGE + k) * p->out + t->column + column;
            for (long i = 0; i < COLUMN_TILE; i += LINE_ELEMENTS) __builtin_prefetch(b + i, 0, 2);
        }
    }
}

/* `next` is the tile that this thread will take then. */
static void expand_tile(const Problem *p, const ExpandTile *t, const ExpandTile *next) {
    for (long column = 0; column < t->width; column += COLUMN_TILE) {
        prefetch_columns(p, next, column);
        if (t->width - column >= COLUMN_TILE)
            expand_columns(p, t->segment, t->projection, t->column + column, COLUMN_TILE);
        else
            expand_columns(p, t->segment, t->projection, t->column + column, t->width - column);
    }
}

/* B's words in a page's tile of columns: two neighbouring rank rows to a word where a word has room. */
typedef u32x16 PackedB[RANK_PAGE / PACK][EXPAND_VECTORS];

/* A segment's live pages in some tiles of columns. */
typedef struct {
    PackedB b[PACKED_TILES][PACKED_PAGES];
    long page[PACKED_PAGES], live[PACKED_PAGES];
    long count;
} Packed;

ALWAYS_INLINE void pack_tile(const Problem *p, long segment, long page, long column, long width, PackedB tile) {
    long live = live_ranks(p, segment, page), id = p->segment_pages[segment * p->max_pages + page];
    const element *b = p->b + id * RANK_PAGE * p->out + column;
    for (long k = 0; k < RANK_PAGE; k++)
        for (int c = 0; c < EXPAND_VECTORS; c++)
            set_words(&tile[k / PACK][c], k % PACK,
                      k < live ? load_part(b + k * p->out + c * 16, width - c * 16) : splat(0));
}

static void pack_columns(const Problem *p, long segment, long projection, long column, long end, Packed *packed) {
    packed->count = 0;
    for (long page = 0; page < p->max_pages; page++) {
        long live = live_ranks(p, segment, page);
        if (live <= 0 || scale_of(p, segment, page, projection) == 0) continue;
        for (long t = 0; column + t * COLUMN_TILE < end; t++) {
            long at = column + t * COLUMN_TILE;
            pack_tile(p, segment, page, at, least(COLUMN_TILE, end - at), packed->b[t][packed->count]);
        }
        packed->page[packed->count] = page;
        packed->live[packed->count++] = live;
    }
}

/* As expand_rows, of one packed tile. v has the rows' words: [PACKED_PAGES, RANK_PAGE] to a row. */
ALWAYS_INLINE void expand_packed(const Packed *packed, long tile, const element *v, element **y, long width,
                                 int rows) {
    f32x16 acc[PACKED_ROWS][EXPAND_VECTORS];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < EXPAND_VECTORS; c++)
            acc[r][c] = load_part(y[r] + tile * COLUMN_TILE + c * 16, width - c * 16);
    for (long i = 0; i < packed->count; i++)
        for (long k = 0; k < RANK_PAGE; k += PACK)
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                u32x16 factor = splat_word(v + (r * PACKED_PAGES + i) * RANK_PAGE + k);
#pragma GCC unroll 4
                for (int c = 0; c < EXPAND_VECTORS; c++)
                    acc[r][c] = multiply_add(acc[r][c], factor, packed->b[tile][i][k / PACK][c]);
            }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < EXPAND_VECTORS; c++)
            store_part(y[r] + tile * COLUMN_TILE + c * 16, acc[r][c], width - c * 16);
}

/* In bfloat16 the shrunk rows are rounded to it here, as they are where the two products are two calls. */
ALWAYS_INLINE void expand_block(const Problem *p, const Packed *packed, long projection, long column, long end,
                                long entry, int rows) {
    element v[PACKED_ROWS][PACKED_PAGES][RANK_PAGE], *y[PACKED_ROWS];
    for (int r = 0; r < rows; r++) {
        y[r] = p->y + p->rows[entry + r] * p->out + column;
        for (long i = 0; i < packed->count; i++) {
            f32x16 row;
            memcpy(&row, shrunk_row(p, entry + r, packed->page[i], projection), sizeof row);
            store16(v[r][i], choose(lane_ids() < (int)packed->live[i], row, splat(0)));
        }
    }
    for (long t = 0; column + t * COLUMN_TILE < end; t++) {
        long width = end - column - t * COLUMN_TILE;
        if (width >= COLUMN_TILE)
            expand_packed(packed, t, v[0][0], y, COLUMN_TILE, rows);
        else
            expand_packed(packed, t, v[0][0], y, width, rows);
    }
}

/* This thread's share of a long segment's rows. */
static void expand_long(const Problem *p, long segment, long thread) {
    long start = p->segment_starts[segment], length = p->segment_starts[segment + 1] - start;
    long first = start + length * thread / p->threads, last = start + length * (thread + 1) / p->threads;
    Packed packed;
    for (long m = 0; m < p->num_projections; m++)
        for (long column = p->splits[m], end; column < p->splits[m + 1]; column = end) {
            end = least(column + PACKED_TILES * COLUMN_TILE, p->splits[m + 1]);
            pack_columns(p, segment, m, column, end, &packed);
            long entry = first;
            for (; entry + PACKED_ROWS <= last; entry += PACKED_ROWS)
                expand_block(p, &packed, m, column, end, entry, PACKED_ROWS);
            for (; entry < last; entry++) expand_block(p, &packed, m, column, end, entry, 1);
        }
}

static int is_long(const Problem *p, long segment) {
    return p->segment_starts[segment + 1] - p->segment_starts[segment] >= PACKED_FROM &&
           p->max_pages <= PACKED_PAGES;
}

/* A projection's columns in a segment that is not long, COLUMN_TILE to a tile. */
ALWAYS_INLINE Run expand_run(const Problem *p, long segment, long projection) {
    long live = 0;
    for (long page = 0; page < p->max_pages; page++)
        if (live_ranks(p, segment, page) > 0 && scale_of(p, segment, page, projection) != 0)
            live += live_ranks(p, segment, page);
    if (live == 0 || is_long(p, segment)) return (Run){0, 0};
    return (Run){parts(p->splits[projection + 1] - p->splits[projection], COLUMN_TILE),
                 live * (READ_COST + num_rows(p, segment))};
}

/* This thread's share, as of shrink. */
static void expand(const Problem *p, long thread) {
    long total = 0;
    for (long n = 0; n < p->num_segments; n++)
        for (long m = 0; m < p->num_projections; m++) total += cost_of(expand_run(p, n, m));
    Share share = share_of(total, thread, p->threads);
    ExpandTile found = {.segment = -1};
    for (long n = 0; n < p->num_segments; n++) {
        if (is_long(p, n)) expand_long(p, n, thread);
        for (long m = 0; m < p->num_projections; m++) {
            Range tiles = take(&share, expand_run(p, n, m));
            long end = least(p->splits[m] + tiles.last * COLUMN_TILE, p->splits[m + 1]);
            for (long column = p->splits[m] + tiles.first * COLUMN_TILE; column < end; column += WIDE_TILE) {
                ExpandTile next = {n, m, column, least(WIDE_TILE, end - column)};
                if (found.segment >= 0) expand_tile(p, &found, &next);
                found = next;
            }
        }
    }
    if (found.segment >= 0) expand_tile(p, &found, &found);
}

/* Shrink where x is given, expand where y is given. Shapes are as in LoraPlan and LoraPool. */
void lora(const element *x, element *y, float *shrunk, const element *a, const element *b,
          const float *scales,
          const int64_t *splits, const int32_t *rows, const int32_t *segment_starts, const int32_t *segment_pages,
          const int32_t *segment_ranks, long num_rows, long num_segments, long max_pages, long num_projections,
          long in, long out, int threads) {
    Problem p = {.x = x, .a = a, .b = b, .y = y, .shrunk = shrunk, .scales = scales, .splits = splits,
                 .rows = rows, .segment_starts = segment_starts, .segment_pages = segment_pages,
                 .segment_ranks = segment_ranks, .num_segments = num_segments, .max_pages = max_pages,
                 .num_projections = num_projections, .in = in, .out = out};
    int parallel = threads > 1 && num_rows * max_pages * RANK_PAGE * (num_projections * in + out) >= PARALLEL_FROM;
#pragma omp parallel num_threads(threads) if (parallel)
    {
        Problem shared = p;
        shared.threads = omp_get_num_threads();
        if (x) shrink(&shared, omp_get_thread_num());
#pragma omp barrier
        if (y) expand(&shared, omp_get_thread_num());
    }
}
