// What lies between the matrices of an MLP, or of an expert (kernels/experts/open.py).
#pragma once
#include "rounding.h"

namespace {

enum { SILU, GELU, CLAMPED, SQUARED };

struct Activation {
    int kind;
    float limit, alpha;
};

INLINE Floats sigmoid_of(Floats x) { return 1 / (1 + exponential(x < -88 ? all(88) : -x)); }

// Gates and ups that take turns in two vectors, apart.
INLINE void take_turns(Floats &gate, Floats &up) {
    float both[2 * W], gates[W], ups[W];
    store(both, gate), store(both + W, up);
    for (int i = 0; i < W; i++) gates[i] = both[2 * i], ups[i] = both[2 * i + 1];
    gate = load(gates), up = load(ups);
}

// What a gate and an up make, not yet rounded; SQUARED takes the gate alone. NaN stays NaN.
template <class K>
INLINE Floats acted(const Activation &a, Floats gate, Floats up) {
    if (a.kind == SQUARED) {
        const Floats positive = gate < 0 ? Floats{} : gate;
        return positive * positive;
    }
    if (a.kind == CLAMPED) {
        gate = gate > a.limit ? all(a.limit) : gate;
        up = up > a.limit ? all(a.limit) : up < -a.limit ? all(-a.limit) : up;
        return (up + 1) * (gate * sigmoid_of(gate * a.alpha));
    }
    // (1 + tanh(u)) / 2 is the sigmoid of 2 u
    const Floats turned = 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
    return Kept<K>::rounded(a.kind == GELU ? gate * sigmoid_of(turned) : silu(gate)) * up;
}

}  // namespace
