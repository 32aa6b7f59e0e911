// The gradients of x_inp and of W_A for one sample of a fixed length, called by by_rows.py:
//
//     grad_x = unit (pairs M) + grad_a W_A      grad_W_A = grad_a x_inp
//
// A group of 128 threads handles 64 rows. Their pairs stay in registers. M passes through shared memory, some
// columns at a time, and all groups of a block share it. So a block reads pairs from memory once, and M from the
// cache once. While the tensor cores multiply, x_inp and W_A are loaded to registers. The remaining registers hold
// 64 columns of products.
//
// Pairs may wait in the rows of grad_W_A, because only one warp reads and writes a row.
//
// by_rows.py puts these before this file: hopper.cu; WAITING, the number of iterations whose pairs wait; N_OUT;
// COLUMNS, the number of columns of a part of M; STAGES, the number of parts in shared memory at a time; and
// gradient_mma, which multiplies on the tensor cores.

constexpr int GROUPS = 2, THREADS = 128 * GROUPS, ROWS = 64;
constexpr int N_WAITING = 2 * N_OUT * WAITING;
constexpr int N_PAIRS = N_WAITING + N_OUT, K = (N_PAIRS + 31) / 32 * 32;  // all pairs of a row, padded

// Places in shared memory, in bytes.
constexpr int TILE = COLUMNS * 128;  // 64 pairs of a part of M, as the tensor cores read them
constexpr int STAGE = (K + 63) / 64 * TILE;
constexpr int PRODUCTS = STAGES * STAGE;  // [warps][16 rows][COLUMNS], in the order of memory
constexpr int BARRIERS = PRODUCTS + GROUPS * ROWS * COLUMNS * 4;  // barriers for the parts of M

struct Arguments {
    const unsigned short *waiting, *phi, *M;  // [i, 2 j WAITING], [i, j], [d / COLUMNS] stages
    const float* top;                         // [WAITING + 1, i] units of pairs: powers of two that rise
    const float *x, *W_A, *grad_a;            // [i, d], [i, d], [i]
    float *grad_x, *grad_W_A;                 // [i, d]
    int n, d, waiting_i, phi_i, top_t, x_i, W_A_i, grad_x_i, grad_W_A_i;  // sizes, and strides of rows
};

struct Group {
    const Arguments& p;
    char* const shared;
    const Parts<STAGES, STAGE, THREADS / 32> M;
    const int lane, warp;     // a warp has 16 rows of a block
    u32 pairs[K / 32][2][4];  // of rows lane / 4 and lane / 4 + 8: 8 of every 32 numbers
    float unit[2], total[COLUMNS / 2];  // of the same two rows; total has a quarter of the columns of each
    float a[8];               // grad_a of rows lane / 16, lane / 16 + 2, ...
    float4 x[8], W[8];        // x_inp and W_A of the same eight rows

    INLINE Group(const Arguments& p, char* memory)
        : p(p), shared(memory),
          M{address(memory), address(memory + BARRIERS), (const char*)p.M, p.d / COLUMNS},
          lane(threadIdx.x % 32), warp(threadIdx.x / 32) {}

