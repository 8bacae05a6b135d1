// What a layer does beside its products and attention: the norm where no product of ours follows it, in a
// decode step the rotation of q and k with the store of K, V and the queries before rotation, for a prompt's
// chunk the rotation alone, what lies between gate, up and down, and rows that are copied.
#include "activation.h"
#include "norm.h"
#include "rotation.h"
#include "team.h"
#include "transform.h"

extern "C" void omnikv_pack(const float *x, long rows, int dim, int width, int kind, int threads, uint8_t *out);

namespace {

constexpr int LONGEST = 1024;  // elements of a packed row

constexpr long MANY = 1 << 16;  // numbers from which on a team shares them

template <class K>
static void normalize(const char *x, const char *weight, char *out, int rows, int size, float eps,
                      Wide wide) {
    for (int r = 0; r < rows; r++, x += (long)size * K::bytes, out += (long)size * K::bytes) {
        const float scale = norm_scale<K>(x, size, eps);
        for (int i = 0; i < size; i += W)
            write_some<K>(out, i, size - i, normed<K>(x, weight, i, size - i, scale, wide));
    }
}

template <class K>
static void normalize_rows(const char *x, const char *weight, char *out, int rows, int size, float eps,
                           Wide wide, int threads) {
    share(rows * (long)size > MANY ? threads : 1, rows, 8, [&](long r) {
        const long at = r * size * K::bytes;
        normalize<K>(x + at, weight, out + at, 1, size, eps, wide);
    });
}

// Rows divided by their root mean square, in place.
template <class K>
static void make_unit(char *x, int rows, int size, float eps) {
    for (int r = 0; r < rows; r++, x += (long)size * K::bytes) {
        const float scale = norm_scale<K>(x, size, eps);
        for (int i = 0; i < size; i += W) write_some<K>(x, i, size - i, read_some<K>(x, i, size - i) * scale);
    }
}

// The pairs (i, i + pairs) turned, in float32, as torch rounds; what lies behind them stays.
template <class K>
INLINE void turn(const char *head, const float *cos, const float *sin, int pairs, int dim, char *out) {
    for (int i = 0; i < pairs; i += W) {
        const int count = pairs - i;
        const Floats c = read_some<Float32>(cos, i, count), s = read_some<Float32>(sin, i, count);
        const Floats first = read_some<K>(head, i, count), second = read_some<K>(head, pairs + i, count);
        write_some<K>(out, i, count, apart(first * c) - apart(second * s));
        write_some<K>(out, pairs + i, count, apart(second * c) + apart(first * s));
    }
    memcpy(out + 2 * pairs * K::bytes, head + 2 * pairs * K::bytes, (dim - 2 * pairs) * K::bytes);
}

// A row of K or of V in few bits (kernels/rows/forms.py), of at most LONGEST elements in whole vectors.
template <class K>
static void pack(const Rotation &c, const char *row, bool key, char *to) {
    alignas(64) float wide[LONGEST];
    for (int i = 0; i < c.dim; i += W) store(wide + i, K::read(row, i));
    const bool four = c.packed == INT4;
    if (key || four) omnikv_transform(wide, 1, c.dim, run_of(c.dim), row_factor(c.dim), 1, wide);
    const int kind = !four ? c.packed : key ? INT4_KEYS : INT4_VALUES;
    omnikv_pack(wide, 1, c.dim, key ? c.key_bytes : c.value_bytes, kind, 1, (uint8_t *)to);
}

// Stores K, turned, and V of one head at rows of the bank.
template <class K>
static void keep(const Rotation &c, const char *head, const float *cos, const float *sin, char *k, char *v) {
    const long size = (long)c.dim * K::bytes, both = c.kv_heads * size;
    if (!c.packed) {
        turn<K>(head, cos, sin, c.pairs, c.dim, k);
        if (v) memcpy(v, head + both, size);
        return;
    }
    alignas(64) char turned[LONGEST * K::bytes];
    turn<K>(head, cos, sin, c.pairs, c.dim, turned);
    pack<K>(c, turned, true, k);
    if (v) pack<K>(c, head + both, false, v);
}

template <class K>
static void rotate_store(const Rotation &c) {
    const long size = (long)c.dim * K::bytes, all_heads = c.heads + (c.v ? 2 : 1) * c.kv_heads;
    for (int token = 0; token < c.batch * c.queries; token++) {
        const int b = token / c.queries;
        const long at = c.positions[token];
        const float *cos = c.cos + (long)token * c.pairs, *sin = c.sin + (long)token * c.pairs;
        char *head = c.qkv + token * all_heads * size, *k_heads = head + c.heads * size;
        if (c.q_norm) {
            normalize<K>(head, c.q_norm, head, c.heads, c.dim, c.eps, c.wide);
            if (c.k_norm) normalize<K>(k_heads, c.k_norm, k_heads, c.kv_heads, c.dim, c.eps, c.wide);
        }
        if (c.unit) make_unit<K>(k_heads + c.kv_heads * size, c.kv_heads, c.dim, c.eps);
        memcpy(c.ring + (b * (long)c.slots + at % c.slots) * c.heads * size, head, c.heads * size);
        char *out = c.out + token * c.heads * size;
        for (; head < k_heads; head += size, out += size) turn<K>(head, cos, sin, c.pairs, c.dim, out);
        const long row = c.count ? c.first + at % c.count : at;
        for (int h = 0; h < c.kv_heads; h++, head += size) {
            char *k = c.k + b * c.key_batch + h * c.key_head + row * c.key_row;
            char *v = c.v ? c.v + b * c.value_batch + h * c.value_head + row * c.value_row : nullptr;
            keep<K>(c, head, cos, sin, k, v);
            if (!c.count) continue;
            memcpy(k + c.count * c.key_row, k, c.packed ? c.key_bytes : size);
            if (v) memcpy(v + c.count * c.value_row, v, c.packed ? c.value_bytes : size);
        }
    }
}

struct Rows {
    char *qkv;               // [tokens, all, dim]; q and k are normed in place
    const float *cos, *sin;  // [angles, pairs], again for the next `angles` tokens
    char *out;               // [tokens, heads + kv_heads, dim]: rotated q and k
    int tokens, angles, all, heads, kv_heads, dim, pairs, threads;
    float eps;
    const char *q_norm, *k_norm;  // as in Rotation
    Wide wide;
};

template <class K>
static void rotate_rows(const Rows &c) {
    const long size = (long)c.dim * K::bytes, turned = c.heads + c.kv_heads;
    share(c.tokens * turned * c.dim > MANY ? c.threads : 1, c.tokens, 8, [&](long token) {
        const long angle = token % c.angles * c.pairs;
        char *head = c.qkv + token * c.all * size, *out = c.out + token * turned * size;
        if (c.q_norm) {
            normalize<K>(head, c.q_norm, head, c.heads, c.dim, c.eps, c.wide);
            char *k_heads = head + c.heads * size;
            if (c.kv_heads) normalize<K>(k_heads, c.k_norm, k_heads, c.kv_heads, c.dim, c.eps, c.wide);
        }
        for (long h = 0; h < turned; h++, head += size, out += size)
            turn<K>(head, c.cos + angle, c.sin + angle, c.pairs, c.dim, out);
    });
}

// What lies between gate, up and down: rows [inputs] -> out [inputs / 2], or [inputs] where there is no gate.
template <class K>
static void act_rows(const char *made, char *out, const Activation &a, int rows, int inputs, int threads) {
    const bool turns = a.kind == CLAMPED, alone = a.kind == SQUARED;
    const int width = alone ? inputs : inputs / 2;
    share(rows * (long)width > MANY ? threads : 1, rows, 4, [&](long r) {
        const char *from = made + r * inputs * K::bytes;
        for (int i = 0; i < width; i += W) {
            const int left = width - i;
            Floats gate = read_some<K>(from, turns ? 2 * i : i, turns ? 2 * left : left), up = {};
            if (turns && 2 * left > W) up = read_some<K>(from, 2 * i + W, 2 * left - W);
            if (turns) take_turns(gate, up);
            else if (!alone) up = read_some<K>(from, width + i, left);
            write_some<K>(out + r * width * K::bytes, i, left, acted<K>(a, gate, up));
        }
    });
}

// out [count] = x + part * factor, each rounded where torch rounds it.
template <class K>
static void add_scaled(const char *x, const char *part, float factor, char *out, int count) {
    for (int i = 0; i < count; i += W) {
        const int left = count - i;
        Floats added = read_some<K>(part, i, left);
        if (factor != 1) added = Kept<K>::rounded(apart(added * factor));
        write_some<K>(out, i, left, read_some<K>(x, i, left) + added);
    }
}

struct Copy {
    char *to;
    const char *from;
    long to_steps[3], from_steps[3];  // in bytes: from batch to batch, head to head and row to row
    int batch, heads, rows, bytes, threads;  // bytes: of a row
};

static void copy_rows(const Copy &c) {
    const long all = (long)c.batch * c.heads * c.rows;
    share(all * c.bytes > 2 * MANY ? c.threads : 1, all, 64, [&](long i) {
        const long at[] = {i / c.rows / c.heads, i / c.rows % c.heads, i % c.rows};
        long to = 0, from = 0;
        for (int n = 0; n < 3; n++) to += at[n] * c.to_steps[n], from += at[n] * c.from_steps[n];
        memcpy(c.to + to, c.from + from, c.bytes);
    });
}

}  // namespace

