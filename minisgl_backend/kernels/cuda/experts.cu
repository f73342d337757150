// A GEMM of blocks of rows, each with the weight of its own expert, for Hopper (sm_90a).
//
// Weights are the long side of the GEMM and rows the short one: a tile is FEATURES rows of an expert's
// weight by the TOKENS rows of a block. Thread blocks stay, and take tiles in turn. In each, one warp moves
// weights into a ring in shared memory by the bulk tensor copy engine, others gather rows of x beside
// them, and warpgroups multiply them from there (wgmma). The ring runs on from tile to tile, so memory is
// read without a pause however short the tiles are.
//
// Weights of 8 bits are converted to bfloat16 on the way from shared memory to the tensor cores, which take
// them from registers; the scales of each step's blocks lie in the ring, too.
//
// Compiled with: FEATURES (64 or 128), TOKENS (8, 16, 32, 64 or 128), HEIGHT (rows of an expert's weight),
// SIZE (in_features), STAGES (of the ring), BITS (of a weight: 16 for bfloat16, 8 for E4M3), GATED (the weight
// holds the gate's rows and then as many of the values), SHARED_BYTES, and PER_PROCESSOR (thread blocks that a
// multiprocessor has registers for). All other values are bfloat16.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;

constexpr int BLOCK = 1024 / BITS;                  // in_features of a stage: rows of 128 bytes
constexpr int PARTS = BLOCK / 64;                   // of x in a stage, with rows of 128 bytes
constexpr int GROUPS = FEATURES / 64;               // warpgroups that multiply
constexpr int THREADS = GROUPS * 128;               // that multiply
constexpr int MOVERS = TOKENS > 32 ? 2 : 1;         // warps that gather rows; another one moves weights
constexpr int ALL_THREADS = THREADS + 32 * (1 + MOVERS);
constexpr int TILES = HEIGHT / FEATURES;            // of an expert's weight
constexpr int STEPS = SIZE / BLOCK;                 // of a tile
constexpr int WEIGHT_BYTES = FEATURES * 128;
constexpr int PART_BYTES = TOKENS * 128;
constexpr int STAGE_BYTES = WEIGHT_BYTES + PARTS * PART_BYTES;
constexpr int SCALE_BYTES = BITS == 16 ? 0 : FEATURES * 4;   // of a stage
constexpr int OUT = GATED ? FEATURES / 2 : FEATURES;         // features of the output in a tile
constexpr int OUT_FEATURES = GATED ? HEIGHT / 2 : HEIGHT;
constexpr int PITCH = GATED ? 16 : 48;              // bytes a token in a warp's finished part; 8 rows use all banks
constexpr int LAG = STAGES > 8 ? 4 : STAGES / 2;    // steps whose rows are on their way while the next are asked for
constexpr int ROWS = 4 * MOVERS;                    // that the movers gather side by side
constexpr int ITEMS = TOKENS / ROWS;

static_assert(FEATURES == 64 || FEATURES == 128, "");
static_assert(BITS == 16 || BITS == 8, "");
static_assert(SIZE % BLOCK == 0 && HEIGHT % FEATURES == 0 && TOKENS % 8 == 0 && STAGES >= 2, "");
static_assert(STAGES * (STAGE_BYTES + SCALE_BYTES + 16) + 8 * PITCH * (THREADS / 32) <= SHARED_BYTES, "");

struct __align__(64) TensorMap { u64 words[16]; };

struct Arguments {
    TensorMap weight;       // [num_experts * HEIGHT, SIZE]; GATED: see `load_weight`
    const u16* x;           // [num_pairs / top_k, SIZE]
    u16* out;               // [num_pairs, OUT_FEATURES]
    const int* pairs;       // [num_blocks, TOKENS]: rows of the output; num_pairs where a block is not full
    const int* experts;     // [num_blocks], -1 behind the last one
    const float* factors;   // [num_pairs / top_k], of the rows of x; or null
    const float* scales;    // BITS 8: [num_experts, lines, columns], of blocks of weights
    int num_pairs;
    int num_blocks;
    int top_k;              // rows of the output for each row of x
    int lines;
    int columns;
    int block_outs;         // of a block of weights
    int block_ins;          // a multiple of BLOCK unless there is one column
    int early;              // what says which rows are whose was written before the kernel before this one
};

// ---- instructions

