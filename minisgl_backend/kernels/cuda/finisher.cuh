// Part of `linear.cu`: finishes the sums of a tile. The contribution of LoRA adapters is added, each sum is scaled by
// its token's factor, and then the operations that follow the GEMM are done.

#pragma once

#include "numbered_words.cuh"

// ---- instructions

__device__ __forceinline__ void unpack(float (&to)[8], const uint4& from) {
    const u32 words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        to[2 * i] = __int_as_float(words[i] << 16);
        to[2 * i + 1] = __int_as_float(words[i] & 0xffff0000);
    }
}

__device__ __forceinline__ uint4 pack(const float (&from)[8]) {
    return make_uint4(pack(from[0], from[1]), pack(from[2], from[3]), pack(from[4], from[5]),
                      pack(from[6], from[7]));
}

__device__ __forceinline__ uint2 pack_float8(const float (&from)[8]) {
    u16 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = pack_float8(from[2 * i], from[2 * i + 1]);
    return make_uint2(pairs[0] | (u32)pairs[1] << 16, pairs[2] | (u32)pairs[3] << 16);
}

// Stores fragments of 8 features by 8 tokens as rows of 8 features, one row per token. Each of 8 lanes has the address
// of one row.
__device__ __forceinline__ void store_transposed(u32 to, u32 fragment) {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};"
                 :: "r"(to), "r"(fragment) : "memory");
}

__device__ __forceinline__ void store_transposed(u32 to, u32 first, u32 second) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
                 :: "r"(to), "r"(first), "r"(second) : "memory");
}

__device__ __forceinline__ uint4 load_8(const u16* from) { return *reinterpret_cast<const uint4*>(from); }

__device__ __forceinline__ void load_floats(float (&to)[8], const float* from) {
    const float4* const both = reinterpret_cast<const float4*>(from);
    const float4 low = both[0], high = both[1];
    to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
    to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
}

// ---- ADAPTED

constexpr int RANK_STEP = 16;   // of an MMA
constexpr int ALL_8 = OWN / 8;
// B is read ahead for AHEAD times 8 tokens
constexpr int AHEAD = ALL_8 % 4 == 0 ? 4 : ALL_8 % 3 == 0 ? 3 : ALL_8 % 2 == 0 ? 2 : 1;
constexpr bool HOLDS_B = ADAPTED && !EVEN;  // the first part of B is read before x is there

// Volatile, so that the load stays where it is.
__device__ __forceinline__ uint2 load_4(const u16* from) {
    uint2 out;
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(out.x), "=r"(out.y) : "l"(from));
    return out;
}

// JOINED: how often this thread block has run, which is the same for all. It is read once all kernels before this one
// have ended.
__device__ __forceinline__ u32* own_launches(const Arguments& args) {
    return args.adapters.launches + blockIdx.z * gridDim.y + blockIdx.y;
}

// Called by the warp that computes factors: prefetches what this thread block needs of B, in the order in which it is
// needed.
__device__ __forceinline__ void fetch_b(const Arguments& args, const Steps& steps) {
    const Adapters& of = args.adapters;
    const int lane = threadIdx.x % 32, first_token = blockIdx.x * TOKENS + blockIdx.z * OWN;
    const int tokens = min(OWN, args.num_rows - first_token);
    const int first = (EVEN ? steps.begin + TILE_STEPS - 1 : steps.begin) / TILE_STEPS;
    const int end = EVEN ? (steps.end + TILE_STEPS - 1) / TILE_STEPS : first + 1;
    for (int i = max(first, steps.tiles_of_a); i < end; ++i) {
        const int tile = steps.own_tile(i);
        const int features = WHOLE ? OUT : min(OUT, args.features - tile * OUT);
        for (int j = 0; j < tokens; j += 32) {
            const int own = j + lane < tokens ? of.slots[first_token + j + lane] : 0;
            const int before = __shfl_up_sync(ALL, own, 1);
            for (u32 others = __ballot_sync(ALL, own && (lane == 0 || own != before)); others; others &= others - 1) {
                const int slot = __shfl_sync(ALL, own, __ffs(others) - 1);
#pragma unroll
                for (int side = 0; side <= GATED; ++side) {
                    const u64 feature = tile * OUT + side * args.features;
                    const u16* const from = of.b + (slot - 1) * of.slot_stride + feature * of.max_rank;
                    for (int at = 64 * lane; at < features * of.max_rank; at += 64 * 32)
                        asm volatile("prefetch.global.L2 [%0];" :: "l"(from + at));
                }
            }
        }
    }
}

