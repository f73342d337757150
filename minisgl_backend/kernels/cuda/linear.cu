// Linear layers of up to 256 tokens, fused with the operations around them, for Hopper (sm_90a).
//
// Weights are the long side of the GEMM and tokens the short side: a tile is FEATURES rows of the weight by TOKENS
// tokens. A dedicated warp moves tiles of 64 in_features into a ring in shared memory with the bulk tensor copy engine,
// and warpgroups multiply them from there (wgmma). Weights depend on no other kernel, so an early launch fills the ring
// with them before its predecessor ends.
//
// There are three ways to share the work. Either each thread block has a tile. Or, if there are few tiles, SPLITS
// thread blocks share a tile along in_features and exchange their parts over shared memory ("split-K"). Or, for a large
// weight, all thread blocks take EVEN parts of all tiles ("stream-K": Osama et al., 2023); if another thread block
// began a tile, they leave their sums of it in global memory.
//
// RMSNorm is split into a factor per feature and a factor per token. The GEMM that writes the residual stream also
// writes it times the norm's weight, and writes each tile's part of each token's sum of squares. The GEMM that reads
// these scales its result by factors that another warp computes meanwhile. For queries, keys and values, a tile is a
// head, which is normalized, rotated and stored in the KV cache before it leaves the thread block.
//
// ADAPTED: tokens may have LoRA adapters, (x A^T) B^T with each token's own A and B. Each warp adds what its sums need
// of x A^T times B^T. x A^T is computed by the kernel before this one, that of `adapters.cu`, while this one already
// multiplies; or, if this kernel is JOINED, here: the A of all adapters make tiles, as if they were rows of the weight.
// Tiles that no token needs are left out. The tiles of A come first. Thread blocks start and take steps in this order,
// so those that wait for x A^T do not keep it from being computed. x A^T is handed over as pairs of numbers, each
// written together with the number of the launch in one store: a reader of a pair sees whether it is there, and nothing
// needs to be cleared.
//
// `tile_gemm.cuh` has the ring and multiplies from it, quantized weights included; `split_sums.cuh` adds up the sums of
// a shared tile; `finisher.cuh` finishes them, adapters included.
//
// Compiled with: FEATURES (64 or 128: rows of the weight per tile), TOKENS (8, 16, 32, 64, 96, 128 or 192), SIZE
// (in_features), WHOLE (tiles divide the weight's rows; otherwise some rows of the last tile are not there, which only
// a bfloat16 weight that is neither GATED nor HEADS may have), BLOCK (in_features per stage: 64; for codes 128, for
// 4-bit codes also 256), STAGES (of the ring), SPLITS, EVEN, GATED (the weight holds the gate's rows, then as many rows
// of the values), GATE (see `gates.cuh`), RESIDUAL (the result is added to the residual stream), HEADS (the result is
// queries, keys and values, in heads of size FEATURES) and, with HEADS, PAGE_SIZE and FP8 (of the KV cache), ADAPTED
// and, with ADAPTED, JOINED (only for bfloat16 weights, up to TOKENS tokens and 32 tiles of A), PUSHED (the SPLITS send
// each other their sums; otherwise they read them), SHARED_BYTES, PER_PROCESSOR (thread blocks that a multiprocessor
// has registers for), and CODE, GROUP, SHARED_BY, ZEROS, BY_WARP and WAYS as in `tile_gemm.cuh`. All other values are
// bfloat16: what is not normalized yet needs its range.

#define FLOAT8 0
#include "gates.cuh"
#include "heads.cuh"
#include "tile_gemm.cuh"
#include "turns.cuh"

