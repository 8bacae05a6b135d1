// Attention of several queries at once, such as a verification of drafts: queries lie in the lanes of a
// vector, so each product meets them with one number of a key, as it lies in memory, and their softmax
// takes no step across lanes. A row's bits do not depend on how many rows there are.
#include <type_traits>

#include "attention.h"
#include "scratch.h"

namespace {

constexpr int TILE = 128;     // keys whose logits are held at a time, at most: 16 queries of them are 8 KB
constexpr int HELD = 16384;   // bytes of their rows, and of their values: both stay in the first cache
constexpr int LEAST = 64;     // rows that pay for laying queries across
constexpr int CHUNK = 2 * W;  // queries that meet a tile before the next ones do

// What products multiply: numbers, or pairs of bfloat16 that lie side by side. `step`: numbers of an element;
// SUMS: sums that a product is split in, for one alone would wait for itself.
struct Single {
    typedef float Element;
    static constexpr int step = 1, SUMS = 2;
    INLINE Floats product(Floats sum, const Element *queries, const char *key) {
        return sum + load(queries) * Float32::first(key);
    }
};

#if defined(__AVX512BF16__)
struct Paired {
    typedef uint32_t Element;
    static constexpr int step = 2, SUMS = 2;
    INLINE Floats product(Floats sum, const Element *queries, const char *key) {
        int32_t pair;
        memcpy(&pair, key, 4);
        return add_pairs(sum, load((const float *)queries), (Floats)(Ints{} + pair));
    }
};
#endif

struct Next {  // what is fetched beside each key: a key after it, and its value; keys NULL: nothing
    const char *const *keys, *const *values;
    int key_bytes, value_bytes;
};

// Products of V vectors of queries, across [depth][apart], with `count` keys, up to eights: l [keys][lanes].
template <class M, int V>
INLINE void logits_across(const typename M::Element *across, long apart, const char *const *rows, int count,
                          int depth, float *l, long lanes, Next next) {
    constexpr int U = M::SUMS, keys = (W == 16 ? 16 : 8) / (U * V);  // as many sums as hide each other's wait
    for (int t = 0; t < count; t += keys) {
        Floats s[keys][V][U];
        UNROLL for (int i = 0; i < keys; i++)
            UNROLL for (int v = 0; v < V; v++)
                UNROLL for (int u = 0; u < U; u++) s[i][v][u] = Floats{};
        const char *own[keys];
        UNROLL for (int i = 0; i < keys; i++) own[i] = rows[t + i];
        for (int i = 0; next.keys && i < keys; i++) {
            fetch(next.keys[t + i], next.key_bytes);
            fetch(next.values[t + i], next.value_bytes);
        }
        for (int p = 0; p < depth; p += U)
            UNROLL for (int u = 0; u < U; u++)
                UNROLL for (int i = 0; i < keys; i++)
                    UNROLL for (int v = 0; v < V; v++)
                        s[i][v][u] = M::product(s[i][v][u], across + (p + u) * apart + v * W, own[i] + 4 * (p + u));
        UNROLL for (int i = 0; i < keys; i++)
            UNROLL for (int v = 0; v < V; v++)
                store(l + (t + i) * lanes + v * W, U == 2 ? s[i][v][0] + s[i][v][U - 1] : s[i][v][0]);
    }
}

// Adds weights [keys][lanes] of T queries times the values `rows` to columns d .. d + C*W - 1 of out [T][dim].
template <int T, int C>
INLINE void add_values_of(const float *weights, long lanes, const char *const *rows, int count, int dim, int d,
                          float *out) {
    Floats s[T][C];
    UNROLL for (int r = 0; r < T; r++)
        UNROLL for (int c = 0; c < C; c++) s[r][c] = Floats{};
    for (int t = 0; t < count; t++) {
        Floats x[C];
        UNROLL for (int c = 0; c < C; c++) x[c] = Float32::read(rows[t], d + c * W);
        UNROLL for (int r = 0; r < T; r++)
            UNROLL for (int c = 0; c < C; c++) s[r][c] += x[c] * weights[t * lanes + r];
    }
    UNROLL for (int r = 0; r < T; r++)
        UNROLL for (int c = 0; c < C; c++) {
            float *const to = out + r * dim + d + c * W;
            store(to, load(to) + s[r][c]);
        }
}

#if defined(__AVX512BF16__)
// Of weights in pairs of two keys [keys / 2][lanes]: columns d .. d+31.
template <int T>
INLINE void add_paired_values_of(const uint32_t *weights, long lanes, const char *const *rows, int count, int dim,
                                 int d, float *out) {
    __m512 s[T][2];
    UNROLL for (int r = 0; r < T; r++) s[r][0] = s[r][1] = _mm512_setzero_ps();
    for (int t = 0; t < count; t += 2) {
        const __m512i one = _mm512_loadu_si512(rows[t] + 2 * d), two = _mm512_loadu_si512(rows[t + 1] + 2 * d);
        const __m512bh low = (__m512bh)_mm512_unpacklo_epi16(one, two);
        const __m512bh high = (__m512bh)_mm512_unpackhi_epi16(one, two);
        UNROLL for (int r = 0; r < T; r++) {
            const __m512bh w = (__m512bh)_mm512_set1_epi32(weights[t / 2 * lanes + r]);
            s[r][0] = _mm512_dpbf16_ps(s[r][0], w, low), s[r][1] = _mm512_dpbf16_ps(s[r][1], w, high);
        }
    }
    // unpacked, columns lie in another order
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    UNROLL for (int r = 0; r < T; r++) {
        float *at = out + r * dim + d;
        store(at, load(at) + (Floats)_mm512_permutex2var_ps(s[r][0], first, s[r][1]));
        store(at + 16, load(at + 16) + (Floats)_mm512_permutex2var_ps(s[r][0], second, s[r][1]));
    }
}
#endif

struct Room {  // of one thread, for one split of a head
    void *across;                          // [dim / step][lanes]
    float *l, *out, *best, *sum, *less;    // [TILE][CHUNK], [lanes][dim], [lanes] each
    float *keys, *values;                  // [TILE][dim] where rows are decoded
    int *limit;                            // [lanes]: rows that a query sees
    long lanes;

