/* Causal attention over the paged cache, one unit of work at a time.
 *
 * A unit is one K/V head of one sequence with the query heads that share it (a GQA group), for a tile of
 * queries; every key and value is thus loaded once for all of them. Keys come in chunks of 64, at fixed places
 * of the sequence, with the online softmax (Milakov and Gimelshein, 2018) between chunks. A decode row with a
 * long context is cut into segments of 512 keys, again at fixed places, whose results are merged in order. So
 * the bits of a row depend neither on the batch nor on the number of threads.
 *
 * Operands are repacked, so that a dot product needs no sum across lanes:
 *
 *     keys    [4 blocks][dim words][16 tokens]          scores: a lane is a key
 *     values  [64 / PACK][dim columns], words of PACK tokens   output: a lane is a column
 */
#include <stdlib.h>

#include "vector.h"

enum {
    BLOCK_SIZE = 16,
    CHUNK = 64, /* keys */
    CHUNK_BLOCKS = CHUNK / BLOCK_SIZE,
    SEGMENT = 512,    /* keys: a multiple of CHUNK */
    TILE_ROWS = 48,   /* query rows of a tile, tokens times heads of the group */
    ROWS_AT_ONCE = 4, /* rows that are multiplied together in registers */
};

#if PACK == 2
typedef element operand; /* as it is multiplied: pairs, or float32 */
#else
typedef float operand;
#endif

typedef struct {
    const element *q, *k_cache, *v_cache;
    element *out;
    const int32_t *query_starts, *context_lens, *block_tables;
    long q_stride, num_seqs, max_blocks, num_heads, num_kv_heads, dim;
    float scale;
    /* Derived. */
    long group, padded_dim, tile_tokens, rows;
} Problem;

/* What one unit accumulates; rows are token-major, then heads of the group. */
typedef struct {
    operand *queries; /* [rows][padded_dim] */
    u32x16 *keys;     /* [CHUNK_BLOCKS][padded_dim / PACK] */
    u32x16 *values;   /* [CHUNK / PACK][padded_dim / 16] */
    u32x16 *hidden;   /* values again, with what one row may not see taken out */
    float *scores;    /* [rows][CHUNK] */
    operand *weights; /* [rows][CHUNK] */
    f32x16 *sums;     /* [rows][padded_dim / 16] */
    float *highest, *total; /* [rows]: the running maximum, the sum of weights */
} Scratch;

typedef struct {
    long seq, kv_head, first_token, tokens, first_key, last_key;
    long partial; /* where its segment's result goes, or -1: to the output */
} Unit;

static void *allocate(long bytes) { return aligned_alloc(64, round_up(bytes, 64)); }

static void *carve(char **cursor, long bytes) {
    char *start = *cursor;
    *cursor = start + round_up(bytes, 64);
    return start;
}

static void *make_scratch(Scratch *s, const Problem *p) {
    long rows = p->rows, padded = p->padded_dim;
    long values = CHUNK / PACK * padded * 4;
    char *memory = allocate(rows * (padded * 8 + CHUNK * 8 + 8) + 2 * values + CHUNK * padded * 4 + 10 * 64);
    char *cursor = memory;
    s->queries = carve(&cursor, rows * padded * sizeof(operand));
    s->keys = carve(&cursor, CHUNK * padded / PACK * 4);
    s->values = carve(&cursor, values);
    s->hidden = carve(&cursor, values);
    s->scores = carve(&cursor, rows * CHUNK * 4);
    s->weights = carve(&cursor, rows * CHUNK * sizeof(operand));
    s->sums = carve(&cursor, rows * padded * 4);
    s->highest = carve(&cursor, rows * 4);
    s->total = carve(&cursor, rows * 4);
    return memory;
}