constexpr bool AFTER_SHRINK = ADAPTED && !JOINED;   // the kernel before this one computes x A^T
constexpr int TILE_STEPS = SIZE / BLOCK;
constexpr int STEPS = TILE_STEPS % SPLITS ? 0 : TILE_STEPS / SPLITS;   // per thread block, unless EVEN; 0: they differ
constexpr int MULTIPLIERS = WAYS * THREADS;
constexpr int WAY_BYTES = (WAYS - 1) * TOKENS * FEATURES * 4;    // the sums that the second way leaves
constexpr int OUT = GATED ? FEATURES / 2 : FEATURES;    // output features per tile
constexpr int PITCH = 2 * OUT + 16;                 // bytes per token in a finished tile; 8 rows use all banks
constexpr int OWN = TOKENS > 8 * SPLITS ? TOKENS / SPLITS : 8;   // tokens that a thread block finishes
// EVEN: a tile is finished in slices of up to MOST_OF_SLICE tokens, since there is little memory beside the ring.
// `Cut.shared_bytes` of linear_cut.py has the same numbers.
constexpr int halved(int tokens, int most) { return tokens > most ? halved(tokens / 2, most) : tokens; }
constexpr int MOST_OF_SLICE = (TOKENS > 128 && !HEADS ? 64 : 32) * (GATED ? 2 : 1);
constexpr int SLICE = EVEN ? halved(OWN, MOST_OF_SLICE) : OWN;   // tokens that are finished at a time
constexpr int SLICES = OWN / SLICE;
constexpr int PARTS_BYTES = SPLITS > 1 ? TOKENS * FEATURES * 4 : 0;
constexpr int CHUNKS = (HEADS ? OUT / 2 : OUT) / 8; // of 16 bytes; of a head, a thread has one in each half
constexpr int ROWS = THREADS / CHUNKS;              // tokens that the threads finish side by side
constexpr int ITEMS = (SLICE + ROWS - 1) / ROWS;
// Whether the next kernel may start as soon as this one has. Attention follows HEADS, and the sum over the ranks
// (`fused_sum.cu`) follows a plain GEMM. Before they wait for this kernel, both read what earlier kernels wrote, so
// they may start only once those have ended.
constexpr bool AT_ONCE = GATED || RESIDUAL;
// PUSHED: what a thread block receives from the other SPLITS, at SHARED_BYTES; the barrier that counts it comes next
constexpr int PUSHED_BYTES = PUSHED ? (SPLITS - 1) * OWN * FEATURES * 4 : 0;

static_assert(SIZE % BLOCK == 0 && TILE_STEPS >= SPLITS, "");
static_assert(WHOLE || !(GATED || HEADS || CODE), "");
static_assert(OWN % 8 == 0 && TOKENS % OWN == 0 && OWN % SLICE == 0, "");
static_assert(EVEN ? SPLITS == 1 : PARTS_BYTES + OWN * PITCH <= STAGES * STAGE_BYTES, "");
static_assert(RING_BYTES + STAGES * 16 + 4 * TOKENS + (EVEN ? SLICE * PITCH : 0) + WAY_BYTES <= SHARED_BYTES, "");
static_assert(SHARED_BYTES % 16 == 0, "");
static_assert(THREADS % CHUNKS == 0 && GATED + RESIDUAL + HEADS <= 1, "");
static_assert(!JOINED || (ADAPTED && !CODE), "");

// ADAPTED: see `kernels.adapters`.
struct Adapters {
    const u16* inner;       // [num_rows, projections * max_rank], x A^T; 0 beyond the rank of a token's adapter
    const u32* turns;       // [2]: says when x is there, which may be before `inner` is
    const u16* b;           // [slots, out_features, max_rank]
    const int* slots;       // [num_rows], of each token; 0: none
    const int* ranks;       // [num_rows], of the adapters of each token
    u64 slot_stride;        // of B
    int columns;            // of inner
    int max_rank;           // a multiple of RANK_STEP
    int second;             // the first output of the second projection
    int third;              // and of the third
    int tiles_of_a;         // JOINED
    uint4* pairs;           // JOINED, in place of `inner`: [TOKENS, columns / 4], two pairs of numbers, each followed
                            // by the number of its launch
    u32* launches;          // JOINED: [thread blocks], launches of this kernel so far
};

