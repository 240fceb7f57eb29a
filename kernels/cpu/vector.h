/* Vectors of 16 floats in GCC's portable vector types, and the two element types' loads and stores.
 *
 * The library is compiled once for each element type (-DELEMENT_BFLOAT16=0 or 1), so that every symbol has one
 * plain name. All arithmetic is in float32, whatever the element.
 *
 * A "word" is 32 bits of operand for a dot product: one float32, or, where the machine multiplies bfloat16
 * pairs (AVX512-BF16), two neighbouring bfloat16 values. PACK is how many elements one word holds.
 */
#ifndef LORAPLEX_VECTOR_H
#define LORAPLEX_VECTOR_H

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

#define ALWAYS_INLINE static inline __attribute__((always_inline))

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#if ELEMENT_BFLOAT16 && defined(__AVX512BF16__)
#define PACK 2
#else
#define PACK 1
#endif
#define WORD_ELEMENTS (16 * PACK) /* elements in a vector of words */

ALWAYS_INLINE long least(long a, long b) { return a < b ? a : b; }
ALWAYS_INLINE long round_up(long n, long multiple) { return (n + multiple - 1) / multiple * multiple; }
ALWAYS_INLINE f32x16 splat(float x) { return x - (f32x16){0}; }

/* By lane: a where the mask (a comparison's result) is set, else b. C has no ?: on vectors. */
ALWAYS_INLINE f32x16 choose(i32x16 mask, f32x16 a, f32x16 b) {
    return (f32x16)((mask & (i32x16)a) | (~mask & (i32x16)b));
}

/* Where either is NaN: b. */
ALWAYS_INLINE f32x16 maximum(f32x16 a, f32x16 b) {
#ifdef __AVX512F__
    return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return choose(a > b, a, b);
#endif
}

