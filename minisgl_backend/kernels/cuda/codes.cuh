// Numbers of codes, as they lie in a `PackedWeight` (`kernels.packed_weight`): made exactly, two at a time, as
// bfloat16. Includers know where words of codes and of scales are.
//
// Before it are defined: CODE (0: the weight is bfloat16; else its codes are 1: e4m3, 2: 8-bit or 3: 4-bit integers, 4:
// e2m1), and with that ZEROS (the low 8 bits of a scale are a zero point; else it is the middle of the integers).

#pragma once

#include "hopper.cuh"

constexpr int BITS = CODE == 0 ? 16 : CODE <= 2 ? 8 : 4;    // of a number of the weight

__device__ __forceinline__ u32 times(u32 x, u32 y) {   // of two bfloat16 each
    u32 out;
    asm("mul.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(x), "r"(y));
    return out;
}

// The lower or the upper half in both: no instruction of its own, but part of the multiplication. (PRMT would be one.)
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

// Two numbers of a word of codes, as bfloat16, larger by 128 (integers of 4 bits) than those without a zero point, or
// (of 8 bits) smaller by 128 than their codes. Of 8 bits pair 0 is in bytes 1 and 3, pair 1 in bytes 0 and 2; of
// integers of 4 bits a pair is in the same quarter of both halves.
__device__ __forceinline__ u32 raw_numbers(u32 codes, int pair) {
    if (CODE == 1) {   // exponent and mantissa move to the end of bfloat16's exponent: 2^120 too small
        const u32 at = pair ? codes << 8 : codes;
        return times(masked_or(at, 0x80008000, at >> 4 & 0x07f007f0), 0x7b807b80);
    }
    if (CODE == 2) {   // 128 + the low 7 bits, less 256, or 128 if the upper bit is set: code - 128
        const u32 at = pair ? codes : codes >> 8;
        return minus(masked_or(at, 0x007f007f, 0x43004300), masked_or(~at, 0x00800080, 0x43004300));
    }
    return masked_or(codes >> 4 * pair, 0x000f000f, 0x43004300);   // 128 + code
}

// The same less `by`; of e2m1 times `by`. The bits of e2m1 are spread over a half so that a shift and a mask put them
// where bfloat16 has its sign, the end of its exponent and the first bit of its mantissa. What the first three pairs
// leave makes the fourth, by xor with bits of theirs.
__device__ __forceinline__ u32 numbers(u32 codes, int pair, u32 by) {
    if (CODE == 4) {
        const u32 at = pair < 3 ? codes << 3 * pair : codes << 1 ^ codes >> 4 ^ codes >> 5;
        return times(at & 0x81c081c0, by);   // 2^126 too small
    }
    const u32 number = raw_numbers(codes, pair);
    return CODE == 3 || (CODE == 2 && ZEROS) ? minus(number, by) : number;
}

// What `numbers` subtracts, from the word of a scale.
__device__ __forceinline__ u32 zero_of(u32 word) {
    const u32 zero = 0x43004300 | (word & 0x7f) * 0x10001;   // 128 + 7 bits
    if (CODE == 3) return ZEROS ? zero : 0x43084308;
    return minus(zero, (~word & 0x80) * 0x10001 | 0x43004300);
}

__device__ __forceinline__ float scale_of(u32 word) {
    return __int_as_float(ZEROS ? word & 0xffffff00 : word);
}