    bool find(Scratch &scratch, int rows, int dim) {
        lanes = (rows + W - 1) / W * W;
        const long sizes[] = {lanes * dim, (long)TILE * CHUNK, lanes * dim, lanes, lanes, lanes,
                              (long)TILE * dim, (long)TILE * dim, lanes};
        long total = 0;
        for (long size : sizes) total += (4 * size + 63) / 64 * 64;
        char *at = (char *)scratch.get(total);
        if (!at) return false;
        void **const places[] = {&across, (void **)&l, (void **)&out, (void **)&best, (void **)&sum,
                                 (void **)&less, (void **)&keys, (void **)&values, (void **)&limit};
        for (int i = 0; i < 9; i++) *places[i] = at, at += (4 * sizes[i] + 63) / 64 * 64;
        return true;
    }
};

// exp(x) of an x that is at most 0; 0 at -inf, NaN at NaN.
INLINE Floats weight_of(Floats x) {
#if defined(__AVX512F__)
    // as `exponential`, but the instruction that scales by powers of two ends at 0 by itself
    const __m512 y = _mm512_max_ps(_mm512_set1_ps(-110), (__m512)x);
    const __m512 whole = _mm512_roundscale_ps(_mm512_mul_ps(y, _mm512_set1_ps(1.44269504f)), 8);
    const Floats n = (Floats)whole, r = ((Floats)y - n * 0.693359375f) + n * 2.12194440e-4f;
    Floats p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.f;
    return (Floats)_mm512_scalef_ps((__m512)p, whole);
#else
    return exponential(x);
#endif
}

struct Scales {  // of a block's keys and values; NULL: there are none
    const float *keys, *values;
};

// Logits of one vector of queries, l [keys][lanes], become weights, with the queries' new best and sum; less: what
// is left of what they had. The rows from `least` on are not seen by all: a query sees those below its limit.
// PAIRS: weights are pairs of bfloat16 of two keys [keys / 2][lanes].
template <bool PAIRS>
INLINE void soften(const Call &c, const Block &block, Scales scales, const float *logs, int least, const int *limit,
                   long lanes, float *l, float *best, float *sum, float *less) {
    const int count = block.count;
    Floats top = load(best);
    for (int t = 0; t < count; t++) {
        Floats x = load(l + t * lanes) * (scales.keys ? c.scale * scales.keys[t] : c.scale);
        if (c.cap) x = capped(x, c.cap);
        if (logs) x += logs[t];
        if (block.first + t >= least) x = *(const Ints *)limit > block.first + t ? x : all(-INFINITY);
        store(l + t * lanes, x);
        top = most(top, x);
    }
    if (count % 2) store(l + count * lanes, all(-INFINITY));
    const Floats base = top == -INFINITY ? Floats{} : top, left = weight_of(load(best) - base);
    Floats added = {};
    for (int t = 0; t < count; t += 2) {
        Floats one = weight_of(load(l + t * lanes) - base), two = weight_of(load(l + (t + 1) * lanes) - base);
        added += one + two;
        if (scales.values) one *= scales.values[t], two *= scales.values[t + 1];
#if defined(__AVX512BF16__)
        if (PAIRS) {
            const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23,
                                                   7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
            const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)two, (__m512)one);
            _mm512_storeu_si512(l + t / 2 * lanes, _mm512_permutexvar_epi16(order, both));
            continue;
        }
#endif
        store(l + t * lanes, one), store(l + (t + 1) * lanes, two);
    }
    store(best, top), store(less, left), store(sum, load(sum) * left + added);
}

