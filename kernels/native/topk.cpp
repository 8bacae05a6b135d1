// The k largest of many scores, ascending by index: the lower index of equal scores, NaN lowest.
// Three digits of the scores' bits are counted, of 11, 11 and 10 bits, each among the scores that
// share the digits before; a last pass writes indices. Where few share the first digit with the last
// place, that pass comes before, and what is left to find out is about these. Nothing is sorted.
#include "scratch.h"
#include "vector.h"

namespace {

// Ordered as the floats are: -0 is 0, NaN is minus infinity.
INLINE Ints ordered(Floats x) {
    const Ints bits = (Ints)(x == x ? x + 0.f : all(-INFINITY));
    return bits ^ (bits >> 31 & 0x7FFFFFFF);
}

INLINE int32_t ordered(float x) {
    const float plain = x == x ? x + 0.f : -INFINITY;
    int32_t bits;
    memcpy(&bits, &plain, sizeof bits);
    return bits ^ (bits >> 31 & 0x7FFFFFFF);
}

INLINE uint32_t lanes(Ints mask) {  // one bit for each lane of -1
#if defined(__AVX512F__)
    return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX2__)
    return _mm256_movemask_ps((__m256)mask);
#elif defined(__ARM_NEON)
    return vaddvq_s32((int32x4_t)(mask & Ints{1, 2, 4, 8}));
#else
    uint32_t found = 0;
    for (int i = 0; i < W; i++) found |= (uint32_t)(mask[i] != 0) << i;
    return found;
#endif
}

constexpr int BINS = 2048, COPIES = 4;  // copies: equal digits in turn need not wait for each other

struct Scores {
    const float *of;
    int count;
    // Keys of a vector from i on; behind the last score they are of no matter.
    Ints keys(int i, uint32_t &valid) const {
        valid = (1u << W) - 1;
        if (i + W <= count) return ordered(load(of + i));
        float rest[W] = {};
        memcpy(rest, of + i, sizeof(float) * (count - i));
        valid = (1u << (count - i)) - 1;
        return ordered(load(rest));
    }
};

// Counts digit (key >> shift) % size of the keys whose bits from `above` on are those of `prefix`;
// above 32: of all keys.
static void count_digit(const Scores &scores, int above, int32_t prefix, int shift, int size,
                        int32_t (*bins)[BINS]) {
    memset(bins, 0, sizeof(int32_t) * COPIES * BINS);
    for (int i = 0; i < scores.count; i += W) {
        uint32_t wanted;
        const Ints keys = scores.keys(i, wanted);
        // as numbers without a sign, whose digits are in their order
        const Ints digits = (keys ^ INT32_MIN) >> shift & (size - 1);
        if (above < 32) wanted &= lanes((keys >> above) == prefix);
        alignas(64) int32_t held[W];
        memcpy(held, &digits, sizeof held);
        if (wanted == (1u << W) - 1)
            for (int j = 0; j < W; j++) bins[j % COPIES][held[j]]++;
        else
            for (; wanted; wanted &= wanted - 1) bins[0][held[__builtin_ctz(wanted)]]++;
    }
}

// The digit in which the `missing`-th largest lies; missing becomes its rank among that digit's.
static int crossing(const int32_t (*bins)[BINS], int size, int &missing) {
    int above = size;  // digits from here on are too few
    for (; above > W; above -= W) {
        Ints sums = {};
        for (int copy = 0; copy < COPIES; copy++) sums += *(const Ints *)(bins[copy] + above - W);
        int found = 0;
        for (int i = 0; i < W; i++) found += sums[i];
        if (found >= missing) break;
        missing -= found;
    }
    for (int digit = above - 1;; digit--) {
        int found = 0;
        for (int copy = 0; copy < COPIES; copy++) found += bins[copy][digit];
        if (found >= missing || !digit) return digit;
        missing -= found;
    }
}

// The key of the last place, whose first digit is `key`; missing becomes how many of its equals have one.
static int32_t last_place(const Scores &scores, uint32_t key, int &missing, int32_t (*bins)[BINS]) {
    count_digit(scores, 21, (int32_t)(key << 21 ^ 0x80000000u) >> 21, 10, BINS, bins);
    key = key << 11 | crossing(bins, BINS, missing);
    count_digit(scores, 10, (int32_t)(key << 10 ^ 0x80000000u) >> 10, 0, 1024, bins);
    key = key << 10 | crossing(bins, 1024, missing);
    return (int32_t)(key ^ 0x80000000u);
}

