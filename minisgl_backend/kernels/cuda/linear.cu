// Linear layers of up to 256 tokens, fused with the operations around them, for Hopper (sm_90a).
//
// Weights are the long side of the GEMM and tokens the short one: a tile is FEATURES rows of the
// weight by TOKENS tokens. A warp of its own moves tiles of 64 in_features into a ring in shared memory
// by the bulk tensor copy engine, and warpgroups multiply them from there (wgmma). Weights depend on no
// other kernel, so an early launch fills the ring with them before its predecessor ends.
//
// Three ways to share out the work. A thread block has a tile; or, if there are few tiles, SPLITS
// of them share one along in_features and send each other their parts, to shared memory ("split-K");
// or, of a large weight, all thread blocks take EVEN parts of all tiles ("stream-K": Osama et al., 2023),
// and leave what they have of a tile that another one began in global memory.
//
// RMSNorm is split into a factor per feature and one per token: the GEMM that writes the residual
// stream also writes it times the norm's weight, and its tiles' parts of each token's sum of
// squares; the GEMM that reads those scales its result, by factors that another warp computes
// meanwhile. Of queries, keys and values a tile is a head, which is normalized, rotated and stored in
// the KV cache before it leaves the thread block.
//
// ADAPTED: tokens may have LoRA adapters, (x A^T) B^T of each token's own A and B. To its sums each warp adds what it
// needs of x A^T times B^T. The kernel before this one computes x A^T, that of `adapters.cu`; or, if this one is JOINED,
// it has tiles of the A of all adapters, as if they were rows of the weight. Those that no token needs are left out.
// They are the first ones: thread blocks start in this order, and take steps in it, so those that wait for x A^T do not
// keep it from being computed. What goes from one to the other are pairs of numbers along with a number of the launch,
// in words that are written at once: who reads a pair sees whether it is there, and nothing need be cleared.
//
// `tile_gemm.cuh` has the ring, and how it is multiplied, quantized weights as well.
//
// Compiled with: FEATURES (64 or 128, of the weight in a tile), TOKENS (8, 16, 32, 64, 96, 128 or 192),
// SIZE (in_features), WHOLE (tiles divide the weight's rows; else, of plain ones that are neither GATED nor HEADS,
// the last tile has some that are not there), BLOCK (of in_features in a stage: 64; of codes 128, of 4 bits also 256),
// STAGES (of the ring), SPLITS, EVEN, GATED (the weight holds the gate's rows and then as many of the values), RESIDUAL
// (the result is added to the residual stream), HEADS (it is queries, keys and values, in heads of
// FEATURES), with that PAGE_SIZE and FP8 (of the KV cache), ADAPTED, and of these LATE (all but x A^T was
// there when this kernel began, so nothing is waited for before that is due) or JOINED (of plain weights, up to TOKENS
// tokens and 32 tiles of A), PUSHED (SPLITS send each other their sums; else they read them), SHARED_BYTES,
// PER_PROCESSOR (thread blocks that a multiprocessor has registers for); CODE (0: the weight is bfloat16;
// else its codes are 1: e4m3, 2: 8-bit or 3: 4-bit integers, 4: e2m1), with that GROUP (in_features that
// share a scale: 32, 64 or 128; 0: all), SHARED_BY (rows that share one: 1 or 8), ZEROS (the low 8 bits of
// a scale are a zero point; else it is the middle of the integers), BY_WARP and WAYS. All other values are
// bfloat16: what is not normalized yet needs its range.

#include "heads.cuh"
#include "tile_gemm.cuh"

constexpr int TILE_STEPS = SIZE / BLOCK;
constexpr int STEPS = TILE_STEPS % SPLITS ? 0 : TILE_STEPS / SPLITS;   // in a thread block, unless EVEN; 0: they differ
constexpr int MULTIPLIERS = WAYS * THREADS;
constexpr int WAY_BYTES = (WAYS - 1) * TOKENS * FEATURES * 4;    // of the sums that the second way leaves
constexpr int OUT = GATED ? FEATURES / 2 : FEATURES;    // features of the output in a tile
constexpr int PITCH = 2 * OUT + 16;                 // bytes a token in a finished tile; 8 rows use all banks
constexpr int OWN = TOKENS > 8 * SPLITS ? TOKENS / SPLITS : 8;   // tokens that a thread block finishes
// EVEN: a tile is finished in slices of up to MOST_OF_SLICE tokens, for there is little memory beside the
// ring; `Cut.shared_bytes` of linear_cut.py has the same numbers.
constexpr int halved(int tokens, int most) { return tokens > most ? halved(tokens / 2, most) : tokens; }
constexpr int MOST_OF_SLICE = (TOKENS > 128 && !HEADS ? 64 : 32) * (GATED ? 2 : 1);
constexpr int SLICE = EVEN ? halved(OWN, MOST_OF_SLICE) : OWN;   // tokens that are finished at a time
constexpr int SLICES = OWN / SLICE;
constexpr int PARTS_BYTES = SPLITS > 1 ? TOKENS * FEATURES * 4 : 0;
constexpr int CHUNKS = (HEADS ? OUT / 2 : OUT) / 8; // of 16 bytes; of heads a thread has one in each half
constexpr int ROWS = THREADS / CHUNKS;              // tokens that the threads finish side by side
constexpr int ITEMS = (SLICE + ROWS - 1) / ROWS;
// Whether the next kernel may start as soon as this one has. After HEADS comes attention, after a plain
// GEMM FlashInfer's sum over the ranks: before they wait for this kernel, both read what earlier ones
// wrote, so they may start once those have ended.
constexpr bool AT_ONCE = GATED || RESIDUAL;
// SPLITS that are PUSHED: what a thread block receives, and the barrier that counts it, behind SHARED_BYTES
constexpr int PUSHED_BYTES = PUSHED ? (SPLITS - 1) * OWN * FEATURES * 4 : 0;
constexpr u32 ALL = 0xffffffffu;

