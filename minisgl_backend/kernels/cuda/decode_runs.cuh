// Part of `decode_attention.cu`, which says what runs are for: which tiles a row has, how runs share them, and where a
// warp is in its run. Knows neither keys nor values. `decode_plan.cuh` computes the runs.

#pragma once

__device__ __forceinline__ int first_seen(int length, int window) {
    return window ? max(length - window, 0) : 0;
}

// Where a query's tiles begin: at the start of its window, rounded down to a tile, or after the shared positions, which
// end at the end of a page.
struct Span {
    int length, start;   // `start` is 0 unless SHARED

    __device__ int position(int window, int tile) const {
        const int seen = first_seen(length, window) & ~(TILE - 1);
        return (SHARED ? max(seen, start) : seen) + tile * TILE;
    }
    __device__ int num_tiles(int window) const {
        return (length - position(window, 0) + TILE - 1) / TILE;
    }
};

__device__ __forceinline__ Span span_of(const int* lengths, const int2* starts, int query) {
    return Span{lengths[query], SHARED ? starts[query].x : 0};
}

// a position in the tile's last part that is not empty
__device__ __forceinline__ int last_part(int position, int length) {
    return min(position + TILE, length) - 1;
}

// How `cost` units are shared among `num_runs` runs.
struct Shares {
    u32 each, more;     // the first `more` runs take one more unit

    __device__ Shares(u32 cost, u32 num_runs) : each(cost / num_runs), more(cost % num_runs) {}
    __device__ u32 begin(u32 run) const { return run * each + min(run, more); }
    __device__ u32 owner(u32 unit) const {
        const u32 edge = more * (each + 1);
        return unit < edge ? unit / (each + 1) : more + (unit - edge) / each;
    }
};

// A thread block's run among all runs.
struct Run {
    u32 number;
    Shares shares;
    u32 turn_begin;   // of the current turn, in cost
    int later;        // if SPLIT, the later runs with tiles of the last turn

    // `all`, `own` and `start` are the runs' first entry and the run's own, see `plan_decode_attention`
    __device__ Run(int4 all, int4 own, int4 start)
        : number(all.y - 1 - blockIdx.x), shares(all.x, all.y), turn_begin(shares.begin(number) - own.z),
          later(start.z) {}

    // the number of later runs that have tiles of a turn whose first tiles this run has, but not all
    __device__ int num_later(int tiles) const {
        return SPLIT ? later : shares.owner(turn_begin + LEAVING + tiles - 1) - number;
    }
    __device__ void leave_turn(int tiles) { turn_begin += tiles + LEAVING; }
};

// Where a warp is in its run.
struct Cursor {
    int warp;          // of the thread block
    int query, turn;
    int first, stop;   // the run's tiles of this turn
    int tile, end;     // those of them that this warp still has to take
    int left;          // the run's tiles of later turns
    int tiles;         // of the query
    Span span;
    const int* pages;

    // `own` and `start` are the run's entry, see `plan_decode_attention`
    __device__ Cursor(const Arguments& args, int4 own, int4 start) {
        warp = threadIdx.x / 32;
        query = own.x;
        turn = own.y;
        left = own.w;
        span = Span{start.x, SHARED ? args.starts[own.x].x : 0};
        enter(args, start.y);
        share_out(max(own.z - LEAVING, 0));
    }

    __device__ void enter(const Arguments& args, int row) {
        tiles = span.num_tiles(args.window);
        pages = args.table + (u64)row * args.table_stride;
    }
    __device__ void share_out(int from) {
        first = from;
        const int count = min(tiles - first, left);
        stop = first + count;
        left -= count;
        tile = first + count * way() / WAYS;
        end = first + count * (way() + 1) / WAYS;
    }
    // there must be a next turn
    __device__ void enter_next(const Arguments& args) {
        if (++turn == TURNS) {
            turn = 0;
            ++query;
            span = span_of(args.lengths, args.starts, query);
            enter(args, args.rows ? args.rows[query] : query);
        }
        share_out(0);
    }
    // moves to a turn that has a tile left, if there is one
    __device__ void seek(const Arguments& args) {
        while (tile == end && left > 0) enter_next(args);
    }
    // of the WAYS that share the run's tiles of a row
    __device__ int way() const { return SPLIT ? warp : 0; }
    __device__ int kv_head() const { return SPLIT ? turn : turn * WARPS + warp; }
    __device__ int position(const Arguments& args) const { return span.position(args.window, tile); }
    // the pages of the tile's first and last part
    __device__ int2 pages_of_tile(const Arguments& args) const {
        const int at = position(args), page = pages[at / PAGE_SIZE];
        return make_int2(page, PARTS == 1 ? page : pages[last_part(at, span.length) / PAGE_SIZE]);
    }
};