struct Arguments {
    TensorMap weight;       // [out_features, SIZE], of codes in bytes; GATED: see `load_weight`
    TensorMap x;            // [num_rows, SIZE]
    TensorMap a;            // JOINED: [slots * columns, SIZE]
    u16* out;               // [num_rows, features]; RESIDUAL: the stream, which is also read; HEADS: queries
    u16* scaled;            // RESIDUAL: the stream times norm_weight
    const u16* norm_weight; // RESIDUAL: [features], of the norm that follows
    float* squares_out;     // RESIDUAL: [features / OUT, num_rows], sums of squares of each tile
    const float* squares;   // [square_tiles, num_rows] of x before its norm's weight; null: no norm
    const u16* bias;        // [out_features], or null
    float* parts;           // EVEN: [thread blocks, FEATURES * TOKENS], sums of tiles that another one finishes
    int* are_there;         // EVEN: [thread blocks], 1 while the part is there; 0 before and after a launch
    int tiles;              // of the weight
    int square_tiles;
    int num_rows;
    int features;           // of the output
    float eps;
    Heads heads;
    const float* scales;    // of codes: [out_features / 64, TILE_STEPS, BLOCK / GROUP, 64 / SHARED_BY], with rows in
                            // the order of tiles
    const float* row_scales;        // OF_ROWS: [out_features]
    Adapters adapters;
};

// ---- instructions

template <bool ORDERED>
__device__ __forceinline__ void sync_cluster() {
    arrive_in_cluster<ORDERED>();
    wait_for_cluster();
}

__device__ __forceinline__ void load_tile(u32 to, const TensorMap& map, int k, int row, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];"
                 :: "r"(to), "l"(&map), "r"(k), "r"(row), "r"(barrier) : "memory");
}

// GATED: the map is of [features / 8, 2, 8, SIZE], so that 8 rows of the gate come right before the 8 rows that they
// open, and both land in the same thread. ADAPTED: a weight that is read once is the first to leave the L2 cache, so
// that A, B and x stay there until they are needed.
__device__ __forceinline__ void load_weight(u32 to, const TensorMap& map, int k, int tile, u32 barrier) {
    // as `createpolicy` encodes evict_first and evict_normal
    const u64 policy = gridDim.x == 1 ? 0x12f0000000000000 : 0x1000000000000000;
    if (GATED && ADAPTED)
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                     "[%0], [%1, {%2, %3, %3, %4}], [%5], %6;"
                     :: "r"(to), "l"(&map), "r"(k), "r"(0), "r"(tile * (FEATURES / 16)), "r"(barrier), "l"(policy)
                     : "memory");
    else if (GATED)
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%2, %3, %3, %4}], [%5];"
                     :: "r"(to), "l"(&map), "r"(k), "r"(0), "r"(tile * (FEATURES / 16)), "r"(barrier)
                     : "memory");
    else if (ADAPTED)
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                     "[%0], [%1, {%2, %3}], [%4], %5;"
                     :: "r"(to), "l"(&map), "r"(k), "r"(tile * FEATURES), "r"(barrier), "l"(policy) : "memory");
    else
        load_tile(to, map, k, tile * FEATURES, barrier);
}

// syncs the threads that multiply
__device__ __forceinline__ void sync_multipliers() {
    asm volatile("bar.sync 1, %0;" :: "n"(THREADS) : "memory");
}

// syncs them with the warp that computes factors, which itself does not wait
__device__ __forceinline__ void sync_with_factors() {
    asm volatile("bar.sync 2, %0;" :: "n"(THREADS + 32) : "memory");
}

__device__ __forceinline__ void publish_factors() {
    asm volatile("bar.arrive 2, %0;" :: "n"(THREADS + 32) : "memory");
}

// AFTER_SHRINK: the same warp says that x is there
__device__ __forceinline__ void sync_with_x() {
    asm volatile("bar.sync 5, %0;" :: "n"(THREADS + 32) : "memory");
}

__device__ __forceinline__ void publish_x() {
    asm volatile("bar.arrive 5, %0;" :: "n"(THREADS + 32) : "memory");
}

// ---- the steps of a thread block

