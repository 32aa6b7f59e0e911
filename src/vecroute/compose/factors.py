"""The factors of a ``Credit``: linear maps [..., i, j] that multiply vectors without forming all elements."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor


class Factor(ABC):
    """A linear map of shape [..., i, j]."""

    shape: tuple[int, ...]  # [..., i, j]
    like: Tensor  # one of its tensors, for dtype and device

    @abstractmethod
    def right(self, v: Tensor) -> Tensor:
        """Multiply this map by v: [..., j, k] -> [..., i, k]."""

    @abstractmethod
    def left(self, u: Tensor) -> Tensor:
        """Multiply u by this map: [..., k, i] -> [..., k, j]."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Return every element, [..., i, j]."""

    @abstractmethod
    def group(self, index: Tensor, n: int) -> "Factor":
        """Sum rows by group: [..., i, j] -> [..., n, j]. Index [..., i] counts from 0; n means no group."""

    @abstractmethod
    def map(self, f: Callable[[Tensor, int], Tensor]) -> "Factor":
        """Replace each tensor t by f(t, k), where k is the number of its dimensions after the batch."""


class Matrix(Factor):
    """A dense matrix, such as the phi [..., i, j] of one routing."""

    def __init__(self, phi: Tensor):
        self.phi, self.shape, self.like = phi, tuple(phi.shape), phi

    def right(self, v: Tensor) -> Tensor:
        return self.phi @ v  # [..., i, k]

    def left(self, u: Tensor) -> Tensor:
        return u @ self.phi  # [..., k, j]

    def dense(self) -> Tensor:
        return self.phi

    def group(self, index: Tensor, n: int) -> Factor:
        batch = torch.broadcast_shapes(self.shape[:-2], index.shape[:-1])
        phi = self.phi.expand(*batch, *self.shape[-2:])  # [..., i, j]
        sums = phi.new_zeros(*batch, n + 1, self.shape[-1])  # [..., n + 1, j]
        sums = sums.scatter_add(-2, index[..., None].expand(phi.shape), phi)  # [..., n + 1, j]
        return Matrix(sums[..., :n, :])

    def map(self, f: Callable[[Tensor, int], Tensor]) -> Factor:
        return Matrix(f(self.phi, 2))


class Diagonal(Factor):
    """A diagonal matrix, given by its diagonal [..., i]: ones, for a module that does not mix vectors."""

    def __init__(self, diagonal: Tensor):
        self.diagonal, self.like = diagonal, diagonal
        self.shape = (*diagonal.shape, diagonal.shape[-1])

    def right(self, v: Tensor) -> Tensor:
        return self.diagonal[..., :, None] * v  # [..., i, k]

    def left(self, u: Tensor) -> Tensor:
        return u * self.diagonal[..., None, :]  # [..., k, i]

    def dense(self) -> Tensor:
        return torch.diag_embed(self.diagonal)  # [..., i, i]

    def group(self, index: Tensor, n: int) -> Factor:
        batch = torch.broadcast_shapes(self.shape[:-2], index.shape[:-1])
        row = (*batch, 1, self.shape[-1])
        diagonal = self.diagonal[..., None, :].expand(row)  # [..., 1, i]
        sums = diagonal.new_zeros(*batch, n + 1, self.shape[-1])  # [..., n + 1, i]
        sums = sums.scatter(-2, index[..., None, :].expand(row), diagonal)  # [..., n + 1, i]
        return Matrix(sums[..., :n, :])

    def map(self, f: Callable[[Tensor, int], Tensor]) -> Factor:
        return Diagonal(f(self.diagonal, 1))


class Product(Factor):
    """A product of factors, multiplied in the cheapest order when a method needs it."""

    def __init__(self, factors: Sequence[Factor]):
        self.factors: list[Factor] = []
        for factor in factors:
            self.factors += factor.factors if isinstance(factor, Product) else [factor]
        self.shape = _shape(self.factors, self.factors[0].shape[-2], self.factors[-1].shape[-1])
        self.like = self.factors[0].like

    def right(self, v: Tensor) -> Tensor:
        return multiply([*self.factors, v])  # [..., i, k]

    def left(self, u: Tensor) -> Tensor:
        return multiply([u, *self.factors])  # [..., k, j]

    def dense(self) -> Tensor:
        return multiply(self.factors)  # [..., i, j]

    def group(self, index: Tensor, n: int) -> Factor:
        return Product([self.factors[0].group(index, n), *self.factors[1:]])

    def map(self, f: Callable[[Tensor, int], Tensor]) -> Factor:
        return Product([factor.map(f) for factor in self.factors])


class Block(NamedTuple):
    """A factor and its first row and column in a larger map."""

    factor: Factor
    i: int
    j: int


