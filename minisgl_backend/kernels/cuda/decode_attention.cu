// Attention of decoding rows over their paged KV caches, for GPUs of compute capability 9 and later.
//
// Work is cut by bytes, not by rows ("stream-K", arXiv 2301.03598; for attention, arXiv 2405.10480): the tiles of all
// rows, of 16 or 32 positions each, form one sequence, and each thread block takes an equal run of it. So ragged
// lengths balance out, and the stream of loads never drains between rows. A row that is cut into several runs has a
// piece in each; the pieces are merged by their maxima and sums (arXiv 2205.14135). `plan_decode_attention` computes
// the runs (`decode_runs.cuh`), once per step for all layers.
//
// The run that has a row's first tiles merges the pieces, at its end. Later runs write their pieces as soon as they
// leave the row, without fences or counters (`empty_words.cuh`). All thread blocks of the grid fit on the GPU at once.
// Even if fewer of them run, the waiting ends: a thread block waits only for those of smaller index, which GPUs start
// first.
//
// The warps of a thread block take neighbouring KV heads of the same positions, since these lie side by side in memory.
// Each warp reads into its own ring in shared memory (cp.async) and waits for no other warp. Both GEMMs use tensor
// cores, with positions as the long side and the query heads of a KV head, at most 8, as the short side: S^T = K Q^T,
// then O^T += V^T P^T. float8 is converted to float16 in registers, on the way from shared memory. This needs no
// transposition, since the order of dimensions inside a fragment is free.
//
// With SPLIT, for few rows, the warps of a thread block have the same KV head and share the tiles that their run has of
// a row. Their results are merged in shared memory. So for a row of some hundred tokens no thread block waits for
// another, which would take as long as everything else.
//
// With SHARED, `kernels.shared_attention` has already attended the first positions of some rows, for several rows at
// once. The tiles of such a row begin after these positions, and its last step is to merge the partial results that
// it finds in `partials` and `sums`.
//
// Compiled with: HEAD_DIM (64, 128 or 256), GROUP (query heads per KV head), KV_HEADS, PAGE_SIZE (a multiple of 16),
// FP8, BFLOAT16 (type of q and out; otherwise float16), WARPS (per thread block; unless SPLIT, a divisor of KV_HEADS),
// STAGES (per ring), PER_PROCESSOR (thread blocks per multiprocessor), LEAVING (what a row costs besides its tiles, in
// tiles), LEAST (the fewest tiles of a run), PARTS (of 16 positions, per tile), COLUMNS (pairs of a fragment's columns
// that hold query heads, rounded up to 1, 2 or 4), WRITTEN (the most positions of a row that a step writes, which are
// its newest), SPLIT, SHARED, MOST_SLOTS (the most partial results of a row).

#include "empty_words.cuh"

constexpr int PART = 16;                                // positions of an MMA
constexpr int TILE = PARTS * PART;                      // positions
constexpr int HEADS = 8;                                // short side of the MMAs
constexpr int ROW_BYTES = HEAD_DIM * (FP8 ? 1 : 2);     // of one position's key or value
constexpr int CHUNKS = ROW_BYTES / 16;                  // what cp.async copies at once
constexpr int TILE_BYTES = TILE * ROW_BYTES;
constexpr int STAGE_BYTES = 2 * TILE_BYTES;             // keys, then values
constexpr int TURNS = KV_HEADS / (SPLIT ? 1 : WARPS);   // that it takes to go through a row's heads
constexpr int WAYS = SPLIT ? WARPS : 1;                 // among which a run's tiles are shared
constexpr int STEPS = HEAD_DIM / 16;                    // MMAs along or across HEAD_DIM
constexpr int SIDES = 4 / COLUMNS;                      // pieces that a warp merges side by side
constexpr int QUADS = STEPS + 1;                        // float4 of a lane's piece
constexpr float LOG2E = 1.4426950408889634f;

