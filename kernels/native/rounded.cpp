// Many rows times weights of few bits where the rows are rounded to 8 bits: GROUP columns of a row under one
// scale, the largest of them over 127. Sums are whole for a fold, the columns that have one scale of the row
// and one of the weights; then they become floats.
//
// A cell is four columns of one output or row, 8 bits each. Where an instruction takes one factor without a sign
// (F::raised), a row's bytes are 128 too large, and what that adds to a fold's sum is taken off again where the
// weights' scale is multiplied: a whole number of 12 bits times a scale of 16 bits is a float, so nothing is lost.
#include "few_bits.h"
#include "team.h"
#if defined(__AVX2__) && !defined(__AVX512F__)
#include <cpuid.h>
#endif

namespace {

constexpr int GROUP = 32;    // columns of a row that have one scale
constexpr int COLUMNS = 256;  // of a depth: NR outputs of it are 16 KB (AVX2: 4)
constexpr int CELLS = COLUMNS / 4;
constexpr int FOLDS = CELLS;  // of a depth, at most
constexpr float LARGEST = 127;
static_assert(MR <= 8, "rows are turned by eight");
constexpr int KNOWN = 3;  // what a row knows of a fold: its step, the sum of its bytes, and that of its columns
constexpr int RAISED = 128;

typedef int8_t Bytes __attribute__((vector_size(W)));

INLINE Ints everywhere(int32_t cell) { return cell - Ints{}; }

// a * b + c, rounded once
INLINE Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    for (int i = 0; i < W; i++) c[i] = fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

INLINE Ints nearest(Floats x) {  // ties to even
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtps_epi32((__m256)x);
#elif defined(__ARM_NEON)
    return (Ints)vcvtnq_s32_f32((float32x4_t)x);
#else
    Ints found;
    for (int i = 0; i < W; i++) found[i] = (int32_t)rintf(x[i]);
    return found;
#endif
}

INLINE int most_int(Ints x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)x);
#elif defined(__AVX2__)
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1)));
#elif defined(__ARM_NEON)
    return vmaxvq_s32((int32x4_t)x);
#else
    int found = x[0];
    for (int i = 1; i < W; i++) found = x[i] > found ? x[i] : found;
    return found;
#endif
}

INLINE int sum_int(Ints x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)x);
#elif defined(__ARM_NEON)
    return vaddvq_s32((int32x4_t)x);
#else
    int found = 0;
    for (int i = 0; i < W; i++) found += x[i];
    return found;
#endif
}

// How cells of rows and weights are multiplied, and what their sum is at the end. Beside intrinsics GCC copies
// every sum, so the instructions are written out.
#if defined(__AVX512VNNI__)
struct Fours {
    static constexpr bool raised = true, nibbles = false;
    INLINE void add(Ints &sum, Ints x, Ints w) { asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w)); }
    INLINE Ints whole(Ints sum) { return sum; }
};
typedef Fours Best;
#elif defined(__AVX2__)
// 16 bits cannot hold the sum of two products of 8 bits, but that of 16 products of 4 bits and 8. So weights of
// 8 bits, 128 too large, are two nibbles, and a fold's sum is that of the upper ones and then of the lower ones.
struct Nibbles {
    static constexpr bool raised = false, nibbles = true;
    INLINE void add(Ints &sum, Ints x, Ints w) {
        Ints both;
        asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+v"(sum), "=&v"(both) : "v"(w), "v"(x));
    }
#if defined(__AVX512F__)
    INLINE Ints whole(Ints sum) { return (Ints)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16(1)); }
#else
    INLINE Ints whole(Ints sum) { return (Ints)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1)); }
#endif
};
typedef Nibbles Best;
#elif defined(__ARM_NEON)
struct Fours {
    static constexpr bool raised = false, nibbles = false;
    INLINE void add(Ints &sum, Ints x, Ints w) {
        const int8x16_t a = (int8x16_t)w, b = (int8x16_t)x;
#if defined(__ARM_FEATURE_DOTPROD)
        sum = (Ints)vdotq_s32((int32x4_t)sum, a, b);
#else
        const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b)), high = vmull_high_s8(a, b);
        sum = (Ints)vpadalq_s16((int32x4_t)sum, vpaddq_s16(low, high));
