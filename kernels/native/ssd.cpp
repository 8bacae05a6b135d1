// Mamba-2's recurrence (kernels/recurrent/ssd.py), of a step's few tokens and of a prompt's chunk. A step
// reads S and the rows of the tokens since, and writes rows; a prompt takes CHUNK tokens at a time. With p the
// log decay since a chunk's beginning:
//     y = exp(p) C S + lower(exp(p_i - p_j) c_i . b_j) (dt x) + skip x
//     S = exp(p_last) S + B^T (exp(p_last - p) dt x)
#include <math.h>

#include "chunk.h"
#include "kinds.h"
#include "rounding.h"
#include "scratch.h"
#include "team.h"

namespace {

struct Tokens {
    const char *c, *b, *x;  // [batch, count, groups, ds], as c, [batch, count, groups * each, dh]
    const float *g, *dt, *skip;  // [batch, count, heads], as g, [heads]
    const float *state;          // [batch, heads, ds, dh]
    float *out;                  // as x
    long c_batch, c_row, b_batch, b_row, x_batch, x_row;  // strides in bytes; heads follow each other
    int batch, count, groups, each, ds, dh, threads;
};

struct Step {
    Tokens of;
    float *keys, *deltas, *decays;  // rings: [batch, groups, size, ds], [batch, heads, size, dh or 1]
    const int64_t *base, *positions;  // [batch], [batch, count]
    int size;
};

struct Chunk {
    Tokens of;
    float *after;           // as state: S after the first count - keep tokens
    float *keys, *deltas;   // [batch, groups, keep, ds], [batch, heads, keep, dh]: the other tokens'
    int keep;
};

constexpr int MOST = 8;   // tokens of a step

template <class K>
INLINE void open_row(const char *row, int size, float *out) {
    for (int i = 0; i < size; i += W) write_some<Float32>((char *)out, i, size - i, read_some<K>(row, i, size - i));
}

INLINE float dot(const float *a, const float *b, int size) {
    Floats sums[2] = {};
    int i = 0;
    for (; i + W <= size; i += W) sums[i / W % 2] += load(a + i) * load(b + i);
    float found = total(sums[0] + sums[1]);
    for (; i < size; i++) found += a[i] * b[i];
    return found;
}

// Parts of a group's heads that a thread takes: more than one where there are fewer groups than threads.
INLINE int parts_of(const Tokens &t) {
    const int units = t.batch * t.groups, wanted = (t.threads + units - 1) / units;
    return wanted < t.each ? wanted : t.each;
}

// ---------------------------------------------------------------- a step

// What a thread works in: rows of c and b, their products with the ring's rows and each other, a head's
// weights of the ring's rows, what S brings, and where the rows lie.
struct StepWork {
    float *c, *b, *near, *own, *weights, *reads;
    int *slots;
    static size_t bytes(const Step &s) {
        const Tokens &t = s.of;
        return sizeof(float) * ((size_t)t.count * (2 * t.ds + s.size + MOST + t.dh) + s.size + 16 * 8) + sizeof(int) * s.size;
    }
    StepWork(void *at, const Step &s) {
        const Tokens &t = s.of;
        reads = (float *)at, c = reads + (long)t.count * t.dh, b = c + (long)t.count * t.ds;
        near = b + (long)t.count * t.ds, own = near + (long)t.count * s.size, weights = own + t.count * MOST;
        slots = (int *)(weights + s.size);
    }
};

// S^T c of R tokens, V vectors of each from `first` on.
template <int R, int V>
INLINE void read_state(const float *state, const float *c, int ds, int dh, int first, float *out) {
    Floats sums[R][V] = {};
    const float *from = state + first;
    for (int i = 0; i < ds; i++, from += dh)
        UNROLL for (int j = 0; j < V; j++) {
            const Floats s = load(from + j * W);
            UNROLL for (int r = 0; r < R; r++) sums[r][j] += s * c[r * ds + i];
        }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int j = 0; j < V; j++) store(out + r * dh + first + j * W, sums[r][j]);
}

template <int R>
INLINE void from_state(const float *state, const float *c, int ds, int dh, float *out) {
    int at = 0;
    for (; at + 4 * W <= dh; at += 4 * W) read_state<R, 4>(state, c, ds, dh, at, out);
    for (; at < dh; at += W) read_state<R, 1>(state, c, ds, dh, at, out);
}

