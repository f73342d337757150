// One token by 16 rows of a weight on the tensor cores: what `gemv.cu` and `expert_gemv.cu` share.
//
// An MMA multiplies 16 rows by 8 columns, but there is one token. So columns are neighbouring groups of SUM
// in_features: each lane's operand is what it has of its own column of x, and of what a unit yields just the columns
// of its groups are kept. A lane reads its numbers of x once a batch, the scales of a group are applied where its sums
// are, and MMAs by ones yield the sums of x of all groups, by which zero points are multiplied.
//
// Before it are defined: SIZE (in_features), COLUMNS (of a batch); and as in `linear.cu`: CODE, GROUP, SHARED_BY and
// ZEROS of the weight.

#pragma once

#include "codes.cuh"

constexpr int ROWS = 16;
constexpr int UNIT = 512 / BITS;                    // in_features of a unit: 64 bytes of a row
constexpr int SUM = GROUP ? GROUP : 128;            // in_features of a column
constexpr int BATCH = COLUMNS * SUM;
constexpr int BATCHES = (SIZE + BATCH - 1) / BATCH;
constexpr int UNITS = BATCH / UNIT;                 // of a batch
constexpr bool WHOLE = SIZE % BATCH == 0;           // so are all batches
constexpr int OF_COLUMN = SUM < UNIT ? 1 : SUM / UNIT;      // units that have a column's in_features
constexpr int OF_UNIT = SUM < UNIT ? UNIT / SUM : 1;        // columns that have a unit's
constexpr int PAIRS = 16 / BITS;                    // of numbers, in a word of codes
constexpr u64 ROW_BYTES = (u64)SIZE * BITS / 8;
constexpr float OF_SUMS = CODE == 4 ? 0x1p64f : 1;  // by which sums are too small, as in `tile_gemm.cuh`

static_assert(ROW_BYTES % 16 == 0 && COLUMNS <= 8 && UNITS % OF_COLUMN == 0, "");
static_assert(CODE != 4 || GROUP == 128, "");

// ---- loads

__device__ __forceinline__ uint4 load_8(const u16* from) {
    uint4 out;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w) : "l"(from));
    return out;
}

__device__ __forceinline__ u32 word(const uint4& from, int i) {
    return i == 0 ? from.x : i == 1 ? from.y : i == 2 ? from.z : from.w;
}

// ---- copies to shared memory, which take no registers meanwhile

template <int BYTES, typename T>
__device__ __forceinline__ void copy(T* to, const T* from) {
    if (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(shared_address(to)), "l"(from) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
                     :: "r"(shared_address(to)), "l"(from), "n"(BYTES) : "memory");
}

// by the warp that asked for them
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
}

// ---- MMAs

__device__ __forceinline__ void multiply(float (&c)[4], u32 a, u32 a_8, u32 a_next, u32 a_8_next, u32 b, u32 b_next) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : C4(0) : "r"(a), "r"(a_8), "r"(a_next), "r"(a_8_next), "r"(b), "r"(b_next));
}

// What a lane has of x in a batch: of its column the in_features that its codes of each unit are for.
struct Column {
    u32 words[OF_COLUMN][4 * PAIRS];

    __device__ __forceinline__ void read(const u16* x, int batch) {
        const int column = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
        const bool is_mine = column < COLUMNS && (OF_UNIT == 1 || quarter / (4 / OF_UNIT) == column % OF_UNIT);
#pragma unroll
        for (int unit = 0; unit < OF_COLUMN; ++unit) {
            const int at = (batch * UNITS + column / OF_UNIT * OF_COLUMN + unit) * UNIT + quarter * (UNIT / 4);
            const bool there = is_mine && (WHOLE || at < SIZE);
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                const uint4 part = there ? load_8(x + at + 8 * i) : make_uint4(0, 0, 0, 0);
#pragma unroll
                for (int j = 0; j < 4; ++j) words[unit][4 * i + j] = word(part, j);
            }
        }
    }

    // the sums of x of the columns 2 * quarter and 2 * quarter + 1
    __device__ __forceinline__ void add_up(float (&sums)[2]) const {
        constexpr u32 ONES = 0x3f803f80;
        float c[4] = {};
#pragma unroll
        for (int unit = 0; unit < OF_COLUMN; ++unit)
#pragma unroll
            for (int i = 0; i < 4 * PAIRS; i += 2)
                multiply(c, ONES, ONES, ONES, ONES, words[unit][i], words[unit][i + 1]);
        sums[0] = c[0], sums[1] = c[1];
    }
};

// c += a unit of codes times all columns. Word w of a lane's codes has pairs of numbers for words w, 4 + w, ... of x.
__device__ __forceinline__ void multiply_unit(
    float (&c)[4], const uint4 (&codes)[2], const u32 (&x)[4 * PAIRS], const u32 (&by)[2]) {
    const auto number = [&](int row, int i, int pair) {
        const u32 from = word(codes[row], i);
        return CODE == 0 ? from : CODE == 4 ? numbers(from, pair, by[row]) : raw_numbers(from, pair);
    };
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair)
#pragma unroll
        for (int i = 0; i < 4; i += 2)   // x of neighbouring words is in neighbouring registers
            multiply(c, number(0, i, pair), number(1, i, pair), number(0, i + 1, pair), number(1, i + 1, pair),
                     x[4 * pair + i], x[4 * pair + i + 1]);
}

// over the lanes of the same rows
__device__ __forceinline__ void add_lanes(float (&sums)[2]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        sums[row] += __shfl_xor_sync(ALL, sums[row], 1);
        sums[row] += __shfl_xor_sync(ALL, sums[row], 2);
    }
}