// ---- finishing: of ITEMS tokens of each slice, a thread has 8 features, or with HEADS 8 in each half of the head

struct Finisher {
    const Arguments& args;
    int tile, chunk, row, first_token;
    bool finishes;
    // read ahead
    uint4 norm_weight[2];   // of the norm that follows, or of the head's norm
    uint4 residual[ITEMS];
    int positions[ITEMS], slots[ITEMS];
    // ADAPTED
    int adapters[(OWN + 31) / 32];   // slots of every 32nd token of this thread block
    int ranks[(OWN + 31) / 32];
    int most_rank;          // the highest rank of this thread block's tokens
    uint2 b[AHEAD][2], b_8[AHEAD][2];   // for the first and the last of each 8 tokens

    __device__ __forceinline__ Finisher(const Arguments& args)
        : args(args), tile(0), chunk(threadIdx.x % CHUNKS), row(threadIdx.x / CHUNKS),
          first_token(blockIdx.x * TOKENS + blockIdx.z * OWN), finishes((int)blockIdx.z * OWN < TOKENS) {}

    __device__ __forceinline__ int token(int slice, int item) const {
        return first_token + slice * SLICE + item * ROWS + row;
    }
    __device__ __forceinline__ bool is_mine(int slice, int item) const {
        return finishes && item * ROWS + row < SLICE && token(slice, item) < args.num_rows && is_there(8 * chunk);
    }
    // Whether the weight has this row of the tile.
    __device__ __forceinline__ bool is_there(int feature) const {
        return WHOLE || tile * OUT + feature < args.features;
    }
    __device__ __forceinline__ u64 address(int slice, int item) const {
        return (u64)token(slice, item) * args.features + tile * OUT + 8 * chunk;
    }
    __device__ __forceinline__ bool is_q() const { return tile < args.heads.num_heads; }
    __device__ __forceinline__ bool is_v() const {
        return tile >= args.heads.num_heads + args.heads.num_kv_heads;
    }
    __device__ __forceinline__ const u16* of_head() const {   // the norm's weight
        return is_v() ? nullptr : is_q() ? args.heads.q_weight : args.heads.k_weight;
    }

    __device__ __forceinline__ void read_norm() {
        if (RESIDUAL && is_there(8 * chunk)) norm_weight[0] = load_8(args.norm_weight + tile * OUT + 8 * chunk);
        if (HEADS && of_head()) {
            norm_weight[0] = load_8(of_head() + 8 * chunk);
            norm_weight[1] = load_8(of_head() + FEATURES / 2 + 8 * chunk);
        }
    }

