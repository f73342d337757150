// Converts the codes of a `PackedWeight` (`kernels.packed_weight`) to bfloat16, exactly and two at a time. The source
// that includes this knows where the words of codes and scales are.
//
// The including source defines CODE (0: the weight is bfloat16; otherwise its codes are 1: e4m3, 2: 8-bit integers,
// 3: 4-bit integers, 4: e2m1), GROUP (in_features that share a scale; 0: all) and, unless CODE is 0, ZEROS (the low 8
// bits of a scale are a zero point; otherwise the zero point is the middle of the integer range).
//
// The scales of e2m1 multiply its numbers, also exactly. A word has those of 4 groups. If GROUP is 128, they are powers
// of 2, of 32 in_features each (MXFP4): 8 bits of exponent, as bfloat16 has them. If GROUP is 64, they are of 16
// in_features each (NVFP4): 5 bits of exponent and 3 of mantissa; then rows have scales, too.

#pragma once

#include "hopper.cuh"

constexpr int BITS = CODE == 0 ? 16 : CODE <= 2 ? 8 : 4;    // per number of the weight
constexpr bool POWERS = CODE == 4 && GROUP == 128, FLOATS = CODE == 4 && GROUP == 64;   // the scales of e2m1
constexpr bool OF_ROWS = CODE && (GROUP == 0 || FLOATS);    // the sums of rows are scaled
// The factor by which sums are too small: e2m1's numbers are by 2^126, POWERS are too large by 2^62. (FLOATS are by
// 2^74, which the scales of rows take into account.)
constexpr float OF_SUMS = POWERS ? 0x1p64f : 1;

static_assert(CODE != 4 || POWERS || FLOATS, "");

__device__ __forceinline__ u32 times(u32 x, u32 y) {   // both operands are pairs of bfloat16
    u32 out;
    asm("mul.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(x), "r"(y));
    return out;
}

// Copies the lower or upper half into both halves. This costs no instruction: it becomes part of the multiplication.
// (PRMT would cost one.)
__device__ __forceinline__ u32 twice(u32 x, bool upper) {
    u32 out;
    if (upper) asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high}; }" : "=r"(out) : "r"(x));
    else asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low}; }" : "=r"(out) : "r"(x));
    return out;
}

__device__ __forceinline__ u32 minus(u32 x, u32 y) {
    u32 out;
    asm("sub.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(x), "r"(y));
    return out;
}

__device__ __forceinline__ u32 masked_or(u32 x, u32 mask, u32 y) {   // in one instruction
    u32 out;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(x), "r"(mask), "r"(y));
    return out;
}

// Two numbers from a word of codes, as bfloat16. A 4-bit integer comes out as its code plus 128, an 8-bit integer as
// its code minus 128. With 8 bits, pair 0 is in bytes 1 and 3 and pair 1 in bytes 0 and 2. With 4-bit integers, a pair
// takes the same quarter of both halves.
__device__ __forceinline__ u32 raw_numbers(u32 codes, int pair) {
    if (CODE == 1) {   // the exponent goes to the low end of bfloat16's, the mantissa follows: 2^120 too small
        const u32 at = pair ? codes << 8 : codes;
        return times(masked_or(at, 0x80008000, at >> 4 & 0x07f007f0), 0x7b807b80);
    }
    if (CODE == 2) {   // 128 + the low 7 bits, minus 256, or minus 128 if the top bit is set: code - 128
        const u32 at = pair ? codes : codes >> 8;
        return minus(masked_or(at, 0x007f007f, 0x43004300), masked_or(~at, 0x00800080, 0x43004300));
    }
    return masked_or(codes >> 4 * pair, 0x000f000f, 0x43004300);   // 128 + code
}

// The same minus `by`, or for e2m1 times `by`. The bits of an e2m1 number are spread over a half word so that shifts
// and a mask put them where bfloat16 has its sign, the low end of its exponent and the first bit of its mantissa. For
// two pairs a second shift brings the sign, and with it bits of other numbers, which `kernels.packed_weight` has taken
// into account.
__device__ __forceinline__ u32 numbers(u32 codes, int pair, u32 by) {
    if (CODE == 4) {
        const u32 at = pair == 0 ? codes : pair == 1 ? codes << 3 ^ codes << 4 : pair == 2 ? codes << 6
            : codes << 5 ^ codes >> 6;
        return times(at & 0x81c081c0, by);   // 2^126 too small
    }
    const u32 number = raw_numbers(codes, pair);
    return CODE == 3 || (CODE == 2 && ZEROS) ? minus(number, by) : number;
}

// What `numbers` multiplies a pair of e2m1 by, twice the same bfloat16. `word`: of scales; `which` of its four.
__device__ __forceinline__ u32 scale_of_group(u32 word, int which) {
    const bool odd = which % 2;
    const u32 both = POWERS ? (odd ? word >> 1 : word << 7) & 0x7f807f80   // each half has one of two groups
        : masked_or(odd ? word >> 4 : word << 4, 0x0ff00ff0, 0x60006000);
    return twice(both, which / 2);
}

// What `numbers` subtracts, taken from the word of a scale.
__device__ __forceinline__ u32 zero_of(u32 word) {
    const u32 zero = 0x43004300 | (word & 0x7f) * 0x10001;   // 128 + 7 bits
    if (CODE == 3) return ZEROS ? zero : 0x43084308;
    return minus(zero, (~word & 0x80) * 0x10001 | 0x43004300);
}

__device__ __forceinline__ float scale_of(u32 word) {
    return __int_as_float(ZEROS ? word & 0xffffff00 : word);
}