// A block's rows as floats [count][dim], and where they lie then.
template <class R>
INLINE void decode_rows(const char **rows, int count, int dim, float *to) {
    for (int t = 0; t < count; t++, to += dim) {
        const char *row = rows[t];
        fetch(rows[t + AHEAD], dim * R::bytes);
        for (int d = 0; d < dim; d += W) store(to + d, R::read(row, d));
        rows[t] = (const char *)to;
    }
    for (int t = count; t % 8; t++) rows[t] = rows[count - 1];
}

template <class R>
static void decode(const char **rows, int count, int dim, float *to) {
    // a length that is known while compiling takes a third off
    if (dim == 64) decode_rows<R>(rows, count, 64, to);
    else if (dim == 128) decode_rows<R>(rows, count, 128, to);
    else decode_rows<R>(rows, count, dim, to);
}

// Adds the weights of up to T queries to their columns of out, in eights and a four.
template <bool PAIRS>
static void add_values_across(const float *weights, long lanes, const char *const *rows, int count, int queries,
                              int dim, float *out) {
#if defined(__AVX512BF16__)
    if (PAIRS) {
        const uint32_t *pairs = (const uint32_t *)weights;
        int r = 0;
        for (; r < queries - 4; r += 8)
            for (int d = 0; d < dim; d += 32)
                add_paired_values_of<8>(pairs + r, lanes, rows, count, dim, d, out + (long)r * dim);
        for (; r < queries; r += 4)
            for (int d = 0; d < dim; d += 32)
                add_paired_values_of<4>(pairs + r, lanes, rows, count, dim, d, out + (long)r * dim);
        return;
    }
#endif
    constexpr int T = W == 16 ? 8 : 4;
    for (int r = 0; r < queries; r += T) {
        int d = 0;
        for (; d + 2 * W <= dim; d += 2 * W)
            add_values_of<T, 2>(weights + r, lanes, rows, count, dim, d, out + (long)r * dim);
        for (; d < dim; d += W) add_values_of<T, 1>(weights + r, lanes, rows, count, dim, d, out + (long)r * dim);
    }
}