    __device__ __forceinline__ void read(int slice) {
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            if (!is_mine(slice, item)) continue;
            if (RESIDUAL) residual[item] = load_8(args.out + address(slice, item));
            if (HEADS) {
                positions[item] = args.heads.positions[token(slice, item)];
                slots[item] = args.heads.slots[token(slice, item)];
            }
        }
    }

    // ADAPTED: the tokens' adapters.
    __device__ __forceinline__ void read_adapters() {
        const Adapters& of = args.adapters;
        most_rank = 0;
#pragma unroll
        for (int i = 0; i < (OWN + 31) / 32; ++i) {
            const int at = 32 * i + (int)threadIdx.x % 32, token = first_token + at;
            const bool there = finishes && at < OWN && token < args.num_rows;
            adapters[i] = there ? of.slots[token] : 0;
            ranks[i] = there ? of.ranks[token] : 0;
            most_rank = max(most_rank, ranks[i]);
        }
        most_rank = __reduce_max_sync(ALL, most_rank);
    }

    // ADAPTED: the first of the two outputs whose B this thread has. The second is 8 later or, if GATED, the output
    // that the first one opens.
    __device__ __forceinline__ int feature() const {
        const int warp = threadIdx.x / 32, row = threadIdx.x % 32 / 4;
        const int feature = tile * OUT + (GATED ? 8 : 16) * warp + row;
        return WHOLE ? feature : min(feature, args.features - 9);   // B has nothing for rows that are not there
    }

    // ADAPTED: this thread's part of a RANK_STEP of B, for both of its outputs
    __device__ __forceinline__ void load_b(uint2& b, uint2& b_8, int slot, int rank) const {
        const Adapters& of = args.adapters;
        const u16* const from = of.b + (max(slot, 1) - 1) * of.slot_stride + (u64)feature() * of.max_rank + rank
            + 4 * (threadIdx.x % 4);
        b = load_4(from);
        b_8 = load_4(from + (GATED ? args.features : 8) * of.max_rank);
    }

    // ADAPTED: the slot of token `first` + `of_lane`; `first` is a multiple of 8
    __device__ __forceinline__ int slot_of(int first, int of_lane) const {
        return __shfl_sync(ALL, adapters[first / 32], first % 32 + of_lane);
    }

    // ADAPTED: reads B for AHEAD times 8 tokens from token 8 * `i` on.
    __device__ __forceinline__ void read_b(int i, int rank) {
#pragma unroll
        for (int j = 0; j < AHEAD; ++j)
#pragma unroll
            for (int end = 0; end < 2; ++end)
                load_b(b[j][end], b_8[j][end], slot_of(8 * (i + j), end ? 7 : 0), rank);
    }

    // ADAPTED: adds (x A^T) B^T to the sums of a warp, of 16 features or of 8 on each side of a gate. It takes 8 tokens
    // at a time, and among them those with the same adapter together. Tokens are mostly in the order of their adapters,
    // so 8 tokens rarely have adapters other than those of the first and the last. For these two, B is read ahead, for
    // several times 8 tokens.
    __device__ __forceinline__ void add_adapters(float* sums, u32 launch) {
        if (!finishes) return;
        const Adapters& of = args.adapters;
        const int lane = threadIdx.x % 32, row = lane / 4, quarter = lane % 4;
        if (CODE) {
            const int feature = this->feature();
            const float scale = OF_ROWS ? args.row_scales[feature] : OF_SUMS;
            const float scale_8 = OF_ROWS ? args.row_scales[GATED ? args.features + feature : feature + 8] : OF_SUMS;
#pragma unroll
            for (int i = 0; i < OWN / 2; ++i) sums[i] *= i % 4 / 2 ? scale_8 : scale;
        }
        const int projection = GATED ? 0 : (feature() >= of.second) + (feature() >= of.third);
#pragma unroll 1
        for (int rank = 0; rank < most_rank; rank += RANK_STEP) {
            const int column = projection * of.max_rank + rank + 4 * quarter;
#pragma unroll
            for (int i = 0; i < ALL_8; i += AHEAD) {
                int slots[AHEAD];   // of the column of the MMA
                uint2 x[AHEAD][GATED + 1];
                uint4 pairs[AHEAD][GATED + 1];
                const auto inner_at = [&](int j, int side) {
                    // a token without an adapter also reads something, which is not used
                    const int token = min(first_token + 8 * (i + j) + row, args.num_rows - 1);
                    return (u64)token * of.columns + side * of.max_rank + column;
                };
#pragma unroll
                for (int j = 0; j < AHEAD; ++j) {
                    slots[j] = slot_of(8 * (i + j), row);
#pragma unroll
                    for (int side = 0; side <= GATED; ++side)
                        if (JOINED) pairs[j][side] = load_numbered(of.pairs + inner_at(j, side) / 4);
                        else x[j][side] = load_4(of.inner + inner_at(j, side));
                }
                if (!HOLDS_B || rank + i > 0) read_b(i, rank);
                __syncwarp();   // no load may move below this: all are under way before the first is used
#pragma unroll
                for (int j = 0; j < AHEAD; ++j) {
                    if (JOINED)
#pragma unroll
                        for (int side = 0; side <= GATED; ++side) {
                            uint4& both = pairs[j][side];
                            while (__any_sync(ALL, slots[j] && (both.y != launch || both.w != launch)))
                                both = load_numbered(of.pairs + inner_at(j, side) / 4);
                            x[j][side] = make_uint2(both.x, both.z);
                        }
                    const auto add = [&](const uint2& low, const uint2& high, bool is_mine) {
                        const uint2 zero = make_uint2(0, 0), first = is_mine ? x[j][0] : zero;
                        float* const c = sums + 4 * (i + j);
                        if (GATED) {
                            const uint2 second = is_mine ? x[j][GATED] : zero;
                            add_product(c, low.x, 0, low.y, 0, first.x, first.y);
                            add_product(c, 0, high.x, 0, high.y, second.x, second.y);
                        } else {
                            add_product(c, low.x, high.x, low.y, high.y, first.x, first.y);
                        }
                    };
                    const int first = slot_of(8 * (i + j), 0), last = slot_of(8 * (i + j), 7);
                    if (first) add(b[j][0], b_8[j][0], slots[j] == first);
                    if (last && last != first) add(b[j][1], b_8[j][1], slots[j] == last);
                    u32 others = __ballot_sync(ALL, slots[j] && slots[j] != first && slots[j] != last);
                    while (others) {
                        const int slot = __shfl_sync(ALL, slots[j], __ffs(others) - 1);
                        uint2 other, other_8;
                        load_b(other, other_8, slot, rank);
                        add(other, other_8, slots[j] == slot);
                        others &= ~__ballot_sync(ALL, slots[j] == slot);
                    }
                }
            }
        }
    }

    // JOINED: the sums of a tile of A are x A^T. Within a warp's 16 columns and 8 tokens, lanes of neighbouring columns
    // exchange numbers so that each has a pair of columns of one token.
    __device__ __forceinline__ void leave_inner(const float* sums, u32 launch) const {
        if (!finishes) return;
        const Adapters& of = args.adapters;
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, odd = row % 2;
        uint2* const pairs = reinterpret_cast<uint2*>(of.pairs);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row_of_a = tile * FEATURES + 16 * warp + 8 * half + row;
            const int slot = row_of_a / of.columns + 1, column = row_of_a % of.columns;
#pragma unroll
            for (int i = 0; i < ALL_8; ++i) {
                const int in_8 = lane % 4 * 2 + odd;    // the token of this lane
                const float first = sums[4 * i + 2 * half], second = sums[4 * i + 2 * half + 1];
                const float other = __shfl_xor_sync(ALL, odd ? first : second, 4);
                const bool is_mine = slot_of(8 * i, in_8) == slot;
                const int rank = __shfl_sync(ALL, ranks[i / 4], 8 * i % 32 + in_8);
                const u32 pair = column % of.max_rank < rank ? pack(odd ? other : first, odd ? second : other) : 0;
                const u64 at = ((u64)(first_token + 8 * i + in_8) * of.columns + column) / 2;
                if (is_mine) store_numbered(pairs + at, pair, launch);
            }
        }
    }

    // Applies factors, bias and gate, and writes rows of bfloat16, one per token: `finished` [SLICE, PITCH].
    __device__ __forceinline__ void transpose(
        const float* sums, const float* factors, int slice, u8* finished) const {
        if (!finishes) return;
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const int in_tile = (GATED ? 8 : 16) * warp + lane / 4, feature = tile * OUT + in_tile;
        const bool has_bias = args.bias && is_there(in_tile), has_bias_8 = args.bias && is_there(in_tile + 8);
        const float bias = has_bias ? to_float(args.bias[feature]) : 0;
        const float bias_8 = has_bias_8 ? to_float(args.bias[GATED ? args.features + feature : feature + 8]) : 0;
        const bool scaled = OF_ROWS && !ADAPTED;
        const float of_sums = ADAPTED ? 1 : OF_SUMS;
        const float scale = scaled ? args.row_scales[feature] : of_sums;
        const float scale_8 = scaled ? args.row_scales[GATED ? args.features + feature : feature + 8] : of_sums;
        const u32 column = GATED ? 16 * warp : 32 * warp + lane / 8 % 2 * 16;   // in bytes
        const u32 to = shared_address(finished) + lane % 8 * PITCH + column;
#pragma unroll
        for (int i = 0; i < SLICE / 8; ++i) {
            const int token = slice * SLICE + 8 * i;
            const float* const factor = factors + blockIdx.z * OWN + token + lane % 4 * 2;
            float x[4];   // two features of two tokens
#pragma unroll
            for (int part = 0; part < 4; ++part)
                x[part] = sums[token / 2 + part] * (factor[part % 2] * (part / 2 ? scale_8 : scale))
                    + (part / 2 ? bias_8 : bias);
            if (GATED) {
                store_transposed(to + 8 * i * PITCH, pack(opened<GATE>(x[0], x[2]), opened<GATE>(x[1], x[3])));
            } else {
                store_transposed(to + 8 * i * PITCH, pack(x[0], x[1]), pack(x[2], x[3]));
            }
        }
    }

    // the sum over the threads that have the same token
    static __device__ __forceinline__ float over_token(float x) {
#pragma unroll
        for (int lanes = 1; lanes < CHUNKS; lanes *= 2) x += __shfl_xor_sync(ALL, x, lanes);
        return x;
    }

    __device__ __forceinline__ void finish_heads(int slice, const u8* finished) const {
        constexpr int HALF = FEATURES / 2;
        const Heads& heads = args.heads;
        float cos[ITEMS][8], sin[ITEMS][8];
        if (!is_v()) {
#pragma unroll
            for (int item = 0; item < ITEMS; ++item) {
                if (!is_mine(slice, item)) continue;
                const float* const from = heads.cos_sin + (u64)positions[item] * FEATURES + 8 * chunk;
                load_floats(cos[item], from);
                load_floats(sin[item], from + HALF);
            }
        }
        sync_multipliers();
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            const bool mine = is_mine(slice, item);
            float low[8] = {}, high[8] = {};
            if (mine) {
                const u8* const from = finished + (item * ROWS + row) * PITCH + 16 * chunk;
                unpack(low, *reinterpret_cast<const uint4*>(from));
                unpack(high, *reinterpret_cast<const uint4*>(from + 2 * HALF));
            }
            if (of_head()) {
                float square = 0, of_low[8], of_high[8];
#pragma unroll
                for (int i = 0; i < 8; ++i) square += low[i] * low[i] + high[i] * high[i];
                const float factor = rsqrtf(over_token(square) / FEATURES + args.eps);
                unpack(of_low, norm_weight[0]);
                unpack(of_high, norm_weight[1]);
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    low[i] *= factor * of_low[i];
                    high[i] *= factor * of_high[i];
                }
            }
            if (!mine) continue;
            if (!is_v()) {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const float rotated = low[i] * cos[item][i] - high[i] * sin[item][i];
                    high[i] = high[i] * cos[item][i] + low[i] * sin[item][i];
                    low[i] = rotated;
                }
            }
            if (is_q()) {
                u16* const to = args.out + address(slice, item);
                *reinterpret_cast<uint4*>(to) = pack(low);
                *reinterpret_cast<uint4*>(to + HALF) = pack(high);
            } else if (slots[item] >= 0) {
                constexpr int ITEM = FP8 ? 1 : 2;
                u8* const to = (is_v() ? heads.values : heads.keys) + slots[item] / PAGE_SIZE * heads.page_stride
                    + slots[item] % PAGE_SIZE * heads.slot_stride
                    + (tile - heads.num_heads) % heads.num_kv_heads * heads.head_stride + 8 * chunk * ITEM;
                if (FP8) {
                    const float inverse = 1 / *(is_v() ? heads.v_scale : heads.k_scale);
#pragma unroll
                    for (int i = 0; i < 8; ++i) low[i] *= inverse, high[i] *= inverse;
                    *reinterpret_cast<uint2*>(to) = pack_float8(low);
                    *reinterpret_cast<uint2*>(to + HALF) = pack_float8(high);
                } else {
                    *reinterpret_cast<uint4*>(to) = pack(low);
                    *reinterpret_cast<uint4*>(to + HALF * ITEM) = pack(high);
                }
            }
        }
    }

    // RESIDUAL: adds to the residual stream and prepares the norm that follows. Otherwise only stores the results.
    __device__ __forceinline__ void finish_features(int slice, const u8* finished) const {
        sync_multipliers();
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            const bool mine = is_mine(slice, item);
            uint4 result;
            if (mine) result = *reinterpret_cast<const uint4*>(finished + (item * ROWS + row) * PITCH + 16 * chunk);
            if (!RESIDUAL) {
                if (mine) *reinterpret_cast<uint4*>(args.out + address(slice, item)) = result;
                continue;
            }
            float square = 0;
            if (mine) {
                float value[8], stream[8], of_norm[8];
                unpack(value, result);
                unpack(stream, residual[item]);
                unpack(of_norm, norm_weight[0]);
#pragma unroll
                for (int i = 0; i < 8; ++i) value[i] += stream[i];
                const uint4 packed = pack(value);
                *reinterpret_cast<uint4*>(args.out + address(slice, item)) = packed;
                unpack(value, packed);   // as others will read it
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    square += value[i] * value[i];
                    value[i] *= of_norm[i];
                }
                *reinterpret_cast<uint4*>(args.scaled + address(slice, item)) = pack(value);
            }
            square = over_token(square);
            if (mine && chunk == 0)
                args.squares_out[(u64)tile * args.num_rows + token(slice, item)] = square;
        }
    }
};

