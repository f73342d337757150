// Linear layers with float8 weights for some ten to two hundred tokens, for Hopper (sm_90a); `linear.cu` is for fewer
// tokens. Tokens have been rounded to float8, with one scale per row, and the tensor cores multiply both as they are.
//
// A tile is FEATURES rows of the weight by TOKENS tokens. All thread blocks take even parts of the steps of all tiles
// ("stream-K": Osama et al., 2023). The thread blocks that end in the same tile leave their sums in global memory, and
// then each of them adds up and finishes some of its tokens. A thread block that goes on to another tile leaves its
// sums to them. So a thread block waits only at its end, and results do not depend on who comes first.
//
// If SHARED, the two thread blocks of a cluster have the same rows of the weight and different tokens. Each loads half
// of these rows for both (multicast).
//
// The tensor cores add up 128 in_features. These sums are then added in float32, multiplied by the weight's scale if
// GROUPED ("two-level accumulation": DeepGEMM, https://github.com/deepseek-ai/DeepGEMM); the tensor cores multiply for
// the other warpgroup meanwhile. Other scales, of tokens and of the weight's rows, are applied at the end.
//
// Compiled with: HEIGHT (rows of the weight), SIZE (in_features), GATED (the weight holds the gate's rows, then as many
// rows of the values), GATE (see `gates.cuh`), GROUPED (a scale for every 8 rows of the weight, in the order of tiles,
// and 128 in_features; otherwise one per row), TOKENS (64, 96 or 128), SHARED, STAGES of the ring and SHARED_BYTES. The
// output and the bias are bfloat16.

#define FLOAT8 1
#include "gates.cuh"
#include "wide_mma.cuh"

constexpr int BLOCK = 128;                          // in_features per stage
constexpr int FEATURES = 128;
constexpr int CLUSTER = SHARED ? 2 : 1;             // thread blocks
constexpr int THREADS = 256;                        // that multiply
constexpr int MOVERS = 128;                         // threads of the warpgroup of which one fills the ring
constexpr int TILES = HEIGHT / FEATURES;
constexpr int STEPS = SIZE / BLOCK;                 // per tile
constexpr int GROUPS = TOKENS / 8;                  // of 8 tokens
constexpr int WEIGHT_BYTES = FEATURES * 128;        // per stage
constexpr int TOKEN_BYTES = TOKENS * 128;
constexpr int STAGE_BYTES = WEIGHT_BYTES + TOKEN_BYTES;
constexpr int SCALE_BYTES = GROUPED ? FEATURES / 64 * UNIT_BYTES : 0;   // of a stage
constexpr int OUT_FEATURES = GATED ? HEIGHT / 2 : HEIGHT;

// Shared memory has the ring, the ring of scales, the tokens' factors, and each stage's "full" and "empty" barriers.
constexpr int AT_SCALES = STAGES * STAGE_BYTES;
constexpr int AT_FACTORS = AT_SCALES + STAGES * SCALE_BYTES;
constexpr int AT_FULL = AT_FACTORS + TOKENS * 4;
constexpr int AT_EMPTY = AT_FULL + STAGES * 8;

static_assert(HEIGHT % FEATURES == 0 && SIZE % BLOCK == 0, "");
static_assert(AT_EMPTY + STAGES * 8 <= SHARED_BYTES, "");
static_assert(TOKENS % 16 == 0 && STAGE_BYTES % 1024 == 0, "");

struct Arguments {
    TensorMap weight;       // [HEIGHT, SIZE]; GATED: see `load_weight`
    TensorMap x;            // [num_rows, SIZE]
    u16* out;               // [num_rows, OUT_FEATURES]
    const float* factors;   // [num_rows], of the rows of x
    const float* scales;    // GROUPED: [HEIGHT / 64, STEPS, 8]
    const float* row_scales;        // not GROUPED: [HEIGHT]
    const u16* bias;        // [HEIGHT], or null
    float* parts;           // [thread blocks, 2, FEATURES * TOKENS], sums of tiles that several thread blocks share
    int* counters;          // [columns, TILES, 2]: parts that are there, and thread blocks that have waited for them;
                            // 0 before and after a launch
    int num_rows;
};

// ---- instructions