static_assert(SIZE % BLOCK == 0 && TILE_STEPS >= SPLITS, "");
static_assert(WHOLE || !(GATED || HEADS || CODE), "");
static_assert(OWN % 8 == 0 && TOKENS % OWN == 0 && OWN % SLICE == 0, "");
static_assert(EVEN ? SPLITS == 1 : PARTS_BYTES + OWN * PITCH <= STAGES * STAGE_BYTES, "");
static_assert(RING_BYTES + STAGES * 16 + 4 * TOKENS + (EVEN ? SLICE * PITCH : 0) + WAY_BYTES <= SHARED_BYTES, "");
static_assert(SHARED_BYTES % 16 == 0, "");
static_assert(THREADS % CHUNKS == 0 && GATED + RESIDUAL + HEADS <= 1, "");
static_assert(ADAPTED ? !(LATE && JOINED) : !(LATE || JOINED), "");
static_assert(!JOINED || !CODE, "");

// ADAPTED: see `kernels.adapters`.
struct Adapters {
    const u16* inner;       // [num_rows, projections * max_rank], x A^T; 0 behind the rank of a token's adapter
    const u16* b;           // [slots, out_features, max_rank]
    const int* slots;       // [num_rows], of each token; 0: none
    const int* ranks;       // [num_rows], of the adapters of each token
    u64 slot_stride;        // of B
    int columns;            // of inner
    int max_rank;           // a multiple of RANK_STEP
    int second;             // the first output of the second projection, and of the third
    int third;
    int tiles_of_a;         // JOINED
    uint4* pairs;           // JOINED, in place of `inner`: [TOKENS, columns / 4], two pairs of numbers, each before
                            // its launch
    u32* launches;          // JOINED: [thread blocks], launches of this kernel so far
};

struct Arguments {
    TensorMap weight;       // [out_features, SIZE], of codes in bytes; GATED: see `load_weight`
    TensorMap x;            // [num_rows, SIZE]
    TensorMap a;            // JOINED: [slots * columns, SIZE]
    u16* out;               // [num_rows, features]; RESIDUAL: the stream, which is read, too; HEADS: queries
    u16* scaled;            // RESIDUAL: the stream times norm_weight
    const u16* norm_weight; // RESIDUAL: [features], of the norm that follows
    float* squares_out;     // RESIDUAL: [features / OUT, num_rows], sums of squares of each tile
    const float* squares;   // [square_tiles, num_rows] of x before its norm's weight; null: no norm
    const u16* bias;        // [out_features], or null
    float* parts;           // EVEN: [thread blocks, FEATURES * TOKENS], of tiles that another one finishes
    int* are_there;         // EVEN: [thread blocks], 1 while the part is there; 0 before and after a launch
    int tiles;              // of the weight
    int square_tiles;
    int num_rows;
    int features;           // of the output
    float eps;
    Heads heads;
    const float* scales;    // of codes: [out_features / 64, TILE_STEPS, BLOCK / GROUP, 64 / SHARED_BY], the rows in
                            // the order of tiles; GROUP == 0: [out_features]
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

// GATED: a map of [features / 8, 2, 8, SIZE], so that 8 rows of the gate and the 8 rows that
// they open lie one after the other, and land in the same thread
__device__ __forceinline__ void load_weight(u32 to, const TensorMap& map, int k, int tile, u32 barrier) {
    if (GATED)
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%2, %3, %3, %4}], [%5];"
                     :: "r"(to), "l"(&map), "r"(k), "r"(0), "r"(tile * (FEATURES / 16)), "r"(barrier)
                     : "memory");
    else
        load_tile(to, map, k, tile * FEATURES, barrier);
}

__device__ __forceinline__ void unpack(float (&to)[8], const uint4& from) {
    const u32 words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        to[2 * i] = __int_as_float(words[i] << 16);
        to[2 * i + 1] = __int_as_float(words[i] & 0xffff0000);
    }
}

__device__ __forceinline__ uint4 pack(const float (&from)[8]) {
    return make_uint4(pack(from[0], from[1]), pack(from[2], from[3]), pack(from[4], from[5]),
                      pack(from[6], from[7]));
}

__device__ __forceinline__ uint2 pack_float8(const float (&from)[8]) {
    u16 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
            : "=h"(pairs[i]) : "f"(from[2 * i + 1]), "f"(from[2 * i]));
    return make_uint2(pairs[0] | (u32)pairs[1] << 16, pairs[2] | (u32)pairs[3] << 16);
}

// What an earlier kernel has written. LATE: no wait of this kernel has emptied the L1 cache of what was there before.
template <typename T>
__device__ __forceinline__ T load_fresh(const T* from) { return LATE ? __ldcg(from) : *from; }

__device__ __forceinline__ uint4 load_8(const u16* from) { return *reinterpret_cast<const uint4*>(from); }

// of another thread block's shared memory
__device__ __forceinline__ float4 load_from(u32 address, u32 block) {
    u32 there;
    float4 out;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(out.x), "=f"(out.y), "=f"(out.z), "=f"(out.w) : "r"(there));
    return out;
}

__device__ __forceinline__ void load_floats(float (&to)[8], const float* from) {
    const float4* const both = reinterpret_cast<const float4*>(from);
    const float4 low = both[0], high = both[1];
    to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
    to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
}

// of the threads that multiply
__device__ __forceinline__ void sync_multipliers() {
    asm volatile("bar.sync 1, %0;" :: "n"(THREADS) : "memory");
}

// and with them the warp that computes factors, which does not wait
__device__ __forceinline__ void sync_with_factors() {
    asm volatile("bar.sync 2, %0;" :: "n"(THREADS + 32) : "memory");
}

__device__ __forceinline__ void publish_factors() {
    asm volatile("bar.arrive 2, %0;" :: "n"(THREADS + 32) : "memory");
}

// WAYS: one way waits until the other one says that there is room for sums, or that there are some
constexpr int IS_ROOM = 3, ARE_SUMS = 4;

template <int WHAT>
__device__ __forceinline__ void wait_for_way() {
    asm volatile("bar.sync %0, %1;" :: "n"(WHAT), "n"(MULTIPLIERS) : "memory");
}

