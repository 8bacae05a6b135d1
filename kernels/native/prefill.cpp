// Attention of a prompt on a CPU: many queries attend to chosen rows, to rows that all of them see
// and, causally, to their own, in one pass over K and V. Products of 16-bit rows run in bfloat16
// pairs where the machine multiplies those, else in float32; of rows of 8 bits they run in whole numbers
// of 16 bits where that is fine enough. Softmax and sums are float32.
//
// A block of keys is packed once for some hundred queries, transposed, so that a vector holds as
// many keys; the weights of six queries then stay in the first cache until they meet the values.
#include <stdlib.h>

#include "prompt.h"
#include "team.h"

namespace {

constexpr int R = 6;              // rows of a product's tile
constexpr int N = W == 8 ? 2 : 4;  // and its vectors: 24 (12) sums stay in registers
constexpr int PANEL = N * W;

// What products multiply. `step`: inner dimensions of one element of a row; keep: W weights from key i on.
struct Single {
    typedef float Element;
    static constexpr int step = 1;
    static constexpr bool whole = false;
    typedef Floats Lanes, Sums;
    INLINE Lanes lanes(const Element *from) { return load(from); }
    INLINE Lanes same(Element a) { return all(a); }
    INLINE void add(Sums &sum, Lanes a, Lanes b) { sum += a * b; }
    INLINE Floats floats(Sums sum) { return sum; }
    INLINE void keep(Floats y, Element *to, int i) { store(to + i, y); }
};

#if defined(__AVX2__)
// whole numbers of 16 bits
struct Whole {
    typedef int32_t Element;
    static constexpr int step = 2;
    static constexpr bool whole = true;
    typedef Shorts Lanes, Sums;
    INLINE Lanes lanes(const Element *from) { return (Lanes)*(const Ints *)from; }
    INLINE Lanes same(Element a) { return everywhere(a); }
    INLINE void add(Sums &sum, Lanes a, Lanes b) { add_pairs(sum, a, b); }
    INLINE Floats floats(Sums sum) { return __builtin_convertvector((Ints)sum, Floats); }
    INLINE void keep(Floats y, Element *to, int i) {
#if defined(__AVX512F__)
        _mm256_storeu_si256((__m256i *)((int16_t *)to + i), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32((__m512)y)));
#else
        const __m256i found = _mm256_cvtps_epi32((__m256)y);
        const __m128i low = _mm256_castsi256_si128(found), high = _mm256_extracti128_si256(found, 1);
        _mm_storeu_si128((__m128i *)((int16_t *)to + i), _mm_packs_epi32(low, high));
#endif
    }
};
#endif

