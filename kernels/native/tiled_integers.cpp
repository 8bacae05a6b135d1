// Many rows of 16-bit floats times weights of few bits by tiles of 8-bit numbers (amx.h): what integers.cpp
// does, with the same whole numbers of 16 bits, here in two digits. Sums of a fold are whole, and all that
// follows them keeps its order, so that results are the same to the bit.
//
// A panel of weights of 8 bits is tiles as it lies. One of 4 bits becomes some, 16 times too large: the even
// columns of a word, then the odd ones.
#include "few_bits.h"
#include "scratch.h"
#include "team.h"
#include "tiles.h"

namespace {

#if defined(HAS_TILES)
constexpr int COLUMNS = 256;                  // that have one scale of a row of x, at most: as in integers.cpp
constexpr int FOLDS = COLUMNS / 32;           // of them: a fold has 32 columns at least
constexpr int BLOCK = 32;                     // tiles of rows that a strip meets
constexpr int OF_ROWS = TileDigits::of_rows;

// What a depth of words is cut into: folds of columns that have one scale, and steps of those.
struct Depth {
    int words, columns, folds, of_fold, step;  // of_fold: steps of a fold; step: columns of one
    long record;  // bytes of a tile of rows: [steps][2] tiles, scales and sums of each fold of 16 rows