template <int WHAT>
__device__ __forceinline__ void tell_way() {
    asm volatile("bar.arrive %0, %1;" :: "n"(WHAT), "n"(MULTIPLIERS) : "memory");
}

// called behind the barrier of those that multiply: what they wrote before it is seen behind `wait_for`
__device__ __forceinline__ void announce(int* flag) {
    __threadfence();
    asm volatile("st.release.gpu.global.s32 [%0], 1;" :: "l"(flag) : "memory");
}

__device__ __forceinline__ void wait_for(const int* flag) {
    int there;
    do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(there) : "l"(flag) : "memory");
    while (!there);
}

// ---- the steps of a thread block

// JOINED: the tiles of A that have an adapter of a token, as bits. Each warp finds out by itself.
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

// The steps of all tiles stand in a row, TILE_STEPS of each; a thread block takes `begin` to `end`. JOINED: the first
// ones are those of `tiles_of_a` tiles of A: of all; or, if EVEN, of those that are `needed`.
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

// EVEN: of the thread block of this number
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

// Move what all steps multiply; a stage is full when its weights and tokens have come.
__device__ __forceinline__ void fill_ring(const Arguments& args, const Steps& steps, u32 ring) {
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
    for (int i = 0; i < filled; ++i) {
        start(i);
        if (LATE) finish(i);
    }
    if (!LATE) {
        wait_previous();
        for (int i = 0; i < filled; ++i) finish(i);
    }
    for (int i = filled; i < count; ++i) {
        wait_barrier(empty + 8 * (i % STAGES), (i / STAGES - 1) & 1);
        start(i);
        finish(i);
    }
}

// RMSNorm's factor of each token, or 1.
__device__ __forceinline__ void compute_factors(const Arguments& args, int first_token, float* factors) {
    if (!LATE) wait_previous();
    constexpr int OF_LANE = (TOKENS + 31) / 32;
    const int lane = threadIdx.x % 32, tiles = args.squares ? args.square_tiles : 0;
    float sums[OF_LANE] = {};
    if (TOKENS == 8 && args.num_rows == 1) {   // `gemv.cu` leaves many tiles
        for (int i = lane; i < tiles; i += 32) sums[0] += load_fresh(args.squares + i);
#pragma unroll
        for (int lanes = 1; lanes < 32; lanes *= 2) sums[0] += __shfl_xor_sync(ALL, sums[0], lanes);
    } else {
#pragma unroll 4
        for (int i = 0; i < tiles; ++i)
#pragma unroll
            for (int j = 0; j < OF_LANE; ++j) {
                const int token = first_token + lane + 32 * j;
                if (token < args.num_rows) sums[j] += load_fresh(args.squares + (u64)i * args.num_rows + token);
            }
    }
#pragma unroll
    for (int j = 0; j < OF_LANE; ++j)
        if (lane + 32 * j < TOKENS) factors[lane + 32 * j] = tiles ? rsqrtf(sums[j] / SIZE + args.eps) : 1;
    publish_factors();
}

// WAYS: the second way leaves its sums to the first one.
__device__ __forceinline__ void add_ways(float (&c)[TOKENS / 2], u8* shared) {
    float4* const sums = reinterpret_cast<float4*>(shared + SHARED_BYTES - WAY_BYTES) + threadIdx.x % THREADS;
    if (threadIdx.x >= THREADS) {
        wait_for_way<IS_ROOM>();
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i += 4)
            sums[i / 4 * THREADS] = make_float4(c[i], c[i + 1], c[i + 2], c[i + 3]);
        tell_way<ARE_SUMS>();
    } else {
        wait_for_way<ARE_SUMS>();
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i += 4) {
            const float4 of = sums[i / 4 * THREADS];
            c[i] += of.x, c[i + 1] += of.y, c[i + 2] += of.z, c[i + 3] += of.w;
        }
    }
}

// the first phase of a barrier, and what other thread blocks have written before it ended
__device__ __forceinline__ void wait_for_pushed(u32 barrier) {
    u32 done;
    do {
        asm volatile("{ .reg .pred p;\n"
                     "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n"
                     "selp.b32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(barrier) : "memory");
    } while (!done);
}

// PUSHED: each thread sends its sums to those that finish the tokens, as soon as it has them, right into their shared
// memory, and waits for what others send to it.
__device__ __forceinline__ void exchange_splits(float* sums, const float (&c)[TOKENS / 2], u32 pushed) {
    const int split = blockIdx.z;
    constexpr int OF_ONE = OWN / 8 * THREADS * 16;   // bytes that a thread block sends to another one
    wait_for_cluster();   // all have begun
#pragma unroll
    for (int to = 0; to < SPLITS && to * OWN < TOKENS; ++to) {
        const float* const own = c + to * (OWN / 2);
        if (to == split) {
#pragma unroll
            for (int i = 0; i < OWN / 2; ++i) sums[i] = own[i];
            continue;
        }
        const int place = (split - to - 1 + SPLITS) % SPLITS;   // among those that send to it
        u32 at, barrier;
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                     : "=r"(at) : "r"(pushed + place * OF_ONE + (int)threadIdx.x * 16), "r"(to));
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier) : "r"(pushed + PUSHED_BYTES), "r"(to));
#pragma unroll
        for (int i = 0; i < OWN / 2; i += 4)
            asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
                         "[%0], {%1, %2, %3, %4}, [%5];"
                         :: "r"(at + i / 4 * THREADS * 16), "f"(own[i]), "f"(own[i + 1]), "f"(own[i + 2]),
                            "f"(own[i + 3]), "r"(barrier) : "memory");
    }
    if (split * OWN >= TOKENS) return;
    wait_for_pushed(pushed + PUSHED_BYTES);
#pragma unroll
    for (int i = 0; i < OWN / 2; i += 4)