// JOINED: the tiles of A that hold some token's adapter, as bits. Each warp finds this out by itself.
__device__ __forceinline__ u32 needed_tiles(const Arguments& args) {
    const Adapters& of = args.adapters;
    u32 needed = 0;
#pragma unroll
    for (int i = 0; i < TOKENS; i += 32) {
        const int token = i + threadIdx.x % 32, slot = token < args.num_rows ? of.slots[token] : 0;
        const int begin = (slot - 1) * of.columns, last = begin + of.columns - 1;
        if (slot) needed |= (2u << last / FEATURES) - (1u << begin / FEATURES);
    }
    return __reduce_or_sync(ALL, needed);
}

// The steps of all tiles are numbered in sequence, TILE_STEPS for each tile; a thread block takes `begin` to `end`.
// JOINED: the steps of `tiles_of_a` tiles of A come first; these are all tiles of A or, if EVEN, those `needed`.
struct Steps {
    int begin, end, tiles_of_a;
    u32 needed;

    __device__ __forceinline__ bool is_of_a(int tile) const { return JOINED && tile < tiles_of_a; }

    // the number of a tile among those of A, or of the weight
    __device__ __forceinline__ int own_tile(int tile) const {
        if (!is_of_a(tile)) return tile - (JOINED ? tiles_of_a : 0);
        if (!EVEN) return tile;
        u32 left = needed;
        for (int i = 0; i < tile; ++i) left &= left - 1;
        return __ffs(left) - 1;
    }
};

// EVEN: the first step of thread block number `block`
__device__ __forceinline__ int first_step(const Arguments& args, int tiles_of_a, int block) {
    return (args.tiles + tiles_of_a) * TILE_STEPS * block / (int)gridDim.y;
}

__device__ __forceinline__ Steps own_steps(const Arguments& args) {
    const int block = blockIdx.y;
    const u32 needed = JOINED && (EVEN || block < args.adapters.tiles_of_a) ? needed_tiles(args) : 0;
    const int of_a = !JOINED ? 0 : EVEN ? __popc(needed) : args.adapters.tiles_of_a;
    if (EVEN) return {first_step(args, of_a, block), first_step(args, of_a, block + 1), of_a, needed};
    const int begin = block * TILE_STEPS, split = blockIdx.z;
    if (STEPS) return {begin + split * STEPS, begin + (split + 1) * STEPS, of_a, needed};
    return {begin + TILE_STEPS * split / SPLITS, begin + TILE_STEPS * (split + 1) / SPLITS, of_a, needed};
}

// ---- the two warps that help

// Loads what all steps multiply. A stage is full when its weights and tokens have arrived.
__device__ __forceinline__ void fill_ring(const Arguments& args, const Steps& steps, u32 ring, u32 turn) {
    const u32 full = ring + RING_BYTES, empty = full + 8 * STAGES;
    const int first_token = blockIdx.x * TOKENS, count = steps.end - steps.begin;
    const auto start = [&](int i) {
        const int at = steps.begin + i;
        const u32 stage = i % STAGES, to = ring + stage * STAGE_BYTES, barrier = full + 8 * stage;
        const int tile = steps.own_tile(at / TILE_STEPS), in_tile = at % TILE_STEPS;
        expect_bytes(barrier, STAGE_BYTES + SCALE_BYTES);
        // the map of codes counts bytes
        if (steps.is_of_a(at / TILE_STEPS)) load_tile(to, args.a, in_tile * BLOCK, tile * FEATURES, barrier);
        else load_weight(to, args.weight, in_tile * (CODE ? BLOCK * BITS / 8 : BLOCK), tile, barrier);
        if (GROUP == 0) return;
        const u32 scales = ring + STAGES * STAGE_BYTES + stage * SCALE_BYTES;
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            const u64 from = ((u64)(tile * GROUPS + group) * TILE_STEPS + in_tile) * (GROUP_BYTES / 4);
            load_bytes(scales + group * GROUP_BYTES, args.scales + from, GROUP_BYTES, barrier);
        }
    };
    const auto finish = [&](int i) {
        const int k = (steps.begin + i) % TILE_STEPS * BLOCK;
        const u32 stage = i % STAGES, to = ring + stage * STAGE_BYTES + WEIGHT_BYTES;
#pragma unroll
        for (int i = 0; i < BLOCK / 64; ++i)
            load_tile(to + i * TOKEN_BYTES, args.x, k + 64 * i, first_token, full + 8 * stage);
    };
    const int filled = min(count, STAGES);
    for (int i = 0; i < filled; ++i) start(i);
    if (AFTER_SHRINK) wait_for_turn(args.adapters.turns, turn);
    else wait_previous();
    for (int i = 0; i < filled; ++i) finish(i);
    for (int i = filled; i < count; ++i) {
        wait_barrier(empty + 8 * (i % STAGES), (i / STAGES - 1) & 1);
        start(i);
        finish(i);
    }
}