/* One step of the transpose of a 16 x 16 matrix: exchange the off-diagonal squares of the given size. */
ALWAYS_INLINE void transpose_step(u32x16 *m, int size) {
    i32x16 lanes = lane_ids();
    i32x16 upper = (lanes & size) != 0;
    i32x16 low = (~upper & lanes) | (upper & (lanes - size + 16));
    i32x16 high = (~upper & (lanes + size)) | (upper & (lanes + 16));
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        if (i & size) continue;
        u32x16 a = m[i], b = m[i + size];
        m[i] = __builtin_shuffle(a, b, low);
        m[i + size] = __builtin_shuffle(a, b, high);
    }
}

/* One block's keys, [16 tokens][dim] to [dim words][16 tokens]; tokens from `valid` on are not read. */
ALWAYS_INLINE void pack_keys(u32x16 *out, const element *tile, long valid, long dim, int whole) {
    for (long d = 0; d < dim; d += WORD_ELEMENTS) {
        u32x16 m[16];
#pragma GCC unroll 16
        for (long t = 0; t < 16; t++) 
            m[t] = load_words(tile + t * dim + d, whole ? WORD_ELEMENTS : t < valid ? dim - d : 0);
        transpose_step(m, 8);
        transpose_step(m, 4);
        transpose_step(m, 2);
        transpose_step(m, 1);
        memcpy(out + d / PACK, m, sizeof m);
    }
}

/* One block's values, [16 tokens][dim] to words of PACK tokens; tokens from `valid` on are not read. */
ALWAYS_INLINE void pack_values(u32x16 *out, const element *tile, long valid, long dim, long columns,
                               int whole) {
    for (long t = 0; t < 16; t += PACK)
        for (long c = 0; c < columns; c++) {
            const element *values = tile + t * dim + c * 16;
            long n = dim - c * 16;
            u32x16 word = (u32x16)load_part(values, whole ? 16 : t < valid ? n : 0);
#if PACK == 2
            word = word >> 16 | (u32x16)load_part(values + dim, whole ? 16 : t + 1 < valid ? n : 0);
#endif
            out[t / PACK * columns + c] = word;
        }
}

/* `whole`: all tokens are valid, and no row has a part of a vector; a constant, so that its checks vanish. */
ALWAYS_INLINE void pack_block(const Problem *p, Scratch *s, long block, long tile, long valid, int whole) {
    long columns = p->padded_dim / 16;
    pack_keys(s->keys + block * p->padded_dim / PACK, p->k_cache + tile, valid, p->dim, whole);
    pack_values(s->values + block * BLOCK_SIZE / PACK * columns, p->v_cache + tile, valid, p->dim, columns,
                whole);
}

/* Blocks lie anywhere in the pool, so the hardware cannot foresee the next one. */
static void prefetch_block(const Problem *p, const Unit *u, long key) {
    if (!u || key >= u->last_key) return;
    long id = p->block_tables[u->seq * p->max_blocks + key / BLOCK_SIZE];
    if (id < 0) return;
    long tile = (id * p->num_kv_heads + u->kv_head) * BLOCK_SIZE * p->dim;
    for (long i = 0; i < BLOCK_SIZE * p->dim; i += 64 / sizeof(element)) {
        __builtin_prefetch(p->k_cache + tile + i, 0, 2); /* to the second level: it takes more at a time */
        __builtin_prefetch(p->v_cache + tile + i, 0, 2);
    }
}

static void load_chunk(const Problem *p, Scratch *s, const Unit *u, const Unit *next, long chunk,
                       long blocks) {
    const int32_t *table = p->block_tables + u->seq * p->max_blocks;
    int last_chunk = chunk + CHUNK >= u->last_key;
    for (long b = 0; b < blocks; b++) {
        if (last_chunk)
            prefetch_block(p, next, next ? next->first_key + b * BLOCK_SIZE : 0);
        else
            prefetch_block(p, u, chunk + CHUNK + b * BLOCK_SIZE);
        long first = chunk + b * BLOCK_SIZE, id = table[first / BLOCK_SIZE];
        long valid = id < 0 ? 0 : least(BLOCK_SIZE, p->context_lens[u->seq] - first);
        long tile = ((id < 0 ? 0 : id) * p->num_kv_heads + u->kv_head) * BLOCK_SIZE * p->dim;
        if (valid == BLOCK_SIZE && p->dim == p->padded_dim)
            pack_block(p, s, b, tile, valid, 1);
        else
            pack_block(p, s, b, tile, valid, 0);
    }
}

