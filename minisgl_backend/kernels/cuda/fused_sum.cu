// The sum of all ranks' rows, the residual add and the RMSNorm after it, in one kernel (`fused_sum.py`). The ranks are
// GPUs of one host, and each writes to the memory of the others.
//
//     one_shot    Each rank sends its rows to all others, and sums up all rows.
//     two_shot    Each rank sums up every RANKS-th row, for which the others send it their rows, and sends the sums to
//                 all. It sends less, 2 (RANKS - 1) / RANKS times its rows instead of RANKS - 1 times, but waits twice.
//
// Both round at the same places, so a row gets the same bits either way: the sum, which is in float32 and in the order
// of the ranks; the residual stream; the norm.
//
// There are no flags beside the data: a place that waits for data holds UNSENT, which is never sent ("Lamport").
// Whoever takes the data leaves UNSENT in its place. Two buffers take turns. A rank that sends the rows of a call has
// received the previous call's data from all others, so these have taken all data of the call before that.
//
// A thread block has whole rows, and each thread one vector of 8 elements of a row. All thread blocks fit on the GPU at
// once, and each sends all that it can before it waits. So no rank waits for data whose sending it holds up itself.
//
// SIZE: elements per row. RANKS: the number of ranks; RANK: this one. HALF: elements are IEEE float16, not bfloat16.
// PER_PROCESSOR: thread blocks per multiprocessor, in `two_shot`.

#include "hopper.cuh"

constexpr u32 VECTORS = SIZE / 8;
constexpr u32 THREADS = (VECTORS + 31) / 32 * 32;
constexpr u32 UNSENT = 0x80008000;  // a pair of -0.0; 0.0 is sent in its place

struct __align__(16) Vector { u32 pairs[4]; };

struct State { u32 arrived, turn; };

struct Arguments {
    const Vector* x;          // [rows, VECTORS]
    Vector* residual;         // [rows, VECTORS], to which the sum is added
    const Vector* weight;     // [VECTORS]
    Vector* out;              // [rows, VECTORS]
    Vector* memory[RANKS];    // two buffers of each rank
    State* state;             // this rank's
    u64 buffer;               // vectors of a buffer
    u32 rows;
    float eps;
};

// ---- vectors

__device__ __forceinline__ float low(u32 pair) { return HALF ? from_float16((u16)pair) : to_float((u16)pair); }

__device__ __forceinline__ float high(u32 pair) {
    return HALF ? from_float16((u16)(pair >> 16)) : __uint_as_float(pair & 0xffff0000);
}

__device__ __forceinline__ u32 rounded(float low, float high) {
    return HALF ? pack_float16(low, high) : pack(low, high);
}

__device__ __forceinline__ Vector sendable(Vector v) {
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (v.pairs[i] == UNSENT) v.pairs[i] = 0;
    return v;
}

__device__ __forceinline__ Vector sum_of(const Vector (&of)[RANKS]) {
    Vector out;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float first = low(of[0].pairs[i]), second = high(of[0].pairs[i]);
#pragma unroll
        for (int rank = 1; rank < RANKS; rank++) {
            first += low(of[rank].pairs[i]);
            second += high(of[rank].pairs[i]);
        }
        out.pairs[i] = rounded(first, second);
    }
    return out;
}

__device__ __forceinline__ Vector added(const Vector& a, const Vector& b) {
    Vector out;
#pragma unroll
    for (int i = 0; i < 4; i++)
        out.pairs[i] = rounded(low(a.pairs[i]) + low(b.pairs[i]), high(a.pairs[i]) + high(b.pairs[i]));
    return out;
}

__device__ __forceinline__ float squares(const Vector& v) {
    float out = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        out += low(v.pairs[i]) * low(v.pairs[i]);
        out += high(v.pairs[i]) * high(v.pairs[i]);
    }
    return out;
}

__device__ __forceinline__ Vector scaled(const Vector& v, float scale, const Vector& weight) {
    Vector out;
#pragma unroll
    for (int i = 0; i < 4; i++)
        out.pairs[i] = rounded(
            low(v.pairs[i]) * scale * low(weight.pairs[i]), high(v.pairs[i]) * scale * high(weight.pairs[i]));
    return out;
}

