// Logits by an index of K: some channels of it, which lie token beside token, or tables of what each code
// gives. Equal rows and equal codes have equal logits, wherever they lie.
#pragma once
#include "rounding.h"

namespace {

// Of one K/V head. `given`: of channels [group][terms], parts of the queries; of codes [terms][group][sums].
struct Indexed {
    const float *given;
    const int64_t *rows;  // [terms]: channels
    const char *index;    // [..][tokens]: K by channel, or codes
    long index_row;       // bytes
    float *out;           // [group][tokens]
    long out_query;       // elements
    int group, terms, sums;
};

constexpr int WIDE = 4;      // vectors of a tile
constexpr int TILE = 4;      // queries of a tile
constexpr int NEXT = 8 * W;  // tokens from a tile to what is fetched

INLINE void store_some(float *to, int count, Floats x) {
    if (count >= W) store(to, x);
    else memcpy(to, &x, sizeof(float) * count);
}

// Logits of T queries on tokens t .. t + V * W - 1, or on `count` of W: behind the last there may be no
// memory.
template <class K, int T, int V>
INLINE void some_channels(const Indexed &c, const float *given, int t, int count, float *out) {
    Floats sums[T][V] = {};
    for (int i = 0; i < c.terms; i++) {
        const char *row = c.index + c.rows[i] * c.index_row + (long)t * K::bytes;
        for (int v = 0; v < V; v++) {
            if (V > 1) __builtin_prefetch(row + (v * W + NEXT) * K::bytes);
            const Floats x = V > 1 ? K::read(row, v * W) : read_some<K>(row, 0, count);
            for (int r = 0; r < T; r++) sums[r][v] += x * given[r * c.terms + i];
        }
    }
    for (int r = 0; r < T; r++)
        for (int v = 0; v < V; v++) store_some(out + r * c.out_query + t + v * W, count, sums[r][v]);
}

template <class K, int T>
INLINE void queries_channels(const Indexed &c, int g, int t, int stop) {
    const float *given = c.given + g * c.terms;
    float *out = c.out + g * c.out_query;
    for (; t + WIDE * W <= stop; t += WIDE * W) some_channels<K, T, WIDE>(c, given, t, W, out);
    for (; t < stop; t += W) some_channels<K, T, 1>(c, given, t, stop - t, out);
}

// Of tokens first .. stop - 1, as `codes`.
template <class K>
void channels(const Indexed &c, int first, int stop) {
    int g = 0;
    for (; g + TILE <= c.group; g += TILE) queries_channels<K, TILE>(c, g, first, stop);
    for (; g + 2 <= c.group; g += 2) queries_channels<K, 2>(c, g, first, stop);
    for (; g < c.group; g++) queries_channels<K, 1>(c, g, first, stop);
}

constexpr int HELD = 64;  // entries of a table that lies in registers

INLINE Ints codes_at(const uint8_t *row) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)row));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)row));
#elif defined(__ARM_NEON)
    uint32_t four;
    memcpy(&four, row, sizeof four);
    return (Ints)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
#else
    Ints found;
    for (int i = 0; i < W; i++) found[i] = row[i];
    return found;
#endif
}
INLINE Ints codes_at(const int32_t *row) { return *(const Ints *)row; }

// Entries code % (2 W) of a table of two vectors.
INLINE Floats of_two(const float *table, Ints code) {
#if defined(__AVX512F__)
    return (Floats)_mm512_permutex2var_ps((__m512)load(table), (__m512i)code, (__m512)load(table + W));
#elif defined(__AVX2__)
    const __m256 low = _mm256_permutevar8x32_ps((__m256)load(table), (__m256i)code);
    const __m256 high = _mm256_permutevar8x32_ps((__m256)load(table + W), (__m256i)code);
    return (Floats)_mm256_blendv_ps(low, high, (__m256)(code << 28));
#else
    Floats found;
    for (int i = 0; i < W; i++) found[i] = table[code[i] & (2 * W - 1)];
    return found;
#endif
}

// Entries of a table of `sums` floats, HELD at most and whole vectors in memory.
INLINE Floats looked_up(const float *table, int sums, Ints code) {
#if defined(__ARM_NEON)  // by their bytes; what lies outside a part of the table stays
    const uint8x16_t bytes = (uint8x16_t)(code * 0x04040404 + 0x03020100);
    uint8x16_t found = {};
    for (int at = 0; at < sums; at += 2 * W) {
        const uint8x16x2_t part = {{(uint8x16_t)load(table + at), (uint8x16_t)load(table + at + W)}};
        found = vqtbx2q_u8(found, part, vsubq_u8(bytes, vdupq_n_u8((uint8_t)(4 * at))));
    }
    return (Floats)found;
#else
    Floats found = of_two(table, code);
    for (int at = 2 * W; at < sums; at += 2 * W) found = code >= at ? of_two(table + at, code) : found;
    return found;
#endif
}

// Entries of a row of a table in memory: whole pairs of vectors.
constexpr int table_row(int sums) { return (sums + 2 * W - 1) / (2 * W) * (2 * W); }

// Sums of entries, or of entries that are weights products.
template <class Code, bool weights>
void codes(const Indexed &c, int first, int stop) {
    const int row_floats = table_row(c.sums);
    for (int g = 0; g < c.group; g++) {
        float *out = c.out + g * c.out_query;
        int t = first;
        for (; c.sums <= HELD && t + W <= stop; t += W) {
            Floats found = all(weights ? 1 : 0);
            for (int p = 0; p < c.terms; p++) {
                const Code *row = (const Code *)(c.index + p * c.index_row) + t;
                const float *table = c.given + ((long)p * c.group + g) * row_floats;
                const Floats x = looked_up(table, c.sums, codes_at(row));
                found = weights ? found * x : found + x;
            }
            store(out + t, found);
        }
        for (; t < stop; t++) {
            float found = weights ? 1 : 0;
            for (int p = 0; p < c.terms; p++) {
                const Code *row = (const Code *)(c.index + p * c.index_row);
                const float x = c.given[((long)p * c.group + g) * row_floats + row[t]];
                found = weights ? found * x : found + x;
            }
            out[t] = found;
        }
    }
}

}  // namespace