static_assert(HEAD_DIM == 64 || HEAD_DIM == 128 || HEAD_DIM == 256, "");
static_assert(GROUP <= HEADS && PAGE_SIZE % PART == 0, "");
static_assert(SPLIT ? !SHARED : KV_HEADS % WARPS == 0, "");

struct Arguments {
    u16* out;               // [batch, KV_HEADS * GROUP, HEAD_DIM]
    const u16* q;           // the same, rows q_stride apart
    const u8* keys;         // [num_pages, PAGE_SIZE, KV_HEADS, HEAD_DIM], strides in bytes
    const u8* values;
    const int* table;       // [num_rows, max_pages]
    const int* lengths;     // [batch]
    const int* rows;        // [batch], each query's row of the table; null: query i has row i
    const int4* runs;       // [1 + 2 * grid], see `plan_decode_attention`
    const float* k_scale;   // [1], or null
    const float* v_scale;
    const u16* sinks;       // [KV_HEADS * GROUP]: one more score per head, without a value; or null
    float4* pieces;         // [grid, WARPS / WAYS, QUADS, COLUMNS, 8], EMPTY between launches
    const int2* starts;     // [batch], if SHARED: where a row's own part begins, and its number of partials
    const int* slots;       // [batch, MOST_SLOTS]: the indices of its partials
    const float* partials;  // [.., KV_HEADS * GROUP, HEAD_DIM], not normalized
    const float2* sums;     // [.., KV_HEADS * GROUP]: maximum and sum
    u64 page_stride;
    u32 slot_stride;
    u32 head_stride;
    int q_stride;
    int table_stride;
    int window;             // positions seen, 0 for all
    float scale_log2;
};

// ---- instructions

// Few keys and values are read twice in a launch. So they leave the L2 cache first, and what kernels write for each
// other stays there.
__device__ __forceinline__ void copy_16(u32 to, const void* from, bool keep) {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;"
                 :: "r"(to), "l"(from), "r"(keep ? 16 : 0), "l"(policy) : "memory");
}

template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(u32 (&a)[4], u32 at) {
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at) : "memory");
}

template <int WORDS>
__device__ __forceinline__ void load_words(u32* to, u32 at) {
    static_assert(WORDS == 2 || WORDS == 4, "");
    if constexpr (WORDS == 4)
        asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at) : "memory");
    else
        asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(at) : "memory");
}

__device__ __forceinline__ u32 transpose(u32 matrix) {
    u32 out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(matrix));
    return out;
}

// float8 is multiplied as float16, to which e4m3 converts in one instruction and without loss
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if (BFLOAT16 && !FP8)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                     "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                     "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 pack(float low, float high, bool bfloat16) {
    u32 out;
    if (bfloat16)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

__device__ __forceinline__ float unpack(u16 bits) {
    float out;
    if (BFLOAT16) {
        asm("mov.b32 %0, %1;" : "=f"(out) : "r"((u32)bits << 16));
    } else {
        asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(bits));
    }
    return out;
}

// a pair in the type of q -> a pair of float16
__device__ __forceinline__ u32 to_float16(u32 pair) {
    return BFLOAT16 ? pack(unpack(pair & 0xffff), unpack(pair >> 16), false) : pair;
}

// two pairs of float8 -> two pairs of float16
__device__ __forceinline__ void widen(u32& low, u32& high, u32 word) {
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }"
        : "=r"(low), "=r"(high) : "r"(word));
}

