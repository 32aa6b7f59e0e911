"""Every threshold of the engine. Plans compare sizes with these; no other file does.

"H200" after a number means that trials on one H200 found it. Tests change these numbers, so read them as
``limits.NAME``.
"""

PLANS = 512  # plans in the cache; the least recently used one leaves

# The batch path
BATCH_OUTPUTS = 128  # one program holds all outputs of 64 inputs in its registers
BATCH_D_OUT = 8192  # one program normalises a whole output vector
BATCH_BYTES = 2**29  # memory for pairs; the other paths need less of it, since they cut inputs into chunks
HALF_D_INP = 8192  # one program scales a whole row of x_inp to float16
HALF_BYTES = 2**28  # the float16 copy of x_inp, which lives until the backward pass
TILE = 64  # inputs of one tile: the rows of one tensor-core instruction of a Hopper GPU
PACKED_TILES = 16  # tiles that one program sums over if samples are packed (H200)
LEAST_PROGRAMS = 120  # sums are split until there are as many programs: an H200 has 132 multiprocessors
W_A_PROGRAMS = 4  # further programs per part for the gradient of W_A, which tensor cores cannot help (H200)
LARGE_PRODUCT = 2**27  # multiplications from which cuBLAS beats our kernel for F and G (H200)
WORKSPACE = 2**24  # bytes that cuBLAS may use

# The long path
HALVES_ROWS = 20_000  # inputs; below, scaling M to float16 takes longer than it saves (H200)
HALVES_PAIRS = 256  # float16 columns of one block of grad_W_A, where pairs wait until that block is written
HALVES_D_INP = 128  # one block of columns
CLUSTER_ROWS = 50_000  # inputs; below, extra launches cost more than a second read of x_inp (H200)
CLUSTER_D = 256  # features that one multiprocessor of a cluster holds
CLUSTER_SIZES = (2, 4, 8)  # multiprocessors of a cluster that the kernel is written for
CLUSTER_OUTPUTS = (32, 104)  # fewer leave tensor cores idle, more do not fit the registers
ROUNDED_OUTPUTS = 128  # two columns per output: the tensor cores take 256 at once
BY_ROWS_COLUMNS, BY_ROWS_STAGES = 64, 3  # of M in shared memory at a time: as many as leave room (H200)

# The wide path
WIDE_OUTPUTS = (1024, 4096)  # from here on bfloat16 pays for the copy (H200); up to here a row fits registers

# The loop over chunks
SMALL_COPY = 2**26  # bytes up to which a rounded copy is kept for all passes of a call
PART_BYTES = 2**21  # of one [b, j, d] tensor in the backward pass on a CPU: the size of its caches
APART_BYTES = 2**27  # up to which pairs wait in memory of their own on a GPU
GRID = 2**16 - 1  # CUDA's limit for all dimensions of a grid but the first
CPU_ROWS = (64, 2048)  # of a chunk on a CPU, least and most
CPU_PAIRS = 2**18  # of a chunk on a CPU: in float32 1 MB, which its cache holds
GPU_ROWS = 1024  # of a chunk on a GPU, at least
MANY_OUTPUTS = 512  # from which a chunk on a GPU has twice the memory (H200)
CHUNK_BYTES = 2**26  # of a chunk on a GPU, at least, if n_inp is None (H200)
CHUNK_PAIRS = 2**24  # of a chunk on a GPU, at least, if n_inp is given (H200)
# A chunk on a GPU may take the size of x_inp divided by this number, so that a call needs 2 % more memory
# (forward).
SHARE_FORWARD = {"fixed": 22, "variable": 64}
SHARE_BACKWARD = {"fixed": 22, "variable": 30}
SHARE_WAITING, SHARE_HALVES = 11, 5  # in a backward pass whose pairs wait: its buffers hold less besides
SUM_ROWS = 2**13  # of one sample, from which a product with ones sums faster than torch.sum (H200)
LEAST_SUMS = 512  # below, a kernel of ours for sums would leave a GPU idle
TRANSPOSED_OUTPUTS = 256  # more leave a block too few rows to write them side by side
NORM_D_OUT = 8192  # features that one program normalises in registers
