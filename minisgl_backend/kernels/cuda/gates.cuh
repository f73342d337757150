// The experts' gate. The including source defines CLAMPED (gpt-oss's gate; otherwise SiLU).

#pragma once

#include "basics.cuh"

__device__ __forceinline__ float opened(float gate, float value, float alpha, float limit) {
    if (!CLAMPED) return __fdividef(gate, 1 + __expf(-gate)) * value;
    gate = fminf(gate, limit), value = fminf(fmaxf(value, -limit), limit);
    return __fdividef(gate, 1 + __expf(-alpha * gate)) * (value + 1);
}