ALWAYS_INLINE i32x16 lane_ids(void) {
    return (i32x16){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
}

#if ELEMENT_BFLOAT16
typedef uint16_t element;

ALWAYS_INLINE f32x16 load16(const element *p) {
    u16x16 half;
    memcpy(&half, p, sizeof half);
    return (f32x16)(__builtin_convertvector(half, u32x16) << 16);
}

ALWAYS_INLINE void store16(element *p, f32x16 x) {
#ifdef __AVX512BF16__
    __m256bh half = _mm512_cvtneps_pbh((__m512)x);
#else
    u32x16 bits = (u32x16)x;
    u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16; /* to nearest, ties to even */
    u32x16 quiet_nan = (bits >> 16) | 0x40;
    u16x16 half = __builtin_convertvector(((u32x16)(x == x) & rounded) | ((u32x16)(x != x) & quiet_nan),
                                          u16x16);
#endif
    memcpy(p, &half, 32);
}

#else
typedef float element;

ALWAYS_INLINE f32x16 load16(const element *p) {
    f32x16 x;
    memcpy(&x, p, sizeof x);
    return x;
}

ALWAYS_INLINE void store16(element *p, f32x16 x) { memcpy(p, &x, sizeof x); }
#endif

/* The first n (at most 16) elements, zeros after them; nothing beyond them is touched. */
ALWAYS_INLINE f32x16 load_part(const element *p, long n) {
    if (n >= 16) return load16(p);
    element padded[16] = {0};
    if (n > 0) memcpy(padded, p, n * sizeof(element));
    return load16(padded);
}

ALWAYS_INLINE void store_part(element *p, f32x16 x, long n) {
    if (n >= 16) {
        store16(p, x);
        return;
    }
    element padded[16];
    store16(padded, x);
    if (n > 0) memcpy(p, padded, n * sizeof(element));
}

/* 32 numbers in the order that costs least to bring them into; `in_order` tells of it. */
typedef struct {
    f32x16 a, b;
} Twin;

#if ELEMENT_BFLOAT16
/* The first n (at most 32) elements, zeros after them: the even ones, and the odd ones. */
ALWAYS_INLINE Twin load_twin(const element *p, long n) {
    u32x16 words = {0};
    if (n >= 32)
        memcpy(&words, p, sizeof words);
    else if (n > 0)
        memcpy(&words, p, n * sizeof(element));
    return (Twin){(f32x16)(words << 16), (f32x16)(words & 0xffff0000)};
}

/* The same numbers as the first 16 and the last 16. */
ALWAYS_INLINE Twin in_order(Twin x) {
    const i32x16 low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    return (Twin){__builtin_shuffle(x.a, x.b, low), __builtin_shuffle(x.a, x.b, low + 8)};
}
#else
ALWAYS_INLINE Twin load_twin(const element *p, long n) { return (Twin){load_part(p, n), load_part(p + 16, n - 16)}; }

ALWAYS_INLINE Twin in_order(Twin x) { return x; }
#endif

/* 16 words from the first n (at most WORD_ELEMENTS) elements, zeros after them. */
ALWAYS_INLINE u32x16 load_words(const element *p, long n) {
#if PACK == 2
    u32x16 words = {0};
    if (n >= WORD_ELEMENTS)
        memcpy(&words, p, sizeof words);
    else if (n > 0)
        memcpy(&words, p, n * sizeof(element));
    return words;
#else
    return (u32x16)load_part(p, n);
#endif
}

/* Makes 16 elements the given halves of 16 words: 0 the first or only one, 1 the second. */
ALWAYS_INLINE void set_words(u32x16 *words, int half, f32x16 x) {
#if PACK == 2
    element rounded[16];
    u16x16 bits;
    store16(rounded, x);
    memcpy(&bits, rounded, sizeof bits);
    u32x16 wide = __builtin_convertvector(bits, u32x16);
    *words = half ? *words | wide << 16 : wide;
#else
    *words = (u32x16)x;
#endif
}

/* One word, from the PACK elements at p, in all lanes. */
ALWAYS_INLINE u32x16 splat_word(const element *p) {
    uint32_t word;
    memcpy(&word, p, sizeof word);
    return word - (u32x16){0};
}

/* acc + the dot product of each lane's word. */
ALWAYS_INLINE f32x16 multiply_add(f32x16 acc, u32x16 a, u32x16 b) {
#if PACK == 2
    return (f32x16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    return acc + (f32x16)a * (f32x16)b;
#endif
}

/* Whether a comparison's result is set in any lane. */
ALWAYS_INLINE int any_lane(i32x16 mask) {
#ifdef __AVX512F__
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
    int32_t any = 0;
    for (int lane = 0; lane < 16; lane++) any |= mask[lane];
    return any != 0;
#endif
}

ALWAYS_INLINE f32x16 swap_lanes(f32x16 x, int distance) {
    return __builtin_shuffle(x, lane_ids() ^ distance);
}

ALWAYS_INLINE float sum_lanes(f32x16 x) {
    x += swap_lanes(x, 8);
    x += swap_lanes(x, 4);
    x += swap_lanes(x, 2);
    x += swap_lanes(x, 1);
    return x[0];
}

ALWAYS_INLINE float max_lanes(f32x16 x) {
    x = maximum(x, swap_lanes(x, 8));
    x = maximum(x, swap_lanes(x, 4));
    x = maximum(x, swap_lanes(x, 2));
    x = maximum(x, swap_lanes(x, 1));
    return x[0];
}

/* e^x to about 1e-7, relative. Below the normal range 0; above it the largest power in range; NaN stays. */
ALWAYS_INLINE f32x16 exp16(f32x16 x) {
    const float lowest = -87.33654f, highest = 88.37626f;
    f32x16 y = choose(x < lowest, splat(lowest), x);
    y = choose(y > highest, splat(highest), y);
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, held in the low bits */
    f32x16 shifted = y * 1.44269504f + magic;
    f32x16 n = shifted - magic;
    f32x16 r = y - n * 0.693359375f + n * 2.12194440e-4f; /* ln 2 in two parts */
    f32x16 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    i32x16 exponent = ((i32x16)shifted - 0x4b400000 + 127) << 23;
    return choose(x < lowest, splat(0.0f), p * (f32x16)exponent);
}

/* ln x for normal positive x, to about 1e-7, relative. */
ALWAYS_INLINE f32x16 log16(f32x16 x) {
    i32x16 bits = (i32x16)x;
    i32x16 offset = bits - 0x3f3504f3; /* the mantissa in [sqrt(1/2), sqrt(2)) */
    i32x16 exponent = offset >> 23;
    f32x16 m = (f32x16)(bits - (exponent << 23)) - 1.0f;
    f32x16 e = __builtin_convertvector(exponent, f32x16);
    f32x16 p = m * 7.0376836292e-2f - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    f32x16 square = m * m;
    f32x16 tail = p * m * square + e * -2.12194440e-4f - 0.5f * square;
    return m + tail + e * 0.693359375f;
}

#endif