__device__ __forceinline__ u32 shared_address(const void* p) {
    return (u32)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ void init_barrier(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void expect_bytes(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait_barrier(u32 barrier, u32 parity) {
    u32 done;
    do {
        asm volatile("{ .reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.b32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    } while (!done);
}

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

// GATED: a map of [num_experts, features / 8, 2, 8, SIZE], so that 8 rows of the gate and the 8 rows that
// they open lie one after the other, and land in the same thread
__device__ __forceinline__ void load_weight(
    u32 to, const TensorMap& map, int k, int expert, int tile, u32 barrier) {
    if (GATED)
        asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%2, %3, %3, %4, %5}], [%6];"
                     :: "r"(to), "l"(&map), "r"(k), "r"(0), "r"(tile * (FEATURES / 16)), "r"(expert),
                     "r"(barrier) : "memory");
    else
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%2, %3}], [%4];"
                     :: "r"(to), "l"(&map), "r"(k), "r"(expert * HEIGHT + tile * FEATURES), "r"(barrier)
                     : "memory");
}

__device__ __forceinline__ void copy_16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void copy_4(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// until all but the last AFTER groups of this thread's copies are there, for the tensor cores as well
template <int AFTER>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" :: "n"(AFTER) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// of a tile with rows of 128 bytes, whose chunks of 16 bytes are permuted by the row ("128B swizzle")
__device__ __forceinline__ u64 matrix(u32 address) {
    return (u64)((address & 0x3ffff) >> 4) | 1ull << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

#define TEN(tens) "%" #tens "0,%" #tens "1,%" #tens "2,%" #tens "3,%" #tens "4,%" #tens "5,%" \
    #tens "6,%" #tens "7,%" #tens "8,%" #tens "9,"
#define C4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define C16(i) C4(i), C4(i + 4), C4(i + 8), C4(i + 12)
#define MMA(tokens) "wgmma.mma_async.sync.aligned.m64n" #tokens "k16.f32.bf16.bf16 "

// c (+)= 64 rows of a times TOKENS rows of b, over 16 in_features; a and b in shared memory
__device__ __forceinline__ void multiply(float (&c)[TOKENS / 2], u64 a, u64 b, u32 add) {
#if TOKENS == 8
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %6, 0;\n" MMA(8)
                 "{%0,%1,%2,%3}, %4, %5, p, 1, 1, 0, 0; }"
                 : C4(0) : "l"(a), "l"(b), "r"(add));
#elif TOKENS == 16
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %10, 0;\n" MMA(16)
                 "{%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, p, 1, 1, 0, 0; }"
                 : C4(0), C4(4) : "l"(a), "l"(b), "r"(add));
#elif TOKENS == 32
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %18, 0;\n" MMA(32)
                 "{" TEN() "%10,%11,%12,%13,%14,%15}, %16, %17, p, 1, 1, 0, 0; }"
                 : C16(0) : "l"(a), "l"(b), "r"(add));
#elif TOKENS == 64
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0;\n" MMA(64)
                 "{" TEN() TEN(1) TEN(2) "%30,%31}, %32, %33, p, 1, 1, 0, 0; }"
                 : C16(0), C16(16) : "l"(a), "l"(b), "r"(add));
#else
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0;\n" MMA(128)
                 "{" TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) "%60,%61,%62,%63}, %64, %65, p, 1, 1, 0, 0; }"
                 : C16(0), C16(16), C16(32), C16(48) : "l"(a), "l"(b), "r"(add));
#endif
}

// the same, with a in registers: of rows lane / 4 and 8 more, pairs of in_features lane % 4 and 4 more
__device__ __forceinline__ void multiply(float (&c)[TOKENS / 2], const u32 (&a)[4], u64 b, u32 add) {
#define A4 "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
#if TOKENS == 8
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %9, 0;\n" MMA(8)
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, p, 1, 1, 0; }"
                 : C4(0) : A4, "l"(b), "r"(add));
#elif TOKENS == 16
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %13, 0;\n" MMA(16)
                 "{%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, p, 1, 1, 0; }"
                 : C4(0), C4(4) : A4, "l"(b), "r"(add));
#elif TOKENS == 32
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %21, 0;\n" MMA(32)
                 "{" TEN() "%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, p, 1, 1, 0; }"
                 : C16(0) : A4, "l"(b), "r"(add));
