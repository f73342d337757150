// Gated DeltaNet for decode steps: the convolution and the delta rule for one token per row (kernels/gated_delta.py),
// for Hopper (sm_90a). Heads have 128 dimensions, of keys and of values.
//
// States are copied as a whole to a ring in shared memory, so that memory does not wait for arithmetic. The warps of a
// thread block, of which each multiprocessor has one, are
//
//     producer     one thread, which fills the ring with states and pending corrections
//     preparers    compute the convolution, keys, queries, and what the query and the key read of pending corrections
//     consumers    read the state, and write it if this token's correction is the last that may be pending
//
// A tile is a head of a row. Tiles whose heads share a key follow each other in a thread block. So the key is computed
// once, and no other thread block replaces its inputs of the convolution.
//
// Compiled with: KEY_HEADS, HEADS, WIDTH (of the convolution), EVERY (`WHOLE_EVERY`), KIND (of states: 0 float32, 1
// bfloat16, 2 float16), STAGES of the ring, GROUPS of preparers and SHARED_BYTES. All other values are bfloat16.

#include "hopper.cuh"

constexpr int N = 128;                              // dimensions of a key, and of a value
constexpr int CONSUMERS = 256, PREPARERS = 128;     // threads; there are GROUPS of preparers
constexpr int SHARING = HEADS / KEY_HEADS;          // heads that share a key
constexpr int COLUMNS = KIND == 0 ? 1 : 2;          // of a state, that a consumer reads: 4 bytes
constexpr int LANES = N / COLUMNS;                  // consumers that read a row of a state
constexpr int PARTS = CONSUMERS / LANES;            // in which the rows are read
constexpr int ROWS = N / PARTS;
constexpr int STATE_BYTES = N * N * 4 / COLUMNS;
constexpr int LINE = N * 4;                         // bytes of a vector in float32
constexpr int TAPS = WIDTH - 1;                     // inputs that the convolution keeps
constexpr int PAST = EVERY - 1;                     // corrections that may be pending before a token

// A stage of the ring: the state, keys and corrections by place, logs of decays by place, and what preparers compute.
constexpr int AT_KEYS = STATE_BYTES;
constexpr int AT_NEW = AT_KEYS + PAST * LINE;
constexpr int AT_DECAYS = AT_NEW + PAST * LINE;
constexpr int AT_READY = AT_DECAYS + EVERY * 4;
struct Ready {
    float q[N], k[N], v[N];     // q and k have unit length, q times the scale
    float gate[N];              // of the output, times the norm's weight
    // by place: how much of a correction is left, and how much of it the key and the query read
    float left[EVERY], alike[EVERY], asked[EVERY];
    float decay;                // since the state was written
    float rate;
    float q_k;
    int begin;                  // the first place of a pending correction
    int place;                  // of this token's
    int padding[3];
};
constexpr int STAGE_BYTES = AT_READY + sizeof(Ready);
static_assert(STAGE_BYTES % 16 == 0, "");

// What a thread block has once: sums of parts by turn, sums of warps, the token's correction, barriers of each stage.
// A barrier tells only a phase from the next one. So each group of preparers, which do not see the tiles of the others,
// has barriers of its own.
struct Shared {
    float known[2][PARTS][N], found[2][PARTS][N];
    float squares[2][4];
    float lengths[GROUPS][4][3];
    float correction[N];
    u64 full[STAGES], early[STAGES], empty[STAGES];     // `early`: all but the state is there
    u64 begun[GROUPS][STAGES];      // a group's next tile of this stage is being loaded, and may be prepared
};
static_assert(STAGES * STAGE_BYTES + sizeof(Shared) <= SHARED_BYTES, "");

struct Arguments {
    u16* out;               // [num_rows, HEADS, N]
    const u16* x;           // [num_rows, channels]: queries and keys of KEY_HEADS, values of HEADS
    const u16* z;           // [num_rows, HEADS * N]
    const u16* a;           // [num_rows, HEADS]
    const u16* b;           // [num_rows, HEADS]
    const u16* conv;        // [channels, WIDTH]
    const u16* log_rates;   // [HEADS]
    const u16* biases;      // [HEADS]
    const u16* norm;        // [N]
    u16* inputs;            // by slot: [channels, TAPS]
    u8* states;             // by slot: [HEADS, N, N]
    float* keys;            // [slots, KEY_HEADS, EVERY, N]
    float* corrections;     // [slots, HEADS, EVERY, N]
    float* decays;          // [slots, HEADS, EVERY]
    int* begins;            // [slots, HEADS]
    const long long* slots;         // [num_rows]; -1 for a row that is left to others
    const int* positions;           // [num_rows]
    long long x_stride, z_stride, a_stride, b_stride, inputs_stride;    // in elements
    long long states_stride;                                            // in bytes
    int num_rows;
    float eps;
};

