// A GEMM of blocks of rows, each with the weight of its own expert, for Hopper (sm_90a).
//
// Weights are the long side of the GEMM and rows the short side: a tile is FEATURES rows of an expert's weight by the
// TOKENS rows of a block. Thread blocks are persistent and take tiles in turn. In each, one warp moves weights into a
// ring in shared memory with the bulk tensor copy engine, others gather rows of x beside them, and warpgroups multiply
// them from there (wgmma). The ring runs on from tile to tile, so memory is read without a pause, however short the
// tiles are.
//
// `tile_gemm.cuh` has the ring and multiplies from it, 8-bit and 4-bit weights included.
//
// Compiled with the macros of `tile_gemm.cuh`, and: HEIGHT (rows of an expert's weight), SIZE (in_features), GATED (the
// weight holds the gate's rows, then as many rows of the values), GATE (see `gates.cuh`), SHARED_BYTES, and
// PER_PROCESSOR (thread blocks that a multiprocessor has registers for). All other values are bfloat16, but with FLOAT8
// x is e4m3.

#define COPIED
#define BEYOND (BLOCK - 1 - (SIZE - 1) % BLOCK)
#include "gates.cuh"
#include "tile_gemm.cuh"

constexpr int X_BYTES = FLOAT8 ? 1 : 2;             // per number of x
constexpr int PARTS = BLOCK * X_BYTES / 128;        // of x in a stage, with rows of 128 bytes
constexpr int MOVERS = TOKENS > 32 ? 2 : 1;         // warps that gather rows; another one moves weights
constexpr int ALL_THREADS = THREADS + 32 * (1 + MOVERS);
constexpr int TILES = (HEIGHT + FEATURES - 1) / FEATURES;   // of an expert's weight; what is beyond it counts as 0
constexpr int STEPS = (SIZE + BLOCK - 1) / BLOCK;   // of a tile
constexpr int WORDS = GROUP ? 128 / GROUP * (64 / SHARED_BY) : 0;   // of scales, for 64 rows and 128 in_features
constexpr int UNITS = (HEIGHT + 127) / 128 * 2;     // of 64 rows that have scales, per expert
constexpr int COLUMNS = (SIZE + 255) / 256 * 2;     // of 128 in_features, per unit
constexpr int OUT = GATED ? FEATURES / 2 : FEATURES;         // output features per tile
constexpr int OUT_FEATURES = GATED ? HEIGHT / 2 : HEIGHT;
constexpr int ROWS = 4 * MOVERS;                    // that the movers gather side by side
constexpr int ITEMS = TOKENS / ROWS;

static_assert(OUT_FEATURES % 8 == 0 && SIZE * X_BYTES % 16 == 0 && STAGES >= 2, "");
static_assert(RING_BYTES + STAGES * 16 <= SHARED_BYTES, "");

struct Arguments {
    TensorMap weight;       // [num_experts, HEIGHT, SIZE], of codes in bytes; GATED: see `load_weight`
    const u8* x;            // [num_pairs / top_k, SIZE], of X_BYTES each
    u16* out;               // [num_pairs, OUT_FEATURES]
    const int* pairs;       // [num_blocks, TOKENS]: rows of the output; num_pairs where a block is not full
    const int* experts;     // [num_blocks], -1 after the last one
    const float* factors;   // [num_pairs / top_k], of the rows of x; or null
    const float* scales;    // of codes: [num_experts, UNITS, COLUMNS, WORDS], the rows in the order of tiles
    const float* row_scales;        // OF_ROWS: [num_experts, HEIGHT]
    const u16* bias;        // [num_experts, HEIGHT], or null
    int num_pairs;
    int num_blocks;
    int top_k;              // rows of the output for each row of x
    int early;              // `pairs` and `experts` were already there before the previous kernel
    float alpha;            // of a gate that is CLAMPED
    float limit;            // the same
};

// ---- instructions

// GATED: the map is of [num_experts, features / 8, 2, 8, SIZE], so that 8 rows of the gate come right before the 8 rows
// that they open, and both land in the same thread.
__device__ __forceinline__ void load_weight(
    u32 to, const TensorMap& map, int k, int expert, int tile, u32 barrier) {
    if (GATED)
        asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%2, %3, %3, %4, %5}], [%6];"
                     :: "r"(to), "l"(&map), "r"(k), "r"(0), "r"(tile * (FEATURES / 16)), "r"(expert),
                     "r"(barrier) : "memory");
    else
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%2, %3, %4}], [%5];"
                     :: "r"(to), "l"(&map), "r"(k), "r"(tile * FEATURES), "r"(expert), "r"(barrier)
                     : "memory");
}