// RMSNorm's factor of each token, or 1.
__device__ __forceinline__ void compute_factors(const Arguments& args, int first_token, float* factors, u32 turn) {
    if (AFTER_SHRINK) {
        wait_for_turn(args.adapters.turns, turn);
        publish_x();
    } else {
        wait_previous();
    }
    constexpr int OF_LANE = (TOKENS + 31) / 32;
    const int lane = threadIdx.x % 32, tiles = args.squares ? args.square_tiles : 0;
    float sums[OF_LANE] = {};
    if (TOKENS == 8 && args.num_rows == 1) {   // `gemv.cu` leaves many tiles
        for (int i = lane; i < tiles; i += 32) sums[0] += args.squares[i];
#pragma unroll
        for (int lanes = 1; lanes < 32; lanes *= 2) sums[0] += __shfl_xor_sync(ALL, sums[0], lanes);
    } else {
#pragma unroll 4
        for (int i = 0; i < tiles; ++i)
#pragma unroll
            for (int j = 0; j < OF_LANE; ++j) {
                const int token = first_token + lane + 32 * j;
                if (token < args.num_rows) sums[j] += args.squares[(u64)i * args.num_rows + token];
            }
    }
#pragma unroll
    for (int j = 0; j < OF_LANE; ++j)
        if (lane + 32 * j < TOKENS) factors[lane + 32 * j] = tiles ? rsqrtf(sums[j] / SIZE + args.eps) : 1;
    publish_factors();
}

#include "split_sums.cuh"
#include "finisher.cuh"

// ---- the kernel

