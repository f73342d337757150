// Chooses experts: turns the router's logits into weights, and into rows sorted by expert.
//
// A warp takes a token. (token, choice) pairs are sorted into blocks of BLOCK pairs of one expert. Within an expert,
// pairs are in no particular order. For decode steps, whose blocks are small, only a few warps of a thread block have a
// token, and the thread block that is done last sorts all pairs in shared memory. For prompts, with MANY tokens, all
// warps have one, and count its pairs by expert. The thread block that is done last gives each expert its blocks, and a
// second kernel, `place`, fills them.
//
// For few tokens, `router` also computes the logits. Its last thread block takes them from the others as they come.
// This takes as long as one write to memory; a fence and a counter would each take as long again.
//
// Compiled with: EXPERTS (up to 1024), TOP_K, BLOCK (0: nothing is sorted), SIGMOID (scores are sigmoids of logits;
// otherwise their softmax), NORMALIZE (the weights of the chosen experts sum to 1), SIZE (of the hidden states), WIDE
// (logits are float32; otherwise bfloat16), CORRECTED (scores are compared after a correction of the expert is added),
// SCALED (weights are multiplied by a factor of the expert), SCALES_INPUTS (a token's only weight multiplies its hidden
// states instead), and SHARED (`router`: the expert after all others is every token's last choice, with the sigmoid of a
// logit of its own as its weight). GROUPS of neighbouring experts, if more than one: only the TOP_GROUPS count whose
// BEST_OF_GROUP best experts have the highest sums.

#include "empty_words.cuh"

#define MANY (BLOCK >= 128)                 // tokens: those of prompts
constexpr int FEW = 8;                      // the most tokens of `router`
constexpr int TOKENS = MANY ? 32 : FEW;     // per thread block of `routing`
constexpr int THREADS = 1024, ROUTER_THREADS = 32 * FEW;    // of `routing` and `place`, and of `router`
constexpr int OF_LANE = (EXPERTS + 31) / 32;
constexpr int LOGITS = EXPERTS + SHARED;    // per token
constexpr int CHOICES = TOP_K + SHARED;
constexpr int WIDTH = BLOCK ? BLOCK : 1;
constexpr bool BY_LOGITS = SIGMOID && !CORRECTED && GROUPS == 1;    // which differ even if their sigmoids round to 1

static_assert(EXPERTS <= THREADS && CHOICES <= 32 && TOP_K <= EXPERTS, "");
static_assert(!SHARED || (WIDE && BLOCK == 0), "");
static_assert(!SCALES_INPUTS || (TOP_K == 1 && !SHARED), "");
static_assert(GROUPS <= 32 && EXPERTS % GROUPS == 0 && TOP_GROUPS <= GROUPS, "");

struct Arguments {
    const u16* x;           // [num_tokens, SIZE], for `router`
    const u16* router;      // [EXPERTS, SIZE]
    const u16* shared_gate; // [SIZE], if SHARED; without it, the shared expert's weight is 1
    void* logits;           // [num_tokens, LOGITS]; for `router` float32, and EMPTY between launches
    const float* bias;      // [EXPERTS], added to logits once the norm is complete; or null
    const float* correction;    // [EXPERTS], if CORRECTED
    const float* expert_factors;   // [EXPERTS], of weights, if SCALED
    const float* squares;   // [square_tiles, num_tokens] of hidden states whose norm is half done; or null
    float* factors;         // [num_tokens], of hidden states: what completes the norm, if there are squares, times the
                            // token's weight, if it SCALES_INPUTS
    int* ids;               // [num_tokens, CHOICES], counted among the experts held; -1 for others
    float* weights;         // [num_tokens, CHOICES]
    int* pairs;             // [num_blocks, BLOCK]: token * TOP_K + choice; num_tokens * TOP_K for none
    int* experts;           // [num_blocks], -1 after the last one
    u32* done;              // thread blocks; 0 before and after a launch
    int* counts;            // MANY: [EXPERTS], of pairs; 0 before and after a launch
    int* places;            // MANY: [EXPERTS], where an expert's next pair goes
    int num_tokens;
    int num_blocks;
    int square_tiles;
    float eps;
    float scale;            // of the weights
    int first;              // the first expert that this rank holds,
    int held;               // and how many it holds
};

