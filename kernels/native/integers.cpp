// Many rows of 16-bit floats times weights of few bits, in whole numbers. Some 256 columns of a row of x
// at a time become numbers of 16 bits under one scale, and the weights stay what they are. Sums are
// whole for a fold, the columns that have one scale of the weights.
//
// A cell is two columns of one output, 16 bits each, or of a row of x. Their order within a word of a
// panel is the one in which two shifts take them apart.
#include "few_bits.h"
#include "team.h"
#include "whole.h"

namespace {

#if defined(__AVX2__)
constexpr int DEPTH = 128;  // cells of NR outputs: 32 KB (AVX2: 8)
constexpr int LEAST = 32, MOST = 128;  // columns of a fold, in 16s: fewer cost too much, more leave 32 bits
constexpr int FOLDS = 2 * DEPTH / LEAST;  // of a depth

#if defined(__AVX512F__)
INLINE Shorts shifted(Shorts x, int left) { return _mm512_slli_epi16(x, left); }
template <int BITS>  // the upper bits of each 16, with their sign
INLINE Shorts upper(Shorts x) { return _mm512_srai_epi16(x, 16 - BITS); }
#else
INLINE Shorts shifted(Shorts x, int left) { return _mm256_slli_epi16(x, left); }
template <int BITS>
INLINE Shorts upper(Shorts x) { return _mm256_srai_epi16(x, 16 - BITS); }
#endif

// 16 whole numbers of 16 bits: columns of words in the order of their cells.
template <int BITS>
INLINE __m256i ordered(const float *x, float inverse, Ints &sum) {
    const __m256i narrow = shorts_of(x, inverse, sum);
    const __m128i eight = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    const __m128i four = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    return _mm256_shuffle_epi8(narrow, _mm256_broadcastsi128_si256(BITS == 4 ? eight : four));
}

INLINE int sum_of(Ints x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)x);
#else
    int found = 0;
    for (int i = 0; i < W; i++) found += x[i];
    return found;
#endif
}

// What a depth of words has: cells of a row, and of its folds, all but the last as long.
struct Depth {
    int words, cells, of_fold, folds;
    long record;  // of a row of x: its cells, their scale and the sum of each fold

    Depth(const Product &p, int words) : words(words) {
        const int columns = words * (32 / p.bits);
        cells = columns / 2, of_fold = p.fold / 2, folds = (columns + p.fold - 1) / p.fold;
        record = cells + 1 + folds;
    }
};

// Columns of a depth from `first` on, of one row: its record. What is not finite makes the row NaN.
template <int BITS>
static void pack(const Product &p, int row, int first, const Depth &d, int32_t *to) {
    alignas(64) float x[2 * DEPTH + 2 * W];
    const long from = (long)row * p.inputs + first;
    const int count = 2 * d.cells, left = p.inputs - first < count ? p.inputs - first : count;
    for (int c = 0; c < count + W; c += W) store(x + c, left > c ? some_as(p.kind, p.x, from + c, left - c) : Floats{});
    const Steps steps(x, count);
    memcpy(to + d.cells, &steps.step, 4);
    for (int f = 0; f < d.folds; f++) {
        alignas(64) int32_t cells[MOST / 2 + W];
        const int here = f * d.of_fold, some = d.cells - here < d.of_fold ? d.cells - here : d.of_fold;
        Ints sum = {};
        for (int c = 0; c < 2 * some; c += 16)
            _mm256_storeu_si256((__m256i *)(cells + c / 2), ordered<BITS>(x + 2 * here + c, steps.inverse, sum));
        memcpy(to + here, cells, some * 4);
        const float whole = p.zero || p.offsets ? (float)sum_of(sum) : 0;
        memcpy(to + d.cells + 1 + f, &whole, 4);
    }
}

// Pairs of words k .. stop-1 of LANES outputs, to[cell][NR], with scales and offsets, [fold][NR].
template <int BITS, class S>
static void widen(const Product &p, int panel, int k, const Depth &d, int32_t *to, float *scales, float *offsets) {
    constexpr int CELLS = 16 / BITS;
    const int groups = (p.inputs + p.group - 1) / p.group;
    const int32_t *words = p.values + ((long)panel * p.words + k) * LANES;
    for (int i = 0; i < d.words; i++)
        for (int v = 0; v < VECTORS; v++) {
            const int32_t *at = words + (long)i * LANES + v * W;
            __builtin_prefetch((const char *)at + AHEAD, 0, 2);
            const Shorts word = (Shorts)*(const Ints *)at;
            UNROLL for (int j = 0; j < CELLS; j++) {
                const Shorts moved = j + 1 < CELLS ? shifted(word, 16 - BITS * (j + 1)) : word;
                *(Ints *)(to + (i * CELLS + j) * NR + v * W) = (Ints)upper<BITS>(moved);
            }
        }
    for (int f = 0; f < d.folds; f++) {
        const int g = (k * (32 / BITS) + f * p.fold) / p.group;
        const long from = ((long)panel * groups + (g < groups ? g : groups - 1)) * LANES * S::bytes;
        for (int v = 0; v < VECTORS; v++) {
            const Floats scale = S::read((const char *)p.scales + from, v * W);
            Floats offset = scale * (float)p.zero;
            if (p.offsets) offset += S::read((const char *)p.offsets + from, v * W);
            store(scales + f * NR + v * W, scale), store(offsets + f * NR + v * W, offset);
        }
    }
}

