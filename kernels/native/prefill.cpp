// Attention of a prompt on a CPU: many queries attend to chosen rows, to rows that all of them see
// and, causally, to their own, in one pass over K and V. Products of 16-bit rows run in bfloat16
// pairs where the machine multiplies those, else in float32; of rows of 8 bits they run in whole numbers
// of 16 bits where that is fine enough, those with keys in numbers of 8 bits where they may. Softmax and
// sums are float32.
//
// A block of keys is packed once for some hundred queries, transposed, so that a vector holds as
// many keys; the weights of six queries then stay in the first cache until they meet the values.
#include <stdlib.h>

#include "across.h"
#include "prompt.h"
#include "team.h"

namespace {

constexpr int R = 6;              // rows of a product's tile
constexpr int N = W == 8 ? 2 : 4;  // and its vectors: 24 (12) sums stay in registers
constexpr int PANEL = N * W;

// What products multiply. `step`: inner dimensions of one element of a row; start: of a sum, of a row whose
// own start is given; keep: 2 W weights from key i on, each times a scale.
struct Single {
    typedef float Element;
    static constexpr int step = 1;
    static constexpr bool whole = false;
    typedef Floats Lanes, Sums;
    INLINE Lanes lanes(const Element *from) { return load(from); }
    INLINE Lanes same(Element a) { return all(a); }
    INLINE void add(Sums &sum, Lanes a, Lanes b) { sum += a * b; }
    INLINE Sums start(int32_t) { return Sums{}; }
    INLINE Floats floats(Sums sum) { return sum; }
    INLINE void keep(Floats one, Floats two, Floats s, Floats t, Element *to, int i) {
        store(to + i, one * s), store(to + i + W, two * t);
    }
};

#if defined(__AVX2__)
#if defined(__AVX512F__)
struct Evens {  // the lower 16 bits of each 32, of two vectors
    int16_t of[32];
    constexpr Evens() : of() {
        for (int i = 0; i < 32; i++) of[i] = 2 * i;
    }
};
#endif

// whole numbers of 16 bits
struct Whole {
    typedef int32_t Element;
    static constexpr int step = 2;
    static constexpr bool whole = true;
    typedef Shorts Lanes, Sums;
    INLINE Lanes lanes(const Element *from) { return (Lanes)*(const Ints *)from; }
    INLINE Lanes same(Element a) { return everywhere(a); }
    INLINE void add(Sums &sum, Lanes a, Lanes b) { add_pairs(sum, a, b); }
    INLINE Sums start(int32_t) { return Sums{}; }
    INLINE Floats floats(Sums sum) { return __builtin_convertvector((Ints)sum, Floats); }
    INLINE void keep(Floats one, Floats two, Floats s, Floats t, Element *to, int i) {
#if defined(__AVX512F__)
        alignas(64) static constexpr Evens evens;
        const __m512i low = (__m512i)in_lower_bits(one, s), high = (__m512i)in_lower_bits(two, t);
        const __m512i found = _mm512_permutex2var_epi16(low, _mm512_load_si512(evens.of), high);
        _mm512_storeu_si512((int16_t *)to + i, found);
#else
        const __m256i low = _mm256_cvtps_epi32((__m256)(one * s)), high = _mm256_cvtps_epi32((__m256)(two * t));
        const __m256i found = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
        _mm256_storeu_si256((__m256i *)((int16_t *)to + i), found);
#endif
    }
};
#endif

#if defined(__AVX512VNNI__)
// whole numbers of 8 bits, for products with keys: those are 128 too large, which the start of a sum
// takes off
struct Bytes {
    typedef int32_t Element;
    static constexpr int step = 4;
    static constexpr bool whole = true;
    typedef Shorts Lanes, Sums;
    INLINE Lanes lanes(const Element *from) { return _mm512_loadu_si512(from); }
    INLINE Lanes same(Element a) { return everywhere(a); }
    INLINE void add(Sums &sum, Lanes a, Lanes b) { add_fours(sum, a, b); }
    INLINE Sums start(int32_t own) { return everywhere(own); }
    INLINE Floats floats(Sums sum) { return Whole::floats(sum); }
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
    INLINE Sums start(int32_t) { return Sums{}; }
    INLINE Floats floats(Sums sum) { return sum; }
    INLINE void keep(Floats one, Floats two, Floats s, Floats t, Element *to, int i) {
        uint16_t *const at = (uint16_t *)to + i;
        *(Halves *)at = narrow_halves(one * s), *(Halves *)(at + W) = narrow_halves(two * t);
    }
};
#endif

// sums [T][N] = rows a [T] (`ahead` elements apart) times a panel [depth][PANEL]. starts: [T].
template <class M, int T>
INLINE void multiply(const typename M::Element *a, long ahead, const typename M::Element *panel,
                     int depth, const int32_t *starts, typename M::Sums (&sums)[T][N]) {
    UNROLL for (int r = 0; r < T; r++)
        UNROLL for (int j = 0; j < N; j++) sums[r][j] = M::start(starts[r]);
    for (int p = 0; p < depth; p++) {
        typename M::Lanes b[N];
        UNROLL for (int j = 0; j < N; j++) b[j] = M::lanes(panel + p * PANEL + j * W);
        UNROLL for (int r = 0; r < T; r++) {
            const typename M::Lanes same = M::same(a[r * ahead + p]);
            UNROLL for (int j = 0; j < N; j++) M::add(sums[r][j], same, b[j]);
        }
    }
}

// K: products with keys, M: of weights with values.
template <class K, class M>
struct Work : Rows {  // of one thread
    typename K::Element *q, *keys;
    typename M::Element *values, *weights;
    float *logits;
    int32_t *starts;
    char *block;
    long row;  // elements of a row of q

