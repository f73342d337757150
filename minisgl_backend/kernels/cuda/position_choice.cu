// Which positions a token attends to: the slots of those with the highest scores, in the order of positions.
//
// A cluster takes a token. Its thread blocks have equal runs of the token's positions, whose keys stay in shared memory
// as far as they fit. A *key* is an unsigned integer that sorts like its score. The lowest key that is chosen is found
// digit by digit, from the highest one (radix selection): each thread block counts its keys that begin with the digits
// known so far by their next digit; then it adds the counts of all thread blocks, and finds the digit itself. Then each
// warp takes a run of positions: it counts what it will write, which gives the others their places, and writes it.
//
// A NaN is a key like any other, so it neither ends a search early nor makes it choose too many.

#include "hopper.cuh"

constexpr int THREADS = 1024, WARPS = THREADS / 32;
constexpr int DIGITS = 3;
constexpr int BASE = 2 * THREADS;   // of a digit, 11 bits

struct Arguments {
    int* out;               // [num_tokens, top_k]
    const float* scores;    // [num_tokens, ..]
    const int* table;       // [num_rows, ..]: pages
    const int* rows;        // [num_tokens], of the table
    const int* lengths;     // [num_tokens]: how many positions a token sees
    u64 scores_stride;
    u64 table_stride;
    int top_k;              // at most 2 * BASE
    int page_size;
    int blocks;             // thread blocks of a cluster
    int held;               // keys of a thread block that fit in shared memory
};

// The lowest key that is chosen, as far as its digits are known, and how many of those that begin like it are chosen.
struct Lowest {
    u32 key;
    int wanted;
};

// In shared memory, before the keys.
struct Block {
    int counts[2][BASE];    // of keys by digit; digits take turns. Then the chosen positions
    int of_warps[WARPS];
    int above[WARPS], equal[WARPS];     // keys above the lowest chosen one, and equal to it, of each warp
    int2 all;               // the same of all warps
    int2 found;             // a digit, and how many of its keys are chosen; then where chosen positions begin and end
};

static_assert(sizeof(Block) <= 17 * 1024, "the launcher leaves it no more");

// of 0.0 and -0.0 the same
__device__ __forceinline__ u32 key_of(float score) {
    const u32 bits = score == 0.0f ? 0 : __float_as_uint(score);
    return bits >> 31 ? ~bits : bits | 0x80000000;
}

// What all threads of the cluster have written to shared memory is visible behind it.
__device__ __forceinline__ void meet() {
    __syncwarp();
    arrive_in_cluster<true>();
    wait_for_cluster();
}

// The keys of a thread block.
struct Keys {
    const float* scores;
    u32* kept;      // the first `held` of them
    int held;
    int count;

    __device__ u32 load(int i) const {
        const u32 key = key_of(__ldcg(scores + i));
        if (i < held) kept[i] = key;
        return key;
    }
    __device__ u32 operator[](int i) const { return i < held ? kept[i] : key_of(__ldcg(scores + i)); }
};

constexpr __device__ int shift_of(int digit) { return digit == 0 ? 21 : digit == 1 ? 10 : 0; }

__device__ __forceinline__ void count_digits(int* counts, const Keys& keys, u32 lowest, int digit) {
    const int shift = shift_of(digit);
    const u32 known = digit ? ALL << shift_of(digit - 1) : 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < keys.count; i += THREADS) {
        const u32 key = digit ? keys[i] : keys.load(i);
        if ((key & known) == lowest) atomicAdd(counts + ((key & ~known) >> shift), 1);
    }
}