// Queries at .. at + some - 1 meet a block. M: how its keys are multiplied; PAIRS: whether its values are.
template <class M, bool PAIRS>
static void meet(const Call &c, const Room &room, const Block &block, Scales scales, const float *logs, int least,
                 int at, int some, Next next) {
    const int dim = c.dim, keys = (block.count + 7) / 8 * 8, depth = dim / M::step;
    const long lanes = (some + W - 1) / W * W;
    const auto *across = (const typename M::Element *)room.across + at;
    int v = 0;
    for (; v + 2 * W <= lanes; v += 2 * W, next.keys = nullptr)
        logits_across<M, 2>(across + v, room.lanes, block.keys, keys, depth, room.l + v, lanes, next);
    if (v < lanes) logits_across<M, 1>(across + v, room.lanes, block.keys, keys, depth, room.l + v, lanes, next);
    for (v = 0; v < lanes; v += W) {
        const int r = at + v;
        soften<PAIRS>(c, block, scales, logs, least, room.limit + r, lanes, room.l + v, room.best + r, room.sum + r,
                      room.less + r);
    }
    for (int r = at; r < at + some; r++)
        if (const float less = room.less[r]; less != 1)
            for (int d = 0; d < dim; d += W) {
                float *const to = room.out + (long)r * dim + d;
                store(to, load(to) * less);
            }
    add_values_across<PAIRS>(room.l, lanes, block.values, block.count, some, dim, room.out + (long)at * dim);
}

// Queries of a head as products take them; false: they are no pairs.
template <class M>
static bool take(const float *q, int rows, int dim, const Room &room) {
    memset(room.across, 0, sizeof(float) * room.lanes * (dim / M::step));
    for (int r = 0; r < rows; r++)
        for (int d = 0; d < dim; d++) {
            uint32_t bits;
            memcpy(&bits, q + (long)r * dim + d, 4);
            if (M::step == 2 && bits & 0xffff) return false;
            uint32_t *to = (uint32_t *)room.across + d / M::step * room.lanes + r;
            *to = M::step == 1 ? bits : d % 2 ? *to | bits : bits >> 16;
        }
    return true;
}

// M: how keys are multiplied, floats where they are decoded. K, V: what rows hold.
template <class M, bool PAIRS, class K, class V>
static void run_split(const Call &c, const Run &run, const Room &room, int first, int stop, int visited) {
    constexpr bool keys_lie = M::step == 2 || std::is_same<K, Float32>::value;
    constexpr bool values_lie = PAIRS || std::is_same<V, Float32>::value;
    const int dim = c.dim, rows = c.queries * c.group, least = visited - (c.queries - 1);
    float key_scales[TILE], value_scales[TILE + 1];
    const int fit = HELD / (dim * (keys_lie ? K::bytes : 4)) / 8 * 8, tile = fit < 32 ? 32 : fit < TILE ? fit : TILE;
    for (int t = first; t < stop; t += tile) {
        Block block(run, t, t + tile < stop ? t + tile : stop);
        const int count = block.count;
        for (int i = 0; K::scaled && i < count; i++) key_scales[i] = K::scale(block.keys[i], c.dim);
        for (int i = 0; V::scaled && i < count; i++) value_scales[i] = V::scale(block.values[i], c.dim);
        value_scales[count] = 0;
        if (!keys_lie) decode<K>(block.keys, count, c.dim, room.keys);
        if (!values_lie) decode<V>(block.values, count, c.dim, room.values);
        const Scales scales = {K::scaled ? key_scales : nullptr, V::scaled ? value_scales : nullptr};
        const float *logs = c.logs ? c.logs + run.start + t : nullptr;
        Next next = {keys_lie ? block.keys + AHEAD : nullptr, block.values, dim * K::bytes, dim * V::bytes};
        for (int r = 0; r < rows; r += CHUNK, next.keys = nullptr)
            meet<M, PAIRS>(c, room, block, scales, logs, least, r, rows - r < CHUNK ? rows - r : CHUNK, next);
    }
}

