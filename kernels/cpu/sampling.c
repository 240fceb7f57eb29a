/* Drawing one token for each row: see sampling_batch.py for what is drawn, reference.py for the noise. */
#include <stdlib.h>

#include "vector.h"

typedef struct {
    const element *logits;
    const float *temperature, *top_p, *min_p;
    const int32_t *top_k;
    const int64_t *seeds, *positions;
    long rows, vocab;
    /* Edits; num_edits may be 0. Entries are ordered by row. */
    const int32_t *edit_rows, *edit_tokens, *edit_counts;
    const float *edit_biases, *presence, *frequency, *repetition;
    const uint8_t *edit_seen;
    long num_edits;
    /* Which tokens a row may draw; allowed_lists is NULL where every row may draw any. */
    const int32_t *allowed_lists, *allowed_bits;
    long allowed_words;
    long num_top; /* -1: no log-probabilities */
    /* Results. */
    int64_t *tokens, *top_tokens;
    uint8_t *finite;
    float *logprobs, *top_logprobs;
} Problem;

typedef struct {
    float *z;       /* [padded vocab], -inf beyond the vocabulary */
    uint32_t *keys; /* candidates of top-k and top-p */
    float *mass;
} Scratch;

static const float GREEDY_BELOW = 1e-5f;

/* Copy a row to float32. Returns its maximum, or NaN where there is one. */
static float widen(float *z, const element *row, long vocab) {
    f32x16 highest = splat(-INFINITY);
    i32x16 nan = {0};
    for (long i = 0; i < vocab; i += 16) {
        f32x16 x = load_part(row + i, vocab - i);
        if (vocab - i < 16) x = choose(lane_ids() < (int32_t)(vocab - i), x, splat(-INFINITY));
        memcpy(z + i, &x, sizeof x);
        highest = maximum(x, highest);
        nan |= x != x;
    }
    return any_lane(nan) ? NAN : max_lanes(highest);
}

static float row_maximum(const float *z, long vocab) {
    f32x16 highest = splat(-INFINITY);
    for (long i = 0; i < vocab; i += 16) highest = maximum(*(const f32x16 *)(z + i), highest);
    return max_lanes(highest);
}

static void find_logprobs(const Problem *p, long row, const float *z, float highest, float *log_total) {
    double total = 0;
    for (long i = 0; i < p->vocab; i += 16) total += sum_lanes(exp16(*(const f32x16 *)(z + i) - highest));
    *log_total = highest + (float)log(total);
    /* The N highest so far, in order; equal ones stay in the order of their ids. */
    int64_t *tokens = p->top_tokens + row * p->num_top;
    float *values = p->top_logprobs + row * p->num_top;
    long held = 0;
    for (long first = 0; first < p->vocab && p->num_top; first += 16) {
        if (held == p->num_top && !any_lane(*(const f32x16 *)(z + first) > values[held - 1])) continue;
        for (long i = first; i < least(first + 16, p->vocab); i++) {
            if (held == p->num_top && z[i] <= values[held - 1]) continue;
            long at = held < p->num_top ? held++ : held - 1;
            for (; at > 0 && values[at - 1] < z[i]; at--) {
                values[at] = values[at - 1];
                tokens[at] = tokens[at - 1];
            }
            values[at] = z[i];
            tokens[at] = i;
        }
    }
    for (long i = 0; i < held; i++) values[i] -= *log_total;
}

static void edit(const Problem *p, long row, float *z) {
    long low = 0, high = p->num_edits;
    while (low < high) {
        long middle = (low + high) / 2;
        if (p->edit_rows[middle] >= 0 && p->edit_rows[middle] < row)
            low = middle + 1;
        else
            high = middle;
    }
    for (long e = low; e < p->num_edits && p->edit_rows[e] == row; e++) {
        float x = z[p->edit_tokens[e]] + p->edit_biases[e];
        if (p->edit_seen[e]) x = x > 0 ? x / p->repetition[row] : x * p->repetition[row];
        if (p->edit_counts[e] > 0) x -= p->frequency[row] * p->edit_counts[e] + p->presence[row];
        z[p->edit_tokens[e]] = x;
    }
}