// ---- instructions

__device__ __forceinline__ void meet(int id, int threads) {
    asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void store_bytes(void* to, u32 from, u32 count) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
                 "cp.async.bulk.commit_group;" :: "l"(to), "r"(from), "r"(count) : "memory");
}

// until shared memory may be written again
__device__ __forceinline__ void wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

__device__ __forceinline__ void wait_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

__device__ __forceinline__ u16 rounded(float x) { return (u16)pack(x, 0); }

__device__ __forceinline__ float silu(float x) { return x / (1 + expf(-x)); }

template <int COUNT>
__device__ __forceinline__ void sum_warp(float (&x)[COUNT]) {
#pragma unroll
    for (int step = 16; step; step /= 2)
#pragma unroll
        for (int i = 0; i < COUNT; ++i) x[i] += __shfl_xor_sync(ALL, x[i], step);
}

// ---- states in shared memory, of which a thread reads and writes words

__device__ __forceinline__ void unpack(float (&x)[COLUMNS], u32 word) {
#if KIND == 0
    x[0] = __uint_as_float(word);
#elif KIND == 1
    x[0] = __uint_as_float(word << 16), x[1] = __uint_as_float(word & 0xffff0000);
#else
    x[0] = from_float16((u16)word), x[1] = from_float16((u16)(word >> 16));
#endif
}

// float16 is clamped to 65,504, and NaN stays NaN
__device__ __forceinline__ u32 packed(const float (&x)[COLUMNS]) {
#if KIND == 0
    return __float_as_uint(x[0]);
#elif KIND == 1
    return pack(x[0], x[1]);
#else
    const auto clamped = [](float x) { return x != x ? x : fminf(fmaxf(x, -65504), 65504); };
    return pack_float16(clamped(x[0]), clamped(x[1]));
#endif
}

// ---- the tiles of a thread block, which all its threads walk through

struct Tile {
    long long row, slot;
    int key_head, head;     // `head` is one of those that share the key
    int place;
    int number;             // in the order of the thread block

    __device__ __forceinline__ int stage() const { return number % STAGES; }
    __device__ __forceinline__ u32 parity() const { return number / STAGES & 1; }
    __device__ __forceinline__ int group() const { return number / SHARING % GROUPS; }   // that prepares it
};

__device__ __forceinline__ u8* state_of(const Arguments& args, const Tile& tile) {
    return args.states + tile.slot * args.states_stride + (long long)tile.head * STATE_BYTES;
}

// Calls `begin` for the first of the tiles that share a key, and `take` for each tile.
template <class Begin, class Take>
__device__ __forceinline__ void walk(const Arguments& args, const Begin& begin, const Take& take) {
    Tile tile{};
    for (int unit = blockIdx.x; unit < args.num_rows * KEY_HEADS; unit += gridDim.x) {
        tile.row = unit / KEY_HEADS, tile.key_head = unit % KEY_HEADS, tile.head = tile.key_head * SHARING;
        tile.slot = args.slots[tile.row];
        if (tile.slot < 0) continue;
        tile.place = args.positions[tile.row] % EVERY;
        begin(tile);
        for (int i = 0; i < SHARING; ++i, ++tile.head, ++tile.number) take(tile);
    }
}

// ---- the producer

__device__ __forceinline__ void produce(const Arguments& args, u32 ring, Shared& once) {
    walk(args, [](const Tile&) {}, [&](const Tile& tile) {
        const u32 stage = ring + tile.stage() * STAGE_BYTES;
        const u32 early = shared_address(once.early + tile.stage()), full = shared_address(once.full + tile.stage());
        if (tile.number >= STAGES) wait_barrier(shared_address(once.empty + tile.stage()), tile.parity() ^ 1);
        arrive(shared_address(once.begun[tile.group()] + tile.stage()));
        const long long of_key = tile.slot * KEY_HEADS + tile.key_head, of_head = tile.slot * HEADS + tile.head;
        const u32 bytes = tile.place * LINE;
        expect_bytes(early, EVERY * 4 + 2 * bytes);
        load_bytes(stage + AT_DECAYS, args.decays + of_head * EVERY, EVERY * 4, early);
        if (bytes) {
            load_bytes(stage + AT_KEYS, args.keys + of_key * EVERY * N, bytes, early);
            load_bytes(stage + AT_NEW, args.corrections + of_head * EVERY * N, bytes, early);
        }
        expect_bytes(full, STATE_BYTES);
        load_bytes(stage, state_of(args, tile), STATE_BYTES, full);
    });
}

