"""Matrices are where the kernels in CUDA C++ look for them."""

import pytest
import torch

from vecroute.ops.paths.long import arrange

pytestmark = pytest.mark.usefixtures("device")


@pytest.mark.parametrize(("n_out", "parts"), [(100, 1), (100, 2), (64, 2), (4, 1)])
def test_by_features(n_out, parts, nan_filled_memory):
    M = torch.randn(parts * n_out, 128).bfloat16()
    arranged = arrange.by_features(M.float(), n_out)  # [2, n, 8, 8]
    padded = -(-n_out // 8) * 8
    assert arranged.shape[1] == parts * padded
    for row in range(parts * n_out):
        place = row // n_out * padded + row % n_out
        assert torch.equal(arranged[:, place, torch.arange(8) ^ place % 8].flatten(), M[row])
    assert arranged.ne(0).sum() == M.ne(0).sum()


@pytest.mark.parametrize("k", [300, 320, 60])
def test_by_columns(k, nan_filled_memory):
    """Compare with loops. A thread has 8 of 32 rows, four at a time, two of these in each half of 16."""
    M = (2 * torch.rand(k, 128) - 1).half().float()
    weights = 2.0 ** torch.randint(-5, 5, (k, 1))
    arranged = arrange.by_columns(M * weights, weights)  # [2, k / 64, 64, 8, 8]
    expected = (M * 2**14).half()
    thread, step, half = torch.meshgrid(*(torch.arange(n) for n in (4, 2, 2)), indexing="ij")
    for column in range(128):
        n = column % 64
        place = n // 16 * 16 + n % 4 // 2 * 8 + n % 16 // 4 * 2 + n % 2  # in the order of the tensor cores
        found = arranged[column // 64, :, place, torch.arange(8) ^ place % 8].flatten()  # [k]
        for block in range(0, k - 31, 32):
            at = block + 16 * step + 8 * half + 2 * thread  # [4, 2, 2] the places of two neighbours
            two = torch.stack((found[at], found[at + 1]), -1)  # [4, 2, 2, 2]
            assert torch.equal(two.flatten(), expected[block : block + 32, column])
    assert arranged.ne(0).sum() == expected.ne(0).sum()