// The next digit. Counts of all thread blocks are there.
__device__ __forceinline__ Lowest with_digit(Block& block, Lowest lowest, int digit, int num_blocks) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // the first thread has the two highest digits, and so on
    const int low = BASE - 2 - 2 * threadIdx.x;
    const u32 own = shared_address(block.counts[digit % 2] + low);
    int of_low = 0, of_high = 0;
    for (int other = 0; other < num_blocks; ++other) {
        int a, b;
        asm volatile("ld.shared::cluster.v2.u32 {%0, %1}, [%2];"
                     : "=r"(a), "=r"(b) : "r"(in_block(own, other)) : "memory");
        of_low += a;
        of_high += b;
    }
    int reached = of_low + of_high;     // with these digits or higher ones, in this warp
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        const int before = __shfl_up_sync(ALL, reached, lanes);
        if (lane >= lanes) reached += before;
    }
    if (lane == 31) block.of_warps[warp] = reached;
    __syncthreads();
    reached += __reduce_add_sync(ALL, lane < warp ? block.of_warps[lane] : 0);
    const int with_high = reached - of_low, higher = with_high - of_high;
    if (higher < lowest.wanted && lowest.wanted <= reached) {
        const bool is_high = lowest.wanted <= with_high;
        block.found = make_int2(low + is_high, lowest.wanted - (is_high ? higher : with_high));
    }
    __syncthreads();
    return {lowest.key | (u32)block.found.x << shift_of(digit), block.found.y};
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) choose_slots(const Arguments args) {
    extern __shared__ __align__(16) u8 shared[];
    Block& block = *reinterpret_cast<Block*>(shared);
    allow_next();
    wait_previous();
    const int token = blockIdx.x / args.blocks, rank = blockIdx.x % args.blocks;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int length = args.lengths[token];
    const int* const pages = args.table + args.rows[token] * args.table_stride;
    int* const out = args.out + (u64)token * args.top_k;
    const auto slot_of = [&](int position) {
        return pages[position / args.page_size] * args.page_size + position % args.page_size;
    };
    if (length <= args.top_k) {     // all are chosen
        for (int i = rank * THREADS + threadIdx.x; i < length; i += args.blocks * THREADS) out[i] = slot_of(i);
        return;
    }
    const int share = (length + args.blocks - 1) / args.blocks;
    const int begin = min(rank * share, length);
    const Keys keys = {args.scores + token * args.scores_stride + begin, reinterpret_cast<u32*>(&block + 1),
                       args.held, min(share, length - begin)};
    for (int i = threadIdx.x; i < 2 * BASE; i += THREADS) block.counts[i / BASE][i % BASE] = 0;
    __syncthreads();

    Lowest lowest = {0, args.top_k};
#pragma unroll
    for (int digit = 0; digit < DIGITS; ++digit) {
        count_digits(block.counts[digit % 2], keys, lowest.key, digit);
        meet();
        // nobody reads those of the digit before any more
        for (int i = threadIdx.x; i < BASE; i += THREADS) block.counts[1 - digit % 2][i] = 0;
        lowest = with_digit(block, lowest, digit, args.blocks);
    }

    // a warp's run of positions
    const int of_warp = (keys.count + THREADS - 1) / THREADS * 32;
    const int first = min(warp * of_warp, keys.count), end = min(first + of_warp, keys.count);
    int above = 0, equal = 0;
    for (int i = first + lane; i < end; i += 32) {
        const u32 key = keys[i];
        above += key > lowest.key;
        equal += key == lowest.key;
    }
    above = __reduce_add_sync(ALL, above);
    equal = __reduce_add_sync(ALL, equal);
    if (lane == 0) block.above[warp] = above, block.equal[warp] = equal;
    __syncthreads();
    if (warp == 0) {
        above = __reduce_add_sync(ALL, block.above[lane]);
        equal = __reduce_add_sync(ALL, block.equal[lane]);
        if (lane == 0) block.all = make_int2(above, equal);
    }
    meet();
    int before[2] = {lane < warp ? block.above[lane] : 0, lane < warp ? block.equal[lane] : 0};
    if (lane < rank) {
        int a, b;
        asm volatile("ld.shared::cluster.v2.u32 {%0, %1}, [%2];"
                     : "=r"(a), "=r"(b) : "r"(in_block(shared_address(&block.all), lane)) : "memory");
        before[0] += a;
        before[1] += b;
    }
    __syncwarp();
    arrive_in_cluster<true>();      // this thread block reads no memory of others any more
    above = __reduce_add_sync(ALL, before[0]);
    equal = __reduce_add_sync(ALL, before[1]);
    // Chosen positions are collected first, so that their pages are looked up all at once.
    if (threadIdx.x == 0) block.found.x = above + min(equal, lowest.wanted);
    int* const chosen = block.counts[0];    // by their place among those of the token
    const u32 lanes_before = (1u << lane) - 1;
    for (int start = first; start < end; start += 32) {
        const int i = start + lane;
        const u32 key = i < end ? keys[i] : 0;
        const bool is_above = i < end && key > lowest.key, is_equal = i < end && key == lowest.key;
        const u32 aboves = __ballot_sync(ALL, is_above), equals = __ballot_sync(ALL, is_equal);
        const int equal_before = equal + __popc(equals & lanes_before);
        const int place = above + __popc(aboves & lanes_before) + min(equal_before, lowest.wanted);
        if (is_above || (is_equal && equal_before < lowest.wanted)) chosen[place] = begin + i;
        above += __popc(aboves);
        equal += __popc(equals);
    }
    if (threadIdx.x == THREADS - 1) block.found.y = above + min(equal, lowest.wanted);
    __syncthreads();
    for (int i = block.found.x + threadIdx.x; i < block.found.y; i += THREADS) out[i] = slot_of(chosen[i]);
    wait_for_cluster();
}
