// A GEMM of blocks of many rows, each with the weight of its own expert, for Hopper (sm_90a). It is for prompts;
// `experts.cu` is for decoding.
//
// With small tiles, such a GEMM is limited by how much the L2 cache delivers. So a tile is large, 256 rows of an
// expert's weight by up to 128 rows of x. The two thread blocks of a cluster multiply the same rows of the weight by
// different rows of x, and each loads half of the weight's rows for both (multicast). Rows of x are gathered by
// cp.async. Two warpgroups multiply, each with 128 rows of the weight. An MMA is as wide as the number of rows of x,
// rounded up.
//
// FLOAT8: the weight and x are e4m3. The tensor cores add up 128 in_features. These sums are then added in float32,
// multiplied by the weight's scale if GROUPED ("two-level accumulation": DeepGEMM,
// https://github.com/deepseek-ai/DeepGEMM). Other scales, of rows of x and of the weight, are applied at the end.
//
// Compiled with: HEIGHT (rows of an expert's weight), SIZE (in_features), GATED (the weight holds the gate's rows, then
// as many rows of the values), GATE (see `gates.cuh`; not CLAMPED), FLOAT8, GROUPED (a scale for every 8 rows of the
// weight, in the order of tiles, and 128 in_features; otherwise, with FLOAT8, one per row), STAGES of the ring and
// SHARED_BYTES. All other values are bfloat16.

#include "gates.cuh"
#include "wide_mma.cuh"

constexpr int BLOCK = FLOAT8 ? 128 : 64;            // in_features per stage: rows of 128 bytes
constexpr int FEATURES = 256;                       // per tile
constexpr int TOKENS = 128;                         // rows of x per tile, at most
constexpr int GRAIN = 32;                           // rows of x are rounded up to a multiple of this
constexpr int CLUSTER = 2;                          // thread blocks
constexpr int ROWS = CLUSTER * TOKENS;              // per block
constexpr int WAVES = 2;                            // of 64 features, per warpgroup
constexpr int THREADS = 256;                        // that multiply
constexpr int MOVERS = 128;                         // threads that fill the ring
constexpr int TILES = HEIGHT / FEATURES;            // of an expert's weight
constexpr int STEPS = SIZE / BLOCK;                 // of a tile
constexpr u32 ROW_BYTES = STEPS * 128;              // of x
constexpr u32 NOWHERE = 0xffffffff;
constexpr int WEIGHT_BYTES = FEATURES * 128;        // per stage
constexpr int STAGE_BYTES = WEIGHT_BYTES + TOKENS * 128;
constexpr int UNITS = (HEIGHT + 127) / 128 * 2;     // of 64 rows that have scales, per expert
constexpr int COLUMNS = (SIZE + 255) / 256 * 2;     // of 128 in_features, per unit
constexpr int SCALE_BYTES = GROUPED ? FEATURES / 64 * UNIT_BYTES : 0;   // of a stage
constexpr int OUT_FEATURES = GATED ? HEIGHT / 2 : HEIGHT;
constexpr int ITEMS = TOKENS * 8 / MOVERS;          // 16-byte chunks of a stage that a mover copies
constexpr int FINISHED = TOKENS * 128;              // bytes of a warpgroup's finished rows

// Shared memory has the ring; for each warpgroup, finished rows, where they go, and their factors; rings of scales and
// of tiles; and each stage's "full" and "empty" barriers.
constexpr int AT_FINISHED = STAGES * STAGE_BYTES;
constexpr int AT_ROWS = AT_FINISHED + 2 * FINISHED;
constexpr int AT_FACTORS = AT_ROWS + 2 * TOKENS * 4;
constexpr int AT_SCALES = AT_FACTORS + 2 * TOKENS * 4;
constexpr int AT_TILES = AT_SCALES + STAGES * SCALE_BYTES;
constexpr int AT_FULL = AT_TILES + STAGES * 16;
constexpr int AT_EMPTY = AT_FULL + STAGES * 8;

static_assert(HEIGHT % FEATURES == 0 && SIZE % 128 == 0, "");
static_assert(AT_EMPTY + STAGES * 8 <= SHARED_BYTES, "");
static_assert((FLOAT8 || !GROUPED) && GATE != CLAMPED, "");