    explicit Work(const Call &c) {
        row = (c.dim + K::step - 1) / K::step, wide = (c.dim + PANEL - 1) / PANEL * PANEL;
        const long rows = UNIT + c.group + R;
        const long sizes[] = {rows * row, NEAR * row, NEAR / M::step * wide, R * NEAR, R * NEAR, rows,
                              rows * wide, rows, rows, rows, NEAR, NEAR};
        long total = 0;
        for (long size : sizes) total += (size * 4 + 63) / 64 * 64;
        block = (char *)aligned_alloc(64, total);
        if (!block) return;
        char *at = block;
        void **const places[] = {(void **)&q, (void **)&keys, (void **)&values, (void **)&weights,
                                 (void **)&logits, (void **)&starts, (void **)&out, (void **)&best, (void **)&sum,
                                 (void **)&query_scale, (void **)&key_scale, (void **)&value_scale};
        for (int i = 0; i < 12; i++) *places[i] = at, at += (sizes[i] * 4 + 63) / 64 * 64;
    }
    ~Work() { free(block); }
};

// SIZE bytes, of which only the first `left` are there.
template <int SIZE>
struct Held {
    alignas(SIZE) char of[SIZE];
    Held(const char *from, int left) {
        if (left >= SIZE) memcpy(of, from, SIZE);
        else memset(of, 0, SIZE), memcpy(of, from, left);
    }
};

// W elements of a row that is read as X, from dimension d on, zeros behind the last; their bits.
template <class X>
INLINE Floats elements(const char *row, int d, int, Single) { return X::read(row, d); }

#if defined(HAS_PAIRS)
template <class X>
INLINE Floats elements(const char *row, int d, int dim, Pairs) {
    static_assert(X::pairs, "rows of bfloat16");
    return load((const float *)Held<4 * W>(row + 2 * d, 2 * (dim - d)).of);
}
#endif

#if defined(__AVX2__)
template <class X>
INLINE Floats elements(const char *row, int d, int dim, Whole) {
    static_assert(X::integers, "rows of whole numbers");
    const Held<2 * W> held(row + d, dim - d);
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtepi8_epi16(_mm256_load_si256((const __m256i *)held.of));
#else
    return (Floats)_mm256_cvtepi8_epi16(_mm_load_si128((const __m128i *)held.of));
#endif
}
#endif

#if defined(__AVX512VNNI__)
template <class X>
INLINE Floats elements(const char *row, int d, int dim, Bytes) {
    static_assert(X::integers, "rows of whole numbers");
    return (Floats)(*(const Ints *)Held<4 * W>(row + d, dim - d).of ^ (int32_t)TOO_LARGE);
}
#endif

// keys [panels][depth][PANEL] of rows [NEAR], NULL for zeros
template <class M, class X>
INLINE void put_keys(const char *const *rows, int dim, long depth, typename M::Element *keys) {
    for (int t = 0; t < NEAR; t += W)
        for (int d = 0; d < dim; d += W * M::step) {
            Floats square[W];
            UNROLL for (int i = 0; i < W; i++)
                square[i] = rows[t + i] ? elements<X>(rows[t + i], d, dim, M{}) : Floats{};
            turn_square(square);
            typename M::Element *const to = keys + (t / PANEL * depth + d / M::step) * PANEL + t % PANEL;
            UNROLL for (int i = 0; i < W; i++)
                if (d / M::step + i < depth) store((float *)(to + i * PANEL), square[i]);
        }
}

// A query's elements and their scale, 1 where they stay floats. start: of the sums of its products.
template <class Q>
INLINE float put_query(const char *row, int dim, float *to, int32_t &, Single) {
    for (int d = 0; d < dim; d += W) store(to + d, Q::read(row, d));
    return 1;
}

#if defined(HAS_PAIRS)
template <class Q>
INLINE float put_query(const char *row, int dim, uint32_t *to, int32_t &, Pairs) {
    static_assert(Q::pairs, "queries of bfloat16");
    memcpy(to, row, 2 * dim);
    return 1;
}
#endif

#if defined(__AVX2__)
template <class Q>
INLINE float put_query(const char *row, int dim, int32_t *to, int32_t &, Whole) {
    alignas(64) float x[WIDEST];
    for (int d = 0; d < dim; d += W) store(x + d, Q::read(row, d));
    const Steps steps(x, dim);
    Ints sum = {};
    for (int d = 0; d < dim; d += 16)
        _mm256_storeu_si256((__m256i *)(to + d / 2), shorts_of(x + d, steps.inverse, sum));
    return steps.step;
}
#endif

#if defined(__AVX512VNNI__)
template <class Q>
INLINE float put_query(const char *row, int dim, int32_t *to, int32_t &start, Bytes) {
    alignas(64) float x[WIDEST];
    for (int d = 0; d < dim; d += W) store(x + d, Q::read(row, d));
    const Steps steps(x, dim, LARGEST_BYTE);
    Ints sum = {};
    for (int d = 0; d < dim; d += 16)
        _mm_storeu_si128((__m128i *)(to + d / 4), bytes_of(x + d, steps.inverse, sum));
    start = -128 * _mm512_reduce_add_epi32((__m512i)sum);
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
    static_assert(X::pairs, "rows of bfloat16");
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
INLINE Ints integers(const char *row, int d) {
    static_assert(X::integers, "rows of whole numbers");
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(row + d)));
#else
    return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(row + d)));