#endif
    }
    INLINE Ints whole(Ints sum) { return sum; }
};
typedef Fours Best;
#else
struct Fours {
    static constexpr bool raised = false, nibbles = false;
    INLINE void add(Ints &sum, Ints x, Ints w) {
        for (int i = 0; i < W; i++)
            for (int j = 0; j < 32; j += 8) sum[i] += (int8_t)(w[i] >> j) * (int8_t)(x[i] >> j);
    }
    INLINE Ints whole(Ints sum) { return sum; }
};
typedef Fours Best;
#endif

// CPUs without AVX512 may have its instruction for 256 bits, in an encoding of its own.
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__clang__) && __GNUC__ >= 12
#define HAS_SHORT_FOURS 1
struct ShortFours {
    static constexpr bool raised = true, nibbles = false;
    INLINE void add(Ints &sum, Ints x, Ints w) {
        asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(x), "x"(w));
    }
    INLINE Ints whole(Ints sum) { return sum; }
};
static bool has_short_fours() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
#endif

// What a depth of words has. A tile of rows is, for each fold, [cells][MR] and what its rows know, [KNOWN][MR].
struct Depth {
    int words, cells, of_fold, folds;
    long record;  // of a tile

    Depth(const Product &p, int words) : words(words) {
        cells = words * (32 / p.bits) / 4, of_fold = p.fold / 4;
        folds = (cells + of_fold - 1) / of_fold;
        record = ((long)folds * of_fold + folds * KNOWN) * MR;
    }
};

// GROUP columns of a row, their scale, and what they are multiplied by to be whole numbers: 0 and NaN where one of
// them is not finite. Floats that are too small for a reciprocal become larger ones.
struct Rounded {
    Floats x[GROUP / W];
    float step, inverse;

    // `left` columns from `from` on, and zeros
    Rounded(const Product &p, long from, int left) {
        Ints top = {};
        UNROLL for (int i = 0; i < GROUP / W; i++) {
            x[i] = left >= (i + 1) * W ? read_as(p.kind, p.x, from + i * W) : Floats{};
            if (left > i * W && left < (i + 1) * W) x[i] = some_as(p.kind, p.x, from + i * W, left - i * W);
            const Ints size = (Ints)x[i] & 0x7fffffff;
            top = size > top ? size : top;
        }
        const int bits = most_int(top);
        float reach, unit = 1;
        memcpy(&reach, &bits, 4);
        if (__builtin_expect(reach < 1e-30f, 0)) {
            unit = 0x1p-64f, reach *= 0x1p64f;
            UNROLL for (int i = 0; i < GROUP / W; i++) x[i] *= 0x1p64f;
        }
        const bool finite = reach <= 3.4028234e38f;
        inverse = finite && reach > 0 ? LARGEST / reach : 0;
        step = finite ? reach / LARGEST * unit : NAN;
    }

    // as bytes, in the order of words' cells
    template <int BITS>
    void put(int8_t *to) const {
        UNROLL for (int i = 0; i < GROUP / W; i++)
            *(Bytes *)(to + i * W) = __builtin_convertvector(nearest(x[i] * inverse), Bytes);
        if (BITS == 8) return;
#if defined(__AVX2__)
        const __m128i apart = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
        __m256i *const all = (__m256i *)to;
        *all = _mm256_shuffle_epi8(*all, _mm256_broadcastsi128_si256(apart));
#else
        int8_t held[GROUP];
        memcpy(held, to, GROUP);
        for (int c = 0; c < GROUP; c += 8)
            for (int i = 0; i < 4; i++) to[c + i] = held[c + 2 * i], to[c + 4 + i] = held[c + 2 * i + 1];
#endif
    }
};

// What a row knows of a fold of its own, `own`.
INLINE void know(const int8_t *own, float step, int of_fold, int32_t *known) {
    int sum = 0;
    for (int c = 0; c < 4 * of_fold; c++) sum += own[c];
    const float shift = (float)sum * step;
    memcpy(known + MR, &sum, 4), memcpy(known + 2 * MR, &shift, 4);
}

#if defined(__AVX2__)
// Eight rows of eight cells become eight cells of eight rows.
INLINE void turn_cells(__m256i *x) {
    __m256i a[8], b[8];
    UNROLL for (int i = 0; i < 8; i += 2)
        a[i] = _mm256_unpacklo_epi32(x[i], x[i + 1]), a[i + 1] = _mm256_unpackhi_epi32(x[i], x[i + 1]);
    UNROLL for (int i = 0; i < 8; i += 4)
        UNROLL for (int k = 0; k < 2; k++) {
            b[i + 2 * k] = _mm256_unpacklo_epi64(a[i + k], a[i + 2 + k]);
            b[i + 2 * k + 1] = _mm256_unpackhi_epi64(a[i + k], a[i + 2 + k]);
        }
    UNROLL for (int i = 0; i < 4; i++) {
        x[i] = _mm256_permute2x128_si256(b[i], b[4 + i], 0x20);
        x[4 + i] = _mm256_permute2x128_si256(b[i], b[4 + i], 0x31);
    }
}
#endif