struct Arguments {
    TensorMap weight;       // [num_experts, HEIGHT, SIZE]; GATED: see `load_weight`
    const u8* x;            // [num_pairs / top_k, SIZE]
    u16* out;               // [num_pairs, OUT_FEATURES]
    const int* pairs;       // [num_blocks, ROWS]: rows of the output; num_pairs where a block is not full, at its end
    const int* experts;     // [num_blocks], -1 after the last one
    const float* factors;   // [num_pairs / top_k], of the rows of x; or null
    const float* scales;    // GROUPED: [num_experts, UNITS, COLUMNS, 8]
    const float* row_scales;        // FLOAT8, not GROUPED: [num_experts, HEIGHT]
    int num_pairs;
    int num_blocks;
    int top_k;              // rows of the output for each row of x
    float limit;            // of a gate that is LIMITED or BOUNDED
};

// ---- instructions

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Loads a part of a tile's rows, FEATURES / CLUSTER of them, to all thread blocks of the cluster. GATED: the map is of
// [num_experts, features / 8, 2, 8, SIZE], so that 8 rows of the gate come right before the 8 rows that they open, and
// both land in the same thread.
__device__ __forceinline__ void load_weight(u32 to, const TensorMap& map, int k, int expert, int part, u32 barrier) {
    const u16 all = (1 << CLUSTER) - 1;
#define LOAD(DIMENSIONS) "cp.async.bulk.tensor." #DIMENSIONS \
    ".shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
#if GATED
    const int row = part * (FEATURES / CLUSTER / 16);
    asm volatile(LOAD(5d) "{%2, %3, %3, %4, %5}], [%6], %7;"
                 :: "r"(to), "l"(&map), "r"(k), "r"(0), "r"(row), "r"(expert), "r"(barrier), "h"(all) : "memory");
#else
    const int row = part * (FEATURES / CLUSTER);
    asm volatile(LOAD(3d) "{%2, %3, %4}], [%5], %6;"
                 :: "r"(to), "l"(&map), "r"(k), "r"(row), "r"(expert), "r"(barrier), "h"(all) : "memory");
#endif
}

// syncs a warpgroup
__device__ __forceinline__ void meet_group(int group) {
    asm volatile("bar.sync %0, 128;" :: "r"(1 + group) : "memory");
}

__device__ __forceinline__ void store_transposed(u32 to, const u32 (&fragments)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(to), "r"(fragments[0]), "r"(fragments[1]), "r"(fragments[2]), "r"(fragments[3]) : "memory");
}

// ---- the warps that fill the ring

// A thread block's part of its cluster's tile. Tiles of the same block follow each other, so its rows are in the L2
// cache.
struct Tile {
    int expert;     // -1 after the last tile
    int rows;       // of this thread block
    int first;      // the first of them, counted in the block
};