// ---- the preparers, each with one dimension; their groups take turns

// A channel's convolution: the inputs it keeps, and the weights.
struct Channel {
    u16* kept;
    u16 old[TAPS];
    float begun, own;

    __device__ __forceinline__ Channel(const Arguments& args, long long slot, int channel)
        : kept(args.inputs + slot * args.inputs_stride + channel * TAPS), begun(0) {
#pragma unroll
        for (int tap = 0; tap < TAPS; ++tap) {
            old[tap] = kept[tap];
            begun += to_float(old[tap]) * to_float(args.conv[channel * WIDTH + tap]);
        }
        own = to_float(args.conv[channel * WIDTH + TAPS]);
    }

    __device__ __forceinline__ float with(u16 x) const { return to_float(rounded(silu(begun + own * to_float(x)))); }

    __device__ __forceinline__ void keep(u16 x) const {
#pragma unroll
        for (int tap = 1; tap < TAPS; ++tap) kept[tap - 1] = old[tap];
        kept[TAPS - 1] = x;
    }
};

__device__ __forceinline__ void prepare(const Arguments& args, u8* ring, Shared& once) {
    const int group = threadIdx.x / PREPARERS - CONSUMERS / PREPARERS, i = threadIdx.x % PREPARERS;
    const int warp = i / 32, lane = i % 32;
    const auto meet_group = [&] { meet(4 + group, PREPARERS); };
    bool waited = false;
    u32 parities = 0;   // by stage, of the group's next tile
    u16 q_input, k_input;
    float q, k, q_k;
    // the same for all tiles that share a key
    const auto begin = [&](const Tile& tile) {
        if (tile.group() != group) return;
        const Channel of_q(args, tile.slot, tile.key_head * N + i);
        const Channel of_k(args, tile.slot, (KEY_HEADS + tile.key_head) * N + i);
        if (!waited) wait_previous(), waited = true;
        const u16* const token = args.x + tile.row * args.x_stride;
        q_input = token[tile.key_head * N + i], k_input = token[(KEY_HEADS + tile.key_head) * N + i];
        q = of_q.with(q_input), k = of_k.with(k_input);
        of_q.keep(q_input), of_k.keep(k_input);
        float sums[3] = {q * q, k * k, q * k};
        sum_warp(sums);
        float(&all)[4][3] = once.lengths[group];
        meet_group();   // the last ones are read
        if (lane < 3) all[warp][lane] = lane == 0 ? sums[0] : lane == 1 ? sums[1] : sums[2];
        meet_group();
#pragma unroll
        for (int j = 0; j < 3; ++j) sums[j] = all[0][j] + all[1][j] + all[2][j] + all[3][j];
        const float by_q = rsqrtf(sums[0] + 1e-6f) * rsqrtf((float)N), by_k = rsqrtf(sums[1] + 1e-6f);
        q *= by_q, k *= by_k, q_k = sums[2] * by_q * by_k;
    };
    const auto take = [&](const Tile& tile) {
        if (tile.group() != group) return;
        const long long of_head = tile.slot * HEADS + tile.head;
        const int channel = 2 * KEY_HEADS * N + tile.head * N + i;
        const Channel of_v(args, tile.slot, channel);
        const u16 input = args.x[tile.row * args.x_stride + channel];
        const float z = to_float(args.z[tile.row * args.z_stride + tile.head * N + i]);
        const float rate = 1 / (1 + expf(-to_float(args.b[tile.row * args.b_stride + tile.head])));
        const float a = to_float(args.a[tile.row * args.a_stride + tile.head]) + to_float(args.biases[tile.head]);
        const float softplus = fmaxf(a, 0) + logf(1 + expf(-fabsf(a)));
        const float own = -expf(to_float(args.log_rates[tile.head])) * softplus;
        const int first = args.begins[of_head];
        const float v = of_v.with(input), gate = to_float(args.norm[i]) * silu(z);
        of_v.keep(input);
        u8* const stage = ring + tile.stage() * STAGE_BYTES;
        Ready& ready = *reinterpret_cast<Ready*>(stage + AT_READY);
        wait_barrier(shared_address(once.begun[group] + tile.stage()), parities >> tile.stage() & 1);
        parities ^= 1 << tile.stage();
        ready.q[i] = q, ready.k[i] = k, ready.v[i] = v, ready.gate[i] = gate;
        meet_group();
        wait_barrier(shared_address(once.early + tile.stage()), tile.parity());
        const float* const decays = reinterpret_cast<const float*>(stage + AT_DECAYS);
        const float decay = own + (first < tile.place ? decays[tile.place - 1] : 0);
        for (int place = first + warp; place < tile.place; place += PREPARERS / 32) {
            const float4 key = reinterpret_cast<const float4*>(stage + AT_KEYS + place * LINE)[lane];
            const float4 k4 = reinterpret_cast<const float4*>(ready.k)[lane];
            const float4 q4 = reinterpret_cast<const float4*>(ready.q)[lane];
            float sums[2] = {key.x * k4.x + key.y * k4.y + key.z * k4.z + key.w * k4.w,
                             key.x * q4.x + key.y * q4.y + key.z * q4.z + key.w * q4.w};
            sum_warp(sums);
            const float left = expf(decay - decays[place]);
            if (lane == 0) {
                ready.left[place] = left;
                ready.alike[place] = left * sums[0], ready.asked[place] = left * sums[1];
            }
        }
        if (i == 0) {
            ready.decay = expf(decay), ready.rate = rate, ready.q_k = q_k;
            ready.begin = first, ready.place = tile.place;
            if (tile.place == PAST)
                args.begins[of_head] = 0;
            else
                args.decays[of_head * EVERY + tile.place] = decay;
        }
        arrive(shared_address(once.full + tile.stage()));
        if (tile.head % SHARING == 0 && tile.place < PAST)
            args.keys[((tile.slot * KEY_HEADS + tile.key_head) * EVERY + tile.place) * N + i] = k;
    };
    walk(args, begin, take);
}