    Depth(const Product &p, int words) : words(words), columns(words * (32 / p.bits)) {
        folds = (columns + p.fold - 1) / p.fold;
        of_fold = (p.fold + TILE_BYTES - 1) / TILE_BYTES, step = p.fold / of_fold;
        record = tiles() * TILE + (1 + folds) * TILE_BYTES;
    }
    long tiles() const { return 2l * folds * of_fold; }
};

// Columns of a depth from `first` on of row r of a tile. What is not finite makes the row NaN.
template <int BITS>
static void pack_row(const Product &p, int row, int r, int first, const Depth &d, char *to) {
    alignas(64) float x[COLUMNS + 2 * W];
    const long from = (long)row * p.inputs + first;
    const int left = p.inputs - first < d.columns ? p.inputs - first : d.columns;
    for (int c = 0; c < d.columns + W; c += W) store(x + c, left > c ? some_as(p.kind, p.x, from + c, left - c) : Floats{});
    const Steps steps(x, d.columns);
    float *const known = (float *)(to + d.tiles() * TILE);
    known[r] = steps.step;
    const __m128i apart = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    for (int f = 0; f < d.folds; f++) {
        const int here = f * p.fold, some = d.columns - here < p.fold ? d.columns - here : p.fold;
        Ints sum = {};
        for (int c = 0; c < some; c += 16) {
            char digits[2][16];
            // what lies behind a short fold is 0: x ends there
            put_digits(shorts_of(x + here + c, steps.inverse, sum), digits[0], digits[1]);
            for (int half = 0; half < 16 && c + half < some; half += 8) {  // a step has whole eights
                const int at = c + half, k = f * d.of_fold + at / d.step;
                for (int g = 0; g < 2; g++) {
                    __m128i bytes = _mm_loadu_si128((const __m128i *)digits[g]);
                    if (BITS == 4) bytes = _mm_shuffle_epi8(bytes, apart);
                    if (half) bytes = _mm_srli_si128(bytes, 8);
                    _mm_storel_epi64((__m128i *)(to + (2 * k + g) * TILE + r * TILE_BYTES + at % d.step), bytes);
                }
            }
        }
        known[(1 + f) * TILE_ROWS + r] = p.zero || p.offsets ? (float)_mm512_reduce_add_epi32((__m512i)sum) : 0;
    }
}

// Tiles of a strip at a depth, with scales and offsets: [fold][SIDE].
struct Strip {
    const char *at[2][FOLDS * 2];  // [panel][step]
    alignas(64) float scales[FOLDS * SIDE], offsets[FOLDS * SIDE];
    alignas(64) char held[2][FOLDS * 2][TILE];
};

// The words of one step of LANES outputs, and zeros behind `there` of them.
template <int BITS>
INLINE const char *step_tile(const int32_t *words, int count, int there, char *to) {
    if (BITS == 8 && there >= count) return (const char *)words;
    for (int i = 0; i < count; i++) {
        const __m512i word = i < there ? _mm512_loadu_si512(words + i * LANES) : _mm512_setzero_si512();
        if (BITS == 8) {
            _mm512_store_si512(to + i * TILE_BYTES, word);
            continue;
        }
        const __m512i upper = _mm512_set1_epi8((char)0xf0);
        _mm512_store_si512(to + 2 * i * TILE_BYTES, _mm512_and_si512(_mm512_slli_epi32(word, 4), upper));
        _mm512_store_si512(to + (2 * i + 1) * TILE_BYTES, _mm512_and_si512(word, upper));
    }
    return to;
}

template <int BITS, class S>
static void take_strip(const Product &p, int output, int word, const Depth &d, Strip &s) {
    constexpr int PARTS = 32 / BITS;
    const int groups = (p.inputs + p.group - 1) / p.group, panels = (p.outputs + LANES - 1) / LANES;
    for (int o = 0; o < SIDE; o += LANES) {
        const int side = o / LANES, found = output / LANES + side;
        const long panel = found < panels ? found : panels - 1;  // the last one again beyond the end: not used
        const int32_t *const words = p.values + (panel * p.words + word) * LANES;
        for (int k = 0; k < d.folds * d.of_fold; k++) {
            const int first = k * d.step / PARTS, count = d.step / PARTS;
            const int there = first < d.words ? d.words - first : 0;
            s.at[side][k] = step_tile<BITS>(words + (long)first * LANES, count, there, s.held[side][k]);
        }
        for (int f = 0; f < d.folds; f++) {
            const int g = (word * PARTS + f * p.fold) / p.group;
            const long from = (panel * groups + (g < groups ? g : groups - 1)) * LANES * S::bytes;
            const Floats scale = S::read((const char *)p.scales + from, 0);
            Floats offset = scale * (float)p.zero;
            if (p.offsets) offset += S::read((const char *)p.offsets + from, 0);
            store(s.scales + f * SIDE + o, scale), store(s.offsets + f * SIDE + o, offset);
        }
    }
}

// Adds a tile of rows, its record of a depth, times a strip to sums [16][SIDE]. The sums of a fold become floats
// while the tiles of the next are multiplied.
template <int BITS, bool SHIFTED>
static void multiply_tile(const char *x, const Depth &d, const Strip &s, bool fresh, float *to) {
    alignas(64) float found[TILE_ROWS * SIDE];
    alignas(64) int32_t sums[2][2 * TILE_ROWS * SIDE];
    const float *const known = (const float *)(x + d.tiles() * TILE);
    const auto end = [&](int f) {
        for (int r = 0; r < TILE_ROWS; r++)
            for (int j = 0; j < SIDE; j += W) {
                float *at = found + r * SIDE + j;
                Ints whole = digits_sum(sums[f % 2], SIDE, r, j);
                if (BITS == 4) whole = whole >> 4;  // the sum is one of numbers that are 16 times too large
                Floats y = f ? load(at) : Floats{};
                y += apart(__builtin_convertvector(whole, Floats) * load(s.scales + f * SIDE + j));
                if (SHIFTED) y += apart(load(s.offsets + f * SIDE + j) * known[(1 + f) * TILE_ROWS + r]);
                store(at, y);
            }
    };
    for (int f = 0; f < d.folds; f++) {
        const int k = f * d.of_fold;
        zero_sums();
        for (int i = k; i < k + d.of_fold; i++)
            add_tiles<TileDigits>(x + 2l * i * TILE, {s.at[0][i], s.at[1][i]}, 1, [] {});
        store_sums(sums[f % 2], SIDE * 4);
        if (f) end(f - 1);
    }
    end(d.folds - 1);
    for (int r = 0; r < TILE_ROWS; r++)
        for (int j = 0; j < SIDE; j += W) {
            float *at = to + r * SIDE + j;
            const Floats y = apart(load(found + r * SIDE + j) * known[r]);
            store(at, fresh ? y : load(at) + y);
        }
}

// Returns 0, 2 without memory for the rows, or 3 for an exception of the reference's tiles.
template <int BITS, class S>
static int many_rows(const Product &p) {
    static thread_local Scratch scratch;
    constexpr int PARTS = 32 / BITS;
    const int step = COLUMNS / p.fold * (p.fold / PARTS);  // words of a depth
    const int depths = (p.words + step - 1) / step;
    const Depth whole(p, step), last(p, p.words - (depths - 1) * step);
    const long of_tile = whole.record * (depths - 1) + last.record;
    const int tiles = (p.rows + OF_ROWS - 1) / OF_ROWS, strips = (p.outputs + SIDE - 1) / SIDE;
    char *const packed = (char *)scratch.get((size_t)tiles * of_tile);
    if (!packed) return 2;
    share(p.threads, tiles, 1, [&](int tile) {
        memset(packed + tile * of_tile, 0, of_tile);
        for (int n = 0; n < depths; n++)
            for (int r = 0; r < OF_ROWS && tile * OF_ROWS + r < p.rows; r++)
                pack_row<BITS>(p, tile * OF_ROWS + r, r, n * step * PARTS, n + 1 < depths ? whole : last,
                               packed + tile * of_tile + n * whole.record);
    });
    const int blocks = (tiles + BLOCK - 1) / BLOCK;
    std::atomic<int> wrong{0};
    in_pieces(p.threads, (long)blocks * strips, 1, [&](Pieces &pieces) {
        alignas(64) float sums[BLOCK * TILE_ROWS * SIDE];
        Strip strip;
        const Tiled tiled(whole.step);
        for (long at, stop; pieces.next(at, stop);)
            for (long work = at; work < stop; work++) {
                const int output = work % strips * SIDE, first = work / strips * BLOCK;
                const int beside = tiles - first < BLOCK ? tiles - first : BLOCK;
                for (int n = 0; n < depths; n++) {
                    const Depth &d = n + 1 < depths ? whole : last;
                    take_strip<BITS, S>(p, output, n * step, d, strip);
                    for (int tile = 0; tile < beside; tile++) {
                        const char *x = packed + (first + tile) * of_tile + n * whole.record;
                        float *to = sums + tile * TILE_ROWS * SIDE;
                        if (p.zero || p.offsets) multiply_tile<BITS, true>(x, d, strip, !n, to);
                        else multiply_tile<BITS, false>(x, d, strip, !n, to);
                    }
                }
                const int left = p.rows - first * OF_ROWS, rows = left < beside * OF_ROWS ? left : beside * OF_ROWS;
                const int count = p.outputs - output < SIDE ? p.outputs - output : SIDE;
                for (int r = 0; r < rows; r++) finish(p, first * OF_ROWS + r, sums + r * SIDE, nullptr, output, count);
            }
        if (tile_fault()) wrong = 3;
    });
    return wrong;
}

template <int BITS>
static int multiply(const Product &p) {
    if (p.scale_kind == FLOAT32) return many_rows<BITS, Float32>(p);
    return p.scale_kind == BFLOAT16 ? many_rows<BITS, BFloat16>(p) : many_rows<BITS, Float16>(p);
}
#endif

}  // namespace

// x of 16 bits, folds of 32 to 128 columns, in 16s; scratch is not used. Returns 0, 1 in a build without tiles, 2
// without memory for x, or 3 for an exception that tiles raised in the reference.
extern "C" int omnikv_tiled_integers(const Product *p) {
#if defined(HAS_TILES)
    return p->bits == 8 ? multiply<8>(*p) : multiply<4>(*p);
#else
    (void)p;
    return 1;
#endif
}