ALWAYS_INLINE u32x16 broadcast_word(const operand *p) {
    uint32_t word;
    memcpy(&word, p, sizeof word);
    return word - (u32x16){0};
}

/* scores[row] = scale * queries[row] . keys; blocks beyond the chunk's last give anything, which is not used. */
ALWAYS_INLINE void score_rows(const Problem *p, Scratch *s, long row, int rows) {
    long words = p->padded_dim / PACK;
    f32x16 acc[ROWS_AT_ONCE][CHUNK_BLOCKS] = {0};
    const operand *queries = s->queries + row * p->padded_dim;
    for (long w = 0; w < words; w++)
#pragma GCC unroll 4
        for (int b = 0; b < CHUNK_BLOCKS; b++) {
            u32x16 key = s->keys[b * words + w];
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++)
                acc[r][b] = multiply_add(acc[r][b], broadcast_word(queries + r * p->padded_dim + w * PACK),
                                         key);
        }
    for (int r = 0; r < rows; r++)
        for (int b = 0; b < CHUNK_BLOCKS; b++) {
            f32x16 scaled = acc[r][b] * p->scale;
            memcpy(s->scores + (row + r) * CHUNK + b * 16, &scaled, sizeof scaled);
        }
}

/* sums[row] += weights[row] . values, for the first `keys` keys of the chunk. */
ALWAYS_INLINE void weigh_rows(const Problem *p, Scratch *s, const u32x16 *values, long row, int rows,
                              long keys) {
    long columns = p->padded_dim / 16;
    const operand *weights = s->weights + row * CHUNK;
    for (long c = 0; c < columns; c += 2) {
        f32x16 acc[ROWS_AT_ONCE][2];
        long second = c + 1 < columns ? c + 1 : c;
        for (int r = 0; r < rows; r++) {
            acc[r][0] = s->sums[(row + r) * columns + c];
            acc[r][1] = s->sums[(row + r) * columns + second];
        }
        for (long t = 0; t < keys / PACK; t++) {
            u32x16 a = values[t * columns + c], b = values[t * columns + second];
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                u32x16 weight = broadcast_word(weights + r * CHUNK + t * PACK);
                acc[r][0] = multiply_add(acc[r][0], weight, a);
                acc[r][1] = multiply_add(acc[r][1], weight, b);
            }
        }
        for (int r = 0; r < rows; r++) {
            s->sums[(row + r) * columns + second] = acc[r][1];
            s->sums[(row + r) * columns + c] = acc[r][0];
        }
    }
}

ALWAYS_INLINE void store_weights(operand *weights, f32x16 x) {
#if PACK == 2
    store16(weights, x);
#else
    memcpy(weights, &x, sizeof x);
#endif
}

/* The online softmax of one row over the chunk, of which it sees the first `visible` keys. */
static void update_softmax(const Problem *p, Scratch *s, long row, long visible) {
    f32x16 scores[CHUNK_BLOCKS], highest = splat(-INFINITY), total = {0};
    for (int b = 0; b < CHUNK_BLOCKS; b++) {
        memcpy(&scores[b], s->scores + row * CHUNK + b * 16, sizeof scores[b]);
        scores[b] = choose(lane_ids() + b * 16 < (int32_t)visible, scores[b], splat(-INFINITY));
        highest = maximum(scores[b], highest);
    }
    float before = s->highest[row], now = fmaxf(before, max_lanes(highest));
    for (int b = 0; b < CHUNK_BLOCKS; b++) {
        f32x16 weight = exp16(scores[b] - now);
        weight = choose(lane_ids() + b * 16 < (int32_t)visible, weight, splat(0.0f));
        total += weight;
        store_weights(s->weights + row * CHUNK + b * 16, weight);
    }
    if (now != before) {
        float shrink = exp16(splat(before - now))[0];
        long columns = p->padded_dim / 16;
        for (long c = 0; c < columns; c++) s->sums[row * columns + c] *= shrink;
        s->total[row] *= shrink;
        s->highest[row] = now;
    }
    s->total[row] += sum_lanes(total);
}

