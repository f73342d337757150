// One token times 16 rows of a weight on the tensor cores: what `gemv.cu` and `expert_gemv.cu` share.
//
// An MMA multiplies 16 rows by 8 columns, but there is only one token. So the columns are neighbouring groups of SUM
// in_features: a lane's operand is its part of its own column of x, and of the result of a unit only the columns of the
// unit's own groups are kept. A lane reads its numbers of x once per batch. The scales of a group are applied where its
// sums are. MMAs with ones give each group's sum of x, by which its zero point is multiplied.
//
// The including source defines SIZE (in_features), COLUMNS (per batch), and, as in `linear.cu`, CODE, GROUP, SHARED_BY
// and ZEROS of the weight.

#pragma once

#include "codes.cuh"

constexpr int ROWS = 16;
constexpr int UNIT = 512 / BITS;                    // in_features per unit: 64 bytes of a row
constexpr int SUM = GROUP && CODE != 4 ? GROUP : 128;       // in_features per column
constexpr int GROUPS = GROUP ? SUM / GROUP : 0;     // of a column, each with a word of scales
constexpr int BATCH = COLUMNS * SUM;
constexpr int BATCHES = (SIZE + BATCH - 1) / BATCH;
constexpr int UNITS = BATCH / UNIT;                 // per batch
constexpr bool WHOLE = SIZE % BATCH == 0;           // all batches are full
constexpr int OF_COLUMN = SUM < UNIT ? 1 : SUM / UNIT;      // units that a column's in_features span
constexpr int OF_UNIT = SUM < UNIT ? UNIT / SUM : 1;        // columns that a unit's in_features span
constexpr int PAIRS = 16 / BITS;                    // pairs of numbers in a word of codes
constexpr u64 ROW_BYTES = (u64)SIZE * BITS / 8;
constexpr bool SUBTRACTS = CODE == 3 || (CODE == 2 && ZEROS);   // zero points times sums of x are subtracted

static_assert(ROW_BYTES % 16 == 0 && COLUMNS <= 8 && UNITS % OF_COLUMN == 0, "");

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

// ---- copies to shared memory, which hold no registers while under way

template <int BYTES, typename T>
__device__ __forceinline__ void copy(T* to, const T* from) {
    if (BYTES == 16)
        copy_16(shared_address(to), from);
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
                     :: "r"(shared_address(to)), "l"(from), "n"(BYTES) : "memory");
}

// called by the warp that started them
__device__ __forceinline__ void wait_for_copies() {
    wait_copies();
    __syncwarp();
}

// ---- MMAs

// A lane's part of x in a batch: the in_features of its column that match its codes in each unit.
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
                add_product(c, ONES, ONES, ONES, ONES, words[unit][i], words[unit][i + 1]);
        sums[0] = c[0], sums[1] = c[1];
    }
};

// c += a unit of codes times all columns. Word w of a lane's codes has the pairs of numbers for words w, 4 + w, ... of
// x. `by`: scales of e2m1, of each row and, if they are FLOATS, of both halves of the lane's 32 in_features.
__device__ __forceinline__ void multiply_unit(
    float (&c)[4], const uint4 (&codes)[2], const u32 (&x)[4 * PAIRS], const u32 (&by)[2][2]) {
    const auto number = [&](int row, int i, int pair) {
        const u32 from = word(codes[row], i);
        return CODE == 0 ? from : CODE == 4 ? numbers(from, pair, by[row][FLOATS ? pair / 2 : 0]) : raw_numbers(from, pair);
    };
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair)
#pragma unroll
        for (int i = 0; i < 4; i += 2)   // x of neighbouring words is in neighbouring registers
            add_product(c, number(0, i, pair), number(1, i, pair), number(0, i + 1, pair), number(1, i + 1, pair),
                     x[4 * pair + i], x[4 * pair + i + 1]);
}

// Reads the scales of e2m1 that `multiply_unit` takes for one row and this lane's quarter of 128 in_features. `word_of`:
// the word of a group.
template <typename WordOf>
__device__ __forceinline__ void read_scales(u32 (&by)[2], WordOf word_of) {
    const int quarter = threadIdx.x % 4;
    if (POWERS) {
        by[0] = __byte_perm(word_of(0), 0, 0x4040 + quarter * 0x101) << 7;
    } else if (FLOATS) {   // bytes 0 and 1 of a word, or 2 and 3
        const u32 both = word_of(quarter / 2) >> quarter % 2 * 16;
#pragma unroll
        for (int i = 0; i < 2; ++i) by[i] = (both >> 8 * i & 0xff) * 0x100010 | 0x60006000;
    }
}

// what is subtracted for each number of x, taken from the word of a scale
__device__ __forceinline__ float zero_point(u32 word) {
    if (CODE == 2) return (float)(int)(word & 0xff) - 128;
    return __int_as_float(0x43000000 | (ZEROS ? word & 0x7f : 8) << 16);   // 128 + the zero point
}

// over the lanes that have the same rows
__device__ __forceinline__ void add_lanes(float (&sums)[2]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        sums[row] += __shfl_xor_sync(ALL, sums[row], 1);
        sums[row] += __shfl_xor_sync(ALL, sums[row], 2);
    }
}
