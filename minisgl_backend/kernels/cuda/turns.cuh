// How a kernel tells its successor, while both run, that its own predecessors have ended (sm_90a).
//
// A GEMM with adapters follows the kernel that computes x A^T, but needs x before x A^T. If it waited for the end of
// that kernel, it would start to multiply late. So the kernel before it takes a turn as it begins, and announces the
// turn once x is there; the GEMM waits for the announcement, and only later for the kernel's end.
//
// A GEMM finds out which turn is that of its own predecessor: it starts after all thread blocks of this predecessor
// have allowed it to, and reads the turn before it allows its own successor to start. Nothing needs to be cleared.

#pragma once

#include "basics.cuh"

// turns[0]: the turns taken so far; turns[1]: the last one that was announced

// Called by one thread of the grid, before it allows the successor to start.
__device__ __forceinline__ u32 take_turn(u32* turns) {
    u32 turn;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(turn) : "l"(turns) : "memory");
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(turns), "r"(++turn) : "memory");
    __threadfence();
    return turn;
}

// Called by the same thread, once all kernels before this one have ended.
__device__ __forceinline__ void announce_turn(u32* turns, u32 turn) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" :: "l"(turns + 1), "r"(turn) : "memory");
}

// The turn of the kernel before this one.
__device__ __forceinline__ u32 current_turn(const u32* turns) {
    u32 turn;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(turn) : "l"(turns) : "memory");
    return turn;
}

// What kernels before the announcing one wrote is visible then, also to the bulk copies of this thread.
__device__ __forceinline__ void wait_for_turn(const u32* turns, u32 turn) {
    u32 announced;
    do asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(announced) : "l"(turns + 1) : "memory");
    while ((int)(announced - turn) < 0);
    __threadfence();
    asm volatile("fence.proxy.async.global;" ::: "memory");
}
