// Part of `linear.cu`, which says who shares what: adds up the sums of a tile that is shared by the two WAYS of a
// thread block, by the SPLITS of a cluster, or by thread blocks with EVEN parts of all tiles.

#pragma once

// from another thread block's shared memory (`in_block`)
__device__ __forceinline__ float4 load_four(u32 there) {
    float4 out;
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(out.x), "=f"(out.y), "=f"(out.z), "=f"(out.w) : "r"(there));
    return out;
}

// WAYS: one way waits until the other says that there is room for sums, or that the sums are there
constexpr int IS_ROOM = 3, ARE_SUMS = 4;

template <int WHAT>
__device__ __forceinline__ void wait_for_way() {
    asm volatile("bar.sync %0, %1;" :: "n"(WHAT), "n"(MULTIPLIERS) : "memory");
}

template <int WHAT>
__device__ __forceinline__ void tell_way() {
    asm volatile("bar.arrive %0, %1;" :: "n"(WHAT), "n"(MULTIPLIERS) : "memory");
}

// Called after the barrier of the multiplying threads. What they wrote before it is visible after `wait_for`.
__device__ __forceinline__ void announce(int* flag) {
    __threadfence();
    asm volatile("st.release.gpu.global.s32 [%0], 1;" :: "l"(flag) : "memory");
}

__device__ __forceinline__ void wait_for(const int* flag) {
    int there;
    do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(there) : "l"(flag) : "memory");
    while (!there);
}

// WAYS: the second way leaves its sums to the first.
__device__ __forceinline__ void add_ways(float (&c)[TOKENS / 2], u8* shared) {
    float4* const sums = reinterpret_cast<float4*>(shared + SHARED_BYTES - WAY_BYTES) + threadIdx.x % THREADS;
    if (threadIdx.x >= THREADS) {
        wait_for_way<IS_ROOM>();
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i += 4)
            sums[i / 4 * THREADS] = make_float4(c[i], c[i + 1], c[i + 2], c[i + 3]);
        tell_way<ARE_SUMS>();
    } else {
        wait_for_way<ARE_SUMS>();
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i += 4) {
            const float4 of = sums[i / 4 * THREADS];
            c[i] += of.x, c[i + 1] += of.y, c[i + 2] += of.z, c[i + 3] += of.w;
        }
    }
}

// Waits for the first phase of a barrier. What other thread blocks wrote before it ended is visible then.
__device__ __forceinline__ void wait_for_pushed(u32 barrier) {
    u32 done;
    do {
        asm volatile("{ .reg .pred p;\n"
                     "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n"
                     "selp.b32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(barrier) : "memory");
    } while (!done);
}

// PUSHED: as soon as a thread has its sums, it sends them to the thread blocks that finish the tokens, straight into
// their shared memory, and waits for what others send to it.
__device__ __forceinline__ void exchange_splits(float* sums, const float (&c)[TOKENS / 2], u32 pushed) {
    const int split = blockIdx.z;
    constexpr int OF_ONE = OWN / 8 * THREADS * 16;   // bytes that a thread block sends to another one
    wait_for_cluster();   // all thread blocks have begun
#pragma unroll
    for (int to = 0; to < SPLITS && to * OWN < TOKENS; ++to) {
        const float* const own = c + to * (OWN / 2);
        if (to == split) {
#pragma unroll
            for (int i = 0; i < OWN / 2; ++i) sums[i] = own[i];
            continue;
        }
        const int place = (split - to - 1 + SPLITS) % SPLITS;   // among those that send to it
        const u32 at = in_block(pushed + place * OF_ONE + (int)threadIdx.x * 16, to);
        const u32 barrier = in_block(pushed + PUSHED_BYTES, to);
#pragma unroll
        for (int i = 0; i < OWN / 2; i += 4)
            asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
                         "[%0], {%1, %2, %3, %4}, [%5];"
                         :: "r"(at + i / 4 * THREADS * 16), "f"(own[i]), "f"(own[i + 1]), "f"(own[i + 2]),
                            "f"(own[i + 3]), "r"(barrier) : "memory");
    }
    if (split * OWN >= TOKENS) return;
    wait_for_pushed(pushed + PUSHED_BYTES);
#pragma unroll
    for (int i = 0; i < OWN / 2; i += 4)
#pragma unroll
        for (int other = 0; other < SPLITS - 1; ++other) {
            float4 of;
            asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(of.x), "=f"(of.y), "=f"(of.z), "=f"(of.w)
                         : "r"(pushed + other * OF_ONE + (i / 4 * THREADS + (int)threadIdx.x) * 16));
            sums[i] += of.x, sums[i + 1] += of.y, sums[i + 2] += of.z, sums[i + 3] += of.w;
        }
}

