// What the GEMMs for few tokens on Hopper (sm_90a) have in common: tiles of a weight and of tokens in a ring in shared
// memory, and the warpgroups that multiply them from there (wgmma).
//
// The weight is the long side of the GEMM: a tile is FEATURES rows of it by TOKENS tokens. The ring has STAGES stages,
// of BLOCK in_features each. In shared memory the stages come first, each with its weight before its tokens; then the
// scales of all stages, a "full" barrier for each stage, and an "empty" barrier for each. The including source fills
// the ring.
//
// A quantized weight is in the ring as codes, and is multiplied from registers: a thread loads its codes by `ldmatrix`
// and converts them to bfloat16, exactly. The in_features are permuted in memory (`kernels.packed_weight`) so that a
// word of the matrix holds exactly the codes that the thread needs. Scales are applied to sums, in float32: scales of a
// GROUP of in_features, which are also in the ring, to the sums over the group; scales of rows at the end. But scales
// of groups of e2m1 multiply its numbers.
//
// But if FLOAT8, tokens have been rounded to e4m3, too, and the tensor cores multiply both as they are.
//
// The including source defines FEATURES (64 or 128), TOKENS (8, 16, 24, 32, 64, 96, 128 or 192), BLOCK (64; for codes
// 128, for 4-bit codes also 256, since the copy engine takes as long for a row of 64 bytes as for one of 128), STAGES,
// and CODE (0: the weight is bfloat16; otherwise its codes are 1: e4m3, 2: 8-bit integers, 3: 4-bit integers, 4: e2m1).
// It defines COPIED if threads copy tokens by cp.async; otherwise the copy engine moves them. Unless CODE is 0, it also
// defines GROUP (in_features that share a scale: 32, 64 or 128; 0: all), SHARED_BY (rows that share a scale: 1 or 8)
// and ZEROS (the low 8 bits of a scale are a zero point; otherwise the zero point is the middle of the integer range).
// For e2m1, GROUP is 128 or 64 (see `codes.cuh`), and SHARED_BY is 1. FLOAT8 is only for CODE 1 and a GROUP of 128 or 0.
// BEYOND: in_features of a tile's last step that lie beyond the weight (0 if the source does not say). Warpgroups do not
// multiply codes of 64 of them. (BY_WARP they do: leaving out the end of a tile made tiles slower.)
// BY_WARP: each warp multiplies codes on its own, by up to 16 tokens, with more registers. WAYS (1; with BY_WARP also
// 2): the number of sets of warps, which take turns of 128 in_features.

#pragma once

#include "codes.cuh"
#include "wide_mma.cuh"

#ifndef BEYOND
#define BEYOND 0
#endif

constexpr int GROUPS = FEATURES / 64;               // warpgroups that multiply
constexpr int THREADS = GROUPS * 128;               // that multiply, in each way
constexpr int HALVES = CODE ? BLOCK / 128 : 1;      // per stage
constexpr int WEIGHT_BYTES = FEATURES * BLOCK * BITS / 8;   // per stage
constexpr int TOKEN_BYTES = TOKENS * 128;           // for 64 in_features, or 128 if FLOAT8: rows of 128 bytes
constexpr int STAGE_BYTES = WEIGHT_BYTES + BLOCK / (FLOAT8 ? 128 : 64) * TOKEN_BYTES;
constexpr int GROUP_BYTES = GROUP ? BLOCK / GROUP * (64 / SHARED_BY) * 4 : 0;    // a warpgroup's scales in a stage
constexpr int SCALE_BYTES = GROUPS * GROUP_BYTES;   // per stage
constexpr int RING_BYTES = STAGES * (STAGE_BYTES + SCALE_BYTES);
constexpr int SUMMED = CODE == 4 ? 0 : GROUP;       // in_features whose sum is multiplied by a scale

