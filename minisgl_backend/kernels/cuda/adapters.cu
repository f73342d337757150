// x A^T of LoRA adapters for the few tokens of a step, which a GEMM of `linear.cu` then multiplies by B^T (sm_90a).
//
// A thread block multiplies up to 16 tokens of one adapter by 16 rows of its A. The thread blocks of a cluster share
// the in_features, and the first one adds up the sums of all, over their shared memory. So sums are complete, and the
// same in every launch. Thread blocks are small, so that they run beside those of GEMMs, which take most of the shared
// memory.
//
// A, and which tokens have which adapter, were there before the step, so they are read before the wait for x, and what
// is needed of A later is fetched to the L2 cache: once the GEMM loads its weight, memory answers late. The GEMM starts
// as soon as this kernel has, and is told when x is there (`turns.cuh`).

#include "hopper.cuh"
#include "turns.cuh"

constexpr int MOST_WARPS = 8;   // per thread block
constexpr int STEP = 16;        // rows of A, and tokens, per thread block
constexpr int PIECE = 128;      // in_features that a warp multiplies at a time
constexpr int PITCH = STEP + 4; // floats per token in shared memory; the stores of a warp use all banks
constexpr int MOST_PARTS = 8;   // thread blocks per cluster
constexpr int SUMS = 2;         // that a thread adds up
constexpr int ADDERS = STEP * STEP / SUMS;  // the threads that do so; a thread block has at least these

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
    u32* turns;             // [2], for the GEMM; null: the next kernel waits for the end of this one
};

// ---- instructions

// Volatile, so that the load stays where it is.
__device__ __forceinline__ uint4 load(const u16* from) {
    uint4 out;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w) : "l"(from));
    return out;
}

// of 128 bytes to the L2 cache
__device__ __forceinline__ void prefetch(const u16* from) {
    asm volatile("prefetch.global.L2 [%0];" :: "l"(from));
}

// from another thread block's shared memory (`in_block`)
__device__ __forceinline__ float2 load_pair(u32 there) {
    float2 out;
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(out.x), "=f"(out.y) : "r"(there));
    return out;
}

// ---- the kernel

// A warp multiplies pieces of the in_features. A thread has two rows of A and two tokens, and a quarter of each 32
// in_features. Which in_features make up an MMA does not matter, as long as they are the same for A and for tokens.
extern "C" __global__ void __launch_bounds__(MOST_WARPS * 32) shrink(const __grid_constant__ Arguments args) {
    __shared__ float of_warps[MOST_WARPS][STEP][PITCH];     // [.., tokens, rows of A]
    __shared__ float2 of_block[ADDERS];
    const bool is_first = blockIdx.x + blockIdx.y + blockIdx.z == 0;
    const bool takes_turn = is_first && args.turns && threadIdx.x == 0;
    const u32 turn = takes_turn ? take_turn(args.turns) : 0;
    if (threadIdx.x == 0) allow_next();
    const int* const at = args.blocks + 4 * blockIdx.x;
    const int slot = at[0], rank = at[1], begin = at[2], end = at[3];
    if (rank == 0 || begin == end) {
        if (is_first) wait_previous();  // this kernel must not end before those before it
        if (takes_turn) announce_turn(args.turns, turn);
        return;
    }
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int lane = threadIdx.x % 32, row = lane / 4, quarter = lane % 4;
    const int part = blockIdx.z, parts = gridDim.z, column = blockIdx.y * STEP;
    const bool multiplies = column % args.max_rank < rank;

    const u16* const first_row = args.a + (slot - 1) * args.slot_stride + (u64)column * args.size;
    const u16* const a = first_row + (u64)row * args.size + 8 * quarter;
    const u16* x[2];    // missing tokens are replaced by another one, whose sums are not stored for them
#pragma unroll
    for (int i = 0; i < 2; ++i)
        x[i] = args.x + (u64)args.order[min(begin + 8 * i + row, end - 1)] * args.x_stride + 8 * quarter;
    const int own = begin + (int)threadIdx.x / (STEP / SUMS), own_column = threadIdx.x % (STEP / SUMS);
    const int own_token = threadIdx.x < ADDERS && own < end ? args.order[own] : -1;

    uint4 of_a[PIECE / 32][2];
    float sums[2][4] = {};
    const auto load_a = [&](int k) {
#pragma unroll
        for (int i = 0; i < PIECE / 32; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j) of_a[i][j] = load(a + (u64)j * 8 * args.size + k + 32 * i);
    };
    const int step = PIECE * warps * parts;
    int k = PIECE * (part * warps + warp);
    if (multiplies && k < args.size) {
        load_a(k);
        for (int later = k + step; later < args.size; later += step)
            prefetch(first_row + (u64)(lane / 2) * args.size + later + lane % 2 * (PIECE / 2));
    }
    wait_previous();
    if (takes_turn) announce_turn(args.turns, turn);
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
    if (threadIdx.x < ADDERS)
        for (int i = 0; i < warps; ++i) {
            const float* const from = &of_warps[i][threadIdx.x / (STEP / SUMS)][SUMS * own_column];
            sum.x += from[0], sum.y += from[1];
        }
    if (parts > 1) {
        if (threadIdx.x < ADDERS) of_block[threadIdx.x] = sum;
        __syncwarp();
        arrive_in_cluster<true>();
        wait_for_cluster();
        if (part == 0 && threadIdx.x < ADDERS) {
            const u32 here = shared_address(of_block + threadIdx.x);
            float2 more[MOST_PARTS];
#pragma unroll
            for (int other = 1; other < MOST_PARTS; ++other)
                more[other] = other < parts ? load_pair(in_block(here, other)) : make_float2(0, 0);
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