#endif
}

template <class X>
INLINE void put_values(const char *const *rows, int dim, long wide, int32_t *to) {
    for (int t = 0; t < NEAR; t += 2)
        for (long d = 0; d < wide; d += W) {
            Ints x[2] = {};
            for (int i = 0; i < 2; i++)
                if (rows[t + i] && d < dim) x[i] = integers<X>(rows[t + i], d);
            *(Ints *)(to + d / PANEL * (NEAR / 2) * PANEL + t / 2 * PANEL + d % PANEL) = (x[0] & 0xffff) | x[1] << 16;
        }
}
#endif

// Pack keys and values of visited rows t .. t+count-1, zeros behind them.
template <class K, class M, class X>
static void pack(const Call &c, int head, int t, int count, Work<K, M> &w) {
    const char *keys[NEAR] = {}, *values[NEAR] = {};
    for (int i = 0; i < count; i++) {
        const long row = row_of(c, head, t + i);
        keys[i] = c.k + head * c.key_head + row * c.key_row;
        values[i] = c.v + head * c.value_head + row * c.value_row;
        if (X::scaled) w.key_scale[i] = X::scale(keys[i], c.dim), w.value_scale[i] = X::scale(values[i], c.dim);
    }
    if (X::scaled)
        for (int i = count; i < NEAR; i++) w.value_scale[i] = 0;
    put_keys<K, X>(keys, c.dim, w.row, w.keys);
    put_values<X>(values, c.dim, w.wide, w.values);
#if defined(__AVX2__)
    if (M::whole) in_steps(w);
#endif
}

