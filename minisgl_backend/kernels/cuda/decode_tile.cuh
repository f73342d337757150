// Part of `decode_attention.cu`: where the numbers of a tile are, in shared memory and in the fragments of MMAs.

#pragma once

// 16-byte chunks are spread so that neither copies nor fragments cause bank conflicts
__device__ __forceinline__ u32 chunk_at(int position, int chunk) {
    const int spread = CHUNKS >= 8 ? position & 7 : (position >> 1) & 3;
    return position * ROW_BYTES + ((chunk ^ spread) << 4);
}

// the dimension of the head that is row `row` (0 to 15) of fragment `step` of V^T
__device__ __forceinline__ int dimension(int step, int row) {
    if (FP8) return row % 8 * (HEAD_DIM / 8) + 2 * step + row / 8;
    return 16 * step + row;
}

// the dimension of the head that is number `i` of a lane with pair of columns `j` in fragment `step` of Q^T, for 16-bit
// fragments or for those made from float8
__device__ __forceinline__ int q_dimension(int step, int i, int j) {
    return FP8 ? j * (HEAD_DIM / 4) + 4 * step + i : 16 * step + 2 * j + i / 2 * 8 + i % 2;
}
