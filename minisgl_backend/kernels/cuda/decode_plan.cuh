// Part of `decode_attention.cu`, which says what runs are for: the kernel that plans the runs.

#pragma once

#include "decode_runs.cuh"

struct PlanArguments {      // as in `Arguments`, unless noted
    int4* runs;             // [1 + 2 * max_runs], to be written
    const int* table;
    const int* lengths;
    const int* rows;
    const int2* starts;
    int table_stride;
    int batch;
    int max_runs;           // thread blocks of the kernel that is planned
    int window;
};

// The sum over the lanes up to this one.
__device__ __forceinline__ int running_sum(int x) {
    const int lane = threadIdx.x % 32;
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        const int other = __shfl_up_sync(ALL, x, lanes);
        if (lane >= lanes) x += other;
    }
    return x;
}

// The first query whose end, `times` * ends[query], is after `unit`. There must be one.
__device__ __forceinline__ int query_of(const int* ends, int batch, u32 times, u32 unit) {
    int low = 0, high = batch - 1;
    while (low < high) {
        const int middle = (low + high) / 2;
        if ((u32)ends[middle] * times > unit) high = middle;
        else low = middle + 1;
    }
    return low;
}

// A row of T tiles in runs of L tiles takes the time of L tiles plus that of merging T / L pieces, SIDES of which take
// about as long as a tile. So it is done soonest with L = sqrt(T / SIDES).
__device__ __forceinline__ int least_of_run(int longest) { return max(LEAST, (int)sqrtf((float)longest / SIDES)); }

// Cuts few rows by turns: no run has tiles of two turns, and a short turn is one run. One warp finds the smallest limit
// on the tiles of a run, `most`, for which there are enough thread blocks. Returns the number of runs, and writes the
// number of runs up to the end of each query to `run_ends` [batch]. Returns 0 if equal runs across turns would be
// shorter by a fifth.
__device__ int cut_by_turns(int* run_ends, const int* ends, const PlanArguments& args, int longest) {
    const int lane = threadIdx.x % 32;
    const auto runs_of_turn = [&](int query, int most) {
        const int tiles = ends[query] - (query ? ends[query - 1] : 0) - LEAVING;
        return (tiles + most - 1) / most;
    };
    const auto num_runs = [&](int most) {
        int sum = 0;
        for (int query = lane; query < args.batch; query += 32) sum += runs_of_turn(query, most);
        return __reduce_add_sync(ALL, sum) * TURNS;
    };
    const int least = least_of_run(longest), equal = ends[args.batch - 1] * TURNS / args.max_runs;
    int most = least, high = max(longest, least);
    while (most < high) {
        const int middle = (most + high) / 2;
        if (num_runs(middle) <= args.max_runs) high = middle;
        else most = middle + 1;
    }
    if (num_runs(most) > args.max_runs || most > max(least, equal + equal / 4)) return 0;
    int before = 0;
    for (int first = 0; first < args.batch; first += 32) {
        const int query = first + lane;
        const int end = before + running_sum(query < args.batch ? runs_of_turn(query, most) * TURNS : 0);
        if (query < args.batch) run_ends[query] = end;
        before = __shfl_sync(ALL, end, 31);
    }
    return before;
}

