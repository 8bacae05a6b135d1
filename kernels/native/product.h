// Products of 1 to 8 rows with a weight of floats, a block of outputs at a time: with the norm before it and
// what follows it (bias, SwiGLU, residual). Each weight is read once, as it is stored; sums are float32.
#pragma once
#include "matrix.h"
#include "norm.h"
#include "team.h"

namespace {

constexpr int MOST = 8;         // rows that a block of outputs is multiplied by at a time
constexpr int AHEAD = 4096;     // bytes between the weights that are read and those that are fetched
// Weights are fetched into the second cache: the first has too few buffers for lines on their way from memory.
// In vectors of 16 two to four rows read slower than one, which leaves the first its room; more fetch far ahead
// into the second and from there into the first, for their own arithmetic waits otherwise.
constexpr int FIRST = 3, SECOND = 2;
template <int T> constexpr int LEVEL = W == 16 && (T == 2 || T == 4) ? FIRST : SECOND;
template <int T> constexpr bool TWICE = W == 16 && T > 4;
constexpr int FAR = 8192, CLOSE = 1024;
constexpr int NEAR = (W == 16 ? 32 : 16) << 10;  // bytes of x that stay in the first cache while W outputs pass
constexpr long LITTLE = 1 << 18;  // bytes of a weight that another thread is not woken for

// How a weight's dtype is multiplied: `width` elements at a time, x as floats or as they are.
template <class K>
struct Each {
    typedef K Kind;
    typedef float Element;
    typedef Floats Part;
    static constexpr int width = W;
    INLINE Part read(const char *w) { return K::read(w, 0); }
    INLINE Part x(const float *x) { return load(x); }
    INLINE Floats add(Floats sum, Part w, Part x) { return sum + w * x; }
    INLINE void keep(float *to, Floats x) { store(to, x); }
};

#if defined(HAS_PAIRS)
struct Pairs {
    typedef BFloat16 Kind;
    typedef uint16_t Element;
    typedef Floats Part;
    static constexpr int width = 2 * W;
    INLINE Part read(const char *w) { return load((const float *)w); }
    INLINE Part x(const uint16_t *x) { return load((const float *)x); }
    INLINE Floats add(Floats sum, Part w, Part x) { return add_pairs(sum, w, x); }
    INLINE void keep(uint16_t *to, Floats x) { Kept<BFloat16>::write(to, x); }
};
#endif

struct ProductCall {
    const Matrix *matrix;
    const char *x, *norm;  // [rows, inputs]; [inputs] or NULL: what x is normed and scaled by
    const char *residual;  // [rows, outputs] or NULL
    char *out;             // [rows, outputs or half of them]
    float eps;
    int rows, gated, wide, threads;  // wide: out is float32
    Wide norms;
};

// x as products read it, rows `ahead` elements apart, normed where asked for; 0 behind `inputs` and in
// rows up to a multiple of MOST: 3 rows are multiplied as 4, and 5 to 7 as 8.
template <class P>
static void prepare(const ProductCall &c, typename P::Element *to, int ahead) {
    typedef typename P::Kind K;
    const int inputs = c.matrix->inputs;
    for (int r = 0; r < c.rows; r++, to += ahead) {
        const char *row = c.x + (long)r * inputs * K::bytes;
        const float scale = c.norm ? norm_scale<K>(row, inputs, c.eps) : 1;
        int i = 0;
        for (; i < inputs; i += W)
            P::keep(to + i, c.norm ? normed<K>(row, c.norm, i, inputs - i, scale, c.norms)
                                   : read_some<K>(row, i, inputs - i));
        for (; i < ahead; i += W) P::keep(to + i, Floats{});
    }
    if (c.rows > 2) memset(to, 0, sizeof(*to) * ahead * (-c.rows & (MOST - 1)));
}

// Adds columns from .. to-1 of R adjacent weights, times T rows of x, to sums [T][W][2]. U: sums that
// each of them is split in, for one alone would wait for itself.
template <class P, int R, int T, int U>
INLINE void add_columns(const char *w, long bytes, const typename P::Element *x, int ahead, int from, int to,
                        long fetch, Floats *sums) {
    typedef typename P::Kind K;
    constexpr int step = P::width;
    Floats s[R][T][U];
    for (int r = 0; r < R; r++)
        for (int t = 0; t < T; t++)
            for (int u = 0; u < U; u++) s[r][t][u] = from ? sums[(t * W + r) * 2 + u] : Floats{};
    int i = from;
    for (; i + U * step <= to; i += U * step)
        for (int u = 0; u < U; u++) {
            typename P::Part part[R];
            for (int r = 0; r < R; r++) {
                const char *at = w + r * bytes + (long)(i + u * step) * K::bytes;
                if (u * step * K::bytes % 64 == 0) {
                    __builtin_prefetch(at + (TWICE<T> && fetch == AHEAD ? FAR : fetch), 0, LEVEL<T>);
                    if (TWICE<T>) __builtin_prefetch(at + CLOSE, 0, FIRST);
                }
                part[r] = P::read(at);
            }
            for (int t = 0; t < T; t++) {
                const typename P::Part row = P::x(x + (long)t * ahead + i + u * step);
                for (int r = 0; r < R; r++) s[r][t][u] = P::add(s[r][t][u], part[r], row);
            }
        }
    for (; i < to; i += step) {  // less than U steps, or less than one
        const int left = to - i < step ? to - i : step;
        for (int r = 0; r < R; r++) {
            char some[step * K::bytes] = {};
            memcpy(some, w + r * bytes + (long)i * K::bytes, left * K::bytes);
            const typename P::Part part = P::read(some);
            for (int t = 0; t < T; t++) s[r][t][0] = P::add(s[r][t][0], part, P::x(x + (long)t * ahead + i));
        }
    }
    for (int r = 0; r < R; r++)
        for (int t = 0; t < T; t++)
            for (int u = 0; u < U; u++) sums[(t * W + r) * 2 + u] = s[r][t][u];
}

// Adds columns of `count` <= W weights to the sums of T rows.
template <class P, int T>
INLINE void add_block(const char *w, long bytes, int count, const typename P::Element *x, int ahead, int from,
                      int to, Floats *sums) {
    // Vectors of four take as many sums more: a sum waits for itself, and 32 registers have room. Those of 16
    // take one weight at a time: it comes as fast as its memory gives it, and a row has the bits it has alone.
    constexpr int R = W == 16 ? 1 : W == 4 ? 4 : T > 2 ? 2 : 1, U = W < 16 && T > 2 ? 1 : 2;
    const bool whole = (to - from) * (long)P::Kind::bytes == bytes;
    const long fetch = whole && AHEAD >= R * bytes ? AHEAD : R * bytes;
    int o = 0;
    for (; o + R <= count; o += R)
        add_columns<P, R, T, U>(w + o * bytes, bytes, x, ahead, from, to, fetch, sums + 2 * o);
    for (; o < count; o++)
        add_columns<P, 1, T, U>(w + o * bytes, bytes, x, ahead, from, to, AHEAD, sums + 2 * o);
}

// Products of all rows with `count` <= W weights from `first` on: found [rows].
template <class P>
__attribute__((noinline)) static void multiply(const ProductCall &c, const typename P::Element *x, int ahead,
                                               int first, int count, Floats *found) {
    constexpr int most = W == 16 ? 8 : 4;  // rows that registers hold sums of
    const Matrix &m = *c.matrix;
    const long bytes = (long)m.inputs * P::Kind::bytes;
    const char *w = (const char *)m.weight + first * bytes;
    Floats sums[MOST][W][2];
    const int held = NEAR / c.rows / sizeof(*x) / (2 * P::width) * (2 * P::width);
    const int chunk = c.rows > 2 ? held : m.inputs;
    for (int from = 0; from < m.inputs; from += chunk) {
        const int to = from + chunk < m.inputs ? from + chunk : m.inputs;
        for (int t = 0; t < c.rows; t += most) {
            const int rows = c.rows - t < most ? c.rows - t : most;
            const typename P::Element *some = x + (long)t * ahead;
#define ROWS(T) add_block<P, T>(w, bytes, count, some, ahead, from, to, sums[t][0])
            if (rows == 1) ROWS(1);
            else if (rows == 2) ROWS(2);
            else if (rows <= 4) ROWS(4);
            else if (most == 8) ROWS(most);
        }
    }
    for (int t = 0; t < c.rows; t++) {
        Floats whole[W] = {};
        const bool split = W == 16 || c.rows - t / most * most <= 2;
        for (int o = 0; o < count; o++) whole[o] = split ? sums[t][o][0] + sums[t][o][1] : sums[t][o][0];
        found[t] = totals(whole);
    }
    if (m.bias) {
        const Floats bias = read_some<typename P::Kind>(m.bias, first, count);
        for (int t = 0; t < c.rows; t++) found[t] += bias;
    }
    for (int t = 0; t < c.rows; t++) found[t] = Kept<typename P::Kind>::rounded(found[t]);
}

// Outputs first .. first+count-1 of every row, with what follows a product.
template <class P>
static void finish(const ProductCall &c, const typename P::Element *x, int ahead, int first, int count) {
    typedef typename P::Kind K;
    const int outputs = c.gated ? c.matrix->outputs / 2 : c.matrix->outputs;
    Floats y[MOST], up[MOST];
    multiply<P>(c, x, ahead, first, count, y);
    if (c.gated) {
        multiply<P>(c, x, ahead, outputs + first, count, up);
        for (int t = 0; t < c.rows; t++) {
            const Floats opened = silu(y[t]);
            y[t] = Kept<K>::rounded(Kept<K>::rounded(opened) * up[t]);
        }
    }
    for (int t = 0; t < c.rows; t++) {
        const long at = (long)t * outputs + first;
        if (c.residual) y[t] = Kept<K>::rounded(read_some<K>(c.residual, at, count) + y[t]);
        if (c.wide) write_some<Float32>(c.out, at, count, y[t]);
        else write_some<K>(c.out, at, count, y[t]);
    }
}

}  // namespace