#elif TOKENS == 64
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0;\n" MMA(64)
                 "{" TEN() TEN(1) TEN(2) "%30,%31}, {%32,%33,%34,%35}, %36, p, 1, 1, 0; }"
                 : C16(0), C16(16) : A4, "l"(b), "r"(add));
#else
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0;\n" MMA(128)
                 "{" TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) "%60,%61,%62,%63}, "
                 "{%64,%65,%66,%67}, %68, p, 1, 1, 0; }"
                 : C16(0), C16(16), C16(32), C16(48) : A4, "l"(b), "r"(add));
#endif
}

__device__ __forceinline__ void begin_mma() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void end_mma() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int AFTER>
__device__ __forceinline__ void wait_mma() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(AFTER) : "memory");
}

__device__ __forceinline__ u32 pack(float low, float high) {
    u32 out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

// Fragments of 8 features by 8 tokens go to rows of 8 features, one a token; a lane of 8 has a row's address.
__device__ __forceinline__ void store_transposed(u32 to, u32 fragment) {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};"
                 :: "r"(to), "r"(fragment) : "memory");
}

__device__ __forceinline__ void store_transposed(u32 to, u32 first, u32 second) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
                 :: "r"(to), "r"(first), "r"(second) : "memory");
}

// the two do nothing unless the launch is a dependent one
__device__ __forceinline__ void allow_next() { asm volatile("griddepcontrol.launch_dependents;"); }

__device__ __forceinline__ void wait_previous() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// ---- the tiles of a thread block

struct Tile {
    int number, block, expert;

    __device__ __forceinline__ int of_expert() const { return number % TILES; }

    // False behind the last one.
    __device__ __forceinline__ bool find(const Arguments& args) {
        block = number / TILES;
        expert = block < args.num_blocks ? __ldcg(args.experts + block) : -1;
        return expert >= 0;
    }

    // The row of the expert's weight that is `row` of the tile.
    __device__ __forceinline__ int feature(int row) const {
        if (!GATED) return of_expert() * FEATURES + row;
        return of_expert() * OUT + row / 16 * 8 + row % 8 + row / 8 % 2 * OUT_FEATURES;
    }
};

// ---- the warps that fill the ring

__device__ __forceinline__ void move_weights(const Arguments& args, u32 ring, u32 full, u32 empty) {
    int step = 0;
    for (Tile tile{(int)blockIdx.x}; tile.find(args); tile.number += gridDim.x) {
        for (int i = 0; i < STEPS; ++i, ++step) {
            const u32 stage = step % STAGES;
            if (step >= STAGES) wait_barrier(empty + 8 * stage, (step / STAGES - 1) & 1);
            expect_bytes(full + 8 * stage, WEIGHT_BYTES);
            load_weight(ring + stage * STAGE_BYTES, args.weight, i * BLOCK, tile.expert, tile.of_expert(),
                        full + 8 * stage);
        }
    }
}

// Rows of x, in the order that the tensor cores want, and scales. A stage counts as filled LAG steps later.
__device__ __forceinline__ void gather_rows(
    const Arguments& args, u32 ring, u32 full, u32 empty, u32 scales) {
    const int thread = threadIdx.x - THREADS - 32, chunk = thread % 8, row = thread / 8;
    constexpr int OF_SCALES = BITS == 16 ? 0 : FEATURES / (32 * MOVERS);
    int step = 0;
    const auto hand_over = [&](int which) {
        __syncwarp();
        if (thread % 32 == 0) arrive(full + 8 * (which % STAGES));
    };
    for (Tile tile{(int)blockIdx.x}; tile.find(args); tile.number += gridDim.x) {
        const u16* from[ITEMS];
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            const int pair = __ldcg(args.pairs + (u64)tile.block * TOKENS + item * ROWS + row);
            from[item] = pair < args.num_pairs ? args.x + (u64)(pair / args.top_k) * SIZE + 8 * chunk : nullptr;
        }
        const float* of_scales[OF_SCALES + 1];
#pragma unroll
        for (int item = 0; item < OF_SCALES; ++item) {
            const int line = tile.feature(item * 32 * MOVERS + thread) / args.block_outs;
            of_scales[item] = args.scales + ((u64)tile.expert * args.lines + line) * args.columns;
        }
        for (int i = 0; i < STEPS; ++i, ++step) {
            const u32 stage = step % STAGES, to = ring + stage * STAGE_BYTES + WEIGHT_BYTES;
            if (step >= STAGES) wait_barrier(empty + 8 * stage, (step / STAGES - 1) & 1);
#pragma unroll
            for (int item = 0; item < ITEMS; ++item) {
                if (!from[item]) continue;   // what is there is multiplied, and never stored
                const int at = item * ROWS + row;
#pragma unroll
                for (int part = 0; part < PARTS; ++part)
                    copy_16(to + part * PART_BYTES + at * 128 + (chunk ^ at % 8) * 16,
                            from[item] + i * BLOCK + 64 * part);
            }
            if (OF_SCALES) {
                const int column = args.columns == 1 ? 0 : i * BLOCK / args.block_ins;
#pragma unroll
                for (int item = 0; item < OF_SCALES; ++item) {
                    const int at = item * 32 * MOVERS + thread;
                    copy_4(scales + stage * SCALE_BYTES + 4 * at, of_scales[item] + column);
                }
            }
            end_copies();
            if (step >= LAG) {
                wait_copies<LAG>();
                hand_over(step - LAG);
            }
        }
    }
    wait_copies<0>();
    for (int late = step < LAG ? 0 : step - LAG; late < step; ++late) hand_over(late);
}

