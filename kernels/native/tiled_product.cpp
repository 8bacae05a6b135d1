// Products of many rows of bfloat16 with weights of bfloat16 by tiles (amx.h). Sums are float32.
//
// Some rows of x become tiles once. A strip of the weight's outputs then goes by, some columns at a time: they
// are turned into tiles between the products of the columns before them.
#include "scratch.h"
#include "rounding.h"
#include "team.h"
#include "tiles.h"

namespace {

struct Call {
    const uint16_t *x, *weight, *bias;  // [rows][inputs], [outputs][inputs], [outputs] or NULL
    uint16_t *out;                      // [rows][outputs]
    int rows, outputs, inputs, threads;
};

#if defined(HAS_TILES)
constexpr int BLOCK = 512;                    // rows of x that a strip meets: their sums take 64 KB of the second cache
constexpr int STEP = TILE_BYTES / 2;          // columns of a step
constexpr int DEPTH = 8;                      // steps of a strip that are tiles at a time: 16 KB
constexpr int OF_ROWS = TilePairs::of_rows;

// Rows `first` .. of x, a tile's, as [steps][2] tiles.
static void pack_rows(const Call &c, int first, int steps, char *to) {
    for (int r = 0; r < OF_ROWS; r++) {
        char *at = to + r / TILE_ROWS * TILE + r % TILE_ROWS * TILE_BYTES;
        const uint16_t *from = c.x + (long)(first + r) * c.inputs;
        for (int k = 0; k < steps; k++, at += 2 * TILE) {
            const int left = first + r < c.rows ? c.inputs - k * STEP : 0;
            const __mmask32 mask = left < STEP ? (1u << left) - 1 : ~0u;
            _mm512_store_si512(at, _mm512_maskz_loadu_epi16(mask, left > 0 ? from + k * STEP : c.x));
        }
    }
}

// A strip's tiles of a depth: [2 panels][DEPTH], as `piece` makes them one by one.
struct Strip {
    const char *rows[2][TILE_ROWS];
    int inputs;

    Strip(const Call &c, int output) : inputs(c.inputs) {
        for (int i = 0; i < SIDE; i++) {
            const bool there = output + i < c.outputs;
            rows[i / TILE_ROWS][i % TILE_ROWS] = there ? (const char *)(c.weight + (long)(output + i) * c.inputs) : nullptr;
        }
    }
    INLINE void turn(const Strip &s, int step, int panel, char *to) {
        const int left = s.inputs - step * STEP;
        turn_tile(s.rows[panel], (long)step * TILE_BYTES, 2 * left, to);
    }
};

// Sums [rows][SIDE] of rows of x, in tiles, with a strip.
static void multiply(const char *x, int tiles, int steps, const Strip &strip, float *sums) {
    alignas(64) char turned[2][2][DEPTH * TILE];
    const auto depth_of = [&](int k) { return steps - k < DEPTH ? steps - k : DEPTH; };
    for (int i = 0; i < 2 * depth_of(0); i++) Strip::turn(strip, i / 2, i % 2, turned[0][i % 2] + i / 2 * TILE);
    for (int k = 0, n = 0; k < steps; k += DEPTH, n = 1 - n) {
        const int depth = depth_of(k), next = k + DEPTH < steps ? depth_of(k + DEPTH) : 0;
        const auto piece = [&](int i) { Strip::turn(strip, k + DEPTH + i / 2, i % 2, turned[1 - n][i % 2] + i / 2 * TILE); };
        typedef Dealt<decltype(piece)> Turning;
        Turning turning(piece, 2 * next, tiles * depth);
        for (int tile = 0; tile < tiles; tile++) {
            float *const to = sums + tile * OF_ROWS * SIDE;
            if (k) load_sums(to, SIDE * 4);
            else zero_sums();
            add_tiles<TilePairs>(x + ((long)tile * steps + k) * 2 * TILE, {turned[n][0], turned[n][1]}, depth,
                                 [&] { Turning::between(turning); });
            store_sums(to, SIDE * 4);
        }
    }
}

static void finish(const Call &c, int first, int rows, int output, const float *sums) {
    const int count = c.outputs - output < SIDE ? c.outputs - output : SIDE;
    for (int o = 0; o < count; o += W) {
        const Floats bias = c.bias ? read_some<BFloat16>(c.bias, output + o, count - o) : Floats{};
        for (int r = 0; r < rows; r++) {
            uint16_t *const to = c.out + (long)(first + r) * c.outputs;
            write_some<BFloat16>(to, output + o, count - o, load(sums + r * SIDE + o) + bias);
        }
    }
}

// Returns 0, 2 without memory for the rows, or 3 for an exception of the reference's tiles.
static int run(const Call &c) {
    static thread_local Scratch scratch;
    const int steps = (c.inputs + STEP - 1) / STEP, strips = (c.outputs + SIDE - 1) / SIDE;
    const int all = c.rows < BLOCK ? (c.rows + OF_ROWS - 1) / OF_ROWS : BLOCK / OF_ROWS;
    char *const x = (char *)scratch.get((size_t)all * steps * 2 * TILE);
    if (!x) return 2;
    std::atomic<int> wrong{0};
    for (int first = 0; first < c.rows; first += BLOCK) {
        const int rows = c.rows - first < BLOCK ? c.rows - first : BLOCK, tiles = (rows + OF_ROWS - 1) / OF_ROWS;
        share(c.threads, tiles, 1, [&](int tile) {
            pack_rows(c, first + tile * OF_ROWS, steps, x + (long)tile * steps * 2 * TILE);
        });
        in_pieces(c.threads, strips, 1, [&](Pieces &pieces) {
            alignas(64) float sums[BLOCK * SIDE];
            const Tiled tiled;
            for (long at, stop; pieces.next(at, stop);)
                for (long i = at; i < stop; i++) {
                    multiply(x, tiles, steps, Strip(c, i * SIDE), sums);
                    finish(c, first, rows, i * SIDE, sums);
                }
            if (tile_fault()) wrong = 3;
        });
    }
    return wrong;
}
#endif

}  // namespace

// Returns 0, 1 in a build without tiles, 2 without memory for x, or 3 for an exception that tiles raised in the
// reference.
extern "C" int omnikv_tiled_product(const Call *c) {
#if defined(HAS_TILES)
    return run(*c);
#else
    (void)c;
    return 1;
#endif
}

extern "C" int omnikv_sizeof_tiled_product() { return sizeof(Call); }
