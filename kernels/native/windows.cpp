// Scores of all rows by a window of queries (kernels/select/window_scores.py), or by a block of a prompt's whose
// log-sum-exps are known (column_scores.py): for each row the weighted sum over the queries of their largest weight
// or logit among all heads.
//
// The queries of a head lie in the lanes of vectors, so that a product meets a number of a key as it lies in memory,
// nothing is packed, and neither the softmax nor the largest of the heads takes a step across lanes. The first pass
// finds what the weights of each query and head sum to, in splits; the second goes by keys, over all heads.
#include <math.h>
#include <type_traits>

#include "rounding.h"
#include "scratch.h"
#include "team.h"

namespace {

constexpr int TILE = 64;          // keys whose logits are held at a time
constexpr int SPLIT = 1024;       // rows of a piece of the first pass; sums do not depend on the threads
constexpr int AHEAD = 32;         // rows between the one that is read and the one that is fetched
constexpr int MV = W == 8 ? 2 : 4;               // vectors of queries that meet a key at a time, at most
constexpr int SUMS = W == 8 ? 12 : 24;           // that stay in registers

struct Call {
    const char *q;  // [window][heads * group][dim] of K's kind; strides in elements
    const char *k;  // [heads][rows][dim]; strides in bytes
    long query, query_head, key_head, key_row;
    const float *alpha;  // [window], newest last
    const float *sinks;  // [heads * group] or NULL
    float *scores;       // [rows]
    // of each query and head, elements apart, where they are known and every query sees every row; or NULL
    const float *lse;
    long lse_query, lse_head;
    int window, heads, group, dim, rows, softmax, threads;  // softmax: weights, else logits
    float scale, cap;
};

// How a key meets queries: `step` numbers of each at a time.
struct Single {
    static constexpr int step = 1;
    INLINE Floats key(const char *at) { return all(Float32::first(at)); }
    INLINE Floats add(Floats sum, Floats a, Floats b) { return sum + a * b; }
};

#if defined(HAS_PAIRS)
struct Pairs {
    static constexpr int step = 2;
    INLINE Floats key(const char *at) {  // by its bits: they are no float
        int32_t pair;
        memcpy(&pair, at, 4);
        return (Floats)(Ints{} + pair);
    }
    INLINE Floats add(Floats sum, Floats a, Floats b) { return add_pairs(sum, a, b); }
};
#endif

#if defined(HAS_PAIRS)
template <class K>
using Way = typename std::conditional<K::pairs, Pairs, Single>::type;
#else
template <class K>
using Way = Single;
#endif

template <class K>
constexpr bool lies() { return Way<K>::step == 2 || std::is_same<K, Float32>::value; }

INLINE Floats most_or_nan(Floats a, Floats b) { return ((a > b) | (a != a)) ? a : b; }

// Queries as products read them: of each K/V head [dim / step][vectors][W] cells of 32 bits, a vector being W queries
// of one head of the group, those of a head in turn.
struct Queries {
    float *across, *total;  // total [heads][vectors][W]: log-sum-exps
    int vectors, of_head;   // of a K/V head, of one of its group
    long size;              // cells of a K/V head

