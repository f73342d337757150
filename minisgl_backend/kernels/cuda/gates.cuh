// Gates of feed-forward blocks.

#pragma once

#include "basics.cuh"

// SiLU
__device__ __forceinline__ float opened(float gate, float value) {
    return __fdividef(gate, 1 + __expf(-gate)) * value;
}

// the gate of gpt-oss
__device__ __forceinline__ float opened(float gate, float value, float alpha, float limit) {
    gate = fminf(gate, limit), value = fminf(fmaxf(value, -limit), limit);
    return __fdividef(gate, 1 + __expf(-alpha * gate)) * (value + 1);
}
