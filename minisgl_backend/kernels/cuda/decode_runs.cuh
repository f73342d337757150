// Which tiles of which rows a run of `decode_attention.cu` has, and the kernel that plans the runs. Part of that
// source, which says what runs are for.

#pragma once

struct PlanArguments {      // as in `Arguments`, where nothing else is said
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

__device__ __forceinline__ int first_seen(int length, int window) {
    return window ? max(length - window, 0) : 0;
}

// where a query's tiles are: from its window on, rounded down to a tile, or behind the shared positions,
// which end with a page
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
    u32 each, more;     // the first `more` runs take one unit more

    __device__ Shares(u32 cost, u32 num_runs) : each(cost / num_runs), more(cost % num_runs) {}
    __device__ u32 begin(u32 run) const { return run * each + min(run, more); }
    __device__ u32 owner(u32 unit) const {
        const u32 edge = more * (each + 1);
        return unit < edge ? unit / (each + 1) : more + (unit - edge) / each;
    }
};

// A query goes through TURNS turns, each of which costs its tiles and LEAVING before them. runs[0] =
// {cost of all, number of runs, -, -}. Thread block i takes the i-th run from the end: runs[1 + 2i] =
// {query, turn, offset, tiles}, where `offset` counts the cost from the turn's begin, and runs[2 + 2i] =
// {the query's length, its row, the pages of the first tile's first and last part}, which spares the
// run's first loads two others that it would wait for.
extern "C" __global__ void __launch_bounds__(1024) plan_decode_attention(const PlanArguments args) {
    extern __shared__ int ends[];   // [batch]: what a turn of the queries up to each costs
    __shared__ int scan[32], longest_of_warps[32];   // in tiles
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
    int before = sum;
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        const int other = __shfl_up_sync(ALL, before, lanes);
        if (lane >= lanes) before += other;
    }
    if (lane == 31) scan[warp] = before;
    before -= sum;
    __syncthreads();
    for (int w = 0; w < warp; ++w) before += scan[w];
    for (int i = from; i < to; ++i) ends[i] += before;
    for (int w = 0; w < (int)blockDim.x / 32; ++w) longest = max(longest, longest_of_warps[w]);
    __syncthreads();

    const u32 cost = (u32)ends[args.batch - 1] * TURNS;
    // A row of T tiles in runs of L takes the time of L tiles, then that of merging T / L pieces, of which
    // SIDES take about as long as a tile: it is done soonest with L = sqrt(T / SIDES).
    const u32 least = max((u32)LEAST, (u32)sqrtf((float)longest / SIDES));
    const u32 num_runs = min((u32)args.max_runs, max(cost / least, 1u));
    const Shares shares(cost, num_runs);
    if (threadIdx.x == 0) args.runs[0] = make_int4(cost, num_runs, 0, 0);
    struct Place { int query, turn, offset; u32 index; };   // index: the tiles before it
    const auto seek = [&](u32 unit) {
        if (unit == cost) return Place{0, 0, 0, cost - (u32)LEAVING * args.batch * TURNS};
        int low = 0, high = args.batch - 1;
        while (low < high) {
            const int middle = (low + high) / 2;
            if ((u32)ends[middle] * TURNS > unit) high = middle;
            else low = middle + 1;
        }
        const u32 start = low ? ends[low - 1] : 0, of_turn = ends[low] - start;
        const u32 inside = unit - start * TURNS;
        const u32 turn = inside / of_turn, offset = inside % of_turn;
        const u32 index = start * TURNS + turn * of_turn - LEAVING * (low * TURNS + turn)
            + max((int)offset - LEAVING, 0);
        return Place{low, (int)turn, (int)offset, index};
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
        out[1] = make_int4(length, row, pages[position / PAGE_SIZE],
                           pages[last_part(position, length) / PAGE_SIZE]);
    }
}