// Columns of a depth from `first` on of `rows` rows of a tile, the first of which is `row`. summed: their sums are
// asked for.
template <class F, int BITS>
static void pack(const Product &p, int row, int rows, int first, const Depth &d, bool summed, int32_t *to) {
    const int all = d.folds * d.of_fold, per_group = GROUP / 4;
    for (int g = 0; g < all; g += per_group) {
        alignas(64) int8_t bytes[8][GROUP] = {};
        float steps[8] = {};
        for (int r = 0; r < rows; r++) {
            const long at = (long)(row + r) * p.inputs + first + 4 * g;
            // of the next depth: rows are too far apart for the machine to see it coming
            __builtin_prefetch((const char *)p.x + (at + COLUMNS) * (p.kind == FLOAT32 ? 4 : 2));
            const Rounded found(p, at, p.inputs - first - 4 * g);
            found.put<BITS>(bytes[r]);
            steps[r] = found.step;
        }
#if defined(__AVX2__)
        if (d.of_fold == per_group) {
            int32_t *const fold = to + (long)(g / per_group) * (per_group + KNOWN) * MR;
            __m256i cells[8];
            UNROLL for (int r = 0; r < 8; r++) {
                cells[r] = _mm256_load_si256((const __m256i *)bytes[r]);
                if (F::raised) cells[r] = _mm256_xor_si256(cells[r], _mm256_set1_epi8(-128));
            }
            turn_cells(cells);
            // two numbers too many each, which what follows overwrites
            UNROLL for (int k = 0; k < per_group; k++) _mm256_storeu_si256((__m256i *)(fold + k * MR), cells[k]);
            _mm256_storeu_ps((float *)(fold + per_group * MR), _mm256_loadu_ps(steps));
            for (int r = 0; summed && r < MR; r++) know(bytes[r], steps[r], per_group, fold + per_group * MR + r);
            continue;
        }
#endif
        for (int i = g; i < g + per_group && i < all; i += d.of_fold) {
            int32_t *const fold = to + (long)(i / d.of_fold) * (d.of_fold + KNOWN) * MR;
            int32_t *const known = fold + d.of_fold * MR;
            for (int r = 0; r < MR; r++) {
                const int8_t *const own = bytes[r] + 4 * (i - g);
                for (int k = 0; k < d.of_fold; k++) {
                    int32_t cell;
                    memcpy(&cell, own + 4 * k, 4);
                    fold[k * MR + r] = F::raised ? cell ^ (int)0x80808080 : cell;
                }
                memcpy(known + r, steps + r, 4);
                if (summed) know(own, steps[r], d.of_fold, known + r);
            }
        }
    }
}

// Cells of NR outputs, [passes][cells][NR], and of each fold, [NR], scales, what rows that are RAISED add, and offsets.
struct Strip {
    alignas(64) int32_t cells[2 * CELLS * NR];
    alignas(64) float scales[FOLDS * NR], raised[FOLDS * NR], offsets[FOLDS * NR];
};

