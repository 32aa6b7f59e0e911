// Functions for clusters.cu. Some are instructions of compute capability 9.0 that CUDA C++ has no functions for:
// clusters, asynchronous loads, tensor cores. Others are arithmetic on rows of numbers that share a unit, a power
// of two.

typedef unsigned int u32;
typedef unsigned long long u64;

#define INLINE __device__ __forceinline__

INLINE u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// Return the same number, but hide it from the compiler. Otherwise the compiler would compute values that depend
// on it before a loop, and there are not enough registers to keep them.
INLINE int again(int v) {
    asm volatile("" : "+r"(v));
    return v;
}

// ---- Between blocks: a message adds its bytes to a barrier of the receiving block. ----
INLINE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
INLINE u32 remote(u32 local, u32 rank) {
    u32 r;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(local), "r"(rank));
    return r;
}
INLINE void send(u32 to, u32 barrier, float v) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];"
                 :: "r"(to), "f"(v), "r"(barrier) : "memory");
}
INLINE void send(u32 to, u32 barrier, uint4 v) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
                 :: "r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier) : "memory");
}
INLINE void send(u32 to, u32 barrier, u32 from, int bytes) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(to), "r"(from), "r"(bytes), "r"(barrier) : "memory");
}
INLINE void barrier_init(u32 barrier, int arrivals = 1) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n"
                 "fence.mbarrier_init.release.cluster;" :: "r"(barrier), "r"(arrivals) : "memory");
}
INLINE void expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(barrier), "r"(bytes) : "memory");
}
INLINE void wait(u32 barrier, int phase) {
    asm volatile("{\n.reg .pred p;\n"
                 "more:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
                 "@!p bra more;\n}" :: "r"(barrier), "r"(phase % 2) : "memory");
}

// A fetch from memory by the copy engine adds its bytes to a barrier too.
INLINE void fetch(u32 to, const void* from, int bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// ---- Loads by single threads. Numbers outside of the tensor are zeros. ----
INLINE void load_16(u32 to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;"
                 :: "r"(to), "l"(from), "r"(bytes) : "memory");
}
INLINE void load_4(u32 to, const float* from, bool inside) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 :: "r"(to), "l"(from), "r"(inside ? 4 : 0) : "memory");
}
INLINE void loads_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int STAGES> INLINE void loads_wait() {  // wait for the oldest load
    asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 1) : "memory");
}
INLINE void loads_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
INLINE void prefetch(const void* from, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(from), "r"(bytes) : "memory");
}
// Bypass the first-level cache, because shared memory leaves little of it.
INLINE float4 load_once(const float* from, bool inside) {
    float4 v = make_float4(0, 0, 0, 0);
    if (inside)
        asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from));
    return v;
}

// ---- Numbers ----
// Return the unit of a row with this greatest number: a power of two, such that all numbers are below 2^15 units.
INLINE float unit_of(float top) {
    return __uint_as_float(max(__float_as_uint(top) & 0x7f800000u, 32u << 23)) * (1.f / 16384);
}
INLINE float per(float unit) { return __uint_as_float((254u << 23) - __float_as_uint(unit)); }  // 1 / unit
INLINE u32 halves(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
INLINE u32 times(u32 a, u32 b) {
    u32 r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
INLINE float greatest(float4 v) {
    return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
}
INLINE float dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }
INLINE float item(const float4& v, int k) { return k == 0 ? v.x : k == 1 ? v.y : k == 2 ? v.z : v.w; }
INLINE float f_of(float z) { return __fdividef(1.f, 1.f + __expf(-z)); }  // the logistic function
INLINE float log_f(float z) { return fminf(z, 0.f) - __logf(1.f + __expf(-fabsf(z))); }
INLINE float warp_max(float v) {
#pragma unroll
    for (int o = 16; o; o /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, o));
    return v;
}
INLINE float warp_sum(float v) {
#pragma unroll
    for (int o = 16; o; o /= 2) v += __shfl_xor_sync(~0u, v, o);
    return v;
}
// ---- Tensor cores ----
// Return the descriptor of a matrix in rows of 128 bytes. The next 64 columns begin ``next`` bytes later.
INLINE u64 matrix(u32 at, int next = 16) {
    return (u64)((at & 0x3ffff) >> 4) | (u64)(next >> 4) << 16 | (u64)64 << 32 | (u64)1 << 62;
}
INLINE void mma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INLINE void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> INLINE void mma_wait(float (&r)[N]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int k = 0; k < N; ++k) asm volatile("" : "+f"(r[k])::"memory");
}
// Make writes to shared memory visible to the tensor cores and to the copy engine.
INLINE void written() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