    template <class M>
    void count(const Call &c) {
        of_head = (c.window + W - 1) / W, vectors = of_head * c.group;
        size = (long)c.dim / M::step * vectors * W;
    }
};

template <class K>
static void lay_queries(const Call &c, const Queries &q) {
    typedef Way<K> M;
    const int lanes = q.vectors * W, of_head = q.of_head * W;
    memset(q.across, 0, sizeof(float) * q.size * c.heads);
    for (int h = 0; h < c.heads * c.group; h++)
        for (int j = 0; j < c.window; j++) {
            const char *from = c.q + (j * c.query + h * c.query_head) * K::bytes;
            float *to = q.across + h / c.group * q.size + h % c.group * of_head + j;
            for (int d = 0; d < c.dim; d += M::step) {
                if (M::step == 2) memcpy(to + (long)d / 2 * lanes, from + 2 * d, 4);
                else if (d % W == 0) {
                    float some[W];
                    store(some, K::read(from, d));
                    for (int i = 0; i < W; i++) to[(long)(d + i) * lanes] = some[i];
                }
            }
        }
}

// The rows that a query sees end before its limit, [window in whole vectors]; the oldest one's is the least.
INLINE Ints limits_of(const Call &c, int vector, const Queries &q) {
    Ints found;
    for (int i = 0; i < W; i++) found[i] = c.rows - (c.window - 1) + vector % q.of_head * W + i;
    return found;
}

// Logits of V vectors of queries with `count` keys from row t on, whole tiles of them: l [count][V][W].
template <class M, int V>
INLINE void multiply(const float *across, int lanes, const char *const *keys, int count, int dim, int bytes, float *l) {
    constexpr int T = SUMS / V > 8 ? 8 : SUMS / V;
    for (int t = 0; t < count; t += T) {
        Floats s[T][V];
        UNROLL for (int i = 0; i < T; i++)
            UNROLL for (int v = 0; v < V; v++) s[i][v] = Floats{};
        const char *own[T];
        UNROLL for (int i = 0; i < T; i++) own[i] = keys[t + i];
        for (int i = 0; i < T && bytes; i++) fetch(keys[t + i + AHEAD], bytes);
        const float *q = across;
        for (int d = 0; d < dim / M::step; d++, q += lanes) {
            Floats x[V];
            UNROLL for (int v = 0; v < V; v++) x[v] = load(q + v * W);
            UNROLL for (int i = 0; i < T; i++) {
                const Floats key = M::key(own[i] + 4 * d);
                UNROLL for (int v = 0; v < V; v++) s[i][v] = M::add(s[i][v], x[v], key);
            }
        }
        UNROLL for (int i = 0; i < T; i++)
            UNROLL for (int v = 0; v < V; v++) store(l + ((t + i) * V + v) * W, s[i][v]);
    }
}

struct Keys {  // where those of a tile lie, and the ones behind them, which are fetched
    const char *at[TILE + AHEAD + 8];
    int bytes;  // of a row that is fetched; 0: none
};

// Keys first .. of a head, the last one again behind the end, as floats in `decoded` where products want that.
template <class K>
static void take_keys(const Call &c, int head, int first, int count, float *decoded, Keys &keys) {
    for (int i = 0; i < TILE + AHEAD + 8; i++) {
        const long row = first + i < c.rows ? first + i : c.rows - 1;
        keys.at[i] = c.k + head * c.key_head + row * c.key_row;
    }
    keys.bytes = lies<K>() ? c.dim * K::bytes : 0;
    if (lies<K>()) return;
    for (int i = 0; i < count; i++, decoded += c.dim) {
        fetch(keys.at[i + AHEAD], c.dim * K::bytes);
        for (int d = 0; d < c.dim; d += W) store(decoded + d, K::read(keys.at[i], d));
        keys.at[i] = (const char *)decoded;
    }
    for (int i = count; i < count + 8; i++) keys.at[i] = keys.at[count - 1];
}

// Scaled and capped logits l [count][V][W] of vectors from `vector` on; -inf where a query does not see a row.
template <int V>
INLINE void end_logits(const Call &c, const Queries &q, int vector, int first, int count, float *l) {
    Ints limits[V];
    UNROLL for (int v = 0; v < V; v++) limits[v] = limits_of(c, vector + v, q);
    const int least = c.lse ? c.rows : c.rows - (c.window - 1);
    for (int t = 0; t < count; t++)
        UNROLL for (int v = 0; v < V; v++) {
            float *const at = l + (t * V + v) * W;
            Floats x = load(at) * c.scale;
            if (c.cap) x = capped(x, c.cap);
            if (first + t >= least) x = limits[v] > first + t ? x : all(-INFINITY);
            store(at, x);
        }
}

template <class M, int V>
INLINE void logits_of(const Call &c, const Queries &q, int head, int vector, Keys &keys, int first, int count, float *l) {
    multiply<M, V>(q.across + head * q.size + vector * W, q.vectors * W, keys.at, count, c.dim, keys.bytes, l);
    keys.bytes = 0;
    end_logits<V>(c, q, vector, first, count, l);
}

// Calls f(vector, V) with a constant V for all vectors of a head.
template <class F>
INLINE void by_vectors(int vectors, const F &f) {
    int v = 0;
    for (; v + MV <= vectors; v += MV) f(v, std::integral_constant<int, MV>());
    if (MV > 2 && vectors - v == 3) f(v, std::integral_constant<int, (MV > 2 ? 3 : 1)>());
    else if (MV > 2 && vectors - v == 2) f(v, std::integral_constant<int, 2>());
    else if (v < vectors) f(v, std::integral_constant<int, 1>());
}

// ---- the first pass

// best and sum [vectors][W] of a split of the rows.
template <class K>
static void sum_split(const Call &c, const Queries &q, int head, int from, int stop, float *decoded, float *best,
                      float *sum) {
    typedef Way<K> M;
    alignas(64) float l[(TILE + 8) * MV * W];
    Keys keys;
    for (int i = 0; i < q.vectors * W; i++) best[i] = -INFINITY, sum[i] = 0;
    for (int t = from; t < stop; t += TILE) {
        const int count = stop - t < TILE ? stop - t : TILE;
        take_keys<K>(c, head, t, count, decoded, keys);
        by_vectors(q.vectors, [&](int vector, auto of) {
            constexpr int V = decltype(of)::value;
            logits_of<M, V>(c, q, head, vector, keys, t, count, l);
            UNROLL for (int v = 0; v < V; v++) {
                float *const mine = best + (vector + v) * W, *const whole = sum + (vector + v) * W;
                Floats top = load(mine);
                for (int i = 0; i < count; i++) top = most(top, load(l + (i * V + v) * W));
                const Floats base = top == -INFINITY ? Floats{} : top;
                Floats added[2] = {load(whole) * fading(load(mine) - base)};
                for (int i = 0; i < count; i++) added[i % 2] += fading(load(l + (i * V + v) * W) - base);
                store(mine, top), store(whole, added[0] + added[1]);
            }
        });
    }
}

// The log-sum-exps of a vector's queries from those of its splits, in order; 0 where a query sees nothing.
static void join_splits(const Call &c, const Queries &q, const float *parts, int splits, int head, float *to) {
    const int lanes = q.vectors * W;
    for (int i = 0; i < lanes; i++) {
        const int at = c.group * head + i / (q.of_head * W);
        float best = c.sinks ? c.sinks[at] : -INFINITY, sum = c.sinks ? 1 : 0;
        for (int s = 0; s < splits; s++) {
            const float mine = parts[(s * 2l) * lanes + i], whole = parts[(s * 2l + 1) * lanes + i];
            const float top = mine > best ? mine : best, base = top == -INFINITY ? 0 : top;
            sum = sum * expf(best - base) + whole * expf(mine - base);
            best = top;
        }
        to[i] = sum == 0 ? 0 : best + logf(sum);
    }
}

// The log-sum-exps that are known, in the lanes of their queries.
static void lay_sums(const Call &c, const Queries &q) {
    memset(q.total, 0, sizeof(float) * c.heads * q.vectors * W);
    for (int h = 0; h < c.heads * c.group; h++)
        for (int j = 0; j < c.window; j++)
            q.total[(long)h * q.of_head * W + j] = c.lse[j * c.lse_query + h * c.lse_head];
}

// ---- the second pass

// Scores of rows first .. first + count - 1.
template <class K>
static void score(const Call &c, const Queries &q, int first, int count, float *decoded, float *best) {
    typedef Way<K> M;
    alignas(64) float l[(TILE + 8) * MV * W];
    Keys keys;
    const int lanes = q.of_head * W;
    for (int i = 0; i < count * lanes; i++) best[i] = -INFINITY;
    for (int head = 0; head < c.heads; head++) {
        take_keys<K>(c, head, first, count, decoded, keys);
        by_vectors(q.vectors, [&](int vector, auto of) {
            constexpr int V = decltype(of)::value;
            logits_of<M, V>(c, q, head, vector, keys, first, count, l);
            UNROLL for (int v = 0; v < V; v++) {
                const Floats total = c.softmax ? load(q.total + (head * q.vectors + vector + v) * W) : Floats{};
                float *const to = best + (vector + v) % q.of_head * W;
                for (int i = 0; i < count; i++)
                    store(to + i * lanes, most_or_nan(load(to + i * lanes), load(l + (i * V + v) * W) - total));
            }
        });
    }
    for (int t = 0; t < count; t += W) {
        Floats sums[W] = {};
        for (int i = 0; i < W && t + i < count; i++)
            for (int j = 0; j < c.window; j += W) {
                Floats x = load(best + (t + i) * lanes + j);
                x = c.softmax ? fading(x) : x == -INFINITY ? Floats{} : x;
                sums[i] += x * read_some<Float32>(c.alpha, j, c.window - j);
            }
        write_some<Float32>(c.scores, first + t, count - t, totals(sums));
    }
}

// Returns 0, or 2 without memory.
template <class K>
static int run(const Call &c) {
    static thread_local Scratch held;
    Queries q;
    q.count<Way<K>>(c);
    const int lanes = q.vectors * W, splits = c.softmax && !c.lse ? (c.rows + SPLIT - 1) / SPLIT : 0;
    const long sums = 2l * splits * c.heads * lanes;
    q.across = (float *)held.get(4 * (q.size * c.heads + (long)c.heads * lanes + sums));
    if (!q.across) return 2;
    q.total = q.across + q.size * c.heads;
    float *const parts = q.total + c.heads * lanes;
    lay_queries<K>(c, q);
    if (c.lse) lay_sums(c, q);
    std::atomic<int> lacking{0};
    const long keys = lies<K>() ? 0 : (long)TILE * c.dim;
    in_pieces(c.threads, (long)splits * c.heads, 1, [&](Pieces &pieces) {
        static thread_local Scratch scratch;
        float *const decoded = (float *)scratch.get(4 * keys + 64);
        if (!decoded) lacking = 1;
        for (long at, stop; decoded && pieces.next(at, stop);)
            for (long i = at; i < stop; i++) {
                const int first = i / c.heads * SPLIT, head = i % c.heads;
                float *const mine = parts + (head * (long)splits + i / c.heads) * 2 * lanes;
                sum_split<K>(c, q, head, first, first + SPLIT < c.rows ? first + SPLIT : c.rows, decoded, mine, mine + lanes);
            }
    });
    for (int head = 0; head < c.heads && splits; head++)
        join_splits(c, q, parts + head * (long)splits * 2 * lanes, splits, head, q.total + head * lanes);
    in_pieces(c.threads, (c.rows + TILE - 1) / TILE, 4, [&](Pieces &pieces) {
        static thread_local Scratch scratch;
        float *const decoded = (float *)scratch.get(4 * (keys + (long)TILE * q.of_head * W));
        if (!decoded) lacking = 1;
        for (long at, stop; decoded && pieces.next(at, stop);)
            for (long i = at; i < stop; i++) {
                const int first = i * TILE, count = c.rows - first < TILE ? c.rows - first : TILE;
                score<K>(c, q, first, count, decoded, decoded + keys);
            }
    });
    return lacking ? 2 : 0;
}

}  // namespace

// Returns 0, 1 for a kind that this build lacks, or 2 without memory.
extern "C" int omnikv_window_scores(const Call *c, int kind) {
#define SCORE(K) run<K>(*c)
    OF_KIND(kind, SCORE);
}

extern "C" int omnikv_sizeof_window_call() { return sizeof(Call); }
