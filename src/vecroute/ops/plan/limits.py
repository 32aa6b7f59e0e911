"""Every threshold of the engine. Plans compare sizes with these; no other file does.

"H200" after a number means that trials on one H200 found it. Tests change these numbers, so read them as
``limits.NAME``.
"""

PLANS = 512  # plans in the cache; the least recently used one is dropped

# The batch path
BATCH_OUTPUTS = 128  # one program holds all outputs of 64 inputs in its registers
BATCH_D_OUT = 8192  # one program normalises a whole output vector
BATCH_BYTES = 2**29  # bytes of memory for pairs; the other paths cut inputs into chunks and need less
# Multiplications of one product with x_inp, times iterations. With more, the loop over chunks is faster in
# IEEE float32: an iteration of 100,000 x 1024 -> 100 takes 3.4 ms, forward + backward, instead of 6.7 (H200).
BATCH_IEEE = 2**34
HALF_D_INP = 8192  # one program scales a whole row of x_inp to float16
HALF_BYTES = 2**28  # bytes of the float16 copy of x_inp, which lives until the backward pass
TILE = 64  # inputs of one tile: the rows of one tensor-core instruction of a Hopper GPU
PACKED_TILES = 16  # tiles that one program sums over if samples are packed (H200)
LEAST_PROGRAMS = 120  # a sum is split until it has this many programs; an H200 has 132 multiprocessors
W_A_PROGRAMS = 4  # extra programs per part for the gradient of W_A, which tensor cores cannot compute (H200)
LARGE_PRODUCT = 2**27  # with this many multiplications or more, cuBLAS beats our kernel for F and G (H200)
WORKSPACE = 2**24  # bytes that cuBLAS may use

# The long path
HALVES_ROWS = 20_000  # with fewer inputs, scaling M to float16 takes longer than it saves (H200)
HALVES_PAIRS = 256  # float16 columns of one block of grad_W_A, where pairs wait until that block is written
HALVES_D_INP = 128  # columns of one block
CLUSTER_ROWS = 50_000  # with fewer inputs, extra launches cost more than a second read of x_inp (H200)
CLUSTER_D = 256  # features that one multiprocessor of a cluster holds
CLUSTER_SIZES = (2, 4, 8)  # multiprocessors of a cluster that the kernel is written for
CLUSTER_OUTPUTS = (32, 104)  # fewer leave tensor cores idle, more do not fit the registers

# The wide path
# From the first number on, bfloat16 saves more time than its copy costs (H200). Up to the second, a row fits
# the registers.
WIDE_OUTPUTS = (1024, 4096)

# The loop over chunks
SMALL_COPY = 2**26  # bytes; a rounded copy of at most this size is kept for all passes of a call
PART_BYTES = 2**21  # bytes of one [b, j, d] tensor in the backward pass on a CPU, so that it fits the caches
APART_BYTES = 2**27  # bytes; on a GPU, at most this much is allocated for pairs that a later pass reads
GRID = 2**16 - 1  # CUDA's limit for all dimensions of a grid but the first
CPU_ROWS = (64, 2048)  # least and most inputs of a chunk on a CPU
CPU_PAIRS = 2**18  # pairs of a chunk on a CPU: 1 MB in float32, which fits the cache
GPU_ROWS = 1024  # least inputs of a chunk on a GPU
MANY_OUTPUTS = 512  # with this many outputs or more, a chunk on a GPU may take twice the memory (H200)
CHUNK_BYTES = 2**26  # least bytes of a chunk on a GPU if n_inp is None (H200)
CHUNK_PAIRS = 2**24  # least pairs of a chunk on a GPU if n_inp is given (H200)
# A chunk on a GPU may take the size of x_inp divided by this number, so that a call needs 2 % more memory
# (forward).
SHARE_FORWARD = {"fixed": 22, "variable": 64}
SHARE_BACKWARD = {"fixed": 22, "variable": 30}
# The same for a backward pass that stores pairs for a later pass: its other buffers are smaller.
SHARE_WAITING, SHARE_HALVES = 11, 5
SUM_ROWS = (
    2**13
)  # from this many inputs of a sample on, a product with ones sums faster than torch.sum (H200)
LEAST_SUMS = 512  # with fewer sums, our kernel would leave most of a GPU idle
TRANSPOSED_OUTPUTS = 256  # with more outputs, a block has too few rows for contiguous writes
NORM_D_OUT = 8192  # features that one program normalises in registers