// One head: what its tokens read, and their rows.
template <class K>
INLINE void step_head(const Step &s, int n, int head, int held, const StepWork &w) {
    const Tokens &t = s.of;
    const long heads = (long)t.groups * t.each, h = n * heads + head, first = s.positions[(long)n * t.count];
    const float *state = t.state + h * t.ds * t.dh;
    float *deltas = s.deltas + h * s.size * t.dh, *decays = s.decays + h * s.size;
    int at = 0;
    for (; at + 4 <= t.count; at += 4) from_state<4>(state, w.c + at * t.ds, t.ds, t.dh, w.reads + at * t.dh);
    for (; at < t.count; at++) from_state<1>(state, w.c + at * t.ds, t.ds, t.dh, w.reads + at * t.dh);
    float since = 0;
    for (int r = held - 1; r >= 0; r--) w.weights[r] = expf(since), since += decays[w.slots[r]];
    const float before = since, skip = t.skip[head];
    float steps = 0, after[MOST];
    for (int i = 0; i < t.count; i++) {
        const long token = ((long)n * t.count + i) * heads + head;
        steps += t.g[token], after[i] = steps;
        const float decay = expf(steps), passed = expf(before + steps), dt = t.dt[token];
        const char *x = t.x + n * t.x_batch + i * t.x_row + (long)head * t.dh * K::bytes;
        float *reads = w.reads + (long)i * t.dh, *row = deltas + (first + i) % s.size * t.dh;
        for (int d = 0; d < t.dh; d += W) {
            const Floats value = K::read(x, d);
            Floats sum = load(reads + d) * passed + value * skip, rows = {};
            store(row + d, value * dt);
            for (int r = 0; r < held; r++)
                rows += load(deltas + (long)w.slots[r] * t.dh + d) * (w.weights[r] * w.near[i * s.size + r]);
            sum += rows * decay;
            for (int m = 0; m <= i; m++)
                sum += load(deltas + (first + m) % s.size * t.dh + d) * (expf(steps - after[m]) * w.own[i * MOST + m]);
            store(t.out + token * t.dh + d, sum);
        }
        decays[(first + i) % s.size] = t.g[token];
    }
}

// Some heads of a group. The first ones' thread writes the rows that all share; nobody reads these here.
template <class K>
static void step_part(const Step &s, int n, int group, int part, int parts, const StepWork &w) {
    const Tokens &t = s.of;
    const long first = s.positions[(long)n * t.count], base = s.base[n];
    const int held = (int)(first - base);
    float *keys = s.keys + ((long)n * t.groups + group) * s.size * t.ds;
    for (int r = 0; r < held; r++) w.slots[r] = (int)((base + r) % s.size);
    for (int i = 0; i < t.count; i++) {
        const long at = (long)group * t.ds * K::bytes;
        open_row<K>(t.c + n * t.c_batch + i * t.c_row + at, t.ds, w.c + i * t.ds);
        open_row<K>(t.b + n * t.b_batch + i * t.b_row + at, t.ds, w.b + i * t.ds);
        if (part == 0) memcpy(keys + (first + i) % s.size * t.ds, w.b + i * t.ds, sizeof(float) * t.ds);
    }
    for (int i = 0; i < t.count; i++) {
        for (int r = 0; r < held; r++)
            w.near[i * s.size + r] = dot(w.c + i * t.ds, keys + (long)w.slots[r] * t.ds, t.ds);
        for (int m = 0; m <= i; m++) w.own[i * MOST + m] = dot(w.c + i * t.ds, w.b + m * t.ds, t.ds);
    }
    for (int of = t.each * part / parts; of < t.each * (part + 1) / parts; of++)
        step_head<K>(s, n, group * t.each + of, held, w);
}

template <class K>
static int ssd_step(const Step &s) {
    const int parts = parts_of(s.of), units = s.of.batch * s.of.groups * parts;
    std::atomic<int> failed{0};
    share(s.of.threads, units, 1, [&](int unit) {
        static thread_local Scratch scratch;
        void *at = scratch.get(StepWork::bytes(s));
        const int row = unit / parts;
        if (at) step_part<K>(s, row / s.of.groups, row % s.of.groups, unit % parts, parts, StepWork(at, s));
        else failed = 2;
    });
    return failed;
}

// ---------------------------------------------------------------- a prompt

// A thread's chunk: c and b, b across, their products, a head's dt x, weights and output, and its S.
struct ChunkWork {
    float *c, *b, *across, *asked, *weights, *added, *late, *out, *state;
    double *passed;  // log decay since the chunk's beginning: a difference of two keeps float32's precision
    static size_t bytes(const Tokens &t) {
        const size_t rows = CHUNK * (3 * (size_t)t.ds + 3 * t.dh + 2 * CHUNK + 2);
        return sizeof(float) * (rows + (size_t)t.ds * t.dh) + 1024;
    }
    ChunkWork(void *at, const Tokens &t) {
        float *next = (float *)at;
        const auto take = [&next](long size) {
            float *found = next;
            next += (size + 15) / 16 * 16;
            return found;
        };
        c = take(CHUNK * t.ds), b = take(CHUNK * t.ds), across = take(CHUNK * t.ds);
        asked = take(CHUNK * CHUNK), weights = take(CHUNK * CHUNK);
        added = take(CHUNK * t.dh), late = take(CHUNK * t.dh), out = take(CHUNK * t.dh);
        state = take((long)t.ds * t.dh), passed = (double *)take(2 * CHUNK);
    }
};

