// Products of many rows, such as a prompt's, with weights of floats, and what follows them. Sums are float32.
//
// A strip of the weight's outputs, some columns at a time, is laid across, so that a vector holds as many
// outputs; then all tiles of a block of rows meet it. Sums of a depth are added to those before: one sum over
// all columns would err four times as much (oneDNN's does).
#include "across.h"
#include "rounding.h"
#include "team.h"

namespace {

constexpr int MR = 6, NV = W == 8 ? 2 : 4, NR = NV * W;  // a tile of sums in registers
constexpr int MOST = 176, LEAST = 40;       // tiles of a block: sums stay in the second cache; of one that was cut
constexpr int SHARES = 12;                  // pieces that a thread begins with, where there are rows enough
constexpr int DEPTH = W == 16 ? 128 : 256;  // cells of NR outputs: 32 KB (AVX2: 16)
constexpr long CELL = 4;                    // bytes
constexpr int AHEAD = 2 * W;                // cells of a weight's row that are fetched before they are laid across

struct Call {
    const char *x, *weight, *bias;  // [rows][inputs], [outputs][inputs], [outputs] or NULL, of one kind
    const char *residual;           // [rows][outputs, or half of them if gated] or NULL
    char *out;                      // as residual, of that kind
    float *scratch;                 // x as cells, [rows][cells]: see omnikv_many_rows_cells
    int rows, outputs, inputs, threads, gated;
};

// A vector of cells wherever they lie.
INLINE Floats bits_of(const char *from) {
    Floats found;
    memcpy(&found, from, sizeof found);
    return found;
}

// A cell is what a tile multiplies at a time: one column in float32 ..
template <class K>
struct Singles {
    typedef K Kind;
    typedef Float32 Column;  // kind of the columns of a cell
    static constexpr int columns = 1;
    static constexpr bool as_they_lie = K::bytes == 4;  // cells of weights
    INLINE Floats weights(const char *row, long i, int left) { return read_some<K>(row, i, left); }
    INLINE Floats add(Floats sum, Floats weights, const char *x) { return sum + weights * Float32::first(x); }
    INLINE void write(void *to, long i, int left, Floats x) { write_some<K>(to, i, left, x); }
};

// .. or two of bfloat16.
#if defined(HAS_PAIRS)
struct Pairs {
    typedef BFloat16 Kind;
    typedef BFloat16 Column;
    static constexpr int columns = 2;
    static constexpr bool as_they_lie = true;
    INLINE Floats weights(const char *row, long i, int left) {
        if (left >= 2 * W) return bits_of(row + 2 * i);
        char some[4 * W] = {};
        memcpy(some, row + 2 * i, 2 * left);
        return bits_of(some);
    }
    INLINE Floats add(Floats sum, Floats weights, const char *x) {
        int32_t bits;
        memcpy(&bits, x, 4);
        return add_pairs(sum, weights, (Floats)(Ints{} + bits));
    }
    INLINE void write(void *to, long i, int left, Floats x) {
        if (left >= W) *(Halves *)((uint16_t *)to + i) = narrow_halves(x);
        else write_some<BFloat16>(to, i, left, x);
    }
};
#endif

// Which outputs a strip has: NR, or with SwiGLU half as many of gate and those of up that they open.
struct Strip {
    const Call &c;
    int outputs, width, first, count;