#pragma unroll
        for (int other = 0; other < SPLITS - 1; ++other) {
            float4 of;
            asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(of.x), "=f"(of.y), "=f"(of.z), "=f"(of.w)
                         : "r"(pushed + other * OF_ONE + (i / 4 * THREADS + (int)threadIdx.x) * 16));
            sums[i] += of.x, sums[i + 1] += of.y, sums[i + 2] += of.z, sums[i + 3] += of.w;
        }
}

// SPLITS: the sums of the tokens that this thread block finishes.
__device__ __forceinline__ void add_splits(float* sums, const float (&c)[TOKENS / 2], u8* shared) {
    const int split = blockIdx.z;
    float4* const parts = reinterpret_cast<float4*>(shared);   // [TOKENS / 8, THREADS]
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i += 4)
        parts[i / 4 * THREADS + threadIdx.x] = make_float4(c[i], c[i + 1], c[i + 2], c[i + 3]);
    sync_cluster<true>();
    if (split * OWN < TOKENS) {
#pragma unroll
        for (int i = 0; i < OWN / 8; ++i) {
            const int at = (split * (OWN / 8) + i) * THREADS + threadIdx.x;
            float4 of[SPLITS] = {parts[at]};
#pragma unroll
            for (int other = 1; other < SPLITS; ++other)
                of[other] = load_from(shared_address(parts + at), (split + other) % SPLITS);
            float* const sum = sums + 4 * i;
            sum[0] = of[0].x, sum[1] = of[0].y, sum[2] = of[0].z, sum[3] = of[0].w;
#pragma unroll
            for (int other = 1; other < SPLITS; ++other) {
                sum[0] += of[other].x, sum[1] += of[other].y;
                sum[2] += of[other].z, sum[3] += of[other].w;
            }
        }
    }
    __syncwarp();
    arrive_in_cluster<true>();   // at the end is waited until others have read
}

// EVEN: where a thread's sums are of the part that a thread block leaves: TOKENS / 8, THREADS apart.
__device__ __forceinline__ float4* part_of(const Arguments& args, int block) {
    return reinterpret_cast<float4*>(args.parts) + (u64)block * (FEATURES * TOKENS / 4) + threadIdx.x;
}

__device__ __forceinline__ void leave_part(const Arguments& args, const float (&c)[TOKENS / 2]) {
    const int block = blockIdx.x * gridDim.y + blockIdx.y;
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i += 4)
        part_of(args, block)[i / 4 * THREADS] = make_float4(c[i], c[i + 1], c[i + 2], c[i + 3]);
    sync_multipliers();
    if (threadIdx.x == 0) announce(args.are_there + block);
}

// To what this thread block has of the tile whose steps end before `tile_end`, add what others have. No thread
// block waits forever: there is at most one thread block a multiprocessor, so all of them run at the same time
// (the next kernel starts when all have), and each leaves its part before it waits for one.
__device__ __forceinline__ void add_parts(
    const Arguments& args, float (&c)[TOKENS / 2], int tiles_of_a, int tile_end) {
#if CODE   // wait for all others at once; of few tokens, several parts are read together
    constexpr int TOGETHER = TOKENS < 32 ? 4 : 1;
    const int first = blockIdx.y + 1, row = blockIdx.x * gridDim.y;
    int count = 0;
    while (first_step(args, tiles_of_a, first + count) < tile_end) ++count;
    for (int i = threadIdx.x % 32; i < count; i += 32) wait_for(args.are_there + row + first + i);
    __syncwarp();
    for (int i = 0; i < count; i += TOGETHER) {
        float4 parts[TOGETHER][TOKENS / 8];
#pragma unroll
        for (int j = 0; j < TOGETHER; ++j)
#pragma unroll
            for (int k = 0; k < TOKENS / 8; ++k)
                parts[j][k] = i + j < count ? __ldcg(part_of(args, row + first + i + j) + k * THREADS) : float4{};
#pragma unroll
        for (int j = 0; j < TOGETHER; ++j)
#pragma unroll
            for (int k = 0; k < TOKENS / 8; ++k) {
                c[4 * k] += parts[j][k].x, c[4 * k + 1] += parts[j][k].y;
                c[4 * k + 2] += parts[j][k].z, c[4 * k + 3] += parts[j][k].w;
            }
    }
    sync_multipliers();
    for (int i = threadIdx.x; i < count; i += THREADS) args.are_there[row + first + i] = 0;
#else
    for (int block = blockIdx.y + 1; first_step(args, tiles_of_a, block) < tile_end; ++block) {
        const int other = blockIdx.x * gridDim.y + block;
        if (threadIdx.x % 32 == 0) wait_for(args.are_there + other);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i += 4) {
            const float4 part = __ldcg(part_of(args, other) + i / 4 * THREADS);
            c[i] += part.x, c[i + 1] += part.y, c[i + 2] += part.z, c[i + 3] += part.w;
        }
        sync_multipliers();
        if (threadIdx.x == 0) args.are_there[other] = 0;
    }
#endif
}

// ---- ADAPTED

constexpr int RANK_STEP = 16;   // of an MMA
constexpr int ALL_8 = OWN / 8;
// times 8 tokens whose B is read ahead
constexpr int AHEAD = ALL_8 % 4 == 0 ? 4 : ALL_8 % 3 == 0 ? 3 : ALL_8 % 2 == 0 ? 2 : 1;
constexpr bool HOLDS_B = JOINED && !EVEN;   // the first of it, before x is there

__device__ __forceinline__ void add_product(
    float* c, u32 a, u32 a_8, u32 a_next, u32 a_8_next, u32 b, u32 b_next) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : C4(0) : "r"(a), "r"(a_8), "r"(a_next), "r"(a_8_next), "r"(b), "r"(b_next));
}

// Volatile, so that it stays where it is.
__device__ __forceinline__ uint2 load_4(const u16* from) {
    uint2 out;
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(out.x), "=r"(out.y) : "l"(from));
    return out;
}

// What another thread block may be writing.
__device__ __forceinline__ uint4 load_pairs(const uint4* from) {
    uint4 out;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w) : "l"(from) : "memory");
    return out;
}

__device__ __forceinline__ void store_pair(uint2* to, u32 pair, u32 launch) {
    asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" :: "l"(to), "r"(pair), "r"(launch) : "memory");
}

