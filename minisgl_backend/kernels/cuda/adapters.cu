// x A^T of LoRA adapters for the few tokens of a step, which a GEMM of `linear.cu` then multiplies by B^T (sm_90a).
//
// A thread block multiplies up to 16 tokens of one adapter by 16 rows of its A. The thread blocks of a cluster share
// the in_features, and the first one adds up the sums of all, over their shared memory. So sums are complete, and the
// same in every launch. Thread blocks are small, so that they run beside those of GEMMs, which take most of the shared
// memory.
//
// A, and which tokens have which adapter, were there before the step, so they are read before the wait for x. If the
// GEMM itself only starts once x is there, its weight is meanwhile fetched from memory to the L2 cache.

#include "hopper.cuh"

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / 32;
constexpr int STEP = 16;        // rows of A, and tokens, per thread block
constexpr int PIECE = 128;      // in_features that a warp multiplies at a time
constexpr int PITCH = STEP + 4; // floats per token in shared memory; the stores of a warp use all banks
constexpr int MOST_PARTS = 8;   // thread blocks per cluster
constexpr int SUMS = STEP * STEP / THREADS;
constexpr int FETCHED = 4096;   // bytes that a thread asks for at a time

static_assert(SUMS == 2, "");

// See `kernels.adapters`. A block is a set of tokens of one adapter; `order` lists the tokens of all blocks.
struct Arguments {
    u16* inner;             // [num_rows, columns]: x A^T; 0 beyond the rank of a token's adapter; nothing is written
                            // for tokens without an adapter
    const u16* x;           // [num_rows, size]
    const u16* a;           // [slots, columns, size]
    const int* order;       // [num_rows]
    const int* blocks;      // [num_blocks, 4]: slot, rank, and where its part of `order` begins and ends
    u64 slot_stride;        // of A
    int x_stride;
    int columns;            // projections * max_rank
    int max_rank;
    int size;               // in_features, a multiple of PIECE
    int early;              // the next kernel may start as soon as this one has; otherwise once x is there
    const char* weight;     // the GEMM's weight, to be fetched
    int weight_bytes;       // its size, a multiple of 16
};

// ---- instructions

__device__ __forceinline__ void fetch(const char* from, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(from), "r"(bytes) : "memory");
}

// Volatile, so that the load stays where it is.
__device__ __forceinline__ uint4 load(const u16* from) {
    uint4 out;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w) : "l"(from));
    return out;
}

// from another thread block's shared memory (`in_block`)
__device__ __forceinline__ float2 load_pair(u32 there) {
    float2 out;
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(out.x), "=f"(out.y) : "r"(there));
    return out;
}

// ---- the kernel

// Each thread block fetches an equal part of the weight.
__device__ __forceinline__ void fetch_weight(const Arguments& args) {
    const u32 block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const u64 step = (u64)gridDim.x * gridDim.y * gridDim.z * FETCHED, bytes = args.weight_bytes;
    for (u64 at = (u64)block * FETCHED + step * threadIdx.x; at < bytes; at += step * THREADS)
        fetch(args.weight + at, (u32)min((u64)FETCHED, bytes - at));
}

// A warp multiplies pieces of the in_features. A thread has two rows of A and two tokens, and a quarter of each 32
// in_features. Which in_features make up an MMA does not matter, as long as they are the same for A and for tokens.
extern "C" __global__ void __launch_bounds__(THREADS) shrink(const __grid_constant__ Arguments args) {
    __shared__ float of_warps[WARPS][STEP][PITCH];      // [.., tokens, rows of A]
    __shared__ float2 of_block[THREADS];
    if (args.early) allow_next();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quarter = lane % 4;
    const int part = blockIdx.z, parts = gridDim.z, column = blockIdx.y * STEP;
    const int* const at = args.blocks + 4 * blockIdx.x;
    const int slot = at[0], rank = at[1], begin = at[2], end = at[3];
    const bool is_there = rank > 0 && begin < end, multiplies = is_there && column % args.max_rank < rank;

    const u16* const a = args.a + (slot - 1) * args.slot_stride + (u64)(column + row) * args.size + 8 * quarter;
    const u16* x[2];    // missing tokens are replaced by another one, whose sums are not stored for them
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int token = min(begin + 8 * i + row, end - 1);
        x[i] = args.x + (u64)(is_there ? args.order[token] : 0) * args.x_stride + 8 * quarter;
    }
    const int own = begin + (int)threadIdx.x / (STEP / SUMS), own_column = threadIdx.x % (STEP / SUMS);
    const int own_token = is_there && own < end ? args.order[own] : -1;

    uint4 of_a[PIECE / 32][2];
    float sums[2][4] = {};
    const auto load_a = [&](int k) {
#pragma unroll
        for (int i = 0; i < PIECE / 32; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j) of_a[i][j] = load(a + (u64)j * 8 * args.size + k + 32 * i);
    };
    const int step = PIECE * WARPS * parts;
    int k = PIECE * (part * WARPS + warp);
    if (multiplies && k < args.size) load_a(k);
    fetch_weight(args);
    // Every thread block waits, so the next kernel may assume that all kernels before this one have ended.
    wait_previous();
    if (!args.early) allow_next();
    if (!is_there) return;
    while (multiplies && k < args.size) {
        uint4 of_x[PIECE / 32][2];
#pragma unroll
        for (int i = 0; i < PIECE / 32; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j) of_x[i][j] = load(x[j] + k + 32 * i);
        __syncwarp();   // no load may move below this: all are under way before the first is used
#pragma unroll
        for (int i = 0; i < PIECE / 32; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const uint4 low = of_a[i][0], high = of_a[i][1], by = of_x[i][j];
                add_product(sums[j], low.x, high.x, low.y, high.y, by.x, by.y);
                add_product(sums[j], low.z, high.z, low.w, high.w, by.z, by.w);
            }
        k += step;
        if (k < args.size) load_a(k);
    }

#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) of_warps[warp][8 * i + 2 * quarter + j % 2][row + j / 2 * 8] = sums[i][j];
    __syncthreads();
    float2 sum = make_float2(0, 0);
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
        const float* const from = &of_warps[i][threadIdx.x / (STEP / SUMS)][SUMS * own_column];
        sum.x += from[0], sum.y += from[1];
    }
    if (parts > 1) {
        of_block[threadIdx.x] = sum;
        arrive_in_cluster<true>();
        wait_for_cluster();
        if (part == 0) {
            const u32 own = shared_address(of_block + threadIdx.x);
            float2 more[MOST_PARTS];
#pragma unroll
            for (int other = 1; other < MOST_PARTS; ++other)
                more[other] = other < parts ? load_pair(in_block(own, other)) : make_float2(0, 0);
#pragma unroll
            for (int other = 1; other < MOST_PARTS; ++other) sum.x += more[other].x, sum.y += more[other].y;
        }
        __syncwarp();
        arrive_in_cluster<true>();
    }
    if (part == 0 && own_token >= 0)
        *reinterpret_cast<u32*>(args.inner + (u64)own_token * args.columns + column + SUMS * own_column) =
            pack(sum.x, sum.y);
    if (parts > 1) wait_for_cluster();   // the first one has read the sums
}
