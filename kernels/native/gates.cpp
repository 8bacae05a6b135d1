// The norm of each head of what a gated delta net reads, gated by silu(z) (kernels/recurrent/gates.py).
// Numbers are rounded where torch's operators round them.
#include <math.h>

#include "kinds.h"
#include "rounding.h"
#include "team.h"

namespace {

struct Call {
    const float *x;        // [batch, count, heads, size]
    const char *z;         // likewise, tokens `z_row` bytes apart; heads follow each other
    const char *weight;    // [size]: as z, or float32
    char *out;             // as x, in z's kind
    long z_batch, z_row;
    int batch, count, heads, size, wide, threads;  // wide: the weight is float32, and z is not
    float eps;
};

// V: the weight's kind; one of z's kind rounds its product, one of float32 does not.
template <class K, class V>
INLINE void gate_row(const float *x, const char *z, const char *weight, int size, float eps, char *out) {
    Floats squares = {};
    for (int i = 0; i < size; i += W) {
        const Floats value = Kept<K>::rounded(read_some<Float32>(x, i, size - i));
        squares += value * value;
    }
    const float scale = 1 / sqrtf(total(squares) / size + eps);
    for (int i = 0; i < size; i += W) {
        const int left = size - i;
        const Floats value = Kept<K>::rounded(read_some<Float32>(x, i, left));
        const Floats normed = Kept<K>::rounded(value * scale);
        const Floats scaled = Kept<V>::rounded(normed * read_some<V>(weight, i, left));
        write_some<K>(out, i, left, scaled * silu(read_some<K>(z, i, left)));
    }
}

template <class K>
static int gated_norm(const Call &c) {
    const long row = (long)c.size * K::bytes;
    share(c.count > 16 ? c.threads : 1, (long)c.batch * c.count, 4, [&](int token) {
        const char *z = c.z + token / c.count * c.z_batch + token % c.count * c.z_row;
        for (int head = 0; head < c.heads; head++) {
            const long at = (long)token * c.heads + head;
            const float *x = c.x + at * c.size;
            if (c.wide) gate_row<K, Float32>(x, z + head * row, c.weight, c.size, c.eps, c.out + at * row);
            else gate_row<K, K>(x, z + head * row, c.weight, c.size, c.eps, c.out + at * row);
        }
    });
    return 0;
}

}  // namespace

// Returns 0, or 1 for a kind that this build lacks.
extern "C" int omnikv_gated_norm(const Call *c, int kind) {
#define NORM(K) gated_norm<K>(*c)
    OF_KIND(kind, NORM);
}

extern "C" int omnikv_sizeof_gated_norm_call() { return sizeof(Call); }