    // Load the pairs of all iterations, and convert a row to the unit of the last one loaded.
    INLINE void load_pairs(int block) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = block + warp * 16 + lane / 4 + 8 * h;
            const bool inside = row < p.n;
            const size_t i = inside ? row : 0;
            const unsigned short* waiting = p.waiting + i * p.waiting_i;
            const unsigned short* phi = p.phi + i * p.phi_i - N_WAITING;
            const float* top = p.top + i;
            const float last = inside ? top[(size_t)WAITING * p.top_t] : 0.f;
            unit[h] = last * (1.f / (1 << 28));  // both operands were multiplied by 2^14
#pragma unroll
            for (int c = 0; c < K / 32; ++c) {
                const int k = c * 32 + lane % 4 * 8, t = min(k / (2 * N_OUT), WAITING - 1);
                uint4 v = load_8((k < N_WAITING ? waiting : phi) + k, inside && k < N_PAIRS);
                if (k + 8 > N_PAIRS) v.z = v.w = 0;  // the second half is padding
                float by = k < N_WAITING ? top[(size_t)t * p.top_t] / last : 1.f;
                const u32 both = last == 0.f ? 0 : halves(by, by);
                pairs[c][h][0] = times(v.x, both), pairs[c][h][1] = times(v.y, both);
                pairs[c][h][2] = times(v.z, both), pairs[c][h][3] = times(v.w, both);
            }
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) a[i] = inside(block, i) ? p.grad_a[row(block, i)] : 0.f;
    }

    INLINE size_t row(int block, int i) const { return block + warp * 16 + 2 * i + lane / 16; }
    INLINE bool inside(int block, int i) const { return row(block, i) < p.n; }
    INLINE void load_inputs(int block, int column) {
        const int c = column + lane % 16 * 4;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const bool here = inside(block, i);
            const size_t r = here ? row(block, i) : 0;
            x[i] = load_once(p.x + r * p.x_i + c, here);
            W[i] = load_once(p.W_A + r * p.W_A_i + c, here);
        }
    }

    // A step multiplies the first 4 or the second 4 of every 8 pairs. The rows of M are in the same order.
    INLINE void multiply(int k) {
        const u64 b = matrix(M.part(k));
        M.wait_for(k);
        mma_begin();
#pragma unroll
        for (int i = 0; i < K / 16; ++i) {
            const u32(&q)[2][4] = pairs[i / 2];
            const int e = i % 2 * 2;
            gradient_mma(total, q[0][e], q[1][e], q[0][e + 1], q[1][e + 1],
                         b + (i / 4 * TILE + i % 4 * 32) / 16, i > 0);
        }
        mma_commit();
        mma_wait(total);
        M.used(k);
    }

    // The place of 4 products of a row of this warp. Lanes that write or read at once use different banks.
    INLINE float4* place(int row, int four) const {
        const int at = four ^ row % 2 * 4 ^ row / 2 % 4;
        return (float4*)(shared + PRODUCTS) + (warp * 16 + row) * COLUMNS / 4 + at;
    }
    // Four neighbouring products of a row, out of every 16 columns of rows lane / 4 and lane / 4 + 8.
    INLINE float4 four(int i) const {
        const float u = unit[i % 2], *r = total + i / 2 * 8 + i % 2 * 2;
        return make_float4(u * r[0], u * r[1], u * r[4], u * r[5]);
    }
    INLINE void store(int block, int column) {
#pragma unroll
        for (int i = 0; i < 8; ++i) *place(lane / 4 + i % 2 * 8, i / 2 * 4 + lane % 4) = four(i);
        __syncwarp();
        const int c = column + lane % 16 * 4;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float4 r = *place(2 * i + lane / 16, lane % 16), v = x[i], w = W[i];
            const float s = a[i];
            if (inside(block, i)) {
                __stcs((float4*)(p.grad_W_A + row(block, i) * p.grad_W_A_i + c),
                       make_float4(s * v.x, s * v.y, s * v.z, s * v.w));
                __stcs((float4*)(p.grad_x + row(block, i) * p.grad_x_i + c),
                       make_float4(r.x + s * w.x, r.y + s * w.y, r.z + s * w.z, r.w + s * w.w));
            }
        }
        __syncwarp();
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    input_gradient(const unsigned short* waiting, const unsigned short* phi, const unsigned short* M,
                   const float* top, const float* x, const float* W_A, const float* grad_a, float* grad_x,
                   float* grad_W_A, int n, int d, int waiting_i, int phi_i, int top_t, int x_i, int W_A_i,
                   int grad_x_i, int grad_W_A_i) {
    extern __shared__ __align__(1024) char memory[];
    const Arguments p{waiting, phi, M,         top,   x,     W_A, grad_a, grad_x,   grad_W_A,
                      n,       d,   waiting_i, phi_i, top_t, x_i, W_A_i,  grad_x_i, grad_W_A_i};
    Group group(p, memory);
    group.M.start();
    const int block = blockIdx.x * GROUPS * ROWS;
    group.load_pairs(block);
    for (int k = 0; k < d / COLUMNS; ++k) {
        group.load_inputs(block, k * COLUMNS);
        group.multiply(k);
        group.store(block, k * COLUMNS);
    }
    group.M.finish(d / COLUMNS);
}
