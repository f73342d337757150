// What all sources here share, for GPUs of compute capability 9 and later: short type names, shared-memory addresses,
// bfloat16, and dependent launches.

#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;

constexpr u32 ALL = 0xffffffffu;    // lanes of a warp
#define NOTHING __int_as_float(0xff800000)   // -infinity

__device__ __forceinline__ u32 shared_address(const void* p) {
    return (u32)__cvta_generic_to_shared(p);
}

// from bfloat16
__device__ __forceinline__ float to_float(u16 x) { return __int_as_float((u32)x << 16); }

// both do nothing unless this is a dependent launch
__device__ __forceinline__ void allow_next() { asm volatile("griddepcontrol.launch_dependents;"); }

__device__ __forceinline__ void wait_previous() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
