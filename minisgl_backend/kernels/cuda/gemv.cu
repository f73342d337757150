// One token times a weight, fused with the operations around it as in `linear.cu`, for Hopper (sm_90a).
//
// A GEMV is bound by reading the weight, provided that codes become numbers fast enough (`gemv.cuh`). No shared memory,
// barrier or copy engine stands between memory and the MMAs here: a warp loads a batch of 16 rows of the weight
// straight to registers, 64 bytes of a row at a time, and its first batch before the kernels before this one end.
// The WARPS warps of a thread block share the in_features of the same 16 rows. Thread blocks are small and many, so
// while one multiplies, others load, and thread blocks of the next kernel start wherever one has ended.
//
// ADAPTED: the token may have a LoRA adapter, (x A^T) B^T. The first thread blocks each take 16 rows of A and a part of
// the in_features. They write each sum together with the number of the launch in one store, as in `linear.cu`. The
// first warp of every other thread block adds up the sums that it needs and multiplies them by 16 rows of B.
//
// Compiled with: SIZE (in_features, a multiple of 128), WARPS, COLUMNS (per batch), ADAPTED, GATED, GATE, RESIDUAL,
// HEADS (the size of a head, or 0; a cluster has one head) and, with HEADS, PAGE_SIZE and FP8. CODE, GROUP, SHARED_BY
// and ZEROS of the weight, and PER_PROCESSOR, are as in `linear.cu`.
//
// `gemv_ends.cuh` finishes the sums; `gemv_adapters.cuh` computes what an adapter adds to them.

#include "gates.cuh"
#include "gemv.cuh"
#include "heads.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int CLUSTER = HEADS ? HEADS / ROWS : 1;   // thread blocks
constexpr bool SCALED = GROUP && CODE != 4;         // the sums of columns are scaled
constexpr bool AT_ONCE = GATED || RESIDUAL;         // when the next kernel may start: see `linear.cu`
constexpr int MOST_SQUARES = 1024;
constexpr int RANK_STEP = 16;
constexpr int PIECE = 128, PIECES = 2;              // a warp has PIECES times PIECE in_features of A
constexpr int PARTS_OF_A = (SIZE + WARPS * PIECES * PIECE - 1) / (WARPS * PIECES * PIECE);

static_assert(SIZE % 128 == 0 && WARPS <= BATCHES && GATED + RESIDUAL + (HEADS > 0) <= 1, "");
static_assert(CODE || !ADAPTED, "");

// ADAPTED: the only token's adapter; see `kernels.adapters`
struct Adapters {
    const u16* a;           // [slots, columns, SIZE]
    const u16* b;           // [slots, out_features, max_rank]
    const u16* x;           // [SIZE], in the order of A
    const int* slot;        // 0: none
    const int* rank;        // 0: none
    u64 a_stride;           // of a slot
    u64 b_stride;
    int columns;            // projections * max_rank
    int max_rank;           // a multiple of RANK_STEP
    int second;             // the first output of the second projection
    int third;              // and of the third
    int blocks;             // thread blocks for A, a multiple of CLUSTER
    uint2* sums;            // [PARTS_OF_A, columns]: the sum over a part of the in_features, and the launch
    u32* launches;          // [thread blocks], launches of this kernel so far
};

struct Arguments {
    const u8* weight;       // codes [out_features, SIZE]
    const float* scales;    // as in `linear.cu`
    const float* row_scales;        // the same
    const u16* x;           // [SIZE]
    const float* squares;   // [square_tiles] of x before its norm's weight; null: no norm
    const u16* bias;        // [out_features], or null
    u16* out;               // [features]; RESIDUAL: the stream, which is also read; HEADS: queries
    u16* scaled;            // RESIDUAL: the stream times norm_weight
    const u16* norm_weight; // RESIDUAL: [features], of the norm that follows
    float* squares_out;     // RESIDUAL: [features / ROWS]
    int square_tiles;       // up to MOST_SQUARES
    int features;           // of the output
    float eps;
    Heads heads;
    Adapters adapters;
};

// Each thread block has one strip: 16 rows of the weight.
__device__ __forceinline__ int own_strip(const Arguments& args) {
    return blockIdx.x - (ADAPTED ? args.adapters.blocks : 0);
}

// ---- codes and scales

__device__ __forceinline__ u64 evict_first() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
    return policy;
}

// Loads codes that no other thread block reads. The L2 cache fetches 128 bytes, and their other half is read next.
// Volatile, so that the load stays where it is.
__device__ __forceinline__ uint4 load_codes(const u8* from, u64 policy) {
    uint4 out;
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w) : "l"(from), "l"(policy));
    return out;
}

// the scales of a batch, as words: [COLUMNS, LINES] for the rows of a warp
constexpr int LINES = ROWS / SHARED_BY;
constexpr int SCALES = GROUP ? BATCH / GROUP * LINES : 0;

