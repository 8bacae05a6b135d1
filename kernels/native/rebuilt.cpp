// Attention of a query to rows that are held, to rows whose keys are made of coefficients in a basis and
// turned to where they stand, and to the newest (kernels/sketch/rebuilt.py).
#include "attention.h"
#include "rounding.h"
#include "scratch.h"
#include "team.h"
#include "turn.h"

namespace {

struct Rebuilt {  // strides in bytes, but for lists and float32: elements
    const float *q;  // [heads * group][dim]
    const char *held_k, *held_v;
    long held_key_head, held_key_row, held_value_head, held_value_row;
    const char *coefficients;  // [..][rank]
    long coefficient_row;
    const float *basis;  // [rank][heads][dim]
    const int32_t *chunks;  // [heads][count]: each of `chunk` rows in turn
    long chunk_head;
    const float *cos, *sin;  // [heads][count * chunk][pairs]
    const char *v;
    long value_head, value_row;
    const char *tail_k, *tail_v;
    long tail_key_head, tail_key_row, tail_value_head, tail_value_row;
    float *out, *lse;  // [heads * group][dim] and [heads * group]
    int heads, group, dim, held, rank, chunk, count, pairs, tail, threads;
    int in_turn;  // whether v has the rows of the chosen chunks alone, in turn
    float scale, cap;
};

constexpr int ROWS = W == 16 ? 8 : 4;  // whose sums fit the registers
constexpr int WIDE = 2;                // vectors of a panel of the basis

// Rows of coefficients [T][stride] times a panel [rank][C * W]: out [T][dim].
template <int T, int C>
INLINE void multiply(const float *coefficients, long stride, const float *panel, int rank, int dim, float *out) {
    Floats sums[T][C] = {};
    for (int p = 0; p < rank; p++) {
        Floats b[C];
        for (int c = 0; c < C; c++) b[c] = load(panel + (p * C + c) * W);
        for (int t = 0; t < T; t++)
            for (int c = 0; c < C; c++) sums[t][c] += b[c] * coefficients[t * stride + p];
    }
    for (int t = 0; t < T; t++)
        for (int c = 0; c < C; c++) store(out + (long)t * dim + c * W, sums[t][c]);
}

template <int C>
INLINE void multiply_rows(const float *rows, int count, const float *panel, int rank, int dim, float *out) {
    int t = 0;
    for (; t + ROWS <= count; t += ROWS)
        multiply<ROWS, C>(rows + (long)t * rank, rank, panel, rank, dim, out + (long)t * dim);
    for (; t + 2 <= count; t += 2)
        multiply<2, C>(rows + (long)t * rank, rank, panel, rank, dim, out + (long)t * dim);
    for (; t < count; t++)
        multiply<1, C>(rows + (long)t * rank, rank, panel, rank, dim, out + (long)t * dim);
}

// A head's columns of the basis, panel by panel.
void pack(const Rebuilt &c, int head, float *panels) {
    for (int d = 0; d < c.dim;) {
        const int wide = d + WIDE * W <= c.dim ? WIDE * W : W;
        for (int p = 0; p < c.rank; p++, panels += wide)
            memcpy(panels, c.basis + ((long)p * c.heads + head) * c.dim + d, sizeof(float) * wide);
        d += wide;
    }
}

// A row as floats, turned to where it stands, in the dtype of rows.
template <class K>
INLINE void turn(const float *cos, const float *sin, int pairs, int dim, float *row, char *to) {
    turn_pairs(cos, sin, pairs, row);
    for (int d = 0; d < dim; d += W) write_some<K>(to, d, W, load(row + d));
}

// What a head needs of memory.
struct Room {
    float *panels, *coefficients, *rows;
    char *keys;
    static long floats(const Rebuilt &c) {
        const long rows = (long)c.count * c.chunk;
        return (long)c.rank * (c.dim + c.chunk) + 2 * rows * c.dim + 64;
    }
    Room(const Rebuilt &c, float *at) {
        panels = at, coefficients = panels + (long)c.rank * c.dim;
        rows = coefficients + (long)c.rank * c.chunk;
        keys = (char *)(rows + (long)c.count * c.chunk * c.dim);
    }
};

// Keys of the chosen chunks, in turn.
template <class K>
void rebuild(const Rebuilt &c, int head, const Room &room) {
    pack(c, head, room.panels);
    const int32_t *chunks = c.chunks + head * c.chunk_head;
    for (int i = 0; i < c.count; i++) {
        const char *from = c.coefficients + (long)chunks[i] * c.chunk * c.coefficient_row;
        for (int t = 0; t < c.chunk; t++)
            for (int p = 0; p < c.rank; p += W)
                write_some<Float32>(room.coefficients + (long)t * c.rank, p, c.rank - p,
                                    read_some<K>(from + t * c.coefficient_row, p, c.rank - p));
        float *rows = room.rows + (long)i * c.chunk * c.dim;
        const float *panel = room.panels;
        for (int d = 0; d < c.dim;) {
            const int vectors = d + WIDE * W <= c.dim ? WIDE : 1;
            if (vectors == WIDE) multiply_rows<WIDE>(room.coefficients, c.chunk, panel, c.rank, c.dim, rows + d);
            else multiply_rows<1>(room.coefficients, c.chunk, panel, c.rank, c.dim, rows + d);
            panel += (long)c.rank * vectors * W, d += vectors * W;
        }
        for (int t = 0; t < c.chunk; t++) {
            const long row = (long)i * c.chunk + t, angle = ((long)head * c.count * c.chunk + row) * c.pairs;
            turn<K>(c.cos + angle, c.sin + angle, c.pairs, c.dim, rows + (long)t * c.dim,
                    room.keys + row * c.dim * K::bytes);
        }
    }
}

// Where a head's rows first .. lie: held ones, rebuilt ones, the newest.
template <class K>
void list(const Rebuilt &c, int head, const Room &room, int first, int all_rows, Block &block) {
    const int chosen = c.count * c.chunk, left = all_rows - first;
    const int32_t *chunks = c.chunks + head * c.chunk_head;
    block.first = first, block.count = left < BLOCK ? left : BLOCK;
    for (int i = 0; i < listed(block.count); i++) {
        const int row = first + i < all_rows ? first + i : all_rows - 1, own = row - c.held, new_row = own - chosen;
        if (own < 0) {
            block.keys[i] = c.held_k + head * c.held_key_head + row * c.held_key_row;
            block.values[i] = c.held_v + head * c.held_value_head + row * c.held_value_row;
        } else if (new_row < 0) {
            const long lies = c.in_turn ? own : (long)chunks[own / c.chunk] * c.chunk + own % c.chunk;
            block.keys[i] = room.keys + (long)own * c.dim * K::bytes;
            block.values[i] = c.v + head * c.value_head + lies * c.value_row;
        } else {
            block.keys[i] = c.tail_k + head * c.tail_key_head + new_row * c.tail_key_row;
            block.values[i] = c.tail_v + head * c.tail_value_head + new_row * c.tail_value_row;
        }
    }
}

template <class K, int T>
void meet(const Rebuilt &c, const Block &block, int all_rows, const float *q, float *out, float *best, float *sum) {
    int limit[T];
    for (int r = 0; r < T; r++) limit[r] = all_rows;
    attend_tile<K, K, T>(q, block, c.dim, c.scale, c.cap, nullptr, limit, out, best, sum, nullptr, 0);
}

template <class K>
void attend_rebuilt(const Rebuilt &c, int head, const Room &room) {
    const int all_rows = c.held + c.count * c.chunk + c.tail;
    const long at = (long)head * c.group;
    float *out = c.out + at * c.dim, *best = c.lse + at, sums[128];
    memset(out, 0, sizeof(float) * c.group * c.dim);
    for (int g = 0; g < c.group; g++) best[g] = -INFINITY, sums[g] = 0;
    rebuild<K>(c, head, room);
    Block block;
    for (int first = 0; first < all_rows; first += BLOCK) {
        list<K>(c, head, room, first, all_rows, block);
        int g = 0;
        for (; g + 4 <= c.group; g += 4)
            meet<K, 4>(c, block, all_rows, c.q + (at + g) * c.dim, out + g * c.dim, best + g, sums + g);
        for (; g + 2 <= c.group; g += 2)
            meet<K, 2>(c, block, all_rows, c.q + (at + g) * c.dim, out + g * c.dim, best + g, sums + g);
        for (; g < c.group; g++)
            meet<K, 1>(c, block, all_rows, c.q + (at + g) * c.dim, out + g * c.dim, best + g, sums + g);
    }
    for (int g = 0; g < c.group; g++) {
        for (int d = 0; d < c.dim; d += W) store(out + g * c.dim + d, load(out + g * c.dim + d) / sums[g]);
        best[g] += logf(sums[g]);
    }
}

template <class K>
int all_rebuilt(const Rebuilt &c) {
    static thread_local Scratch scratch;
    if (c.group > 128) return 1;
    const long each = Room::floats(c);
    float *memory = (float *)scratch.get(sizeof(float) * each * c.heads);
    if (!memory) return 2;
    share(c.threads, c.heads, 1, [&](int head) { attend_rebuilt<K>(c, head, Room(c, memory + head * each)); });
    return 0;
}

}  // namespace

// kind: of kinds.h, of all rows. Returns 0, 1 for a kind that this build lacks, or 2 without memory.
extern "C" int omnikv_attend_rebuilt(const Rebuilt *c, int kind) {
#define ATTEND_REBUILT(K) all_rebuilt<K>(*c)
    OF_KIND(kind, ATTEND_REBUILT);
}

extern "C" int omnikv_sizeof_rebuilt() { return sizeof(Rebuilt); }