// A lane's part of a token's logits.
struct Logits {
    float of_expert[OF_LANE];   // of the experts 32 * i + lane; NOTHING after the last one
    float of_shared;            // if SHARED, in lane TOP_K
};

__device__ __forceinline__ Logits load_logits(const Arguments& args, int token) {
    Logits logits = {};
#pragma unroll
    for (int i = 0; i < OF_LANE; ++i) {
        const int expert = 32 * i + threadIdx.x % 32;
        const u64 at = (u64)token * LOGITS + expert;
        logits.of_expert[i] = expert >= EXPERTS ? NOTHING
            : WIDE ? __ldcg(static_cast<const float*>(args.logits) + at)
                   : to_float(static_cast<const u16*>(args.logits)[at]);
    }
    return logits;
}

// The same while other thread blocks write them. They are left EMPTY for the next launch.
__device__ __forceinline__ Logits take_logits(const Arguments& args, int token) {
    const int lane = threadIdx.x % 32;
    float* const from = static_cast<float*>(args.logits) + token * LOGITS;
    Logits logits = {};
    bool are_there;
    do {
        are_there = true;
        const auto look = [&](int expert) {
            const float logit = load_word(from + expert);
            are_there &= __float_as_uint(logit) != EMPTY;
            return logit;
        };
#pragma unroll
        for (int i = 0; i < OF_LANE; ++i)
            logits.of_expert[i] = 32 * i + lane < EXPERTS ? look(32 * i + lane) : NOTHING;
        if (SHARED && lane == TOP_K) logits.of_shared = look(EXPERTS);
    } while (!are_there);
#pragma unroll
    for (int i = 0; i < OF_LANE; ++i)
        if (32 * i + lane < EXPERTS) from[32 * i + lane] = __uint_as_float(EMPTY);
    if (SHARED && lane == TOP_K) from[EXPERTS] = __uint_as_float(EMPTY);
    return logits;
}

// The inner product of two pairs of bfloat16.
__device__ __forceinline__ float product(u32 a, u32 b) {
    return __uint_as_float(a << 16) * __uint_as_float(b << 16)
        + __uint_as_float(a & 0xffff0000) * __uint_as_float(b & 0xffff0000);
}

__device__ __forceinline__ float sum(float x) {
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) x += __shfl_xor_sync(ALL, x, lanes);
    return x;
}

__device__ __forceinline__ float largest(float x) {
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(ALL, x, lanes));
    return x;
}

// Maps floats to positive integers in the same order; `number_of` maps these back.
__device__ __forceinline__ u32 ordered(float x) {
    const u32 bits = __float_as_uint(x);
    return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

__device__ __forceinline__ float number_of(u32 key) {
    return __uint_as_float(key & 0x80000000 ? key ^ 0x80000000 : ~key);
}

// The factor that completes the norm of a token's hidden states.
__device__ __forceinline__ float norm_factor(const Arguments& args, int token) {
    if (!args.squares) return 1;
    const int lane = threadIdx.x % 32;
    float square = 0;
    for (int tile = lane; tile < args.square_tiles; tile += 32)
        square += args.squares[(u64)tile * args.num_tokens + token];
    const float factor = rsqrtf(sum(square) / SIZE + args.eps);
    if (lane == 0) args.factors[token] = factor;
    return factor;
}

#if GROUPS > 1
// Sets the keys of experts whose group does not count to 0. A lane has those of the experts that it has in `Logits`.
__device__ __forceinline__ void leave_out_groups(u32 (&keys)[OF_LANE]) {
    const int lane = threadIdx.x % 32;
    const auto group_of = [&](int i) { return (32 * i + lane) / (EXPERTS / GROUPS); };
    u32 own = 0;   // the key of the group whose number is the lane's
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        u32 left[OF_LANE];
#pragma unroll
        for (int i = 0; i < OF_LANE; ++i) left[i] = group_of(i) == group ? keys[i] : 0;
        float total = 0;
#pragma unroll
        for (int best = 0; best < BEST_OF_GROUP; ++best) {
            u32 key = 0;
#pragma unroll
            for (int i = 0; i < OF_LANE; ++i) key = max(key, left[i]);
            const u32 most = __reduce_max_sync(ALL, key);
            total += number_of(most);
            bool gives = lane == __ffs(__ballot_sync(ALL, key == most)) - 1;   // a single one of equal keys
#pragma unroll
            for (int i = 0; i < OF_LANE; ++i)
                if (gives && left[i] == most) left[i] = 0, gives = false;
        }
        if (lane == group) own = ordered(total);
    }
    int before = 0;   // groups that are better than this lane's
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        const u32 other = __shfl_sync(ALL, own, group);
        before += other > own || (other == own && group < lane);
    }
    const u32 counting = __ballot_sync(ALL, lane < GROUPS && before < TOP_GROUPS);