__device__ __forceinline__ void fill_ring(const Arguments& args, u8* shared, u32 rank) {
    const u32 ring = shared_address(shared), full = ring + AT_FULL, empty = ring + AT_EMPTY;
    const int thread = threadIdx.x - THREADS, chunk = thread % 8, row = thread / 8;
    Tile* const tiles = reinterpret_cast<Tile*>(shared + AT_TILES);
    int step = 0;
    const auto wait_empty = [&] {
        if (step >= STAGES) wait_barrier(empty + 8 * (step % STAGES), (step / STAGES - 1) & 1);
    };
    for (int number = blockIdx.x / CLUSTER;; number += gridDim.x / CLUSTER) {
        const int block = number / TILES, of_expert = number % TILES;
        const int expert = block < args.num_blocks ? __ldcg(args.experts + block) : -1;
        if (expert < 0) break;
        const int* const pairs = args.pairs + (u64)block * ROWS;
        int count = 0;
#pragma unroll
        for (int i = 0; i < ROWS / 32; ++i)
            count += __popc(__ballot_sync(0xffffffff, __ldcg(pairs + 32 * i + thread % 32) < args.num_pairs));
        const int share = (count + CLUSTER * GRAIN - 1) / (CLUSTER * GRAIN) * GRAIN;   // equal ones
        const int first = rank * share, rows = max(min(count - first, share), 0);
        u32 from[ITEMS];   // counted in rows
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            const int at = item * (MOVERS / 8) + row;
            from[item] = at < rows ? __ldcg(pairs + first + at) / args.top_k : NOWHERE;
        }
        for (int i = 0; i < STEPS; ++i, ++step) {
            const u32 stage = step % STAGES, barrier = full + 8 * stage, to = ring + stage * STAGE_BYTES;
            wait_empty();
            if (thread == 0) {
                if (i == 0) tiles[stage] = Tile{expert, rows, first};
                expect_bytes(barrier, WEIGHT_BYTES + SCALE_BYTES);
                load_weight(to + rank * (WEIGHT_BYTES / CLUSTER), args.weight, i * BLOCK, expert,
                            of_expert * CLUSTER + rank, barrier);
#pragma unroll
                for (int unit = 0; GROUPED && unit < FEATURES / 64; ++unit) {
                    const u64 line = (u64)expert * UNITS + of_expert * (FEATURES / 64) + unit;
                    load_bytes(ring + AT_SCALES + stage * SCALE_BYTES + unit * UNIT_BYTES,
                               args.scales + (line * COLUMNS + i) * 8, UNIT_BYTES, barrier);
                }
            }
            __syncwarp();
            const u8* const x = args.x + i * 128 + chunk * 16;
#pragma unroll
            for (int item = 0; item < ITEMS; ++item) {
                if (from[item] == NOWHERE) continue;   // old contents are multiplied, but never stored
                const int at = item * (MOVERS / 8) + row;
                copy_16(to + WEIGHT_BYTES + at * 128 + (chunk ^ at % 8) * 16, x + (u64)from[item] * ROW_BYTES);
            }
            arrive_copied(barrier);
        }
    }
    wait_empty();   // one more step says that there are no more tiles
    if (thread == 0) {
        tiles[step % STAGES] = Tile{-1, 0, 0};
        arrive(full + 8 * (step % STAGES));
    }
    arrive(full + 8 * (step % STAGES));
}

// ---- the warps that multiply

// Where one of a warpgroup's rows goes; each thread has one row.
struct Place {
    int pair;
    float factor;
};

#if FLOAT8
// If GROUPED, loads the scales of both rows of a thread from a stage's scales at `from`.
__device__ __forceinline__ void load_scales(float (&scales)[WAVES][2], u32 from) {
    const int group = threadIdx.x / 128, warp = threadIdx.x % 128 / 32;
#pragma unroll
    for (int wave = 0; GROUPED && wave < WAVES; ++wave) {
        const u32 at = from + (group * WAVES + wave) * UNIT_BYTES + warp * 8;
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(scales[wave][0]), "=f"(scales[wave][1]) : "r"(at));
    }
}

// c += the product over a stage of 128 in_features: a warpgroup's rows of the weight at `a`, 64 per wave, times N rows
// of x at `b`. `scales` are used if GROUPED. `release` is called once the stage is no longer read.
//
// The `sums` of both waves take the same registers, as there are no others left. The compiler does so because it cannot
// see that the old sums are never added to: `never` is 0.
template <int N, class Release>
__device__ __forceinline__ void add_stage(
    float (&c)[WAVES][TOKENS / 2], float (&sums)[TOKENS / 2], u64 a, u64 b, const float (&scales)[WAVES][2], u32 never,
    const Release& release) {
#pragma unroll
    for (int wave = 0; wave < WAVES; ++wave) {
        begin_mma();
#pragma unroll
        for (int k = 0; k < 4; ++k)
            if (k == 0) Mma<N>::multiply(sums, a + wave * (8192 >> 4), b, never);
            else Mma<N>::multiply(sums, a + wave * (8192 >> 4) + 2 * k, b + 2 * k);
        end_mma();
        wait_mma<0>();
        now_written<N / 2>(sums);
        if (wave == WAVES - 1) release();
#pragma unroll
        for (int j = 0; j < N / 2; ++j)
            c[wave][j] += GROUPED ? scales[wave][j / 2 % 2] * sums[j] : sums[j];
    }
}
#endif