// ---- between ranks

__device__ __forceinline__ void send(Vector* to, const Vector& v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "l"(to), "r"(v.pairs[0]), "r"(v.pairs[1]), "r"(v.pairs[2]), "r"(v.pairs[3]) : "memory");
}

__device__ __forceinline__ Vector received(const Vector* from) {
    Vector v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.pairs[0]), "=r"(v.pairs[1]), "=r"(v.pairs[2]), "=r"(v.pairs[3]) : "l"(from) : "memory");
    return v;
}

__device__ __forceinline__ bool has_empty(const Vector& v) {
    return v.pairs[0] == UNSENT || v.pairs[1] == UNSENT || v.pairs[2] == UNSENT || v.pairs[3] == UNSENT;
}

// the place of a sender's data in a receiver's buffer
__device__ __forceinline__ constexpr u32 slot(u32 sender, u32 receiver) {
    return sender < receiver ? sender : sender - 1;
}

__device__ __forceinline__ void empty(Vector* place) {
    const Vector nothing = {{UNSENT, UNSENT, UNSENT, UNSENT}};
    send(place, nothing);
}

__device__ __forceinline__ Vector taken(Vector* place) {
    Vector v;
    do v = received(place);
    while (has_empty(v));
    empty(place);
    return v;
}

// Takes a vector from each other rank, out of slots that are `stride` apart.
__device__ __forceinline__ void take(Vector (&of)[RANKS], Vector* first, u64 stride) {
    bool waits;
    do {
        waits = false;
#pragma unroll
        for (u32 rank = 0; rank < RANKS; rank++)
            if (rank != RANK) of[rank] = received(first + slot(rank, RANK) * stride);
#pragma unroll
        for (u32 rank = 0; rank < RANKS; rank++)
            if (rank != RANK) waits |= has_empty(of[rank]);
    } while (waits);
#pragma unroll
    for (u32 rank = 0; rank < RANKS; rank++)
        if (rank != RANK) empty(first + slot(rank, RANK) * stride);
}

// Where the buffer whose turn it is begins. All threads call this.
__device__ __forceinline__ u64 begin_turn(const Arguments& a) {
    u32 turn;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(turn) : "l"(&a.state->turn) : "memory");
    return __syncthreads_or(turn) ? a.buffer : 0;
}

// Called after `begin_turn`: the last thread block to get here passes the turn on, for the next call.
__device__ __forceinline__ void end_turn(const Arguments& a, u64 begin) {
    if (threadIdx.x == 0 && atomicAdd(&a.state->arrived, 1) == gridDim.x - 1) {
        a.state->arrived = 0;
        a.state->turn = begin == 0;
    }
}

// ---- norms

// The sum over the threads of a warp, in each of them.
__device__ __forceinline__ float sum_over_warp(float sum) {
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
    return sum;
}

// The sum over all threads. `shared` must differ from that of the previous call.
__device__ __forceinline__ float sum_over_threads(float sum, float (&shared)[32]) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    sum = sum_over_warp(sum);
    if (lane == 0) shared[warp] = sum;
    __syncthreads();
    return sum_over_warp(lane < THREADS / 32 ? shared[lane] : 0);
}

__device__ __forceinline__ float scale_of(float sum_of_squares, float eps) {
    return rsqrtf(sum_of_squares / SIZE + eps);
}

// ---- kernels