static_assert(FEATURES == 64 || FEATURES == 128, "");
static_assert(TOKENS % 8 == 0, "");
static_assert(CODE ? TOKENS <= 128 : GROUP == 0, "");
static_assert(CODE ? BLOCK == 128 || (BLOCK == 256 && BITS == 4) : BLOCK == 64, "");
static_assert(GROUP == 0 || GROUP == 32 || GROUP == 64 || GROUP == 128, "");
// Each way has its own stages or halves: a barrier only tells a phase from the next one, so none may be missed.
static_assert(WAYS == 1 || (WAYS == 2 && BY_WARP && HALVES * STAGES % 2 == 0), "");
static_assert(!FLOAT8 || (CODE == 1 && BLOCK == 128 && (GROUP == 128 || GROUP == 0) && !BY_WARP), "");
static_assert(CODE != 4 || (SHARED_BY == 1 && !ZEROS), "");

template <int N>
struct Number {
    static constexpr int value = N;
};

// ---- instructions

#if CODE
// c (+)= 64 rows of a times TOKENS rows of b, over 16 in_features. a is in registers: two numbers of rows r and r + 8,
// from each half of the in_features.
__device__ __forceinline__ void multiply(float (&c)[TOKENS / 2], const u32 (&a)[4], u64 b, u32 add) {
#if TOKENS == 8
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %9, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 " "{%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, %8, p, 1, 1, 0; }"
                 : C4(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
#elif TOKENS == 16
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %13, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 " "{%0,%1,%2,%3,%4,%5,%6,%7}, "
                 "{%8,%9,%10,%11}, %12, p, 1, 1, 0; }"
                 : C4(0), C4(4) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
#elif TOKENS == 24
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %17, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n24k16.f32.bf16.bf16 " "{" TEN() "%10,%11}, "
                 "{%12,%13,%14,%15}, %16, p, 1, 1, 0; }"
                 : C4(0), C4(4), C4(8) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
#elif TOKENS == 32
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %21, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 " "{" TEN() "%10,%11,%12,%13,%14,%15}, "
                 "{%16,%17,%18,%19}, %20, p, 1, 1, 0; }"
                 : C16(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
#elif TOKENS == 64
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " "{" TEN() TEN(1) TEN(2) "%30,%31}, "
                 "{%32,%33,%34,%35}, %36, p, 1, 1, 0; }"
                 : C16(0), C16(16) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
#elif TOKENS == 96
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %53, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 "
                 "{" TEN() TEN(1) TEN(2) TEN(3) "%40,%41,%42,%43,%44,%45,%46,%47}, "
                 "{%48,%49,%50,%51}, %52, p, 1, 1, 0; }"
                 : C16(0), C16(16), C16(32) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
#else
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
                 "{" TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) "%60,%61,%62,%63}, "
                 "{%64,%65,%66,%67}, %68, p, 1, 1, 0; }"
                 : C16(0), C16(16), C16(32), C16(48) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
#endif
}
#endif

// ---- the warps that multiply

// Waits for the stage of a step, which MMAs read from shared memory. (BY_WARP, threads read it.)
[[maybe_unused]] __device__ __forceinline__ void wait_stage(u32 full, int step) {
    wait_barrier(full + 8 * (step % STAGES), step / STAGES & 1);
#ifdef COPIED
    see_copies();
#endif
}

#if CODE == 0
// c = the product over `count` steps of a tile, which begin at step `first` of the thread block.
__device__ __forceinline__ void multiply_steps(float (&c)[TOKENS / 2], u32 ring, int first, int count) {
    const u32 full = ring + RING_BYTES, empty = full + 8 * STAGES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const auto release = [&](int step) {
        if (lane == 0) arrive(empty + 8 * (step % STAGES));
    };
    for (int i = 0; i < count; ++i) {
        const int step = first + i;
        const u32 stage = step % STAGES;
        wait_stage(full, step);
        const u32 weight = ring + stage * STAGE_BYTES;
        const u64 a = matrix(weight + warp / 4 * 8192), b = matrix(weight + WEIGHT_BYTES);
        begin_mma();
#pragma unroll
        for (int k = 0; k < BLOCK / 16; ++k) Mma<TOKENS>::multiply(c, a + 2 * k, b + 2 * k, i + k > 0);
        end_mma();
        // one stage's MMAs run while the next ones are issued
        wait_mma<1>();
        if (i > 0) release(step - 1);
    }
    wait_mma<0>();
    release(first + count - 1);
}
#else
// x, which the compiler then keeps in a register; otherwise it would compute x again in each step
__device__ __forceinline__ u32 kept(u32 x) {
    asm("mov.b32 %0, %0;" : "+r"(x));
    return x;
}

// Where a thread reads among the codes, scales and tokens of any stage. Chunks of 16 bytes are permuted by the row. Of
// a row of codes, half of a warp's lanes read the first chunk and the others the second one; those 2 * i further on are
// at this address xor 32 * i. Of 8 tokens a warp reads 4 chunks at once.
struct Places {
    u32 codes, scales, tokens;

    __device__ __forceinline__ Places() {
        constexpr int BYTES = BLOCK * BITS / 8;
        const int thread = threadIdx.x % THREADS, lane = thread % 32;
        const int row = thread / 32 * 16 + lane % 16;
        codes = kept(row * BYTES + (lane / 16 ^ (BYTES == 128 ? row % 8 : row / 2 % 4)) * 16);
        scales = kept(thread / 128 * GROUP_BYTES + (thread % 128 / 32 * 16 + lane / 4) / SHARED_BY * 4);
        tokens = kept(lane % 8 * 128 + (lane / 8 ^ lane % 8) * 16);
    }

    __device__ __forceinline__ u32 scales_of(u32 ring, u32 stage) const {
        return ring + STAGES * STAGE_BYTES + stage * SCALE_BYTES + scales;
    }
};

// The scales of both rows of a thread, for 64 in_features. If they are POWERS, words have scales for 128.
constexpr int SCALES = GROUP == 32 ? 2 : 1;
struct Scales {
    u32 words[SCALES][2];

    // `from`: the thread's scales of the stage; reads those for 64 in_features from 64 * `part_64` on
    __device__ __forceinline__ void read(u32 from, int part_64) {
        if (GROUP == 0) return;
#pragma unroll
        for (int i = 0; i < SCALES; ++i)
#pragma unroll
            for (int row_8 = 0; row_8 < 2; ++row_8) {
                const int group = (part_64 * 64 + i * 32) / (GROUP ? GROUP : 1);
                const u32 at = from + (group * (64 / SHARED_BY) + 8 * row_8 / SHARED_BY) * 4;
                asm volatile("ld.shared.u32 %0, [%1];" : "=r"(words[i][row_8]) : "r"(at));
            }
    }

    // what `numbers` needs of them, for in_features 16 * `k` and on of 128, and for one of the rows
    __device__ __forceinline__ u32 by(int k, int part) const {
        if (CODE == 4) return scale_of_group(words[0][part], POWERS ? k / 2 : k % 4);
        return ZEROS || CODE == 3 ? zero_of(GROUP ? words[k / 2 % SCALES][part] : 0) : 0;
    }

    // c += the scaled sums of a group
    __device__ __forceinline__ void add_scaled(float (&c)[TOKENS / 2], const float (&sums)[TOKENS / 2], int i) const {
        const float low = scale_of(words[i][0]), high = scale_of(words[i][1]);
#pragma unroll
        for (int j = 0; j < TOKENS / 2; j += 4) {
            c[j] += low * sums[j], c[j + 1] += low * sums[j + 1];
            c[j + 2] += high * sums[j + 2], c[j + 3] += high * sums[j + 3];
        }
    }
};

// Reads 64 in_features, a `part` of a stage: the registers of 4 MMAs. `from`: the thread's codes of the stage. Lanes 0
// to 7 give the addresses of rows 0 to 7 for the first matrix, lanes 8 to 15 those of rows 8 to 15 for the second, and
// the others those of the same rows in the next 16-byte chunk.
__device__ __forceinline__ void read_numbers(u32 (&a)[4][4], u32 from, int part, const Scales& scales) {
    if (BITS == 8) {
#pragma unroll
        for (int k = 0; k < 4; k += 2) {
            u32 codes[4];
            load_matrices<false>(codes, from ^ 16 * (4 * part + k));
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    a[k + i][j] = numbers(codes[2 * i + j % 2], j / 2, scales.by(part % 2 * 4 + k + i, j % 2));
        }
    } else {
        u32 codes[4];
        load_matrices<false>(codes, from ^ 32 * part);
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                a[k][j] = numbers(codes[k / 2 * 2 + j % 2], k % 2 * 2 + j / 2, scales.by(part % 2 * 4 + k, j % 2));
    }
}

#if FLOAT8
// c = the product over `count` steps of a tile, which begin at step `first` of the thread block. The tensor cores add
// up 128 in_features ("two-level accumulation", as in `float8_linear.cu`).
__device__ __forceinline__ void multiply_steps(float (&c)[TOKENS / 2], u32 ring, int first, int count) {
    const u32 full = ring + RING_BYTES, empty = full + 8 * STAGES;
    const int group = __shfl_sync(ALL, threadIdx.x / 128, 0);   // the compiler sees that descriptors are uniform
    const Places places;
    float sums[TOKENS / 2];
#pragma unroll
    for (int j = 0; j < TOKENS / 2; ++j) c[j] = sums[j] = 0;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
        const int step = first + i;
        const u32 stage = step % STAGES, weight = __shfl_sync(ALL, ring + stage * STAGE_BYTES, 0);
        const u64 a = matrix(weight + group * 8192), b = matrix(weight + WEIGHT_BYTES);
        wait_stage(full, step);
        begin_mma();
#pragma unroll
        for (int k = 0; k < 4; ++k) Mma<TOKENS>::multiply(sums, a + 2 * k, b + 2 * k, k > 0);
        end_mma();
        Scales scales;
        scales.read(places.scales_of(ring, stage), 0);
        wait_mma<0>();
        now_written<TOKENS / 2>(sums);
        if (threadIdx.x % 32 == 0) arrive(empty + 8 * stage);
        if (GROUP) scales.add_scaled(c, sums, 0);
        else
#pragma unroll
            for (int j = 0; j < TOKENS / 2; ++j) c[j] += sums[j];
    }
}
#elif BY_WARP
// Few tokens: each warp multiplies its 16 rows by itself (`mma`), and waits for no other warp. With one way, all that
// it needs of 128 in_features is in registers before it multiplies the 128 before them. With two ways, others multiply
// while a warp waits for the ring, its registers or an MMA.
static_assert(TOKENS <= 16, "");
constexpr int CHAINS = WAYS == 1 ? 2 : 1;   // sums to which MMAs add in turn