// c = the tile's product, from step `first` of the thread block on. Also reads the factor of `place`.
template <int N>
__device__ __forceinline__ void multiply_steps(
    const Arguments& args, float (&c)[WAVES][TOKENS / 2], u32 ring, int first, Place& place) {
    const u32 full = ring + AT_FULL, empty = ring + AT_EMPTY;
    const int group = threadIdx.x / 128, lane = threadIdx.x % 32;
    const auto release = [&](int step) {
        if (lane < CLUSTER) arrive_at(empty + 8 * (step % STAGES), lane);
    };
    const auto begin_step = [&](int i) {
        wait_barrier(full + 8 * ((first + i) % STAGES), (first + i) / STAGES & 1);
        see_copies();
        if (i == STEPS / 2 && args.factors && place.pair < args.num_pairs)
            place.factor = args.factors[place.pair / args.top_k];
    };
    float sums[TOKENS / 2];
    [[maybe_unused]] const u32 never = args.num_blocks < 0;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) c[0][i] = c[1][i] = sums[i] = 0;
#pragma unroll 1
    for (int i = 0; i < STEPS; ++i) {
        const u32 stage = (first + i) % STAGES;
        const u64 a = matrix(ring + stage * STAGE_BYTES + group * (WEIGHT_BYTES / 2));
        const u64 b = matrix(ring + stage * STAGE_BYTES + WEIGHT_BYTES);
        begin_step(i);
#if FLOAT8
        float scales[WAVES][2];
        load_scales(scales, ring + AT_SCALES + stage * SCALE_BYTES);
        add_stage<N>(c, sums, a, b, scales, never, [&] { release(first + i); });
#else
        begin_mma();
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
            for (int wave = 0; wave < WAVES; ++wave)
                Mma<N>::multiply(c[wave], a + wave * (8192 >> 4) + 2 * k, b + 2 * k);
        end_mma();
        wait_mma<1>();   // one stage's MMAs run while the next ones are issued
        if (i > 0) release(first + i - 1);
#endif
    }
#if !FLOAT8
    wait_mma<0>();
    release(first + STEPS - 1);
#pragma unroll
    for (int wave = 0; wave < WAVES; ++wave) now_written<N / 2>(c[wave]);
#endif
}

// Writes a warpgroup's results to rows of the output, through its part of shared memory.
template <int N>
__device__ __forceinline__ void finish_tile(
    const Arguments& args, const float (&c)[WAVES][TOKENS / 2], const Tile& tile, int of_expert, const Place& place,
    u8* shared) {
    const int group = threadIdx.x / 128, thread = threadIdx.x % 128, warp = thread / 32, lane = threadIdx.x % 32;
    u8* const finished = shared + AT_FINISHED + group * FINISHED;
    int* const pairs = reinterpret_cast<int*>(shared + AT_ROWS) + group * TOKENS;
    float* const factors = reinterpret_cast<float*>(shared + AT_FACTORS) + group * TOKENS;
    pairs[thread] = place.pair, factors[thread] = place.factor;
    meet_group(group);
    const auto finished_at = [&](int token, int chunk) { return token * 128 + (chunk ^ token % 8) * 16; };
    const auto store = [&](int feature) {   // 64 of them
        meet_group(group);
#pragma unroll
        for (int i = 0; i < N / 16; ++i) {
            const int token = 16 * i + thread / 8, chunk = thread % 8;
            if (token >= tile.rows) break;
            const uint4 eight = *reinterpret_cast<const uint4*>(finished + finished_at(token, chunk));
            *reinterpret_cast<uint4*>(args.out + (u64)pairs[token] * OUT_FEATURES + feature + 8 * chunk) = eight;
        }
        meet_group(group);
    };
#pragma unroll
    for (int wave = 0; wave < WAVES; ++wave) {
        float low = 1, high = 1;   // scales of both rows of a thread
        if (FLOAT8 && !GROUPED) {
            const int row = of_expert * (GATED ? FEATURES / 2 : FEATURES)
                + (GATED ? 8 : 16) * (8 * group + 4 * wave + warp) + lane / 4;
            const float* const scales = args.row_scales + (u64)tile.expert * HEIGHT + row;
            low = scales[0], high = scales[GATED ? OUT_FEATURES : 8];
        }
        const auto x = [&](int i, int j) {   // of 8 tokens: two features of two tokens
            const float2 by = *reinterpret_cast<const float2*>(factors + 8 * i + lane % 4 * 2);
            return c[wave][4 * i + j] * ((j % 2 ? by.y : by.x) * (j / 2 ? high : low));
        };
#if GATED
        const auto open = [&](float gate, float value) { return opened<GATE>(gate, value, 0, args.limit); };
#pragma unroll
        for (int q = 0; q < N / 32; ++q) {
            if (32 * q >= tile.rows) break;
            u32 fragments[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                fragments[i] = pack(open(x(4 * q + i, 0), x(4 * q + i, 2)), open(x(4 * q + i, 1), x(4 * q + i, 3)));
            store_transposed(shared_address(finished + finished_at(32 * q + lane, 4 * wave + warp)), fragments);
        }
#else
#pragma unroll
        for (int q = 0; q < N / 16; ++q) {
            if (16 * q >= tile.rows) break;
            u32 fragments[4];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const auto ended = [&](int j) { return opened<GATE>(x(2 * q + i, j)); };
                fragments[2 * i] = pack(ended(0), ended(1)), fragments[2 * i + 1] = pack(ended(2), ended(3));
            }
            const int token = 16 * q + lane / 16 * 8 + lane % 8;
            store_transposed(shared_address(finished + finished_at(token, 2 * warp + lane / 8 % 2)), fragments);
        }
        store(of_expert * FEATURES + group * 128 + wave * 64);
#endif
    }
#if GATED
    store(of_expert * (FEATURES / 2) + group * 64);
#endif
}