// A warp's rows of the weight. The 4 lanes of the same lane / 4 = `row` have rows `row` and `row` + 8 or, if GATED, a
// row of the gate and the row that it opens.
struct Rows {
    const u8 *low, *high;   // this lane's 16 bytes of the first unit
    const float* scales;    // of the first group
    u64 policy;
    float* copied;          // scales of a batch, in shared memory

    __device__ __forceinline__ Rows(const Arguments& args, int strip, float* copied) : copied(copied) {
        const int lane = threadIdx.x % 32, row = lane / 4;
        low = args.weight + ((u64)strip * (GATED ? 8 : ROWS) + row) * ROW_BYTES + lane % 4 * 16;
        high = low + (GATED ? args.features : 8) * ROW_BYTES;
        // the scales of a group and 64 rows lie side by side, in the order of tiles
        scales = args.scales + (u64)(strip / 4) * (GROUP ? SIZE / GROUP : 0) * (64 / SHARED_BY) + strip % 4 * LINES;
        policy = evict_first();
    }

    // loads a batch: codes to registers, scales to shared memory
    __device__ __forceinline__ void read(uint4 (&codes)[UNITS][2], int batch) const {
        const u8* const from = low + (u32)batch * (UNITS * 64);
        const u8* const from_high = high + (u32)batch * (UNITS * 64);
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) {
            if (!WHOLE && batch * UNITS + unit >= SIZE / UNIT) {
                codes[unit][0] = codes[unit][1] = make_uint4(0, 0, 0, 0);
                continue;
            }
            codes[unit][0] = load_codes(from + unit * 64, policy);
            codes[unit][1] = load_codes(from_high + unit * 64, policy);
        }
        constexpr int AT_ONCE = LINES < 4 ? LINES : 4;
#pragma unroll
        for (int first = 0; first < SCALES; first += 32 * AT_ONCE) {
            const int i = first + threadIdx.x % 32 * AT_ONCE, group = i / LINES;
            const int at = batch * (SCALES / LINES) + group;
            if (i < SCALES && (WHOLE || at < SIZE / (GROUP ? GROUP : 1)))
                copy<4 * AT_ONCE>(copied + i, scales + at * (64 / SHARED_BY) + i % LINES);
        }
    }

    // the word of the scale of a group of the batch and one of this lane's two rows
    __device__ __forceinline__ u32 scale(int group, int row_8) const {
        const int row = threadIdx.x % 32 / 4 + 8 * row_8;
        return __float_as_uint(copied[group * LINES + row / SHARED_BY]);
    }
};

// Multiplies the batches of `warp`, the first of which is already being loaded. `sums`: of both rows of a lane.
__device__ __forceinline__ void multiply_batches(
    float (&sums)[2], const Rows& rows, uint4 (&codes)[UNITS][2], Column& column, const u16* x, int warp) {
    const int quarter = threadIdx.x % 4;
    bool more;
    int batch = warp;
    sums[0] = sums[1] = 0;
#pragma unroll 1
    do {
        __syncwarp();            // no wait for copies may move above the loads
        if (CODE == 4) wait_for_copies();
        float kept[2][2] = {};   // [row, column]: columns 2 * quarter and 2 * quarter + 1
        float c[4];
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) {
            if (unit % OF_COLUMN == 0)
#pragma unroll
                for (int i = 0; i < 4; ++i) c[i] = 0;
            u32 by[2][2] = {};
            if (CODE == 4 && (WHOLE || batch * UNITS + unit < SIZE / UNIT))
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    read_scales(by[i], [&](int group) { return rows.scale(unit * GROUPS + group, i); });
            multiply_unit(c, codes[unit], column.words[unit % OF_COLUMN], by);
            if (unit % OF_COLUMN < OF_COLUMN - 1) continue;
            const int first = unit / OF_COLUMN * OF_UNIT;   // this unit's first column
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const bool is_mine = OF_UNIT == 1 ? quarter == first / 2 && i % 2 == first % 2
                                                  : quarter >= first / 2 && quarter < (first + OF_UNIT) / 2;
                if (is_mine) kept[i / 2][i % 2] = c[i];
            }
        }
        float of_x[2] = {};
        if (SUBTRACTS) column.add_up(of_x);
        if (SCALED) wait_for_copies();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int column = 2 * quarter + i;
            const bool there = column < COLUMNS && (WHOLE || batch * COLUMNS + column < SIZE / SUM);
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                float sum = kept[row][i];
                const u32 scale = SCALED && there ? rows.scale(column, row) : 0;
                if (SUBTRACTS) sum -= zero_point(scale) * of_x[i];
                sums[row] += SCALED ? scale_of(scale) * sum : sum;
            }
        }
        batch += WARPS;
        more = BATCHES > WARPS && batch < BATCHES;
        if (more) {
            __syncwarp();   // all lanes have read the scales
            rows.read(codes, batch);
            column.read(x, batch);
        }
    } while (more);
    add_lanes(sums);
}