/* Leave only what the row may draw. `list` is its index in allowed_bits. */
static void restrict_to(const Problem *p, long list, float *z) {
    const int32_t *words = p->allowed_bits + list * p->allowed_words;
    i32x16 bit_of_lane;
    for (int lane = 0; lane < 16; lane++) bit_of_lane[lane] = 1 << lane;
    for (long i = 0; i < p->vocab; i += 16) {
        int32_t word = i / 32 < p->allowed_words ? words[i / 32] : 0;
        int32_t half = i % 32 ? (int32_t)((uint32_t)word >> 16) : word & 0xFFFF;
        f32x16 *x = (f32x16 *)(z + i);
        *x = half ? choose((bit_of_lane & half) != 0, *x, splat(-INFINITY)) : splat(-INFINITY);
    }
}

/* An unsigned integer that orders as the float does. */
ALWAYS_INLINE uint32_t to_key(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

ALWAYS_INLINE float from_key(uint32_t key) {
    uint32_t bits = key & 0x80000000u ? key & 0x7fffffffu : ~key;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* The highest key such that keys from it on weigh at least `target`; the lowest, if all do not. A radix search:
 * the top 11 bits, then 11, then 10, each a histogram of the keys that agree so far. */
static uint32_t find_threshold(const uint32_t *keys, const float *weights, long count, double target) {
    static const int shifts[] = {21, 10, 0}, widths[] = {11, 11, 10};
    uint32_t prefix = 0, known = 0;
    double above = 0;
    for (int level = 0; level < 3; level++) {
        double histogram[2048] = {0};
        uint8_t filled[2048] = {0};
        uint32_t digits = (1u << widths[level]) - 1;
        for (long i = 0; i < count; i++) {
            if ((keys[i] & known) != prefix) continue;
            uint32_t digit = keys[i] >> shifts[level] & digits;
            histogram[digit] += weights ? weights[i] : 1;
            filled[digit] = 1;
        }
        long chosen = 0;
        double before = above;
        for (long digit = digits; digit >= 0; digit--) {
            if (!filled[digit]) continue;
            chosen = digit;
            before = above;
            above += histogram[digit];
            if (above >= target) break;
        }
        above = before;
        prefix |= (uint32_t)chosen << shifts[level];
        known |= digits << shifts[level];
    }
    return prefix;
}

/* The keys of logits from the threshold on. */
static long collect(const Problem *p, Scratch *s, float threshold) {
    long count = 0;
    for (long first = 0; first < p->vocab; first += 16) {
        if (!any_lane(*(const f32x16 *)(s->z + first) >= threshold)) continue;
        for (long i = first; i < least(first + 16, p->vocab); i++)
            if (s->z[i] >= threshold) s->keys[count++] = to_key(s->z[i]);
    }
    return count;
}

static double mass_from(const Problem *p, const Scratch *s, float threshold, float highest) {
    double total = 0;
    for (long i = 0; i < p->vocab; i += 16) {
        f32x16 z = *(const f32x16 *)(s->z + i);
        total += sum_lanes(choose(z >= threshold, exp16(z - highest), splat(0)));
    }
    return total;
}

/* The lowest logit that top-p leaves of those from the threshold on. */
static float filter_top_p(const Problem *p, Scratch *s, float threshold, float highest, float top_p) {
    double target = top_p * mass_from(p, s, threshold, highest);
    /* Nearly always the tokens close to the best one hold enough, and the many others need no search. */
    float near = highest - 10;
    if (near > threshold && mass_from(p, s, near, highest) > target * 1.0001) threshold = near;
    long count = collect(p, s, threshold);
    for (long i = 0; i < count; i += 16) {
        u32x16 keys = *(const u32x16 *)(s->keys + i), positive = (u32x16)((i32x16)keys < 0);
        f32x16 z = (f32x16)((positive & (keys & 0x7fffffffu)) | (~positive & ~keys));
        f32x16 mass = exp16(z - highest);
        memcpy(s->mass + i, &mass, sizeof mass);
    }
    return from_key(find_threshold(s->keys, s->mass, count, target));
}

/* The lowest logit that min-p, top-k and top-p leave, of z whose maximum is `highest`. */
static float filter(const Problem *p, Scratch *s, long row, float highest) {
    float threshold = p->min_p[row] > 0 ? highest + logf(p->min_p[row]) : -INFINITY;
    int use_top_k = p->top_k[row] > 0 && p->top_k[row] < p->vocab, use_top_p = p->top_p[row] < 1;
    if (use_top_k) {
        long count = collect(p, s, threshold);
        if (p->top_k[row] < count) threshold = from_key(find_threshold(s->keys, NULL, count, p->top_k[row]));
    }
    return use_top_p ? filter_top_p(p, s, threshold, highest, p->top_p[row]) : threshold;
}

ALWAYS_INLINE uint32_t mix(uint32_t h) {
    h = (h ^ h >> 16) * 0x85ebca6bu;
    h = (h ^ h >> 13) * 0xc2b2ae35u;
    return h ^ h >> 16;
}

ALWAYS_INLINE u32x16 mix16(u32x16 h) {
    h = (h ^ h >> 16) * 0x85ebca6bu;
    h = (h ^ h >> 13) * 0xc2b2ae35u;
    return h ^ h >> 16;
}

typedef struct {
    uint32_t k0, k1;
} NoiseKey;

static NoiseKey make_noise_key(int64_t seed, int64_t position) {
    NoiseKey key;
    key.k0 = mix((uint32_t)seed ^ mix((uint32_t)position + 0x9e3779b9u));
    key.k1 = mix((uint32_t)((uint64_t)seed >> 32) ^ mix(key.k0 + 0x9e3779b9u));
    return key;
}

ALWAYS_INLINE u32x16 noise_bits(NoiseKey key, long token) {
    return mix16(key.k1 ^ mix16(key.k0 + (uint32_t)token + (u32x16)lane_ids()));
}

/* -log(-log1p(-v)), with log1p by its series where 1 - v would round. */
ALWAYS_INLINE f32x16 gumbel(u32x16 bits) {
    f32x16 v = __builtin_convertvector(bits, f32x16) * 0x1p-32f;
    v = maximum(v, splat(0x1p-33f));
    v = -maximum(-v, splat(-(1 - 0x1p-24f)));
    f32x16 series = v * (1 + v * (0.5f + v * (1.0f / 3 + v * 0.25f)));
    return -log16(choose(v < 0x1p-7f, series, -log16(1 - v)));
}

static const float MOST_NOISE = 22.88f; /* 33 ln 2, and a little */

/* The token that maximises z plus noise among those with z >= threshold; of equal ones the first. */
static long draw(const Problem *p, const float *z, float threshold, NoiseKey key) {
    f32x16 best = splat(-INFINITY);
    i32x16 where = {0};
    for (long i = 0; i < p->vocab; i += 16) {
        f32x16 x = *(const f32x16 *)(z + i);
        i32x16 kept = (x >= threshold) & (x + MOST_NOISE >= best);
        if (!any_lane(kept)) continue;
        f32x16 perturbed = choose(kept, x + gumbel(noise_bits(key, i)), splat(-INFINITY));
        i32x16 better = perturbed > best;
        best = choose(better, perturbed, best);
        where = (better & (lane_ids() + (int32_t)i)) | (~better & where);
    }
    float highest = max_lanes(best);
    long token = p->vocab;
    for (int lane = 0; lane < 16; lane++)
        if (best[lane] == highest && where[lane] < token) token = where[lane];
    return token;
}

static long first_equal(const float *z, long vocab, float value) {
    long i = 0;
    while (i < vocab - 16 && !any_lane(*(const f32x16 *)(z + i) == value)) i += 16;
    while (i < vocab - 1 && z[i] != value) i++;
    return i;
}

static void sample_row(const Problem *p, Scratch *s, long row) {
    const element *logits = p->logits + row * p->vocab;
    float highest = widen(s->z, logits, p->vocab), log_total = 0;
    p->tokens[row] = 0;
    p->finite[row] = isfinite(highest) != 0;
    if (!p->finite[row]) return;
    if (p->num_top >= 0) find_logprobs(p, row, s->z, highest, &log_total);
    long list = p->allowed_lists ? p->allowed_lists[row] : -1;
    if (p->num_edits || list >= 0) {
        if (p->num_edits) edit(p, row, s->z);
        if (list >= 0) restrict_to(p, list, s->z);
        highest = row_maximum(s->z, p->vocab);
        p->finite[row] = highest > -INFINITY;
        if (!p->finite[row]) return;
    }
    if (p->temperature[row] < GREEDY_BELOW) {
        p->tokens[row] = first_equal(s->z, p->vocab, highest);
    } else {
        for (long i = 0; i < p->vocab; i += 16) *(f32x16 *)(s->z + i) /= p->temperature[row];
        float threshold = filter(p, s, row, highest / p->temperature[row]);
        p->tokens[row] = draw(p, s->z, threshold, make_noise_key(p->seeds[row], p->positions[row]));
    }
    if (p->num_top >= 0) p->logprobs[row] = load_part(logits + p->tokens[row], 1)[0] - log_total;
}

/* Returns 0, or -1 where memory ran out. Shapes are as in SamplingBatch and the classes beside it. */
int sample(const element *logits, const float *temperature, const int32_t *top_k, const float *top_p,
           const float *min_p, const int64_t *seeds, const int64_t *positions, long rows, long vocab,
           const int32_t *edit_rows, const int32_t *edit_tokens, const float *edit_biases,
           const int32_t *edit_counts, const uint8_t *edit_seen, const float *presence, const float *frequency,
           const float *repetition, long num_edits, const int32_t *allowed_lists, const int32_t *allowed_bits,
           long allowed_words, long num_top, int64_t *tokens, uint8_t *finite, float *logprobs,
           int64_t *top_tokens, float *top_logprobs, int threads) {
    Problem p = {.logits = logits, .temperature = temperature, .top_p = top_p, .min_p = min_p, .top_k = top_k,
                 .seeds = seeds, .positions = positions, .rows = rows, .vocab = vocab, .edit_rows = edit_rows,
                 .edit_tokens = edit_tokens, .edit_counts = edit_counts, .edit_biases = edit_biases,
                 .presence = presence, .frequency = frequency, .repetition = repetition, .edit_seen = edit_seen,
                 .num_edits = num_edits, .allowed_lists = allowed_lists, .allowed_bits = allowed_bits,
                 .allowed_words = allowed_words, .num_top = num_top, .tokens = tokens,
                 .top_tokens = top_tokens, .finite = finite, .logprobs = logprobs,
                 .top_logprobs = top_logprobs};
    long padded = round_up(vocab, 16), failed = 0;
#pragma omp parallel num_threads(threads) if (rows > 1) reduction(+ : failed)
    {
        float *memory = aligned_alloc(64, 3 * padded * sizeof(float));
        Scratch scratch = {memory, (uint32_t *)memory + padded, memory + 2 * padded};
        failed += !memory;
#pragma omp for schedule(dynamic, 1)
        for (long row = 0; row < rows; row++)
            if (memory) sample_row(&p, &scratch, row);
        free(memory);
    }
    return failed ? -1 : 0;
}
