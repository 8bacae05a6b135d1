// The gated delta rule over a prompt's tokens, 64 at a time (kernels/recurrent/delta.py). Of a chunk, with
// p the log decay since its beginning and A[i][j] = beta_i exp(p_i - p_j) k_i . k_j below the diagonal:
//     X = (1 + A)^-1 beta (V - exp(p) K S);  o = exp(p) Q S + lower(exp(p_i - p_j) q_i . k_j) X;
//     S = exp(p_last) S + K^T (exp(p_last - p) X)
// S and everything of a chunk stay in a thread's caches.
#include <math.h>

#include "kinds.h"
#include "multiply.h"
#include "rounding.h"
#include "scratch.h"
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

constexpr int CHUNK = 64;

// A thread's chunk: keys and queries of length one, keys across, their products, a value head's rows.
struct Work {
    float *q, *k, *across, *alike, *asked, *decays, *weights, *x, *late, *out, *state;
    double *passed;  // log decay since the chunk's beginning: a difference of two keeps float32's precision
    static size_t bytes(const Call &c) {
        const size_t rows = CHUNK * (3 * (size_t)c.dk + 3 * c.dv + 4 * CHUNK + 2);
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
        decays = take(CHUNK * CHUNK), weights = take(CHUNK * CHUNK);
        x = take(CHUNK * c.dv), late = take(CHUNK * c.dv), out = take(CHUNK * c.dv);
        state = take((long)c.dk * c.dv), passed = (double *)take(2 * CHUNK);
    }
};

// The keys and queries of `size` tokens from `first` on, and all their products.
template <class K>
INLINE void open_chunk(const Call &c, int b, int head, int first, int size, const Work &w) {
    const long at = (long)head * c.dk * K::bytes;
    for (int i = 0; i < size; i++) {
        unit<K>(c.k + b * c.k_batch + (first + i) * c.k_row + at, c.dk, c.eps, 1, w.k + i * c.dk);
        unit<K>(c.q + b * c.q_batch + (first + i) * c.q_row + at, c.dk, c.eps, 1 / sqrtf(c.dk), w.q + i * c.dk);
    }
    const int wide = (size + W - 1) / W * W;
    for (int d = 0; d < c.dk; d++)
        for (int i = 0; i < wide; i++) w.across[d * CHUNK + i] = i < size ? w.k[i * c.dk + d] : 0;
    multiply(w.k, c.dk, w.across, CHUNK, w.alike, CHUNK, size, wide, c.dk, 0);
    multiply(w.q, c.dk, w.across, CHUNK, w.asked, CHUNK, size, wide, c.dk, 0);
}

// V vectors of row i of X, without what the rows before bring to it.
template <class K, int V>
INLINE void solve_row(const char *v, int i, int d, long dv, float decay, float beta, const float *weights, float *x) {
    Floats found[V];
    float *row = x + i * dv + d;
    UNROLL for (int n = 0; n < V; n++) found[n] = (K::read(v, d + n * W) - load(row + n * W) * decay) * beta;
    for (int j = 0; j < i; j++)
        UNROLL for (int n = 0; n < V; n++) found[n] -= load(x + j * dv + d + n * W) * weights[j];
    UNROLL for (int n = 0; n < V; n++) store(row + n * W, found[n]);
}

// X of a value head: beta (V - exp(p) K S), then rows from the first on, each without what those before
// bring to it.
template <class K>
INLINE void solve(const Call &c, int b, int head, int first, int size, const float *state, const Work &w) {
    const long token = ((long)b * c.count + first) * c.heads * c.group + head, apart = (long)c.heads * c.group;
    double sum = 0;
    for (int i = 0; i < size; i++) w.passed[i] = sum += c.g[token + i * apart];
    multiply(w.k, c.dk, state, c.dv, w.x, c.dv, size, c.dv, c.dk, 0);
    for (int i = 0; i < size; i++) {
        const char *v = c.v + b * c.v_batch + (first + i) * c.v_row + (long)head * c.dv * K::bytes;
        const float decay = expf((float)w.passed[i]), beta = c.beta[token + i * apart];
        float *weights = w.weights + i * CHUNK, *decays = w.decays + i * CHUNK;
        for (int j = 0; j < CHUNK; j++) decays[j] = j <= i ? (float)(w.passed[i] - w.passed[j]) : -INFINITY;
        for (int j = 0; j < size; j += W) {
            const Floats since = exponential(load(decays + j));
            store(decays + j, since);
            store(weights + j, load(w.alike + i * CHUNK + j) * since * beta);
        }
        int d = 0;
        for (; d + 4 * W <= c.dv; d += 4 * W) solve_row<K, 4>(v, i, d, c.dv, decay, beta, weights, w.x);
        for (; d < c.dv; d += W) solve_row<K, 1>(v, i, d, c.dv, decay, beta, weights, w.x);
    }
}

// One value head's chunk: o, d where the rows are wanted, and S, in place.
template <class K>
INLINE void value_chunk(const Call &c, int b, int head, int first, int size, float *state, const Work &w) {
    solve<K>(c, b, head, first, size, state, w);
    const int whole = c.count - c.keep;
    multiply(w.q, c.dk, state, c.dv, w.out, c.dv, size, c.dv, c.dk, 0);
    for (int i = 0; i < size; i++) {
        float *out = w.out + (long)i * c.dv, *weights = w.weights + i * CHUNK;
        const Floats decay = all(expf((float)w.passed[i]));
        for (int d = 0; d < c.dv; d += W) store(out + d, load(out + d) * decay);
        for (int j = 0; j < size; j += W)
            store(weights + j, load(w.asked + i * CHUNK + j) * load(w.decays + i * CHUNK + j));
    }
    multiply(w.weights, CHUNK, w.x, c.dv, w.out, c.dv, size, c.dv, size, 1);
    const double last = w.passed[size - 1];
    for (int i = 0; i < size; i++) {
        const float decay = expf((float)(last - w.passed[i]));
        const long token = ((long)b * c.count + first + i) * c.heads * c.group + head;
        const float *x = w.x + (long)i * c.dv;
        for (int d = 0; d < c.dv; d += W) {
            store(w.late + (long)i * c.dv + d, load(x + d) * decay);
            store(c.out + token * c.dv + d, load(w.out + (long)i * c.dv + d));
        }
        if (first >= whole)
            memcpy(c.deltas + (((long)b * c.heads * c.group + head) * c.keep + first + i - whole) * c.dv, x,
                   sizeof(float) * c.dv);
    }
    multiply(w.across, CHUNK, w.late, c.dv, state, c.dv, c.dk, c.dv, size, expf((float)last));
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
    int failed = 0;
#pragma omp parallel for schedule(dynamic) num_threads(c.threads) if (c.threads > 1)
    for (int unit = 0; unit < c.batch * c.heads; unit++) {
        static thread_local Scratch scratch;
        void *at = scratch.get(Work::bytes(c));
        if (at) key_head<K>(c, unit / c.heads, unit % c.heads, Work(at, c));
        else
#pragma omp atomic write
            failed = 2;
    }
    return failed;
}

}  // namespace

// Returns 0, 1 for a kind that this build lacks, or 2 without memory.
extern "C" int omnikv_delta_chunk(const Call *c, int kind) {
#define DELTA(K) delta_chunk<K>(*c)
    OF_KIND(kind, DELTA);
}

extern "C" int omnikv_sizeof_delta_chunk_call() { return sizeof(Call); }