#define LOAD(DIMENSIONS) "cp.async.bulk.tensor." #DIMENSIONS \
    ".shared::cluster.global.mbarrier::complete_tx::bytes"

__device__ __forceinline__ void load_tokens(u32 to, const TensorMap& map, int k, int row, u32 barrier) {
    asm volatile(LOAD(2d) " [%0], [%1, {%2, %3}], [%4];"
                 :: "r"(to), "l"(&map), "r"(k), "r"(row), "r"(barrier) : "memory");
}

// A weight is read once, or by all at the same time, so it leaves the L2 cache first ("evict first"). If SHARED, it
// goes to both thread blocks. GATED: the map is of [features / 8, 2, 8, SIZE], so that 8 rows of the gate come right
// before the 8 rows that they open, and both land in the same thread.
__device__ __forceinline__ void load_weight(u32 to, const TensorMap& map, int k, int row, u32 barrier) {
    const u64 policy = 0x12f0000000000000;
#if GATED && SHARED
    asm volatile(LOAD(4d) ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3, %3, %4}], [%5], %6, %7;"
                 :: "r"(to), "l"(&map), "r"(k), "r"(0), "r"(row / 16), "r"(barrier), "h"((u16)3), "l"(policy)
                 : "memory");
#elif GATED
    asm volatile(LOAD(4d) ".L2::cache_hint [%0], [%1, {%2, %3, %3, %4}], [%5], %6;"
                 :: "r"(to), "l"(&map), "r"(k), "r"(0), "r"(row / 16), "r"(barrier), "l"(policy) : "memory");
#elif SHARED
    asm volatile(LOAD(2d) ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;"
                 :: "r"(to), "l"(&map), "r"(k), "r"(row), "r"(barrier), "h"((u16)3), "l"(policy) : "memory");
#else
    asm volatile(LOAD(2d) ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;"
                 :: "r"(to), "l"(&map), "r"(k), "r"(row), "r"(barrier), "l"(policy) : "memory");
#endif
}

// syncs the threads that multiply
__device__ __forceinline__ void sync_multipliers() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

// syncs them with the warp that has waited for parts
__device__ __forceinline__ void sync_with_parts() { asm volatile("bar.sync 2, 288;" ::: "memory"); }

// ---- which steps are whose

// The steps of all tiles are numbered in sequence, STEPS for each tile; the thread blocks of a column share them.
__device__ __forceinline__ int first_step(int block) { return TILES * STEPS * block / (int)gridDim.y; }

__device__ __forceinline__ int owner(int step) { return ((step + 1) * (int)gridDim.y - 1) / (TILES * STEPS); }

// The thread blocks of this column that have steps of a tile: `first` to `last`. Those for which it is the last tile
// finish it: these are the first `finishers` of them.
struct Share {
    int tile, first, last, finishers;
    __device__ __forceinline__ explicit Share(int tile)
        : tile(tile), first(owner(tile * STEPS)), last(owner((tile + 1) * STEPS - 1)),
          finishers(last - first + (first_step(last + 1) <= (tile + 1) * STEPS)) {}
    __device__ __forceinline__ bool is_whole() const { return first == last; }
    // the number of parts that are left before the tile is finished: a thread block that finishes it alone leaves none
    __device__ __forceinline__ int parts() const { return last - first + (finishers > 1); }
    __device__ __forceinline__ int* counters(const Arguments& args) const {
        return args.counters + 2 * (blockIdx.x * TILES + tile);
    }
    // where a thread block's part is: GROUPS float4 per thread, THREADS apart; it may leave parts of two tiles
    __device__ __forceinline__ float4* part(const Arguments& args, int block) const {
        const bool finishes = block - first < finishers;
        const u64 number = (u64)(blockIdx.x * gridDim.y + block) * 2 + finishes;
        return reinterpret_cast<float4*>(args.parts) + number * (FEATURES * TOKENS / 4) + threadIdx.x;
    }
};

// ---- the warp that fills the ring, and then waits for other thread blocks

struct Where {
    int rank;           // in the cluster
    int first_token;
    int begin, end;     // steps
};

