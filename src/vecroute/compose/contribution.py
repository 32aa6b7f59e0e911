"""Contributions: what each input adds to an output of a network, in the units of that output.

With phi, attention weights, the scales of normalisations and the gates of activations held fixed, a network
is affine in its inputs: output = base + sum_i contribution_i, exactly.
"""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vecroute.compose.credit import as_int, check_batch, check_groups, to_numpy
from vecroute.compose.held import Held
from vecroute.compose.probe import precision
from vecroute.ops.checks import check_choice
from vecroute.ops.group import total
from vecroute.storage import load_tensors, require, save_tensors


class Contributions(NamedTuple):
    """What each input adds to the outputs of a network, so that values.sum(-1) + base = output.

    ``values`` is [..., i] for one output and [..., j, i] for all outputs. If outputs are vectors, it is
    [..., h, i] or [..., j, h, i]. The other fields have the same dimensions without i.
    """

    values: Tensor  # [..., i] what each input adds to the output
    base: Tensor  # [...] the output at x = 0, with phi, scales and gates held at their values for x
    output: Tensor  # [...] the output of the network
    completeness_error: Tensor  # [...] |sum_i values + base - output| / (sum_i |values| + |base|)

    def sum_groups(self, index: Tensor, n: int | None = None) -> "Contributions":
        """Sum contributions over groups of inputs: tokens, words, sentences, image regions, depths.

        Args:
            index: [i] or [..., i] the group of each input, from 0. Each input must be in a group, because the
                sum needs all contributions.
            n: number of groups, None for one more than the largest index.
        """
        index, n = check_groups(index, n, self.values.shape[-1])
        if (index == n).any():
            raise ValueError("index must put every input in a group, got negative numbers")
        # The dimensions of index are batch dimensions, which come first in values.
        batch, lead = self.values.shape[:-1], index.shape[:-1]
        pairs = zip(lead, batch, strict=False)
        check_batch(index, batch, len(lead) <= len(batch) and all(a in (1, b) for a, b in pairs))
        index = index.reshape(*index.shape[:-1], *[1] * (self.values.dim() - index.dim()), index.shape[-1])
        sums = self.values.new_zeros(*self.values.shape[:-1], n)  # [..., n]
        sums = sums.scatter_add(-1, index.expand(self.values.shape), self.values)  # [..., n]
        return Contributions(sums, self.base, self.output, completeness_error(sums, self.base, self.output))

    def to_numpy(self) -> dict[str, Any]:
        """Return every field as an array."""
        return {name: to_numpy(tensor) for name, tensor in self._asdict().items()}

    def to_pandas(self):
        """Return a data frame, a row for each input and output: value, base, output, completeness_error."""
        pandas = require("pandas", "data")
        names = [*(f"axis_{k}" for k in range(self.values.dim() - 1)), "i"]
        rows = pandas.MultiIndex.from_product([range(n) for n in self.values.shape], names=names)
        columns = {"value": self.values}
        for name, tensor in list(self._asdict().items())[1:]:
            columns[name] = tensor[..., None].expand_as(self.values)  # [..., i]
        flat = {name: to_numpy(tensor.reshape(-1)) for name, tensor in columns.items()}
        return pandas.DataFrame(flat, index=rows)

    def save(self, path: str | os.PathLike) -> None:
        """Write one safetensors file, completely or not at all. ``Contributions.load`` reads it."""
        save_tensors(path, self._asdict(), {"kind": "contributions"})

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Contributions":
        """Read a file that ``save`` wrote."""
        return cls(**load_tensors(path, "contributions")[0])


def contributions(
    network: nn.Module,
    x_inp: Any,
    output: int | Tensor | None = None,
    margin: int | Tensor | None = None,
    *,
    bias: str = "base",
    input_mask: Any = None,
    pair_mask: Any = None,
) -> Contributions:
    """Split an output of a network into what each input adds to it and a base, exactly.

        output = base + sum_i values_i

    ``values_i`` is the gradient times x_i, and ``base`` is the output at x = 0. Both hold phi, attention
    weights, scales and gates fixed as they are at x. The function runs one forward pass, one pass of the
    affine network at x = 0, and one backward pass for each requested output. It keeps no graph. The sum is
    exact up to rounding: 1e-5 in float32 without autocast.

    Args:
        network: a routing; routings and other modules composed with ``Sequential``, ``Residual``, ``Sum`` or
            ``Concat``; a head, which takes hidden states [..., n_pos, depth, d_emb] with
            i = position * depth + level; or any module of standard operations that returns [..., j] or
            [..., j, h].
        x_inp: [..., i, d], or a tuple if the network takes one. Inputs of a tuple are concatenated over i.
        output: the output j, one for all samples or a tensor [...] with one for each; None for all outputs.
        margin: an output to subtract, for the margin between two.
        bias: how to count the bias of the first routing's votes, sum_i phi_ij B_F2_jh. "base" adds it to the
            base. "votes" adds to each input its own part, phi_ij B_F2_jh.
        input_mask, pair_mask: masks, as in ``forward``. Unused inputs contribute 0.

    Raises:
        TypeError: a part of the network is a ``MatrixRouting``, or not a module.
        ValueError: an operation is not affine and no rule holds it fixed, a ``PerVector`` mixes vectors, or
            an argument is wrong.
    """
    check_choice("bias", bias, ("base", "votes"))
    with torch.inference_mode(False), torch.enable_grad():
        held = Held(network, x_inp, input_mask, pair_mask, votes=bias == "votes")
        target = select(held.x_out, output, margin)  # [...]
        values = _gradient_times_input(target, held.inputs, held.units)  # [..., i]
    with torch.no_grad():
        base, target = select(held.at_zero(), output, margin), target.detach()  # [...] each
        error = completeness_error(values, base, target, held.group)  # [...]
        if held.foreign:
            check_complete(held.name, error, precision(held.inputs[0]))
        return Contributions(values, base, target, error)


