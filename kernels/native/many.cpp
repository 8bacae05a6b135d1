// Products of many rows, such as a prompt's, with weights of floats. Sums are float32.
//
// A strip of the weight's outputs, some columns at a time, becomes float32 and is laid across, so that a vector
// holds as many outputs; then all tiles of rows meet it. Sums of a depth are added to those before: one
// sum over all columns would err four times as much (oneDNN's does).
#include "across.h"
#include "rounding.h"
#include "team.h"

namespace {

constexpr int MR = 6, NV = W == 8 ? 2 : 4, NR = NV * W;  // a tile of sums in registers
constexpr int BLOCK_TILES = 160;                          // whose sums for NR outputs stay in the second cache
constexpr int DEPTH = W == 16 ? 128 : 256;                // columns of NR outputs: 32 KB (AVX2: 16)

struct Call {
    const char *x, *weight, *bias;  // [rows][inputs], [outputs][inputs], [outputs] or NULL, of one kind
    char *out;                      // [rows][outputs], of that kind
    float *scratch;                 // x in tiles: [rows in whole tiles][inputs]
    int rows, outputs, inputs, threads;
};

// Rows of a tile as [depths][MR][columns]; a tile that ends behind the last row has zeros there.
template <class K>
static void pack(const Call &c, int tile, float *to) {
    for (int k = 0; k < c.inputs; k += DEPTH) {
        const int depth = c.inputs - k < DEPTH ? c.inputs - k : DEPTH;
        for (int r = 0; r < MR; r++, to += depth) {
            const long row = (long)tile * MR + r;
            if (row >= c.rows) memset(to, 0, depth * sizeof(float));
            else
                for (int i = 0; i < depth; i += W)
                    write_some<Float32>(to, i, depth - i, read_some<K>(c.x, row * c.inputs + k + i, depth - i));
        }
    }
}

// Columns k .. of NR outputs from `first` on: to[column][NR], zeros where there is no output.
template <class K>
static void lay_across(const Call &c, int first, int k, int depth, float *to) {
    for (int o = 0; o < NR; o += W)
        for (int i = 0; i < depth; i += W) {
            Floats square[W];
            for (int j = 0; j < W; j++) {
                const long output = first + o + j;
                square[j] = output < c.outputs ? read_some<K>(c.weight, output * c.inputs + k + i, depth - i) : Floats{};
            }
            turn_square(square);
            for (int j = 0; j < W && i + j < depth; j++) store(to + (i + j) * NR + o, square[j]);
        }
}

// Adds x [MR][depth] times weights [depth][NR] to sums [MR][NR].
static void multiply_tile(const float *x, const float *weights, int depth, bool fresh, float *to) {
    Floats sums[MR][NV];
    UNROLL for (int r = 0; r < MR; r++)
        UNROLL for (int v = 0; v < NV; v++) sums[r][v] = Floats{};
    for (int k = 0; k < depth; k++) {
        Floats w[NV];
        UNROLL for (int v = 0; v < NV; v++) w[v] = load(weights + k * NR + v * W);
        UNROLL for (int r = 0; r < MR; r++) {
            const Floats same = all(x[r * depth + k]);
            UNROLL for (int v = 0; v < NV; v++) sums[r][v] += w[v] * same;
        }
    }
    for (int r = 0; r < MR; r++)
        for (int v = 0; v < NV; v++) {
            float *at = to + r * NR + v * W;
            store(at, fresh ? sums[r][v] : load(at) + sums[r][v]);
        }
}

template <class K>
static void finish(const Call &c, int first, int rows, int output, const float *sums) {
    const int count = c.outputs - output < NR ? c.outputs - output : NR;
    for (int o = 0; o < count; o += W) {
        const Floats bias = c.bias ? read_some<K>(c.bias, output + o, count - o) : Floats{};
        for (int r = 0; r < rows; r++)
            write_some<K>(c.out, (long)(first + r) * c.outputs + output + o, count - o, load(sums + r * NR + o) + bias);
    }
}

template <class K>
static int multiply(const Call &c) {
    const int tiles = (c.rows + MR - 1) / MR, strips = (c.outputs + NR - 1) / NR;
    int blocks = (tiles + BLOCK_TILES - 1) / BLOCK_TILES;
    // fewer rows in each where threads would find no work
    while ((long)blocks * strips < 4l * c.threads && tiles / blocks > BLOCK_TILES / 8) blocks++;
    const int of_block = (tiles + blocks - 1) / blocks;
    share(c.threads, tiles, 1, [&](int tile) { pack<K>(c, tile, c.scratch + (long)tile * MR * c.inputs); });
    share(c.threads, (long)blocks * strips, 1, [&](int work) {
        alignas(64) float sums[BLOCK_TILES * MR * NR];
        alignas(64) float weights[DEPTH * NR];
        const int output = work % strips * NR, first = work / strips * of_block;
        const int beside = tiles - first < of_block ? tiles - first : of_block;
        for (int k = 0; k < c.inputs; k += DEPTH) {
            const int depth = c.inputs - k < DEPTH ? c.inputs - k : DEPTH;
            lay_across<K>(c, output, k, depth, weights);
            for (int tile = 0; tile < beside; tile++)
                multiply_tile(c.scratch + ((long)(first + tile) * c.inputs + k) * MR, weights, depth, !k,
                              sums + tile * MR * NR);
        }
        const int rows = c.rows - first * MR < beside * MR ? c.rows - first * MR : beside * MR;
        finish<K>(c, first * MR, rows, output, sums);
    });
    return 0;
}

}  // namespace

// Returns 0, or 1 for a kind that this build lacks.
extern "C" int omnikv_many_rows(const Call *c, int kind) {
#define MULTIPLY(K) multiply<K>(*c)
    OF_KIND(kind, MULTIPLY);
}

extern "C" int omnikv_sizeof_many_rows_call() { return sizeof(Call); }

// Whether this is a CPU of Intel's: MKL runs code of AVX2 on others.
extern "C" int omnikv_is_intel() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_cpu_init();
    return __builtin_cpu_is("intel") ? 1 : 0;
#else
    return 0;
#endif
}