__device__ __forceinline__ float over_warp(float x) {
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) x += __shfl_xor_sync(ALL, x, lanes);
    return x;
}

__device__ __forceinline__ float rounded(float x) { return to_float((u16)pack(x, 0)); }

#include "gemv_ends.cuh"
#include "gemv_adapters.cuh"

// ---- the kernel

extern "C" __global__ void __launch_bounds__(THREADS, PER_PROCESSOR) gemv(const __grid_constant__ Arguments args) {
    __shared__ __align__(16) float scales[WARPS][SCALES ? SCALES : 1];
    __shared__ float parts[WARPS][ROWS], squares[MOST_SQUARES], of_squares[WARPS];
    __shared__ __align__(16) Ends of_rows;
    __shared__ __align__(16) float cos_sin[SIZE_OF_HEAD];
    __shared__ __align__(16) u16 of_norm[SIZE_OF_HEAD];
    __shared__ float of_cluster[CLUSTER][ROWS];   // in the first thread block: a head
    __shared__ int slot;
    const int strip = own_strip(args), in_cluster = strip % CLUSTER;
    const int lane = threadIdx.x % 32, quarter = lane % 4;
    const int warp = __shfl_sync(ALL, (int)threadIdx.x / 32, 0);   // tells the compiler: the same in all lanes
    const Head head{args.heads, strip / CLUSTER};
    const bool ends_head = HEADS && warp == 0 && in_cluster == 0;
    if (AT_ONCE) allow_next();
#if ADAPTED
    if (strip < 0) {
        leave_sums(args, warp, parts);
        return;
    }
#endif
    if (CLUSTER > 1) arrive_in_cluster<false>();
    const Rows rows(args, strip, scales[warp]);
    uint4 codes[UNITS][2];
    rows.read(codes, warp);
    if (warp == 0) of_rows.read_constants(args);
#if ADAPTED
    __shared__ __align__(16) u16 of_b[ROWS][RANK_STEP];
    const Expansion expand{args, of_b};
    if (warp == 0) expand.copy_b(0);
#endif

    wait_previous();
    if (!AT_ONCE) allow_next();   // all kernels before this one have ended
#if ADAPTED
    const u32 launch = warp == 0 ? __ldcg(args.adapters.launches + blockIdx.x) + 1 : 0;
#endif
    Column column;
    column.read(args.x, warp);
    if (args.squares)
#pragma unroll 1
        for (int i = threadIdx.x; i < args.square_tiles; i += THREADS) copy<4>(squares + i, args.squares + i);
    if (RESIDUAL && warp == 0) of_rows.read_stream(args);
    if (ends_head) head.read(cos_sin, of_norm, &slot);
    float sums[2];
    multiply_batches(sums, rows, codes, column, args.x, warp);
    if (quarter < 2) parts[warp][lane / 4 + 8 * quarter] = quarter ? sums[1] : sums[0];
    wait_for_copies();
    float square = 0;
    if (args.squares)   // what this thread has copied
#pragma unroll 1
        for (int i = threadIdx.x; i < args.square_tiles; i += THREADS) square += squares[i];
    square = over_warp(square);
    if (lane == 0) of_squares[warp] = square;
    __syncthreads();

    float value = 0;
    if (warp == 0) {   // lanes 0 to 15 have a row each, lanes 16 to 31 the same rows
        const int row = lane % ROWS, at = Ends::at(args, row / 8) + row % 8;
        square = 0;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) {
            value += parts[i][row];
            square += of_squares[i];
        }
        const float factor = args.squares ? rsqrtf(square * (1.0f / SIZE) + args.eps) : 1;
        const float scale = OF_ROWS ? of_rows.scale[row] : OF_SUMS;
#if ADAPTED
        value = factor * (value * scale + expand(launch));
#else
        value *= factor * scale;
#endif
        if (args.bias) value += to_float(of_rows.bias[row]);
        if (GATED) {
            const float behind = __shfl_down_sync(ALL, value, 8);   // what the gate opens
            if (lane < 8) args.out[at] = (u16)pack(opened<GATE>(value, behind), 0);
        } else if (RESIDUAL) {
            const u16 sum = (u16)pack(rounded(value) + to_float(of_rows.stream[row]), 0);
            const float as_read = to_float(sum);
            if (lane < ROWS) {
                args.out[at] = sum;
                args.scaled[at] = (u16)pack(as_read * to_float(of_rows.norm[row]), 0);
            }
            const float total = over_warp(lane < ROWS ? as_read * as_read : 0);
            if (lane == 0) args.squares_out[strip] = total;
        } else if (!HEADS && lane < ROWS) {
            args.out[at] = (u16)pack(value, 0);
        }
    }
    if (HEADS) {
        gather(of_cluster[in_cluster], rounded(value));
        if (ends_head) head.finish(args, of_cluster[0], cos_sin, of_norm, slot);
    }
#if ADAPTED
    if (threadIdx.x == 0) args.adapters.launches[blockIdx.x] = launch;
#endif
}
