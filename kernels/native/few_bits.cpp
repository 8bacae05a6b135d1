// Products with weights of few bits. A few rows: weights become floats in registers and multiply
// float32 activations. Many rows: some outputs' weights at a time become floats, or pairs of
// bfloat16, and a tile of rows is multiplied by them.
//
// A panel holds LANES outputs: for each few columns one 32-bit word of every output. Part j of a word
// belongs to its j-th column, from the lowest bits up, and has a sign.
#include "few_bits.h"
#include "team.h"

namespace {

constexpr int FEW = W == 16 ? 8 : 4;  // rows that share a panel's floats

// ---- a few rows

// x [inputs] as floats, zeros behind it, and the sums of its folds
static void prepare(const Product &p, int row, int padded, float *x, float *sums) {
    const long from = (long)row * p.inputs;
    for (int c = 0; c < padded; c += W) store(x + c, some_as(p.kind, p.x, from + c, p.inputs - c));
    for (int c = 0, f = 0; c < padded; c += p.fold, f++) {
        double sum = 0;
        if (p.zero || p.offsets)  // otherwise they are multiplied by nothing
            for (int i = c; i < c + p.fold && i < padded; i++) sum += x[i];
        sums[f] = (float)sum;
    }
}

template <int BITS, int R, int N, int J>
INLINE void multiply_parts(const Ints *words, const float *const *x, int at, Floats (*sums)[N][VECTORS]) {
    for (int v = 0; v < VECTORS; v++) {
        const Floats w = part<BITS, J>(words[v]);
        for (int r = 0; r < R; r++) sums[r][J % N][v] += w * x[r][at + J];
    }
    if constexpr (BITS * (J + 1) < 32) multiply_parts<BITS, R, N, J + 1>(words, x, at, sums);
}

// R rows times one panel: LANES sums of each
template <int BITS, class S, int R>
static void multiply_panel(const Product &p, int panel, const float *const *x, const float *const *folds,
                           float *const *out) {
    constexpr int PARTS = 32 / BITS;
    constexpr int N = R * VECTORS <= 2 ? 4 : R * VECTORS <= 4 ? 2 : 1;  // sums side by side hide the latency
    const int groups = (p.inputs + p.group - 1) / p.group, step = p.fold / PARTS;
    const int32_t *words = p.values + (long)panel * p.words * LANES;
    const long first = (long)panel * groups * LANES * S::bytes;
    const char *scales = (const char *)p.scales + first;
    const char *offsets = p.offsets ? (const char *)p.offsets + first : nullptr;
    Floats found[R][VECTORS] = {};
    for (int k = 0, f = 0, inside = 0; k < p.words; k += step, f++) {
        const int stop = k + step < p.words ? k + step : p.words;
        Floats sums[R][N][VECTORS] = {};
        __builtin_prefetch(scales + SCALES_AHEAD);
        if (offsets) __builtin_prefetch(offsets + SCALES_AHEAD);
        for (int i = k; i < stop; i++) {
            const int32_t *at = words + (long)i * LANES;
            Ints held[VECTORS];
            __builtin_prefetch((const char *)at + AHEAD, 0, 2);
            for (int v = 0; v < VECTORS; v++) held[v] = *(const Ints *)(at + v * W);
            multiply_parts<BITS, R, N, 0>(held, x, i * PARTS, sums);
        }
        for (int v = 0; v < VECTORS; v++) {
            const Floats scale = S::read(scales, v * W), unit = scale * UNIT<BITS>;
            Floats offset = scale * (float)p.zero;
            if (offsets) offset += S::read(offsets, v * W);
            for (int r = 0; r < R; r++) {
                for (int n = 1; n < N; n++) sums[r][0][v] += sums[r][n][v];
                found[r][v] += sums[r][0][v] * unit + offset * folds[r][f];
            }
        }
        inside += p.fold;
        if (inside < p.group) continue;
        inside = 0, scales += LANES * S::bytes;
        if (offsets) offsets += LANES * S::bytes;
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) store(out[r] + v * W, found[r][v]);
}

template <int BITS, class S>
static void few_rows(const Product &p) {
    const int padded = (p.words * (32 / BITS) + LANES - 1) / LANES * LANES;
    const int folds = (padded + p.fold - 1) / p.fold;
    const int panels = (p.outputs + LANES - 1) / LANES;
    const long ahead = few_floats(p);
    for (int row = 0; row < p.rows; row++)
        prepare(p, row, padded, p.scratch + row * ahead, p.scratch + row * ahead + padded);
    const long bytes = (long)LANES * p.words * 4;
    share(p.threads, panels, bytes < PIECE ? PIECE / bytes : 1, [&](int panel) {
        for (int row = 0; row < p.rows; row += FEW) {
            const float *x[FEW], *sums[FEW];
            float *out[FEW];
            for (int r = 0; r < FEW; r++) {
                float *at = p.scratch + (row + r < p.rows ? row + r : row) * ahead;
                x[r] = at, sums[r] = at + padded, out[r] = at + padded + folds + (long)panel * LANES;
            }
            const int left = p.rows - row;  // those that are not there are the first one again
            if (left == 1) multiply_panel<BITS, S, 1>(p, panel, x, sums, out);
            else if (left == 2) multiply_panel<BITS, S, 2>(p, panel, x, sums, out);
            else if (left <= 4 || FEW == 4) multiply_panel<BITS, S, 4>(p, panel, x, sums, out);
            else if (left <= 6) multiply_panel<BITS, S, FEW == 4 ? 4 : 6>(p, panel, x, sums, out);
            else multiply_panel<BITS, S, FEW>(p, panel, x, sums, out);
        }
    });
    for (int row = 0; row < p.rows; row++) {
        const float *sums = p.scratch + row * ahead + padded + folds;
        finish(p, row, sums, sums + p.outputs / 2, 0, p.gated ? p.outputs / 2 : p.outputs);
    }
}

// One row each of products that differ in x and in what they point to alone: all panels are shared at once.
template <int BITS, class S>
static void together(const Product *ps, int count) {
    const Product &p = ps[0];
    const int padded = (p.words * (32 / BITS) + LANES - 1) / LANES * LANES, folds = (padded + p.fold - 1) / p.fold;
    const int panels = (p.outputs + LANES - 1) / LANES;
    const float *prepared[TOGETHER];
    for (int i = 0; i < count; i++) {
        const bool again = i && ps[i].x == ps[i - 1].x;
        prepared[i] = again ? prepared[i - 1] : ps[i].scratch;
        if (!again) prepare(ps[i], 0, padded, ps[i].scratch, ps[i].scratch + padded);
    }
    const long bytes = (long)LANES * p.words * 4;
    share(p.threads, (long)count * panels, bytes < PIECE ? PIECE / bytes : 1, [&](long work) {
        const int i = work / panels, panel = work % panels;
        const float *x[] = {prepared[i]}, *sums[] = {prepared[i] + padded};
        float *out[] = {ps[i].scratch + padded + folds + (long)panel * LANES};
        multiply_panel<BITS, S, 1>(ps[i], panel, x, sums, out);
    });
    for (int i = 0; i < count; i++) {
        const float *sums = ps[i].scratch + padded + folds;
        finish(ps[i], 0, sums, sums + p.outputs / 2, 0, p.gated ? p.outputs / 2 : p.outputs);
    }
}

// ---- many rows

constexpr int DEPTH = W == 16 ? 128 : 256;  // cells of NR outputs: 32 KB (AVX2: 16)

struct Singles {
    static constexpr int columns = 1;
    typedef float Cell;
    INLINE void pack(const Product &p, int row, int first, int count, Cell *to) {
        const long at = (long)row * p.inputs + first;
        for (int c = 0; c < count; c += W) {
            const Floats x = some_as(p.kind, p.x, at + c, p.inputs - first - c);
            if (c + W <= count) store(to + c, x);
            else
                for (int i = 0; c + i < count; i++) to[c + i] = x[i];
        }
    }
    INLINE void weights(Cell *to, Floats first, Floats second) { store(to, first), store(to + NR, second); }
    INLINE Floats add(Floats sum, Floats weights, Cell x) { return sum + weights * x; }
};

#if defined(HAS_PAIRS)
// two columns of bfloat16 at a time
struct Pairs {
    static constexpr int columns = 2;
    typedef uint32_t Cell;
    INLINE void pack(const Product &p, int row, int first, int count, Cell *to) {
        const int left = p.inputs - first < count ? p.inputs - first : count;
        memcpy(to, (const uint16_t *)p.x + (long)row * p.inputs + first, left * 2);
        memset((uint16_t *)to + left, 0, (count - left) * 2);
    }
    INLINE void weights(Cell *to, Floats first, Floats second) {
#if defined(__ARM_NEON)
        const bfloat16x8_t low = vcvtq_low_bf16_f32((float32x4_t)first);
        const uint16x8_t both = (uint16x8_t)vcvtq_high_bf16_f32(low, (float32x4_t)second);
        const uint16x8_t apart = vextq_u16(both, both, 4);
        store((float *)to, (Floats)vzip1q_u16(both, apart));
#else
        const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                               23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
        _mm512_storeu_si512(to, _mm512_permutexvar_epi16(order, both));
#endif
    }
    INLINE Floats add(Floats sum, Floats weights, Cell x) {
        return add_pairs(sum, weights, (Floats)(Ints{} + (int32_t)x));
    }
};
#endif

template <int BITS, class T, int J>
INLINE void widen_parts(Ints words, Floats unit, Floats offset, typename T::Cell *to) {
    T::weights(to + J / T::columns * NR, part<BITS, J>(words) * unit + offset,
               part<BITS, J + 1>(words) * unit + offset);
    if constexpr (BITS * (J + 2) < 32) widen_parts<BITS, T, J + 2>(words, unit, offset, to);
}

// Columns of words k .. stop-1 of LANES outputs: to[column][NR].
template <int BITS, class S, class T>
static void widen(const Product &p, int panel, int k, int stop, typename T::Cell *to) {
    constexpr int PARTS = 32 / BITS;
    const int groups = (p.inputs + p.group - 1) / p.group;
    const int32_t *words = p.values + (long)panel * p.words * LANES;
    const long first = (long)panel * groups * LANES * S::bytes;
    for (int i = k; i < stop;) {
        const int g = i * PARTS / p.group, end = (g + 1 == groups ? p.words : (g + 1) * (p.group / PARTS));
        const int last = end < stop ? end : stop;
        for (int v = 0; v < VECTORS; v++) {
            const long from = first + (long)g * LANES * S::bytes;
            const Floats scale = S::read((const char *)p.scales + from, v * W), unit = scale * UNIT<BITS>;
            Floats offset = scale * (float)p.zero;
            if (p.offsets) offset += S::read((const char *)p.offsets + from, v * W);
            for (int n = i; n < last; n++) {
                const int32_t *at = words + (long)n * LANES + v * W;
                __builtin_prefetch((const char *)at + AHEAD, 0, 2);
                widen_parts<BITS, T, 0>(*(const Ints *)at, unit, offset,
                                        to + (n - k) * (PARTS / T::columns) * NR + v * W);
            }
        }
        i = last;
    }
}

// Adds x [MR][depth] times weights [depth][NR] to sums [MR][NR].
template <class T>
static void multiply_tile(const typename T::Cell *x, const typename T::Cell *weights, int depth, bool fresh,
                          float *to) {
    Floats sums[MR][NV];
    for (int r = 0; r < MR; r++)
        for (int v = 0; v < NV; v++) sums[r][v] = Floats{};
    for (int k = 0; k < depth; k++) {
        Floats w[NV];
        for (int v = 0; v < NV; v++) w[v] = load((const float *)(weights + k * NR) + v * W);
        for (int r = 0; r < MR; r++)
            for (int v = 0; v < NV; v++) sums[r][v] = T::add(sums[r][v], w[v], x[r * depth + k]);
    }
    for (int r = 0; r < MR; r++)
        for (int v = 0; v < NV; v++) {
            float *at = to + r * NR + v * W;
            store(at, fresh ? sums[r][v] : load(at) + sums[r][v]);  // sums of sums err less
        }
}

// scratch: x as [blocks of rows][depths][tiles][MR][columns], in cells
template <int BITS, class S, class T>
static void many_rows(const Product &p) {
    constexpr int PARTS = 32 / BITS, STEP = DEPTH * T::columns / PARTS;  // words of a depth
    typedef typename T::Cell Cell;
    Cell *const packed = (Cell *)p.scratch;
    const int cells = p.words * PARTS / T::columns, tiles = (p.rows + MR - 1) / MR;
    const int strips = (p.outputs + NR - 1) / NR, of_block = tiles_of_block(tiles, strips, p.threads);
    const int panels = (p.outputs + LANES - 1) / LANES, blocks = (tiles + of_block - 1) / of_block;
    share(p.threads, tiles, 1, [&](int tile) {
        const int block = tile / of_block, first = block * of_block;
        const int beside = tiles - first < of_block ? tiles - first : of_block;
        for (int k = 0; k < p.words; k += STEP) {
            const int words = p.words - k < STEP ? p.words - k : STEP, depth = words * PARTS / T::columns;
            Cell *to = packed + (long)first * MR * cells + (long)beside * MR * (k * PARTS / T::columns) +
                       (long)(tile - first) * MR * depth;
            for (int r = 0; r < MR; r++, to += depth) {
                if (tile * MR + r < p.rows) T::pack(p, tile * MR + r, k * PARTS, words * PARTS, to);
                else memset(to, 0, depth * sizeof(Cell));
            }
        }
    });
    share(p.threads, (long)blocks * strips, 1, [&](int work) {
        alignas(64) float sums[BLOCK_TILES * MR * NR];
        alignas(64) Cell weights[DEPTH * NR];
        const int block = work / strips, output = work % strips * NR, first = block * of_block;
        const int beside = tiles - first < of_block ? tiles - first : of_block;
        for (int k = 0; k < p.words; k += STEP) {
            const int words = p.words - k < STEP ? p.words - k : STEP, depth = words * PARTS / T::columns;
            for (int n = 0; n < NR; n += LANES) {
                const int panel = (output + n) / LANES;  // the last one again beyond the end: not used
                widen<BITS, S, T>(p, panel < panels ? panel : panels - 1, k, k + words, weights + n);
            }
            const long before = (long)first * cells + (long)beside * (k * PARTS / T::columns);
            const Cell *x = packed + before * MR;
            for (int tile = 0; tile < beside; tile++)
                multiply_tile<T>(x + (long)tile * MR * depth, weights, depth, !k, sums + tile * MR * NR);
        }
        const int rows = p.rows - first * MR < beside * MR ? p.rows - first * MR : beside * MR;
        const int count = p.outputs - output < NR ? p.outputs - output : NR;
        for (int r = 0; r < rows; r++) finish(p, first * MR + r, sums + r * NR, nullptr, output, count);
    });
}

template <int BITS, class S>
static void multiply(const Product &p, int many) {
    if (!many) few_rows<BITS, S>(p);
#if defined(HAS_PAIRS)
    else if (p.kind == BFLOAT16) many_rows<BITS, S, Pairs>(p);
#endif
    else many_rows<BITS, S, Singles>(p);
}

template <int BITS>
static void multiply(const Product &p, int many) {
    if (p.scale_kind == FLOAT32) multiply<BITS, Float32>(p, many);
    else if (p.scale_kind == BFLOAT16) multiply<BITS, BFloat16>(p, many);
#if defined(HAS_FLOAT16)
    else multiply<BITS, Float16>(p, many);
#endif
}

template <int BITS>
static void together(const Product *ps, int count) {
    if (ps->scale_kind == FLOAT32) together<BITS, Float32>(ps, count);
    else if (ps->scale_kind == BFLOAT16) together<BITS, BFloat16>(ps, count);
#if defined(HAS_FLOAT16)
    else together<BITS, Float16>(ps, count);
#endif
}

}  // namespace

// many: by tiles of rows; SwiGLU is not for those
extern "C" void omnikv_few_bits(const Product *p, int many) {
    if (p->bits == 8) multiply<8>(*p, many);
    else multiply<4>(*p, many);
}

// Products of one row each, at most TOGETHER, of one form and size.
extern "C" void omnikv_few_bits_together(const Product *ps, int count) {
    if (ps->bits == 8) together<8>(ps, count);
    else together<4>(ps, count);
}

extern "C" int omnikv_sizeof_few_bits() { return sizeof(Product); }