// c and b of `size` tokens from `first` on, and the products of each c with the b up to its own.
template <class K>
INLINE void open_chunk(const Tokens &t, int n, int group, int first, int size, const ChunkWork &w) {
    const long at = (long)group * t.ds * K::bytes;
    for (int i = 0; i < size; i++) {
        open_row<K>(t.c + n * t.c_batch + (first + i) * t.c_row + at, t.ds, w.c + i * t.ds);
        open_row<K>(t.b + n * t.b_batch + (first + i) * t.b_row + at, t.ds, w.b + i * t.ds);
    }
    turn_across(w.b, size, t.ds, w.across, CHUNK);
    among(w.c, w.across, CHUNK, w.asked, size, t.ds);
}

// One head's chunk: y, and S in place.
template <class K>
INLINE void head_chunk(const Tokens &t, int n, int head, int first, int size, float *state, const ChunkWork &w) {
    const long apart = (long)t.groups * t.each, token = ((long)n * t.count + first) * apart + head;
    double sum = 0;
    for (int i = 0; i < size; i++) w.passed[i] = sum += t.g[token + i * apart];
    multiply({w.c, t.ds, 1}, state, t.dh, w.out, t.dh, size, t.dh, t.ds, 0);
    for (int i = 0; i < size; i++) {
        const char *x = t.x + n * t.x_batch + (first + i) * t.x_row + (long)head * t.dh * K::bytes;
        const float decay = expf((float)w.passed[i]), dt = t.dt[token + i * apart], skip = t.skip[head];
        const float left = expf((float)(sum - w.passed[i]));
        float *out = w.out + (long)i * t.dh, *added = w.added + (long)i * t.dh, *late = w.late + (long)i * t.dh;
        for (int d = 0; d < t.dh; d += W) {
            const Floats value = K::read(x, d), brought = value * dt;
            store(out + d, load(out + d) * decay + value * skip);
            store(added + d, brought);
            store(late + d, brought * left);
        }
        weigh(w.asked + i * CHUNK, w.passed, i, 1, w.weights + i * CHUNK);
    }
    multiply({w.weights, CHUNK, 1}, w.added, t.dh, w.out, t.dh, size, t.dh, size, 1, true);
    for (int i = 0; i < size; i++)
        memcpy(t.out + (token + i * apart) * t.dh, w.out + (long)i * t.dh, sizeof(float) * t.dh);
    multiply({w.b, 1, t.ds}, w.late, t.dh, state, t.dh, t.ds, t.dh, size, expf((float)sum));
}

// The chunks of some heads of a group: those of the tokens that S gets, then those that leave rows, on a
// copy of S.
template <class K>
static void chunk_part(const Chunk &k, int n, int group, int part, int parts, const ChunkWork &w) {
    const Tokens &t = k.of;
    const int whole = t.count - k.keep, begin = t.each * part / parts, end = t.each * (part + 1) / parts;
    const long size = (long)t.ds * t.dh, h = ((long)n * t.groups + group) * t.each;
    memcpy(k.after + (h + begin) * size, t.state + (h + begin) * size, sizeof(float) * size * (end - begin));
    for (int first = 0; first < whole; first += CHUNK) {
        const int some = whole - first < CHUNK ? whole - first : CHUNK;
        open_chunk<K>(t, n, group, first, some, w);
        for (int of = begin; of < end; of++)
            head_chunk<K>(t, n, group * t.each + of, first, some, k.after + (h + of) * size, w);
    }
    for (int of = begin; of < end && k.keep; of++) {
        memcpy(w.state, k.after + (h + of) * size, sizeof(float) * size);
        for (int first = whole; first < t.count; first += CHUNK) {
            const int some = t.count - first < CHUNK ? t.count - first : CHUNK;
            open_chunk<K>(t, n, group, first, some, w);
            if (of == 0)
                memcpy(k.keys + (((long)n * t.groups + group) * k.keep + first - whole) * t.ds, w.b,
                       sizeof(float) * some * t.ds);
            head_chunk<K>(t, n, group * t.each + of, first, some, w.state, w);
            memcpy(k.deltas + ((h + of) * k.keep + first - whole) * t.dh, w.added, sizeof(float) * some * t.dh);
        }
    }
}

template <class K>
static int ssd_chunk(const Chunk &k) {
    const int parts = parts_of(k.of), units = k.of.batch * k.of.groups * parts;
    std::atomic<int> failed{0};
    share(k.of.threads, units, 1, [&](int unit) {
        static thread_local Scratch scratch;
        void *at = scratch.get(ChunkWork::bytes(k.of));
        const int row = unit / parts;
        if (at) chunk_part<K>(k, row / k.of.groups, row % k.of.groups, unit % parts, parts, ChunkWork(at, k.of));
        else failed = 2;
    });
    return failed;
}

}  // namespace

// Returns 0, 1 for a kind that this build lacks, or 2 without memory; so does the next.
extern "C" int omnikv_ssd_step(const Step *s, int kind) {
#define STEP(K) ssd_step<K>(*s)
    OF_KIND(kind, STEP);
}

extern "C" int omnikv_ssd_chunk(const Chunk *k, int kind) {
#define CHUNKS(K) ssd_chunk<K>(*k)
    OF_KIND(kind, CHUNKS);
}

extern "C" int omnikv_sizeof_ssd_step() { return sizeof(Step); }
extern "C" int omnikv_sizeof_ssd_chunk() { return sizeof(Chunk); }
