// Part of `decode_attention.cu`: how a turn ends. What a warp has attended is left as a piece; or it is merged with the
// pieces of other runs, the partial results of shared positions and what other warps have, and written to the output.
// Knows neither keys nor values.

#pragma once

#include "decode_heads.cuh"
#include "decode_runs.cuh"
#include "empty_words.cuh"

// ---- pieces of runs

// where a lane's quad is in the piece of a thread block, or of its warp there
__device__ __forceinline__ float4* quad_of(
    const Arguments& args, const Cursor& at, const QueryHeads& heads, u32 block, int quad, int column) {
    const u64 piece = SPLIT ? block : block * WARPS + at.warp;
    return args.pieces + ((piece * QUADS + quad) * COLUMNS + column) * 8 + heads.g;
}

__device__ __forceinline__ void leave_piece(
    const Arguments& args, const Cursor& at, const QueryHeads& heads, bool counts) {
    if (heads.j >= COLUMNS || !counts) return;
    const auto leave = [&](int quad, float a, float b, float c, float d) {
        store_quad(quad_of(args, at, heads, blockIdx.x, quad, heads.j),
                   make_float4(written(a), written(b), written(c), written(d)));
    };
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
        leave(step, heads.o[step][0], heads.o[step][1], heads.o[step][2], heads.o[step][3]);
    leave(STEPS, heads.best[0], heads.best[1], heads.total[0], heads.total[1]);
}

__device__ __forceinline__ bool are_there(const float4 (&quads)[QUADS]) {
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
        const float4 quad = quads[i];
        most = max(most, max(max(__float_as_uint(quad.x), __float_as_uint(quad.y)),
                             max(__float_as_uint(quad.z), __float_as_uint(quad.w))));
    }
    return most != EMPTY;
}

// Merges in the pieces of the next runs. Lanes whose columns hold no heads help: each of the SIDES sides takes every
// SIDES-th piece and, if SPLIT, each warp every WARPS-th of those. What does not count is a rehearsal, with one piece,
// which may not be there.
__device__ __forceinline__ void take_pieces(
    const Arguments& args, const Cursor& at, QueryHeads& heads, int side, int column, int num_pieces, bool counts) {
    const float empty = __uint_as_float(EMPTY);
#pragma unroll 1
    for (int n = at.way() * SIDES + side; n < num_pieces; n += WAYS * SIDES) {
        const u32 block = blockIdx.x - 1 - n;
        float4 quads[QUADS];
        do {
#pragma unroll
            for (int i = 0; i < QUADS; ++i) quads[i] = load_quad(quad_of(args, at, heads, block, i, column));
        } while (counts && !are_there(quads));
        if (counts) {
#pragma unroll
            for (int i = 0; i < QUADS; ++i)
                store_quad(quad_of(args, at, heads, block, i, column), make_float4(empty, empty, empty, empty));
        }
        heads.merge(quads);
        if (!counts) break;
    }
}

// ---- partial results of shared positions

// A partial result of `kernels.shared_attention` for the heads of `column`, in the form of a piece.
__device__ __forceinline__ void load_partial(
    float4 (&quads)[QUADS], const Arguments& args, int partial, int kv_head, int column, int g) {
    const u64 heads = ((u64)partial * KV_HEADS + kv_head) * GROUP;
    float4 sums = make_float4(NOTHING, NOTHING, 0, 0);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) quads[step] = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (2 * column + h >= GROUP) continue;
        const u64 head = heads + 2 * column + h;
        const float* from = args.partials + head * HEAD_DIM;
        const float2 of_head = __ldcg(args.sums + head);
        (h ? sums.y : sums.x) = of_head.x;
        (h ? sums.w : sums.z) = of_head.y;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            (h ? quads[step].y : quads[step].x) = __ldcg(from + dimension(step, g));
            (h ? quads[step].w : quads[step].z) = __ldcg(from + dimension(step, g + 8));
        }
    }
    quads[STEPS] = sums;
}

// Merges in the partial results of the query's shared positions, also by sides.
__device__ __forceinline__ void take_partials(
    const Arguments& args, const Cursor& at, QueryHeads& heads, int side, int column, int num_partials) {
    const int* slots = args.slots + at.query * MOST_SLOTS;
#pragma unroll 1
    for (int n = side; n < num_partials; n += SIDES) {
        float4 quads[QUADS];
        load_partial(quads, args, slots[n], at.kv_head(), column, heads.g);
        heads.merge(quads);
    }
}