// Words k .. of LANES outputs, which are `lane` .. of a strip. of_rows: one scale a row, which is multiplied last.
template <class F, int BITS, class S>
static void widen(const Product &p, int panel, int k, const Depth &d, int lane, bool of_rows, Strip &s) {
    constexpr int PARTS = 32 / BITS, OF_WORD = PARTS / 4, NIBBLE = 0x0f0f0f0f;
    const int groups = (p.inputs + p.group - 1) / p.group;
    const int32_t *words = p.values + ((long)panel * p.words + k) * LANES;
    for (int i = 0; i < d.folds * d.of_fold / OF_WORD; i++)
        for (int v = 0; v < VECTORS; v++) {
            const int32_t *at = words + (long)i * LANES + v * W;
            __builtin_prefetch((const char *)at + AHEAD, 0, 2);
            Ints word = i < d.words ? *(const Ints *)at : Ints{};
            int32_t *to = s.cells + i * OF_WORD * NR + lane + v * W;
            if (BITS == 4) {
                word ^= (int)0x88888888;  // a value without a sign
                *(Ints *)to = word & NIBBLE, *(Ints *)(to + NR) = word >> 4 & NIBBLE;
            } else if (F::nibbles) {
                word ^= (int)0x80808080;
                *(Ints *)to = word >> 4 & NIBBLE, *(Ints *)(to + CELLS * NR) = word & NIBBLE;
            } else *(Ints *)to = word;
        }
    for (int f = 0; f < d.folds; f++) {
        const int g = (k * PARTS + f * p.fold) / p.group;
        const long from = ((long)panel * groups + (g < groups ? g : groups - 1)) * LANES * S::bytes;
        for (int v = 0; v < VECTORS; v++) {
            const int at = f * NR + lane + v * W;
            const Floats scale = S::read((const char *)p.scales + from, v * W);
            store(s.scales + at, scale);
            if (p.offsets) store(s.offsets + at, S::read((const char *)p.offsets + from, v * W));
            if (!F::raised) continue;
            Ints sum = {};
            for (int i = f * d.of_fold; i < (f + 1) * d.of_fold; i++)
                F::add(sum, Ints{} + 0x01010101, *(const Ints *)(s.cells + i * NR + lane + v * W));
            const Floats raised = __builtin_convertvector(F::whole(sum) * -RAISED, Floats);
            store(s.raised + at, of_rows ? raised : raised * scale);
        }
    }
}

enum End { ROWS, GROUPS, OFFSETS };  // one scale of weights for all columns; for groups; and offsets

// Adds the products of a tile, its record of a depth, and a strip to sums [MR][NR].
template <class F, int BITS, End END>
INLINE void multiply_tile(const int32_t *x, const Depth &d, const Strip &s, float *to) {
    for (int f = 0; f < d.folds; f++) {
        const int32_t *const known = x + d.of_fold * MR, *const weights = s.cells + f * d.of_fold * NR;
        const float *const steps = (const float *)known, *const of_columns = steps + 2 * MR;
        Ints sums[MR][NV];
        const auto pass = [&](const int32_t *from) __attribute__((always_inline)) {
            UNROLL for (int r = 0; r < MR; r++)
                UNROLL for (int v = 0; v < NV; v++) sums[r][v] = Ints{};
            for (int k = 0; k < d.of_fold; k++) {
                Ints w[NV];
                UNROLL for (int v = 0; v < NV; v++) w[v] = *(const Ints *)(from + k * NR + v * W);
                UNROLL for (int r = 0; r < MR; r++) {
                    const Ints same = everywhere(x[k * MR + r]);
                    UNROLL for (int v = 0; v < NV; v++) F::add(sums[r][v], same, w[v]);
                }
            }
        };
        alignas(64) int32_t upper[MR * NR];
        pass(weights);
        if (F::nibbles && BITS == 8) {
            UNROLL for (int r = 0; r < MR; r++)
                UNROLL for (int v = 0; v < NV; v++)
                    *(Ints *)(upper + r * NR + v * W) = (F::whole(sums[r][v]) << 4) - RAISED * known[MR + r];
            pass(weights + CELLS * NR);
        }
        UNROLL for (int v = 0; v < NV; v++) {
            const Floats scale = load(s.scales + f * NR + v * W), raised = load(s.raised + f * NR + v * W);
            UNROLL for (int r = 0; r < MR; r++) {
                float *at = to + r * NR + v * W;
                Ints whole = F::whole(sums[r][v]);
                if (F::nibbles && BITS == 8) whole += *(const Ints *)(upper + r * NR + v * W);
                Floats y = __builtin_convertvector(whole, Floats);
                if (END == ROWS) y = F::raised ? y + raised : y;
                else y = F::raised ? fused(y, scale, raised) : y * scale;
                y = fused(y, all(steps[r]), load(at));
                if (END == OFFSETS) y = fused(load(s.offsets + f * NR + v * W), all(of_columns[r]), y);
                store(at, y);
            }
        }
        asm volatile("" : : : "memory");  // else these sums would take the registers of the others
        x += (d.of_fold + KNOWN) * MR;
    }
}

template <class F, int BITS, End END>
__attribute__((noinline)) static void multiply_tiles(const int32_t *x, int count, const Depth &d, const Strip &s,
                                                     float *to) {
    for (int tile = 0; tile < count; tile++, x += d.record, to += MR * NR) multiply_tile<F, BITS, END>(x, d, s, to);
}