// ---- the warps that multiply

// Two E4M3 numbers as bfloat16, times 2^-120: sign, exponent and mantissa just move.
__device__ __forceinline__ u32 widened(u32 two) {
    const u32 apart = __byte_perm(two, 0, 0x1404);   // each in the high half of its word
    return (apart >> 4 & 0x07f007f0) | (apart & 0x80008000);
}

__device__ __forceinline__ u32 times_2_to_120(u32 two) {
    u32 out;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(two), "r"(0x7b807b80));
    return out;
}

__device__ __forceinline__ u32 load_2(u32 from) {
    u16 out;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(out) : "r"(from));
    return out;
}

__device__ __forceinline__ float load_float(u32 from) {
    float out;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(out) : "r"(from));
    return out;
}

// c = a tile whose steps are in the ring from `first` on
__device__ __forceinline__ void multiply_tile(
    float (&c)[TOKENS / 2], u32 ring, u32 full, u32 empty, u32 scales, int first) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const auto release = [&](int step) {
        if (lane == 0) arrive(empty + 8 * (step % STAGES));
    };
#if BITS == 16
    for (int i = 0; i < STEPS; ++i) {
        const int step = first + i;
        const u32 stage = step % STAGES, weight = ring + stage * STAGE_BYTES;
        wait_barrier(full + 8 * stage, step / STAGES & 1);
        const u64 a = matrix(weight + warp / 4 * 8192), b = matrix(weight + WEIGHT_BYTES);
        begin_mma();
#pragma unroll
        for (int k = 0; k < BLOCK / 16; ++k) multiply(c, a + 2 * k, b + 2 * k, i + k > 0);
        end_mma();
        // one stage's MMAs run while the next ones are issued
        wait_mma<1>();
        if (i > 0) release(step - 1);
    }
    wait_mma<0>();
    release(first + STEPS - 1);
#else
    const int row = 16 * warp + lane / 4;   // and 8 more, of the tile
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) c[i] = 0;
    for (int i = 0; i < STEPS; ++i) {
        const int step = first + i;
        const u32 stage = step % STAGES, weight = ring + stage * STAGE_BYTES;
        wait_barrier(full + 8 * stage, step / STAGES & 1);
        u32 a[BLOCK / 16][4];
#pragma unroll
        for (int k = 0; k < BLOCK / 16; ++k) {
            // row % 8 is lane / 4 for both rows
            const u32 at = weight + row * 128 + (k ^ lane / 4) * 16 + lane % 4 * 2;
            a[k][0] = times_2_to_120(widened(load_2(at)));
            a[k][1] = times_2_to_120(widened(load_2(at + 1024)));
            a[k][2] = times_2_to_120(widened(load_2(at + 8)));
            a[k][3] = times_2_to_120(widened(load_2(at + 1032)));
        }
        const u32 of_scales = scales + stage * SCALE_BYTES + 4 * row;
        const float scale[2] = {load_float(of_scales), load_float(of_scales + 32)};
        float part[TOKENS / 2];
        begin_mma();
#pragma unroll
        for (int k = 0; k < BLOCK / 16; ++k)
            multiply(part, a[k], matrix(weight + WEIGHT_BYTES + k / 4 * PART_BYTES) + k % 4 * 2, k > 0);
        end_mma();
        wait_mma<0>();
        release(step);
#pragma unroll
        for (int j = 0; j < TOKENS / 2; ++j) c[j] += scale[j / 2 % 2] * part[j];
    }