struct Operands {
    u32 codes[BITS / 2][4];
    u32 x[TOKENS / 8][4][4];   // for each 8 tokens and 32 in_features
    Scales scales[2];

    __device__ __forceinline__ void read(u32 ring, u32 stage, int half, const Places& places) {
        const u32 from = ring + stage * STAGE_BYTES, codes_at = from + places.codes;
        const u32 tokens_at = from + WEIGHT_BYTES + 2 * half * TOKEN_BYTES + places.tokens;
#pragma unroll
        for (int i = 0; i < BITS / 2; ++i)   // of 32 bytes a row
            load_matrices<false>(codes[i], codes_at ^ 16 * (half * BITS + 2 * i));
#pragma unroll
        for (int i = 0; i < TOKENS / 8; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                load_matrices<false>(x[i][j], (tokens_at + j / 2 * TOKEN_BYTES + i * 1024) ^ 64 * (j % 2));
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (POWERS && i) scales[i] = scales[0];   // one word for both
            else scales[i].read(places.scales_of(ring, stage), 2 * half + i);
    }
};

// 4-bit integers are multiplied as 128 + code, and the excess is subtracted from the sums of a group: it is a multiple
// of the sum of the token's in_features, which an MMA with ones gives.
constexpr bool SUBTRACTS = CODE == 3 && GROUP && TOKENS == 8;

// Adds 16 in_features to one of the `sums`. With two of them, no MMA waits for the one before it.
__device__ __forceinline__ void multiply(
    float (&sums)[CHAINS][TOKENS / 2], float (&of_ones)[CHAINS][TOKENS / 2], const Operands& from, int k) {
    u32 a[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const u32 codes = BITS == 8 ? from.codes[k / 2][k % 2 * 2 + j % 2] : from.codes[k / 4][k / 2 % 2 * 2 + j % 2];
        const int pair = BITS == 8 ? j / 2 : k % 2 * 2 + j / 2;
        a[j] = SUBTRACTS ? raw_numbers(codes, pair) : numbers(codes, pair, from.scales[k / 4].by(k, j % 2));
    }
    constexpr u32 ONES = 0x3f803f80;   // two
#pragma unroll
    for (int i = 0; i < TOKENS / 8; ++i) {
        const u32* const b = from.x[i][k / 2] + k % 2 * 2;
        add_product(sums[k % CHAINS] + 4 * i, a[0], a[1], a[2], a[3], b[0], b[1]);
        if (SUBTRACTS) add_product(of_ones[k % CHAINS] + 4 * i, ONES, ONES, ONES, ONES, b[0], b[1]);
    }
}

__device__ __forceinline__ float total(const float (&sums)[CHAINS][TOKENS / 2], int i) {
    return CHAINS == 1 ? sums[0][i] : sums[0][i] + sums[CHAINS - 1][i];
}

// c += the scaled sums of the group whose in_features begin at 16 * `k`
__device__ __forceinline__ void add_group(
    float (&c)[TOKENS / 2], const float (&sums)[CHAINS][TOKENS / 2], const float (&of_ones)[CHAINS][TOKENS / 2],
    const Operands& from, int k) {
    const Scales& scales = from.scales[k / 4];
    float sum[TOKENS / 2];
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) {
        sum[i] = total(sums, i);
        if (SUBTRACTS) {   // 128 plus the zero point
            const u32 zero = ZEROS ? scales.words[k % 4 / 2 % SCALES][i % 4 / 2] & 0x7f : 8;
            sum[i] -= __int_as_float(0x43000000 | zero << 16) * total(of_ones, i);
        }
    }
    scales.add_scaled(c, sum, k % 4 / 2 % SCALES);
}

