// A mixture of experts for a few rows, as experts.cpp takes it.
#pragma once
#include "activation.h"
#include "matrix.h"
#include "panels.h"

namespace {

struct Mixture {
    const Matrix *router;               // [count, hidden], with its bias
    const Matrix *const *first, *const *last;  // of each expert
    const Product *const *few_first, *const *few_last;  // in place of those, in few bits, or NULL
    const float *correction, *factors;  // [count] or NULL: added to the sigmoids that rank; of shares
    int count, per_token, normalise;
    Activation acts;
};

struct MixtureCall {
    const Mixture *mixture;
    const char *x, *routed, *residual;  // [rows, hidden]; what the router reads; or NULL
    char *out;                          // [rows, hidden]
    const int64_t *numbers;             // [rows, per_token]: what was chosen elsewhere, or NULL
    const float *shares;                // likewise, of those
    int rows, threads;                  // rows: at most MOST
};

}  // namespace