#pragma unroll
    for (int i = 0; i < OF_LANE; ++i)
        if (!(counting >> group_of(i) & 1)) keys[i] = 0;
}
#endif

__device__ __forceinline__ void choose(const Arguments& args, int token, const Logits& logits, float factor) {
    const int lane = threadIdx.x % 32;
    float scores[OF_LANE], expert_factors[OF_LANE];
    u32 keys[OF_LANE];
    float most = NOTHING, total = 0;
#pragma unroll
    for (int i = 0; i < OF_LANE; ++i) {
        const int expert = 32 * i + lane;
        scores[i] = factor * logits.of_expert[i];
        if (args.bias && expert < EXPERTS) scores[i] += args.bias[expert];
        expert_factors[i] = SCALED && expert < EXPERTS ? args.expert_factors[expert] : 1;
        most = fmaxf(most, scores[i]);
    }
    if (!SIGMOID) most = largest(most);
#pragma unroll
    for (int i = 0; i < OF_LANE; ++i) {
        if (BY_LOGITS) keys[i] = ordered(scores[i]);
        scores[i] = SIGMOID ? 1 / (1 + __expf(-scores[i])) : __expf(scores[i] - most);
        total += scores[i];
    }
    const float inverse = SIGMOID ? 1 : 1 / sum(total);
#pragma unroll
    for (int i = 0; i < OF_LANE; ++i) {
        const int expert = 32 * i + lane;
        scores[i] *= inverse;
        const float compared = CORRECTED && expert < EXPERTS ? scores[i] + args.correction[expert] : scores[i];
        if (!BY_LOGITS) keys[i] = ordered(compared);
        if (expert >= EXPERTS) keys[i] = 0;
    }
#if GROUPS > 1
    leave_out_groups(keys);
#endif
    int id = 0;          // of this lane's choice
    float weight = 0;
    for (int choice = 0; choice < TOP_K; ++choice) {
        u32 key = 0;
        int at = 0;
        float score = 0;
#pragma unroll
        for (int i = 0; i < OF_LANE; ++i)
            if (keys[i] > key) key = keys[i], at = 32 * i + lane, score = scores[i];
        const u32 best = __reduce_max_sync(ALL, key);
        const u32 first = __reduce_min_sync(ALL, key == best ? at : EXPERTS);   // among equal keys
        score = __shfl_sync(ALL, score, first % 32);
#pragma unroll
        for (int i = 0; i < OF_LANE; ++i)
            if (32 * i + lane == first) keys[i] = 0;
        if (lane == choice) id = first, weight = score;
    }
    // none of a token's sigmoids may be more than 0, and corrections may choose scores that are as small
    const float divisor = NORMALIZE ? SIGMOID ? sum(weight) + 1e-20f : fmaxf(sum(weight), 1e-12f) : 1;
    float by = args.scale / divisor;
#pragma unroll
    for (int i = 0; SCALED && i < OF_LANE; ++i) {
        const float of_id = __shfl_sync(ALL, expert_factors[i], id % 32);
        if (id / 32 == i) by *= of_id;
    }
    if (lane < TOP_K) {
        id -= args.first;
        const bool is_held = id >= 0 && id < args.held;
        args.ids[token * CHOICES + lane] = is_held ? id : -1;
        if (MANY && is_held) atomicAdd(args.counts + id, 1);
        args.weights[token * CHOICES + lane] = SCALES_INPUTS ? 1 : weight * by;
        if (SCALES_INPUTS) args.factors[token] = factor * weight * by;
    }
    if (SHARED && lane == TOP_K) {
        args.ids[token * CHOICES + TOP_K] = args.held;
        const float opening = 1 / (1 + __expf(-factor * logits.of_shared));
        args.weights[token * CHOICES + TOP_K] = args.shared_gate ? opening : 1;
    }
}