// ---- the tiles of a thread block

// A tile is looked up while the one before it is taken, so that no warp waits for memory in between.
struct Tile {
    int number, block, expert;   // `expert`: -1 after the last tile

    __device__ __forceinline__ Tile(const Arguments& args, int number) : number(number), block(number / TILES) {
        expert = block < args.num_blocks ? __ldcg(args.experts + block) : -1;
    }

    __device__ __forceinline__ int of_expert() const { return number % TILES; }
};

// ---- the warps that fill the ring

__device__ __forceinline__ void move_weights(const Arguments& args, u32 ring, u32 full, u32 empty) {
    int step = 0;
    for (Tile tile(args, blockIdx.x); tile.expert >= 0;) {
        const Tile next(args, tile.number + gridDim.x);
        for (int i = 0; i < STEPS; ++i, ++step) {
            const u32 stage = step % STAGES, barrier = full + 8 * stage;
            if (step >= STAGES) wait_barrier(empty + 8 * stage, (step / STAGES - 1) & 1);
            expect_bytes(barrier, WEIGHT_BYTES + SCALE_BYTES);
            // the map of codes counts bytes
            load_weight(ring + stage * STAGE_BYTES, args.weight, i * (CODE ? BLOCK * BITS / 8 : BLOCK), tile.expert,
                        tile.of_expert(), barrier);
            if (GROUP == 0) continue;
            const u32 scales = ring + STAGES * STAGE_BYTES + stage * SCALE_BYTES;
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                const u64 unit = (u64)tile.expert * UNITS + tile.of_expert() * GROUPS + group;
                load_bytes(scales + group * GROUP_BYTES, args.scales + (unit * COLUMNS + i * (BLOCK / 128)) * WORDS,
                           GROUP_BYTES, barrier);
            }
        }
        tile = next;
    }
}

// Gathers rows of x, in the order that the tensor cores want.
__device__ __forceinline__ void gather_rows(const Arguments& args, u32 ring, u32 full, u32 empty) {
    const int thread = threadIdx.x - THREADS - 32, chunk = thread % 8, row = thread / 8;
    const auto read_pairs = [&](int (&pairs)[ITEMS], const Tile& tile) {
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            const int* const pair = args.pairs + (u64)tile.block * TOKENS + item * ROWS + row;
            pairs[item] = tile.block < args.num_blocks ? __ldcg(pair) : args.num_pairs;
        }
    };
    Tile tile(args, blockIdx.x);
    int pairs[ITEMS];
    read_pairs(pairs, tile);
    for (int step = 0; tile.expert >= 0;) {
        const u8* from[ITEMS];
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            const int pair = pairs[item];
            from[item] = pair < args.num_pairs ? args.x + (u64)(pair / args.top_k) * (SIZE * X_BYTES) + 16 * chunk
                                            : nullptr;
        }
        const Tile next(args, tile.number + gridDim.x);
        read_pairs(pairs, next);
        for (int i = 0; i < STEPS; ++i, ++step) {
            const u32 stage = step % STAGES, to = ring + stage * STAGE_BYTES + WEIGHT_BYTES;
            if (step >= STAGES) wait_barrier(empty + 8 * stage, (step / STAGES - 1) & 1);
#pragma unroll
            for (int item = 0; item < ITEMS; ++item) {
                if (!from[item]) continue;   // old contents are multiplied, but never stored
                const int at = item * ROWS + row;
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    const int byte = i * (BLOCK * X_BYTES) + 128 * part;
                    copy_16(to + part * TOKEN_BYTES + at * 128 + (chunk ^ at % 8) * 16, from[item] + byte,
                            SIZE % BLOCK == 0 || byte + 16 * chunk < SIZE * X_BYTES);
                }
            }
            arrive_copied(full + 8 * stage);
        }
        tile = next;
    }
    wait_copies();   // a thread does not end before what it has asked for is there
}

// ---- finishing

constexpr int WIDTH = GATED ? 8 : 16;   // output features per warp

// What a thread needs to finish a tile. With few tokens it is read before they are multiplied.
struct Ends {
    int stored[TOKENS / 8];   // the row of which the lane stores some features
    float2 factors[TOKENS / 8];
    float scale, scale_8;     // of the two features of its sums
    u16 bias, bias_8;         // the same, not yet converted: nothing waits for them before the sums are there