// SPLITS: adds up the sums of the tokens that this thread block finishes.
__device__ __forceinline__ void add_splits(float* sums, const float (&c)[TOKENS / 2], u8* shared) {
    const int split = blockIdx.z;
    float4* const parts = reinterpret_cast<float4*>(shared);   // [TOKENS / 8, THREADS]
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i += 4)
        parts[i / 4 * THREADS + threadIdx.x] = make_float4(c[i], c[i + 1], c[i + 2], c[i + 3]);
    sync_cluster<true>();
    if (split * OWN < TOKENS) {
#pragma unroll
        for (int i = 0; i < OWN / 8; ++i) {
            const int at = (split * (OWN / 8) + i) * THREADS + threadIdx.x;
            float4 of[SPLITS] = {parts[at]};
#pragma unroll
            for (int other = 1; other < SPLITS; ++other)
                of[other] = load_four(in_block(shared_address(parts + at), (split + other) % SPLITS));
            float* const sum = sums + 4 * i;
            sum[0] = of[0].x, sum[1] = of[0].y, sum[2] = of[0].z, sum[3] = of[0].w;
#pragma unroll
            for (int other = 1; other < SPLITS; ++other) {
                sum[0] += of[other].x, sum[1] += of[other].y;
                sum[2] += of[other].z, sum[3] += of[other].w;
            }
        }
    }
    __syncwarp();
    arrive_in_cluster<true>();   // the kernel's end waits until others have read
}

// EVEN: where a thread's sums are in the part that a thread block leaves: TOKENS / 8 float4, THREADS apart.
__device__ __forceinline__ float4* part_of(const Arguments& args, int block) {
    return reinterpret_cast<float4*>(args.parts) + (u64)block * (FEATURES * TOKENS / 4) + threadIdx.x;
}

__device__ __forceinline__ void leave_part(const Arguments& args, const float (&c)[TOKENS / 2]) {
    const int block = blockIdx.x * gridDim.y + blockIdx.y;
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i += 4)
        part_of(args, block)[i / 4 * THREADS] = make_float4(c[i], c[i + 1], c[i + 2], c[i + 3]);
    sync_multipliers();
    if (threadIdx.x == 0) announce(args.are_there + block);
}

// EVEN: adds the other thread blocks' parts of the tile whose steps end before `tile_end` to this one's part. No thread
// block waits forever: there is at most one per multiprocessor, so all of them run at the same time (the next kernel
// starts only after all of them have), and each leaves its own part before it waits for another.
__device__ __forceinline__ void add_parts(
    const Arguments& args, float (&c)[TOKENS / 2], int tiles_of_a, int tile_end) {
#if CODE   // waits for all others at once; with few tokens, several parts are read together
    constexpr int TOGETHER = TOKENS < 32 ? 4 : 1;
    const int first = blockIdx.y + 1, row = blockIdx.x * gridDim.y;
    int count = 0;
    while (first_step(args, tiles_of_a, first + count) < tile_end) ++count;
    for (int i = threadIdx.x % 32; i < count; i += 32) wait_for(args.are_there + row + first + i);
    __syncwarp();
    for (int i = 0; i < count; i += TOGETHER) {
        float4 parts[TOGETHER][TOKENS / 8];
#pragma unroll
        for (int j = 0; j < TOGETHER; ++j)
#pragma unroll
            for (int k = 0; k < TOKENS / 8; ++k)
                parts[j][k] = i + j < count ? __ldcg(part_of(args, row + first + i + j) + k * THREADS) : float4{};
#pragma unroll
        for (int j = 0; j < TOGETHER; ++j)
#pragma unroll
            for (int k = 0; k < TOKENS / 8; ++k) {
                c[4 * k] += parts[j][k].x, c[4 * k + 1] += parts[j][k].y;
                c[4 * k + 2] += parts[j][k].z, c[4 * k + 3] += parts[j][k].w;
            }
    }
    sync_multipliers();
    for (int i = threadIdx.x; i < count; i += THREADS) args.are_there[row + first + i] = 0;
#else
    for (int block = blockIdx.y + 1; first_step(args, tiles_of_a, block) < tile_end; ++block) {
        const int other = blockIdx.x * gridDim.y + block;
        if (threadIdx.x % 32 == 0) wait_for(args.are_there + other);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i += 4) {
            const float4 part = __ldcg(part_of(args, other) + i / 4 * THREADS);
            c[i] += part.x, c[i + 1] += part.y, c[i + 2] += part.z, c[i + 3] += part.w;
        }
        sync_multipliers();
        if (threadIdx.x == 0) args.are_there[other] = 0;
    }
#endif
}

