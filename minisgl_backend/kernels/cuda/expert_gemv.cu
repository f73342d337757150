// A few tokens times the weights of the experts that each has chosen, in bfloat16, float8, 4-bit integers or MXFP4, for
// Hopper (sm_90a).
//
// The choice of experts is known late, and a product is short. What counts is how soon memory is busy, and how soon its
// last bytes are multiplied. A thread block has 16 rows of a choice's weight. Its warps share the in_features so finely
// that each asks for all its codes at once and waits once: there is no ring, and no barrier but the one for the sum.
// (Only if rows are very long, a warp has several batches, one after another.) A warp multiplies as in `gemv.cuh`.
// Codes pass through shared memory, since registers could hold them for fewer warps only; each lane reads back what it
// has copied itself. An expert that two tokens have chosen is read twice.
//
// If there is an expert that all tokens take, it is each token's last choice. Its thread blocks come first, and read
// its weight while the other experts are being chosen.
//
// Compiled with the macros of `gemv.cuh`, for any CODE but 2, and: HEIGHT (rows of an expert's weight),
// GATED (the weight holds the gate's rows, then as many rows of the values), GATE (see `gates.cuh`), WARPS, and
// PER_PROCESSOR (thread blocks that a multiprocessor has registers for).

#include "gates.cuh"
#include "gemv.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int COLUMNS_OF_ROW = (SIZE + SUM - 1) / SUM;      // the last one may be cut
constexpr int LINES = GROUP ? ROWS / SHARED_BY : 0;         // words of scales of a group, for a thread block's rows
constexpr int WORDS = GROUPS * 4 * LINES;                   // of a column, for a tile of 64 rows
constexpr int TILES_OF_EXPERT = (HEIGHT + 127) / 128 * 2;   // that have scales
constexpr int WORDS_OF_TILE = (SIZE + 255) / 256 * 2 * WORDS;
constexpr int CODES_OF_WARP = UNITS * 2 * 32;               // 16 bytes each
constexpr int ROUNDS = (BATCHES + WARPS - 1) / WARPS;       // batches of a warp
constexpr bool READS_TOKENS = GATED || GATE == SQUARED_RELU;   // it is the first of both products
constexpr int OUT_FEATURES = GATED ? HEIGHT / 2 : HEIGHT;
constexpr int OUT_ROWS = GATED ? ROWS / 2 : ROWS;           // that a thread block writes
constexpr int TO_ROW_8 = GATED ? OUT_FEATURES : 8;          // from the first 8 rows of a thread block to the others

static_assert(CODE != 2 && HEIGHT % ROWS == 0, "");
static_assert((GROUP == 0 && CODE <= 1) || GROUP == 128 || FLOATS, "");
static_assert(COLUMNS * GROUPS <= 8, "");
static_assert(CODE || SIZE % 8 == 0, "");

struct Arguments {
    const u8* weight;       // [num_experts, HEIGHT, SIZE]
    const float* scales;    // as in `experts.cu`, with WORDS for a column of a tile
    const float* row_scales;        // the same
    const u16* bias;        // [num_experts, HEIGHT], or null
    const u16* x;           // READS_TOKENS: [tokens, SIZE]; else [choices, SIZE]
    const int* ids;         // [choices]; -1: nothing is read or written for it
    const float* factors;   // READS_TOKENS: of x, [tokens], or null
    u16* out;               // [choices, OUT_FEATURES]
    int of_all;             // the expert that is the last choice of all tokens; -1: none
    int early;              // the kernel before this one wrote only x
    float alpha;            // of a gate that is CLAMPED
    float limit;            // the same
};

// The L2 cache fetches 128 bytes, and their other half is copied next. There is no cache policy: with one, the ptxas of
// CUDA 13.0 makes an illegal instruction when it finds that a part of `to` is the same in all lanes.
__device__ __forceinline__ void copy_codes(u32 to, const u8* from, bool inside) {
    if (WHOLE)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;"
                     :: "r"(to), "l"(from) : "memory");
    else if (CODE == 0)   // zeros beyond the row: what is left in shared memory might be no finite number
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                     :: "r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
    else if (inside)      // any code is a finite number, and is multiplied by zeros
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;"
                     :: "r"(to), "l"(from) : "memory");
}

// Adds the columns of a batch to the sums of both rows of a lane. `scales`: [COLUMNS, GROUPS, LINES].
__device__ __forceinline__ void add_columns(
    float (&sums)[2], const uint4* codes, const u32* scales, const Column& x, int batch) {
    const int lane = threadIdx.x % 32, quarter = lane % 4;
    float of_x[2] = {};
    if (SUBTRACTS) x.add_up(of_x);
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
        if (!WHOLE && batch * COLUMNS + i >= COLUMNS_OF_ROW) break;
        u32 by[2][2] = {};
        float scale[2] = {1, 1}, zero[2] = {};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const u32* const word = scales + i * GROUPS * LINES + (lane / 4 + 8 * j) / SHARED_BY;
            if (CODE == 4) read_scales(by[j], [&](int group) { return word[group * LINES]; });
            else if (GROUP) scale[j] = scale_of(*word);
            if (SUBTRACTS) zero[j] = zero_point(*word);
        }
        float c[4] = {};
