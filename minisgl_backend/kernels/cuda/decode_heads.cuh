// Part of `decode_attention.cu`: the query heads of a KV head, and how they attend a tile. Knows neither runs nor where
// results go.

#pragma once

#include "decode_runs.cuh"
#include "decode_tile.cuh"
#include "fragments.cuh"

// ---- numbers. float8 is multiplied as float16, to which e4m3 converts in one instruction and without loss.

__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if (BFLOAT16 && !FP8) add_product(c, a[0], a[1], a[2], a[3], b0, b1);
    else add_product_float16(c, a[0], a[1], a[2], a[3], b0, b1);
}

__device__ __forceinline__ float unpack(u16 bits) { return BFLOAT16 ? to_float(bits) : from_float16(bits); }

// a pair in the type of q -> a pair of float16
__device__ __forceinline__ u32 to_float16(u32 pair) {
    return BFLOAT16 ? pack_float16(unpack(pair & 0xffff), unpack(pair >> 16)) : pair;
}

__device__ __forceinline__ float exp2_of(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

template <class Combine>
__device__ __forceinline__ float over_positions(float x, Combine combine) {
    for (int lanes = 4; lanes < 32; lanes *= 2) x = combine(x, __shfl_xor_sync(ALL, x, lanes));
    return x;
}

// ---- heads

// What a lane has of them during a turn.
struct QueryHeads {
    int lane;
    int g, j;                    // its row and pair of columns in a fragment
    u32 q[STEPS][2];             // Q^T, the fragments of this lane's query head g
    float o[STEPS][4];           // O^T: heads 2j and 2j + 1
    float best[2], total[2];     // of those two heads

    __device__ __forceinline__ QueryHeads() : lane(threadIdx.x % 32), g(lane / 4), j(lane % 4) {}

    // Reads the queries of a turn.
    __device__ __forceinline__ void enter(const Arguments& args, const Cursor& at) {
        const u16* head = args.q + (u64)at.query * args.q_stride + (at.kv_head() * GROUP + g) * HEAD_DIM;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            u32 low = 0, high = 0;
            if (g < GROUP) {
                low = *reinterpret_cast<const u32*>(head + q_dimension(step, 0, j));
                high = *reinterpret_cast<const u32*>(head + q_dimension(step, 2, j));
            }
            q[step][0] = FP8 ? to_float16(low) : low;
            q[step][1] = FP8 ? to_float16(high) : high;
        }
        clear();
    }

    // as if nothing had been attended
    __device__ __forceinline__ void clear() {
        best[0] = best[1] = NOTHING;
        total[0] = total[1] = 0;
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
            for (int i = 0; i < 4; ++i) o[step][i] = 0;
    }

    // Attends the tile `at` whose keys are at `keys` in shared memory, and its values behind them.
    __device__ __forceinline__ void attend(const Arguments& args, const Cursor& at, u32 keys, float scale) {
        const u32 values = keys + TILE_BYTES;
        float s[PARTS][4];   // positions g and g + 8, heads 2j and 2j + 1
#pragma unroll
        for (int part = 0; part < PARTS; ++part) score(s[part], keys, part, scale);
        leave_out_unseen(s, args, at);
        soften(s);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) add_values(s[part], values, part);
    }

    // s = S^T of a part, in units of log 2
    __device__ __forceinline__ void score(float (&s)[4], u32 keys, int part, float scale) const {
        float even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};   // two chains take half the time
        if (FP8) {
            constexpr int PER_LANE = HEAD_DIM / 64;   // chunks of a position
#pragma unroll
            for (int c = 0; c < PER_LANE; ++c) {
                const int n = part * PART + g, chunk = j * PER_LANE + c;
                u32 upper[4], lower[4];
                load_words<4>(upper, keys + chunk_at(n, chunk));
                load_words<4>(lower, keys + chunk_at(n + 8, chunk));
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    u32 a[4];
                    widen(a[0], a[2], upper[w]);
                    widen(a[1], a[3], lower[w]);
                    multiply(w % 2 ? odd : even, a, q[c * 4 + w][0], q[c * 4 + w][1]);
                }
            }
        } else {
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                u32 a[4];
                const int n = part * PART + lane % 16;
                load_matrices<false>(a, keys + chunk_at(n, 2 * step + lane / 16));
                multiply(step % 2 ? odd : even, a, q[step][0], q[step][1]);
            }
        }
        for (int i = 0; i < 4; ++i) s[i] = (even[i] + odd[i]) * scale;
    }

    __device__ __forceinline__ void leave_out_unseen(
        float (&s)[PARTS][4], const Arguments& args, const Cursor& at) const {
        const int length = at.span.length;
        const int position = at.position(args), first = first_seen(length, args.window);
        if (position < first || position + TILE > length) {
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
                for (int i = 0; i < 4; ++i) {
                    const int n = position + part * PART + g + i / 2 * 8;
                    if (n < first || n >= length) s[part][i] = NOTHING;
                }
        }
    }

    // Turns scores into weights, relative to the best score so far, to which `o` and `total` are adjusted.
    __device__ __forceinline__ void soften(float (&s)[PARTS][4]) {
        const auto larger = [](float x, float y) { return fmaxf(x, y); };
        float shrink[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float top = NOTHING;
            for (int part = 0; part < PARTS; ++part) top = fmaxf(top, fmaxf(s[part][h], s[part][h + 2]));
            top = fmaxf(best[h], over_positions(top, larger));
            shrink[h] = exp2_of(best[h] - top);
            best[h] = top;
            total[h] *= shrink[h];
            for (int part = 0; part < PARTS; ++part)
                for (int i = h; i < 4; i += 2) {
                    s[part][i] = exp2_of(s[part][i] - top);
                    total[h] += s[part][i];
                }
        }
        if (__any_sync(ALL, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
            for (int step = 0; step < STEPS; ++step)
                for (int i = 0; i < 4; ++i) o[step][i] *= shrink[i % 2];
        }
    }

    // o += V^T P^T of a part, whose weights are `p`
    __device__ __forceinline__ void add_values(const float (&p)[4], u32 values, int part) {
        const auto packed = [](float low, float high) {
            return BFLOAT16 && !FP8 ? pack(low, high) : pack_float16(low, high);
        };
        const u32 p0 = transposed(packed(p[0], p[1])), p1 = transposed(packed(p[2], p[3]));
        if (FP8) {
            constexpr int WORDS = HEAD_DIM / 32;      // in the g-th part of a position's value
            u32 v[4][WORDS];                          // positions 2j, 2j + 1, 2j + 8, 2j + 9
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int n = part * PART + 2 * j + i % 2 + i / 2 * 8, byte = g * (HEAD_DIM / 8);
                constexpr int AT_ONCE = WORDS < 4 ? WORDS : 4;
#pragma unroll
                for (int w = 0; w < WORDS; w += AT_ONCE)
                    load_words<AT_ONCE>(v[i] + w, values + chunk_at(n, (byte + 4 * w) / 16) + byte % 16);
            }
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                const u32 pick = step % 2 ? 0x7362 : 0x5140;   // bytes of two positions alternate
                u32 a[4];
                widen(a[0], a[1], __byte_perm(v[0][step / 2], v[1][step / 2], pick));
                widen(a[2], a[3], __byte_perm(v[2][step / 2], v[3][step / 2], pick));
                multiply(o[step], a, p0, p1);
            }
        } else {
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                u32 a[4];
                const int n = part * PART + lane / 16 * 8 + lane % 8;
                load_matrices<true>(a, values + chunk_at(n, 2 * step + lane / 8 % 2));
                multiply(o[step], a, p0, p1);
            }
        }
    }

    // A lane's part of a piece, in QUADS: quad `step` is o[step], the last quad its heads' `best` and `total`.
    __device__ __forceinline__ float4 quad(int i) const {
        if (i < STEPS) return make_float4(o[i][0], o[i][1], o[i][2], o[i][3]);
        return make_float4(best[0], best[1], total[0], total[1]);
    }

    __device__ __forceinline__ void merge(const float4 (&quads)[QUADS]) {
        const float4 sums = quads[STEPS];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float its_best = h ? sums.y : sums.x, top = fmaxf(best[h], its_best);
            const float keep = best[h] == top ? 1.0f : exp2_of(best[h] - top);   // both may be NOTHING
            const float more = its_best == top ? 1.0f : exp2_of(its_best - top);
            best[h] = top;
            total[h] = total[h] * keep + (h ? sums.w : sums.z) * more;
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                o[step][h] = o[step][h] * keep + (h ? quads[step].y : quads[step].x) * more;
                o[step][h + 2] = o[step][h + 2] * keep + (h ? quads[step].w : quads[step].z) * more;
            }
        }
    }
};