// ---- the consumers, each with some columns and a part of the rows of a state

// The pending corrections of a tile, and this token's place behind them.
struct Pending {
    const float* corrections;   // [PAST, N], by place
    int first, place;
    float decay;                // of the state

    __device__ __forceinline__ Pending(const u8* stage, const Ready& ready)
        : corrections(reinterpret_cast<const float*>(stage + AT_NEW)), first(ready.begin), place(ready.place),
          decay(ready.decay) {}
};

// known, found = the state's part times the key and the query.
__device__ __forceinline__ void read_state(
    float (&known)[COLUMNS], float (&found)[COLUMNS], const Ready& ready, const u32* words, int part) {
#pragma unroll 4
    for (int row = 0; row < ROWS; row += 4) {
        const float4 k = reinterpret_cast<const float4*>(ready.k)[(part * ROWS + row) / 4];
        const float4 q = reinterpret_cast<const float4*>(ready.q)[(part * ROWS + row) / 4];
        const float ks[4] = {k.x, k.y, k.z, k.w}, qs[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float state[COLUMNS];
            unpack(state, words[(row + i) * LANES]);
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) known[j] += state[j] * ks[i], found[j] += state[j] * qs[i];
        }
    }
}

// Adds what the key and the query read of pending corrections, a part of them each.
__device__ __forceinline__ void add_pending(
    float (&known)[COLUMNS], float (&found)[COLUMNS], const Ready& ready, const Pending& pending, int column,
    int part) {
#pragma unroll
    for (int i = 0; i < EVERY; i += PARTS) {
        const int at = i + part;
        if (at < pending.first || at >= pending.place) continue;
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            const float correction = pending.corrections[at * N + column + j];
            known[j] += ready.alike[at] * correction, found[j] += ready.asked[at] * correction;
        }
    }
}

// The token's correction and output. Called by N threads, one for each column, once all parts are in `once`.
__device__ __forceinline__ void finish_column(
    const Arguments& args, const Tile& tile, const Ready& ready, Shared& once, int place) {
    const int thread = threadIdx.x, turn = tile.number % 2;
    float known = 0, found = 0;
#pragma unroll
    for (int i = 0; i < PARTS; ++i) known += once.known[turn][i][thread], found += once.found[turn][i][thread];
    const float correction = (ready.v[thread] - known) * ready.rate;
    found += ready.q_k * correction;
    if (place == PAST)
        once.correction[thread] = correction;
    else
        args.corrections[((tile.slot * HEADS + tile.head) * EVERY + place) * N + thread] = correction;
    float squares[1] = {found * found};
    sum_warp(squares);
    if (thread % 32 == 0) once.squares[turn][thread / 32] = squares[0];
    meet(2, N);
    const float* const all = once.squares[turn];
    const float by = rsqrtf((all[0] + all[1] + all[2] + all[3]) / N + args.eps);
    args.out[(tile.row * HEADS + tile.head) * N + thread] = rounded(found * by * ready.gate[thread]);
}