extern "C" __global__ void __launch_bounds__(MULTIPLIERS + 64, PER_PROCESSOR)
linear(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(1024) u8 shared[];
    // The ring, and the ring of scales; a "full" barrier for each stage, then an "empty" barrier for each; a factor for
    // each token; EVEN: a slice of a finished tile, which otherwise takes the place of the ring; WAYS: sums, at the
    // end; PUSHED: after SHARED_BYTES, sums of other thread blocks and a barrier.
    const u32 ring = shared_address(shared);
    const u32 full = ring + RING_BYTES, empty = full + 8 * STAGES;
    float* const factors = reinterpret_cast<float*>(shared + RING_BYTES + STAGES * 16);
    u8* const finished = EVEN ? reinterpret_cast<u8*>(factors + TOKENS) : shared + PARTS_BYTES;
    const u32 pushed = ring + SHARED_BYTES;     // PUSHED
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Steps steps = own_steps(args);
    // the warps that need it read it before the next kernel may start
    const u32 turn = AFTER_SHRINK && warp >= MULTIPLIERS / 32 ? current_turn(args.adapters.turns) : 0;
    if (AFTER_SHRINK) __syncthreads();
    if (AT_ONCE) allow_next();
    // unless EVEN
    const int only_tile = steps.own_tile(blockIdx.y);
    const bool is_only_of_a = !EVEN && steps.is_of_a(blockIdx.y);
    if (is_only_of_a && !(steps.needed >> only_tile & 1)) {
        if (threadIdx.x == 0) wait_previous(), ++*own_launches(args);
        return;
    }

    if (threadIdx.x == 0) {
        if (ring % 1024) __trap();   // the swizzle counts from there
        for (int stage = 0; stage < STAGES; ++stage) {
            init_barrier(full + 8 * stage, 1);
            init_barrier(empty + 8 * stage, GROUPS * 4 * (WAYS > 1 ? HALVES : 1));
        }
        if (PUSHED) {
            init_barrier(pushed + PUSHED_BYTES, 1);
            if ((int)blockIdx.z * OWN < TOKENS) expect_bytes(pushed + PUSHED_BYTES, PUSHED_BYTES);
        }
        publish_barriers();
    }
    __syncthreads();
    if (PUSHED) arrive_in_cluster<false>();   // `publish_barriers` does the ordering

    if (warp == MULTIPLIERS / 32 && lane == 0) fill_ring(args, steps, ring, turn);
    if (warp > MULTIPLIERS / 32) {
        if (is_only_of_a) {
            publish_factors();  // nobody needs any
        } else {
            if (ADAPTED) fetch_b(args, steps);
            compute_factors(args, blockIdx.x * TOKENS, factors, turn);
        }
    }
    if (warp >= MULTIPLIERS / 32) {
        __syncwarp();
        if (SPLITS > 1 && !PUSHED) sync_cluster<true>(), arrive_in_cluster<false>();
        if (SPLITS > 1) wait_for_cluster();
        return;
    }

    Finisher own(args);
    const bool is_first_way = WAYS == 1 || threadIdx.x < THREADS;   // it finishes tiles
    if (ADAPTED && is_first_way) own.read_adapters();
    if (HOLDS_B && !is_only_of_a && own.most_rank > 0) {
        own.tile = only_tile;
        own.read_b(0, 0);
    }
    if (is_first_way) {
        if (AFTER_SHRINK) sync_with_x();
        else wait_previous();
        if (!AT_ONCE) allow_next();   // all kernels have ended that wrote more than x A^T
    }
    const u32 launch = JOINED ? __ldcg(own_launches(args)) + 1 : 0;
    for (int at = steps.begin; at < steps.end;) {
        const int first = at - steps.begin, in_tile = at % TILE_STEPS;
        const int count = EVEN ? min(TILE_STEPS - in_tile, steps.end - at) : STEPS ? STEPS : steps.end - at;
        const bool of_a = steps.is_of_a(at / TILE_STEPS);
        own.tile = steps.own_tile(at / TILE_STEPS);
        at += count;
        if (!EVEN && is_first_way && !of_a) {   // otherwise the MMAs need the registers
            own.read_norm();
            own.read(0);
        }
        float c[TOKENS / 2];   // for each 8 tokens: two features of two tokens
        if (WAYS > 1 && is_first_way) tell_way<IS_ROOM>();
        multiply_steps(c, ring, first, count);
        if (WAYS > 1) add_ways(c, shared);
        if (!is_first_way) continue;
        if (first == 0) sync_with_factors();   // all have also multiplied: unless EVEN, the ring is free
        if (EVEN && in_tile > 0) {
            leave_part(args, c);
            continue;
        }
        if (EVEN && count < TILE_STEPS) add_parts(args, c, steps.tiles_of_a, at - count + TILE_STEPS);
        float of_splits[SPLITS > 1 ? OWN / 2 : 1];
        if (PUSHED) exchange_splits(of_splits, c, pushed);
        else if (SPLITS > 1) add_splits(of_splits, c, shared);
        float* const sums = SPLITS > 1 ? of_splits : c;   // [OWN / 8, 4]

        if (of_a) {
            own.leave_inner(sums, launch);
            continue;
        }
        if (AFTER_SHRINK) wait_previous();
        if (ADAPTED) own.add_adapters(sums, launch);
        if (EVEN) own.read_norm();
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) {
            if (EVEN) own.read(slice);
            if (slice > 0 || (EVEN && first > 0)) sync_multipliers();   // the previous contents have been read
            own.transpose(sums, factors, slice, finished);
            if (HEADS) own.finish_heads(slice, finished);
            else own.finish_features(slice, finished);
        }
    }
    if (AFTER_SHRINK) wait_previous();  // if no tile was finished here
    if (JOINED && threadIdx.x == 0) *own_launches(args) = launch;   // all have read it, before a barrier
    if (PUSHED && !is_first_way) wait_for_cluster();
    if (SPLITS > 1 && !PUSHED) {
        __syncwarp();
        if (!is_first_way) sync_cluster<true>(), arrive_in_cluster<false>();
        wait_for_cluster();
    }
}
