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
constexpr int SUMS = 2;       // that a product is split in, for one alone would wait for itself

struct Next {  // what is fetched beside each key: a key after it, and its value; keys NULL: nothing
    const char *const *keys, *const *values;
    int key_bytes, value_bytes;
};

// Products of V vectors of queries, across [dim][apart], with `count` keys, up to eights: l [keys][lanes].
template <int V>
INLINE void logits_across(const float *across, long apart, const char *const *rows, int count, int dim, float *l,
                          long lanes, Next next) {
    constexpr int keys = (W == 16 ? 16 : 8) / (SUMS * V);  // as many sums as hide each other's wait
    for (int t = 0; t < count; t += keys) {
        Floats s[keys][V][SUMS];
        UNROLL for (int i = 0; i < keys; i++)
            UNROLL for (int v = 0; v < V; v++)
                UNROLL for (int u = 0; u < SUMS; u++) s[i][v][u] = Floats{};
        const char *own[keys];
        UNROLL for (int i = 0; i < keys; i++) own[i] = rows[t + i];
        for (int i = 0; next.keys && i < keys; i++) {
            fetch(next.keys[t + i], next.key_bytes);
            fetch(next.values[t + i], next.value_bytes);
        }
        for (int d = 0; d < dim; d += SUMS)
            UNROLL for (int u = 0; u < SUMS; u++)
                UNROLL for (int i = 0; i < keys; i++) {
                    const float x = Float32::first(own[i] + 4 * (d + u));
                    UNROLL for (int v = 0; v < V; v++) s[i][v][u] += load(across + (d + u) * apart + v * W) * x;
                }
        UNROLL for (int i = 0; i < keys; i++)
            UNROLL for (int v = 0; v < V; v++)
                store(l + (t + i) * lanes + v * W, s[i][v][0] + s[i][v][1]);
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

struct Room {  // of one thread, for one split of a head
    float *across;                         // [dim][lanes]
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
        void **const places[] = {(void **)&across, (void **)&l, (void **)&out, (void **)&best, (void **)&sum,
                                 (void **)&less, (void **)&keys, (void **)&values, (void **)&limit};
        for (int i = 0; i < 9; i++) *places[i] = at, at += (4 * sizes[i] + 63) / 64 * 64;
        return true;
    }
};

struct Scales {  // of a block's keys and values; NULL: there are none
    const float *keys, *values;
};

// Logits of one vector of queries, l [keys][lanes], become weights, with the queries' new best and sum; less: what
// is left of what they had. The rows from `least` on are not seen by all: a query sees those below its limit.
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
    const Floats base = top == -INFINITY ? Floats{} : top, left = fading(load(best) - base);
    Floats added = {};
    for (int t = 0; t < count; t += 2) {
        Floats one = fading(load(l + t * lanes) - base), two = fading(load(l + (t + 1) * lanes) - base);
        added += one + two;
        if (scales.values) one *= scales.values[t], two *= scales.values[t + 1];
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

// Adds the weights of queries, up to whole Ts, to their columns of out.
static void add_values_across(const float *weights, long lanes, const char *const *rows, int count, int queries,
                              int dim, float *out) {
    constexpr int T = W == 16 ? 8 : 4;
    for (int r = 0; r < queries; r += T) {
        int d = 0;
        for (; d + 2 * W <= dim; d += 2 * W)
            add_values_of<T, 2>(weights + r, lanes, rows, count, dim, d, out + (long)r * dim);
        for (; d < dim; d += W) add_values_of<T, 1>(weights + r, lanes, rows, count, dim, d, out + (long)r * dim);
    }
}

// Queries at .. at + some - 1 meet a block.
static void meet(const Call &c, const Room &room, const Block &block, Scales scales, const float *logs, int least,
                 int at, int some, Next next) {
    const int dim = c.dim, keys = (block.count + 7) / 8 * 8;
    const long lanes = (some + W - 1) / W * W;
    const float *across = room.across + at;
    int v = 0;
    for (; v + 2 * W <= lanes; v += 2 * W, next.keys = nullptr)
        logits_across<2>(across + v, room.lanes, block.keys, keys, dim, room.l + v, lanes, next);
    if (v < lanes) logits_across<1>(across + v, room.lanes, block.keys, keys, dim, room.l + v, lanes, next);
    for (v = 0; v < lanes; v += W) {
        const int r = at + v;
        soften(c, block, scales, logs, least, room.limit + r, lanes, room.l + v, room.best + r, room.sum + r,
               room.less + r);
    }
    for (int r = at; r < at + some; r++)
        if (const float less = room.less[r]; less != 1)
            for (int d = 0; d < dim; d += W) {
                float *const to = room.out + (long)r * dim + d;
                store(to, load(to) * less);
            }
    add_values_across(room.l, lanes, block.values, block.count, some, dim, room.out + (long)at * dim);
}

// Rows first .. stop - 1, of K and V as floats, meet all queries.
template <class K, class V>
static void run_split(const Call &c, const Run &run, const Room &room, int first, int stop, int visited) {
    constexpr bool keys_lie = std::is_same<K, Float32>::value, values_lie = std::is_same<V, Float32>::value;
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
            meet(c, room, block, scales, logs, least, r, rows - r < CHUNK ? rows - r : CHUNK, next);
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
    memset(room.across, 0, sizeof(float) * room.lanes * dim);
    for (int r = 0; r < rows; r++)
        for (int d = 0; d < dim; d++) room.across[d * room.lanes + r] = q[(long)r * dim + d];
    run_split<K, V>(c, run, room, first, stop, visited);
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
    merge<V>(c);
    return 0;
}

// Queries of a K/V head from which their lanes are full enough, as measured on rows of 64 and 128 numbers: never where
// tiles (attention.h) take no longer for any number of queries up to 64 (docs/EXACT.md).
template <class K>
constexpr int least_queries() {
    constexpr int never = 1 << 30;
#if defined(__AVX512VNNI__)
    if (K::integers) return never;
#endif
#if defined(__AVX512BF16__)
    if (K::pairs) return never;
#endif
    if (std::is_same<K, Float32>::value) return W == 16 ? never : W == 8 ? 13 : 7;
    return W == 16 ? 14 : W == 8 ? 16 : 8;
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
