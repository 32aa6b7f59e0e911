// Run one iteration for one long sample of a fixed length, and read x_inp once. Called by clusters.py.
//
// A cluster of C blocks (multiprocessors) handles 64 rows of x_inp at a time. Each block has 256 of their features.
// So the sums over i, [j, d], fit the registers, and a row stays in shared memory until its phi is known:
//
//     convert   make x_inp float16 in shared memory; in the first iteration also a part of W_A x_inp
//     score     compute a part of the dot products with x_hat and send it to the block that owns the row
//     compete   compute phi of the rows that this block owns and send it to every block of the cluster
//     add       add phi^T x_inp to the sums
//
// Messages travel while blocks work on the rows before or after. float16 has the digits of tf32. To give it enough
// range, the numbers of a row are stored in units of a power of two. The first iteration computes these units, and
// the others read them.
//
// clusters.py puts these before this file: hopper.cu; C; NT, the number of tiles of 8 outputs; FIRST, whether this
// is the first iteration; SCORERS, the number of groups of 128 threads that compute scores; TILES, the number of
// tiles of each of these groups; and scores_mma and sum_mma, which multiply on the tensor cores.

constexpr int J = 8 * NT;     // outputs, padded
constexpr int D = 256;        // features of a block
constexpr int ROWS = 64;      // rows of a cluster at a time
constexpr int OWN = ROWS / C;  // rows that a block owns
constexpr int WARPS = 16;
constexpr int THREADS = 32 * WARPS;
constexpr int LOADS = ROWS / WARPS;   // a load is one row for each warp
constexpr int STAGES = FIRST ? 4 : 3;  // loads at a time
constexpr int TURNS = (OWN + WARPS - 1) / WARPS;

// Places in shared memory, in bytes. The tensor cores read float16 in rows of 128 bytes, swizzled.
constexpr int TILE = ROWS * 128;  // 64 rows of 64 features or outputs
constexpr int PART = OWN * J * 4;  // dot products for one block
constexpr int LOADED = STAGES * WARPS * D * 4;
constexpr int X16 = 0;                        // [2][D / 64] tiles of x_inp
constexpr int PHI = X16 + 2 * D / 64 * TILE;  // [2] tiles
constexpr int X32 = PHI + 2 * TILE;           // [STAGES][WARPS][D] x_inp as loaded
constexpr int W32 = X32 + LOADED;             // W_A as loaded, in the first iteration; later X_HAT, DOT, DOT_OUT
constexpr int X_HAT = X32 + LOADED;           // [D / 64][J][64]
constexpr int DOT = X_HAT + D / 64 * J * 128;  // [C] parts, by the block that sent them
constexpr int DOT_OUT = DOT + C * PART;       // [C - 1] parts for the other blocks
constexpr int A =
    FIRST ? W32 + LOADED : DOT_OUT + (C - 1) * PART;  // [C][OWN] parts of W_A x_inp, in the first iteration
constexpr int A_OUT = A + FIRST * ROWS * 4;          // [ROWS]
constexpr int UNIT_X = A_OUT + FIRST * ROWS * 4;     // [2][ROWS] units of x16
constexpr int UNIT_PHI = UNIT_X + FIRST * 2 * ROWS * 4;  // [ROWS]
constexpr int UNIT_X_HAT = UNIT_PHI + FIRST * ROWS * 4;  // [J]
constexpr int UNITS = UNIT_X_HAT + J * 4;            // [STAGES][WARPS] units of x as loaded
constexpr int BARRIERS = UNITS + STAGES * WARPS * 4;  // for dot products (or W_A x_inp), and for phi

struct Arguments {
    const float *x, *W_A, *B_A, *sqrt_n_inp;                   // [i, d], [i, d], [i], [1]
    const unsigned short* x_hat;                               // [j, d] float16
    const float *unit_x_hat, *beta_use, *beta_ign, *W_S, *B_S;  // [j], [i, j] each
    float *f, *units, *unit_sums;  // [i], [i] of x, [1]; the first iteration fills [i], [C, i], one per block
    float *y, *s;                  // for each cluster [d, j], for each block [j]
    int n, n_out, x_stride, W_stride;
};