extern "C" __global__ void __launch_bounds__(THREADS) one_shot(const Arguments a) {
    __shared__ float shared[2][32];
    const u32 at = threadIdx.x;
    const bool is_in = at < VECTORS;
    const u64 stride = (u64)a.rows * VECTORS;
    Vector weight = {}, residual = {};
    if (is_in) {
        weight = a.weight[at];
        residual = a.residual[(u64)blockIdx.x * VECTORS + at];
    }
    wait_previous();
    allow_next();
    Vector own = {};
    if (is_in) own = sendable(a.x[(u64)blockIdx.x * VECTORS + at]);
    const u64 begin = begin_turn(a);
    for (u64 row = blockIdx.x; row < a.rows; row += gridDim.x) {
        if (!is_in) break;
        const u64 place = row * VECTORS + at;
        if (row != blockIdx.x) own = sendable(a.x[place]);
#pragma unroll
        for (u32 rank = 0; rank < RANKS; rank++)
            if (rank != RANK) send(a.memory[rank] + begin + slot(RANK, rank) * stride + place, own);
    }
    end_turn(a, begin);
    u32 odd = 0;
    for (u64 row = blockIdx.x; row < a.rows; row += gridDim.x, odd ^= 1) {
        const u64 place = row * VECTORS + at;
        float sum = 0;
        if (is_in) {
            Vector of[RANKS];
            if (row != blockIdx.x) residual = a.residual[place];
            of[RANK] = gridDim.x < a.rows ? sendable(a.x[place]) : own;
            take(of, a.memory[RANK] + begin + place, stride);
            residual = added(sum_of(of), residual);
            a.residual[place] = residual;
            sum = squares(residual);
        }
        sum = sum_over_threads(sum, shared[odd]);
        if (is_in) a.out[place] = scaled(residual, scale_of(sum, a.eps), weight);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, PER_PROCESSOR) two_shot(const Arguments a) {
    __shared__ float shared[2][32];
    const u32 at = threadIdx.x;
    const bool is_in = at < VECTORS;
    // row `group` * RANKS + rank is summed up by that rank
    const u32 groups = (a.rows + RANKS - 1) / RANKS;
    const u64 stride = (u64)groups * VECTORS;
    Vector weight = {}, residual = {};
    if (is_in) {
        weight = a.weight[at];
        residual = a.residual[(u64)blockIdx.x * VECTORS + at];
    }
    wait_previous();
    allow_next();
    const u64 begin = begin_turn(a), sums_begin = begin + (RANKS - 1) * stride;
    for (u64 row = blockIdx.x; row < a.rows; row += gridDim.x) {
        const u32 owner = row % RANKS;
        if (!is_in) break;
        if (owner == RANK) continue;
        const Vector own = sendable(a.x[row * VECTORS + at]);
        const u64 place = begin + row / RANKS * VECTORS + at;
#pragma unroll
        for (u32 rank = 0; rank < RANKS; rank++)
            if (rank != RANK && rank == owner) send(a.memory[rank] + place + slot(RANK, rank) * stride, own);
    }
    end_turn(a, begin);
    // the warps of all thread blocks share the vectors of all groups, 32 each
    constexpr u32 WARPS = THREADS / 32;
    for (u32 i = at / 32 * gridDim.x + blockIdx.x; i < groups * WARPS; i += gridDim.x * WARPS) {
        const u64 group = i / WARPS, row = group * RANKS + RANK;
        const u32 vector = i % WARPS * 32 + at % 32;
        if (row >= a.rows || vector >= VECTORS) continue;
        Vector of[RANKS];
        of[RANK] = sendable(a.x[row * VECTORS + vector]);
        take(of, a.memory[RANK] + begin + group * VECTORS + vector, stride);
        const Vector sum = sendable(sum_of(of));
#pragma unroll
        for (u32 rank = 0; rank < RANKS; rank++) send(a.memory[rank] + sums_begin + row * VECTORS + vector, sum);
    }
    u32 odd = 0;
    for (u64 row = blockIdx.x; row < a.rows; row += gridDim.x, odd ^= 1) {
        const u64 place = row * VECTORS + at;
        float sum = 0;
        if (is_in) {
            if (row != blockIdx.x) residual = a.residual[place];
            residual = added(taken(a.memory[RANK] + sums_begin + place), residual);
            a.residual[place] = residual;
            sum = squares(residual);
        }
        sum = sum_over_threads(sum, shared[odd]);
        if (is_in) a.out[place] = scaled(residual, scale_of(sum, a.eps), weight);
    }
}
