// The eight tiles of an x86 with AMX, 16 rows of 64 bytes each, behind a function for each instruction.
//
// OMNIKV_AMX_REFERENCE makes them plain C++, written from the operations that Intel publishes of LDTILECFG,
// TILELOADD, TILESTORED, TILEZERO, TDPBF16PS, TDPBSSD and TDPBUSD (Software Developer's Manual, volume 2),
// for tests on machines without tiles. What would raise an exception there is kept as `tile_fault()`, and
// the instruction does nothing.
//
// The compiler's own functions are not used: GCC 12's say neither which memory a load reads nor that of the
// 64 bytes of a configuration all are read, so that what was stored there may come too late.
#pragma once
#include <stdint.h>
#include <string.h>

#if defined(__AVX512BF16__) && (defined(__AMX_TILE__) || defined(OMNIKV_AMX_REFERENCE))
#define HAS_TILES 1
#endif

namespace {

#if defined(HAS_TILES)
constexpr int TILE_ROWS = 16, TILE_BYTES = 64, TILE = TILE_ROWS * TILE_BYTES;

// As LDTILECFG reads it: palette 1 has eight tiles, of at most 16 rows of 64 bytes.
struct TileShapes {
    uint8_t palette, start_row, none[14];
    uint16_t bytes[16];  // of a row of each tile
    uint8_t rows[16];
};
static_assert(sizeof(TileShapes) == 64, "64 bytes are read");
#endif

#if defined(HAS_TILES) && defined(OMNIKV_AMX_REFERENCE)
struct TileMachine {
    TileShapes shapes;  // palette 0: none are configured
    uint8_t at[8][TILE_ROWS][TILE_BYTES];
    const char *fault;
};

inline TileMachine &tile_machine() {
    static thread_local TileMachine machine = {};
    return machine;
}

// Why an instruction of this thread raised an exception; NULL: none did. It stays.
inline const char *tile_fault() { return tile_machine().fault; }

inline bool tile_needs(bool what, const char *why) {
    TileMachine &m = tile_machine();
    if (!what && !m.fault) m.fault = why;
    return what;
}

inline bool tile_known(int t) {
    const TileShapes &s = tile_machine().shapes;
    return tile_needs(s.palette == 1, "tiles are not configured") &&
           tile_needs(s.rows[t] && s.bytes[t], "a tile has no shape");
}

inline void tile_release() { tile_machine().shapes = {}, memset(tile_machine().at, 0, sizeof(TileMachine::at)); }

inline void tile_configure(const TileShapes &shapes) {
    bool right = shapes.palette <= 1 && !shapes.start_row;  // nothing of ours is interrupted and goes on
    for (int i = 0; i < 14; i++) right = right && !shapes.none[i];
    for (int t = 0; t < 16; t++) {
        const int bytes = shapes.bytes[t], rows = shapes.rows[t];
        right = right && bytes <= TILE_BYTES && rows <= TILE_ROWS && !bytes == !rows;
        if (t >= 8) right = right && !bytes;
    }
    if (!tile_needs(right, "a configuration of tiles that there is not")) return;
    tile_release();
    if (shapes.palette) tile_machine().shapes = shapes;
}

template <int T>
inline void tile_zero() {
    if (tile_known(T)) memset(tile_machine().at[T], 0, TILE);
}

template <int T>
inline void tile_load(const void *from, long ahead) {
    if (!tile_known(T)) return;
    TileMachine &m = tile_machine();
    memset(m.at[T], 0, TILE);
    for (int r = 0; r < m.shapes.rows[T]; r++)
        memcpy(m.at[T][r], (const char *)from + r * ahead, m.shapes.bytes[T]);
}

template <int T>
inline void tile_store(void *to, long ahead) {
    if (!tile_known(T)) return;
    const TileMachine &m = tile_machine();
    for (int r = 0; r < m.shapes.rows[T]; r++) memcpy((char *)to + r * ahead, m.at[T][r], m.shapes.bytes[T]);
}

// Whether tiles c [m][n], a [m][k] and b [k][n], of 4 bytes each, can be multiplied.
inline bool tile_fits(int c, int a, int b) {
    if (!tile_known(c) || !tile_known(a) || !tile_known(b)) return false;
    const TileShapes &s = tile_machine().shapes;
    return tile_needs(c != a && c != b && a != b, "a product of a tile with itself") &&
           tile_needs(s.rows[c] == s.rows[a] && s.bytes[c] == s.bytes[b] && s.bytes[a] == 4 * s.rows[b],
                      "tiles whose shapes do not meet") &&
           tile_needs(!(s.bytes[a] % 4) && !(s.bytes[b] % 4), "a row of a part of 4 bytes");
}

// c [m][n] += sum over k of what one(a's four bytes, b's four bytes) gives, in a step for each k.
template <class Step>
inline void tile_products(int c, int a, int b, const Step &step) {
    if (!tile_fits(c, a, b)) return;
    TileMachine &m = tile_machine();
    const int rows = m.shapes.rows[c], columns = m.shapes.bytes[c] / 4, depth = m.shapes.bytes[a] / 4;
    uint8_t found[TILE_ROWS][TILE_BYTES] = {};
    for (int r = 0; r < rows; r++)
        for (int n = 0; n < columns; n++) {
            const uint8_t *left[TILE_ROWS], *right[TILE_ROWS];
            for (int k = 0; k < depth; k++) left[k] = m.at[a][r] + 4 * k, right[k] = m.at[b][k] + 4 * n;
            step(m.at[c][r] + 4 * n, left, right, depth, found[r] + 4 * n);
        }
    memcpy(m.at[c], found, TILE);
}

// A float32 whose numbers below the least normal one are 0.
inline float tile_flushed(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (!(bits & 0x7f800000)) bits &= 0x80000000;
    memcpy(&x, &bits, 4);
    return x;
}

inline float tile_bfloat16(const uint8_t *at) {
    const uint32_t bits = (uint32_t)(at[0] | at[1] << 8) << 16;
    float x;
    memcpy(&x, &bits, 4);
    return tile_flushed(x);
}

// c += a b of pairs of bfloat16. Even and odd elements have a float32 sum each, of fused products in the order
// of k; then their sum is added to c.
template <int C, int A, int B>
inline void tile_pairs() {
    tile_products(C, A, B, [](const uint8_t *c, const uint8_t **a, const uint8_t **b, int depth, uint8_t *to) {
        float sums[2] = {}, sum;
        for (int k = 0; k < depth; k++)
            for (int i = 0; i < 2; i++)
                sums[i] = tile_flushed(__builtin_fmaf(tile_bfloat16(a[k] + 2 * i), tile_bfloat16(b[k] + 2 * i), sums[i]));
        memcpy(&sum, c, 4);
        sum = tile_flushed(tile_flushed(sum) + tile_flushed(sums[0] + sums[1]));
        memcpy(to, &sum, 4);
    });
}

template <class Byte, int C, int A, int B>
inline void tile_bytes() {
    tile_products(C, A, B, [](const uint8_t *c, const uint8_t **a, const uint8_t **b, int depth, uint8_t *to) {
        uint32_t sum;  // it wraps around
        memcpy(&sum, c, 4);
        for (int k = 0; k < depth; k++)
            for (int i = 0; i < 4; i++) sum += (uint32_t)((int)(Byte)a[k][i] * (int)(int8_t)b[k][i]);
        memcpy(to, &sum, 4);
    });
}

// c += a b of four bytes each, all of them with a sign.
template <int C, int A, int B>
inline void tile_signed() { tile_bytes<int8_t, C, A, B>(); }

// The same where those of a have none.
template <int C, int A, int B>
inline void tile_unsigned() { tile_bytes<uint8_t, C, A, B>(); }
#elif defined(HAS_TILES)
inline const char *tile_fault() { return nullptr; }

inline void tile_configure(const TileShapes &shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes)); }
inline void tile_release() { asm volatile("tilerelease" : : : "memory"); }

template <int T>
inline __attribute__((always_inline)) void tile_zero() {
    asm volatile("tilezero %%tmm%c0" : : "n"(T));
}

template <int T>
inline __attribute__((always_inline)) void tile_load(const void *from, long ahead) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(ahead), "n"(T) : "memory");
}

template <int T>
inline __attribute__((always_inline)) void tile_store(void *to, long ahead) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(ahead), "n"(T) : "memory");
}

template <int C, int A, int B>
inline __attribute__((always_inline)) void tile_pairs() {
    static_assert(C != A && C != B && A != B, "three tiles");
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "n"(C), "n"(A), "n"(B));
}

template <int C, int A, int B>
inline __attribute__((always_inline)) void tile_signed() {
    static_assert(C != A && C != B && A != B, "three tiles");
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "n"(C), "n"(A), "n"(B));
}

template <int C, int A, int B>
inline __attribute__((always_inline)) void tile_unsigned() {
    static_assert(C != A && C != B && A != B, "three tiles");
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "n"(C), "n"(A), "n"(B));
}
#endif

}  // namespace