__device__ __forceinline__ float exp2_of(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

__device__ __forceinline__ u32 largest_word(float4 quad) {
    return max(max(__float_as_uint(quad.x), __float_as_uint(quad.y)),
               max(__float_as_uint(quad.z), __float_as_uint(quad.w)));
}

template <class Combine>
__device__ __forceinline__ float over_positions(float x, Combine combine) {
    for (int lanes = 4; lanes < 32; lanes *= 2) x = combine(x, __shfl_xor_sync(ALL, x, lanes));
    return x;
}

#include "decode_runs.cuh"

// ---- places

// 16-byte chunks are spread so that neither copies nor fragments cause bank conflicts
__device__ __forceinline__ u32 chunk_at(int position, int chunk) {
    const int spread = CHUNKS >= 8 ? position & 7 : (position >> 1) & 3;
    return position * ROW_BYTES + ((chunk ^ spread) << 4);
}

// the dimension of the head that is row `row` (0 to 15) of fragment `step` of V^T
__device__ __forceinline__ int dimension(int step, int row) {
    if (FP8) return row % 8 * (HEAD_DIM / 8) + 2 * step + row / 8;
    return 16 * step + row;
}

// ---- the kernel

extern "C" __global__ void __launch_bounds__(WARPS * 32, PER_PROCESSOR)
decode_attention(const Arguments args) {
    extern __shared__ __align__(128) u8 rings[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int g = lane / 4, j = lane % 4;   // a fragment's row and pair of columns
    // This kernel starts when its predecessor does, which has waited for all kernels before it. What those wrote may be
    // read: everything but q and the newest positions of each row, at most WRITTEN.
    allow_next();
    bool waited = false;
    const auto wait_once = [&] {
        if (!waited) wait_previous();
        waited = true;
    };
    const int4* entry = args.runs + 1 + 2 * blockIdx.x;
    const int4 all = args.runs[0], own = entry[0], start = entry[1];
    if (blockIdx.x >= all.y || own.w == 0) return wait_once();   // so as not to end before its predecessor
    const u32 run = all.y - 1 - blockIdx.x;
    const Shares shares(all.x, all.y);
    const int way = SPLIT ? warp : 0;

    // Where a warp is in the run.
    struct Cursor {
        int query, turn;
        int first, stop;   // the run's tiles of this turn
        int tile, end;     // those of them that this warp still has to take
        int left;          // the run's tiles of later turns
        int tiles;         // of the query
        Span span;
        const int* pages;

        __device__ void enter(const Arguments& args, int row) {
            tiles = span.num_tiles(args.window);
            pages = args.table + (u64)row * args.table_stride;
        }
        __device__ void share_out(int from, int way) {
            first = from;
            const int count = min(tiles - first, left);
            stop = first + count;
            left -= count;
            tile = first + count * way / WAYS;
            end = first + count * (way + 1) / WAYS;
        }
        // there must be a next turn
        __device__ void enter_next(const Arguments& args, int way) {
            if (++turn == TURNS) {
                turn = 0;
                ++query;
                span = span_of(args.lengths, args.starts, query);
                enter(args, args.rows ? args.rows[query] : query);
            }
            share_out(0, way);
        }
        // moves to a turn that has a tile left, if there is one
        __device__ void seek(const Arguments& args, int way) {
            while (tile == end && left > 0) enter_next(args, way);
        }
        __device__ int position(const Arguments& args) const {
            return span.position(args.window, tile);
        }
        // the pages of the tile's first and last part
        __device__ int2 pages_of_tile(const Arguments& args) const {
            const int at = position(args), page = pages[at / PAGE_SIZE];
            return make_int2(page, PARTS == 1 ? page : pages[last_part(at, span.length) / PAGE_SIZE]);
        }
    };
    const auto kv_head_of = [&](const Cursor& of) { return SPLIT ? of.turn : of.turn * WARPS + warp; };
    Cursor at;
    at.query = own.x;
    at.turn = own.y;
    at.left = own.w;
    at.span = Span{start.x, SHARED ? args.starts[own.x].x : 0};
    at.enter(args, start.y);
    at.share_out(max(own.z - LEAVING, 0), way);
    u32 turn_begin = shares.begin(run) - own.z;   // in cost

    // loading is STAGES tiles ahead, and already knows the pages of the tile after those
    const u32 ring = shared_address(rings) + warp * STAGES * STAGE_BYTES;
    Cursor ahead = at;
    ahead.seek(args, way);
    int2 pages = make_int2(start.z, start.w);
    if (SPLIT && ahead.tile < ahead.end) pages = ahead.pages_of_tile(args);
    const auto load_next = [&](int stage) {
        if (ahead.tile < ahead.end) {
            const int position = ahead.position(args);
            const int length = ahead.span.length;
            if (position + TILE + WRITTEN > length) wait_once();
            const int first = first_seen(length, args.window);
            const int kv_head = kv_head_of(ahead);
            const u32 keys = ring + stage * STAGE_BYTES, values = keys + TILE_BYTES;
            const auto place = [&](int n) {   // where position n of the tile is
                return (n < PART ? pages.x : pages.y) * args.page_stride
                    + (position + n) % PAGE_SIZE * (u64)args.slot_stride + kv_head * args.head_stride;
            };
#pragma unroll
            for (int i = 0; i < PARTS * CHUNKS / 2; ++i) {
                const int n = (i * 32 + lane) / CHUNKS, chunk = (i * 32 + lane) % CHUNKS;
                const u64 from = place(n) + chunk * 16;
                // zeros in place of unseen positions, which may hold anything
                const bool seen = position + n >= first && position + n < length;
                copy_16(keys + chunk_at(n, chunk), args.keys + from, seen);
                copy_16(values + chunk_at(n, chunk), args.values + from, seen);
            }
            ++ahead.tile;
            ahead.seek(args, way);
            if (ahead.tile < ahead.end) pages = ahead.pages_of_tile(args);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    for (int stage = 0; stage < STAGES; ++stage) load_next(stage);

    const float scale = args.scale_log2 * (FP8 ? *args.k_scale : 1.0f);
    const float v_scale = FP8 ? *args.v_scale : 1.0f;
    u32 q[STEPS][2];             // Q^T, the fragments of this lane's query head g
    float o[STEPS][4];           // O^T: heads 2j and 2j + 1
    float best[2], total[2];     // of those two heads
    int stage = 0;
    // Code also has to come from memory. So if pieces of several runs are merged, there is a rehearsal while the kernel
    // before this one still runs. Its numbers may be anything, and do not count. (Wide heads are normalized and rotated
    // by a kernel of their own, which is too short for a rehearsal.)
    bool counts = !SPLIT || HEAD_DIM > 128 || start.z < 2;

    // dimension `i` of q[step], for 16-bit fragments or for those made from float8
    const auto q_dimension = [&](int step, int i) {
        return FP8 ? j * (HEAD_DIM / 4) + 4 * step + i : 16 * step + 2 * j + i / 2 * 8 + i % 2;
    };
    const auto enter_turn = [&] {
        const u16* head = args.q + (u64)at.query * args.q_stride
            + (kv_head_of(at) * GROUP + g) * HEAD_DIM;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const u32 low = g < GROUP ? *reinterpret_cast<const u32*>(head + q_dimension(step, 0)) : 0;
            const u32 high = g < GROUP ? *reinterpret_cast<const u32*>(head + q_dimension(step, 2)) : 0;
            q[step][0] = FP8 ? to_float16(low) : low;
            q[step][1] = FP8 ? to_float16(high) : high;
            for (int i = 0; i < 4; ++i) o[step][i] = 0;
        }
        best[0] = best[1] = NOTHING;
        total[0] = total[1] = 0;
    };

    const auto attend = [&] {
        const u32 keys = ring + stage * STAGE_BYTES, values = keys + TILE_BYTES;
        float s[PARTS][4];   // positions g and g + 8, heads 2j and 2j + 1
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
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
            for (int i = 0; i < 4; ++i) s[part][i] = (even[i] + odd[i]) * scale;
        }
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
        const auto larger = [](float x, float y) { return fmaxf(x, y); };
        float shrink[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float top = NOTHING;
            for (int part = 0; part < PARTS; ++part)
                top = fmaxf(top, fmaxf(s[part][h], s[part][h + 2]));
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
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const u32 p0 = transpose(pack(s[part][0], s[part][1], BFLOAT16 && !FP8));
            const u32 p1 = transpose(pack(s[part][2], s[part][3], BFLOAT16 && !FP8));
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
    };

    // Merges in a lane's part of a piece: quad `step` is o[step], the last quad its heads' `best` and `total`.
    const auto merge = [&](const float4 (&quads)[QUADS]) {
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
    };
    const auto place_of = [&](u32 block, int quad, int column) {
        const u64 piece = SPLIT ? block : block * WARPS + warp;
        return args.pieces + ((piece * QUADS + quad) * COLUMNS + column) * 8 + g;
    };
    const auto leave_piece = [&] {
        if (j >= COLUMNS || !counts) return;
        const auto leave = [&](int quad, float a, float b, float c, float d) {
            store_quad(place_of(blockIdx.x, quad, j),
                       make_float4(written(a), written(b), written(c), written(d)));
        };
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
            leave(step, o[step][0], o[step][1], o[step][2], o[step][3]);
        leave(STEPS, best[0], best[1], total[0], total[1]);
    };
    // A partial result of `kernels.shared_attention` for the heads of `column`, in the form of a piece.
    const auto load_partial = [&](float4 (&quads)[QUADS], int partial, int column) {
        const u64 heads = ((u64)partial * KV_HEADS + kv_head_of(at)) * GROUP;
        float4 sums = make_float4(NOTHING, NOTHING, 0, 0);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) quads[step] = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (2 * column + h >= GROUP) continue;
            const u64 head = heads + 2 * column + h;
            const float* from = args.partials + head * HEAD_DIM;
            const float2 of_head = __ldcg(args.sums + head);
            (h ? sums.y : sums.x) = of_head.x;
            (h ? sums.w : sums.z) = of_head.y;
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                (h ? quads[step].y : quads[step].x) = __ldcg(from + dimension(step, g));
                (h ? quads[step].w : quads[step].z) = __ldcg(from + dimension(step, g + 8));
            }
        }
        quads[STEPS] = sums;
    };
    // Merges in the pieces of the next runs and the partial results of shared positions. Lanes whose columns hold no
    // heads help: each of the SIDES sides takes every SIDES-th piece and, if SPLIT, each warp every WARPS-th of those.
    // The sides are merged at the end.
    const auto take_pieces = [&](int num_pieces, int num_partials) {
        const int side = j / COLUMNS, column = j % COLUMNS;
        if (side > 0) {
            best[0] = best[1] = NOTHING;
            total[0] = total[1] = 0;
#pragma unroll
            for (int step = 0; step < STEPS; ++step)
                for (int i = 0; i < 4; ++i) o[step][i] = 0;
        }
        float4 quads[QUADS];
        const auto are_there = [&] {
            u32 most = 0;
#pragma unroll
            for (int i = 0; i < QUADS; ++i) most = max(most, largest_word(quads[i]));
            return most != EMPTY;
        };
        const float empty = __uint_as_float(EMPTY);
#pragma unroll 1
        for (int n = way * SIDES + side; n < num_pieces; n += WAYS * SIDES) {
            const u32 block = blockIdx.x - 1 - n;
            do {
#pragma unroll
                for (int i = 0; i < QUADS; ++i) quads[i] = load_quad(place_of(block, i, column));
            } while (counts && !are_there());
            if (counts) {
#pragma unroll
                for (int i = 0; i < QUADS; ++i)
                    store_quad(place_of(block, i, column), make_float4(empty, empty, empty, empty));
            }
            merge(quads);
            if (!counts) break;
        }
        if constexpr (SHARED) {
            const int* slots = args.slots + at.query * MOST_SLOTS;
#pragma unroll 1
            for (int n = side; n < num_partials; n += SIDES) {
                load_partial(quads, slots[n], column);
                merge(quads);
            }
        }
        if (max(num_pieces, num_partials) == 1) return;   // side 0 has taken all
#pragma unroll 1
        for (int away = COLUMNS; away < 4; away *= 2) {
            const auto other = [&](float x) { return __shfl_xor_sync(ALL, x, away); };
#pragma unroll
            for (int step = 0; step < STEPS; ++step)
                quads[step] = make_float4(other(o[step][0]), other(o[step][1]),
                                          other(o[step][2]), other(o[step][3]));
            quads[STEPS] = make_float4(other(best[0]), other(best[1]), other(total[0]), other(total[1]));
            merge(quads);
        }
    };
    // If SPLIT, the first warp merges in what the others have.
    const auto merge_warps = [&] {
        float4* const theirs = reinterpret_cast<float4*>(rings + WARPS * STAGES * STAGE_BYTES) + lane;
        const auto quad_of = [&](int other, int quad) { return theirs + ((other - 1) * QUADS + quad) * 32; };
        __syncthreads();   // the previous turn has been read
        if (warp > 0) {
#pragma unroll
            for (int step = 0; step < STEPS; ++step)
                *quad_of(warp, step) = make_float4(o[step][0], o[step][1], o[step][2], o[step][3]);
            *quad_of(warp, STEPS) = make_float4(best[0], best[1], total[0], total[1]);
        }
        __syncthreads();
        if (warp > 0) return;
#pragma unroll 1
        for (int other = 1; other < WARPS; ++other) {
            float4 quads[QUADS];
#pragma unroll
            for (int i = 0; i < QUADS; ++i) quads[i] = *quad_of(other, i);
            merge(quads);
        }
    };
    const auto leave_turn = [&] {
        for (int h = 0; h < 2; ++h)
            total[h] = over_positions(total[h], [](float x, float y) { return x + y; });
        const bool is_first = at.first == 0;
        if (!SPLIT && !is_first) return leave_piece();
        int num_pieces = 0;
        if (is_first && at.stop < at.tiles)
            num_pieces = SPLIT ? start.z : shares.owner(turn_begin + LEAVING + at.tiles - 1) - run;
        const int num_partials = SHARED ? args.starts[at.query].y : 0;
        if (num_pieces + num_partials > 0) take_pieces(num_pieces, num_partials);
        if (SPLIT) {
            merge_warps();
            if (warp > 0) return;
            if (!is_first) return leave_piece();
        }
        u16* out = args.out + (u64)(at.query * KV_HEADS + kv_head_of(at)) * GROUP * HEAD_DIM;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int head = 2 * j + h;
            if (head >= GROUP) continue;
            float sum = total[h];
            if (args.sinks) {
                const u16 sink = args.sinks[kv_head_of(at) * GROUP + head];
                sum += exp2_of(unpack(sink) * LOG2E - best[h]);
            }
            const float factor = v_scale / sum;
            if (!counts) continue;
#pragma unroll
            for (int step = 0; step < STEPS; ++step)
                for (int half = 0; half < 2; ++half)
                    out[head * HEAD_DIM + dimension(step, g + 8 * half)]
                        = (u16)pack(o[step][h + 2 * half] * factor, 0, BFLOAT16);
        }
    };

    if (counts) wait_once();
    for (;;) {
        enter_turn();
        while (at.tile < at.end) {
            if (counts) asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 1) : "memory");
            __syncwarp();
            attend();
            if (!counts) break;
            __syncwarp();
            load_next(stage);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            ++at.tile;
        }
        leave_turn();
        if (!counts) {   // the same turn again, for real
            counts = true;
            wait_once();
            continue;
        }
        if (at.left == 0) break;
        turn_begin += at.tiles + LEAVING;
        at.enter_next(args, way);
    }
}
