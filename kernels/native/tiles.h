// Products of tiles: two tiles of the left factor times two of the right, into four tiles of sums, so that
// each tile that is read meets two others. What shall run beside them on the core's other units is called
// between: a product takes 16 cycles of the tiles' own unit and one place in the order of instructions.
//
// A tile of the left factor has 16 rows of 64 bytes of depth. One of the right has, for each 4 bytes of depth,
// those of 16 columns: pairs of 16 bits or four numbers of 8.
#pragma once
#include "across.h"
#include "amx.h"
#include "whole.h"

namespace {

#if defined(HAS_TILES)
constexpr int SIDE = 32;  // columns of two tiles of sums

// Tiles are a thread's: they are configured in each thread of a call, and released before it ends.
struct Tiled {
    // bytes: of depth, of one step
    explicit Tiled(int bytes = TILE_BYTES) {
        TileShapes shapes = {};
        shapes.palette = 1;
        for (int t = 0; t < 8; t++) {
            const bool left = t == 4 || t == 5, right = t == 6 || t == 7;
            shapes.bytes[t] = left ? bytes : TILE_BYTES;
            shapes.rows[t] = right ? bytes / 4 : TILE_ROWS;
        }
        tile_configure(shapes);
    }
    Tiled(const Tiled &) = delete;
    ~Tiled() { tile_release(); }
};

// What the left factor's two tiles are. of_rows: rows that they stand for.
struct TilePairs {  // of bfloat16: 16 rows, and the next 16
    static constexpr int of_rows = 32;
    template <int C, int A, int B>
    INLINE void upper() { tile_pairs<C, A, B>(); }
    template <int C, int A, int B>
    INLINE void lower() { tile_pairs<C, A, B>(); }
};

struct TileDigits {  // of 16 bits: the upper 8, which have a sign, and the lower ones of the same 16 rows
    static constexpr int of_rows = 16;
    template <int C, int A, int B>
    INLINE void upper() { tile_signed<C, A, B>(); }
    template <int C, int A, int B>
    INLINE void lower() { tile_unsigned<C, A, B>(); }
};

INLINE void zero_sums() { tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>(); }

// Sums lie as 32 rows, `ahead` bytes apart, of 32 columns: digits have their upper sums first.
INLINE void load_sums(const void *from, long ahead) {
    const char *at = (const char *)from, *below = at + TILE_ROWS * ahead;
    tile_load<0>(at, ahead), tile_load<1>(at + TILE_BYTES, ahead);
    tile_load<2>(below, ahead), tile_load<3>(below + TILE_BYTES, ahead);
}

INLINE void store_sums(void *to, long ahead) {
    char *at = (char *)to, *below = at + TILE_ROWS * ahead;
    tile_store<0>(at, ahead), tile_store<1>(at + TILE_BYTES, ahead);
    tile_store<2>(below, ahead), tile_store<3>(below + TILE_BYTES, ahead);
}

// Adds `steps` steps of depth to the sums. left: of each step two tiles in turn; right: two panels of tiles.
template <class M, class Between>
INLINE void add_tiles(const char *left, const char *const (&right)[2], int steps, const Between &between) {
    for (int k = 0; k < steps; k++) {
        tile_load<6>(right[0] + k * TILE, TILE_BYTES);
        tile_load<4>(left + 2 * k * TILE, TILE_BYTES);
        M::template upper<0, 4, 6>();
        tile_load<7>(right[1] + k * TILE, TILE_BYTES);
        M::template upper<1, 4, 7>();
        tile_load<5>(left + (2 * k + 1) * TILE, TILE_BYTES);
        M::template lower<2, 5, 6>();
        M::template lower<3, 5, 7>();
        between();
    }
}

// Deals `count` pieces of work out over `beats` steps of products; without any step, all are left to `rest`.
template <class F>
struct Dealt {
    const F &piece;
    int count, beats, done, credit;
    Dealt(const F &piece, int count, int beats) : piece(piece), count(count), beats(beats), done(0), credit(0) {}
    INLINE void between(Dealt &d) {
        for (d.credit += d.count; d.credit >= d.beats && d.done < d.count; d.credit -= d.beats) d.piece(d.done++);
    }
    INLINE void rest(Dealt &d) {
        while (d.done < d.count) d.piece(d.done++);
    }
};

// A tile of the right factor from 64 bytes of each of 16 rows, NULL for zeros, of which `left` count.
INLINE void turn_tile(const char *const *rows, long from, int left, char *to) {
    const __mmask64 mask = left < TILE_BYTES ? (1ull << left) - 1 : ~0ull;
    Floats square[16];
    UNROLL for (int i = 0; i < 16; i++)
        square[i] = rows[i] ? (Floats)_mm512_maskz_loadu_epi8(mask, rows[i] + from) : Floats{};
    turn_square(square);
    UNROLL for (int i = 0; i < 16; i++) store((float *)(to + i * TILE_BYTES), square[i]);
}

// What 16 rows' sums of digits, [2][16][ahead] whole numbers, are in one: W columns of a row.
INLINE Ints digits_sum(const int32_t *sums, long ahead, int row, int column) {
    const Ints upper = *(const Ints *)(sums + row * ahead + column);
    return (upper << 8) + *(const Ints *)(sums + (TILE_ROWS + row) * ahead + column);
}

// 16 whole numbers of 16 bits as digits.
INLINE void put_digits(__m256i x, char *upper, char *lower) {
    _mm_storeu_si128((__m128i *)upper, _mm256_cvtepi16_epi8(_mm256_srai_epi16(x, 8)));
    _mm_storeu_si128((__m128i *)lower, _mm256_cvtepi16_epi8(x));
}
#endif

}  // namespace
