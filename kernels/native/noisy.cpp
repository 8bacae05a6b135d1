// What a query weighs rows by, whose logits get Gumbel noise and a temperature before their softmax: the
// score of Keyformer. The noise is drawn from counters: kernels/kept/noisy.py says how.
#include "team.h"
#include "vector.h"

namespace {

constexpr int HALF = W / 2;  // numbers of 64 bits in a vector
typedef double Doubles __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint64_t Longs __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int64_t Signed __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t HalfInts __attribute__((vector_size(2 * W), aligned(4), may_alias));
typedef float HalfFloats __attribute__((vector_size(2 * W), aligned(4), may_alias));

struct Noisy {  // strides in elements
    float *logits;             // [heads][group][rows]: become weights
    const int32_t *positions;  // [heads][..]
    long position_head;
    const float *sinks;  // [heads * group], the model's own; or NULL
    uint64_t drawn;      // of seed, layer and query
    int heads, group, rows, noise, threads;
    float tau;
};

// The finalizer of MurmurHash3: a bijection.
template <class X>
INLINE X mix(X x) {
    x = (x ^ (x >> 33)) * 0xff51afd7ed558ccd;
    x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53;
    return x ^ (x >> 33);
}

// 24 random bits of the query whose number is `start` and each of HALF rows.
INLINE Longs bits_of(uint64_t start, const int32_t *positions) {
    const Longs at = (Longs)__builtin_convertvector(*(const HalfInts *)positions, Signed);
    return mix(at * 0x9E3779B1 ^ start) >> 20 & 0xFFFFFF;
}

// Numbers below 2^51 as doubles, by their bits: vectors of 64 bits have no conversion everywhere.
INLINE Doubles widened(Longs x) { return (Doubles)(x + 0x4338000000000000) - 6755399441055744.; }

// The logarithm to 1e-12 of its size: 2^e m with m around 1, and the series of artanh (m - 1) / (m + 1).
INLINE Doubles logarithm(Doubles x) {
    const Longs e = (Longs)((Signed)((Longs)x - 0x3FE6A09E667F3BCD) >> 52);  // from the root of 1/2 on
    const Doubles m = (Doubles)((Longs)x - (e << 52)), s = (m - 1) / (m + 1), z = s * s;
    Doubles sum = z * (1. / 13) + 1. / 11;
    sum = sum * z + 1. / 9;
    sum = sum * z + 1. / 7;
    sum = sum * z + 1. / 5;
    sum = sum * z + 1. / 3;
    return widened(e) * 0.69314718055994531 + 2 * (s + s * z * sum);
}

// -log(-log(u)) of u in the middle of 2^24 equal parts of 0 .. 1.
INLINE HalfFloats gumbel(Longs bits) {
    const Doubles u = (widened(bits) + 0.5) * 0x1p-24;
    return __builtin_convertvector(-logarithm(-logarithm(u)), HalfFloats);
}

INLINE uint64_t start_of(const Noisy &c, int r) { return mix(c.drawn + (uint64_t)r * 0x5BD1E995); }

// Positions from t on, zeros behind the last: `some` is room for W.
INLINE const int32_t *positions_of(const Noisy &c, int r, int t, int32_t *some) {
    const int32_t *at = c.positions + r / c.group * c.position_head + t;
    if (t + W <= c.rows) return at;
    memset(some, 0, sizeof(int32_t) * W);
    memcpy(some, at, sizeof(int32_t) * (c.rows - t));
    return some;
}

INLINE Floats noise_of(const Noisy &c, int r, uint64_t start, int t) {
    int32_t some[W];
    float drawn[W];
    const int32_t *at = positions_of(c, r, t, some);
    *(HalfFloats *)drawn = gumbel(bits_of(start, at));
    *(HalfFloats *)(drawn + HALF) = gumbel(bits_of(start, at + HALF));
    return load(drawn);
}

// The weights of one query head. What is behind the last of its logits counts nothing.
void weigh_noisy(const Noisy &c, int r) {
    float *const x = c.logits + (long)r * c.rows;
    const uint64_t start = start_of(c, r);
    const float sink = c.sinks ? c.sinks[r] / c.tau : -INFINITY;
    const int whole = c.rows / W * W, rest = c.rows - whole;
    float last[W];
    for (int i = 0; i < W; i++) last[i] = i < rest ? x[whole + i] : -INFINITY;
    Floats tops = all(sink), sums = {};
    for (int t = 0; t < c.rows; t += W) {
        float *const at = t < whole ? x + t : last;
        Floats logits = load(at);
        if (c.noise) logits += noise_of(c, r, start, t);
        logits /= c.tau;
        store(at, logits);
        tops = most(tops, logits);
    }
    const float top = largest(tops);
    for (int t = 0; t < c.rows; t += W) {
        float *const at = t < whole ? x + t : last;
        const Floats weights = exponential(load(at) - top);
        store(at, weights);
        sums += weights;
    }
    const float sum = total(sums) + (c.sinks ? expf(sink - top) : 0);
    for (int t = 0; t < whole; t += W) store(x + t, load(x + t) / sum);
    for (int i = 0; i < rest; i++) x[whole + i] = last[i] / sum;
}

}  // namespace

extern "C" void omnikv_weigh_noisy(const Noisy *c) {
    const int queries = c->heads * c->group;
    share(c->threads, queries, 1, [&](int r) { weigh_noisy(*c, r); });
}

// The random bits [heads][group][rows] of the noise, for a comparison with torch's.
extern "C" void omnikv_noise_bits(const Noisy *c, int32_t *bits) {
    for (int r = 0; r < c->heads * c->group; r++)
        for (int t = 0; t < c->rows; t += W) {
            int32_t some[W];
            const int32_t *at = positions_of(*c, r, t, some);
            for (int i = 0; i < W && t + i < c->rows; i++) {
                const Longs drawn = bits_of(start_of(*c, r), at + i / HALF * HALF);
                bits[(long)r * c->rows + t + i] = (int32_t)drawn[i % HALF];
            }
        }
}

extern "C" int omnikv_sizeof_noisy() { return sizeof(Noisy); }