// Fetches visited rows t .. stop-1, K and V: packing would wait for each.
template <class X>
INLINE void fetch_rows(const Call &c, int head, int t, int stop) {
    for (; t < stop; t++) {
        const long row = row_of(c, head, t);
        fetch(c.k + head * c.key_head + row * c.key_row, c.dim * X::bytes);
        fetch(c.v + head * c.value_head + row * c.value_row, c.dim * X::bytes);
    }
}

// T rows of a unit, from row `at`, meet the block of keys that is packed: visited rows from t on.
template <class K, class M, class X, int T>
static void meet(const Call &c, Work<K, M> &w, int first, int at, int t, int count) {
    Floats tops[T];
    for (int r = 0; r < T; r++) tops[r] = all(-INFINITY);
    for (int panel = 0; panel < NEAR; panel += PANEL) {
        typename K::Sums sums[T][N];
        multiply<K, T>(w.q + at * w.row, w.row, w.keys + panel * w.row, w.row, w.starts + at, sums);
        for (int j = 0; j < N; j++) {
            const Floats scale = load(w.key_scale + panel + j * W);
            for (int r = 0; r < T; r++) {
                const Floats y = X::scaled ? K::floats(sums[r][j]) * scale : K::floats(sums[r][j]);
                store(w.logits + r * NEAR + panel + j * W, y);
                tops[r] = most(tops[r], y);
            }
        }
    }
    Fading fadings[T];
    Floats shares = {};
    for (int r = 0; r < T; r++) {  // first, since a row's largest is long in coming
        const Span seen = seen_of(c, first + (at + r) / c.group, t, count);
        fadings[r] = measured<M>(c, w, w.logits + r * NEAR, tops[r], seen, at + r);
        if (M::whole) shares[r] = fadings[r].behind;  // on x86, where W is above R
    }
    if (M::whole) shares = exponentials(shares);
    float steps[T];
    for (int r = 0; r < T; r++) {
        typename M::Element *const to = w.weights + r * (NEAR / M::step);
        steps[r] = soften<M, X>(w, w.logits + r * NEAR, fadings[r], M::whole ? shares[r] : 1, at + r, to);
    }
    for (long d = 0; d < w.wide; d += PANEL) {
        typename M::Sums sums[T][N];
        multiply<M, T>(w.weights, NEAR / M::step, w.values + d * (NEAR / M::step), NEAR / M::step, w.starts, sums);
        for (int r = 0; r < T; r++)
            for (int j = 0; j < N; j++) {
                float *to = w.out + (at + r) * w.wide + d + j * W;
                store(to, load(to) + M::floats(sums[r][j]) * steps[r]);
            }
    }
}

template <class K, class M, class Q>
static void take_queries(const Call &c, int head, int first, int rows, Work<K, M> &w) {
    memset(w.q, 0, sizeof(*w.q) * rows * w.row);
    for (int r = 0; r < rows; r++) {
        const long query = first + r / c.group, at = head * c.group + r % c.group;
        const char *const from = c.q + (query * c.query + at * c.query_head) * Q::bytes;
        w.starts[r] = 0;
        w.query_scale[r] = put_query<Q>(from, c.dim, w.q + r * w.row, w.starts[r], K{});
        w.best[r] = -INFINITY, w.sum[r] = 0;
    }
    memset(w.out, 0, sizeof(float) * rows * w.wide);
    for (int i = 0; i < NEAR; i++) w.key_scale[i] = w.value_scale[i] = 0;
}

