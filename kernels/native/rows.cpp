// Rows of K and V rounded to few bits as kernels/rows/int8.py, rows_int4.py and rows_fp8.py round
// them, to the bit: no product is added in one rounding, and errors are summed as whole numbers.
#include "team.h"
#include "transform.h"
#include "vector.h"

namespace {

constexpr float LEAST = 1.17549435e-38f;  // 2^-126
INLINE float normal(float scale) { return scale < LEAST ? 0 : scale; }
INLINE float inverse_of(float scale) { return scale > 0 ? 1 / scale : 0; }
INLINE Ints size_bits(Floats x) { return (Ints)x & 0x7FFFFFFF; }

// The largest magnitude; NaN where there is one, whose bits are the largest of all.
INLINE float reach_of(const float *x, int count) {
    Ints top = {};
    for (int i = 0; i < count; i += W) {
        const Ints size = size_bits(load(x + i));
        top = size > top ? size : top;
    }
    int32_t most = 0;
    for (int i = 0; i < W; i++) most = top[i] > most ? top[i] : most;
    float found;
    memcpy(&found, &most, 4);
    return found;
}

INLINE void put(uint8_t *out, Ints x) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i *)out, _mm512_cvtepi32_epi8((__m512i)x));
#elif defined(__ARM_NEON)
    const uint16x4_t narrow = vmovn_u32((uint32x4_t)x);
    const uint32_t four = vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(narrow, narrow))), 0);
    memcpy(out, &four, sizeof four);
#else
    for (int i = 0; i < W; i++) out[i] = (uint8_t)x[i];
#endif
}

INLINE void put_tail(uint8_t *out, float scale) {  // and four bytes of zero
    memset(out, 0, 8);
    memcpy(out, &scale, 4);
}

static void pack_int8(const float *x, int dim, uint8_t *out) {
    const float scale = normal(reach_of(x, dim) * (float)(1.0 / 127)), inverse = inverse_of(scale);
    for (int i = 0; i < dim; i += W) {
        const Floats y = apart(load(x + i) * inverse) + 0.5f;
        const Ints cut = __builtin_convertvector(y, Ints);  // towards 0
        put(out + i, cut + (Ints)(__builtin_convertvector(cut, Floats) > y));
    }
    put_tail(out + dim, scale);
}

static void pack_fp8(const float *x, int dim, uint8_t *out) {
    const float scale = normal(reach_of(x, dim) * (float)(1.0 / 448)), inverse = inverse_of(scale);
    for (int i = 0; i < dim; i += W) {
        const Floats y = apart(load(x + i) * inverse);
        const Ints size = size_bits(y);
        // subnormal below 2^-6: a sum whose last bit is 2^-9; else round to even at bit 20
        const Floats shifted = (Floats)size + 16384.f;
        const Ints whole = (size + ((size >> 20 & 1) + 0x7FFFF - (120 << 23))) >> 20;
        Ints bits = size < 121 << 23 ? (Ints)shifted - (141 << 23) : whole;
        bits = size >= 1087 << 20 ? bits * 0 + 0x7F : bits;
        put(out + i, bits | ((Ints)y >> 24 & 0x80));
    }
    put_tail(out + dim, scale);
}

constexpr int LONGEST = 256;

// Numbers nearest to elements, from -low to low - 1: out. Returns the squared error in fixed-point
// steps, 128 to a number, cut off; what is not finite is 0.
INLINE int numbers(const float *x, int dim, float inverse, int low, int32_t *out) {
    Ints sum = {};
    const Ints least = Ints{} - low, most = Ints{} + (low - 1);
    for (int i = 0; i < dim; i += W) {
        const Floats y = apart(load(x + i) * inverse) * 128.f;
        const Ints finite = size_bits(y) < 0x7F800000;
        const Ints steps = __builtin_convertvector((Floats)((Ints)y & finite), Ints);
        Ints number = (steps + 64) >> 7;
        number = number < least ? least : number;
        number = number > most ? most : number;
        memcpy(out + i, &number, sizeof number);
        const Ints off = steps - number * 128;
        sum += off * off;
    }
    int found = 0;
    for (int i = 0; i < W; i++) found += sum[i];
    return found;
}

