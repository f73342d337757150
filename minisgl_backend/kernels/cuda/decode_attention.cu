// Attention of decoding rows over their paged KV caches, for GPUs of compute capability 9 and later.
//
// Work is cut by bytes, not by rows ("stream-K", arXiv 2301.03598; for attention, arXiv 2405.10480): the tiles of all
// rows, of 16 or 32 positions each, form one sequence, and each thread block takes an equal run of it. So ragged
// lengths balance out, and the stream of loads never drains between rows. A row that is cut into several runs has a
// piece in each; the pieces are merged by their maxima and sums (arXiv 2205.14135). `plan_decode_attention` computes
// the runs (`decode_plan.cuh`), once per step for all layers.
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

// What a warp needs, from bottom to top: where it is in its run (`decode_runs.cuh`), its ring of keys and values
// (`decode_ring.cuh`), the heads that attend them (`decode_heads.cuh`), and how a turn ends (`decode_pieces.cuh`).
#include "decode_pieces.cuh"
#include "decode_plan.cuh"
#include "decode_ring.cuh"

extern "C" __global__ void __launch_bounds__(WARPS * 32, PER_PROCESSOR)
decode_attention(const Arguments args) {
    extern __shared__ __align__(128) u8 rings[];
    QueryHeads heads;
    // This kernel starts when its predecessor does, which has waited for all kernels before it. What those wrote may be
    // read: everything but q and the newest positions of each row, at most WRITTEN.
    allow_next();
    Predecessor predecessor;
    const int4* entry = args.runs + 1 + 2 * blockIdx.x;
    const int4 all = args.runs[0], own = entry[0], start = entry[1];
    if (blockIdx.x >= all.y || own.w == 0) return predecessor.wait();   // so as not to end before it
    Cursor at(args, own, start);
    Ring ring(args, rings, at, start);
    for (int stage = 0; stage < STAGES; ++stage) ring.load_next(args, stage, predecessor);

    Run run(all, own, start);
    const float scale = args.scale_log2 * (FP8 ? *args.k_scale : 1.0f);
    const float v_scale = FP8 ? *args.v_scale : 1.0f;
    int stage = 0;
    // Code also has to come from memory. So if pieces of several runs are merged, there is a rehearsal while the kernel
    // before this one still runs. Its numbers may be anything, and do not count. (Wide heads are normalized and rotated
    // by a kernel of their own, which is too short for a rehearsal.)
    bool counts = !SPLIT || HEAD_DIM > 128 || start.z < 2;

    if (counts) predecessor.wait();
    for (;;) {
        heads.enter(args, at);
        while (at.tile < at.end) {
            if (counts) wait_copies<STAGES - 1>();
            __syncwarp();
            heads.attend(args, at, ring.stage(stage), scale);
            if (!counts) break;
            __syncwarp();
            ring.load_next(args, stage, predecessor);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            ++at.tile;
        }
        leave_turn(args, at, heads, run, rings, v_scale, counts);
        if (!counts) {   // the same turn again, for real
            counts = true;
            predecessor.wait();
            continue;
        }
        if (at.left == 0) break;
        run.leave_turn(at.tiles);
        at.enter_next(args);
    }
}
