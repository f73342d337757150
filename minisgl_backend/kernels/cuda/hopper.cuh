// The Hopper (sm_90a) instructions that the GEMMs here share: barriers, bulk copies and announced copies in shared
// memory, addresses in the shared memory of other thread blocks, descriptors of matrices, and register lists and waits
// for the MMAs of warpgroups. Nothing here knows about tiles or rings. The MMAs of warpgroups are where their sizes are
// known (`tile_gemm.cuh`, `wide_mma.cuh`), those of a warp in `fragments.cuh`.

#pragma once

#include "basics.cuh"
#include "copies.cuh"
#include "fragments.cuh"

struct __align__(64) TensorMap { u64 words[16]; };

__device__ __forceinline__ void init_barrier(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void expect_bytes(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait_barrier(u32 barrier, u32 parity) {
    u32 done;
    do {
        asm volatile("{ .reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.b32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    } while (!done);
}

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

__device__ __forceinline__ void load_bytes(u32 to, const void* from, u32 count, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(to), "l"(from), "r"(count), "r"(barrier) : "memory");
}

// arrives once this thread's copies are there
__device__ __forceinline__ void arrive_copied(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(barrier) : "memory");
}

// where an address of this thread block's shared memory is in another thread block of the cluster
__device__ __forceinline__ u32 in_block(u32 address, u32 block) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
    return there;
}

// Makes what cp.async has written, and a barrier has announced, visible to the tensor cores.
__device__ __forceinline__ void see_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// the descriptor of a tile whose rows are 128 bytes, their 16-byte chunks permuted by the row ("128B swizzle")
__device__ __forceinline__ u64 matrix(u32 address) {
    return (u64)((address & 0x3ffff) >> 4) | 1ull << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

// for the text of an MMA: the registers %[tens]0 to %[tens]9; and 4 or 16 operands from c[i] on
#define TEN(tens) "%" #tens "0,%" #tens "1,%" #tens "2,%" #tens "3,%" #tens "4,%" #tens "5,%" \
    #tens "6,%" #tens "7,%" #tens "8,%" #tens "9,"
#define C4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define C16(i) C4(i), C4(i + 4), C4(i + 8), C4(i + 12)

__device__ __forceinline__ void begin_mma() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void end_mma() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int AFTER>
__device__ __forceinline__ void wait_mma() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(AFTER) : "memory");
}

__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// ---- clusters

// ORDERED: writes before the arrival are visible after the wait
template <bool ORDERED>
__device__ __forceinline__ void arrive_in_cluster() {
    if (ORDERED)
        asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    else
        asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void wait_for_cluster() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