// Multiplies and finishes a tile, with the narrowest MMA that its rows fit in.
template <int N>
__device__ __forceinline__ void take_tile(
    const Arguments& args, const Tile& tile, int rows, int of_expert, int step, Place& place, u8* shared) {
    if constexpr (N < TOKENS) {
        if (rows > N) return take_tile<N + GRAIN>(args, tile, rows, of_expert, step, place, shared);
    }
    float c[WAVES][TOKENS / 2];   // for each 8 tokens: two features of two tokens
    multiply_steps<N>(args, c, shared_address(shared), step, place);
    finish_tile<N>(args, c, tile, of_expert, place, shared);
}

// ---- the kernel

extern "C" __global__ void __launch_bounds__(THREADS + MOVERS, 1)
experts_many(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(1024) u8 shared[];
    const u32 ring = shared_address(shared), full = ring + AT_FULL, empty = ring + AT_EMPTY;
    const int group = threadIdx.x / 128;
    const u32 rank = cluster_rank();
    if (threadIdx.x == 0) {
        if (ring % 1024) __trap();   // the swizzle counts from there
        for (int stage = 0; stage < STAGES; ++stage) {
            init_barrier(full + 8 * stage, 1 + MOVERS);
            init_barrier(empty + 8 * stage, CLUSTER * THREADS / 32);
        }
        publish_barriers();
    }
    meet_cluster();
    wait_previous();
    // The next kernel may read `pairs` and `experts`: kernels before this one have written them.
    allow_next();

    if (group == 2) {
        leave_registers<40>();
        fill_ring(args, shared, rank);
    } else {
        take_registers<232>();
        const Tile* const tiles = reinterpret_cast<const Tile*>(shared + AT_TILES);
        int step = 0;
        for (int number = blockIdx.x / CLUSTER;; number += gridDim.x / CLUSTER, step += STEPS) {
            wait_barrier(full + 8 * (step % STAGES), step / STAGES & 1);
            const Tile tile = tiles[step % STAGES];
            if (tile.expert < 0) break;
            Place place{args.num_pairs, 1};
            const int token = threadIdx.x % 128;
            if (token < tile.rows) place.pair = __ldcg(args.pairs + (u64)(number / TILES) * ROWS + tile.first + token);
            const int rows = __shfl_sync(0xffffffff, tile.rows, 0);   // the same for all, and now the compiler sees it
            take_tile<GRAIN>(args, tile, rows, number % TILES, step, place, shared);
        }
    }
    meet_cluster();   // others may still write to this one's shared memory
}
