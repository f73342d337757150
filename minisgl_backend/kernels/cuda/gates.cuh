// Activations of feed-forward blocks: gates, and the square of ReLU of blocks without them.

#pragma once

#include "basics.cuh"

// Values of the macro GATE. CLAMPED is that of gpt-oss; GELU is approximated by tanh. SQUARED_RELU is no gate: unless
// GATED, it applies to the values.
enum { SILU, CLAMPED, GELU, SQUARED_RELU };

// `value` behind a gate. Only if CLAMPED: `alpha` is of the sigmoid, and `limit` of both gate and value.
template <int KIND>
__device__ __forceinline__ float opened(float gate, float value, float alpha = 0, float limit = 0) {
    if (KIND == CLAMPED) gate = fminf(gate, limit), value = fminf(fmaxf(value, -limit), limit);
    const float slope = KIND == CLAMPED ? alpha
        : KIND == GELU ? 1.5957691216f * (1 + 0.044715f * gate * gate)   // (1 + tanh(x)) / 2 = sigmoid(2 x)
                       : 1;
    return __fdividef(gate, 1 + __expf(-slope * gate)) * (KIND == CLAMPED ? value + 1 : value);
}

// `value` without a gate
template <int KIND>
__device__ __forceinline__ float opened(float value) {
    if (KIND != SQUARED_RELU) return value;
    const float positive = value < 0 ? 0 : value;   // NaN stays
    return positive * positive;
}