static void score_block(const Problem *p, Scratch *s, long row, long rows) {
    switch (rows) {
        case 1: score_rows(p, s, row, 1); break;
        case 2: score_rows(p, s, row, 2); break;
        case 3: score_rows(p, s, row, 3); break;
        default: score_rows(p, s, row, 4);
    }
}

static void weigh_block(const Problem *p, Scratch *s, const u32x16 *values, long row, long rows, long keys) {
    switch (rows) {
        case 1: weigh_rows(p, s, values, row, 1, keys); break;
        case 2: weigh_rows(p, s, values, row, 2, keys); break;
        case 3: weigh_rows(p, s, values, row, 3, keys); break;
        default: weigh_rows(p, s, values, row, 4, keys);
    }
}

static int has_non_finite(const u32x16 *values, long count) {
    i32x16 found = {0};
    for (long i = 0; i < count; i++) {
        found |= (values[i] & 0x7f800000) == 0x7f800000;
#if PACK == 2
        found |= (values[i] & 0x7f80) == 0x7f80;
#endif
    }
    return any_lane(found);
}

/* The chunk's values with zeros for the tokens that a row does not see: 0 times NaN would be NaN. */
static const u32x16 *hide_values(const Problem *p, Scratch *s, long visible, long keys) {
    long columns = p->padded_dim / 16;
    for (long t = 0; t < keys; t += PACK) {
        uint32_t seen = t + PACK <= visible ? 0xffffffff : t < visible ? 0xffff : 0;
        for (long c = 0; c < columns; c++)
            s->hidden[t / PACK * columns + c] = s->values[t / PACK * columns + c] & seen;
    }
    return s->hidden;
}

/* How many of the chunk's keys a row of the unit sees (more than CHUNK: all; less than 1: none). */
ALWAYS_INLINE long visible_keys(const Problem *p, const Unit *u, long row, long chunk) {
    long queries = p->query_starts[u->seq + 1] - p->query_starts[u->seq];
    return p->context_lens[u->seq] - queries + u->first_token + row / p->group + 1 - chunk;
}

static void weigh_chunk(const Problem *p, Scratch *s, const Unit *u, long chunk, long first_row, long rows,
                        long keys) {
    int spoilt = visible_keys(p, u, first_row, chunk) < least(keys, u->last_key - chunk) &&
                 has_non_finite(s->values, keys / PACK * (p->padded_dim / 16));
    if (!spoilt) {
        for (long r = first_row; r < rows; r += ROWS_AT_ONCE)
            weigh_block(p, s, s->values, r, least(ROWS_AT_ONCE, rows - r), keys);
        return;
    }
    for (long r = first_row; r < rows; r++)
        weigh_block(p, s, hide_values(p, s, visible_keys(p, u, r, chunk), keys), r, 1, keys);
}

static void attend_chunk(const Problem *p, Scratch *s, const Unit *u, const Unit *next, long chunk) {
    long rows = u->tokens * p->group;
    long blocks = (least(CHUNK, u->last_key - chunk) + BLOCK_SIZE - 1) / BLOCK_SIZE;
    long hidden_tokens = 1 - visible_keys(p, u, 0, chunk);
    long first_row = hidden_tokens > 0 ? hidden_tokens * p->group : 0;
    load_chunk(p, s, u, next, chunk, blocks);
    for (long r = first_row; r < rows; r += ROWS_AT_ONCE)
        score_block(p, s, r, least(ROWS_AT_ONCE, rows - r));
    for (long r = first_row; r < rows; r++) update_softmax(p, s, r, visible_keys(p, u, r, chunk));
    weigh_chunk(p, s, u, chunk, first_row, rows, blocks * BLOCK_SIZE);
}