INLINE uint16_t rounded(float x) {  // to bfloat16, ties to even
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return 0x7fc0;
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

#if defined(HAS_PAIRS)
struct Pairs {
    typedef uint32_t Element;
    static constexpr int step = 2;
    static constexpr bool whole = false;
    typedef Floats Lanes;
    typedef Floats Sums;
    INLINE Lanes lanes(const Element *from) { return load((const float *)from); }
    INLINE Lanes same(Element a) { return (Floats)(Ints{} + (int32_t)a); }
    INLINE void add(Sums &sum, Lanes a, Lanes b) { sum = add_pairs(sum, a, b); }
    INLINE Floats floats(Sums sum) { return sum; }
    INLINE void keep(Floats y, Element *to, int i) { *(Halves *)((uint16_t *)to + i) = narrow_halves(y); }
};
#endif

// sums [T][N] = rows a [T] (`ahead` elements apart) times a panel [depth][PANEL].
template <class M, int T>
INLINE void multiply(const typename M::Element *a, long ahead, const typename M::Element *panel,
                     int depth, typename M::Sums (&sums)[T][N]) {
    UNROLL for (int r = 0; r < T; r++)
        UNROLL for (int j = 0; j < N; j++) sums[r][j] = typename M::Sums{};
    for (int p = 0; p < depth; p++) {
        typename M::Lanes b[N];
        UNROLL for (int j = 0; j < N; j++) b[j] = M::lanes(panel + p * PANEL + j * W);
        UNROLL for (int r = 0; r < T; r++) {
            const typename M::Lanes same = M::same(a[r * ahead + p]);
            UNROLL for (int j = 0; j < N; j++) M::add(sums[r][j], same, b[j]);
        }
    }
}

template <class M>
struct Work : Rows {  // of one thread
    typename M::Element *q, *keys, *values, *weights;
    float *logits;
    char *block;
    long row;  // elements of a row of q

    explicit Work(const Call &c) {
        row = c.dim / M::step, wide = (c.dim + PANEL - 1) / PANEL * PANEL;
        const long rows = UNIT + c.group + R;
        const long sizes[] = {rows * row, NEAR * row, NEAR / M::step * wide, R * NEAR, R * NEAR,
                              rows * wide, rows, rows, rows, NEAR, NEAR};
        long total = 0;
        for (long size : sizes) total += (size * 4 + 63) / 64 * 64;
        block = (char *)aligned_alloc(64, total);
        if (!block) return;
        char *at = block;
        void **const places[] = {(void **)&q, (void **)&keys, (void **)&values, (void **)&weights,
                                 (void **)&logits, (void **)&out, (void **)&best, (void **)&sum,
                                 (void **)&query_scale, (void **)&key_scale, (void **)&value_scale};
        for (int i = 0; i < 11; i++) *places[i] = at, at += (sizes[i] * 4 + 63) / 64 * 64;
    }
    ~Work() { free(block); }
};

// A row's elements as float32, or in pairs of bfloat16.
template <class X>
INLINE void put(const char *row, int dim, float *to, long apart) {
    for (int d = 0; d < dim; d += W) {
        float x[W];
        store(x, X::read(row, d));
        for (int i = 0; i < W; i++) to[(d + i) * apart] = x[i];
    }
}

template <class X>
INLINE void put(const char *row, int dim, uint32_t *to, long apart) {
    for (int d = 0; d < dim; d += W) {
        float x[W];
        store(x, X::read(row, d));
        for (int i = 0; i < W; i += 2) to[(d + i) / 2 * apart] = rounded(x[i]) | (uint32_t)rounded(x[i + 1]) << 16;
    }
}

template <>
inline void put<BFloat16>(const char *row, int dim, uint32_t *to, long apart) {
    for (int d = 0; d < dim; d += 2) memcpy(to + d / 2 * apart, row + 2 * d, 4);
}

#if defined(__AVX2__)
template <class X>
INLINE void put(const char *row, int dim, int32_t *to, long apart) {
    static_assert(X::integers, "rows of whole numbers");
    for (int d = 0; d < dim; d += 2) 
        to[d / 2 * apart] = (int32_t)((uint16_t)(int8_t)row[d] | (uint32_t)(int8_t)row[d + 1] << 16);
}
#endif

// A query's elements and their scale, 1 where they stay floats.
template <class Q, class Element>
INLINE float put_query(const char *row, int dim, Element *to) {
    put<Q>(row, dim, to, 1);
    return 1;
}

#if defined(__AVX2__)
template <class Q>
INLINE float put_query(const char *row, int dim, int32_t *to) {
    alignas(64) float x[WIDEST];
    for (int d = 0; d < dim; d += W) store(x + d, Q::read(row, d));
    const Steps steps(x, dim);
    Ints sum = {};
    for (int d = 0; d < dim; d += 16) _mm256_storeu_si256((__m256i *)(to + d / 2), shorts_of(x + d, steps.inverse, sum));
    return steps.step;
}
#endif

// values [panels][NEAR][PANEL] of float32, or [panels][NEAR / 2][PANEL] of pairs of two rows
template <class X>
INLINE void put_values(const char *const *rows, int dim, long wide, float *to) {
    for (int t = 0; t < NEAR; t++)
        for (long d = 0; d < wide; d += W)
            store(to + d / PANEL * NEAR * PANEL + t * PANEL + d % PANEL,
                  rows[t] && d < dim ? X::read(rows[t], d) : Floats{});
}

template <class X>
INLINE void put_values(const char *const *rows, int dim, long wide, uint32_t *to) {
    for (int t = 0; t < NEAR; t += 2)
        for (long d = 0; d < wide; d += W) {
            float x[2][W] = {};
            for (int i = 0; i < 2; i++)
                if (rows[t + i] && d < dim) store(x[i], X::read(rows[t + i], d));
            uint32_t *at = to + d / PANEL * (NEAR / 2) * PANEL + t / 2 * PANEL + d % PANEL;
            for (int i = 0; i < W; i++) at[i] = rounded(x[0][i]) | (uint32_t)rounded(x[1][i]) << 16;
        }
}

template <>
inline void put_values<BFloat16>(const char *const *rows, int dim, long wide, uint32_t *to) {
    for (int t = 0; t < NEAR; t += 2)
        for (long d = 0; d < wide; d += W) {
            Ints x[2] = {};
            for (int i = 0; i < 2; i++)
                if (rows[t + i] && d < dim)
                    x[i] = __builtin_convertvector(*(const Halves *)(rows[t + i] + 2 * d), Ints);
            *(Ints *)(to + d / PANEL * (NEAR / 2) * PANEL + t / 2 * PANEL + d % PANEL) = x[0] | x[1] << 16;
        }
}

#if defined(__AVX2__)
template <class X>
INLINE void put_values(const char *const *rows, int dim, long wide, int32_t *to) {
    for (int t = 0; t < NEAR; t += 2)
        for (long d = 0; d < wide; d += W) {
            Ints x[2] = {};
            for (int i = 0; i < 2; i++)
                if (rows[t + i] && d < dim) x[i] = __builtin_convertvector(X::read(rows[t + i], d), Ints);
            *(Ints *)(to + d / PANEL * (NEAR / 2) * PANEL + t / 2 * PANEL + d % PANEL) = (x[0] & 0xffff) | x[1] << 16;
        }
}
#endif

// Pack keys and values of visited rows t .. t+count-1, zeros behind them.
template <class M, class X>
static void pack(const Call &c, int head, int t, int count, Work<M> &w) {
    const char *rows[NEAR] = {};
    const long panel = w.row * PANEL;
    if (X::scaled)
        for (int i = count; i < NEAR; i++) w.value_scale[i] = 0;
    if (count < NEAR) memset(w.keys, 0, sizeof(*w.keys) * NEAR * w.row);
    for (int i = 0; i < count; i++) {
        const long row = row_of(c, head, t + i);
        const char *from = c.k + head * c.key_head + row * c.key_row;
        put<X>(from, c.dim, w.keys + i / PANEL * panel + i % PANEL, PANEL);
        if (X::scaled) w.key_scale[i] = X::scale(from, c.dim);
        rows[i] = c.v + head * c.value_head + row * c.value_row;
        if (X::scaled) w.value_scale[i] = X::scale(rows[i], c.dim);
    }
    put_values<X>(rows, c.dim, w.wide, w.values);
#if defined(__AVX2__)
    if (M::whole) in_steps(w);
#endif
}

// T rows of a unit, from row `at`, meet the block of keys that is packed: visited rows from t on.
template <class M, class X, int T>
static void meet(const Call &c, Work<M> &w, int first, int at, int t, int count) {
    typename M::Sums sums[T][N];
    float steps[T];
    for (int panel = 0; panel < NEAR; panel += PANEL) {
        multiply<M, T>(w.q + at * w.row, w.row, w.keys + panel * w.row, w.row, sums);
        for (int r = 0; r < T; r++)
            for (int j = 0; j < N; j++) store(w.logits + r * NEAR + panel + j * W, M::floats(sums[r][j]));
    }
    for (int r = 0; r < T; r++) {
        const Span seen = seen_of(c, first + (at + r) / c.group, t, count);
        steps[r] = soften<M, X>(c, w, w.logits + r * NEAR, seen, at + r, w.weights + r * (NEAR / M::step));
    }
    for (long d = 0; d < w.wide; d += PANEL) {
        multiply<M, T>(w.weights, NEAR / M::step, w.values + d * (NEAR / M::step), NEAR / M::step, sums);
        for (int r = 0; r < T; r++)
            for (int j = 0; j < N; j++) {
                float *to = w.out + (at + r) * w.wide + d + j * W;
                store(to, load(to) + M::floats(sums[r][j]) * steps[r]);
            }
    }
}

template <class M, class Q>
static void take_queries(const Call &c, int head, int first, int rows, Work<M> &w) {
    for (int r = 0; r < rows; r++) {
        const long query = first + r / c.group, at = head * c.group + r % c.group;
        const char *const from = c.q + (query * c.query + at * c.query_head) * Q::bytes;
        w.query_scale[r] = put_query<Q>(from, c.dim, w.q + r * w.row);
        w.best[r] = -INFINITY, w.sum[r] = 0;
    }
    memset(w.out, 0, sizeof(float) * rows * w.wide);
    for (int i = 0; i < NEAR; i++) w.key_scale[i] = w.value_scale[i] = 0;
}

// Queries first .. last-1 under one K/V head.
template <class M, class Q, class X>
static void run_unit(const Call &c, int head, int first, int last, Work<M> &w) {
    const int rows = (last - first) * c.group;
    take_queries<M, Q>(c, head, first, rows, w);
    const Span all = visited_of(c, first, last);
    for (int t = all.low; t < all.high; t += NEAR) {
        const int count = all.high - t < NEAR ? all.high - t : NEAR;
        pack<M, X>(c, head, t, count, w);
        for (int at = 0; at < rows; at += R) {
            const int tile = rows - at < R ? rows - at : R;
            // nobody in the tile sees the block yet
            if (c.causal && c.high + first + (at + tile - 1) / c.group < t) continue;
            switch (tile) {
            case 6: meet<M, X, 6>(c, w, first, at, t, count); break;
            case 5: meet<M, X, 5>(c, w, first, at, t, count); break;
            case 4: meet<M, X, 4>(c, w, first, at, t, count); break;
            case 3: meet<M, X, 3>(c, w, first, at, t, count); break;
            case 2: meet<M, X, 2>(c, w, first, at, t, count); break;
            default: meet<M, X, 1>(c, w, first, at, t, count);
            }
        }
    }
    give(c, w, head, first, rows);
}

// Returns 0, or 2 where there is no memory for a thread's work.
template <class M, class Q, class X>
static int run(const Call &c) {
    if (c.queries < 1) return 0;
    std::atomic<int> lacking{0};
    const int most = UNIT / c.group > 0 ? UNIT / c.group : 1;
    // as many units for a few threads, but none that packs for a handful of queries
    const int units = (c.queries + most - 1) / most, size = (c.queries + units - 1) / units;
    const long parts = (long)units * c.kv_heads;
    in_pieces(c.threads, parts, 1, [&](Pieces &pieces) {
        Work<M> work(c);
        if (!work.block) lacking = 1;
        for (long at, stop; work.block && pieces.next(at, stop);)
            for (long i = at; i < stop; i++) {
                const long part = largest_first(i, parts, c.threads);  // later queries see more rows
                const int first = part / c.kv_heads * size, end = first + size < c.queries ? first + size : c.queries;
                if (first < end) run_unit<M, Q, X>(c, part % c.kv_heads, first, end, work);
            }
    });
    return lacking ? 2 : 0;
}

}  // namespace

// kinds of q, a float, and of rows, q's or INT8. Returns 0, 1 for a pair that this build lacks, or 2
// without memory.
extern "C" int omnikv_prefill(const Call *c, int q, int rows) {
#if defined(HAS_PAIRS)
    if (q == BFLOAT16 && rows == BFLOAT16) return run<Pairs, BFloat16, BFloat16>(*c);
#else
    if (q == BFLOAT16 && rows == BFLOAT16) return run<Single, BFloat16, BFloat16>(*c);
#endif
    if (q == FLOAT32 && rows == FLOAT32) return run<Single, Float32, Float32>(*c);
#if defined(__AVX2__)
    if (q == FLOAT32 && rows == INT8 && !c->exact && c->dim <= WIDEST) return run<Whole, Float32, Int8>(*c);
#endif
    if (q == FLOAT32 && rows == INT8) return run<Single, Float32, Int8>(*c);
#if defined(HAS_FLOAT16)
    if (q == FLOAT16 && rows == FLOAT16) return run<Single, Float16, Float16>(*c);
#endif
    return 1;
}

extern "C" int omnikv_sizeof_prefill_call() { return sizeof(Call); }
