// Part of `decode_attention.cu`: how keys and values come from their pages to a warp's ring in shared memory. Knows
// nothing of queries.

#pragma once

#include "copies.cuh"
#include "decode_runs.cuh"
#include "decode_tile.cuh"

// The kernel before this one, which may still run.
struct Predecessor {
    bool has_ended = false;

    __device__ __forceinline__ void wait() {
        if (!has_ended) wait_previous();
        has_ended = true;
    }
};

// Loading is STAGES tiles ahead, and already knows the pages of the tile after those.
struct Ring {
    int lane;
    u32 at;
    Cursor ahead;
    int2 pages;   // of the next tile's first and last part

    __device__ __forceinline__ Ring(const Arguments& args, const u8* rings, const Cursor& first, int4 start)
        : lane(threadIdx.x % 32), at(shared_address(rings) + first.warp * STAGES * STAGE_BYTES), ahead(first) {
        ahead.seek(args);
        pages = make_int2(start.z, start.w);
        if (SPLIT && ahead.tile < ahead.end) pages = ahead.pages_of_tile(args);
    }

    // keys, then values
    __device__ __forceinline__ u32 stage(int number) const { return at + number * STAGE_BYTES; }

    // Starts to load the next tile, if there is one. Counts as a group of copies even if there is none.
    __device__ __forceinline__ void load_next(const Arguments& args, int number, Predecessor& predecessor) {
        if (ahead.tile < ahead.end) {
            const int position = ahead.position(args);
            const int length = ahead.span.length;
            if (position + TILE + WRITTEN > length) predecessor.wait();
            copy_tile(args, number, position, length);
            ++ahead.tile;
            ahead.seek(args);
            if (ahead.tile < ahead.end) pages = ahead.pages_of_tile(args);
        }
        commit_copies();
    }

    __device__ __forceinline__ void copy_tile(const Arguments& args, int number, int position, int length) const {
        const int first = first_seen(length, args.window);
        const int kv_head = ahead.kv_head();
        const u32 keys = stage(number), values = keys + TILE_BYTES;
        const auto place = [&](int n) {   // where position n of the tile is
            return (n < PART ? pages.x : pages.y) * args.page_stride
                + (position + n) % PAGE_SIZE * (u64)args.slot_stride + kv_head * args.head_stride;
        };
#pragma unroll
        for (int i = 0; i < PARTS * CHUNKS / 2; ++i) {
            const int n = (i * 32 + lane) / CHUNKS, chunk = (i * 32 + lane) % CHUNKS;
            const u64 from = place(n) + chunk * 16;
            // zeros in place of unseen positions, which may hold anything
            const bool seen = position + n >= first && position + n < length;
            copy_16_once(keys + chunk_at(n, chunk), args.keys + from, seen);
            copy_16_once(values + chunk_at(n, chunk), args.values + from, seen);
        }
    }
};