// The sum of `x` over the threads up to this one.
__device__ __forceinline__ int running_sum(int x, int* of_warps) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        const int before = __shfl_up_sync(ALL, x, lanes);
        if (lane >= lanes) x += before;
    }
    if (lane == 31) of_warps[warp] = x;
    __syncthreads();
    for (int i = 0; i < warp; ++i) x += of_warps[i];
    return x;
}

struct Given {
    int first;      // the first block of the thread's expert
    int num_used;   // blocks that have pairs
};

// Gives each expert, one per thread, the blocks that its `count` pairs need. All threads meet.
template <int THREADS>
__device__ __forceinline__ Given give_blocks(const Arguments& args, int count) {
    static_assert(EXPERTS <= THREADS || BLOCK == 0, "");
    __shared__ int of_warps[THREADS / 32], num_used;
    const int thread = threadIdx.x;
    const int blocks = (count + WIDTH - 1) / WIDTH, end = running_sum(blocks, of_warps);
    for (int block = end - blocks; block < end; ++block) args.experts[block] = thread;
    if (thread == THREADS - 1) num_used = end;
    __syncthreads();
    for (int block = num_used + thread; block < args.num_blocks; block += THREADS) args.experts[block] = -1;
    return {end - blocks, num_used};
}

template <int THREADS>
__device__ __forceinline__ void sort(const Arguments& args) {
    __shared__ int counts[EXPERTS];
    const int thread = threadIdx.x, num_pairs = args.num_tokens * TOP_K;
    if (thread < EXPERTS) counts[thread] = 0;
    __syncthreads();
    for (int pair = thread; pair < num_pairs; pair += THREADS) {
        const int expert = __ldcg(args.ids + pair);
        if (expert >= 0) atomicAdd(&counts[expert], 1);
    }
    __syncthreads();
    const Given given = give_blocks<THREADS>(args, thread < EXPERTS ? counts[thread] : 0);
    if (thread < EXPERTS) counts[thread] = given.first * WIDTH;   // from here on, the expert's next place
    for (int at = thread; at < given.num_used * WIDTH; at += THREADS) args.pairs[at] = num_pairs;
    __syncthreads();
    for (int pair = thread; pair < num_pairs; pair += THREADS) {
        const int expert = __ldcg(args.ids + pair);
        if (expert >= 0) args.pairs[atomicAdd(&counts[expert], 1)] = pair;
    }
}

// The same for a single token, by the warp that has chosen for it: each pair gets a block.
__device__ __forceinline__ void sort_one(const Arguments& args) {
    const int lane = threadIdx.x % 32;
    __syncwarp();
    const int expert = lane < TOP_K ? args.ids[lane] : -1;
    const u32 held = __ballot_sync(ALL, expert >= 0);
    const int block = __popc(held & ((1u << lane) - 1)), num_used = __popc(held);
    if (expert >= 0) args.experts[block] = expert, args.pairs[block * BLOCK] = lane;
    if (lane >= num_used && lane < args.num_blocks) args.experts[lane] = -1;
    for (int at = lane; at < num_used * BLOCK; at += 32)
        if (at % BLOCK) args.pairs[at] = TOP_K;
}

// Whether all other thread blocks are done. If so, what they wrote is visible.
__device__ __forceinline__ bool is_last_block(const Arguments& args) {
    __shared__ bool is_last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(args.done, 1) == gridDim.x - 1;
    __syncthreads();
    if (!is_last) return false;
    __threadfence();
    if (threadIdx.x == 0) *args.done = 0;
    return true;
}

