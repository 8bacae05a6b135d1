// Flash-decoding on a CPU: a few queries attend to rows of K and V where they lie, all of them or
// those of an index, and may leave their logits. Softmax and sums are float32.
#pragma once
#include "call.h"
#include "int4.h"
#include "int8.h"
#include "int8_dot.h"
#include "pairs.h"
#include "team.h"
#include "transform.h"
#include <type_traits>

namespace {

constexpr int BLOCK = 512;  // rows whose logits are held at a time: 4 queries of them are 8 KB
#if defined(__AVX512F__)
constexpr int MOST = 8;  // queries of one tile: their sums fit the registers
#else
constexpr int MOST = 4;
#endif
constexpr int AHEAD = 48;   // rows between the one that is read and the one that is fetched

// Products of T queries q [T][dim] with the keys `rows`: l [T][BLOCK]. later: a row to fetch for each of them.
template <class K, int T, class L>
INLINE void logits_of(const float *q, const char *const *rows, L later, int count, int dim, float *l) {
    // rows whose sums are in registers: with one, a sum waits for itself
    constexpr int BESIDE = T * 4 <= (W == 8 ? 12 : 16) ? 4 : 2;
    int t = 0;
    for (; t + W <= count; t += W) {
        Floats halves[T][W / 4];
        UNROLL for (int i = 0; i < W / 4; i++) {
            const char *const *own = rows + t + 4 * i;
            Floats s[T][4];
            UNROLL for (int from = 0; from < 4; from += BESIDE) {
                UNROLL for (int j = from; j < from + BESIDE; j++) {
                    fetch(later[t + 4 * i + j], dim * K::bytes);
                    UNROLL for (int r = 0; r < T; r++) s[r][j] = Floats{};
                }
                for (int d = 0; d < dim; d += W)
                    UNROLL for (int j = from; j < from + BESIDE; j++) {
                        const Floats x = K::read(own[j], d);
                        UNROLL for (int r = 0; r < T; r++) s[r][j] += x * load(q + r * dim + d);
                    }
            }
            UNROLL for (int r = 0; r < T; r++) halves[r][i] = four_totals(s[r]);
        }
        for (int r = 0; r < T; r++) store(l + r * BLOCK + t, join_totals(halves[r]));
    }
    for (; t < count; t++)
        for (int r = 0; r < T; r++) {
            Floats s = {};
            for (int d = 0; d < dim; d += W) s += K::read(rows[t], d) * load(q + r * dim + d);
            l[r * BLOCK + t] = total(s);
        }
}

// Adds weights l [T][BLOCK] times the values `rows` to columns d .. d + C*W - 1 of out [T][dim].
template <class V, int T, int C, class L>
INLINE void add_columns(const float *l, const char *const *rows, L later, int count, int dim, int d,
                        float *out) {
    Floats s[T][C] = {};
    for (int t = 0; t < count; t++) {
        fetch(later[t] + d * V::bytes, C * W * V::bytes);
        for (int c = 0; c < C; c++) {
            const Floats x = V::read(rows[t], d + c * W);
            for (int r = 0; r < T; r++) s[r][c] += x * l[r * BLOCK + t];
        }
    }
    for (int r = 0; r < T; r++)
        for (int c = 0; c < C; c++) {
            float *at = out + r * dim + d + c * W;
            store(at, load(at) + s[r][c]);
        }
}

template <class V, int T, class L>
INLINE void add_values(const float *l, const char *const *rows, L later, int count, int dim,
                       float *out) {
    // as many sums side by side as hide each other's wait
    constexpr int C = T == 1 ? 8 : W == 4 ? T == 2 ? 8 : 4 : W == 16 ? T <= 4 ? 4 : 2 : T <= 3 ? 4 : 2;
    int d = 0;
    for (; d + C * W <= dim; d += C * W) add_columns<V, T, C>(l, rows, later, count, dim, d, out);
    for (; C == 8 && d + 4 * W <= dim; d += 4 * W) add_columns<V, T, 4>(l, rows, later, count, dim, d, out);
    for (; d < dim; d += W) add_columns<V, T, 1>(l, rows, later, count, dim, d, out);
}

#if defined(__AVX512VNNI__)
// Both of the above by whole numbers, where all of them are finite; else they return false.
template <int T>
INLINE bool integer_logits_of(const float *q, const char *const *rows, const char *const *values, int count,
                              int dim, float *l) {
    Digits digits[T];
    for (int r = 0; r < T; r++)
        if (dim > WIDEST || !digits[r].set(q + r * dim, dim)) return false;
    integer_logits<T>(digits, rows, AHEAD, values, count, dim, l, BLOCK);
    return true;
}

template <int T>
INLINE bool add_integer_values(const float *l, const char *const *rows, int count, int dim, float *out) {
    alignas(64) uint8_t digits[T][DIGITS][BLOCK];
    Weights weights[T];
    for (int r = 0; r < T; r++)
        if (!weights[r].set(l + r * BLOCK, (count + W - 1) / W * W, digits[r])) return false;
    for (int d = 0; d < dim; d += 64) {
        const int lanes = dim - d < 64 ? (dim - d) / 16 : 4;
#define ADD(...) add_quarters<T, __VA_ARGS__>(digits, weights, rows, count, dim, d, lanes, out)
        if (T <= 4) ADD(0, 1), ADD(2, 3);
        else ADD(0), ADD(1), ADD(2), ADD(3);
    }
    return true;
}
#elif defined(HAS_INTEGERS)
template <int T>
INLINE bool integer_logits_of(const float *q, const char *const *rows, const char *const *values, int count,
                              int dim, float *l) {
    return whole_logits<T>(q, rows, AHEAD, values, count, dim, l, BLOCK);
}

template <int T>
INLINE bool add_integer_values(const float *l, const char *const *rows, int count, int dim, float *out) {
    return add_whole_values<T, BLOCK>(l, rows, count, dim, out);
}
#endif

#if defined(HAS_PAIRS)
template <int T, class L>
INLINE bool pair_logits_of(const float *q, const char *const *rows, L later, int count, int dim,
                           float *l) {
    alignas(64) uint16_t narrow[T * WIDEST];
    if (dim % 32 || dim > WIDEST || !narrowed<T>(q, dim, narrow)) return false;
    pair_logits<T>(narrow, rows, later, count, dim, l, BLOCK);
    return true;
}
#endif

struct Run {  // rows of one sequence and one K/V head: `kept` of an index, then from `start` on
    const char *k, *v;
    long key_stride, value_stride;  // bytes
    const int32_t *index;
    int kept, start, unit;  // unit: rows in turn that an entry of the index stands for