// Returns false without memory.
template <class K, class V>
static bool attend_lanes(const Call &c, int head, int s) {
    static thread_local Scratch scratch;
    const int rows = c.queries * c.group, first = s * c.split, visited = seen(c, head), dim = c.dim;
    const int stop = first + c.split < visited ? first + c.split : visited;
    if (first >= visited) return true;
    Room room;
    if (!room.find(scratch, rows, dim)) return false;
    const int lies = head / c.shared;
    const Run run = {c.k + lies * c.key_head, c.v + lies * c.value_head, c.key_row, c.value_row,
                     c.index ? c.index + head * c.index_head : nullptr, chosen(c, head),
                     c.starts ? (int)c.starts[head] : c.start, c.unit};
    memset(room.out, 0, sizeof(float) * room.lanes * dim);
    for (int r = 0; r < room.lanes; r++) {
        room.best[r] = -INFINITY, room.sum[r] = 0;
        room.limit[r] = r < rows ? visited - (c.queries - 1 - r / c.group) : visited;
    }
    const float *q = c.q + (long)head * rows * dim;
    bool done = false;
#if defined(__AVX512BF16__)
    if constexpr (K::pairs && V::pairs)
        if (dim % 32 == 0) {
            done = take<Paired>(q, rows, dim, room);
            if (done) run_split<Paired, true, K, V>(c, run, room, first, stop, visited);
        }
#endif
    if (!done) {
        take<Single>(q, rows, dim, room);
        run_split<Single, false, K, V>(c, run, room, first, stop, visited);
    }
    float *part = c.parts + ((long)head * splits_of(c, c.visited) + s) * rows * (dim + 2);
    memcpy(part, room.out, sizeof(float) * rows * dim);
    memcpy(part + (long)rows * dim, room.best, sizeof(float) * rows);
    memcpy(part + (long)rows * (dim + 1), room.sum, sizeof(float) * rows);
    return true;
}

template <class K, class V>
static int attend_together(const Call &c) {
    const int splits = splits_of(c, c.visited), work = splits * c.heads;
    std::atomic<int> lacking{0};
    share(c.threads, work, 1, [&](int i) {
        if (!attend_lanes<K, V>(c, i / splits, i % splits)) lacking = 1;
    });
    if (lacking) return 2;
    for (int head = 0; head < c.heads; head++) merge<V>(c, head);
    return 0;
}

// Queries of a K/V head from which their lanes are full enough, as measured on rows of 64 numbers (docs/EXACT.md).
template <class K>
constexpr int least_queries() {
#if defined(__AVX512VNNI__)
    if (K::integers) return 1 << 30;  // products of whole numbers take less
#endif
#if defined(__AVX512BF16__)
    if (K::pairs) return 5;
#endif
    return std::is_same<K, Float32>::value ? (W == 16 ? 5 : 7) : W == 16 ? 14 : 8;
}

template <class K>
static int attend_if_many(const Call &c) {
    const bool many = c.queries * c.group >= least_queries<K>() && c.visited >= LEAST;
    return many && c.out && !c.logits ? attend_together<K, K>(c) : 1;
}

}  // namespace

// As omnikv_attend, of enough queries that leave no logits. Returns 0, 1 where they are none or for a kind that
// this build lacks, or 2 without memory.
extern "C" int omnikv_attend_together(const Call *c, int kind) {
    if (kind == INT8) return attend_if_many<Int8>(*c);
#if defined(__F16C__)
    if (kind == FP8) return attend_if_many<Float8>(*c);
#endif
#define ATTEND_IF_MANY(K) attend_if_many<K>(*c)
    OF_KIND(kind, ATTEND_IF_MANY);
}