#if MANY
// Gives experts their blocks, and marks the places that stay empty.
__device__ __forceinline__ void make_places(const Arguments& args) {
    __shared__ int filled[EXPERTS];   // where an expert's pairs end
    const int thread = threadIdx.x;
    int count = 0;
    if (thread < EXPERTS) count = __ldcg(args.counts + thread), args.counts[thread] = 0;
    const int first = give_blocks<THREADS>(args, count).first * BLOCK;
    if (thread < EXPERTS) args.places[thread] = first, filled[thread] = first + count;
    __syncthreads();
    for (int expert = thread / 32; expert < EXPERTS; expert += THREADS / 32) {
        const int end = (filled[expert] + BLOCK - 1) / BLOCK * BLOCK;
        for (int at = filled[expert] + thread % 32; at < end; at += 32) args.pairs[at] = args.num_tokens * TOP_K;
    }
}

// Puts pairs into the blocks of their experts. A thread takes a pair; a thread block takes the places of all its pairs
// of an expert at once.
extern "C" __global__ void __launch_bounds__(THREADS, 1) place(const __grid_constant__ Arguments args) {
    __shared__ int places[EXPERTS];
    const int thread = threadIdx.x, pair = blockIdx.x * THREADS + thread;
    if (thread < EXPERTS) places[thread] = 0;
    __syncthreads();
    allow_next();
    wait_previous();
    const int expert = pair < args.num_tokens * TOP_K ? __ldcg(args.ids + pair) : -1;
    const int before = expert >= 0 ? atomicAdd(&places[expert], 1) : 0;   // pairs of the same expert
    __syncthreads();
    if (thread < EXPERTS && places[thread]) places[thread] = atomicAdd(args.places + thread, places[thread]);
    __syncthreads();
    if (expert >= 0) args.pairs[places[expert] + before] = pair;
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) routing(const __grid_constant__ Arguments args) {
    allow_next();
    wait_previous();
    const int warp = threadIdx.x / 32, token = blockIdx.x * TOKENS + warp;
    if (warp < TOKENS && token < args.num_tokens)
        choose(args, token, load_logits(args, token), norm_factor(args, token));
    if (BLOCK == 0 || !is_last_block(args)) return;
#if MANY
    make_places(args);
#else
    sort<THREADS>(args);
#endif
}

#if WIDE && SIZE % 8 == 0 && !MANY && (BLOCK == 0 || EXPERTS <= 256)
// The same for few tokens, with the router's GEMM before it. Each warp takes an expert, except in the last thread
// block, which chooses and sorts. It waits only for thread blocks that GPUs start before it.
extern "C" __global__ void __launch_bounds__(ROUTER_THREADS, 1) router(const __grid_constant__ Arguments args) {
    constexpr int CHUNKS = (SIZE + 255) / 256;   // of 8 numbers of a row, per lane; not all lanes have the last one
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (blockIdx.x == gridDim.x - 1) {
        allow_next();
        wait_previous();
        if (warp < args.num_tokens) {
            const float factor = norm_factor(args, warp);
            choose(args, warp, take_logits(args, warp), factor);
        }
        if (BLOCK == 0) return;
        if (args.num_tokens == 1) {
            if (warp == 0) sort_one(args);
            return;
        }
        __syncthreads();
        return sort<ROUTER_THREADS>(args);
    }
    const int expert = blockIdx.x * TOKENS + warp;
    const u16* const of_router = args.router + (u64)min(expert, EXPERTS - 1) * SIZE;
    const bool is_gate = SHARED && expert == EXPERTS && args.shared_gate;
    const uint4* const row = reinterpret_cast<const uint4*>(is_gate ? args.shared_gate : of_router);
    const auto load = [&](const uint4* from, int i) {
        return SIZE % 256 == 0 || 32 * i + lane < SIZE / 8 ? from[32 * i + lane] : make_uint4(0, 0, 0, 0);
    };
    uint4 weight[CHUNKS];
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) weight[i] = load(row, i);
    allow_next();
    wait_previous();
    for (int token = 0; token < args.num_tokens; ++token) {
        const uint4* const x = reinterpret_cast<const uint4*>(args.x + (u64)token * SIZE);
        float total = 0;
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
            const uint4 eight = load(x, i);
            total += product(weight[i].x, eight.x) + product(weight[i].y, eight.y);
            total += product(weight[i].z, eight.z) + product(weight[i].w, eight.w);
        }
        total = sum(total);
        float* const logit = static_cast<float*>(args.logits) + token * LOGITS + expert;
        if (lane == 0 && expert < LOGITS) store_word(logit, written(total));
    }
}
#endif
