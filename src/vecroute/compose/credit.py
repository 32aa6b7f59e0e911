"""Credit: how much each input of a network of routings contributed to each output, end to end."""

import operator
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vecroute.compose.factors import Factor, Matrix, Product, divided, pack, unpack
from vecroute.ops.checks import check_float_tensor, check_mask, check_size
from vecroute.ops.group import all_reduce, total
from vecroute.storage import load_tensors, require, save_tensors

# ``unit_variance`` computes at most this many elements of a credit at a time.
BUDGET = 2**24


class Top(NamedTuple):
    """The largest credits for one output and their inputs, largest first."""

    values: Tensor  # [..., k]
    indices: Tensor  # [..., k]


class Credit:
    """End-to-end credit phi [..., i, j] of a network of routings, stored as factors (Appendix A).

    A method multiplies the factors when you call it, in the cheapest order: with a million inputs,
    ``column(j)`` reads each factor once. The ``route`` of a network returns a ``Credit``, and
    ``Credit(phi)`` wraps the phi of a layer. A credit has a gradient only if every phi has one, that is, with
    ``implementation="reference"``.

    Args:
        phi: [..., i, j] the credit of one layer, or a factor of credit.
        input_mask: [..., i] True for used inputs, None if all are used. Unused inputs must have credit 0.
        group: name of the group of ranks among which the inputs are divided. Each rank holds the credit of
            its own inputs. "" if the inputs are not divided.
    """

    def __init__(self, phi: Tensor | Factor, input_mask: Tensor | None = None, group: str = ""):
        if not isinstance(phi, Factor):
            phi = Matrix(check_float_tensor("phi", phi, "[..., n_inp, n_out]", None))
        if len(phi.shape) < 2:
            raise ValueError(f"phi must be [..., n_inp, n_out], got {list(phi.shape)}")
        like = phi.like.new_empty(()).expand(phi.shape)  # [..., i, j]
        self.factor, self.group = phi, group
        self.input_mask = check_mask("input_mask", input_mask, like, sizes={"n_inp": phi.shape[-2]})

    @property
    def shape(self) -> torch.Size:
        """The shape [..., n_inp, n_out]."""
        return torch.Size(self.factor.shape)

    def __repr__(self) -> str:
        return f"Credit({list(self.shape)})"

    def dense(self) -> Tensor:
        """Return every element, [..., i, j]."""
        return self.factor.dense().expand(self.shape)  # [..., i, j]

    def column(self, j: int) -> Tensor:
        """Return the credit of every input for output j, [..., i]."""
        return self._columns(self._output(j), 1)[..., 0]  # [..., i]

    def top(self, k: int, j: int) -> Top:
        """Return the k inputs with the largest credit for output j, largest first, unused inputs last."""
        check_size("k", k)
        if k > self.shape[-2]:
            raise ValueError(f"k must be at most n_inp={self.shape[-2]}, got {k}")
        column = self.column(j)  # [..., i]
        ranked = column if self.input_mask is None else column.masked_fill(~self.input_mask, -torch.inf)
        indices = ranked.topk(k).indices  # [..., k]
        return Top(column.gather(-1, indices), indices)

    def sum_groups(self, index: Tensor, n: int | None = None) -> "Credit":
        """Sum the credit over groups of inputs, such as words, sentences, image regions or depths.

        Args:
            index: [i] or [..., i] the group of each input, from 0. A negative number leaves the input out.
            n: number of groups, None for one more than the largest index.

        Returns:
            Credit [..., n, j] whose inputs are the groups. A group counts as used if one of its inputs is.
        """
        index, n = check_groups(index, n, self.shape[-2])
        batch, lead = self.shape[:-2], index.shape[:-1]
        pairs = zip(reversed(lead), reversed(batch), strict=False)
        check_batch(index, batch, len(lead) <= len(batch) and all(a in (1, b) for a, b in pairs))
        input_mask = None
        if self.input_mask is not None:
            counts = Matrix(self.input_mask[..., None].to(index.dtype)).group(index, n).dense()  # [..., n, 1]
            input_mask = counts[..., 0] > 0  # [..., n]
        return Credit(self.factor.group(index, n), input_mask, self.group)

    def unit_variance(self) -> "Credit":
        """Divide the credit by its standard deviation over the used inputs and all outputs of each sample.

        The paper divides by one standard deviation for the whole batch, so that its result for a sample
        depends on the other samples. A sample whose credit is constant, up to rounding, is not changed.
        The standard deviation is computed in float64.
        """
        narrow = None if self.group or self.factor.like.requires_grad else narrowed(self.factor)
        if narrow is not None:
            return Credit(divided(self.factor, self._spread(*narrow)), self.input_mask)
        n_out, like = self.shape[-1], self.factor.like
        used = torch.ones((), dtype=torch.float64, device=like.device).expand(
            *self.shape[:-1], 1
        )  # [..., i, 1]
        if self.input_mask is not None:
            used = used * self.input_mask[..., None]  # [..., i, 1]
        (n_used,) = total(self.group, used.sum((-2, -1), keepdim=True))  # [..., 1, 1]
        n_pairs = n_used.clamp(min=1) * n_out  # [..., 1, 1]
        width = max(1, BUDGET // max(1, self.shape[:-1].numel()))
        starts = range(0, n_out, width)

        def columns(j: int) -> Tensor:
            return self._columns(j, min(width, n_out - j)).double() * used  # [..., i, width]

        peak = torch.stack([greatest(columns(j)) for j in starts]).amax(0)  # [..., 1, 1]
        if self.group:
            all_reduce(self.group, peak, torch.distributed.ReduceOp.MAX)
        # After division by the peak, no square can overflow or underflow.
        peak = peak.where(peak > 0, 1.0)  # [..., 1, 1]
        sums = torch.zeros_like(peak)  # [..., 1, 1]
        for j in starts:
            sums = sums + (columns(j) / peak).sum((-2, -1), keepdim=True)
        mean = total(self.group, sums)[0] / n_pairs  # [..., 1, 1]
        squares = torch.zeros_like(mean)  # [..., 1, 1]
        for j in starts:
            squares = squares + ((columns(j) / peak - mean).square() * used).sum((-2, -1), keepdim=True)
        variance = total(self.group, squares)[0] / n_pairs  # [..., 1, 1]
        varies = variance > (4 * torch.finfo(like.dtype).eps * mean).square()  # [..., 1, 1]
        std = torch.where(varies, peak, 1.0) * variance.where(varies, 1.0).sqrt()  # [..., 1, 1]
        return Credit(divided(self.factor, std), self.input_mask, self.group)

    def __getitem__(self, index: Any) -> "Credit":
        """Return the credit of some samples: ``credit[b]``, ``credit[2:5]``, ``credit[b, c]``."""
        parts = index if isinstance(index, tuple) else (index,)
        batch = self.shape[:-2]
        if len(parts) > len(batch) or any(part is None or part is ... for part in parts):
            raise IndexError(f"credit {list(self.shape)} has {len(batch)} batch dimensions, got [{index!r}]")
        mask = self.input_mask

        def pick(tensor: Tensor, k: int) -> Tensor:
            return tensor.expand(*batch, *tensor.shape[tensor.dim() - k :])[parts]

        return Credit(self.factor.map(pick), None if mask is None else pick(mask, 1), self.group)

    def detach(self) -> "Credit":
        """Return the same credit without a graph."""
        return Credit(self.factor.map(lambda tensor, _: tensor.detach()), self.input_mask, self.group)

    def cpu(self) -> "Credit":
        """Return the same credit in CPU memory."""
        mask = None if self.input_mask is None else self.input_mask.cpu()
        return Credit(self.factor.map(lambda tensor, _: tensor.cpu()), mask, self.group)

    def to_numpy(self):
        """Return every element as an array [..., i, j]."""
        return to_numpy(self.dense())

    def to_pandas(self):
        """Return every element as a data frame: a row per sample and input i, a column per output j."""
        pandas = require("pandas", "data")
        *batch, n_inp, n_out = self.shape
        names = [*(f"batch_{k}" for k in range(len(batch))), "i"]
        rows = pandas.MultiIndex.from_product([range(n) for n in (*batch, n_inp)], names=names)
        columns = pandas.RangeIndex(n_out, name="j")
        return pandas.DataFrame(self.to_numpy().reshape(-1, n_out), index=rows, columns=columns)

    def save(self, path: str | os.PathLike) -> None:
        """Write the factors to one safetensors file. An interrupted call leaves no partial file."""
        tensors: dict[str, Tensor] = {} if self.input_mask is None else {"input_mask": self.input_mask}
        save_tensors(path, tensors, {"kind": "credit", "factor": pack(self.factor, tensors)})

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Credit":
        """Read a file that ``save`` wrote."""
        tensors, about = load_tensors(path, "credit")
        return cls(unpack(about["factor"], tensors), tensors.get("input_mask"))

    def _spread(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the standard deviation [..., 1, 1] of the product of a [..., i, k] and b [..., k, j].

        No matrix [i, j] is formed. With the QR decomposition a = Q R, the squares of a b and of R b have the
        same sum. An additional column of a and row of b subtract the mean.
        """
        used = torch.ones_like(a[..., :1])  # [..., i, 1]
        if self.input_mask is not None:
            used = used * self.input_mask[..., None]  # [..., i, 1]
        n_pairs = used.sum((-2, -1), keepdim=True).clamp(min=1) * b.shape[-1]  # [..., 1, 1]
        # After division by the greatest elements, no square in a or b can overflow or underflow.
        scales = [greatest(t).where(greatest(t) > 0, 1.0) for t in (a, b)]  # [..., 1, 1] each
        a, b = a * used / scales[0], b / scales[1]  # [..., i, k], [..., k, j]
        mean = a.sum(-2, keepdim=True) @ b.sum(-1, keepdim=True) / n_pairs  # [..., 1, 1]
        r = torch.linalg.qr(torch.cat([a, used], -1), mode="r").R  # [..., k + 1, k + 1]
        b = torch.cat([b, -mean.expand(*b.shape[:-2], 1, b.shape[-1])], -2)  # [..., k + 1, j]
        variance = (r @ b).square().sum((-2, -1), keepdim=True) / n_pairs  # [..., 1, 1]
        varies = variance > (4 * torch.finfo(self.factor.like.dtype).eps * mean).square()  # [..., 1, 1]
        peak = scales[0] * scales[1]  # [..., 1, 1]
        return torch.where(varies, peak, 1.0) * variance.where(varies, 1.0).sqrt()  # [..., 1, 1]

    def _output(self, j: int) -> int:
        n_out, column = self.shape[-1], as_int("j", j, "an int")
        if not -n_out <= column < n_out:
            raise ValueError(f"j must be one of 0, ..., n_out - 1 = {n_out - 1}, got {j}")
        return column % n_out

    def _columns(self, j: int, n: int) -> Tensor:
        """Return columns j to j + n - 1, [..., i, n]."""
        like = self.factor.like
        one_hot = torch.zeros(self.shape[-1], n, dtype=like.dtype, device=like.device)  # [j, n]
        one_hot[j : j + n] = torch.eye(n, dtype=like.dtype, device=like.device)
        return self.factor.right(one_hot).expand(*self.shape[:-1], n)  # [..., i, n]


def narrowed(factor: Factor) -> tuple[Tensor, Tensor] | None:
    """Split a product at its smallest inner size k: a [..., i, k] and b [..., k, j], in float64.

    Return None if the factor is not a product, or if no inner size is smaller than both i and j.
    """
    if not isinstance(factor, Product):
        return None
    sizes = [part.shape[-1] for part in factor.factors[:-1]]
    cut = sizes.index(min(sizes)) + 1 if sizes else 0
    if not sizes or sizes[cut - 1] + 1 >= min(factor.shape[-2:]):
        return None
    a, b = Product(factor.factors[:cut]).dense().double(), Product(factor.factors[cut:]).dense().double()
    batch = factor.shape[:-2]
    return a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])


def greatest(columns: Tensor) -> Tensor:
    """Return the greatest absolute value of each sample, [..., 1, 1], or 0 if the sample is empty."""
    if not columns.numel():
        return columns.new_zeros(*columns.shape[:-2], 1, 1)
    return columns.detach().abs().amax((-2, -1), keepdim=True)  # [..., 1, 1]


def check_groups(index: object, n: int | None, n_inp: int) -> tuple[Tensor, int]:
    """Return the group of each input as int64, with n in place of negative numbers, and n."""
    expected = f"an integer tensor [..., n_inp={n_inp}]"
    if not isinstance(index, Tensor):
        index = torch.as_tensor(index)
    if index.is_floating_point() or index.dtype == torch.bool or index.is_complex():
        raise TypeError(f"index must be {expected}, got dtype {index.dtype}")
    if index.dim() == 0 or index.shape[-1] != n_inp:
        raise ValueError(f"index must be {expected}, got {list(index.shape)}")
    largest = int(index.max()) if index.numel() else -1
    if n is None:
        n = max(largest + 1, 1)
    check_size("n", n)
    if largest >= n:
        raise ValueError(f"index must be less than n={n}, got {largest}")
    return index.long().where(index >= 0, n), n


def check_batch(index: Tensor, batch: Sequence[int], fits: bool) -> None:
    """Raise unless the leading dimensions of index fit the batch."""
    if not fits:
        expected = f"[n_inp] or [..., n_inp] with the leading dimensions of the batch, {list(batch)}"
        raise ValueError(f"index must be {expected}, got {list(index.shape)}")


def as_int(name: str, value: object, expected: str) -> int:
    """Return an integer, such as an element of a tensor, as an int. Raise for other types and for bool."""
    try:
        if not isinstance(value, bool) and getattr(value, "dtype", None) != torch.bool:
            return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise TypeError(f"{name} must be {expected}, got {value!r} ({type(value).__name__})")


def to_numpy(tensor: Tensor):
    """Return a tensor as a numpy array."""
    require("numpy", "data")
    tensor = tensor.detach().cpu()
    # numpy has no bfloat16.
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
