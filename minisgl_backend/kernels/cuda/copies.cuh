// The copies of a thread from global to shared memory (cp.async), for GPUs of compute capability 9 and later. Knows
// neither barriers nor the copy engine, which are in `hopper.cuh`.

#pragma once

#include "basics.cuh"

__device__ __forceinline__ void copy_16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
}

// writes zeros if `inside` is false
__device__ __forceinline__ void copy_16(u32 to, const void* from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}

// The same for what is rarely read twice in a launch. So it leaves the L2 cache first, and what kernels write for each
// other stays there.
__device__ __forceinline__ void copy_16_once(u32 to, const void* from, bool inside) {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;"
                 :: "r"(to), "l"(from), "r"(inside ? 16 : 0), "l"(policy) : "memory");
}

__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// The copies since the last call are a group.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// waits for all groups of this thread but the last `AFTER`
template <int AFTER>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" :: "n"(AFTER) : "memory");
}