// Queries first .. last-1 under one K/V head.
template <class K, class M, class Q, class X>
static void run_unit(const Call &c, int head, int first, int last, Work<K, M> &w) {
    const int rows = (last - first) * c.group;
    take_queries<K, M, Q>(c, head, first, rows, w);
    const Span all = visited_of(c, first, last);
    for (int t = all.low; t < all.high; t += NEAR) {
        const int count = all.high - t < NEAR ? all.high - t : NEAR;
        pack<K, M, X>(c, head, t, count, w);
        for (int at = 0; at < rows; at += R) {
            const int tile = rows - at < R ? rows - at : R;
            // each tile fetches its part of the next block
            const int next = t + NEAR + NEAR * at / rows, stop = t + NEAR + NEAR * (at + tile) / rows;
            fetch_rows<X>(c, head, next, stop < all.high ? stop : all.high);
            // nobody in the tile sees the block yet
            if (c.causal && c.high + first + (at + tile - 1) / c.group < t) continue;
            switch (tile) {
            case 6: meet<K, M, X, 6>(c, w, first, at, t, count); break;
            case 5: meet<K, M, X, 5>(c, w, first, at, t, count); break;
            case 4: meet<K, M, X, 4>(c, w, first, at, t, count); break;
            case 3: meet<K, M, X, 3>(c, w, first, at, t, count); break;
            case 2: meet<K, M, X, 2>(c, w, first, at, t, count); break;
            default: meet<K, M, X, 1>(c, w, first, at, t, count);
            }
        }
    }
    give(c, w, head, first, rows);
}

// Returns 0, or 2 where there is no memory for a thread's work.
template <class K, class M, class Q, class X>
static int run(const Call &c) {
    if (c.queries < 1) return 0;
    std::atomic<int> lacking{0};
    const int most = UNIT / c.group > 0 ? UNIT / c.group : 1;
    // as many units for a few threads, but none that packs for a handful of queries
    const int units = (c.queries + most - 1) / most, size = (c.queries + units - 1) / units;
    const long parts = (long)units * c.kv_heads;
    in_pieces(c.threads, parts, 1, [&](Pieces &pieces) {
        Work<K, M> work(c);
        if (!work.block) lacking = 1;
        for (long at, stop; work.block && pieces.next(at, stop);)
            for (long i = at; i < stop; i++) {
                const long part = largest_first(i, parts, c.threads);  // later queries see more rows
                const int first = part / c.kv_heads * size, end = first + size < c.queries ? first + size : c.queries;
                if (first < end) run_unit<K, M, Q, X>(c, part % c.kv_heads, first, end, work);
            }
    });
    return lacking ? 2 : 0;
}

}  // namespace

// kinds of q, a float, and of rows, q's or INT8. Returns 0, 1 for a pair that this build lacks, or 2
// without memory.
extern "C" int omnikv_prefill(const Call *c, int q, int rows) {
#if defined(HAS_PAIRS)
    if (q == BFLOAT16 && rows == BFLOAT16) return run<Pairs, Pairs, BFloat16, BFloat16>(*c);
#else
    if (q == BFLOAT16 && rows == BFLOAT16) return run<Single, Single, BFloat16, BFloat16>(*c);
#endif
    if (q == FLOAT32 && rows == FLOAT32) return run<Single, Single, Float32, Float32>(*c);
#if defined(__AVX512VNNI__)
    if (q == FLOAT32 && rows == INT8 && c->query_bits == 8 && c->dim <= WIDEST)
        return run<Bytes, Whole, Float32, Int8>(*c);
#endif
#if defined(__AVX2__)
    if (q == FLOAT32 && rows == INT8 && !c->exact && c->dim <= WIDEST) return run<Whole, Whole, Float32, Int8>(*c);
#endif
    if (q == FLOAT32 && rows == INT8) return run<Single, Single, Float32, Int8>(*c);
#if defined(HAS_FLOAT16)
    if (q == FLOAT16 && rows == FLOAT16) return run<Single, Single, Float16, Float16>(*c);
#endif
    return 1;
}

// Returns whether queries of 8 bits are multiplied as such.
extern "C" int omnikv_has_query_bytes() {
#if defined(__AVX512VNNI__)
    return 1;
#else
    return 0;
#endif
}

extern "C" int omnikv_sizeof_prefill_call() { return sizeof(Call); }