// x [rows, size] times weight [size] -> out; kinds of kinds.h. Returns 0, or 1 for a kind that
// this build lacks; so do the next.
extern "C" int omnikv_normalize(const char *x, const char *weight, char *out, int kind, int rows, int size,
                                float eps, int wide, float offset, int threads) {
#define NORMALIZE(K) (normalize_rows<K>(x, weight, out, rows, size, eps, Wide{wide, offset}, threads), 0)
    OF_KIND(kind, NORMALIZE);
}

extern "C" int omnikv_rotate_store(const Rotation *c, int kind) {
#define ROTATE(K) (rotate_store<K>(*c), 0)
    OF_KIND(kind, ROTATE);
}

extern "C" int omnikv_rotate_rows(const Rows *c, int kind) {
#define ROTATE_ROWS(K) (rotate_rows<K>(*c), 0)
    OF_KIND(kind, ROTATE_ROWS);
}

extern "C" int omnikv_act_rows(const char *made, char *out, int kind, int rows, int inputs, int threads, int activation,
                               float limit, float alpha) {
    const Activation a = {activation, limit, alpha};
#define ACT(K) (act_rows<K>(made, out, a, rows, inputs, threads), 0)
    OF_KIND(kind, ACT);
}

extern "C" int omnikv_add_scaled(const char *x, const char *part, float factor, char *out, int kind, int count) {
#define ADD_SCALED(K) (add_scaled<K>(x, part, factor, out, count), 0)
    OF_KIND(kind, ADD_SCALED);
}

extern "C" void omnikv_copy_rows(const Copy *c) { copy_rows(*c); }

extern "C" int omnikv_sizeof_step_copy() { return sizeof(Copy); }
extern "C" int omnikv_sizeof_step_rows() { return sizeof(Rows); }
extern "C" int omnikv_sizeof_step_call() { return sizeof(Rotation); }