#pragma unroll
        for (int unit = 0; unit < OF_COLUMN; ++unit) {
            const uint4* const from = codes + (i * OF_COLUMN + unit) * 64 + lane;
            const uint4 both[2] = {from[0], from[32]};
            multiply_unit(c, both, x.words[unit], by);
        }
        if (quarter == i / 2)   // this column's own result
#pragma unroll
            for (int j = 0; j < 2; ++j) sums[j] += scale[j] * (c[2 * j + i % 2] - zero[j] * of_x[i % 2]);
    }
}

// The 16 rows of a choice's weight from `first_row` on, and a warp's place in shared memory for a batch of them.
struct Strip {
    const Arguments& args;
    int expert;
    u32 first_row;      // of all experts
    uint4* codes;       // [UNITS, 2, 32]
    u32* scales;        // [COLUMNS, GROUPS, LINES]

    __device__ __forceinline__ void copy(int batch) const {
        const int lane = threadIdx.x % 32, quarter = lane % 4;
        const int first = batch * BATCH + quarter * (UNIT / 4);   // in_feature of this lane
        const u8* const low = args.weight + (first_row + lane / 4) * ROW_BYTES + first * BITS / 8;
        const u8* const high = low + TO_ROW_8 * ROW_BYTES;
        const u32 to = shared_address(codes + lane);
#pragma unroll
        for (int i = 0; i < UNITS; ++i) {
            const bool inside = first < SIZE - i * UNIT;
            copy_codes(to + i * 1024, low + i * 64, inside);
            copy_codes(to + i * 1024 + 512, high + i * 64, inside);
        }
        constexpr int AT_ONCE = LINES < 4 ? LINES : 4;   // words of scales that a lane copies
        const int group = lane / 4, column = group / (GROUP ? GROUPS : 1);
        if (LINES && column < COLUMNS && quarter * AT_ONCE < LINES
            && (WHOLE || batch * COLUMNS + column < COLUMNS_OF_ROW)) {
            const u32 index = blockIdx.x;
            const u32 of_rows = (expert * TILES_OF_EXPERT + index / 4) * WORDS_OF_TILE + index % 4 * LINES;
            const u32* const from = (const u32*)args.scales + of_rows + (batch * COLUMNS * GROUPS + group) * 4 * LINES;
            ::copy<4 * AT_ONCE>(scales + group * LINES + quarter * AT_ONCE, from + quarter * AT_ONCE);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, PER_PROCESSOR)
expert_gemv(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(16) uint4 codes[];   // [WARPS, UNITS, 2, 32]
    __shared__ __align__(16) u32 scales[WARPS][LINES ? COLUMNS * GROUPS * LINES : 1];
    __shared__ float parts[WARPS][ROWS];
    const bool is_known = args.of_all >= 0 && blockIdx.y == 0, reads_early = args.early || is_known;
    const u32 strip = blockIdx.x, token = blockIdx.z;
    const u32 choice = token * gridDim.y + (blockIdx.y + gridDim.y - 1) % gridDim.y;   // the last comes first
    const int lane = threadIdx.x % 32, quarter = lane % 4;
    const int warp = __shfl_sync(ALL, (int)threadIdx.x / 32, 0);   // the same in all lanes
    if (!reads_early) wait_previous();
    allow_next();   // once all thread blocks have, kernels before this one have written which experts were chosen
    const int expert = is_known ? args.of_all : __ldcg(args.ids + choice);
    if (expert < 0) {
        wait_previous();   // this kernel must not end before those before it
        return;
    }
    const u32 first_row = expert * HEIGHT + strip * OUT_ROWS;
    const Strip own{args, expert, first_row, codes + warp * CODES_OF_WARP, scales[warp]};
    own.copy(warp);
    const int row = lane % 8 + (lane & 8 ? TO_ROW_8 : 0);   // that this lane of the first warp finishes
    const float bias = args.bias && warp == 0 ? to_float(args.bias[first_row + row]) : 0;
    const float of_row = OF_ROWS && warp == 0 ? args.row_scales[first_row + row] : OF_SUMS;
    if (reads_early) wait_previous();

    const float factor = args.factors && warp == 0 ? __ldcg(args.factors + token) : 1;
    float sums[2] = {};
#pragma unroll 1
    for (int round = 0, batch = warp; round < ROUNDS && batch < BATCHES; ++round, batch += WARPS) {
        if (round > 0) own.copy(batch);
        Column x;
        x.read(args.x + (u64)(READS_TOKENS ? token : choice) * SIZE, batch);
        __syncwarp();   // otherwise the compiler makes the loads of x wait for the copies
        wait_for_copies();
        add_columns(sums, own.codes, own.scales, x, batch);
        if (round + 1 < ROUNDS) __syncwarp();   // all lanes have read the scales
    }
    add_lanes(sums);
    if (quarter < 2) parts[warp][lane / 4 + 8 * quarter] = quarter ? sums[1] : sums[0];
    __syncthreads();
    if (warp) return;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) sum += parts[i][lane % ROWS];
    sum = sum * (factor * of_row) + bias;
    const float value = __shfl_down_sync(ALL, sum, 8);
    sum = GATED ? opened<GATE>(sum, value, args.alpha, args.limit) : opened<GATE>(sum);
    if (lane < OUT_ROWS) args.out[choice * OUT_FEATURES + strip * OUT_ROWS + lane] = (u16)pack(sum, 0);
}
