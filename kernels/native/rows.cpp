// Rows of K and V rounded to few bits as kernels/rows/int8.py, rows_int4.py and rows_fp8.py round
// them, to the bit: no product is added in one rounding, and errors are summed as whole numbers.
#include "vector.h"

namespace {

// -ffp-contract=fast would make one rounding of this and a sum
INLINE Floats rounded(Floats x) {
    asm("" : "+v"(x));
    return x;
}
INLINE float rounded(float x) {
    asm("" : "+x"(x));
    return x;
}

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
        const Floats y = rounded(load(x + i) * inverse) + 0.5f;
        const Ints cut = __builtin_convertvector(y, Ints);  // towards 0
        put(out + i, cut + (Ints)(__builtin_convertvector(cut, Floats) > y));
    }
    put_tail(out + dim, scale);
}

static void pack_fp8(const float *x, int dim, uint8_t *out) {
    const float scale = normal(reach_of(x, dim) * (float)(1.0 / 448)), inverse = inverse_of(scale);
    for (int i = 0; i < dim; i += W) {
        const Floats y = rounded(load(x + i) * inverse);
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

// Fixed-point steps of |x| in units of a scale, 128 to one, cut off; 0 for what is not finite.
INLINE Ints steps_of(Floats x, float inverse) {
    const Floats y = rounded((Floats)size_bits(x) * inverse) * 128.f;
    return __builtin_convertvector(y == y ? y : Floats{}, Ints);
}

// Levels of elements, the numbers 2 level + 1 nearest to them: out. Returns the squared error in steps.
INLINE int levels(const float *x, int count, float inverse, int most, int32_t *out) {
    Ints sum = {};
    for (int i = 0; i < count; i += W) {
        const Ints steps = steps_of(load(x + i), inverse);
        Ints level = steps >> 8;
        level = level > most ? level * 0 + most : level;
        memcpy(out + i, &level, sizeof level);
        const Ints off = steps - (level * 256 + 128);
        sum += off * off;
    }
    int found = 0;
    for (int i = 0; i < W; i++) found += sum[i];
    return found;
}

constexpr int LONGEST = 256;

// nibbles [dim/2] of codes [dim]: element i low, element i + dim/2 high
INLINE void put_nibbles(const int32_t *code, int dim, uint8_t *out) {
    for (int i = 0; i < dim / 2; i++) out[i] = (uint8_t)((code[i] & 15) | (code[dim / 2 + i] & 15) << 4);
}

static void pack_int4_keys(const float *x, int dim, uint8_t *out) {
    const float reach = reach_of(x, dim);
    int32_t tried[2][LONGEST], *best = tried[0], *next = tried[1];
    float scale = 0, cost = 0;
    for (int share = 16; share > 12; share--) {
        const float now = normal(reach * (float)(share / 16.0 / 31));
        const float found = (float)levels(x, dim, inverse_of(now), 15, next) * (float)(share * share);
        if (share < 16 && !(found < cost)) continue;
        int32_t *const other = best;
        best = next, next = other, cost = found, scale = now;
    }
    for (int i = 0; i < dim; i++) best[i] = x[i] < 0 ? 15 - best[i] : best[i] + 16;
    put_nibbles(best, dim, out);
    const int run = dim / 8;
    for (int i = 0; i < run; i++) {
        int bits = 0;
        for (int j = 0; j < 8; j++) bits |= (best[j * run + i] >> 4) << j;
        out[dim / 2 + i] = (uint8_t)bits;
    }
    memcpy(out + dim / 2 + run, &scale, 4);
}

// x >= 0 as bfloat16, halves up
INLINE float bfloat16_up(float x) {
    if (!(x < INFINITY)) return x;
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits = (bits + 0x8000) & 0xFFFF0000;
    float found;
    memcpy(&found, &bits, 4);
    return x < LEAST ? 0 : found;
}

static void pack_int4_values(const float *x, int dim, uint8_t *out, int width) {
    constexpr int GROUP = 32;
    const int groups = dim / GROUP;
    const float scale = bfloat16_up(reach_of(x, dim) * (float)(1.0 / 120)), inverse = inverse_of(scale);
    int32_t code[LONGEST];
    memset(out + dim / 2, 0, width - dim / 2);
    for (int g = 0; g < groups; g++) {
        const float *of = x + g * GROUP;
        int32_t tried[2][GROUP], *best = tried[0], *next = tried[1];
        const float most = rounded(reach_of(of, GROUP) * inverse) * 128.f;
        const int reach = most == most ? (int)most : 0;
        int first = (reach + 1919) / 1920, factor = 1;
        first = first < 1 ? 1 : first > 8 ? 8 : first;
        float cost = 0;
        for (int less = 0; less < 3; less++) {
            const int now = first - less < 1 ? 1 : first - less;
            const float found = (float)levels(of, GROUP, inverse / (float)now, 7, next) * (float)(now * now);
            if (less && !(found < cost)) continue;
            int32_t *const other = best;
            best = next, next = other, cost = found, factor = now;
        }
        for (int i = 0; i < GROUP; i++) code[g * GROUP + i] = of[i] < 0 ? 7 - best[i] : best[i] + 8;
        out[dim / 2 + g / 2] |= (factor - 1) << g % 2 * 4;
    }
    put_nibbles(code, dim, out);
    memcpy(out + width - 2, (const char *)&scale + 2, 2);
}

}  // namespace

// kind: INT8, INT4_KEYS, INT4_VALUES or FP8. x float32 [rows][dim], out [rows][width].
extern "C" void omnikv_pack(const float *x, long rows, int dim, int width, int kind, int threads,
                            uint8_t *out) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows * dim > 65536)
    for (long i = 0; i < rows; i++) {
        const float *const from = x + i * dim;
        uint8_t *const to = out + i * width;
        if (kind == INT8) pack_int8(from, dim, to);
        else if (kind == INT4_KEYS) pack_int4_keys(from, dim, to);
        else if (kind == INT4_VALUES) pack_int4_values(from, dim, to, width);
        else pack_fp8(from, dim, to);
    }
}

// The transform of kernels/rows/hadamard.py over factor: runs of `run` elements of either half, and the
// halves. x [rows][dim] to out, 1024 elements at most.
extern "C" void omnikv_transform(const float *x, long rows, int dim, int run, double factor, int threads,
                                 float *out) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows * dim > 65536)
    for (long i = 0; i < rows; i++) {
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
    }
}