def check_complete(name: str, error: Tensor, dtype: torch.dtype) -> None:
    """Raise if contributions miss the output by more than rounding. Then the rules missed an operation."""
    if not error.numel() or error.max() <= torch.finfo(dtype).eps ** 0.5:
        return
    raise ValueError(
        f"{name} cannot be split into contributions: they miss its output by {error.max():.2g} of their "
        "size. It mixes samples, or it computes in a way that torch functions do not show "
        "(autograd.Function, compiled code): write that part with standard operations, or hold its result "
        "fixed with .detach()"
    )


def completeness_error(values: Tensor, base: Tensor, output: Tensor, group: str = "") -> Tensor:
    """Return |sum_i values + base - output| / (sum_i |values| + |base|), [...]; 0 if the sum is exact.

    The sums are over the inputs of every rank of the group, if there is one.
    """
    sums, magnitudes = total(group, values.sum(-1), values.abs().sum(-1))  # [...] each
    error = (sums + base - output).abs()  # [...]
    scale = magnitudes + base.abs()  # [...]
    return torch.where(error == 0, 0.0, error / scale)  # [...]


def _gradient_times_input(target: Tensor, inputs: Sequence[Tensor], units: Sequence[Tensor]) -> Tensor:
    """Return the gradient of the target times x, summed over d, for each input, [..., i].

    If the inputs have units, add the gradients of the units. The function runs one backward pass for each
    element of the target of one sample.
    """
    batch = inputs[0].shape[:-2]
    targets = target.reshape(*batch, -1)  # [..., k]
    rows = []
    for k in range(targets.shape[-1]):
        more = k + 1 < targets.shape[-1]
        at, total = [*inputs, *units], targets[..., k].sum()
        if total.requires_grad:
            gradients = torch.autograd.grad(total, at, retain_graph=more, materialize_grads=True)
        else:  # the votes do not depend on the inputs
            gradients = tuple(map(torch.zeros_like, at))
        # An input without a gradient contributes nothing, even if it is NaN.
        row = [
            (g * x.detach()).where(g != 0, 0.0).sum(-1) for g, x in zip(gradients, inputs, strict=False)
        ]  # [..., i] each
        for position, gradient in enumerate(gradients[len(inputs) :]):
            row[position] = row[position] + gradient  # [..., i]
        rows.append(torch.cat(row, -1))  # [..., i]
    return torch.stack(rows, -2).reshape(*target.shape, -1)  # [*target.shape, i]


def select(x_out: Tensor, output: int | Tensor | None, margin: int | Tensor | None) -> Tensor:
    """Select the requested outputs from x_out [..., j, h]: [...], [..., j], [..., h] or [..., j, h]."""
    if output is not None:
        difference = _pick("output", x_out, output)  # [..., h]
        if margin is not None:
            difference = difference - _pick("margin", x_out, margin)  # [..., h]
        x_out = difference
    elif margin is not None:
        raise ValueError(f"margin needs an output to subtract from, got output=None and margin={margin}")
    return x_out[..., 0] if x_out.shape[-1] == 1 else x_out


def _pick(name: str, x_out: Tensor, j: int | Tensor) -> Tensor:
    """Return output j of each sample, [..., h]."""
    n_out, batch = x_out.shape[-2], x_out.shape[:-2]
    if not isinstance(j, Tensor) or j.dim() == 0:
        j = torch.tensor(as_int(name, j, "an int or an integer tensor"), device=x_out.device)
    elif j.is_floating_point() or j.dtype == torch.bool or j.shape != batch:
        expected = f"an int or an integer tensor {list(batch)}, one for each sample"
        raise ValueError(f"{name} must be {expected}, got {j.dtype} {list(j.shape)}")
    if ((j < -n_out) | (j >= n_out)).any():
        raise ValueError(f"{name} must be one of 0, ..., n_out - 1 = {n_out - 1}, got {j.tolist()}")
    index = (j.long() % n_out).expand(batch)[..., None, None]  # [..., 1, 1]
    return x_out.gather(-2, index.expand(*batch, 1, x_out.shape[-1]))[..., 0, :]  # [..., h]