// c = the product over `count` steps of a tile, or over this way's part of them. They begin at step `first` of the
// thread block.
__device__ __forceinline__ void multiply_steps(float (&c)[TOKENS / 2], u32 ring, int first, int count) {
    const u32 full = ring + RING_BYTES, empty = full + 8 * STAGES;
    constexpr int OF_GROUP = (SUMMED ? SUMMED : 128) / 16;   // times 16 in_features
    const Places places;
    float sums[CHAINS][TOKENS / 2] = {}, of_ones[CHAINS][TOKENS / 2] = {};
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) c[i] = 0;
    const auto add = [&](const Operands& operands) {
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            if (SUMMED && k % OF_GROUP == 0)
#pragma unroll
                for (int j = 0; j < TOKENS / 2; ++j)
                    sums[0][j] = sums[CHAINS - 1][j] = of_ones[0][j] = of_ones[CHAINS - 1][j] = 0;
            multiply(sums, of_ones, operands, k);
            if (SUMMED && k % OF_GROUP == OF_GROUP - 1) add_group(c, sums, of_ones, operands, k - k % OF_GROUP);
        }
    };
#if WAYS == 1
    const auto read = [&](Operands& to, int i) {
        const int step = first + i / HALVES, half = i % HALVES;
        const u32 stage = step % STAGES;
        if (half == 0) wait_barrier(full + 8 * stage, step / STAGES & 1);
        to.read(ring, stage, half, places);
        __syncwarp();
        if (half == HALVES - 1 && threadIdx.x % 32 == 0) arrive(empty + 8 * stage);
    };
    Operands operands;
    read(operands, 0);
