// A weight of floats as product.cpp takes it.
#pragma once

namespace {

struct Matrix {
    const void *weight, *bias;  // [outputs, inputs], [outputs] or NULL
    int kind, outputs, inputs;  // one of kinds.h
};

}  // namespace