__device__ __forceinline__ void fill_ring(const Arguments& args, const Where& where, u32 ring) {
    const u32 full = ring + AT_FULL, empty = ring + AT_EMPTY;
    const int count = where.end - where.begin;
    const auto start = [&](int i) {
        const int tile = (where.begin + i) / STEPS, step = (where.begin + i) % STEPS;
        const u32 stage = i % STAGES, barrier = full + 8 * stage, to = ring + stage * STAGE_BYTES;
        const int row = tile * FEATURES, first = where.rank * (FEATURES / CLUSTER);   // that this thread block loads
        expect_bytes(barrier, STAGE_BYTES + SCALE_BYTES);
        load_weight(to + first * 128, args.weight, step * BLOCK, row + first, barrier);
#pragma unroll
        for (int unit = 0; GROUPED && unit < FEATURES / 64; ++unit)
            load_bytes(ring + AT_SCALES + stage * SCALE_BYTES + unit * UNIT_BYTES,
                       args.scales + ((u64)(row / 64 + unit) * STEPS + step) * 8, UNIT_BYTES, barrier);
    };
    const auto finish = [&](int i) {
        const int step = (where.begin + i) % STEPS;
        const u32 stage = i % STAGES, to = ring + stage * STAGE_BYTES + WEIGHT_BYTES;
        load_tokens(to, args.x, step * BLOCK, where.first_token, full + 8 * stage);
    };
    const int filled = min(count, STAGES);
    for (int i = 0; i < filled; ++i) start(i);
    wait_previous();
    allow_next();
    for (int i = 0; i < filled; ++i) finish(i);
    for (int i = filled; i < count; ++i) {
        wait_barrier(empty + 8 * (i % STAGES), (i / STAGES - 1) & 1);
        start(i);
        finish(i);
    }
}

// Called by one thread: returns once all parts of a tile are there.
__device__ __forceinline__ void wait_for_parts(const Arguments& args, const Share& share) {
    int there;
    do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];"
                    : "=r"(there) : "l"(share.counters(args)) : "memory");
    while (there < share.parts());
}

// Called by the same thread: the last of the tile's thread blocks to have waited zeroes the counters.
__device__ __forceinline__ void have_waited(const Arguments& args, const Share& share) {
    int* const counters = share.counters(args);
    int before;
    asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counters + 1) : "memory");
    if (before == share.finishers - 1) counters[0] = counters[1] = 0;
}

// ---- the warps that multiply

using Sums = float[TOKENS / 2];   // for each 8 tokens: two features of two tokens

// A position in the ring: which stage, and whether it is the second, fourth ... time that the stage is used.
struct Position {
    u32 stage = 0, phase = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

// c = the product over `count` steps of the thread block
__device__ __forceinline__ void multiply_steps(Sums& c, u32 ring, Position& at, int count) {
    const u32 full = ring + AT_FULL, empty = ring + AT_EMPTY;
    const int group = __shfl_sync(ALL, threadIdx.x / 128, 0);   // so that the compiler sees that a warp has only one
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const u32 scales = ring + AT_SCALES + group * UNIT_BYTES + warp * 8;
    Sums sums;
#pragma unroll
    for (int j = 0; j < TOKENS / 2; ++j) c[j] = sums[j] = 0;
#pragma unroll 1
    for (int i = 0; i < count; ++i, at.advance()) {
        const u64 a = matrix(ring + at.stage * STAGE_BYTES + group * (WEIGHT_BYTES / 2));
        const u64 b = matrix(ring + at.stage * STAGE_BYTES + WEIGHT_BYTES);
        float low, high;
        wait_barrier(full + 8 * at.stage, at.phase);
        begin_mma();
#pragma unroll
        for (int k = 0; k < 4; ++k) Mma<TOKENS>::multiply(sums, a + 2 * k, b + 2 * k, k > 0);
        end_mma();
        if (GROUPED)
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                         : "=f"(low), "=f"(high) : "r"(scales + at.stage * SCALE_BYTES));
        wait_mma<0>();
        now_written<TOKENS / 2>(sums);
        if (SHARED && lane < CLUSTER) arrive_at(empty + 8 * at.stage, lane);
        if (!SHARED && lane == 0) arrive(empty + 8 * at.stage);
#pragma unroll
        for (int j = 0; j < TOKENS / 2; ++j) c[j] += GROUPED ? (j / 2 % 2 ? high : low) * sums[j] : sums[j];
    }
}

