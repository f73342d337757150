// A few tokens times the weights of the experts that each has chosen, in MXFP4, for Hopper (sm_90a).
//
// The choice of experts is known late, and a product is short. What counts is how soon memory is busy, and how soon its
// last bytes are multiplied. A thread block has 16 rows of a choice's weight. Its warps share the in_features so finely
// that each asks for all its codes at once and waits once: there is no ring, and no barrier but the one for the sum. A
// warp multiplies as in `gemv.cuh`. Codes pass through shared memory, since registers could hold them for fewer warps
// only; each lane reads back what it has copied itself. An expert that two tokens have chosen is read twice.
//
// Compiled with the macros of `gemv.cuh`, for an e2m1 weight whose rows have their own scales, and: HEIGHT (rows of an
// expert's weight), GATED (the weight holds the gate's rows, then as many rows of the values), CLAMPED (gpt-oss's gate;
// otherwise SiLU), WARPS, and PER_PROCESSOR (thread blocks that a multiprocessor has registers for).

#include "gates.cuh"
#include "gemv.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int UNITS_OF_ROW = (SIZE + UNIT - 1) / UNIT;      // the last one may be cut
constexpr int UNITS_OF_EXPERT = (HEIGHT + 127) / 128 * 2;   // of 64 rows that have scales
constexpr int SCALES_OF_UNIT = (SIZE + 255) / 256 * 2 * 64;
constexpr int OUT_FEATURES = GATED ? HEIGHT / 2 : HEIGHT;
constexpr int OUT_ROWS = GATED ? ROWS / 2 : ROWS;           // that a thread block writes
constexpr int TO_ROW_8 = GATED ? OUT_FEATURES : 8;          // from the first 8 rows of a thread block to the others

static_assert(CODE == 4 && SHARED_BY == 1 && HEIGHT % ROWS == 0 && WARPS == BATCHES, "");

struct Arguments {
    const u8* weight;       // [num_experts, HEIGHT, SIZE]
    const float* scales;    // as in `experts.cu`
    const u16* bias;        // [num_experts, HEIGHT], or null
    const u16* x;           // GATED: [tokens, SIZE]; else [choices, SIZE]
    const int* ids;         // [choices]; -1: nothing is read or written for it
    const float* factors;   // GATED: of x, [tokens], or null
    u16* out;               // [choices, OUT_FEATURES]
    int early;              // the kernel before this one wrote only x
    float alpha;            // CLAMPED: of the sigmoid
    float limit;            // CLAMPED: of gates and values
};

// The L2 cache fetches 128 bytes, and their other half is copied next. There is no cache policy: with one, the ptxas of
// CUDA 13.0 makes an illegal instruction when it finds that a part of `to` is the same in all lanes.
__device__ __forceinline__ void copy_codes(u32 to, const u8* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;"
                 :: "r"(to), "l"(from) : "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS, PER_PROCESSOR)
expert_gemv(const __grid_constant__ Arguments args) {
    __shared__ uint4 codes[WARPS][COLUMNS][2][32];
    __shared__ __align__(16) u32 scales[WARPS][COLUMNS][ROWS];
    __shared__ float parts[WARPS][ROWS];
    const u32 strip = blockIdx.x, token = blockIdx.z, choice = token * gridDim.y + blockIdx.y;
    const int lane = threadIdx.x % 32, quarter = lane % 4;
    const int warp = __shfl_sync(ALL, (int)threadIdx.x / 32, 0);   // the same in all lanes
    if (!args.early) wait_previous();
    allow_next();   // kernels before this one have written what says which experts were chosen
    const int expert = __ldcg(args.ids + choice);
    if (expert < 0) {
        wait_previous();   // this kernel must not end before those before it
        return;
    }
    const u32 first_row = expert * HEIGHT + strip * OUT_ROWS;
    const int first = warp * BATCH + quarter * 32;   // in_feature of this lane
    const u8* const low = args.weight + (first_row + lane / 4) * ROW_BYTES + first / 2;
    const u8* const high = low + TO_ROW_8 * ROW_BYTES;
    const u32 to = shared_address(&codes[warp][0][0][lane]);
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i)
        if (WHOLE || first < SIZE - i * UNIT) {
            copy_codes(to + i * 1024, low + i * 64);
            copy_codes(to + i * 1024 + 512, high + i * 64);
        }
    const int group = lane / 4, unit = warp * COLUMNS + group;
    if (group < COLUMNS && (WHOLE || unit < UNITS_OF_ROW)) {
        const u32 of_rows = (expert * UNITS_OF_EXPERT + strip / 4) * SCALES_OF_UNIT + strip % 4 * ROWS;
        copy<16>(&scales[warp][group][quarter * 4], (const u32*)args.scales + of_rows + unit * 64 + quarter * 4);
    }
    const int row = lane % 8 + (lane & 8 ? TO_ROW_8 : 0);   // that this lane of the first warp finishes
    const float bias = args.bias && warp == 0 ? to_float(args.bias[first_row + row]) : 0;
    if (args.early) wait_previous();

    Column column;
    column.read(args.x + (u64)(GATED ? token : choice) * SIZE, warp);
    const float factor = args.factors && warp == 0 ? __ldcg(args.factors + token) : 1;
    __syncwarp();   // otherwise the compiler makes the loads of x wait for the copies
    wait_for_copies();
    float sums[2] = {};
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
        if (!WHOLE && warp * COLUMNS + i >= UNITS_OF_ROW) break;
        const uint4 both[2] = {codes[warp][i][0][lane], codes[warp][i][1][lane]};
        u32 by[2];
#pragma unroll
        for (int j = 0; j < 2; ++j)   // bfloat16 with the exponent of this lane's 32 in_features, twice
            by[j] = ((const u8*)&scales[warp][i][lane / 4 + 8 * j])[quarter] * 0x800080;
        float c[4] = {};
        multiply_unit(c, both, column.words[0], by);
        if (quarter == i / 2) sums[0] += c[i % 2], sums[1] += c[2 + i % 2];   // only this unit's column
    }
    add_lanes(sums);
    if (quarter < 2) parts[warp][lane / 4 + 8 * quarter] = quarter ? sums[1] : sums[0];
    __syncthreads();
    if (warp) return;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) sum += parts[i][lane % ROWS];
    sum = sum * (factor * OF_SUMS) + bias;
    const float value = __shfl_down_sync(ALL, sum, 8);
    if (GATED) sum = CLAMPED ? opened(sum, value, args.alpha, args.limit) : opened(sum, value);
    if (lane < OUT_ROWS) args.out[choice * OUT_FEATURES + strip * OUT_ROWS + lane] = (u16)pack(sum, 0);
}