// JOINED: how often this thread block has run, as often as all others. It reads that once all kernels before this one
// have ended.
__device__ __forceinline__ u32* own_launches(const Arguments& args) {
    return args.adapters.launches + blockIdx.z * gridDim.y + blockIdx.y;
}

// By the warp that computes factors: ask for what this thread block needs of B, which lies in memory, in the order in
// which it is needed.
__device__ __forceinline__ void fetch_b(const Arguments& args, const Steps& steps) {
    const Adapters& of = args.adapters;
    const int lane = threadIdx.x % 32, first_token = blockIdx.x * TOKENS + blockIdx.z * OWN;
    const int tokens = min(OWN, args.num_rows - first_token);
    const int first = (EVEN ? steps.begin + TILE_STEPS - 1 : steps.begin) / TILE_STEPS;
    const int end = EVEN ? (steps.end + TILE_STEPS - 1) / TILE_STEPS : first + 1;
    for (int i = max(first, steps.tiles_of_a); i < end; ++i) {
        const int tile = steps.own_tile(i);
        const int features = WHOLE ? OUT : min(OUT, args.features - tile * OUT);
        for (int i = 0; i < tokens; i += 32) {
            const int own = i + lane < tokens ? of.slots[first_token + i + lane] : 0;
            const int before = __shfl_up_sync(ALL, own, 1);
            for (u32 others = __ballot_sync(ALL, own && (lane == 0 || own != before)); others; others &= others - 1) {
                const int slot = __shfl_sync(ALL, own, __ffs(others) - 1);
#pragma unroll
                for (int side = 0; side <= GATED; ++side) {
                    const u64 feature = tile * OUT + side * args.features;
                    const u16* const from = of.b + (slot - 1) * of.slot_stride + feature * of.max_rank;
                    for (int at = 64 * lane; at < features * of.max_rank; at += 64 * 32)
                        asm volatile("prefetch.global.L2 [%0];" :: "l"(from + at));
                }
            }
        }
    }
}

// ---- finishing: a thread has 8 features, of a head 8 in each half, of ITEMS tokens of each slice

struct Finisher {
    const Arguments& args;
    int tile, chunk, row, first_token;
    bool finishes;
    // read ahead
    uint4 norm_weight[2];   // of the norm that follows; or of the head's
    uint4 residual[ITEMS];
    int positions[ITEMS], slots[ITEMS];
    // ADAPTED
    int adapters[(OWN + 31) / 32];   // slots of each 32nd token of this thread block
    int ranks[(OWN + 31) / 32];
    int most_rank;          // of its tokens
    uint2 b[AHEAD][2], b_8[AHEAD][2];   // of the first and the last of each 8 tokens

    __device__ __forceinline__ Finisher(const Arguments& args)
        : args(args), tile(0), chunk(threadIdx.x % CHUNKS), row(threadIdx.x / CHUNKS),
          first_token(blockIdx.x * TOKENS + blockIdx.z * OWN), finishes((int)blockIdx.z * OWN < TOKENS) {}

    __device__ __forceinline__ int token(int slice, int item) const {
        return first_token + slice * SLICE + item * ROWS + row;
    }
    __device__ __forceinline__ bool is_mine(int slice, int item) const {
        return finishes && item * ROWS + row < SLICE && token(slice, item) < args.num_rows && is_there(8 * chunk);
    }
    // Whether the weight has this row of the tile.
    __device__ __forceinline__ bool is_there(int feature) const {
        return WHOLE || tile * OUT + feature < args.features;
    }
    __device__ __forceinline__ u64 address(int slice, int item) const {
        return (u64)token(slice, item) * args.features + tile * OUT + 8 * chunk;
    }
    __device__ __forceinline__ bool is_q() const { return tile < args.heads.num_heads; }
    __device__ __forceinline__ bool is_v() const {
        return tile >= args.heads.num_heads + args.heads.num_kv_heads;
    }
    __device__ __forceinline__ const u16* of_head() const {   // the norm's weight
        return is_v() ? nullptr : is_q() ? args.heads.q_weight : args.heads.k_weight;
    }

    __device__ __forceinline__ void read_norm() {
        if (RESIDUAL && is_there(8 * chunk)) norm_weight[0] = load_8(args.norm_weight + tile * OUT + 8 * chunk);
        if (HEADS && of_head()) {
            norm_weight[0] = load_8(of_head() + 8 * chunk);
            norm_weight[1] = load_8(of_head() + FEATURES / 2 + 8 * chunk);
        }
    }