// A query takes TURNS turns. Each turn costs its tiles plus LEAVING, which comes before them. runs[0] = {total cost,
// number of runs, -, -}. Thread block i takes the i-th run from the end: runs[1 + 2i] = {query, turn, offset, tiles},
// with `offset` the cost since the beginning of the turn, and runs[2 + 2i] = {the query's length, its row, the pages of
// the first tile's first and last part}. The latter spares a run two loads that its first loads would wait for. If
// SPLIT, the warps begin with different tiles, and it is {.., .., the number of later runs with tiles of the last turn,
// -}.
extern "C" __global__ void __launch_bounds__(1024) plan_decode_attention(const PlanArguments args) {
    extern __shared__ int ends[];   // [batch]: cost of one turn of all queries up to each; if SPLIT, then `run_ends`
    __shared__ int scan[32], longest_of_warps[32];   // in tiles
    __shared__ int runs_by_turns;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    allow_next();
    wait_previous();

    const int each = (args.batch + blockDim.x - 1) / blockDim.x;
    const int from = min((int)threadIdx.x * each, args.batch), to = min(from + each, args.batch);
    int sum = 0, longest = 0;
    for (int i = from; i < to; ++i) {
        const int tiles = span_of(args.lengths, args.starts, i).num_tiles(args.window);
        longest = max(longest, tiles);
        sum += tiles + LEAVING;
        ends[i] = sum;
    }
    longest = __reduce_max_sync(ALL, longest);
    if (lane == 0) longest_of_warps[warp] = longest;
    int before = running_sum(sum);
    if (lane == 31) scan[warp] = before;
    before -= sum;
    __syncthreads();
    for (int w = 0; w < warp; ++w) before += scan[w];
    for (int i = from; i < to; ++i) ends[i] += before;
    for (int w = 0; w < (int)blockDim.x / 32; ++w) longest = max(longest, longest_of_warps[w]);
    __syncthreads();

    if (SPLIT) {
        int* const run_ends = ends + args.batch;
        if (warp == 0) {
            const int sum = cut_by_turns(run_ends, ends, args, longest);
            if (lane == 0) runs_by_turns = sum;
        }
        __syncthreads();
        const int num_runs = runs_by_turns;
        if (num_runs && threadIdx.x == 0) args.runs[0] = make_int4(0, num_runs, 0, 0);
        for (int index = threadIdx.x; index < num_runs; index += blockDim.x) {
            const int run = num_runs - 1 - index;
            const int query = query_of(run_ends, args.batch, 1, run);
            const int start = query ? run_ends[query - 1] : 0, of_turn = (run_ends[query] - start) / TURNS;
            const int tiles = ends[query] - (query ? ends[query - 1] : 0) - LEAVING;
            const int turn = (run - start) / of_turn, part = (run - start) % of_turn;
            const int first = tiles * part / of_turn, end = tiles * (part + 1) / of_turn;
            int4* out = args.runs + 1 + 2 * index;
            out[0] = make_int4(query, turn, part ? first + LEAVING : 0, end - first);
            out[1] = make_int4(span_of(args.lengths, args.starts, query).length,
                               args.rows ? args.rows[query] : query, of_turn - 1 - part, 0);
        }
        if (num_runs) return;
    }
    const u32 cost = (u32)ends[args.batch - 1] * TURNS;
    const u32 num_runs = min((u32)args.max_runs, max(cost / least_of_run(longest), 1u));
    const Shares shares(cost, num_runs);
    if (threadIdx.x == 0) args.runs[0] = make_int4(cost, num_runs, 0, 0);
    struct Place { int query, turn, offset; u32 index, end; };   // `index`: tiles before it; `end`: of the turn
    const auto seek = [&](u32 unit) {
        if (unit == cost) return Place{0, 0, 0, cost - (u32)LEAVING * args.batch * TURNS, cost};
        const int low = query_of(ends, args.batch, TURNS, unit);
        const u32 start = low ? ends[low - 1] : 0, of_turn = ends[low] - start;
        const u32 inside = unit - start * TURNS;
        const u32 turn = inside / of_turn, offset = inside % of_turn;
        const u32 index = start * TURNS + turn * of_turn - LEAVING * (low * TURNS + turn)
            + max((int)offset - LEAVING, 0);
        return Place{low, (int)turn, (int)offset, index, unit - offset + of_turn};
    };
    for (u32 run = threadIdx.x; run < num_runs; run += blockDim.x) {
        const Place at = seek(shares.begin(run));
        const u32 end = seek(shares.begin(run + 1)).index;
        const Span span = span_of(args.lengths, args.starts, at.query);
        const int length = span.length;
        const int row = args.rows ? args.rows[at.query] : at.query;
        const int position = span.position(args.window, max(at.offset - LEAVING, 0));
        const int* pages = args.table + (u64)row * args.table_stride;
        int4* out = args.runs + 1 + 2 * (num_runs - 1 - run);
        out[0] = make_int4(at.query, at.turn, at.offset, end - at.index);
        if (SPLIT)
            out[1] = make_int4(length, row, shares.owner(seek(shares.begin(run + 1) - 1).end - 1) - run, 0);
        else
            out[1] = make_int4(length, row, pages[position / PAGE_SIZE],
                               pages[last_part(position, length) / PAGE_SIZE]);
    }
}
