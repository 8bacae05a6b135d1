// The gated delta rule over a prompt's tokens, CHUNK at a time (kernels/recurrent/delta.py). Of a chunk, with
// p the log decay since its beginning and A[i][j] = beta_i exp(p_i - p_j) k_i . k_j below the diagonal:
//     X = (1 + A)^-1 beta (V - exp(p) K S);  o = exp(p) Q S + lower(exp(p_i - p_j) q_i . k_j) X;
//     S = exp(p_last) S + K^T (exp(p_last - p) X)
// S and everything of a chunk stay in a thread's caches.
#include <math.h>

#include "chunk.h"
#include "kinds.h"
#include "rounding.h"
#include "scratch.h"
#include "team.h"
#include "unit.h"

namespace {

struct Call {
    const char *q, *k, *v;  // [batch, count, heads, dk], ..., [batch, count, heads * group, dv]
    const float *g, *beta;  // [batch, count, heads * group]
    const float *state;     // [batch, heads * group, dk, dv]
    float *out;             // as v
    float *after;           // as state: S after the first count - keep tokens
    float *keys, *deltas;   // [batch, heads, keep, dk], [batch, heads * group, keep, dv]: the other tokens'
    long q_batch, q_row, k_batch, k_row, v_batch, v_row;  // strides in bytes; heads follow each other
    int batch, count, heads, group, dk, dv, keep, threads;
    float eps;  // beside a squared length
};

constexpr int SOLVED = 16;  // tokens whose X is found row by row
constexpr int AHEAD = 4;    // rows that are fetched before they are read: the next lies pages away

// A thread's chunk: keys and queries of length one and what makes them so, keys across, products of both
// with the keys, a value head's weights and rows.
struct Work {
    float *q, *k, *across, *alike, *asked, *weights, *answers, *x, *late, *out, *state, *lengths;
    double *passed;  // log decay since the chunk's beginning: a difference of two keeps float32's precision
    static size_t bytes(const Call &c) {
        const size_t rows = CHUNK * (3 * (size_t)c.dk + 3 * c.dv + 4 * CHUNK + 4);
        return sizeof(float) * (rows + (size_t)c.dk * c.dv) + 1024;
    }
    Work(void *at, const Call &c) {
        float *next = (float *)at;
        const auto take = [&next](long size) {
            float *found = next;
            next += (size + 15) / 16 * 16;
            return found;
        };
        q = take(CHUNK * c.dk), k = take(CHUNK * c.dk), across = take(CHUNK * c.dk);
        alike = take(CHUNK * CHUNK), asked = take(CHUNK * CHUNK);
        weights = take(CHUNK * CHUNK), answers = take(CHUNK * CHUNK);
        x = take(CHUNK * c.dv), late = take(CHUNK * c.dv), out = take(CHUNK * c.dv);
        state = take((long)c.dk * c.dv), passed = (double *)take(2 * CHUNK), lengths = take(2 * CHUNK);
    }
};

#if defined(HAS_PAIRS)
// Products of queries and keys as they are stored, two elements at a time, without rounding; lengths after.
INLINE void among_pairs(const Call &c, const char *q, const char *k, int size, const Work &w) {
    const int pairs = c.dk / 2;
    float *rows = w.late, *asks = w.late + CHUNK * pairs;
    for (int i = 0; i < size; i++) {
        memcpy(rows + i * pairs, k + i * c.k_row, 2 * c.dk);
        memcpy(asks + i * pairs, q + i * c.q_row, 2 * c.dk);
    }
    turn_across(rows, size, pairs, w.across, CHUNK);
    among<true>(rows, w.across, CHUNK, w.alike, size, pairs);
    among<true>(asks, w.across, CHUNK, w.asked, size, pairs);
    for (int i = 0; i < size; i++)
        for (int j = 0; j <= i; j += W) {
            float *alike = w.alike + i * CHUNK + j, *asked = w.asked + i * CHUNK + j;
            const Floats lengths = load(w.lengths + j);
            store(alike, load(alike) * lengths * w.lengths[i]);
            store(asked, load(asked) * lengths * w.lengths[CHUNK + i]);
        }
}
#endif

// The keys and queries of `size` tokens from `first` on, and the products of each with the keys up to its own.
template <class K>
INLINE void open_chunk(const Call &c, int b, int head, int first, int size, const Work &w) {
    const long at = (long)head * c.dk * K::bytes;
    const char *k = c.k + b * c.k_batch + first * c.k_row + at, *q = c.q + b * c.q_batch + first * c.q_row + at;
    const float factor = 1 / sqrtf(c.dk);
    for (int i = 0; i < size; i++) {
        if (i + AHEAD < size) {
            fetch(k + (i + AHEAD) * c.k_row, c.dk * K::bytes);
            fetch(q + (i + AHEAD) * c.q_row, c.dk * K::bytes);
        }
        w.lengths[i] = unit<K>(k + i * c.k_row, c.dk, c.eps, 1, w.k + i * c.dk);
        w.lengths[CHUNK + i] = unit<K>(q + i * c.q_row, c.dk, c.eps, factor, w.q + i * c.dk);
    }
#if defined(HAS_PAIRS)
    if (K::pairs && c.dk % 2 == 0 && c.dk <= c.dv) return among_pairs(c, q, k, size, w);
#endif
    turn_across(w.k, size, c.dk, w.across, CHUNK);
    among(w.k, w.across, CHUNK, w.alike, size, c.dk);
    among(w.q, w.across, CHUNK, w.asked, size, c.dk);
}

// V vectors of row i of X, without what the rows of its block before it bring to it.
template <int V>
INLINE void solve_row(const float *weights, int first, int i, long dv, float *x) {
    Floats found[V];
    UNROLL for (int n = 0; n < V; n++) found[n] = load(x + i * dv + n * W);
    for (int j = first; j < i; j++) {
        const Floats weight = all(weights[i * CHUNK + j]);
        UNROLL for (int n = 0; n < V; n++) found[n] += load(x + j * dv + n * W) * weight;
    }
    UNROLL for (int n = 0; n < V; n++) store(x + i * dv + n * W, found[n]);
}

// X of a value head from beta (V - exp(p) K S): block by block without what the blocks before bring to it.
INLINE void solve(const Work &w, int size, int dv) {
    for (int first = 0; first < size; first += SOLVED) {
        const int some = size - first < SOLVED ? size - first : SOLVED;
        float *x = w.x + (long)first * dv;
        if (first) multiply({w.weights + first * CHUNK, CHUNK, 1}, w.x, dv, x, dv, some, dv, first, 1);
        for (int i = first + 1; i < first + some; i++) {
            int d = 0;
            for (; d + 4 * W <= dv; d += 4 * W) solve_row<4>(w.weights, first, i, dv, w.x + d);
            for (; d < dv; d += W) solve_row<1>(w.weights, first, i, dv, w.x + d);
        }
    }
}

// One value head's chunk: o, d where the rows are wanted, and S, in place.
template <class K>
INLINE void value_chunk(const Call &c, int b, int head, int first, int size, float *state, const Work &w) {
    const long apart = (long)c.heads * c.group, token = ((long)b * c.count + first) * apart + head;
    const int whole = c.count - c.keep;
    double sum = 0;
    for (int i = 0; i < size; i++) w.passed[i] = sum += c.g[token + i * apart];
    for (int i = 0; i < size; i++) {
        weigh(w.alike + i * CHUNK, w.passed, i, -c.beta[token + i * apart], w.weights + i * CHUNK);
        weigh(w.asked + i * CHUNK, w.passed, i, 1, w.answers + i * CHUNK);
    }
    for (int at = 0; at < c.dv; at += VECTORS * W) {  // a strip of S is read once
        const int some = c.dv - at < VECTORS * W ? c.dv - at : VECTORS * W;
        multiply({w.k, c.dk, 1}, state + at, c.dv, w.x + at, c.dv, size, some, c.dk, 0);
        multiply({w.q, c.dk, 1}, state + at, c.dv, w.out + at, c.dv, size, some, c.dk, 0);
    }
    for (int i = 0; i < size; i++) {
        const char *v = c.v + b * c.v_batch + (first + i) * c.v_row + (long)head * c.dv * K::bytes;
        if (i + AHEAD < size) fetch(v + AHEAD * c.v_row, c.dv * K::bytes);
        const float decay = expf((float)w.passed[i]), beta = c.beta[token + i * apart];
        float *x = w.x + (long)i * c.dv, *out = w.out + (long)i * c.dv;
        for (int d = 0; d < c.dv; d += W) {
            store(x + d, (K::read(v, d) - load(x + d) * decay) * beta);
            store(out + d, load(out + d) * decay);
        }
    }
    solve(w, size, c.dv);
    multiply({w.answers, CHUNK, 1}, w.x, c.dv, w.out, c.dv, size, c.dv, size, 1, true);
    for (int i = 0; i < size; i++) {
        const float decay = expf((float)(sum - w.passed[i]));
        const float *x = w.x + (long)i * c.dv;
        for (int d = 0; d < c.dv; d += W) {
            store(w.late + (long)i * c.dv + d, load(x + d) * decay);
            store(c.out + (token + i * apart) * c.dv + d, load(w.out + (long)i * c.dv + d));
        }
        if (first >= whole)
            memcpy(c.deltas + (((long)b * c.heads * c.group + head) * c.keep + first + i - whole) * c.dv, x,
                   sizeof(float) * c.dv);
    }
    multiply({w.k, 1, c.dk}, w.late, c.dv, state, c.dv, c.dk, c.dv, size, expf((float)sum));
}

// The chunks of one key head: those of the tokens that S gets, then those that leave rows. A value head of
// the second kind works on a copy of S, so its chunks come one after the other.
template <class K>
static void key_head(const Call &c, int b, int head, const Work &w) {
    const int whole = c.count - c.keep;
    const long size = (long)c.dk * c.dv, h = (long)b * c.heads * c.group + head * c.group;
    memcpy(c.after + h * size, c.state + h * size, sizeof(float) * size * c.group);
    for (int first = 0; first < whole; first += CHUNK) {
        const int some = whole - first < CHUNK ? whole - first : CHUNK;
        open_chunk<K>(c, b, head, first, some, w);
        for (int of = 0; of < c.group; of++)
            value_chunk<K>(c, b, head * c.group + of, first, some, c.after + (h + of) * size, w);
    }
    for (int of = 0; of < c.group && c.keep; of++) {
        memcpy(w.state, c.after + (h + of) * size, sizeof(float) * size);
        for (int first = whole; first < c.count; first += CHUNK) {
            const int some = c.count - first < CHUNK ? c.count - first : CHUNK;
            open_chunk<K>(c, b, head, first, some, w);
            if (of == 0)
                memcpy(c.keys + (((long)b * c.heads + head) * c.keep + first - whole) * c.dk, w.k,
                       sizeof(float) * some * c.dk);
            value_chunk<K>(c, b, head * c.group + of, first, some, w.state, w);
        }
    }
}

template <class K>
static int delta_chunk(const Call &c) {
    std::atomic<int> failed{0};
    share(c.threads, (long)c.batch * c.heads, 1, [&](int unit) {
        static thread_local Scratch scratch;
        void *at = scratch.get(Work::bytes(c));
        if (at) key_head<K>(c, unit / c.heads, unit % c.heads, Work(at, c));
        else failed = 2;
    });
    return failed;
}

}  // namespace

// Returns 0, 1 for a kind that this build lacks, or 2 without memory.
extern "C" int omnikv_delta_chunk(const Call *c, int kind) {
#define DELTA(K) delta_chunk<K>(*c)
    OF_KIND(kind, DELTA);
}

extern "C" int omnikv_sizeof_delta_chunk_call() { return sizeof(Call); }