// What one thread needs to finish a tile, and where its results go.
struct Rows {
    float low, high;            // scales of both of its rows of the weight
    float low_bias, high_bias;
    int feature;                // the first of its warp's 8 or 16
};

__device__ __forceinline__ Rows rows_of(const Arguments& args, int first_row) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int feature = (GATED ? first_row / 2 : first_row) + (GATED ? 8 : 16) * warp;
    const int low = feature + lane / 4, high = low + (GATED ? OUT_FEATURES : 8);
    Rows rows{1, 1, 0, 0, feature};
    if (!GROUPED) rows.low = args.row_scales[low], rows.high = args.row_scales[high];
    if (args.bias) rows.low_bias = to_float(args.bias[low]), rows.high_bias = to_float(args.bias[high]);
    return rows;
}

// Keeps the factors of this thread block's tokens in shared memory: one load from global memory for every 8 tokens
// would take longer than all else that is done to finish them.
__device__ __forceinline__ void keep_factors(const Arguments& args, int first_token, u32 ring) {
    const int token = threadIdx.x;
    if (token < TOKENS) {
        const float factor = first_token + token < args.num_rows ? __ldcg(args.factors + first_token + token) : 0;
        asm volatile("st.shared.f32 [%0], %1;" :: "r"(ring + AT_FACTORS + token * 4), "f"(factor) : "memory");
    }
    sync_multipliers();
}

// the factors of a thread's two tokens of 8
__device__ __forceinline__ float2 factors_of(u32 ring, int group) {
    float2 factors;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(factors.x), "=f"(factors.y)
                 : "r"(ring + AT_FACTORS + group * 32 + threadIdx.x % 4 * 8));
    return factors;
}

// Finishes 8 tokens. `sums` are the lower feature's sums of two tokens, then the higher feature's.
__device__ __forceinline__ void finish(
    const Arguments& args, const Rows& rows, int first_token, float2 factors, float4 sums) {
    const int lane = threadIdx.x % 32, to = first_token + lane / 4;
    const float a = sums.x * (factors.x * rows.low) + rows.low_bias;
    const float b = sums.y * (factors.y * rows.low) + rows.low_bias;
    const float c = sums.z * (factors.x * rows.high) + rows.high_bias;
    const float d = sums.w * (factors.y * rows.high) + rows.high_bias;
    u32* const out = reinterpret_cast<u32*>(args.out + (u64)to * OUT_FEATURES + rows.feature) + lane % 4;
#if GATED
    const u32 both = transposed(pack(opened<GATE>(a, c), opened<GATE>(b, d)));
    if (to < args.num_rows) out[0] = both;
#else
    const u32 low = transposed(pack(a, b)), high = transposed(pack(c, d));
    if (to < args.num_rows) out[0] = low, out[4] = high;
#endif
}

__device__ __forceinline__ void finish_all(
    const Arguments& args, const Sums& c, int first_row, int first_token, u32 ring) {
    const Rows rows = rows_of(args, first_row);
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
        const float* const of = c + 4 * i;
        finish(args, rows, first_token + 8 * i, factors_of(ring, i), make_float4(of[0], of[1], of[2], of[3]));
    }
}

__device__ __forceinline__ void leave_part(const Arguments& args, const Sums& c, const Share& share) {
    float4* const part = share.part(args, blockIdx.y);
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
        const float* const of = c + 4 * i;
        __stcg(part + i * THREADS, make_float4(of[0], of[1], of[2], of[3]));
    }
}

// Adds the other thread blocks' parts of a tile that this one alone finishes.
__device__ __forceinline__ void add_parts(const Arguments& args, Sums& c, const Share& share) {
#pragma unroll 1
    for (int block = share.first + 1; block <= share.last; ++block) {
        const float4* const part = share.part(args, block);
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) {
            const float4 of = __ldcg(part + i * THREADS);
            float* const sums = c + 4 * i;
            sums[0] += of.x, sums[1] += of.y, sums[2] += of.z, sums[3] += of.w;
        }
    }
}