constexpr int FEW = 4096;  // scores that share the first digit

// `select` where `shared` scores have the first digit `key`, of which `missing` have a place: these and
// the larger ones are listed, and of these alone the other digits are counted. False without memory.
static bool select_listed(const Scores &scores, int kept, int first, uint32_t key, int missing, int shared,
                          int32_t (*bins)[BINS], int32_t *out) {
    static thread_local Scratch scratch;
    const int listed = kept - missing + shared;
    int32_t *const at = (int32_t *)scratch.get(sizeof(int32_t) * (listed + W + shared));
    if (!at) return false;
    float *const equal = (float *)(at + listed + W);
    const int32_t least = (int32_t)(key << 21 ^ 0x80000000u);
    int found = 0, equals = 0;
#if defined(__AVX512F__)
    const __m512i places = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#endif
    for (int i = 0; i < scores.count; i += W) {
        uint32_t valid;
        const Ints keys = scores.keys(i, valid);
        uint32_t chosen = lanes(keys >= least) & valid;
#if defined(__AVX512F__)
        const __m512i own = _mm512_add_epi32(places, _mm512_set1_epi32(i));
        _mm512_storeu_si512(at + found, _mm512_maskz_compress_epi32(chosen, own));
        found += __builtin_popcount(chosen);
#else
        for (; chosen; chosen &= chosen - 1) at[found++] = i + __builtin_ctz(chosen);
#endif
    }
    for (int i = 0; i < listed; i++) {
        const float x = scores.of[at[i]];
        equal[equals] = x;  // one place more is written over
        equals += ordered(x) >> 21 == least >> 21;
        if (equals == shared) break;
    }
    const int32_t floor = last_place({equal, shared}, key, missing, bins);
    for (int i = 0, taken = 0; taken < kept; i++) {
        const int32_t own = ordered(scores.of[at[i]]);
        out[taken] = first + at[i];  // written over where it has no place
        taken += own > floor || (own == floor && missing-- > 0);
    }
    return true;
}

static void select(const Scores &scores, int kept, int first, int32_t *out) {
    int32_t bins[COPIES][BINS];
    int missing = kept, shared = 0;
    count_digit(scores, 32, 0, 21, BINS, bins);
    const uint32_t key = crossing(bins, BINS, missing);
    for (int copy = 0; copy < COPIES; copy++) shared += bins[copy][key];
    if (shared <= FEW && select_listed(scores, kept, first, key, missing, shared, bins, out)) return;
    const int32_t floor = last_place(scores, key, missing, bins);  // `missing` of its equals have a place
    for (int i = 0; i < scores.count; i += W) {
        uint32_t valid;
        const Ints keys = scores.keys(i, valid);
        const uint32_t above = lanes(keys > floor) & valid;
        uint32_t chosen = lanes(keys >= floor) & valid;
        for (; chosen; chosen &= chosen - 1) {
            const int j = __builtin_ctz(chosen);
            if (!(above >> j & 1) && missing-- <= 0) continue;
            *out++ = first + i + j;
        }
    }
}

}  // namespace

// kernels/select/topk.py: select_topk of rows of `columns` scores, `stride` floats apart.
extern "C" void omnikv_topk(const float *scores, long stride, int rows, int columns, const int32_t *lo,
                            const int32_t *hi, const int32_t *k, int32_t *out, int room, int32_t *counts) {
    for (int b = 0; b < rows; b++) {
        const int first = lo[b] > 0 ? lo[b] : 0, stop = hi[b] < columns ? hi[b] : columns;
        const int count = stop > first ? stop - first : 0;
        int kept = k[b] < count ? k[b] : count;
        kept = kept < 0 ? 0 : kept > room ? room : kept;
        int32_t *const to = out + (long)b * room;
        if (kept == count)
            for (int i = 0; i < kept; i++) to[i] = first + i;
        else if (kept)
            select({scores + b * stride + first, count}, kept, first, to);
        for (int i = kept; i < room; i++) to[i] = -1;
        counts[b] = kept;
    }
}