#pragma unroll 2
    for (int i = 0; i < HALVES * count; ++i) {
        Operands next;
        if (i + 1 < HALVES * count) read(next, i + 1);
        add(operands);
        operands = next;
    }
#else
    // one half of every stage, or every second stage
    const u32 way = threadIdx.x / THREADS, half = HALVES == 2 ? way : 0;
#pragma unroll 1
    for (u32 step = first + (HALVES == 2 ? 0 : (way ^ first) % 2); step < first + count; step += 2 / HALVES) {
        const u32 stage = step % STAGES;
        wait_barrier(full + 8 * stage, step / STAGES & 1);
        Operands operands;
        operands.read(ring, stage, half, places);
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(empty + 8 * stage);
        add(operands);
    }
#endif
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i)
        if (!SUMMED) c[i] = total(sums, i);
}
#else
// c = the product over `count` steps of a tile, which begin at step `first` of the thread block. While the MMAs of 64
// in_features run, the next 64 are converted.
__device__ __forceinline__ void multiply_steps(float (&c)[TOKENS / 2], u32 ring, int first, int count) {
    const u32 full = ring + RING_BYTES, empty = full + 8 * STAGES;
    const int lane = threadIdx.x % 32;
    const Places places;
    float of_group[TOKENS / 2];
    float (&sums)[TOKENS / 2] = SUMMED ? of_group : c;
    u32 a[2][4][4];
    Scales scales[2] = {};
    if (SUMMED)   // the first group also adds the group before it, which is zero
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) c[i] = of_group[i] = 0;
    const auto release = [&](int step) {
        if (lane == 0) arrive(empty + 8 * (step % STAGES));
    };
    constexpr int PARTS = BLOCK / 64, OF_LAST = PARTS - BEYOND / 64;   // of a step, and of a tile's last step
    const auto multiply_parts = [&](int i, auto parts) {
        constexpr int UNDER_WAY = parts.value == PARTS;   // parts whose MMAs run while the next part is converted
        const int step = first + i;
        const u32 stage = step % STAGES;
        wait_stage(full, step);
        // lane 0's value for all lanes, so that the compiler knows it to be the same: descriptors are uniform
        const u32 weight = __shfl_sync(0xffffffff, ring + stage * STAGE_BYTES, 0);
        const u64 b = matrix(weight + WEIGHT_BYTES);
        Scales next;
#pragma unroll
        for (int part = 0; part < parts.value; ++part) {
            const int half = part % 2;   // of 128 in_features
            if (half == 0 && SUMMED != 32) wait_mma<UNDER_WAY>();   // the MMAs that read a[0] have ended
            if (!POWERS || half == 0) next.read(places.scales_of(ring, stage), part);
            read_numbers(a[half], weight + places.codes, part, next);
            const bool adds = SUMMED ? SUMMED == 128 && half == 1 : i + part > 0;   // to the sums of the previous part
            if (SUMMED && SUMMED != 32 && !adds) {   // finish the previous group
                wait_mma<0>();
                now_written<TOKENS / 2>(sums);
                scales[SUMMED == 64 ? 1 - half : 0].add_scaled(c, sums, 0);
                if (part == 0 && i > 0) release(step - 1);
            }
            scales[half] = next;
            begin_mma();
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                multiply(sums, a[half][k], b + part * (TOKEN_BYTES >> 4) + 2 * k, SUMMED == 32 ? k % 2 : k > 0 || adds);
                if (SUMMED == 32 && k % 2) {
                    end_mma();
                    wait_mma<0>();
                    now_written<TOKENS / 2>(sums);
                    next.add_scaled(c, sums, k / 2);
                    if (k == 1) begin_mma();
                }
            }
            if (SUMMED != 32) end_mma();
            if (SUMMED == 0 && half == 0) {
                wait_mma<UNDER_WAY>();   // a[1] is free, and so is the previous stage
                if (part == 0 && i > 0) release(step - 1);
            }
        }
        if (SUMMED == 32) release(step);
    };
#pragma unroll 1
    for (int i = 0; i < count - (OF_LAST < PARTS); ++i) multiply_parts(i, Number<PARTS>());
    if (OF_LAST < PARTS) {   // each part waits for the one before: otherwise the compiler would let each MMA wait
        wait_mma<0>();
        now_written<TOKENS / 2>(sums);
        multiply_parts(count - 1, Number<OF_LAST>());
    }
    if (SUMMED == 32) return;
    wait_mma<0>();
    now_written<TOKENS / 2>(sums);
    if (SUMMED) scales[SUMMED == 64 ? (OF_LAST - 1) % 2 : 0].add_scaled(c, sums, 0);
    release(first + count - 1);
}
#endif
#endif