struct Block {
    const Arguments& p;
    char* shared;
    const int thread, lane, warp, group, rank, cluster, clusters;
    int next_row, next_load, slot;
    const float *next_x, *next_W;
    float sums[4 * NT];  // [d, j] for 64 features of each group, in units of unit_sums
    float unit_sums;     // it rises in the first iteration
    float z[4 * TILES];  // parts of dot products, [i, j]
    float4 beta_use[TURNS], beta_ign[TURNS], W_S[TURNS], B_S[TURNS], sum_phi;
    float f[TURNS];  // f(a_inp); in the first iteration it is B_A before
    float unit_x[TURNS];

    INLINE Block(const Arguments& p, char* shared)
        : p(p), shared(shared), thread(threadIdx.x), lane(threadIdx.x % 32),
          warp(__shfl_sync(~0u, threadIdx.x / 32, 0)), group(warp / 4), rank(blockIdx.x % C),
          cluster(blockIdx.x / C), clusters(gridDim.x / C), next_row(cluster * ROWS + warp), next_load(0),
          slot(0), next_x(p.x + (size_t)next_row * p.x_stride + rank * D + lane * 4),
          next_W(p.W_A + (size_t)next_row * p.W_stride + rank * D + lane * 4),
          unit_sums(FIRST ? 1.17549435e-38f : *p.unit_sums), sum_phi(make_float4(0, 0, 0, 0)) {
#pragma unroll
        for (int i = 0; i < 4 * NT; ++i) sums[i] = 0.f;
    }
    INLINE float* at(int place) const { return (float*)(shared + place); }
    // Return the first row of the k-th block of rows of this cluster.
    INLINE int row_of(int k) const { return (k * clusters + cluster) * ROWS; }
    INLINE u32 barrier(bool phi) const { return address(shared + BARRIERS) + 8 * phi; }
    INLINE void expect_dot() { expect(barrier(false), FIRST ? ROWS * 4 : (C - 1) * PART); }
    INLINE void expect_phi() { expect(barrier(true), (ROWS - OWN) * (NT * 16 + FIRST * 4)); }

    INLINE void prepare() {
        if (thread == 0) {
            barrier_init(barrier(false));
            barrier_init(barrier(true));
            expect_dot();
            expect_phi();
        }
        if (!FIRST) {
            for (int i = thread; i < J * D / 8; i += THREADS) {
                int j = i / (D / 8), c = i % (D / 8);
                uint4 v = j < p.n_out ? *(const uint4*)(p.x_hat + (size_t)j * C * D + rank * D + c * 8)
                                      : make_uint4(0, 0, 0, 0);
                *(uint4*)(shared + X_HAT + c / 8 * J * 128 + j * 128 + (c % 8 ^ j % 8) * 16) = v;
            }
            if (thread < J) at(UNIT_X_HAT)[thread] = thread < p.n_out ? p.unit_x_hat[thread] : 0.f;
        }
        // Each round adds the rows of the round before. For the first round, these are zeros.
        for (int i = thread; i < (X32 - X16) / 16; i += THREADS)
            ((uint4*)(shared + X16))[i] = make_uint4(0, 0, 0, 0);
        if (FIRST)
            for (int i = thread; i < 2 * ROWS; i += THREADS) at(UNIT_X)[i] = at(UNIT_PHI)[i % ROWS] = 0.f;
        written();
        __syncthreads();
        cluster_sync();
        for (int i = 0; i < STAGES; ++i) fetch();
    }

