// Where queries, keys and values go: each head is normalized and rotated, and keys and values are stored in the KV
// cache.

#pragma once

#include "hopper.cuh"

struct Heads {
    const int* positions;   // [num_rows]
    const int* slots;       // [num_rows], page * PAGE_SIZE + offset; negative: not stored
    const float* cos_sin;   // [positions, head_dim]: cosines, then sines
    const u16* q_weight;    // [head_dim], or null: no norm
    const u16* k_weight;
    u8* keys;               // [num_pages, PAGE_SIZE, num_kv_heads, head_dim], strides in bytes
    u8* values;
    const float* k_scale;   // [1], if FP8
    const float* v_scale;
    u64 page_stride;
    u32 slot_stride;
    u32 head_stride;
    int num_heads;
    int num_kv_heads;
};