// scratch: x as [blocks of rows][depths][tiles][record]
template <class F, int BITS, class S, End END>
static void many_rows(const Product &p) {
    constexpr int PARTS = 32 / BITS, STEP = COLUMNS / PARTS;  // words of a depth
    const int depths = (p.words + STEP - 1) / STEP;
    const Depth whole(p, depths > 1 ? STEP : p.words), last(p, p.words - (depths - 1) * STEP);
    const long of_tile = whole.record * (depths - 1) + last.record;
    const int tiles = (p.rows + MR - 1) / MR, strips = (p.outputs + NR - 1) / NR;
    const int of_block = tiles_of_block(tiles, strips, p.threads);
    const int panels = (p.outputs + LANES - 1) / LANES, blocks = (tiles + of_block - 1) / of_block;
    int32_t *const packed = (int32_t *)p.scratch;
    // rows of block `first` tiles on, at a depth
    const auto place = [&](int first, int beside, int depth) {
        return packed + (long)first * of_tile + (long)beside * whole.record * depth;
    };
    const bool summed = p.offsets || (F::nibbles && BITS == 8);
    share(p.threads, tiles, 1, [&](int tile) {
        const int first = tile / of_block * of_block;
        const int beside = tiles - first < of_block ? tiles - first : of_block;
        for (int n = 0; n < depths; n++) {
            const Depth &d = n + 1 < depths ? whole : last;
            int32_t *to = place(first, beside, n) + (long)(tile - first) * d.record;
            const int left = p.rows - tile * MR;
            pack<F, BITS>(p, tile * MR, left < MR ? left : MR, n * COLUMNS, d, summed, to);
        }
    });
    share(p.threads, (long)blocks * strips, 1, [&](int work) {
        alignas(64) float sums[BLOCK_TILES * MR * NR];
        Strip strip;
        const int output = work % strips * NR, first = work / strips * of_block;
        const int beside = tiles - first < of_block ? tiles - first : of_block;
        memset(sums, 0, (size_t)beside * MR * NR * 4);
        for (int n = 0; n < depths; n++) {
            const Depth &d = n + 1 < depths ? whole : last;
            for (int o = 0; o < NR; o += LANES) {
                const int panel = (output + o) / LANES;  // the last one again beyond the end: not used
                widen<F, BITS, S>(p, panel < panels ? panel : panels - 1, n * STEP, d, o, END == ROWS, strip);
            }
            multiply_tiles<F, BITS, END>(place(first, beside, n), beside, d, strip, sums);
        }
        const int rows = p.rows - first * MR < beside * MR ? p.rows - first * MR : beside * MR;
        const int count = p.outputs - output < NR ? p.outputs - output : NR;
        for (int r = 0; r < rows; r++) {
            float *at = sums + r * NR;
            if (END == ROWS)
                for (int o = 0; o < NR; o += W) store(at + o, load(at + o) * load(strip.scales + o));
            finish(p, first * MR + r, at, nullptr, output, count);
        }
    });
}

template <int BITS, class S, End END>
static void run(const Product &p, bool brief) {
#if defined(HAS_SHORT_FOURS)
    if (brief) return many_rows<ShortFours, BITS, S, END>(p);
#endif
    (void)brief;
    many_rows<Best, BITS, S, END>(p);
}

template <int BITS, class S>
static void multiply(const Product &p, bool brief) {
    if (p.offsets) run<BITS, S, OFFSETS>(p, brief);
    else if (p.group >= p.inputs) run<BITS, S, ROWS>(p, brief);
    else run<BITS, S, GROUPS>(p, brief);
}

template <int BITS>
static void multiply(const Product &p, bool brief) {
    if (p.scale_kind == FLOAT32) multiply<BITS, Float32>(p, brief);
    else if (p.scale_kind == BFLOAT16) multiply<BITS, BFloat16>(p, brief);
#if defined(HAS_FLOAT16)
    else multiply<BITS, Float16>(p, brief);
#endif
}

}  // namespace

// Rows rounded to 8 bits; a fold divides GROUP. plain: without what only some CPUs of this build's set have.
extern "C" void omnikv_rounded(const Product *p, int plain) {
    bool brief = false;
#if defined(HAS_SHORT_FOURS)
    brief = !plain && has_short_fours();
#endif
    (void)plain;
    if (p->bits == 8) multiply<8>(*p, brief);
    else multiply<4>(*p, brief);
}