// Rounds a transformed row: numbers and their scale, whose shares from 16 down to `last` are tried.
// tried: room for two rows. Returns the numbers.
INLINE const int32_t *best_numbers(const float *x, int dim, int low, int last, int32_t (*tried)[LONGEST],
                                   float &scale) {
    const float reach = reach_of(x, dim);
    Floats top = load(x), bottom = load(x);
    for (int i = W; i < dim; i += W) {
        const Floats y = load(x + i);
        top = most(top, y), bottom = -most(-bottom, -y);
    }
    const float sign = largest(top) > largest(-bottom) ? -1 : 1;
    int32_t *best = tried[0], *next = tried[1];
    float cost = 0;
    for (int share = 16; share >= last; share--) {
        const float now = normal(reach * (float)(share / 16.0 / low)) * sign;
        const float inverse = now != 0 && now == now ? 1 / now : 0;
        const float found = (float)numbers(x, dim, inverse, low, next) * (float)(share * share);
        if (share < 16 && !(found < cost)) continue;
        int32_t *const other = best;
        best = next, next = other, cost = found, scale = now;
    }
    return best;
}

static void pack_int4_keys(const float *x, int dim, uint8_t *out) {
    int32_t tried[2][LONGEST];
    float scale = 0;
    const int half = dim / 2, quarter = dim / 4;
    const int32_t *low = best_numbers(x, dim, 32, 16, tried, scale), *high = low + half;
    for (int i = 0; i < quarter; i++) {
        const int fourth = (high[2 * i + 1] + 32) ^ 42;
        out[i] = (uint8_t)((low[2 * i] + 32) | fourth >> 4 << 6);
        out[quarter + i] = (uint8_t)((high[2 * i] + 32) | (fourth >> 2 & 3) << 6);
        out[half + i] = (uint8_t)((low[2 * i + 1] + 32) | (fourth & 3) << 6);
    }
    memcpy(out + half + quarter, &scale, 4);
}

static void pack_int4_values(const float *x, int dim, uint8_t *out) {
    int32_t tried[2][LONGEST];
    float scale = 0;
    const int half = dim / 2;
    const int32_t *number = best_numbers(x, dim, 8, 13, tried, scale);
    for (int i = 0; i < half; i++) out[i] = (uint8_t)((number[i] + 8) | (number[half + i] + 8) << 4);
    memcpy(out + half, &scale, 4);
}

}  // namespace

// kind: INT8, INT4_KEYS, INT4_VALUES or FP8. x float32 [rows][dim], out [rows][width].
extern "C" void omnikv_pack(const float *x, long rows, int dim, int width, int kind, int threads,
                            uint8_t *out) {
    share(rows * dim > 65536 ? threads : 1, rows, 64, [&](long i) {
        const float *const from = x + i * dim;
        uint8_t *const to = out + i * width;
        if (kind == INT8) pack_int8(from, dim, to);
        else if (kind == INT4_KEYS) pack_int4_keys(from, dim, to);
        else if (kind == INT4_VALUES) pack_int4_values(from, dim, to);
        else pack_fp8(from, dim, to);
    });
}

// The transform of kernels/rows/hadamard.py over factor: runs of `run` elements of either half, and the
// halves. x [rows][dim] to out, 1024 elements at most.
extern "C" void omnikv_transform(const float *x, long rows, int dim, int run, double factor, int threads,
                                 float *out) {
    share(rows * dim > 65536 ? threads : 1, rows, 64, [&](long i) {
        double held[2][1024], *a = held[0], *b = held[1];
        for (int d = 0; d < dim; d++) a[d] = x[i * dim + d];
        // a stage takes neighbours to the halves of another row: log2(run) of them are the transform
        for (int size = 1; size < run; size *= 2) {
            for (int first = 0; first < dim; first += run)
                for (int d = 0; d < run / 2; d++) {
                    const double one = a[first + 2 * d], other = a[first + 2 * d + 1];
                    b[first + d] = one + other, b[first + run / 2 + d] = one - other;
                }
            double *const last = a;
            a = b, b = last;
        }
        for (int d = 0; d < dim / 2; d++) {
            const double low = a[d], high = a[dim / 2 + d];
            // a product has no -0
            out[i * dim + d] = (float)((low + high) / factor) + 0.f;
            out[i * dim + dim / 2 + d] = (float)((low - high) / factor) + 0.f;
        }
    });
}
