// Activations of feed-forward blocks: gates, and the square of ReLU of blocks without them.

#pragma once

#include "basics.cuh"

// Values of the macro GATE. CLAMPED is that of gpt-oss, LIMITED that of Ling 3.0, BOUNDED that of Hy4; GELU is
// approximated by tanh. SQUARED_RELU is no gate: unless GATED, it applies to the values.
enum { SILU, CLAMPED, GELU, SQUARED_RELU, LIMITED, BOUNDED };

// `value` behind a gate. `alpha`, only if CLAMPED, is of the sigmoid. `limit` is of both gate and value: after the
// sigmoid if LIMITED, before it otherwise.
template <int KIND>
__device__ __forceinline__ float opened(float gate, float value, float alpha = 0, float limit = 0) {
    if (KIND == CLAMPED || KIND == BOUNDED) gate = fminf(gate, limit);
    if (KIND == CLAMPED || KIND == LIMITED || KIND == BOUNDED) value = fminf(fmaxf(value, -limit), limit);
    const float slope = KIND == CLAMPED ? alpha
        : KIND == GELU ? 1.5957691216f * (1 + 0.044715f * gate * gate)   // (1 + tanh(x)) / 2 = sigmoid(2 x)
                       : 1;
    const float open = __fdividef(gate, 1 + __expf(-slope * gate));
    return (KIND == LIMITED ? fminf(open, limit) : open) * (KIND == CLAMPED ? value + 1 : value);
}

// `value` without a gate
template <int KIND>
__device__ __forceinline__ float opened(float value) {
    if (KIND != SQUARED_RELU) return value;
    const float positive = value < 0 ? 0 : value;   // NaN stays
    return positive * positive;
}