// Makes a part of the state what it is after this token, with all corrections that were pending.
__device__ __forceinline__ void write_state(
    u32* words, const u8* stage, const Ready& ready, const Pending& pending, const Shared& once, int column, int part) {
    float last[COLUMNS], past[PAST][COLUMNS];
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
        last[j] = once.correction[column + j];
#pragma unroll
        for (int i = 0; i < PAST; ++i)
            past[i][j] = i < pending.first ? 0 : ready.left[i] * pending.corrections[i * N + column + j];
    }
#pragma unroll 2
    for (int row = 0; row < ROWS; row += 4) {
        float state[4][COLUMNS];
        const auto add = [&](const float* key, const float (&correction)[COLUMNS]) {
            const float4 keys = reinterpret_cast<const float4*>(key)[(part * ROWS + row) / 4];
            const float of_rows[4] = {keys.x, keys.y, keys.z, keys.w};
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j) state[i][j] += of_rows[i] * correction[j];
        };
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            unpack(state[i], words[(row + i) * LANES]);
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) state[i][j] *= pending.decay;
        }
#pragma unroll
        for (int i = 0; i < PAST; ++i)
            if (i >= pending.first) add(reinterpret_cast<const float*>(stage + AT_KEYS) + i * N, past[i]);
        add(ready.k, last);
#pragma unroll
        for (int i = 0; i < 4; ++i) words[(row + i) * LANES] = packed(state[i]);
    }
}

__device__ __forceinline__ void consume(const Arguments& args, u8* ring, Shared& once) {
    const int thread = threadIdx.x, lane = thread % 32;
    const int column = thread % LANES * COLUMNS, part = thread / LANES;
    const auto meet_all = [] { meet(1, CONSUMERS); };
    int copied = -1;   // the stage that is copied to its state
    const auto release_copied = [&] {
        if (copied < 0) return;
        wait_read();
        arrive(shared_address(once.empty + copied));
        copied = -1;
    };
    wait_previous();   // others may still read what was in `out`
    walk(args, [](const Tile&) {}, [&](const Tile& tile) {
        u8* const stage = ring + tile.stage() * STAGE_BYTES;
        const Ready& ready = *reinterpret_cast<const Ready*>(stage + AT_READY);
        u32* const words = reinterpret_cast<u32*>(stage) + part * ROWS * LANES + thread % LANES;
        const int turn = tile.number % 2;
        wait_barrier(shared_address(once.early + tile.stage()), tile.parity());
        wait_barrier(shared_address(once.full + tile.stage()), tile.parity());
        float known[COLUMNS] = {}, found[COLUMNS] = {};
        read_state(known, found, ready, words, part);
        const Pending pending(stage, ready);
        const bool is_last = pending.place == PAST;
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) known[j] *= pending.decay, found[j] *= pending.decay;
        add_pending(known, found, ready, pending, column, part);
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j)
            once.known[turn][part][column + j] = known[j], once.found[turn][part][column + j] = found[j];
        meet_all();
        if (thread < N) finish_column(args, tile, ready, once, pending.place);
        if (is_last) {
            meet_all();
            write_state(words, stage, ready, pending, once, column, part);
            see_copies();   // what this thread has written, to the copy
            meet_all();
        }
        __syncwarp();
        if (thread == 0) release_copied();
        if (thread == 0 && is_last) {
            store_bytes(state_of(args, tile), shared_address(stage), STATE_BYTES);
            copied = tile.stage();
        } else if (lane == 0) {
            arrive(shared_address(once.empty + tile.stage()));
        }
    });
    if (thread == 0) {
        release_copied();
        wait_written();
    }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + GROUPS * PREPARERS + 32, 1)
delta_step(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(1024) u8 ring[];
    Shared& once = *reinterpret_cast<Shared*>(ring + STAGES * STAGE_BYTES);
    allow_next();
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            init_barrier(shared_address(once.full + stage), 1 + PREPARERS);
            init_barrier(shared_address(once.early + stage), 1);
            init_barrier(shared_address(once.empty + stage), CONSUMERS / 32);
            for (int group = 0; group < GROUPS; ++group) init_barrier(shared_address(once.begun[group] + stage), 1);
        }
        publish_barriers();
    }
    __syncthreads();
    if (threadIdx.x < CONSUMERS)
        consume(args, ring, once);
    else if (threadIdx.x < CONSUMERS + GROUPS * PREPARERS)
        prepare(args, ring, once);
    else if (threadIdx.x == CONSUMERS + GROUPS * PREPARERS)
        produce(args, shared_address(ring), once);
}
