// Compute the pairs x_inp M^T of one long sample in bfloat16, called by rounded.py.
//
// A group of 128 threads handles 64 rows at a time. It rounds 64 of their features for the tensor cores while the
// next 64 are being loaded. M passes through shared memory, also 64 features at a time, and all groups of a block
// share it. So the kernel reads the float32 x_inp once, and never stores a rounded copy.
//
// rounded.py puts these before this file: hopper.cu; N_OUT; PARTS, the number of rows of M for each output; and
// product_mma, which multiplies on the tensor cores.

constexpr int GROUPS = 2, THREADS = 128 * GROUPS, ROWS = 64, FEATURES = 64;
constexpr int J = (N_OUT + 7) / 8 * 8, N = PARTS * J;  // columns, padded

// Places in shared memory, in bytes. The tensor cores read rows of 128 bytes, swizzled.
constexpr int STAGE = N * 128, STAGES = 3;  // 64 features of M
constexpr int TILE = ROWS * 128;
constexpr int ROW = PARTS * N_OUT * 2;  // bytes of a row of products
constexpr int PRODUCTS = (ROWS * ROW + 1023) / 1024 * 1024;
constexpr int OF_GROUP = PRODUCTS > 2 * TILE ? PRODUCTS : 2 * TILE;
constexpr int GROUP = STAGES * STAGE;  // [GROUPS]: first 2 tiles of x_inp, then products
constexpr int BARRIERS = GROUP + GROUPS * OF_GROUP;  // barriers for the parts of M

struct Group {
    const float* const x;       // [i, d]
    unsigned short* const out;  // [i, PARTS j]
    const int n, d, x_i;        // sizes, and the stride of a row of x
    const Parts<STAGES, STAGE, THREADS / 32> M;
    const int lane, warp, group;
    char* const own;      // shared memory of this group
    float total[N / 2];   // products [64 rows, N], in the order of the tensor cores
    float4 loaded[2][8];  // two blocks of features that are being loaded: of rows lane / 16, lane / 16 + 2, ...

    INLINE Group(const float* x, unsigned short* out, int n, int d, int x_i, const unsigned short* M,
                 char* shared)
        : x(x), out(out), n(n), d(d), x_i(x_i),
          M{address(shared), address(shared + BARRIERS), (const char*)M, d / FEATURES}, lane(threadIdx.x % 32),
          warp(threadIdx.x / 32), group(threadIdx.x / 128), own(shared + GROUP + group * OF_GROUP) {}

    INLINE void load(float4 (&to)[8], int block, int feature) const {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int row = block + warp * 16 + 2 * i + lane / 16;
            to[i] = load_once(x + (size_t)min(row, n - 1) * x_i + feature + lane % 16 * 4, row < n);
        }
    }
    INLINE void convert(const float4 (&from)[8], int half) const {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int row = warp % 4 * 16 + 2 * i + lane / 16;
            *(uint2*)(own + half * TILE + row * 128 + (lane % 16 / 2 ^ row % 8) * 16 + lane % 2 * 8) =
                make_uint2(bfloats(from[i].x, from[i].y), bfloats(from[i].z, from[i].w));
        }
    }
    INLINE void multiply(int k, int half, bool first) {
        M.wait_for(k);
        const u64 a = matrix(address(own + half * TILE)), b = matrix(M.part(k));
        mma_begin();
#pragma unroll
        for (int i = 0; i < FEATURES / 16; ++i) product_mma(total, a + i * 2, b + i * 2, !first || i > 0);
        mma_commit();
    }
    INLINE void load_first(int block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) load(loaded[half], block, half * FEATURES);
    }
    // k counts the blocks of features of all blocks of rows. While the tensor cores multiply one block of features,
    // the threads convert the next one.
    INLINE void products(int block, int& k) {
        group_sync(1 + group);  // all threads have stored the products before, so that x_inp may overwrite them
        for (int feature = 0; feature < d; feature += 2 * FEATURES)
#pragma unroll
            for (int half = 0; half < 2; ++half, ++k) {
                convert(loaded[half], half);
                const int next = feature + (2 + half) * FEATURES;
                if (next < d) load(loaded[half], block, next);
                if (feature || half) {
                    mma_wait(total);
                    M.used(k - 1);
                }
                written();
                group_sync(1 + group);
                multiply(k, half, feature == 0 && half == 0);
            }
        mma_wait(total);
        M.used(k - 1);
        group_sync(1 + group);
    }
    // Copy products from the order of the tensor cores to consecutive rows in memory. Each warp has 16 rows.
    INLINE void store(int block) const {
        char* rows = own + warp % 4 * 16 * ROW;
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int t = 0; t < N / 8; ++t) {
                const int j = t * 8 % J + lane % 4 * 2;
                if (j < N_OUT)
                    *(u32*)(rows + (lane / 4 + 8 * h) * ROW + (t * 8 / J * N_OUT + j) * 2) =
                        bfloats(total[4 * t + 2 * h], total[4 * t + 2 * h + 1]);
            }
        __syncwarp();
        const int first = block + warp * 16, bytes = min(16, n - first) * ROW;
        char* to = (char*)out + (size_t)first * ROW;
        for (int at = lane * 8; at < bytes; at += 32 * 8) *(uint2*)(to + at) = *(const uint2*)(rows + at);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    rounded_product(const float* x, const unsigned short* M, unsigned short* out, int n, int d, int x_i) {
    extern __shared__ __align__(1024) char shared[];
    Group group(x, out, n, d, x_i, M, shared);
    group.M.start();
    const int step = gridDim.x * GROUPS * ROWS;
    int block = blockIdx.x * GROUPS * ROWS, k = 0;
    group.load_first(block);
    for (; block < n; block += step) {
        group.products(block, k);
        group.load_first(min(block + step, n));
        group.store(block);
    }
    group.M.finish(k);
}
