// What a product with weights of few bits is made of, and what follows it.
#pragma once
#include "panels.h"
#include "vector.h"

namespace {

constexpr int VECTORS = LANES / W;
constexpr int AHEAD = 8192;  // bytes between the word that is read and the one that is fetched
constexpr int SCALES_AHEAD = 1024;

// many rows: blocks of tiles of MR rows meet strips of NR outputs
constexpr int MR = 6, NV = W == 8 ? 2 : 4, NR = NV * W;  // a tile of sums in registers
constexpr int BLOCK_TILES = 160;                          // whose sums for NR outputs stay in L2

// kinds: of floats
INLINE Floats read_as(int kind, const void *from, long i) {
    if (kind == FLOAT32) return Float32::read((const char *)from + 4 * i, 0);
    if (kind == BFLOAT16) return BFloat16::read((const char *)from + 2 * i, 0);
#if defined(HAS_FLOAT16)
    return Float16::read((const char *)from + 2 * i, 0);
#else
    return Floats{};
#endif
}

INLINE float one_as(int kind, const void *from, long i) {
    if (kind == FLOAT32) return ((const float *)from)[i];
    alignas(64) uint16_t held[W] = {((const uint16_t *)from)[i]};
    return read_as(kind, held, 0)[0];
}

// Nearest bfloat16, ties to even, in the upper halves; NaN stays one.
INLINE Ints upper_halves(Floats x) {
    const Ints bits = (Ints)x, even = (bits >> 16) & 1;
    return x == x ? (bits + 0x7fff + even) & (int)0xffff0000 : bits | 0x400000;
}

INLINE void write_as(int kind, void *to, long i, Floats x) {
    if (kind == FLOAT32) store((float *)to + i, x);
    else if (kind == BFLOAT16) {
        Halves *at = (Halves *)((uint16_t *)to + i);
        *at = __builtin_convertvector(upper_halves(x) >> 16, Halves);
    }
#if defined(__AVX512F__)
    else _mm256_storeu_si256((__m256i *)((uint16_t *)to + i), _mm512_cvtps_ph((__m512)x, 0));
#elif defined(__ARM_NEON)
    else *(Halves *)((uint16_t *)to + i) = (Halves)vcvt_f16_f32((float32x4_t)x);
#elif defined(__F16C__)
    else _mm_storeu_si128((__m128i *)((uint16_t *)to + i), _mm256_cvtps_ph((__m256)x, 0));
#endif
}

INLINE Floats rounded(int kind, Floats x) {
    if (kind == FLOAT32) return x;
    alignas(64) float held[W];
    write_as(kind, held, 0, x);
    return read_as(kind, held, 0);
}

// Part J of words as floats, to be multiplied by UNIT. Its bits become the upper ones, which holds
// for the sign too and saves the shift back; a table of 16 numbers looks at no other bits.
template <int BITS, int J>
INLINE Floats part(Ints words) {
#if defined(__AVX512F__)
    if constexpr (BITS == 4) {
        const Floats table = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
        return (Floats)_mm512_permutexvar_ps((__m512i)(words >> 4 * J), (__m512)table);
    }
#endif
    constexpr int SHIFT = 32 - BITS * (J + 1), UPPER = (int)(0xffffffffu << (32 - BITS));
    const Ints moved = SHIFT ? words << SHIFT : words;
    return __builtin_convertvector(J ? moved & UPPER : moved, Floats);
}

template <int BITS>
constexpr float UNIT = BITS == 4 && W == 16 ? 1.f : 1.f / (float)(1u << (32 - BITS));

INLINE Floats some_as(int kind, const void *from, long i, int count) {
    if (count >= W) return read_as(kind, from, i);
    Floats found = {};
    for (int n = 0; n < count; n++) found[n] = one_as(kind, from, i + n);
    return found;
}

// `count` outputs of a row from its float32 sums and, where SwiGLU takes them, those of the second
// half; rounded to the dtype of x where torch's operators round
[[maybe_unused]] static void finish(const Product &p, int row, const float *sums, const float *other, int first, int count) {
    const int outputs = p.gated ? p.outputs / 2 : p.outputs;
    const long at = (long)row * outputs + first;
    const bool more = p.gated || p.residual;
    const bool brief = p.residual && !p.gated && !p.bias && p.kind == BFLOAT16 && p.out_kind == BFLOAT16;
#if defined(__AVX512BF16__)
    const bool plain = !more && !p.bias && p.rows > MR && p.kind == BFLOAT16 && p.out_kind == BFLOAT16;
#endif
    for (int o = 0; o < count; o += W) {
        const int here = count - o < W ? count - o : W;
#if defined(__AVX512BF16__)
        if (plain && here == W) {
            const __m256bh narrow = _mm512_cvtneps_pbh((__m512)load(sums + o));
            memcpy((uint16_t *)p.out + at + o, &narrow, sizeof narrow);
            continue;
        }
#endif
        if (brief && here == W) {  // what follows does the same through memory
            const Floats narrow = (Floats)upper_halves(load(sums + o));
            const Ints found = upper_halves(narrow + BFloat16::read((const char *)p.residual, at + o));
            *(Halves *)((uint16_t *)p.out + at + o) = __builtin_convertvector(found >> 16, Halves);
            continue;
        }
        Floats y = some_as(0, sums, o, here);
        if (p.bias) y += some_as(p.bias_kind, p.bias, first + o, here);
        if (more || p.out_kind != p.kind) y = rounded(p.kind, y);  // else it is rounded once, as it is written
        if (p.gated) {
            Floats up = some_as(0, other, o, here);
            if (p.bias) up += some_as(p.bias_kind, p.bias, outputs + first + o, here);
            const Floats small = exponential(y < 0 ? y : -y);  // never overflows
            y = rounded(p.kind, y * (y < 0 ? small : all(1)) / (1 + small));
            y = rounded(p.kind, y * rounded(p.kind, up));
        }
        if (p.residual) y = rounded(p.kind, y + some_as(p.kind, p.residual, at + o, here));
        if (here == W) {
            write_as(p.out_kind, p.out, at + o, y);
            continue;
        }
        alignas(64) float held[W];
        const int size = p.out_kind == FLOAT32 ? 4 : 2;
        write_as(p.out_kind, held, 0, y);
        memcpy((char *)p.out + (at + o) * size, held, here * size);
    }
}

// Tiles of a block, at most BLOCK_TILES, as many in each, and fewer where threads would find no work.
INLINE int tiles_of_block(int tiles, int strips, int threads) {
    int blocks = (tiles + BLOCK_TILES - 1) / BLOCK_TILES;
    while (blocks * strips < 4 * threads && tiles / blocks > BLOCK_TILES / 8) blocks++;
    return (tiles + blocks - 1) / blocks;
}

}  // namespace