static void begin_unit(const Problem *p, Scratch *s, const Unit *u) {
    for (long row = 0; row < u->tokens * p->group; row++) {
        long token = p->query_starts[u->seq] + u->first_token + row / p->group;
        const element *q = p->q + token * p->q_stride + (u->kv_head * p->group + row % p->group) * p->dim;
        for (long d = 0; d < p->padded_dim; d += WORD_ELEMENTS) {
            u32x16 words = load_words(q + d, p->dim - d);
            memcpy(s->queries + row * p->padded_dim + d, &words, sizeof words);
        }
        memset(s->sums + row * (p->padded_dim / 16), 0, p->padded_dim * 4);
        s->highest[row] = -INFINITY;
        s->total[row] = 0;
    }
}

static void store_row(const Problem *p, element *out, const f32x16 *sums, float total) {
    for (long d = 0; d < p->dim; d += 16) store_part(out + d, sums[d / 16] / total, p->dim - d);
}

static element *output_row(const Problem *p, const Unit *u, long row) {
    long token = p->query_starts[u->seq] + u->first_token + row / p->group;
    return p->out + (token * p->num_heads + u->kv_head * p->group + row % p->group) * p->dim;
}

/* A segment's result of one row: the sums, then one vector that holds the maximum and the total. */
static f32x16 *partial_row(const Problem *p, f32x16 *partials, long partial, long row) {
    return partials + (partial * p->group + row) * (p->padded_dim / 16 + 1);
}

static void run_unit(const Problem *p, Scratch *s, const Unit *u, const Unit *next, f32x16 *partials) {
    long columns = p->padded_dim / 16;
    begin_unit(p, s, u);
    for (long chunk = u->first_key; chunk < u->last_key; chunk += CHUNK) attend_chunk(p, s, u, next, chunk);
    for (long row = 0; row < u->tokens * p->group; row++) {
        if (u->partial < 0) {
            store_row(p, output_row(p, u, row), s->sums + row * columns, s->total[row]);
            continue;
        }
        f32x16 *result = partial_row(p, partials, u->partial, row);
        memcpy(result, s->sums + row * columns, columns * sizeof(f32x16));
        result[columns] = (f32x16){s->highest[row], s->total[row]};
    }
}

static Unit *take_unit(Unit *units, long *left) {
    long i;
#pragma omp atomic capture
    i = --*left;
    return i < 0 ? NULL : units + i;
}

/* Take units until none is left, each while the one before is still to be done, so that it can be prefetched.
 * From the last on: prefill tiles, which take longest, are at the end. */
static void run_units(const Problem *p, Scratch *s, Unit *units, long *left, f32x16 *partials) {
    Unit *unit = take_unit(units, left);
    while (unit) {
        Unit *next = take_unit(units, left);
        run_unit(p, s, unit, next, partials);
        unit = next;
    }
}

/* Merge the segments of a decode row; u is the first of them. */
static void merge_segments(const Problem *p, f32x16 *partials, const Unit *u) {
    long columns = p->padded_dim / 16, segments = (p->context_lens[u->seq] + SEGMENT - 1) / SEGMENT;
    for (long row = 0; row < p->group; row++) {
        float highest = -INFINITY, total = 0;
        for (long i = 0; i < segments; i++)
            highest = fmaxf(highest, partial_row(p, partials, u->partial + i, row)[columns][0]);
        f32x16 *sums = partial_row(p, partials, u->partial, row);
        for (long i = 0; i < segments; i++) {
            const f32x16 *part = partial_row(p, partials, u->partial + i, row);
            float factor = exp16(splat(part[columns][0] - highest))[0];
            total += part[columns][1] * factor;
            for (long c = 0; c < columns; c++) sums[c] = part[c] * factor + (i ? sums[c] : splat(0));
        }
        store_row(p, output_row(p, u, row), sums, total);
    }
}