class Blocks(Factor):
    """A sum of blocks. Blocks may stand side by side, one above the other, on the diagonal, or overlap."""

    def __init__(self, blocks: Sequence[Block], n_inp: int, n_out: int):
        self.blocks, self.like = list(blocks), blocks[0].factor.like
        self.shape = _shape([b.factor for b in blocks], n_inp, n_out)

    def right(self, v: Tensor) -> Tensor:
        parts = [
            (b.i, 0, b.factor.right(v[..., b.j : b.j + b.factor.shape[-1], :]))  # [..., part of i, k]
            for b in self.blocks
        ]
        return _place(parts, self.shape[-2], v.shape[-1])  # [..., i, k]

    def left(self, u: Tensor) -> Tensor:
        parts = [
            (0, b.j, b.factor.left(u[..., b.i : b.i + b.factor.shape[-2]]))  # [..., k, part of j]
            for b in self.blocks
        ]
        return _place(parts, u.shape[-2], self.shape[-1])  # [..., k, j]

    def dense(self) -> Tensor:
        return _place([(b.i, b.j, b.factor.dense()) for b in self.blocks], *self.shape[-2:])  # [..., i, j]

    def group(self, index: Tensor, n: int) -> Factor:
        groups = [
            Block(b.factor.group(index[..., b.i : b.i + b.factor.shape[-2]], n), 0, b.j) for b in self.blocks
        ]
        return Blocks(groups, n, self.shape[-1])

    def map(self, f: Callable[[Tensor, int], Tensor]) -> Factor:
        return Blocks([Block(b.factor.map(f), b.i, b.j) for b in self.blocks], *self.shape[-2:])


def multiply(chain: Sequence[Factor | Tensor]) -> Tensor:
    """Multiply a chain of matrices in the order that takes the fewest multiplications."""
    parts = [part.phi if isinstance(part, Matrix) else part for part in chain]
    sizes = [part.shape[-2] for part in parts] + [parts[-1].shape[-1]]

    @cache
    def cheapest(a: int, b: int) -> tuple[int, int]:
        """Return the number of multiplications for parts a to b, and the part after which to split."""
        if a == b:
            return 0, a
        return min(
            (cheapest(a, c)[0] + cheapest(c + 1, b)[0] + sizes[a] * sizes[c + 1] * sizes[b + 1], c)
            for c in range(a, b)
        )

    def product(a: int, b: int) -> Factor | Tensor:
        if a == b:
            return parts[a]
        split = cheapest(a, b)[1]
        return _times(product(a, split), product(split + 1, b))

    whole = product(0, len(parts) - 1)
    return whole if isinstance(whole, Tensor) else whole.dense()


def divided(factor: Factor, divisor: Tensor) -> Factor:
    """Divide a factor by one number per sample, [..., 1, 1], and keep its dtype.

    In a product, only the last factor is divided. It is not multiplied by 1 / divisor, because that number
    may overflow in the dtype of the factor.
    """
    if isinstance(factor, Product):
        return Product([*factor.factors[:-1], divided(factor.factors[-1], divisor)])
    if isinstance(factor, Blocks):
        return Blocks(
            [Block(divided(b.factor, divisor), b.i, b.j) for b in factor.blocks], *factor.shape[-2:]
        )
    if isinstance(factor, Diagonal):
        return Diagonal((factor.diagonal / divisor[..., 0]).to(factor.like.dtype))
    return Matrix((factor.dense() / divisor).to(factor.like.dtype))


def pack(factor: Factor, tensors: dict[str, Tensor]) -> list:
    """Describe a factor in JSON types, and add its tensors to ``tensors`` under names that it mentions."""
    if isinstance(factor, Product):
        return ["product", [pack(part, tensors) for part in factor.factors]]
    if isinstance(factor, Blocks):
        blocks = [[pack(b.factor, tensors), b.i, b.j] for b in factor.blocks]
        return ["blocks", blocks, *factor.shape[-2:]]
    name = f"factor_{len(tensors)}"
    tensors[name] = factor.like
    return ["diagonal" if isinstance(factor, Diagonal) else "matrix", name]


def unpack(description: list, tensors: dict[str, Tensor]) -> Factor:
    """Rebuild the factor that ``pack`` described."""
    kind, content, *sizes = description
    if kind == "product":
        return Product([unpack(part, tensors) for part in content])
    if kind == "blocks":
        return Blocks([Block(unpack(part, tensors), i, j) for part, i, j in content], *sizes)
    return Diagonal(tensors[content]) if kind == "diagonal" else Matrix(tensors[content])


def _times(a: Factor | Tensor, b: Factor | Tensor) -> Tensor:
    if isinstance(b, Tensor):
        return a @ b if isinstance(a, Tensor) else a.right(b)
    return b.left(a) if isinstance(a, Tensor) else a.right(b.dense())


def _place(parts: list[tuple[int, int, Tensor]], n: int, k: int) -> Tensor:
    """Add each tensor at its row and column to a matrix of zeros [..., n, k]."""
    batch = torch.broadcast_shapes(*(t.shape[:-2] for _, _, t in parts))
    whole = parts[0][2].new_zeros(*batch, n, k)  # [..., n, k]
    for i, j, t in parts:
        whole[..., i : i + t.shape[-2], j : j + t.shape[-1]] += t
    return whole


def _shape(factors: Sequence[Factor], n_inp: int, n_out: int) -> tuple[int, ...]:
    return (*torch.broadcast_shapes(*(factor.shape[:-2] for factor in factors)), n_inp, n_out)