// Finishes this thread block's share of a tile that several finish. Many loads are under way at once.
__device__ __forceinline__ void finish_share(
    const Arguments& args, const Share& share, int first_row, int first_token, u32 ring) {
    constexpr int PAIR = 2, TOGETHER = 8;
    const int items = min(GROUPS, (args.num_rows - first_token + 7) / 8);   // 8 tokens
    const int rank = blockIdx.y - share.first;
    const int begin = items * rank / share.finishers, end = items * (rank + 1) / share.finishers;
    const Rows rows = rows_of(args, first_row);
#pragma unroll 1
    for (int item = begin; item < end; item += PAIR) {
        float4 sums[PAIR] = {};
#pragma unroll 1
        for (int block = share.first; block <= share.last; block += TOGETHER) {
            float4 of[TOGETHER][PAIR];
#pragma unroll
            for (int j = 0; j < TOGETHER; ++j)
#pragma unroll
                for (int k = 0; k < PAIR; ++k) {
                    of[j][k] = make_float4(0, 0, 0, 0);
                    if (block + j <= share.last && item + k < end)
                        of[j][k] = __ldcg(share.part(args, block + j) + (item + k) * THREADS);
                }
#pragma unroll
            for (int j = 0; j < TOGETHER; ++j)
#pragma unroll
                for (int k = 0; k < PAIR; ++k) {
                    sums[k].x += of[j][k].x, sums[k].y += of[j][k].y;
                    sums[k].z += of[j][k].z, sums[k].w += of[j][k].w;
                }
        }
#pragma unroll
        for (int k = 0; k < PAIR; ++k) {
            if (item + k >= end) break;
            finish(args, rows, first_token + (item + k) * 8, factors_of(ring, item + k), sums[k]);
        }
    }
}

// Multiplies `count` steps of a tile, to the tile's end or to the last one of this thread block.
__device__ __forceinline__ void take_tile(
    const Arguments& args, const Where& where, int tile, int count, Position& at, u32 ring) {
    const Share share(tile);
    const int row = tile * FEATURES;
    const bool finishes = where.end <= (tile + 1) * STEPS, alone = finishes && share.finishers == 1;
    Sums c;
    multiply_steps(c, ring, at, count);
    if (share.is_whole()) return finish_all(args, c, row, where.first_token, ring);
    if (!alone) {
        leave_part(args, c, share);
        sync_multipliers();
        if (threadIdx.x == 0)
            asm volatile("red.release.gpu.global.add.s32 [%0], 1;" :: "l"(share.counters(args)) : "memory");
    }
    if (!finishes) return;
    sync_with_parts();
    if (alone) {
        add_parts(args, c, share);
        finish_all(args, c, row, where.first_token, ring);
    } else {
        finish_share(args, share, row, where.first_token, ring);
    }
}

// ---- the kernel

extern "C" __global__ void __launch_bounds__(THREADS + MOVERS, 1)
float8_linear(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(1024) u8 shared[];
    const u32 ring = shared_address(shared), full = ring + AT_FULL, empty = ring + AT_EMPTY;
    if (threadIdx.x == 0) {
        if (ring % 1024) __trap();   // the swizzle counts from there
        for (int stage = 0; stage < STAGES; ++stage) {
            init_barrier(full + 8 * stage, 1);
            init_barrier(empty + 8 * stage, CLUSTER * THREADS / 32);
        }
        publish_barriers();
    }
    if (SHARED) meet_cluster();
    else __syncthreads();
    const int rank = blockIdx.x % CLUSTER, first_token = blockIdx.x * TOKENS;
    const Where where{rank, first_token, first_step(blockIdx.y), first_step(blockIdx.y + 1)};
    if (threadIdx.x >= THREADS) {
        if (threadIdx.x / 32 == THREADS / 32) {
            const bool first = threadIdx.x == THREADS;
            if (first) fill_ring(args, where, ring);
            const Share share((where.end - 1) / STEPS);   // the last tile is the only one with a wait
            if (!share.is_whole()) {
                if (first) wait_for_parts(args, share);
                __syncwarp();
                sync_with_parts();
                if (first) have_waited(args, share);
            }
        }
        __syncwarp();
    } else {
        wait_previous();   // they may use the parts and counters, too
        allow_next();
        keep_factors(args, first_token, ring);
        Position position;
        for (int step = where.begin; step < where.end;) {
            const int tile = step / STEPS, end = min(where.end, (tile + 1) * STEPS);
            take_tile(args, where, tile, end - step, position, ring);
            step = end;
        }
    }
    if (SHARED) meet_cluster();   // the other thread block may still arrive at this one's barriers
}