// Adds MR rows x, records of a depth, times its weights to sums [MR][NR].
template <bool SHIFTED>
__attribute__((noinline)) static void multiply_tile(const int32_t *x, const Depth &d, const int32_t *weights,
                                                    const float *scales, const float *offsets, bool fresh,
                                                    float *to) {
    alignas(64) float found[MR * NR];
    const float *const of_row = (const float *)(x + d.cells);  // its scale and sums
    for (int f = 0; f < d.folds; f++) {
        Shorts sums[MR][NV];
        UNROLL for (int r = 0; r < MR; r++)
            UNROLL for (int v = 0; v < NV; v++) sums[r][v] = Shorts{};
        const int first = f * d.of_fold, stop = d.cells < first + d.of_fold ? d.cells : first + d.of_fold;
        for (int k = first; k < stop; k++) {
            Shorts w[NV];
            UNROLL for (int v = 0; v < NV; v++) w[v] = (Shorts)*(const Ints *)(weights + k * NR + v * W);
            UNROLL for (int r = 0; r < MR; r++) {
                const Shorts same = everywhere(x[r * d.record + k]);
                UNROLL for (int v = 0; v < NV; v++) add_pairs(sums[r][v], w[v], same);
            }
        }
        UNROLL for (int r = 0; r < MR; r++)
            UNROLL for (int v = 0; v < NV; v++) {
                float *at = found + r * NR + v * W;
                Floats y = f ? load(at) : Floats{};
                // GCC 12 would round some products together with a sum, and some not
                y += apart(__builtin_convertvector((Ints)sums[r][v], Floats) * load(scales + f * NR + v * W));
                if (SHIFTED) y += apart(load(offsets + f * NR + v * W) * of_row[r * d.record + f + 1]);
                store(at, y);
            }
        asm volatile("" : : : "memory");  // else these sums would take the registers of the others
    }
    for (int r = 0; r < MR; r++)
        for (int v = 0; v < NV; v++) {
            float *at = to + r * NR + v * W;
            const Floats y = apart(load(found + r * NR + v * W) * of_row[r * d.record]);
            store(at, fresh ? y : load(at) + y);
        }
}

// scratch: x as [blocks of rows][depths][rows][record]
template <int BITS, class S>
static void many_rows(const Product &p) {
    constexpr int PARTS = 32 / BITS;
    const int step = DEPTH * 2 / p.fold * (p.fold / PARTS);  // words of a depth
    const int depths = (p.words + step - 1) / step, rest = p.words - (depths - 1) * step;
    const Depth whole(p, step), last(p, rest);
    const long row_size = whole.record * (depths - 1) + last.record;
    const int tiles = (p.rows + MR - 1) / MR, strips = (p.outputs + NR - 1) / NR;
    const int of_block = tiles_of_block(tiles, strips, p.threads);
    const int panels = (p.outputs + LANES - 1) / LANES, blocks = (tiles + of_block - 1) / of_block;
    int32_t *const packed = (int32_t *)p.scratch;
    // rows of block `first` tiles on, at a depth
    const auto place = [&](int first, int beside, int depth) {
        return packed + (long)first * MR * row_size + (long)beside * MR * whole.record * depth;
    };
    share(p.threads, tiles, 1, [&](int tile) {
        const int first = tile / of_block * of_block;
        const int beside = tiles - first < of_block ? tiles - first : of_block;
        for (int n = 0; n < depths; n++) {
            const Depth &d = n + 1 < depths ? whole : last;
            int32_t *to = place(first, beside, n) + (long)(tile - first) * MR * d.record;
            for (int r = 0; r < MR; r++, to += d.record) {
                if (tile * MR + r < p.rows) pack<BITS>(p, tile * MR + r, n * step * PARTS, d, to);
                else memset(to, 0, d.record * 4);
            }
        }
    });
    share(p.threads, (long)blocks * strips, 1, [&](int work) {
        alignas(64) float sums[BLOCK_TILES * MR * NR], scales[FOLDS * NR], offsets[FOLDS * NR];
        alignas(64) int32_t weights[DEPTH * NR];
        const int output = work % strips * NR, first = work / strips * of_block;
        const int beside = tiles - first < of_block ? tiles - first : of_block;
        for (int n = 0; n < depths; n++) {
            const Depth &d = n + 1 < depths ? whole : last;
            for (int o = 0; o < NR; o += LANES) {
                const int panel = (output + o) / LANES;  // the last one again beyond the end: not used
                widen<BITS, S>(p, panel < panels ? panel : panels - 1, n * step, d, weights + o, scales + o,
                               offsets + o);
            }
            const int32_t *x = place(first, beside, n);
            for (int tile = 0; tile < beside; tile++, x += MR * d.record) {
                float *to = sums + tile * MR * NR;
                if (p.zero || p.offsets) multiply_tile<true>(x, d, weights, scales, offsets, !n, to);
                else multiply_tile<false>(x, d, weights, scales, offsets, !n, to);
            }
        }
        const int rows = p.rows - first * MR < beside * MR ? p.rows - first * MR : beside * MR;
        const int count = p.outputs - output < NR ? p.outputs - output : NR;
        for (int r = 0; r < rows; r++) finish(p, first * MR + r, sums + r * NR, nullptr, output, count);
    });
}

template <int BITS>
static void multiply(const Product &p) {
    if (p.scale_kind == FLOAT32) many_rows<BITS, Float32>(p);
    else if (p.scale_kind == BFLOAT16) many_rows<BITS, BFloat16>(p);
    else many_rows<BITS, Float16>(p);
}
#endif

}  // namespace

// Returns whether this build multiplies whole numbers faster than anything else: pairs of bfloat16 keep
// up with them, and need no scale for every fold.
extern "C" int omnikv_has_integers() {
#if defined(__AVX2__) && !defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}

// x of 16 bits, folds of LEAST to MOST columns
extern "C" void omnikv_integers(const Product *p) {
#if defined(__AVX2__)
    if (p->bits == 8) multiply<8>(*p);
    else multiply<4>(*p);
#else
    (void)p;
#endif
}