    Strip(const Call &c, int number)
        : c(c), outputs(c.gated ? c.outputs / 2 : c.outputs), width(c.gated ? NR / 2 : NR), first(number * width),
          count(outputs - first < width ? outputs - first : width) {}
    // The weights of output i of NR, or NULL.
    INLINE const char *row(const Strip &s, int i, int bytes) {
        const int inside = i % s.width;
        const long output = (long)i / s.width * s.outputs + s.first + inside;
        return inside < s.count ? s.c.weight + output * s.c.inputs * bytes : nullptr;
    }
};

// Cells of a row, and whether rows of x are such cells as they lie.
template <class P>
INLINE int cells_of(int columns) {
    return (columns + P::columns - 1) / P::columns;
}

template <class P>
INLINE bool lies_in_cells(int inputs) {
    return P::as_they_lie && inputs % P::columns == 0;
}

// All rows as cells, zeros behind the last column.
template <class P>
static void make_cells(const Call &c) {
    const int cells = cells_of<P>(c.inputs), columns = cells * P::columns;
    share(c.threads, c.rows, 8, [&](long row) {
        for (int i = 0; i < columns; i += W)
            write_some<typename P::Column>(c.scratch + row * cells, i, columns - i,
                                         read_some<typename P::Kind>(c.x, row * c.inputs + i, c.inputs - i));
    });
}

// W cells from column k on of W outputs, laid across: to[cell][NR].
template <class P, bool WHOLE>
INLINE void lay_square(const char *const *rows, int k, int left, float *to) {
    Floats square[W];
    UNROLL for (int j = 0; j < W; j++)
        square[j] = WHOLE ? bits_of(rows[j] + (long)k * P::Kind::bytes)
                          : rows[j] ? P::weights(rows[j], k, left) : Floats{};
    turn_square(square);
    const int cells = cells_of<P>(left);
    UNROLL for (int j = 0; j < W; j++)
        if (WHOLE || j < cells) store(to + j * NR, square[j]);
}

// Columns k .. k + count - 1 of a strip: to[cell][NR], zeros where there is no output.
template <class P>
static void lay_across(const Strip &strip, int k, int count, float *to) {
    for (int o = 0; o < NR; o += W) {
        const char *rows[W];
        bool whole = P::as_they_lie;
        for (int j = 0; j < W; j++) rows[j] = Strip::row(strip, o + j, P::Kind::bytes), whole &= rows[j] != nullptr;
        int i = 0;
        if (whole)
            for (; i + W * P::columns <= count; i += W * P::columns) {
                UNROLL for (int j = 0; j < W; j++)
                    __builtin_prefetch(rows[j] + (long)(k + i + AHEAD * P::columns) * P::Kind::bytes);
                lay_square<P, true>(rows, k + i, count - i, to + i / P::columns * NR + o);
            }
        for (; i < count; i += W * P::columns)
            lay_square<P, false>(rows, k + i, count - i, to + i / P::columns * NR + o);
    }
}

// x [MR][depth], cells whose rows are `ahead` bytes apart, times weights [depth][NR], added to sums `from` [MR][NR]
// or to nothing: `to`.
template <class P>
__attribute__((noinline)) static void multiply_tile(const char *x, long ahead, const float *weights, int depth,
                                                    const float *from, float *to) {
    Floats sums[MR][NV];
    UNROLL for (int r = 0; r < MR; r++)
        UNROLL for (int v = 0; v < NV; v++) sums[r][v] = Floats{};
    for (int k = 0; k < depth; k++) {
        Floats w[NV];
        UNROLL for (int v = 0; v < NV; v++) w[v] = load(weights + k * NR + v * W);
        UNROLL for (int r = 0; r < MR; r++) {
            UNROLL for (int v = 0; v < NV; v++) sums[r][v] = P::add(sums[r][v], w[v], x + r * ahead + k * CELL);
        }
    }
    if (from) {
        UNROLL for (int r = 0; r < MR; r++)
            UNROLL for (int v = 0; v < NV; v++) sums[r][v] += load(from + r * NR + v * W);
    }
    UNROLL for (int r = 0; r < MR; r++)
        UNROLL for (int v = 0; v < NV; v++) store(to + r * NR + v * W, sums[r][v]);
}

// What follows a product, of a tile's rows; rounded where torch's operators round.
template <class P, bool GATED>
static void finish(const Strip &s, int first, int rows, const float *sums) {
    typedef typename P::Kind K;
    typedef Kept<K> To;
    const Call &c = s.c;
    for (int o = 0; o < s.count; o += W) {
        const int left = s.count - o;
        Floats bias = {}, up_bias = {};
        if (c.bias) bias = read_some<K>(c.bias, s.first + o, left);
        if (c.bias && GATED) up_bias = read_some<K>(c.bias, s.outputs + s.first + o, left);
        long at = (long)first * s.outputs + s.first + o;
        for (int r = 0; r < rows; r++, at += s.outputs) {
            const float *from = sums + r * NR + o;
            Floats y = load(from) + bias;
            if (GATED) y = To::rounded(silu(To::rounded(y))) * To::rounded(load(from + NR / 2) + up_bias);
            if (c.residual) y = To::rounded(y) + read_some<K>(c.residual, at, left);
            P::write(c.out, at, left, y);
        }
    }
}

// Tiles of a block: at most MOST, as many in each, fewer where threads would find too few pieces.
static int tiles_of_block(int tiles, int strips, int threads) {
    int blocks = (tiles + MOST - 1) / MOST;
    while (threads > 1 && (long)blocks * strips < (long)SHARES * threads && tiles / (blocks + 1) >= LEAST) blocks++;
    return (tiles + blocks - 1) / blocks;
}

// Columns of a depth: as many in each.
template <class P>
static int columns_of_depth(int inputs) {
    const int cells = cells_of<P>(inputs), depths = (cells + DEPTH - 1) / DEPTH;
    return ((cells + depths - 1) / depths + W - 1) / W * W * P::columns;
}

// A strip times rows first .. stop - 1; `next` is the strip whose weights are fetched at the end.
template <class P>
static void multiply_strip(const Strip &strip, const Strip &next, const char *x, int first, int stop) {
    alignas(64) float sums[MOST * MR * NR], whole[MR * NR];
    alignas(64) float weights[DEPTH * NR], some[MR * DEPTH];
    const Call &c = strip.c;
    const int step = columns_of_depth<P>(c.inputs), tiles = (stop - first + MR - 1) / MR;
    const long ahead = (long)cells_of<P>(c.inputs) * CELL, bytes = P::Kind::bytes;
    for (int k = 0; k < c.inputs; k += step) {
        const int depth = c.inputs - k < step ? c.inputs - k : step, cells = cells_of<P>(depth);
        const bool last = k + step >= c.inputs;
        const long later = last ? 0 : k + step, rest = c.inputs - later < step ? c.inputs - later : step;
        lay_across<P>(strip, k, depth, weights);
        for (int tile = 0; tile < tiles; tile++) {
            for (int i = tile * NR / tiles; i < (tile + 1) * NR / tiles; i++)  // weights that come next
                if (const char *row = Strip::row(last ? next : strip, i, bytes))
                    for (long b = 0; b < rest * bytes; b += 64) __builtin_prefetch(row + later * bytes + b, 0, 2);
            const int row = first + tile * MR, rows = stop - row < MR ? stop - row : MR;
            const char *from = x + row * ahead + k / P::columns * CELL;
            if (rows < MR) {  // those that are not there are the last one again
                for (int r = 0; r < MR; r++)
                    memcpy(some + r * cells, from + (r < rows ? r : rows - 1) * ahead, cells * CELL);
                from = (const char *)some;
            }
            float *const own = sums + tile * MR * NR;
            multiply_tile<P>(from, rows < MR ? cells * CELL : ahead, weights, cells, k ? own : nullptr,
                             last ? whole : own);
            if (last && c.gated) finish<P, true>(strip, row, rows, whole);
            else if (last) finish<P, false>(strip, row, rows, whole);
        }
    }
}

template <class P>
static int multiply(const Call &c) {
    const int outputs = c.gated ? c.outputs / 2 : c.outputs, width = c.gated ? NR / 2 : NR;
    const int tiles = (c.rows + MR - 1) / MR, strips = (outputs + width - 1) / width;
    const int of_block = tiles_of_block(tiles, strips, c.threads), blocks = (tiles + of_block - 1) / of_block;
    const bool lies = lies_in_cells<P>(c.inputs);
    if (!lies) make_cells<P>(c);
    share(c.threads, (long)blocks * strips, 1, [&](int work) {
        const int first = work / strips * of_block * MR, strip = work % strips;
        const int stop = c.rows - first < of_block * MR ? c.rows : first + of_block * MR;
        multiply_strip<P>(Strip(c, strip), Strip(c, strip + 1 < strips ? strip + 1 : 0),
                          lies ? c.x : (const char *)c.scratch, first, stop);
    });
    return 0;
}

}  // namespace

#if defined(HAS_PAIRS)
#define OF_CELLS(kind, call) \
    if (kind == BFLOAT16) return call(Pairs); \
    OF_KIND(kind, call##_SINGLE)
#else
#define OF_CELLS(kind, call) OF_KIND(kind, call##_SINGLE)
#endif

// Returns 0, or 1 for a kind that this build lacks.
extern "C" int omnikv_many_rows(const Call *c, int kind) {
#define MULTIPLY(P) multiply<P>(*c)
#define MULTIPLY_SINGLE(K) multiply<Singles<K>>(*c)
    OF_CELLS(kind, MULTIPLY);
}

// Floats of scratch that a row of x needs: 0 where it is multiplied as it lies.
extern "C" int omnikv_many_rows_cells(int kind, int inputs) {
#define CELLS(P) (lies_in_cells<P>(inputs) ? 0 : cells_of<P>(inputs))
#define CELLS_SINGLE(K) CELLS(Singles<K>)
    OF_CELLS(kind, CELLS);
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