    // Start to load the next row of this warp, or zeros after the last row.
    INLINE void fetch() {
        bool inside = next_row < p.n;
        u32 to = address(shared + X32) + ((slot * WARPS + warp) * D + lane * 4) * 4;
#pragma unroll
        for (int h = 0; h < D; h += 128) {
            load_16(to + h * 4, inside ? next_x + h : p.x, inside * 16);
            if (FIRST) load_16(to + W32 - X32 + h * 4, inside ? next_W + h : p.W_A, inside * 16);
        }
        if (!FIRST && lane == 0)
            load_4(address(shared + UNITS) + (slot * WARPS + warp) * 4,
                   p.units + (inside ? next_row : 0), inside);
        loads_commit();
        next_load = (next_load + 1) % LOADS;
        int step = next_load ? WARPS : clusters * ROWS - (LOADS - 1) * WARPS;
        next_row = min(next_row + step, p.n);  // so that it cannot overflow
        next_x += (long long)step * p.x_stride;
        if (FIRST) next_W += (long long)step * p.W_stride;
        slot = slot + 1 == STAGES ? 0 : slot + 1;
    }

    INLINE void convert(int k) {
        char* to = shared + X16 + k % 2 * (D / 64) * TILE + lane / 16 * TILE + warp * 128 +
                   (lane % 16 / 2 ^ warp % 8) * 16 + lane % 2 * 8;
#pragma unroll
        for (int q = 0; q < LOADS; ++q, to += WARPS * 128) {
            loads_wait<STAGES>();
            if (!FIRST) __syncwarp();  // one lane loads the unit for all lanes
            const float4* from = (const float4*)(shared + X32 + (slot * WARPS + warp) * D * 4) + lane;
            float4 a = from[0], b = from[32];
            float unit = FIRST ? unit_of(warp_max(fmaxf(greatest(a), greatest(b))))
                               : at(UNITS)[slot * WARPS + warp],
                  by = per(unit);
            if (FIRST) {
                from += (W32 - X32) / 16;
                float part = warp_sum(dot(a, from[0]) + dot(b, from[32]));
                if (lane == 0) at(A_OUT)[q * WARPS + warp] = part;
            }
            *(uint2*)to = make_uint2(halves(a.x * by, a.y * by), halves(a.z * by, a.w * by));
            *(uint2*)(to + 2 * TILE) = make_uint2(halves(b.x * by, b.y * by), halves(b.z * by, b.w * by));
            if (FIRST && lane == 0) at(UNIT_X)[k % 2 * ROWS + q * WARPS + warp] = unit;
            if (!FIRST) __syncwarp();  // now fetch() may overwrite the unit
            fetch();
        }
        if (STAGES < LOADS && lane == 0 && next_row < p.n)
            prefetch(next_x, D * 4);  // to the cache, since shared memory has no place for it yet
        written();
        __syncthreads();
    }

