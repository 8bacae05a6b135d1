// The causal convolution of a recurrent layer: each channel over its newest inputs, then silu
// (kernels/recurrent/conv.py). A step finds the inputs before its tokens in a ring, which gets its own; a
// prompt's chunk finds them one after the other.
#include "kinds.h"
#include "rounding.h"
#include "team.h"

namespace {

struct Conv {
    const char *x, *weight;  // [batch, count, channels], rows `x_row` bytes apart; [channels, taps]
    const char *bias;        // [channels]; NULL: there is none
    char *inputs, *out;      // [batch, size, channels]; [batch, count, channels]
    const int64_t *positions;  // [batch, count]; NULL: `inputs` holds the taps - 1 inputs before x
    long x_batch, x_row;
    int batch, count, channels, taps, size, threads;
};

constexpr int MOST = 8;  // taps
#if defined(__AVX512F__)
constexpr int BLOCK = 512;  // channels whose weights lie in the first cache, as floats: 8 KB of 4 taps
#else
constexpr int BLOCK = 256;
#endif

// The weights of some channels: a row of BLOCK floats for each tap.
template <class K>
INLINE void open_weights(const Conv &c, int first, int some, float *weights) {
    float one[W * MOST];
    for (int channel = 0; channel < some; channel += W) {
        const int size = (some - channel < W ? some - channel : W) * c.taps;
        const long at = (long)(first + channel) * c.taps;
        for (int i = 0; i < W * c.taps; i += W)
            store(one + i, i < size ? read_some<K>(c.weight, at + i, size - i) : Floats{});
        for (int tap = 0; tap < c.taps; tap++)
            for (int lane = 0; lane < W; lane++) weights[tap * BLOCK + channel + lane] = one[lane * c.taps + tap];
    }
}

// Where the input lies that stands i tokens after the call's first; NULL: before position 0.
template <class K>
INLINE const char *input(const Conv &c, int b, int i) {
    if (i >= 0) return c.x + b * c.x_batch + i * c.x_row;
    const long row = (long)c.channels * K::bytes, start = c.positions ? c.positions[(long)b * c.count] : c.size;
    return start + i < 0 ? nullptr : c.inputs + (b * (long)c.size + (start + i) % c.size) * row;
}

// One token's output of `some` channels. TAPS: how many of the taps have an input, the last ones.
template <class K, int TAPS>
INLINE void convolve(const char *const *rows, const float *weights, const char *bias, int first, int some, char *out) {
    for (int channel = 0; channel < some; channel += W) {
        const int at = first + channel, left = some - channel;
        Floats sum = bias ? read_some<K>(bias, at, left) : Floats{};
        UNROLL for (int tap = 0; tap < TAPS; tap++)
            sum += read_some<K>(rows[tap], at, left) * load(weights + tap * BLOCK + channel);
        write_some<K>(out, at, left, silu(Kept<K>::rounded(sum)));
    }
}

template <class K>
static void convolve_block(const Conv &c, int b, int first, int some) {
    float weights[MOST * BLOCK];
    open_weights<K>(c, first, some, weights);
    for (int i = 0; i < c.count; i++) {
        const char *rows[MOST];
        int lost = 0;
        for (int tap = 0; tap < c.taps; tap++) {
            rows[tap] = input<K>(c, b, i - (c.taps - 1 - tap));
            lost += !rows[tap];
        }
        char *out = c.out + (b * (long)c.count + i) * c.channels * K::bytes;
        const char *const *from = rows + lost;
        const float *of = weights + lost * BLOCK;
        switch (c.taps - lost) {
#define TAPS(n) case n: convolve<K, n>(from, of, c.bias, first, some, out); break
            TAPS(1); TAPS(2); TAPS(3); TAPS(4); TAPS(5); TAPS(6); TAPS(7); TAPS(8);
        }
    }
}

template <class K>
static int convolve_all(const Conv &c) {
    const int blocks = (c.channels + BLOCK - 1) / BLOCK;
    const bool many = c.threads > 1 && (long)c.count * c.channels > 65536;
    share(many ? c.threads : 1, (long)c.batch * blocks, 1, [&](int unit) {
        const int first = unit % blocks * BLOCK, left = c.channels - first;
        convolve_block<K>(c, unit / blocks, first, left < BLOCK ? left : BLOCK);
    });
    const long row = (long)c.channels * K::bytes;
    for (int token = 0; token < c.batch * c.count && c.positions; token++) {
        const int b = token / c.count, i = token % c.count;
        char *to = c.inputs + (b * (long)c.size + c.positions[token] % c.size) * row;
        memcpy(to, c.x + b * c.x_batch + i * c.x_row, row);
    }
    return 0;
}

}  // namespace

// Returns 0, or 1 for a kind that this build lacks.
extern "C" int omnikv_conv(const Conv *c, int kind) {
#define CONV(K) convolve_all<K>(*c)
    OF_KIND(kind, CONV);
}

extern "C" int omnikv_sizeof_conv_call() { return sizeof(Conv); }