    __device__ __forceinline__ void read(int slice) {
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            if (!is_mine(slice, item)) continue;
            if (RESIDUAL) residual[item] = load_fresh(reinterpret_cast<const uint4*>(args.out + address(slice, item)));
            if (HEADS) {
                positions[item] = load_fresh(args.heads.positions + token(slice, item));
                slots[item] = load_fresh(args.heads.slots + token(slice, item));
            }
        }
    }

    // ADAPTED: the tokens' adapters.
    __device__ __forceinline__ void read_adapters() {
        const Adapters& of = args.adapters;
        most_rank = 0;
#pragma unroll
        for (int i = 0; i < (OWN + 31) / 32; ++i) {
            const int at = 32 * i + (int)threadIdx.x % 32, token = first_token + at;
            const bool there = finishes && at < OWN && token < args.num_rows;
            adapters[i] = there ? of.slots[token] : 0;
            ranks[i] = there ? of.ranks[token] : 0;
            most_rank = max(most_rank, ranks[i]);
        }
        most_rank = __reduce_max_sync(ALL, most_rank);
    }

    // ADAPTED: the first output whose B this thread has; the second one is 8 later, or that which it opens.
    __device__ __forceinline__ int feature() const {
        const int warp = threadIdx.x / 32, row = threadIdx.x % 32 / 4;
        const int feature = tile * OUT + (GATED ? 8 : 16) * warp + row;
        return WHOLE ? feature : min(feature, args.features - 9);   // B has nothing for rows that are not there
    }

    // ADAPTED: of a RANK_STEP
    __device__ __forceinline__ void load_b(uint2& b, uint2& b_8, int slot, int rank) const {
        const Adapters& of = args.adapters;
        const u16* const from = of.b + (max(slot, 1) - 1) * of.slot_stride + (u64)feature() * of.max_rank + rank
            + 4 * (threadIdx.x % 4);
        b = load_4(from);
        b_8 = load_4(from + (GATED ? args.features : 8) * of.max_rank);
    }

    // ADAPTED: the slot of a token, which `first` and the lane say; `first` is a multiple of 8
    __device__ __forceinline__ int slot_of(int first, int of_lane) const {
        return __shfl_sync(ALL, adapters[first / 32], first % 32 + of_lane);
    }

    // ADAPTED: B of AHEAD times 8 tokens from the 8 * `i`th on.
    __device__ __forceinline__ void read_b(int i, int rank) {
#pragma unroll
        for (int j = 0; j < AHEAD; ++j)
#pragma unroll
            for (int end = 0; end < 2; ++end)
                load_b(b[j][end], b_8[j][end], slot_of(8 * (i + j), end ? 7 : 0), rank);
    }

    // ADAPTED: to the sums of a warp, of 16 features or of 8 of each side of a gate, add (x A^T) B^T. It takes 8 tokens
    // at a time, and of them those with the same adapter. Tokens are mostly in the order of their adapters, so that the
    // first and the last one's are all that there are: of these B is read ahead, for several times 8 tokens.
    __device__ __forceinline__ void add_adapters(float* sums, u32 launch) {
        if (!finishes) return;
        const Adapters& of = args.adapters;
        const int lane = threadIdx.x % 32, row = lane / 4, quarter = lane % 4;
        if (CODE) {
            const int feature = this->feature();
            const float scale = GROUP == 0 ? args.scales[feature] : OF_SUMS;
            const float scale_8 = GROUP == 0 ? args.scales[GATED ? args.features + feature : feature + 8] : OF_SUMS;
#pragma unroll
            for (int i = 0; i < OWN / 2; ++i) sums[i] *= i % 4 / 2 ? scale_8 : scale;
        }
        const int projection = GATED ? 0 : (feature() >= of.second) + (feature() >= of.third);
#pragma unroll 1
        for (int rank = 0; rank < most_rank; rank += RANK_STEP) {
            const int column = projection * of.max_rank + rank + 4 * quarter;
#pragma unroll
            for (int i = 0; i < ALL_8; i += AHEAD) {
                int slots[AHEAD];   // of the column of the MMA
                uint2 x[AHEAD][GATED + 1];
                uint4 pairs[AHEAD][GATED + 1];
                const auto inner_at = [&](int j, int side) {
                    // of no adapter something is read, too, which is not used
                    const int token = min(first_token + 8 * (i + j) + row, args.num_rows - 1);
                    return (u64)token * of.columns + side * of.max_rank + column;
                };
#pragma unroll
                for (int j = 0; j < AHEAD; ++j) {
                    slots[j] = slot_of(8 * (i + j), row);
#pragma unroll
                    for (int side = 0; side <= GATED; ++side)
                        if (JOINED) pairs[j][side] = load_pairs(of.pairs + inner_at(j, side) / 4);
                        else x[j][side] = load_4(of.inner + inner_at(j, side));
                }
                if (!HOLDS_B || rank + i > 0) read_b(i, rank);
                __syncwarp();   // no load may come behind it: all are on their way before the first is used
#pragma unroll
                for (int j = 0; j < AHEAD; ++j) {
                    if (JOINED)
#pragma unroll
                        for (int side = 0; side <= GATED; ++side) {
                            uint4& both = pairs[j][side];
                            while (__any_sync(ALL, slots[j] && (both.y != launch || both.w != launch)))
                                both = load_pairs(of.pairs + inner_at(j, side) / 4);
                            x[j][side] = make_uint2(both.x, both.z);
                        }
                    const auto add = [&](const uint2& low, const uint2& high, bool is_mine) {
                        const uint2 zero = make_uint2(0, 0), first = is_mine ? x[j][0] : zero;
                        float* const c = sums + 4 * (i + j);
                        if (GATED) {
                            const uint2 second = is_mine ? x[j][GATED] : zero;
                            add_product(c, low.x, 0, low.y, 0, first.x, first.y);
                            add_product(c, 0, high.x, 0, high.y, second.x, second.y);
                        } else {
                            add_product(c, low.x, high.x, low.y, high.y, first.x, first.y);
                        }
                    };
                    const int first = slot_of(8 * (i + j), 0), last = slot_of(8 * (i + j), 7);
                    if (first) add(b[j][0], b_8[j][0], slots[j] == first);
                    if (last && last != first) add(b[j][1], b_8[j][1], slots[j] == last);
                    u32 others = __ballot_sync(ALL, slots[j] && slots[j] != first && slots[j] != last);
                    while (others) {
                        const int slot = __shfl_sync(ALL, slots[j], __ffs(others) - 1);
                        uint2 other, other_8;
                        load_b(other, other_8, slot, rank);
                        add(other, other_8, slots[j] == slot);
                        others &= ~__ballot_sync(ALL, slots[j] == slot);
                    }
                }
            }
        }
    }

    // JOINED: the sums of a tile of A are x A^T. Of a warp's 16 columns and 8 tokens, lanes of neighbouring columns
    // exchange numbers, so that each has a pair of columns of one token.
    __device__ __forceinline__ void leave_inner(const float* sums, u32 launch) const {
        if (!finishes) return;
        const Adapters& of = args.adapters;
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, odd = row % 2;
        uint2* const pairs = reinterpret_cast<uint2*>(of.pairs);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row_of_a = tile * FEATURES + 16 * warp + 8 * half + row;
            const int slot = row_of_a / of.columns + 1, column = row_of_a % of.columns;
#pragma unroll
            for (int i = 0; i < ALL_8; ++i) {
                const int in_8 = lane % 4 * 2 + odd;    // the token of this lane
                const float first = sums[4 * i + 2 * half], second = sums[4 * i + 2 * half + 1];
                const float other = __shfl_xor_sync(ALL, odd ? first : second, 4);
                const bool is_mine = slot_of(8 * i, in_8) == slot;
                const int rank = __shfl_sync(ALL, ranks[i / 4], 8 * i % 32 + in_8);
                const u32 pair = column % of.max_rank < rank ? pack(odd ? other : first, odd ? second : other) : 0;
                const u64 at = ((u64)(first_token + 8 * i + in_8) * of.columns + column) / 2;
                if (is_mine) store_pair(pairs + at, pair, launch);
            }
        }
    }

    // Factors, bias, gate; then to rows of bfloat16, one a token: `finished` [SLICE, PITCH].
    __device__ __forceinline__ void transpose(
        const float* sums, const float* factors, int slice, u8* finished) const {
        if (!finishes) return;
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const int in_tile = (GATED ? 8 : 16) * warp + lane / 4, feature = tile * OUT + in_tile;
        const bool has_bias = args.bias && is_there(in_tile), has_bias_8 = args.bias && is_there(in_tile + 8);
        const float bias = has_bias ? to_float(args.bias[feature]) : 0;
        const float bias_8 = has_bias_8 ? to_float(args.bias[GATED ? args.features + feature : feature + 8]) : 0;
        const bool scaled = CODE && GROUP == 0 && !ADAPTED;
        const float of_sums = ADAPTED ? 1 : OF_SUMS;
        const float scale = scaled ? args.scales[feature] : of_sums;
        const float scale_8 = scaled ? args.scales[GATED ? args.features + feature : feature + 8] : of_sums;
        const u32 column = GATED ? 16 * warp : 32 * warp + lane / 8 % 2 * 16;   // in bytes
        const u32 to = shared_address(finished) + lane % 8 * PITCH + column;
#pragma unroll
        for (int i = 0; i < SLICE / 8; ++i) {
            const int token = slice * SLICE + 8 * i;
            const float* const factor = factors + blockIdx.z * OWN + token + lane % 4 * 2;
            float x[4];   // two features of two tokens
#pragma unroll
            for (int part = 0; part < 4; ++part)
                x[part] = sums[token / 2 + part] * (factor[part % 2] * (part / 2 ? scale_8 : scale))
                    + (part / 2 ? bias_8 : bias);
            if (GATED) {
                const auto open = [](float gate, float value) {
                    return __fdividef(gate, 1 + __expf(-gate)) * value;
                };
                store_transposed(to + 8 * i * PITCH, pack(open(x[0], x[2]), open(x[1], x[3])));
            } else {
                store_transposed(to + 8 * i * PITCH, pack(x[0], x[1]), pack(x[2], x[3]));
            }
        }
    }

    // the sum over the threads that have the same token
    static __device__ __forceinline__ float over_token(float x) {
#pragma unroll
        for (int lanes = 1; lanes < CHUNKS; lanes *= 2) x += __shfl_xor_sync(ALL, x, lanes);
        return x;
    }

    __device__ __forceinline__ void finish_heads(int slice, const u8* finished) const {
        constexpr int HALF = FEATURES / 2;
        const Heads& heads = args.heads;
        float cos[ITEMS][8], sin[ITEMS][8];
        if (!is_v()) {
#pragma unroll
            for (int item = 0; item < ITEMS; ++item) {
                if (!is_mine(slice, item)) continue;
                const float* const from = heads.cos_sin + (u64)positions[item] * FEATURES + 8 * chunk;
                load_floats(cos[item], from);
                load_floats(sin[item], from + HALF);
            }
        }
        sync_multipliers();
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            const bool mine = is_mine(slice, item);
            float low[8] = {}, high[8] = {};
            if (mine) {
                const u8* const from = finished + (item * ROWS + row) * PITCH + 16 * chunk;
                unpack(low, *reinterpret_cast<const uint4*>(from));
                unpack(high, *reinterpret_cast<const uint4*>(from + 2 * HALF));
            }
            if (of_head()) {
                float square = 0, of_low[8], of_high[8];
#pragma unroll
                for (int i = 0; i < 8; ++i) square += low[i] * low[i] + high[i] * high[i];
                const float factor = rsqrtf(over_token(square) / FEATURES + args.eps);
                unpack(of_low, norm_weight[0]);
                unpack(of_high, norm_weight[1]);
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    low[i] *= factor * of_low[i];
                    high[i] *= factor * of_high[i];
                }
            }
            if (!mine) continue;
            if (!is_v()) {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const float rotated = low[i] * cos[item][i] - high[i] * sin[item][i];
                    high[i] = high[i] * cos[item][i] + low[i] * sin[item][i];
                    low[i] = rotated;
                }
            }
            if (is_q()) {
                u16* const to = args.out + address(slice, item);
                *reinterpret_cast<uint4*>(to) = pack(low);
                *reinterpret_cast<uint4*>(to + HALF) = pack(high);
            } else if (slots[item] >= 0) {
                constexpr int ITEM = FP8 ? 1 : 2;
                u8* const to = (is_v() ? heads.values : heads.keys) + slots[item] / PAGE_SIZE * heads.page_stride
                    + slots[item] % PAGE_SIZE * heads.slot_stride
                    + (tile - heads.num_heads) % heads.num_kv_heads * heads.head_stride + 8 * chunk * ITEM;
                if (FP8) {
                    const float inverse = 1 / *(is_v() ? heads.v_scale : heads.k_scale);
#pragma unroll
                    for (int i = 0; i < 8; ++i) low[i] *= inverse, high[i] *= inverse;
                    *reinterpret_cast<uint2*>(to) = pack_float8(low);
                    *reinterpret_cast<uint2*>(to + HALF) = pack_float8(high);
                } else {
                    *reinterpret_cast<uint4*>(to) = pack(low);
                    *reinterpret_cast<uint4*>(to + HALF * ITEM) = pack(high);
                }
            }
        }
    }

    // Add to the residual stream, and prepare the norm that follows; or just store.
    __device__ __forceinline__ void finish_features(int slice, const u8* finished) const {
        sync_multipliers();
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            const bool mine = is_mine(slice, item);
            uint4 result;
            if (mine) result = *reinterpret_cast<const uint4*>(finished + (item * ROWS + row) * PITCH + 16 * chunk);
            if (!RESIDUAL) {
                if (mine) *reinterpret_cast<uint4*>(args.out + address(slice, item)) = result;
                continue;
            }
            float square = 0;
            if (mine) {
                float value[8], stream[8], of_norm[8];
                unpack(value, result);
                unpack(stream, residual[item]);
                unpack(of_norm, norm_weight[0]);
#pragma unroll
                for (int i = 0; i < 8; ++i) value[i] += stream[i];
                const uint4 packed = pack(value);
                *reinterpret_cast<uint4*>(args.out + address(slice, item)) = packed;
                unpack(value, packed);   // as others will read it
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    square += value[i] * value[i];
                    value[i] *= of_norm[i];
                }
                *reinterpret_cast<uint4*>(args.scaled + address(slice, item)) = pack(value);
            }
            square = over_token(square);
            if (mine && chunk == 0)
                args.squares_out[(u64)tile * args.num_rows + token(slice, item)] = square;
        }
    }
};

