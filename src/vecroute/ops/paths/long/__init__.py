"""One long sample of a fixed length in tf32: few passes over x_inp, and one write of its gradient.

``clusters`` runs an iteration with one read of x_inp, in CUDA C++ that ``hopper`` compiles. ``halves`` makes
the gradient of x_inp from float16 pairs.
"""

from vecroute.ops.paths.long.clusters import iterate as iterate
from vecroute.ops.paths.long.halves import input_gradient as input_gradient
from vecroute.ops.paths.long.halves import scaled_matrix as scaled_matrix