/* Write the units to `units`, or only count them where that is NULL. */
static long plan_units(const Problem *p, Unit *units, long *num_partials) {
    long count = 0;
    *num_partials = 0;
    for (long s = 0; s < p->num_seqs; s++) {
        long queries = p->query_starts[s + 1] - p->query_starts[s], context = p->context_lens[s];
        if (queries <= 0 || context <= 0) continue;
        long segments = queries == 1 ? (context + SEGMENT - 1) / SEGMENT : 1;
        long tiles = (queries + p->tile_tokens - 1) / p->tile_tokens;
        for (long i = 0; i < p->num_kv_heads * tiles * segments; i++, count++) {
            if (!units) continue;
            Unit *u = units + count;
            *u = (Unit){.seq = s, .kv_head = i / (tiles * segments), .partial = -1};
            u->first_token = i / segments % tiles * p->tile_tokens;
            u->tokens = least(p->tile_tokens, queries - u->first_token);
            u->first_key = i % segments * SEGMENT;
            u->last_key = context - queries + u->first_token + u->tokens;
            if (segments > 1) {
                u->last_key = least(u->last_key, u->first_key + SEGMENT);
                u->partial = *num_partials + i;
            }
        }
        if (segments > 1) *num_partials += p->num_kv_heads * segments;
    }
    return count;
}

static void clear_unowned(const Problem *p, long tokens) {
    long width = p->num_heads * p->dim, owned = p->num_seqs ? p->query_starts[p->num_seqs] : 0;
    memset(p->out + owned * width, 0, (tokens - owned) * width * sizeof(element));
    for (long s = 0; s < p->num_seqs; s++)
        if (p->context_lens[s] <= 0)
            memset(p->out + p->query_starts[s] * width, 0,
                   (p->query_starts[s + 1] - p->query_starts[s]) * width * sizeof(element));
}

/* q [tokens, q_stride], of which the first heads * dim columns are read; caches [blocks, kv_heads, 16, dim];
 * out [tokens, heads * dim]. The rest is as in AttentionPlan. Returns 0, or -1 where memory ran out. */
int paged_attention(element *out, const element *q, const element *k_cache, const element *v_cache,
                    const int32_t *query_starts, const int32_t *context_lens, const int32_t *block_tables,
                    long tokens, long q_stride, long num_seqs, long max_blocks, long num_heads, long num_kv_heads,
                    long dim, float scale, int threads) {
    Problem p = {.q = q, .k_cache = k_cache, .v_cache = v_cache, .out = out, .query_starts = query_starts,
                 .context_lens = context_lens, .block_tables = block_tables, .q_stride = q_stride,
                 .num_seqs = num_seqs, .max_blocks = max_blocks, .num_heads = num_heads,
                 .num_kv_heads = num_kv_heads, .dim = dim, .scale = scale};
    p.group = num_heads / num_kv_heads;
    p.padded_dim = round_up(dim, WORD_ELEMENTS);
    p.tile_tokens = p.group < TILE_ROWS ? TILE_ROWS / p.group : 1;
    p.rows = p.tile_tokens * p.group;
    clear_unowned(&p, tokens);

    long num_partials, failed = 0, num_units = plan_units(&p, NULL, &num_partials), left = num_units;
    if (!num_units) return 0;
    Unit *units = malloc(num_units * sizeof(Unit));
    f32x16 *partials = allocate((num_partials * p.group + 1) * (p.padded_dim / 16 + 1) * sizeof(f32x16));
    if (units && partials) {
        plan_units(&p, units, &num_partials);
#pragma omp parallel num_threads(threads) if (num_units > 1) reduction(+ : failed)
        {
            Scratch scratch;
            void *memory = make_scratch(&scratch, &p);
            failed += !memory;
            if (memory) run_units(&p, &scratch, units, &left, partials);
            free(memory);
#pragma omp barrier
#pragma omp for
            for (long i = 0; i < num_units; i++)
                if (units[i].partial >= 0 && units[i].first_key == 0) merge_segments(&p, partials, units + i);
        }
    } else
        failed = 1;
    free(units);
    free(partials);
    return failed ? -1 : 0;
}
