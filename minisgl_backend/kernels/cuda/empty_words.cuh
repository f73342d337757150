// How the thread blocks of a launch hand each other numbers without fences and counters, which would also wait for all
// the thread block's other memory accesses. A float32 word is EMPTY until it is written, and its reader makes it EMPTY
// again. Accesses are relaxed, since the words need no order: each word itself says whether it is there.

#pragma once

#include "basics.cuh"

constexpr u32 EMPTY = 0xffffffffu;           // a NaN that `written` never returns

// x, but with EMPTY replaced by another NaN: its reader would wait for it forever
__device__ __forceinline__ float written(float x) {
    return __uint_as_float(min(__float_as_uint(x), EMPTY - 1));
}

__device__ __forceinline__ float load_word(const float* p) {
    float out;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(out) : "l"(p) : "memory");
    return out;
}

__device__ __forceinline__ void store_word(float* p, float x) {
    asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" :: "l"(p), "f"(x) : "memory");
}

__device__ __forceinline__ float4 load_quad(const float4* p) {
    float4 out;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(out.x), "=f"(out.y), "=f"(out.z), "=f"(out.w) : "l"(p) : "memory");
    return out;
}

__device__ __forceinline__ void store_quad(float4* p, float4 quad) {
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1,%2,%3,%4};"
                 :: "l"(p), "f"(quad.x), "f"(quad.y), "f"(quad.z), "f"(quad.w) : "memory");
}