// ---- the kernel

extern "C" __global__ void __launch_bounds__(MULTIPLIERS + 64, PER_PROCESSOR)
linear(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(1024) u8 shared[];
    // the ring, and that of scales; then a barrier a stage that it is full, one that it is empty; then a factor a token;
    // EVEN: then a slice of a finished tile, which else takes the place of the ring; WAYS: at the end sums; PUSHED: behind
    // SHARED_BYTES sums of others, and a barrier
    const u32 ring = shared_address(shared);
    const u32 full = ring + RING_BYTES, empty = full + 8 * STAGES;
    float* const factors = reinterpret_cast<float*>(shared + RING_BYTES + STAGES * 16);
    u8* const finished = EVEN ? reinterpret_cast<u8*>(factors + TOKENS) : shared + PARTS_BYTES;
    const u32 pushed = ring + SHARED_BYTES;     // PUSHED
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Steps steps = own_steps(args);
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
    if (PUSHED) arrive_in_cluster<false>();   // `publish_barriers` is what orders

    if (warp == MULTIPLIERS / 32 && lane == 0) fill_ring(args, steps, ring);
    if (warp > MULTIPLIERS / 32) {
        if (is_only_of_a) {
            publish_factors();  // nobody needs any
        } else {
            if (ADAPTED) fetch_b(args, steps);
            compute_factors(args, blockIdx.x * TOKENS, factors);
        }
    }
    if (warp >= MULTIPLIERS / 32) {
        __syncwarp();
        if (SPLITS > 1 && !PUSHED) sync_cluster<true>(), arrive_in_cluster<false>();
        if (SPLITS > 1) wait_for_cluster();
        return;
    }

    Finisher own(args);
    const auto wait = [] {
        wait_previous();
        if (!AT_ONCE) allow_next();   // all kernels before this one have ended
    };
    const bool is_first_way = WAYS == 1 || threadIdx.x < THREADS;   // it finishes tiles
    if (ADAPTED && !EVEN && is_first_way) own.read_adapters();
    if (HOLDS_B && !is_only_of_a && own.most_rank > 0) {
        own.tile = only_tile;
        own.read_b(0, 0);
    }
    if (!LATE && is_first_way) wait();
    const u32 launch = JOINED ? __ldcg(own_launches(args)) + 1 : 0;
    for (int at = steps.begin; at < steps.end;) {
        const int first = at - steps.begin, in_tile = at % TILE_STEPS;
        const int count = EVEN ? min(TILE_STEPS - in_tile, steps.end - at) : STEPS ? STEPS : steps.end - at;
        const bool of_a = steps.is_of_a(at / TILE_STEPS);
        own.tile = steps.own_tile(at / TILE_STEPS);
        at += count;
        if (!EVEN && is_first_way && !of_a) {   // else the MMAs need the registers
            own.read_norm();
            own.read(0);
        }
        float c[TOKENS / 2];   // of each 8 tokens, two features of two
        if (WAYS > 1 && is_first_way) tell_way<IS_ROOM>();
        multiply_steps(c, ring, first, count);
        if (WAYS > 1) add_ways(c, shared);
        if (!is_first_way) continue;
        if (first == 0) sync_with_factors();   // all have multiplied, too: without EVEN the ring is free
        if (LATE && first == 0) wait();
        if (EVEN && in_tile > 0) {
            leave_part(args, c);
            continue;
        }
        if (EVEN && count < TILE_STEPS) add_parts(args, c, steps.tiles_of_a, at - count + TILE_STEPS);
        float of_splits[SPLITS > 1 ? OWN / 2 : 1];
        if (PUSHED) exchange_splits(of_splits, c, pushed);
        else if (SPLITS > 1) add_splits(of_splits, c, shared);
        float* const sums = SPLITS > 1 ? of_splits : c;   // [OWN / 8, 4]

        if (ADAPTED && EVEN) own.read_adapters();
        if (of_a) {
            own.leave_inner(sums, launch);
            continue;
        }
        if (ADAPTED) own.add_adapters(sums, launch);
        if (EVEN) own.read_norm();
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) {
            if (EVEN) own.read(slice);
            if (slice > 0 || (EVEN && first > 0)) sync_multipliers();   // what was there has been read
            own.transpose(sums, factors, slice, finished);
            if (HEADS) own.finish_heads(slice, finished);
            else own.finish_features(slice, finished);
        }
    }
    if (JOINED && threadIdx.x == 0) *own_launches(args) = launch;   // all have read it, before a barrier
    if (PUSHED && !is_first_way) wait_for_cluster();
    if (SPLITS > 1 && !PUSHED) {
        __syncwarp();
        if (!is_first_way) sync_cluster<true>(), arrive_in_cluster<false>();
        wait_for_cluster();
    }
}