    // Groups divide the tiles among them. If the tiles do not divide evenly, the last group ends with the last tile,
    // and skips the tiles that the group before has too.
    INLINE int first_tile() const { return min(group * TILES, NT - TILES); }
    INLINE void score(int k) {
        if (group >= SCORERS) return;
        const u64 a = matrix(address(shared + X16) + k % 2 * (D / 64) * TILE),
                  b = matrix(address(shared + X_HAT) + first_tile() * 1024);
        mma_begin();
#pragma unroll
        for (int i = 0; i < D / 16; ++i)
            scores_mma(z, a + (i / 4 * TILE + i % 4 * 32) / 16, b + (i / 4 * J * 128 + i % 4 * 32) / 16,
                       i > 0);
        mma_commit();
        mma_wait(z);
    }
    // A thread has two columns of two rows of each tile.
    INLINE void stage_scores() {
        if (group >= SCORERS) return;
        const int lane = again(thread) % 32, first = first_tile(), skip = group * TILES - first;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int row = warp % 4 * 16 + lane / 4 + 8 * h, to = row / OWN;
            char* place =
                shared + (to == rank ? DOT + rank * PART : DOT_OUT + (to + C - rank - 1) % C * PART);
            place += (row % OWN * J + first * 8 + lane % 4 * 2) * 4;
#pragma unroll
            for (int t = 0; t < TILES; ++t)
                if (t >= skip)
                    *(float2*)(place + t * 32) = make_float2(z[4 * t + 2 * h], z[4 * t + 2 * h + 1]);
        }
        written();
    }
    INLINE void send_scores(float a) {
        if (FIRST && thread < ROWS)
            send(remote(address(at(A) + rank * OWN + thread % OWN), thread / OWN),
                 remote(barrier(false), thread / OWN), a);
        if (!FIRST && thread < C - 1) {
            int other = (rank + 1 + thread) % C;
            send(remote(address(shared + DOT + rank * PART), other), remote(barrier(false), other),
                 address(shared + DOT_OUT + thread * PART), PART);
        }
    }

    // Multiply phi by the units of x and of phi, so that it is in the unit of the sums.
    INLINE void rescale(int k) {
        const float *u = at(UNIT_X) + k % 2 * ROWS, *v = at(UNIT_PHI);
        float top = warp_max(fmaxf(unit_sums, fmaxf(u[lane] * v[lane], u[32 + lane] * v[32 + lane])));
        if (top > unit_sums) {
            float by = __fdividef(unit_sums, top);
#pragma unroll
            for (int i = 0; i < 4 * NT; ++i) sums[i] *= by;
            unit_sums = top;
        }
        int row = thread % ROWS, c = thread / ROWS;
        float by = u[row] * v[row] * __fdividef(1.f, unit_sums);
        u32 both = halves(by, by);
        uint4* phi = (uint4*)(shared + PHI + row * 128 + (c ^ row % 8) * 16);
#pragma unroll
        for (int t = 0; t < NT; t += 8, phi += TILE / 16)
            if (t + c < NT)
                *phi = make_uint4(times(phi->x, both), times(phi->y, both), times(phi->z, both),
                                  times(phi->w, both));
        written();
    }
    // Wait until phi of all blocks, including this one, is written and visible to the tensor cores.
    INLINE void settle_phi(int k) {
        if (!FIRST) written();
        __syncthreads();
        if (FIRST) {
            rescale(k);
            __syncthreads();
        }
    }
    INLINE void start_adding(int k) {
        const u64 a = matrix(address(shared + X16) + (k % 2 * (D / 64) + group) * TILE),
                  b = matrix(address(shared + PHI), TILE);
        mma_begin();
#pragma unroll
        for (int i = 0; i < ROWS / 16; ++i) sum_mma(sums, a + i * 2048 / 16, b + i * 2048 / 16);
        mma_commit();
    }

    INLINE void load_pairs(int k) {
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            int own = turn * WARPS + warp, row = row_of(k) + rank * OWN + own;
            bool here = own < OWN && row < p.n, inside = here && 4 * lane < p.n_out;
            size_t pair = (size_t)row * p.n_out + 4 * lane;
            beta_use[turn] = load_once(p.beta_use + pair, inside);
            beta_ign[turn] = load_once(p.beta_ign + pair, inside);
            if (!FIRST) W_S[turn] = load_once(p.W_S + pair, inside);
            if (!FIRST) B_S[turn] = load_once(p.B_S + pair, inside);
            f[turn] = here ? (FIRST ? p.B_A[row] : p.f[row]) : 0.f;
            if (!FIRST) unit_x[turn] = here ? p.units[row] : 0.f;
        }
    }
    INLINE void find_R(float (&R)[4], int turn, int own, int j) {
        float4 z = make_float4(0, 0, 0, 0);
        const bool inside = j < p.n_out;
        if (inside && own < OWN) {
#pragma unroll
            for (int c = 0; c < C; ++c) {
                float4 part = *(float4*)(shared + DOT + c * PART + (own * J + j) * 4);
                z.x += part.x, z.y += part.y, z.z += part.z, z.w += part.w;
            }
            float4 unit = *(float4*)(shared + UNIT_X_HAT + j * 4), w = W_S[turn], b = B_S[turn];
            const float u = unit_x[turn];
            z.x = z.x * u * unit.x * w.x + b.x, z.y = z.y * u * unit.y * w.y + b.y,
            z.z = z.z * u * unit.z * w.z + b.z, z.w = z.w * u * unit.w * w.w + b.w;
        }
        float total = 0.f;
#pragma unroll
        for (int i = 0; i < 4; ++i) total += R[i] = inside ? f_of(item(z, i)) : 0.f;
        total = warp_sum(total);
        if (__builtin_expect(total < 1e-30f, 0)) {  // all f(z) are almost 0: use their logarithms
            float top = -3e38f;
#pragma unroll
            for (int i = 0; i < 4; ++i) top = fmaxf(top, inside ? log_f(item(z, i)) : -3e38f);
            top = warp_max(top), total = 0.f;
#pragma unroll
            for (int i = 0; i < 4; ++i) total += R[i] = inside ? __expf(log_f(item(z, i)) - top) : 0.f;
            total = warp_sum(total);
        }
        total = __fdividef(1.f, total);
#pragma unroll
        for (int i = 0; i < 4; ++i) R[i] *= total;
    }
    // phi = f ((beta_use + beta_ign) R - beta_ign) of own rows, sent to every block. A lane has 4 outputs; two lanes
    // together send 8.
    INLINE void compete(int k) {
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            const int lane = again(thread) % 32, own = turn * WARPS + warp,
                      row = row_of(k) + rank * OWN + own;
            const bool here = own < OWN && row < p.n;
            float phi[4];
            if (FIRST) {
                float a = warp_sum(lane < C && own < OWN ? at(A)[lane * OWN + own] : 0.f);
                f[turn] = f_of(a * __fdividef(1.f, *p.sqrt_n_inp) + f[turn]);
                if (here && lane == 0) p.f[row] = f[turn];
#pragma unroll
                for (int i = 0; i < 4; ++i) phi[i] = 1.f / p.n_out;
            } else {
                find_R(phi, turn, own, 4 * lane);
            }
            float4 use = beta_use[turn], ign = beta_ign[turn];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                phi[i] = here ? f[turn] * ((item(use, i) + item(ign, i)) * phi[i] - item(ign, i)) : 0.f;
            sum_phi.x += phi[0], sum_phi.y += phi[1], sum_phi.z += phi[2], sum_phi.w += phi[3];
            float unit = 0.f, by;
            if (FIRST) {  // a bound for phi in every iteration
                float bound = fmaxf(fmaxf(fabsf(use.x) + fabsf(ign.x), fabsf(use.y) + fabsf(ign.y)),
                                    fmaxf(fabsf(use.z) + fabsf(ign.z), fabsf(use.w) + fabsf(ign.w)));
                unit = unit_of(warp_max(bound) * f[turn]), by = per(unit);
            } else {  // phi takes the unit of x_inp, in the unit of the sums
                by = unit_x[turn] * per(unit_sums);
            }
            u32 low = halves(phi[0] * by, phi[1] * by), high = halves(phi[2] * by, phi[3] * by);
            u32 next_low = __shfl_xor_sync(~0u, low, 1), next_high = __shfl_xor_sync(~0u, high, 1);
            uint4 eight = lane % 2 ? make_uint4(next_low, next_high, low, high)
                                   : make_uint4(low, high, next_low, next_high);
            if (own < OWN) send_phi(eight, unit, rank * OWN + own, lane);
        }
    }
    INLINE void send_phi(uint4 eight, float unit, int r, int lane) {
        const int c = lane / 2;
        char* place = shared + PHI + c / 8 * TILE + r * 128 + (c % 8 ^ r % 8) * 16;
#pragma unroll
        for (int i = 0; i < C; i += 2) {
            int other = i + lane % 2;
            if (c < NT && other == rank)
                *(uint4*)place = eight;
            else if (c < NT && other < C)
                send(remote(address(place), other), remote(barrier(true), other), eight);
        }
        if (!FIRST) return;
        if (lane == rank)
            at(UNIT_PHI)[r] = unit;
        else if (lane < C)
            send(remote(address(at(UNIT_PHI) + r), lane), remote(barrier(true), lane), unit);
    }

    // Store y and s of this block, which PyTorch sums over clusters.
    INLINE void finish() {
        if (FIRST && thread == 0) p.unit_sums[blockIdx.x] = unit_sums;
        size_t d = rank * D + group * 64 + warp % 4 * 16 + lane / 4;
        float* to = p.y + ((size_t)cluster * C * D + d) * J + lane % 4 * 2;
#pragma unroll
        for (int t = 0; t < NT; ++t) {
            *(float2*)(to + 8 * t) = make_float2(sums[4 * t] * unit_sums, sums[4 * t + 1] * unit_sums);
            *(float2*)(to + 8 * J + 8 * t) =
                make_float2(sums[4 * t + 2] * unit_sums, sums[4 * t + 3] * unit_sums);
        }
        loads_wait_all();
        __syncthreads();
        float* parts = at(X32);  // [WARPS][J]
        if (4 * lane < J) *(float4*)(parts + warp * J + 4 * lane) = sum_phi;
        __syncthreads();
        if (thread < J) {
            float total = 0.f;
            for (int w = 0; w < WARPS; ++w) total += parts[w * J + thread];
            p.s[(size_t)blockIdx.x * J + thread] = total;
        }
        cluster_sync();
    }
};

