// Part of `gemv.cu`: what a LoRA adapter adds to the sums. That source says who computes what.

#pragma once

#include "numbered_words.cuh"

// Called by one of the first thread blocks: computes 16 sums of x A^T. A warp's products are those of `shrink` in
// `adapters.cu`, except that all tokens of an MMA are the same token.
__device__ __forceinline__ void leave_sums(const Arguments& args, int warp, float (&parts)[WARPS][ROWS]) {
    const Adapters& of = args.adapters;
    const int lane = threadIdx.x % 32, row = lane / 4, quarter = lane % 4;
    const int strips = of.columns / ROWS, part = blockIdx.x / strips, column = blockIdx.x % strips * ROWS;
    const bool is_needed = part < PARTS_OF_A && column % of.max_rank < *of.rank;
    const int first = (part * WARPS + warp) * PIECES * PIECE + 8 * quarter;
    const auto is_there = [&](int piece) { return is_needed && first + piece * PIECE < SIZE; };
    uint4 a[PIECES][PIECE / 32][2];
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        if (!is_there(piece)) continue;
        const u16* const from =
            of.a + (*of.slot - 1) * of.a_stride + (u64)(column + row) * SIZE + first + piece * PIECE;
#pragma unroll
        for (int i = 0; i < PIECE / 32; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j) a[piece][i][j] = load_8(from + 32 * i + (u64)j * 8 * SIZE);
    }
    wait_previous();
    if (!AT_ONCE) allow_next();
    u32* const launches = of.launches + blockIdx.x;
    const u32 launch = __ldcg(launches) + 1;
    if (is_needed) {
        float c[4] = {};
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            if (!is_there(piece)) continue;
            uint4 x[PIECE / 32];
#pragma unroll
            for (int i = 0; i < PIECE / 32; ++i) x[i] = load_8(of.x + first + piece * PIECE + 32 * i);
            __syncwarp();   // no load may move below this: all are under way before the first is used
#pragma unroll
            for (int i = 0; i < PIECE / 32; ++i) {
                const uint4 low = a[piece][i][0], high = a[piece][i][1];
                add_product(c, low.x, high.x, low.y, high.y, x[i].x, x[i].y);
                add_product(c, low.z, high.z, low.w, high.w, x[i].z, x[i].w);
            }
        }
        if (quarter == 0) parts[warp][row] = c[0], parts[warp][row + 8] = c[2];
    }
    __syncthreads();
    if (is_needed && threadIdx.x < ROWS) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) sum += parts[i][threadIdx.x];
        store_numbered(of.sums + part * of.columns + column + threadIdx.x, __float_as_uint(sum), launch);
    }
    if (threadIdx.x == 0) *launches = launch;   // all threads have read it
}

// A warp's 16 rows of B times x A^T. Lanes 0 to 15 have a row each, and lanes 16 to 31 have the same rows.
struct Expansion {
    const Arguments& args;
    u16 (&b)[ROWS][RANK_STEP];  // in shared memory

    // RANK_STEP columns of B
    __device__ __forceinline__ void copy_b(int first) const {
        const Adapters& of = args.adapters;
        if (first >= *of.rank) return;
        const int row = threadIdx.x / 2, feature = Ends::at(args, row / 8) + row % 8, half = threadIdx.x % 2 * 8;
        copy<16>(&b[row][half], of.b + (*of.slot - 1) * of.b_stride + (u64)feature * of.max_rank + first + half);
    }

    // RANK_STEP numbers of x A^T, a pair in each of 8 lanes; the four groups of 8 lanes have the same pairs
    __device__ __forceinline__ u32 inner(int first, u32 launch) const {
        constexpr int OF_LANE = (PARTS_OF_A + 3) / 4;
        const Adapters& of = args.adapters;
        const int lane = threadIdx.x % 32;
        const uint2* const from = of.sums + lane / 8 * of.columns + first + 2 * (lane % 8);
        const auto is_there = [&](int i) { return lane / 8 + 4 * i < PARTS_OF_A; };
        const auto load = [&](int i) { return load_numbered(from + 4 * i * of.columns); };
        uint4 sums[OF_LANE];
#pragma unroll
        for (int i = 0; i < OF_LANE; ++i)
            if (is_there(i)) sums[i] = load(i);
        float low = 0, high = 0;
#pragma unroll
        for (int i = 0; i < OF_LANE; ++i) {
            if (is_there(i)) {
                while (sums[i].y != launch || sums[i].w != launch) sums[i] = load(i);
                low += __uint_as_float(sums[i].x), high += __uint_as_float(sums[i].z);
            }
        }
        __syncwarp();
#pragma unroll
        for (int lanes = 8; lanes < 32; lanes *= 2) {
            low += __shfl_xor_sync(ALL, low, lanes);
            high += __shfl_xor_sync(ALL, high, lanes);
        }
        return pack(low, high);
    }

    // for this lane's row; the first step of B has been copied already
    __device__ __forceinline__ float operator()(u32 launch) const {
        const Adapters& of = args.adapters;
        const int lane = threadIdx.x % 32, feature = Ends::at(args, 0);
        const int projection = GATED ? 0 : (feature >= of.second) + (feature >= of.third);
        float sum = 0;
#pragma unroll 1
        for (int first = 0; first < *of.rank; first += RANK_STEP) {
            if (first > 0) {
                __syncwarp();
                copy_b(first);
                wait_for_copies();
            }
#pragma unroll
            for (int side = 0; side <= GATED; ++side) {
                const u32 pairs = inner((projection + side) * of.max_rank + first, launch);
                const bool is_mine = !GATED || lane % ROWS / 8 == side;
#pragma unroll
                for (int i = 0; i < RANK_STEP / 2; ++i) {
                    const u32 pair = __shfl_sync(ALL, pairs, i);
                    const u32 by = *reinterpret_cast<const u32*>(&b[lane % ROWS][2 * i]);
                    if (is_mine)
                        sum += to_float((u16)pair) * to_float((u16)by) + to_float(pair >> 16) * to_float(by >> 16);
                }
            }
        }
        return sum;
    }
};