    __device__ __forceinline__ void read(const Arguments& args, const Tile& tile) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const int* const pairs = args.pairs + (u64)tile.block * TOKENS;
#pragma unroll
        for (int i = 0; i < TOKENS / 8; ++i) {
            stored[i] = __ldcg(pairs + 8 * i + lane / 4);
            factors[i] = make_float2(1, 1);
            if (args.factors) {
                const int* const both = pairs + 8 * i + lane % 4 * 2;
                const int first = __ldcg(both), second = __ldcg(both + 1);
                if (first < args.num_pairs) factors[i].x = args.factors[first / args.top_k];
                if (second < args.num_pairs) factors[i].y = args.factors[second / args.top_k];
            }
        }
        // the two features, as rows of the weight
        const int row = tile.of_expert() * OUT + WIDTH * warp + lane / 4, row_8 = row + (GATED ? OUT_FEATURES : 8);
        const auto of_row = [&](auto read, int which) {
            const bool is_inside = HEIGHT % FEATURES == 0 || (GATED ? row : which) < OUT_FEATURES;
            return is_inside ? read((u64)tile.expert * HEIGHT + which) : 0;
        };
        const auto read_scale = [&](u64 at) { return args.row_scales[at]; };
        const auto read_bias = [&](u64 at) { return args.bias[at]; };
        scale = OF_ROWS ? of_row(read_scale, row) : OF_SUMS;
        scale_8 = OF_ROWS ? of_row(read_scale, row_8) : OF_SUMS;
        bias = args.bias ? of_row(read_bias, row) : 0;
        bias_8 = args.bias ? of_row(read_bias, row_8) : 0;
    }
};

// Writes the results of a warp to rows of the output.
__device__ __forceinline__ void finish_tile(
    const Arguments& args, const Tile& tile, const Ends& of, const float (&c)[TOKENS / 2]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int feature = tile.of_expert() * OUT + WIDTH * warp;
    const auto is_inside = [&](int first) { return HEIGHT % FEATURES == 0 || first < OUT_FEATURES; };
    const float bias = to_float(of.bias), bias_8 = to_float(of.bias_8);
    const auto open = [&](float gate, float value) { return opened<GATE>(gate, value, args.alpha, args.limit); };
#pragma unroll
    for (int i = 0; i < TOKENS / 8; ++i) {
        const float2 by = of.factors[i];
        const float x[4] = {c[4 * i] * (by.x * of.scale) + bias, c[4 * i + 1] * (by.y * of.scale) + bias,
                            c[4 * i + 2] * (by.x * of.scale_8) + bias_8,
                            c[4 * i + 3] * (by.y * of.scale_8) + bias_8};
        const u32 low = transposed(
            GATED ? pack(open(x[0], x[2]), open(x[1], x[3])) : pack(opened<GATE>(x[0]), opened<GATE>(x[1])));
        const u32 high = GATED ? 0 : transposed(pack(opened<GATE>(x[2]), opened<GATE>(x[3])));
        if (of.stored[i] >= args.num_pairs) continue;
        u32* const out = reinterpret_cast<u32*>(args.out + (u64)of.stored[i] * OUT_FEATURES + feature) + lane % 4;
        if (is_inside(feature)) out[0] = low;
        if (!GATED && is_inside(feature + 8)) out[4] = high;
    }
}

// ---- the kernel

extern "C" __global__ void __launch_bounds__(ALL_THREADS, PER_PROCESSOR)
experts(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(1024) u8 shared[];
    // the ring, and the ring of scales; a "full" barrier for each stage, then an "empty" one
    const u32 ring = shared_address(shared);
    const u32 full = ring + RING_BYTES, empty = full + 8 * STAGES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    if (threadIdx.x == 0) {
        if (ring % 1024) __trap();   // the swizzle counts from there
        for (int stage = 0; stage < STAGES; ++stage) {
            init_barrier(full + 8 * stage, 1 + 32 * MOVERS);
            init_barrier(empty + 8 * stage, GROUPS * 4);
        }
        publish_barriers();
    }
    __syncthreads();
    if (!args.early) wait_previous();
    // The next kernel may read `pairs` and `experts`: kernels before this one have written them.
    allow_next();

    if (warp == THREADS / 32) {
        if (lane == 0) move_weights(args, ring, full, empty);
    } else if (warp > THREADS / 32) {
        wait_previous();
        gather_rows(args, ring, full, empty);
    } else {
        wait_previous();
        int step = 0;
        for (Tile tile(args, blockIdx.x); tile.expert >= 0; step += STEPS) {
            const Tile next(args, tile.number + gridDim.x);
            float c[TOKENS / 2];   // for each 8 tokens: two features of two tokens
            Ends ends;
            if (TOKENS <= 24) ends.read(args, tile);
            multiply_steps(c, ring, step, STEPS);
            if (TOKENS > 24) ends.read(args, tile);
            finish_tile(args, tile, ends, c);
            tile = next;
        }
    }
}