extern "C" __global__ void __cluster_dims__(C, 1, 1) __launch_bounds__(THREADS, 1)
    iteration(const float* x, const float* W_A, const float* B_A, const float* sqrt_n_inp,
              const unsigned short* x_hat, const float* unit_x_hat, const float* beta_use,
              const float* beta_ign, const float* W_S, const float* B_S, float* f, float* units,
              float* unit_sums, float* y, float* s, int n, int n_out, int x_stride, int W_stride) {
    extern __shared__ __align__(1024) char shared[];
    const Arguments p{x,   W_A, B_A,   sqrt_n_inp, x_hat, unit_x_hat, beta_use, beta_ign, W_S,     B_S,
                      f,   units, unit_sums, y, s, n, n_out, x_stride, W_stride};
    Block block(p, shared);
    const int rounds = ((n + ROWS - 1) / ROWS - block.cluster + block.clusters - 1) / block.clusters;
    block.prepare();
    if (rounds > 0) block.convert(0);
    for (int k = 0; k < rounds; ++k) {
        int row = block.row_of(k) + threadIdx.x;
        if (FIRST && threadIdx.x < ROWS && row < n)
            units[(size_t)block.rank * n + row] = block.at(UNIT_X)[k % 2 * ROWS + threadIdx.x];
        if (!FIRST) block.score(k);
        if (k) wait(block.barrier(true), k - 1);  // phi of the rows before has arrived, so their dot products have been read
        block.settle_phi(k + 1);
        if (threadIdx.x == 0 && k) block.expect_phi();
        block.start_adding(k + 1);  // the rows before
        if (!FIRST) block.stage_scores();
        block.load_pairs(k);
        mma_wait(block.sums);
        // Read this number before the next rows overwrite it.
        const float a = FIRST && threadIdx.x < ROWS ? block.at(A_OUT)[threadIdx.x] : 0.f;
        __syncthreads();  // x16 and phi have been read; other blocks overwrite phi as soon as they have these scores
        block.send_scores(a);
        if (k + 1 < rounds)
            block.convert(k + 1);
        else
            __syncthreads();
        wait(block.barrier(false), k);
        block.compete(k);
        // No warp may miss the end of a phase: other blocks wait for the phi of warps that own rows, not for the rest.
        if (OWN < WARPS) __syncthreads();
        if (threadIdx.x == 0 && k + 1 < rounds) block.expect_dot();
    }
    if (rounds > 0) {
        wait(block.barrier(true), rounds - 1);
        block.settle_phi(rounds - 1);
        block.start_adding(rounds - 1);
        mma_wait(block.sums);
    }
    block.finish();
}