    long listed(int i) const { return unit > 1 ? (long)index[i / unit] * unit + i % unit : index[i]; }
};

// Rows are read 16 at a time, the last ones past `count`.
constexpr int listed(int count) { return (count + 15) / 16 * 16 + AHEAD; }

// Rows first .. first + count - 1 of a run, and where the next ones up to `listed(count)` lie.
struct Block {
    const char *keys[BLOCK + AHEAD], *values[BLOCK + AHEAD];
    const float *key_scales = nullptr, *value_scales = nullptr;  // NULL: behind each row
    int first, count;

    Block() = default;
    Block(const Run &run, int from, int stop) { list(run, from, stop); }

    void list(const Run &run, int from, int stop) {
        first = from, count = stop - from < BLOCK ? stop - from : BLOCK;
        int i = 0;
        for (; i < listed(count) && from + i < run.kept; i++) {
            const long row = run.listed(from + i);
            keys[i] = run.k + row * run.key_stride, values[i] = run.v + row * run.value_stride;
        }
        const long row = (long)run.start + from + i - run.kept;
        const char *key = run.k + row * run.key_stride, *value = run.v + row * run.value_stride;
        for (; i < listed(count) && from + i < stop; i++, key += run.key_stride, value += run.value_stride)
            keys[i] = key, values[i] = value;
        for (; i < listed(count); i++) keys[i] = keys[i - 1], values[i] = values[i - 1];
    }
};

// What one block's rows are decoded to, once for all queries. Rows as they are need nothing.
template <class R>
struct Decoded {
    using Rows = R;
    static constexpr bool turned = false;  // whether rows hold the transformed row
    const float *take(const char **, int, int) { return nullptr; }
};

template <class R>
struct DecodedInt8 {
    using Rows = Int8;
    static constexpr bool turned = R::turned;
    alignas(64) int8_t values[BLOCK * WIDEST];
    float scales[BLOCK];
    // Points rows to their values; returns their scales.
    const float *take(const char **rows, int count, int dim) {
        // a length that is known while compiling takes a third off
        if (dim == 64) decode(rows, count, 64);
        else if (dim == 128) decode(rows, count, 128);
        else decode(rows, count, dim);
        for (int i = count; i < listed(count); i++) rows[i] = rows[count - 1];
        for (int i = count; i % W; i++) scales[i] = scales[count - 1];
        return scales;
    }
    __attribute__((always_inline)) inline void decode(const char **rows, int count, int dim) {
        for (int i = 0; i < count; i++) {
            fetch(rows[i + AHEAD], R::length(dim));
            R::decode(rows[i], dim, values + i * dim);
            scales[i] = R::scale(rows[i], dim);
            rows[i] = (const char *)values + i * dim;
        }
    }
};
template <> struct Decoded<Int4Keys> : DecodedInt8<Int4Keys> {};
template <> struct Decoded<Int4Values> : DecodedInt8<Int4Values> {};

template <bool SHARED>
INLINE auto spread(const char *const *rows, int step) {
    if constexpr (SHARED) return Spread{rows, step};
    else return rows;
}

// T queries attend to one block more; query r sees rows below limit[r]. logs [count] or NULL is added to
// the rows' logits. out [T][dim] is the weighted sum so far, not divided, best and sum [T] the largest
// logit and the sum of weights. logits [T - silent][ahead] or NULL takes logits of all rows of the queries from
// `silent` on. out NULL: values are not read. next: the block whose rows are fetched meanwhile, NULL: this
// one's. SHARED: `parts` tiles fetch it, and this is number `part`.
template <class K, class V, int T, bool SHARED = false>
static void attend_tile(const float *q, const Block &block, int dim, float scale, float cap, const float *logs,
                        const int *limit, float *out, float *best, float *sum, float *logits, long ahead, int silent = 0,
                        const Block *next = nullptr, int part = 0, int parts = 1) {
    alignas(64) float l[T * BLOCK];
    const bool theirs = next && next->count >= block.count;
    const char *const *later = theirs ? next->keys : block.keys + AHEAD;
    const char *const *values_later = theirs ? next->values : block.values + AHEAD;
    const int begin = SHARED && theirs ? part * BLOCK / parts : 0, step = theirs ? 256 / parts : 256;
    const auto keys = spread<SHARED>(later + begin, step), values = spread<SHARED>(values_later + begin, step);
    const int count = block.count, up = (count + W - 1) / W * W;
#if defined(HAS_INTEGERS)
    if (!K::integers || !integer_logits_of<T>(q, block.keys, block.values, count, dim, l))
#endif
#if defined(HAS_PAIRS)
    if (!K::pairs || !pair_logits_of<T>(q, block.keys, keys, count, dim, l))
#endif
        logits_of<K, T>(q, block.keys, keys, count, dim, l);
    alignas(64) float held[BLOCK];
    const float *scales = block.key_scales;
    if (K::scaled && !scales) {
        for (int i = 0; i < up; i++) held[i] = K::scale(block.keys[i], dim);
        scales = held;
    }
    for (int r = 0; r < T; r++) {
        float *x = l + r * BLOCK;
        for (int i = 0; i < up; i += W)
            store(x + i, load(x + i) * (K::scaled ? load(scales + i) * scale : all(scale)));
        for (int i = 0; cap && i < up; i += W) store(x + i, capped(load(x + i), cap));
        for (int i = 0; logs && i < count; i++) x[i] += logs[i];
        if (logits && r >= silent)
            memcpy(logits + (r - silent) * ahead + block.first, x, sizeof(float) * count);
        for (int i = limit[r] > block.first ? limit[r] - block.first : 0; i < up; i++) x[i] = -INFINITY;
        for (int i = count; i < up; i++) x[i] = -INFINITY;
        Floats top = all(best[r]);
        for (int i = 0; i < up; i += W) top = most(top, load(x + i));
        const float now = largest(top), base = now == -INFINITY ? 0 : now;
        const float less = expf(best[r] - base);
        Floats added = {};
        for (int i = 0; i < up; i += W) {
            const Floats weight = exponential(load(x + i) - base);
            store(x + i, weight);
            added += weight;
        }
        best[r] = now, sum[r] = sum[r] * less + total(added);
        if (less != 1 && out)
            for (int d = 0; d < dim; d += W) store(out + r * dim + d, load(out + r * dim + d) * less);
    }
    if (!out) return;
    if (V::scaled) {
        scales = block.value_scales ? block.value_scales : held;
        if (!block.value_scales)
            for (int i = 0; i < up; i++) held[i] = V::scale(block.values[i], dim);
        for (int r = 0; r < T; r++)
            for (int i = 0; i < up; i += W) {
                float *const weight = l + r * BLOCK + i;
                store(weight, load(weight) * load(scales + i));
            }
    }
#if defined(HAS_INTEGERS)
    if (V::integers && add_integer_values<T>(l, block.values, count, dim, out)) return;
#endif
#if defined(HAS_PAIRS)
    if (V::pairs && dim % 32 == 0) return add_pair_values<T, BLOCK>(l, block.values, values, count, dim, out);
#endif
    add_values<V, T>(l, block.values, values, count, dim, out);
}

// Rows that a head's last query sees.
inline int seen(const Call &c, int head) { return c.lengths ? (int)c.lengths[head] : c.visited; }

// Rows of an index that a head reads.
inline int chosen(const Call &c, int head) {
    return c.index && c.lengths ? seen(c, head) - (c.visited - c.kept) : c.kept;
}

inline int splits_of(const Call &c, int rows) { return (rows + c.split - 1) / c.split; }

template <class K, class V>
static void attend_split(const Call &c, int head, int s) {
    const int rows = c.queries * c.group, first = s * c.split, visited = seen(c, head);
    const int stop = first + c.split < visited ? first + c.split : visited;
    if (first >= visited) return;
    const int splits = splits_of(c, c.visited);
    float *part = c.parts + ((long)head * splits + s) * rows * (c.dim + 2);
    float *bests = part + (long)rows * c.dim, *sums = bests + rows;
    const int lies = head / c.shared;
    const Run run = {c.k + lies * c.key_head, c.v + lies * c.value_head, c.key_row, c.value_row,
                     c.index ? c.index + head * c.index_head : nullptr, chosen(c, head),
                     c.starts ? (int)c.starts[head] : c.start, c.unit};
    const int last = (c.queries - 1) * c.group;
    Decoded<K> keys;
    Decoded<V> values;
    if (c.out) memset(part, 0, sizeof(float) * rows * c.dim);
    for (int r = 0; r < rows; r++) bests[r] = -INFINITY, sums[r] = 0;
    using Keys = typename Decoded<K>::Rows;
    using Values = typename Decoded<V>::Rows;
    constexpr bool in_place = std::is_same<Keys, K>() && std::is_same<Values, V>();
    // With wide vectors a tile's arithmetic takes longer than its share of the next block's bytes, so all tiles fetch
    // them; one tile of eight would wait for its own, two of four do not.
    constexpr bool shares = in_place && W == 16 && !Keys::integers;
    const int most = shares && rows <= 8 ? 4 : MOST, rest = rows % most;
    const int tiles = rows / most + (rest > 0) + (rest > 4);
    const bool shared = shares && tiles > 1 && (Keys::pairs || rows <= 8);
    Block turns[2];
    turns[0].list(run, first, stop);
    for (int t = first, turn = 0; t < stop; t += BLOCK, turn ^= 1) {
        Block &block = turns[turn];
        // one thread takes the next split after this one, so its first block is fetched too
        const int ends = t + BLOCK < stop || !shared || c.threads > 1 ? stop : visited;
        const bool more = in_place && t + BLOCK < ends;
        if (t + BLOCK < ends) turns[!turn].list(run, t + BLOCK, ends);
        // the first tile that fetches the next block's rows: the second one where nobody has fetched this block's
        const int from = shared && (t > first || (first && c.threads == 1)) ? 0 : 1;
        block.key_scales = keys.take(block.keys, block.count, c.dim);
        if (c.out) block.value_scales = values.take(block.values, block.count, c.dim);
        const float *logs = c.logs ? c.logs + run.start + t : nullptr;
        for (int r = 0, number = 0; r < rows; number++) {
            // five to seven are left to four and the rest: each count takes a second to compile
            const int left = rows - r, tile = left >= most ? most : left > 4 ? 4 : left;
            int limit[MOST];
            for (int i = 0; i < tile; i++) limit[i] = visited - (c.queries - 1 - (r + i) / c.group);
            const int silent = r < last ? last - r : 0;  // queries of the tile that leave no logits
            float *logits = nullptr;
            if (c.logits && silent < tile)
                logits = c.logits + ((long)head * c.group + r + silent - last) * c.ahead;
            const float *q = c.q + ((long)head * rows + r) * c.dim;
            float *out = c.out ? part + (long)r * c.dim : nullptr, *best = bests + r, *sum = sums + r;
            const Block *next = more && number >= from ? &turns[!turn] : nullptr;
#define TILE(T, SHARED)                                                                                  \
    attend_tile<Keys, Values, T, SHARED>(                                                                \
        q, block, c.dim, c.scale, c.cap, logs, limit, out, best, sum, logits, c.ahead, silent, next,     \
        number - from, tiles - from)
#define ATTEND(T)                  \
    if (shared) TILE(T, shares);   \
    else TILE(T, false)
            switch (tile) {
#if defined(__AVX512F__)
            case 8: ATTEND(8); break;
#endif
            case 4: ATTEND(4); break;
            case 3: ATTEND(3); break;
            case 2: ATTEND(2); break;
            default: ATTEND(1);
            }
            r += tile;
        }
    }
}

// Transforms a sum of transformed rows back (kernels/rows/hadamard.py): [dim], in place.
INLINE void turn_back(float *x, int dim) {
    const int half = dim / 2, run = run_of(dim), factor = query_factor(dim);
    for (int size = 1; size < run; size *= 2)
        for (int at = 0; at < dim; at += 2 * size)
            for (int i = at; i < at + size; i++) {
                const float one = x[i], other = x[i + size];
                x[i] = one + other, x[i + size] = one - other;
            }
    for (int i = 0; i < half; i++) {
        const float one = x[i], other = x[i + half];
        x[i] = (one + other) / factor, x[i + half] = (one - other) / factor;
    }
}

// Merge the splits of one query row of a head: out and the log-sum-exp.
template <class V>
static void merge(const Call &c, int head, int r) {
    const int rows = c.queries * c.group, splits = splits_of(c, seen(c, head));
    const long size = (long)rows * (c.dim + 2);
    const float *part = c.parts + (long)head * splits_of(c, c.visited) * size;
    float top = -INFINITY, sum = 0;
    for (int s = 0; s < splits; s++) {
        const float m = part[s * size + (long)rows * c.dim + r];
        top = m > top ? m : top;
    }
    float *out = c.out ? c.out + ((long)head * rows + r) * c.dim : nullptr;
    if (out) memset(out, 0, sizeof(float) * c.dim);
    const float base = top == -INFINITY ? 0 : top;
    for (int s = 0; s < splits; s++) {
        const float *one = part + s * size, *best = one + (long)rows * c.dim;
        const float weight = expf(best[r] - base);
        sum += best[rows + r] * weight;
        for (int d = 0; out && d < c.dim; d += W)
            store(out + d, load(out + d) + load(one + (long)r * c.dim + d) * weight);
    }
    c.lse[(long)head * rows + r] = top + logf(sum);
    if (!out) return;
    for (int d = 0; d < c.dim; d++) out[d] = sum > 0 || sum != sum ? out[d] / sum : 0;
    if (Decoded<V>::turned) turn_back(out, c.dim);
}

constexpr long MERGED = 1 << 14;  // floats of splits that another thread is not woken for

// Merge the splits of all heads.
template <class V>
static void merge(const Call &c) {
    const int rows = c.queries * c.group;
    const bool many = (long)splits_of(c, c.visited) * c.heads * rows * (c.dim + 2) > MERGED;
    share(many ? c.threads : 1, (long)c.heads * rows, 1, [&](long i) { merge<V>(c, i / rows, i % rows); });
}

template <class K, class V>
static void attend(const Call &c) {
    const int splits = splits_of(c, c.visited), work = splits * c.heads;
    share(c.threads, work, 1, [&](int i) { attend_split<K, V>(c, i / splits, i % splits); });
    merge<V>(c);
}

}  // namespace
