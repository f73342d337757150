// Part of `gemv.cu`: how a thread block or a cluster finishes the sums of its rows.

#pragma once

// What a thread block needs to finish its rows.
struct Ends {
    float scale[ROWS];      // OF_ROWS
    u16 bias[ROWS];
    u16 norm[ROWS];         // RESIDUAL: the weight of the norm that follows
    u16 stream[ROWS];       // RESIDUAL

    // the first out_feature of rows 8 * `half` and on
    static __device__ __forceinline__ int at(const Arguments& args, int half) {
        const int strip = own_strip(args);
        return GATED ? strip * 8 + half * args.features : strip * ROWS + half * 8;
    }

    // what no kernel of a step writes
    __device__ __forceinline__ void read_constants(const Arguments& args) {
        const int lane = threadIdx.x;
        if (lane >= 2) return;
        const int from = at(args, lane), to = 8 * lane;
        if (args.bias) copy<16>(bias + to, args.bias + from);
        if (RESIDUAL) copy<16>(norm + to, args.norm_weight + from);
        if (OF_ROWS) {
            copy<16>(scale + to, args.row_scales + from);
            copy<16>(scale + to + 4, args.row_scales + from + 4);
        }
    }

    __device__ __forceinline__ void read_stream(const Arguments& args) {
        const int lane = threadIdx.x;
        if (lane < 2) copy<16>(stream + 8 * lane, args.out + at(args, lane));
    }
};

// ---- finishing a head, by one warp: a lane has ITEMS neighbouring numbers of each half

constexpr int SIZE_OF_HEAD = HEADS ? HEADS : 64, ITEMS = SIZE_OF_HEAD / 64;

struct Head {
    const Heads& heads;
    int head;

    // cosines and sines, the norm's weight and the slot, to shared memory
    __device__ __forceinline__ void read(float* cos_sin, u16* of_norm, int* slot) const {
        const int lane = threadIdx.x % 32;
        if (lane == 0) copy<4>(slot, heads.slots);
        if (norm() && lane < SIZE_OF_HEAD / 8) copy<16>(of_norm + 8 * lane, norm() + 8 * lane);
        if (!is_v() && lane < SIZE_OF_HEAD / 4)
            copy<16>(cos_sin + 4 * lane, heads.cos_sin + (u64)*heads.positions * SIZE_OF_HEAD + 4 * lane);
    }

    __device__ __forceinline__ const u16* norm() const {
        return is_v() ? nullptr : is_q() ? heads.q_weight : heads.k_weight;
    }
    __device__ __forceinline__ bool is_q() const { return head < heads.num_heads; }
    __device__ __forceinline__ bool is_v() const { return head >= heads.num_heads + heads.num_kv_heads; }

    __device__ __forceinline__ void store(u8* to, const float (&x)[ITEMS], int at, float scale) const {
        if (FP8) {
            const u16 both = pack_float8(x[0] * scale, x[ITEMS - 1] * scale);
            if (ITEMS == 2)
                *reinterpret_cast<u16*>(to + at) = both;
            else
                to[at] = (u8)both;
        } else if (ITEMS == 2) {
            *reinterpret_cast<u32*>(to + 2 * at) = pack(x[0], x[ITEMS - 1]);
        } else {
            *reinterpret_cast<u16*>(to + 2 * at) = (u16)pack(x[0], 0);
        }
    }

    // `from`: the head's numbers, in shared memory like what `read` has put there
    __device__ __forceinline__ void finish(
        const Arguments& args, const float* from, const float* cos_sin, const u16* of_norm, int slot) const {
        const int lane = threadIdx.x % 32;
        float low[ITEMS], high[ITEMS], square = 0;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            low[i] = from[lane * ITEMS + i];
            high[i] = from[SIZE_OF_HEAD / 2 + lane * ITEMS + i];
            square += low[i] * low[i] + high[i] * high[i];
        }
        if (norm()) {
            const float factor = rsqrtf(over_warp(square) / SIZE_OF_HEAD + args.eps);
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                low[i] *= factor * to_float(of_norm[lane * ITEMS + i]);
                high[i] *= factor * to_float(of_norm[SIZE_OF_HEAD / 2 + lane * ITEMS + i]);
            }
        }
        if (!is_v())
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                const float cos = cos_sin[lane * ITEMS + i], sin = cos_sin[SIZE_OF_HEAD / 2 + lane * ITEMS + i];
                const float turned = low[i] * cos - high[i] * sin;
                high[i] = high[i] * cos + low[i] * sin;
                low[i] = turned;
            }
        if (is_q()) {
            u16* const to = args.out + head * SIZE_OF_HEAD + lane * ITEMS;
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                to[i] = (u16)pack(low[i], 0);
                to[SIZE_OF_HEAD / 2 + i] = (u16)pack(high[i], 0);
            }
        } else if (slot >= 0) {
            u8* const to = (is_v() ? heads.values : heads.keys) + slot / PAGE_SIZE * heads.page_stride
                + slot % PAGE_SIZE * heads.slot_stride
                + (head - heads.num_heads) % heads.num_kv_heads * heads.head_stride;
            const float scale = FP8 ? 1 / *(is_v() ? heads.v_scale : heads.k_scale) : 1;
            store(to, low, lane * ITEMS, scale);
            store(to, high, SIZE_OF_HEAD / 2 + lane * ITEMS, scale);
        }
    }
};

// The first warp of each thread block of a cluster writes the numbers of its 16 rows to the first thread block's shared
// memory.
__device__ __forceinline__ void gather(const float* to, float x) {
    wait_for_cluster();   // all have begun
    if (threadIdx.x < ROWS) {
        const u32 first = in_block(shared_address(to + threadIdx.x), 0);
        asm volatile("st.shared::cluster.f32 [%0], %1;" :: "r"(first), "f"(x) : "memory");
    }
    __syncwarp();
    arrive_in_cluster<true>();
    wait_for_cluster();
}