#endif
}

// The results of a warp, 8 tokens at a time over its part of shared memory to rows of the output.
__device__ __forceinline__ void finish_tile(
    const Arguments& args, const Tile& tile, const float (&c)[TOKENS / 2], u8* finished) {
    constexpr int CHUNKS = GATED ? 1 : 2;   // of 16 bytes that the warp has of a token
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int* const pairs = args.pairs + (u64)tile.block * TOKENS;
    int stored[TOKENS / 8];   // the row that the lane stores
    float2 factors[TOKENS / 8];
#pragma unroll
    for (int i = 0; i < TOKENS / 8; ++i) {
        stored[i] = lane < 8 * CHUNKS ? __ldcg(pairs + 8 * i + lane / CHUNKS) : args.num_pairs;
        factors[i] = make_float2(1, 1);
        if (args.factors) {
            const int first = __ldcg(pairs + 8 * i + lane % 4 * 2), second = __ldcg(pairs + 8 * i + lane % 4 * 2 + 1);
            if (first < args.num_pairs) factors[i].x = args.factors[first / args.top_k];
            if (second < args.num_pairs) factors[i].y = args.factors[second / args.top_k];
        }
    }
    const u32 to = shared_address(finished) + lane % 8 * PITCH + lane / 8 % CHUNKS * 16;
    const int feature = tile.of_expert() * OUT + 8 * CHUNKS * warp + lane % CHUNKS * 8;
    const auto open = [](float gate, float value) { return __fdividef(gate, 1 + __expf(-gate)) * value; };
#pragma unroll
    for (int i = 0; i < TOKENS / 8; ++i) {
        const float2 by = factors[i];
        const float x[4] = {c[4 * i] * by.x, c[4 * i + 1] * by.y, c[4 * i + 2] * by.x, c[4 * i + 3] * by.y};
        if (GATED) store_transposed(to, pack(open(x[0], x[2]), open(x[1], x[3])));
        else store_transposed(to, pack(x[0], x[1]), pack(x[2], x[3]));
        __syncwarp();
        if (stored[i] < args.num_pairs) {
            const uint4 eight = *reinterpret_cast<const uint4*>(finished + lane / CHUNKS * PITCH + lane % CHUNKS * 16);
            *reinterpret_cast<uint4*>(args.out + (u64)stored[i] * OUT_FEATURES + feature) = eight;
        }
        __syncwarp();
    }
}

// ---- the kernel

extern "C" __global__ void __launch_bounds__(ALL_THREADS, PER_PROCESSOR)
experts(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(1024) u8 shared[];
    // the ring; then a barrier a stage that it is full, one that it is empty; then scales; then 8 rows a warp
    const u32 ring = shared_address(shared);
    const u32 full = ring + STAGES * STAGE_BYTES, empty = full + 8 * STAGES, scales = empty + 8 * STAGES;
    u8* const finished = shared + STAGES * (STAGE_BYTES + 16 + SCALE_BYTES);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    if (threadIdx.x == 0) {
        if (ring % 1024) __trap();   // the swizzle counts from there
        for (int stage = 0; stage < STAGES; ++stage) {
            init_barrier(full + 8 * stage, 1 + MOVERS);
            init_barrier(empty + 8 * stage, GROUPS * 4);
        }
        publish_barriers();
    }
    __syncthreads();
    if (!args.early) wait_previous();
    // The next kernel may read what says which rows are whose: kernels before this one have written it.
    allow_next();

    if (warp == THREADS / 32) {
        if (lane == 0) move_weights(args, ring, full, empty);
    } else if (warp > THREADS / 32) {
        wait_previous();
        gather_rows(args, ring, full, empty, scales);
    } else {
        wait_previous();
        int step = 0;
        for (Tile tile{(int)blockIdx.x}; tile.find(args); tile.number += gridDim.x, step += STEPS) {
            float c[TOKENS / 2];   // of each 8 tokens, two features of two
            multiply_tile(c, ring, full, empty, scales, step);
            finish_tile(args, tile, c, finished + warp * 8 * PITCH);
        }
    }
}
