// MMAs of 64 rows of a weight by 8 to 192 tokens, in bfloat16 or, if FLOAT8, in e4m3. Also what else GEMMs with such
// tiles need: barriers of a cluster, and registers handed from one warpgroup to another.

#pragma once

#include "hopper.cuh"

__device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// arrives at the same barrier in another thread block of the cluster, or in this one
__device__ __forceinline__ void arrive_at(u32 barrier, u32 rank) {
    asm volatile("{ .reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there]; }"
                 :: "r"(barrier), "r"(rank) : "memory");
}

template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void leave_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}

// Keeps the compiler from reading what MMAs write before this point.
template <int COUNT, int LENGTH>
__device__ __forceinline__ void now_written(float (&c)[LENGTH]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(c[i]) :: "memory");
}

// c += 64 rows of a times N rows of b, over 32 bytes of both; the overload with `add` leaves out the old c unless `add`
template <int N>
struct Mma;

#if FLOAT8
#define SHAPE "k32.f32.e4m3.e4m3"
#define FLAGS "p, 1, 1; }"
#else
#define SHAPE "k16.f32.bf16.bf16"
#define FLAGS "p, 1, 1, 0, 0; }"
#endif
#define DEFINE(N, NUMBERS, A, B, ADD, ...)                                                                       \
    template <>                                                                                                  \
    struct Mma<N> {                                                                                              \
        template <int LENGTH>                                                                                    \
        static __device__ __forceinline__ void multiply(float (&c)[LENGTH], u64 a, u64 b) {                      \
            asm volatile("{ .reg .pred p; setp.eq.b32 p, 0, 0;\n"                                                \
                         "wgmma.mma_async.sync.aligned.m64n" #N SHAPE " {" NUMBERS "}, %" #A ", %" #B ", " FLAGS \
                         : __VA_ARGS__ : "l"(a), "l"(b));                                                        \
        }                                                                                                        \
        template <int LENGTH>                                                                                    \
        static __device__ __forceinline__ void multiply(float (&c)[LENGTH], u64 a, u64 b, u32 add) {             \
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #ADD ", 0;\n"                                        \
                         "wgmma.mma_async.sync.aligned.m64n" #N SHAPE " {" NUMBERS "}, %" #A ", %" #B ", " FLAGS \
                         : __VA_ARGS__ : "l"(a), "l"(b), "r"(add));                                              \
        }                                                                                                        \
    };

DEFINE(8, "%0,%1,%2,%3", 4, 5, 6, C4(0))
DEFINE(16, "%0,%1,%2,%3,%4,%5,%6,%7", 8, 9, 10, C4(0), C4(4))
DEFINE(24, TEN() "%10,%11", 12, 13, 14, C4(0), C4(4), C4(8))
DEFINE(32, TEN() "%10,%11,%12,%13,%14,%15", 16, 17, 18, C16(0))
DEFINE(64, TEN() TEN(1) TEN(2) "%30,%31", 32, 33, 34, C16(0), C16(16))
DEFINE(96, TEN() TEN(1) TEN(2) TEN(3) "%40,%41,%42,%43,%44,%45,%46,%47", 48, 49, 50, C16(0), C16(16), C16(32))
DEFINE(128, TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) "%60,%61,%62,%63", 64, 65, 66,
       C16(0), C16(16), C16(32), C16(48))
DEFINE(192, TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) "%90,%91,%92,%93,%94,%95", 96, 97, 98,
       C16(0), C16(16), C16(32), C16(48), C16(64), C16(80))

constexpr int UNIT_BYTES = 32;   // the scales of 64 rows of the weight, in a stage