// ---- sides and warps

// Each side merges in what the others have.
__device__ __forceinline__ void merge_sides(QueryHeads& heads) {
#pragma unroll 1
    for (int away = COLUMNS; away < 4; away *= 2) {
        const auto other = [&](float x) { return __shfl_xor_sync(ALL, x, away); };
        float4 quads[QUADS];
#pragma unroll
        for (int i = 0; i < QUADS; ++i) {
            const float4 quad = heads.quad(i);
            quads[i] = make_float4(other(quad.x), other(quad.y), other(quad.z), other(quad.w));
        }
        heads.merge(quads);
    }
}

// If SPLIT, the first warp merges in what the others have.
__device__ __forceinline__ void merge_warps(QueryHeads& heads, u8* rings, int warp) {
    float4* const theirs = reinterpret_cast<float4*>(rings + WARPS * STAGES * STAGE_BYTES) + heads.lane;
    const auto place_of = [&](int other, int quad) { return theirs + ((other - 1) * QUADS + quad) * 32; };
    __syncthreads();   // the previous turn has been read
    if (warp > 0) {
#pragma unroll
        for (int i = 0; i < QUADS; ++i) *place_of(warp, i) = heads.quad(i);
    }
    __syncthreads();
    if (warp > 0) return;
#pragma unroll 1
    for (int other = 1; other < WARPS; ++other) {
        float4 quads[QUADS];
#pragma unroll
        for (int i = 0; i < QUADS; ++i) quads[i] = *place_of(other, i);
        heads.merge(quads);
    }
}

// ---- the end of a turn

// Writes a query's results. A rehearsal computes, but does not write.
__device__ __forceinline__ void write_out(
    const Arguments& args, const Cursor& at, const QueryHeads& heads, float v_scale, bool counts) {
    u16* out = args.out + (u64)(at.query * KV_HEADS + at.kv_head()) * GROUP * HEAD_DIM;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int head = 2 * heads.j + h;
        if (head >= GROUP) continue;
        float sum = heads.total[h];
        if (args.sinks) {
            const u16 sink = args.sinks[at.kv_head() * GROUP + head];
            sum += exp2_of(unpack(sink) * LOG2E - heads.best[h]);
        }
        const float factor = v_scale / sum;
        if (!counts) continue;
        u16* const of_head = out + head * HEAD_DIM;
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
            for (int half = 0; half < 2; ++half) {
                const float x = heads.o[step][h + 2 * half] * factor;
                of_head[dimension(step, heads.g + 8 * half)] = (u16)(BFLOAT16 ? pack(x, 0) : pack_float16(x, 0));
            }
    }
}

// The run with a turn's first tiles merges what there is of it, and all others leave pieces.
__device__ __forceinline__ void leave_turn(
    const Arguments& args, const Cursor& at, QueryHeads& heads, const Run& run, u8* rings, float v_scale, bool counts) {
    for (int h = 0; h < 2; ++h)
        heads.total[h] = over_positions(heads.total[h], [](float x, float y) { return x + y; });
    const bool is_first = at.first == 0;
    if (!SPLIT && !is_first) return leave_piece(args, at, heads, counts);
    const int num_pieces = is_first && at.stop < at.tiles ? run.num_later(at.tiles) : 0;
    const int num_partials = SHARED ? args.starts[at.query].y : 0;
    if (num_pieces + num_partials > 0) {
        const int j = threadIdx.x % 4;   // the compiler sees that it is below 4
        const int side = j / COLUMNS, column = j % COLUMNS;
        if (side > 0) heads.clear();
        take_pieces(args, at, heads, side, column, num_pieces, counts);
        if (SHARED) take_partials(args, at, heads, side, column, num_partials);
        if (max(num_pieces, num_partials) > 1) merge_sides(heads);   // otherwise side 0 has taken all
    }
    if (SPLIT) {
        merge_warps(heads, rings, at.warp);
        if (at.warp > 0) return;
        if (!is_first) return leave_piece(args, at, heads, counts);
    }
    write_out(args, at, heads, v_scale, counts);
}
