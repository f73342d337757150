// Fragments of matrices in the registers of a warp: how they are loaded from shared memory, transposed and multiplied,
// and how the pairs of numbers that they consist of are made. For GPUs of compute capability 9 and later. Nothing here
// knows what the matrices are. The MMAs of warpgroups are in `wide_mma.cuh` and `tile_gemm.cuh`.

#pragma once

#include "basics.cuh"

// ---- pairs

// two numbers as bfloat16
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

__device__ __forceinline__ u32 pack_float16(float low, float high) {
    u32 out;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

__device__ __forceinline__ float from_float16(u16 x) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(x));
    return out;
}

// two numbers as float8 (e4m3); larger ones become the largest
__device__ __forceinline__ u16 pack_float8(float low, float high) {
    u16 out;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
    return out;
}

// two pairs of float8 (e4m3) -> two pairs of float16
__device__ __forceinline__ void widen(u32& low, u32& high, u32 word) {
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }"
        : "=r"(low), "=r"(high) : "r"(word));
}

// ---- fragments

// four matrices of 8 x 8; lanes 0 to 7 have the addresses of the rows of the first one, and so on
template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(u32 (&to)[4], u32 from) {
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}

// for numbers that are wider in registers than in memory, which each lane loads for itself
template <int WORDS>
__device__ __forceinline__ void load_words(u32* to, u32 from) {
    static_assert(WORDS == 2 || WORDS == 4, "");
    if constexpr (WORDS == 4)
        asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
    else
        asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(from) : "memory");
}

// turns a fragment of 8 x 8 into that of the transposed matrix
__device__ __forceinline__ u32 transposed(u32 fragment) {
    u32 out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(fragment));
    return out;
}

// c += 16 rows of a times 8 rows of b, over 16 numbers, by one warp
__device__ __forceinline__ void add_product(
    float* c, u32 a, u32 a_8, u32 a_next, u32 a_8_next, u32 b, u32 b_next) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a), "r"(a_8), "r"(a_next), "r"(a_8_next), "r"(b), "r"(b_next));
}

// the same for float16
__device__ __forceinline__ void add_product_float16(
    float* c, u32 a, u32 a_8, u32 a_next, u32 a_8_next, u32 b, u32 b_next) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a), "r"(a_8), "r"(a_next), "r"(a_8_next), "r"(b), "r"(b_next));
}
