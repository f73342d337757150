// How the thread blocks of a launch hand each other words without fences and counters. Each word is followed by the
// number of its launch, by which a reader knows that it is there, and nothing needs to be cleared. (`empty_words.cuh`
// takes half the memory, but its readers have to clear.) Both are written at once, and accesses are relaxed.

#pragma once

#include "basics.cuh"

// two words with their numbers, which another thread block may be writing
__device__ __forceinline__ uint4 load_numbered(const void* from) {
    uint4 out;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w) : "l"(from) : "memory");
    return out;
}

__device__ __forceinline__ void store_numbered(uint2* to, u32 word, u32 launch) {
    asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" :: "l"(to), "r"(word), "r"(launch) : "memory");
}
