// Rows of a prompt's chunk on their way through a mixture of experts: those of an expert are taken together, and
// what they become is added to them.
#include "rounding.h"
#include "team.h"

namespace {

constexpr long MANY = 1 << 15;  // numbers from which on a team shares them

struct Call {
    const char *x;         // [.., inputs]
    const int64_t *rows;   // [count]
    const float *shares;   // [count]
    char *out;             // see below
    int count, inputs, threads;
};

static int threads_of(const Call &c) { return (long)c.count * c.inputs > MANY ? c.threads : 1; }

// out [count, inputs]: the rows of x.
template <class K>
static int take(const Call &c) {
    const long bytes = (long)c.inputs * K::bytes;
    share(threads_of(c), c.count, 8, [&](long i) { memcpy(c.out + i * bytes, c.x + c.rows[i] * bytes, bytes); });
    return 0;
}

// out float32 [.., inputs]: row i of x, times its share, added to row rows[i]. No row is there twice.
template <class K>
static int add(const Call &c) {
    share(threads_of(c), c.count, 8, [&](long i) {
        const char *from = c.x + i * c.inputs * K::bytes;
        float *to = (float *)c.out + c.rows[i] * c.inputs;
        for (int j = 0; j < c.inputs; j += W) {
            const int left = c.inputs - j;
            const Floats before = read_some<Float32>(to, j, left);
            write_some<Float32>(to, j, left, before + c.shares[i] * read_some<K>(from, j, left));
        }
    });
    return 0;
}

}  // namespace

// Each returns 0, or 1 for a kind that this build lacks.
extern "C" int omnikv_take_expert_rows(const Call *c, int kind) {
#define TAKE(K) take<K>(*c)
    OF_KIND(kind, TAKE);
}

extern "C" int omnikv_add_expert_rows(const Call *c, int kind) {
#define ADD(K) add<K>(*c)
    OF_KIND(kind, ADD);
}

extern "C" int omnikv_sizeof_expert_rows_call() { return sizeof(Call); }
