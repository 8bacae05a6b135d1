// What latent attention has in place of plain queries and keys (engine/model/heads/latent.py), in a decode step: each
// head's query through a matrix of its own, and the row that all heads share, normed. Sums are float32; numbers are
// rounded where torch's operators round them.
#include "norm.h"
#include "scratch.h"
#include "team.h"

namespace {

constexpr int DEPTH = 64;   // products that are summed before they join the others: one long sum errs more
constexpr int AHEAD = 8;    // rows of a matrix between the one that is read and the one that is fetched
constexpr int ROWS = 4;     // of x that a matrix meets at a time

struct Heads {
    const char *x;         // [rows][heads][inputs]
    const char *matrices;  // [heads][inputs][outputs]; lying: [heads][outputs][inputs]
    char *out;             // [rows][heads][outputs]
    long x_row, x_head, out_row, out_head;  // strides in elements
    int rows, heads, inputs, outputs, lying, threads;
};

struct Call {
    const char *q;       // [rows][heads][plain + turned]
    const char *row;     // [rows][turned + rank]: what all heads share
    const char *key;     // [heads][plain][rank]
    const char *norm;    // [rank]
    const float *times;  // [rows], what q is multiplied by first; or NULL
    char *out;           // [rows][heads + 1][turned + rank]: queries, and the row
    long q_row, row_row, times_row;  // strides in elements
    int rows, heads, plain, turned, rank, threads;
    float eps;
};

// T rows x [inputs], `ahead` floats apart, times columns o .. of a matrix [inputs][outputs]: V vectors of each.
template <class K, int T, int V>
INLINE void multiply(const float *x, long ahead, const char *matrix, int inputs, int outputs, int o, Floats (&sums)[T][V]) {
    const long row = (long)outputs * K::bytes;
    const int left = outputs - o;
    matrix += (long)o * K::bytes;
    UNROLL for (int t = 0; t < T; t++)
        UNROLL for (int v = 0; v < V; v++) sums[t][v] = Floats{};
    for (int first = 0; first < inputs; first += DEPTH) {
        const int stop = first + DEPTH < inputs ? first + DEPTH : inputs;
        Floats s[T][V];
        UNROLL for (int t = 0; t < T; t++)
            UNROLL for (int v = 0; v < V; v++) s[t][v] = Floats{};
        for (int i = first; i < stop; i++) {
            const char *at = matrix + i * row;
            if (i + AHEAD < inputs) fetch(at + AHEAD * row, V * W * K::bytes);
            UNROLL for (int v = 0; v < V; v++) {
                const Floats m = read_some<K>(at, v * W, left - v * W);
                UNROLL for (int t = 0; t < T; t++) s[t][v] += m * x[t * ahead + i];
            }
        }
        UNROLL for (int t = 0; t < T; t++)
            UNROLL for (int v = 0; v < V; v++) sums[t][v] += s[t][v];
    }
}

template <class K, int T, int V>
INLINE void columns(const float *x, long ahead, const char *matrix, int inputs, int outputs, int o, char *out, long out_row) {
    Floats sums[T][V];
    multiply<K, T, V>(x, ahead, matrix, inputs, outputs, o, sums);
    for (int t = 0; t < T; t++)
        for (int v = 0; v < V; v++)
            write_some<K>(out + t * out_row * K::bytes, o + v * W, outputs - o - v * W, sums[t][v]);
}

// T rows of one head.
template <class K, int T>
static void head_rows(const float *x, long ahead, const char *matrix, int inputs, int outputs, char *out, long out_row) {
    constexpr int V = T == 1 ? W == 8 ? 4 : 8 : W == 8 ? 2 : 4;
    int o = 0;
    for (; o + V * W <= outputs; o += V * W) columns<K, T, V>(x, ahead, matrix, inputs, outputs, o, out, out_row);
    for (; o < outputs; o += W) columns<K, T, 1>(x, ahead, matrix, inputs, outputs, o, out, out_row);
}

// x [rows][ahead] of one head, as floats with zeros behind them.
template <class K>
static void by_matrix(const float *x, long ahead, int rows, const char *matrix, int inputs, int outputs, char *out, long out_row) {
    int r = 0;
    for (; r + ROWS <= rows; r += ROWS)
        head_rows<K, ROWS>(x + r * ahead, ahead, matrix, inputs, outputs, out + r * out_row * K::bytes, out_row);
    for (; r < rows; r++)
        head_rows<K, 1>(x + r * ahead, ahead, matrix, inputs, outputs, out + r * out_row * K::bytes, out_row);
}

// Products of x [inputs] with N outputs of a matrix that lies.
template <class K, int N>
INLINE void outputs_of(const float *x, const char *matrix, int inputs, Floats *found) {
    const long row = (long)inputs * K::bytes;
    Floats s[N][2] = {};
    int i = 0;
    for (; i + 2 * W <= inputs; i += 2 * W)
        UNROLL for (int n = 0; n < N; n++)
            UNROLL for (int u = 0; u < 2; u++) s[n][u] += K::read(matrix + n * row, i + u * W) * load(x + i + u * W);
    for (; i < inputs; i += W)
        for (int n = 0; n < N; n++) s[n][0] += read_some<K>(matrix + n * row, i, inputs - i) * load(x + i);
    UNROLL for (int n = 0; n < N; n++) found[n] = s[n][0] + s[n][1];
}

// x [rows][ahead] of one head times a matrix that lies, [outputs][inputs].
template <class K>
static void by_lying(const float *x, long ahead, int rows, const char *matrix, int inputs, int outputs, char *out, long out_row) {
    constexpr int N = 4;
    for (int o = 0; o < outputs; o += W) {
        const int count = outputs - o < W ? outputs - o : W;
        const char *const at = matrix + (long)o * inputs * K::bytes;
        for (int r = 0; r < rows; r++) {
            Floats found[W] = {};
            int n = 0;
            for (; n + N <= count; n += N) outputs_of<K, N>(x + r * ahead, at + (long)n * inputs * K::bytes, inputs, found + n);
            for (; n < count; n++) outputs_of<K, 1>(x + r * ahead, at + (long)n * inputs * K::bytes, inputs, found + n);
            write_some<K>(out + r * out_row * K::bytes, o, count, totals(found));
        }
    }
}

inline long whole(int count) { return (count + W - 1) / W * W; }

// Returns 0, or 2 without memory.
template <class K>
static int by_head(const Heads &c) {
    const long ahead = whole(c.inputs), size = (long)c.inputs * c.outputs * K::bytes;
    std::atomic<int> lacking{0};
    share(c.threads, c.heads, size < PIECE ? PIECE / (size + 1) + 1 : 1, [&](int head) {
        static thread_local Scratch scratch;
        float *const x = (float *)scratch.get(4 * ahead * c.rows + 64);
        if (!x) { lacking = 1; return; }
        for (int r = 0; r < c.rows; r++)
            for (int i = 0; i < c.inputs; i += W)
                store(x + r * ahead + i, read_some<K>(c.x, r * c.x_row + head * c.x_head + i, c.inputs - i));
        (c.lying ? by_lying<K> : by_matrix<K>)(x, ahead, c.rows, c.matrices + head * size, c.inputs, c.outputs,
                                               c.out + head * c.out_head * K::bytes, c.out_row);
    });
    return lacking ? 2 : 0;
}

// Queries and the row as rotation and attention take them, the part that rotates first.
template <class K>
static int latent(const Call &c) {
    const long ahead = whole(c.plain), size = (long)c.plain * c.rank * K::bytes;
    const long width = c.turned + c.rank, out_row = (c.heads + 1) * width;
    for (int r = 0; r < c.rows; r++) {
        const char *const row = c.row + r * c.row_row * K::bytes, *const rest = row + (long)c.turned * K::bytes;
        char *const to = c.out + (r * out_row + c.heads * width) * K::bytes;
        memcpy(to, row, (long)c.turned * K::bytes);
        const float scale = norm_scale<K>(rest, c.rank, c.eps);
        for (int i = 0; i < c.rank; i += W)
            write_some<K>(to, c.turned + i, c.rank - i, normed<K>(rest, c.norm, i, c.rank - i, scale, Wide{0, 0}));
    }
    std::atomic<int> lacking{0};
    share(c.threads, c.heads, size < PIECE ? PIECE / (size + 1) + 1 : 1, [&](int head) {
        static thread_local Scratch scratch;
        float *const x = (float *)scratch.get(4 * ahead * c.rows + 64);
        if (!x) { lacking = 1; return; }
        char *const out = c.out + head * width * K::bytes;
        for (int r = 0; r < c.rows; r++) {
            const long from = r * c.q_row + (long)head * (c.plain + c.turned);
            const float times = c.times ? c.times[r * c.times_row] : 1;
            for (int i = 0; i < c.plain; i += W) {
                const Floats q = read_some<K>(c.q, from + i, c.plain - i);
                store(x + r * ahead + i, c.times ? Kept<K>::rounded(q * times) : q);
            }
            for (int i = 0; i < c.turned; i += W) {
                const Floats q = read_some<K>(c.q, from + c.plain + i, c.turned - i);
                write_some<K>(out, r * out_row + i, c.turned - i, c.times ? q * times : q);
            }
        }
        by_matrix<K>(x, ahead, c.rows, c.key + head * size, c.plain, c.rank, out + (long)c.turned * K::bytes, out_row);
    });
    return lacking ? 2 : 0;
}

}  // namespace

// Both return 0, 1 for a kind that this build lacks, or 2 without memory.
extern "C" int omnikv_by_head(const Heads *c, int kind) {
#define BY_HEAD(K) by_head<K>(*c)
    OF_KIND(kind, BY_HEAD);
}

extern "C" int omnikv_latent_heads(const Call *c, int kind) {
#define LATENT(K) latent<K>(*c)
    OF_KIND(kind, LATENT);
}

extern "C" int omnikv_sizeof_heads_call() { return sizeof(Heads); }
extern "C" int omnikv_sizeof_latent_call() { return sizeof(Call); }
