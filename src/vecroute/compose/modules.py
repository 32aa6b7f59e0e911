"""Networks of routings (Appendix A): modules that nest and have the methods of a layer."""

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from vecroute.compose.credit import Credit
from vecroute.compose.factors import Block, Blocks, Diagonal, Factor, Matrix, Product
from vecroute.compose.masks import (
    Masks,
    all_or_none,
    as_arguments,
    check_not_nested,
    concatenated,
    joined_input_mask,
    leaves,
    masks_of,
    used,
)
from vecroute.compose.probe import check_independent
from vecroute.layers import GeneralRouting, MatrixRouting, Routed, VectorRouting
from vecroute.ops.group import announced, has_ranks, sum_gradients

# A function that runs one part of a network: (part, x_inp, masks) -> (x_out, factor of the credit or None).
Visit = Callable[[nn.Module, Any, Any], tuple[Any, Factor | None]]


class Network(nn.Module):
    """Base class of the compositions. ``forward`` and ``route`` call ``run`` with different visits."""

    def run(self, x: Any, masks: Any, visit: Visit) -> tuple[Tensor, Factor | None]:
        """Visit the parts in order and join their outputs and factors."""
        raise NotImplementedError

    def after(self, masks: Any) -> Masks:
        """Return the masks of the output vectors, given the masks of the inputs."""
        raise NotImplementedError

    def forward(
        self, x_inp: Any, input_mask: Any = None, pair_mask: Any = None, *, is_part: bool = False
    ) -> Tensor:
        """Run the network.

        Args:
            is_part: this network is a part of another one. Then pair_mask may be unused here, because a
                later part may use it.
        """
        with announced("" if is_part else checked_group_of(self)):
            masks = masks_of(x_inp, input_mask, pair_mask)
            x_out = self.run(x_inp, masks, _forward)[0]  # [..., j, h]
            if not is_part:
                check_pair_mask(self, masks)
            return x_out

    def route(self, x_inp: Any, input_mask: Any = None, pair_mask: Any = None) -> Routed:
        """Return x_out and the end-to-end ``Credit`` [..., i, j] of every input for every output.

        Raises:
            TypeError: a part is neither a routing nor a composition.
            ValueError: a part that is not a routing mixes vectors.
        """
        with announced(checked_group_of(self)):
            check_network(self)
            check_not_nested(x_inp)
            masks = masks_of(x_inp, input_mask, pair_mask)
            x_out, factor = self.run(x_inp, masks, _route)
            check_pair_mask(self, masks)
            assert factor is not None  # ``_route`` always returns a factor
            return Routed(x_out, Credit(factor, joined_input_mask(masks), group_of(self)))


class PerVector(Network):
    """A module that treats each vector separately: LayerNorm, Linear, an MLP, dropout, position embeddings.

    Its credit is the identity. ``route`` tests that the module does not mix vectors: NaN in one input vector
    must not reach another output vector.

    Args:
        module: [..., i, d] -> [..., i, h]. Unused inputs reach it as zeros.
    """

    def __init__(self, module: Callable[[Tensor], Tensor]):
        super().__init__()
        if not callable(module):
            raise TypeError(f"module must be a module or function, got {type(module).__name__}")
        self.module = module
        self.probed: set = set()
        # Set by ``distributed.shard_inputs``: the group of ranks among which the inputs are divided.
        self.group = ""

    def forward(
        self, x_inp: Any, input_mask: Any = None, pair_mask: Any = None, *, is_part: bool = False
    ) -> Tensor:
        check_one_tensor(self, x_inp)
        masks = masks_of(x_inp, input_mask, pair_mask)
        if not x_inp.is_nested and x_inp.shape[-2] == 0 and not self.group:
            raise ValueError(f"x_inp must have at least one vector, got {list(x_inp.shape)}")
        if not is_part:
            check_pair_mask(self, masks)
        input_mask = masks.input_mask  # [..., i]
        x_out = self._call(used(x_inp, input_mask))  # [..., i, h]
        if not isinstance(x_out, Tensor) or x_out.shape[:-1] != x_inp.shape[:-1]:
            expected = [*x_inp.shape[:-1], "d_out"]
            came = list(x_out.shape) if isinstance(x_out, Tensor) else type(x_out).__name__
            raise ValueError(
                f"{module_name(self)} must return one vector per input vector, {expected}, got {came}"
            )
        return x_out

    def _call(self, x: Tensor) -> Tensor:
        if not self.group or not isinstance(self.module, nn.Module):
            return self.module(x)  # [..., i, h]
        parameters = dict(self.module.named_parameters())
        shared = sum_gradients(self.group, *parameters.values())
        return functional_call(self.module, dict(zip(parameters, shared, strict=True)), (x,))  # [..., i, h]

    def run(self, x: Any, masks: Any, visit: Visit) -> tuple[Tensor, Factor | None]:
        check_one_tensor(self, x)
        x_out = self(x, masks.input_mask)  # [..., i, h]
        check_independent(module_name(self), self.module, x, self.probed)
        return x_out, _identity(x, masks.input_mask)

    def after(self, masks: Any) -> Masks:
        return masks


class Sequential(Network, nn.Sequential):
    """Run parts one after the other: phi = phi_1 @ phi_2 @ ... (Appendix A, "In Sequential Routings").

    Masks apply to every part up to and including the first routing. Its outputs need no mask.
    """

    def __init__(self, *modules: Any):
        nn.Sequential.__init__(self, *modules)
        if not len(self):
            raise ValueError("Sequential needs at least one module, got none")

    def run(self, x: Any, masks: Any, visit: Visit) -> tuple[Tensor, Factor | None]:
        factors = []
        for module in self:
            x, factor = visit(module, x, masks)  # [..., j, h]
            masks = after(module, masks)
            factors.append(factor)
        # The identities of parts that do not mix vectors are left out, unless there is no routing at all.
        mixing = [factor for factor in factors if factor is not None and not isinstance(factor, Diagonal)]
        return x, Product(mixing) if len(mixing) > 1 else [*mixing, factors[0]][0]

    def after(self, masks: Any) -> Masks:
        for module in self:
            masks = after(module, masks)
        return masks


class Residual(Network):
    """Compute x + routing(x), with phi = I + phi_routing (Appendix A, "In Residual Routings").

    Unused inputs have phi = 0.

    Args:
        routing: a module whose output has the shape of its input.
    """

    def __init__(self, routing: nn.Module):
        super().__init__()
        _check_modules("Residual", [routing])
        self.routing = routing

    def run(self, x: Any, masks: Any, visit: Visit) -> tuple[Tensor, Factor | None]:
        check_one_tensor(self, x)
        x_res, factor = visit(self.routing, x, masks)  # [..., i, d]
        if x_res.shape != x.shape:
            came = list(x_res.shape)
            raise ValueError(f"{module_name(self)} must keep the shape {list(x.shape)}, got {came}")
        x_out = used(x, masks.input_mask) + x_res  # [..., i, d]
        if factor is None:
            return x_out, None
        return x_out, _joined([_identity(x, masks.input_mask), factor], stack=False, beside=False)

    def after(self, masks: Any) -> Masks:
        return after(self.routing, masks)


class Sum(Network):
    """Add the outputs of the branches.

    A tuple gives each branch its own input, and credits stack over i (Appendix A, "In Sums of Routings").
    Masks then are tuples too, or None. One tensor goes to every branch, and credits add.

    Args:
        branches: modules whose outputs have the same shape.
    """

    def __init__(self, *branches: nn.Module):
        super().__init__()
        _check_modules("Sum", branches)
        self.branches = nn.ModuleList(branches)

    def run(self, x: Any, masks: Any, visit: Visit) -> tuple[Tensor, Factor | None]:
        xs, factors = _run_branches(self, x, masks, visit)
        if len({tuple(x_out.shape) for x_out in xs}) > 1:
            raise ValueError(f"branches of Sum must return outputs of one shape, got {_shapes(xs)}")
        masks_out = [after(b, m) for b, m in zip(self.branches, _split(self, masks), strict=True)]
        terms = [
            used(x_out, m.input_mask) for x_out, m in zip(xs, masks_out, strict=True)
        ]  # each [..., j, h]
        return reduce(torch.add, terms), _joined(factors, stack=isinstance(x, tuple), beside=False)

    def after(self, masks: Any) -> Masks:
        parts = [after(b, m) for b, m in zip(self.branches, _split(self, masks), strict=True)]
        input_mask, pair_mask, unit = None, None, None
        if (input_masks := all_or_none([m.input_mask for m in parts])) is not None:
            input_mask = torch.stack(torch.broadcast_tensors(*input_masks)).any(0)  # [..., j]
        if (pair_masks := all_or_none([m.pair_mask for m in parts])) is not None:
            pair_mask = pair_masks[0]  # [..., j, j']
            if any(mask is not pair_mask for mask in pair_masks):
                raise ValueError(
                    "pair_mask must be one mask for all branches of a Sum without routings, got several"
                )
        if (units := all_or_none([m.unit for m in parts])) is not None:
            unit = torch.stack(torch.broadcast_tensors(*units)).mean(0)  # [..., j]
        return Masks(parts[0].n, input_mask, pair_mask, unit)


class Concat(Network):
    """Concatenate the outputs of the branches over j.

    A tuple gives each branch its own input, and the credit is block-diagonal (Appendix A, "In Concatenations
    of Routings"). Masks then are tuples too, or None. One tensor goes to every branch, and credits stand side
    by side over j.

    Args:
        branches: modules whose output vectors have the same size.
    """

    def __init__(self, *branches: nn.Module):
        super().__init__()
        _check_modules("Concat", branches)
        self.branches = nn.ModuleList(branches)

    def run(self, x: Any, masks: Any, visit: Visit) -> tuple[Tensor, Factor | None]:
        xs, factors = _run_branches(self, x, masks, visit)
        if len({(*x_out.shape[:-2], x_out.shape[-1]) for x_out in xs}) > 1:
            raise ValueError(f"branches of Concat must return vectors of one size, got {_shapes(xs)}")
        return torch.cat(xs, -2), _joined(factors, stack=isinstance(x, tuple), beside=True)

    def after(self, masks: Any) -> Masks:
        parts = [after(b, m) for b, m in zip(self.branches, _split(self, masks), strict=True)]
        lengths = [m.n for m in parts]
        n = None if None in lengths else sum(lengths)  # type: ignore[arg-type]
        input_mask = concatenated([m.input_mask for m in parts], lengths, -1)  # [..., j]
        pair_mask = concatenated([m.pair_mask for m in parts], lengths, -2)  # [..., j, j']
        unit = concatenated([m.unit for m in parts], lengths, -1)  # [..., j]
        return Masks(n, input_mask, pair_mask, unit)


class Head(nn.Module):
    """A module that only reshapes its input to vectors and passes them to its ``network``."""

    network: Any  # (x_inp [..., i, d], input_mask [..., i]) -> [..., j, h] or [..., j]

    def flatten(
        self, hidden_states: Tensor, input_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the inputs of the network: x_inp [..., i, d], and its mask [..., i] or None."""
        raise NotImplementedError


class NetworkHead(Head):
    """A head whose ``network`` consists of routings."""

    network: Network


def after(module: nn.Module, masks: Any) -> Masks:
    """Return the masks of the outputs of a part. After a routing no vector is masked."""
    return module.after(masks) if isinstance(module, Network) else Masks(getattr(module, "n_out", None))


def group_of(network: Any) -> str:
    """Return the group of ranks over which the inputs of a network are sharded, "" if they are not."""
    return next((layer.group for layer in vector_routings(network) if layer.group), "")


def checked_group_of(network: nn.Module) -> str:
    """Return ``group_of(network)``, but "" if a layer has ``check_ranks=False``."""
    if not has_ranks():
        return ""
    layers = list(vector_routings(network))
    group = next((layer.group for layer in layers if layer.group), "")
    return group if all(layer.check_ranks for layer in layers) else ""


def vector_routings(network: Any) -> Iterator[VectorRouting]:
    """Yield every ``VectorRouting`` of a network. Every call of a network runs this, so it is fast."""
    if isinstance(network, VectorRouting):
        yield network
    elif isinstance(network, Network):
        if not isinstance(network, PerVector):  # which mixes no vectors, so it contains no routing
            for part in network._modules.values():
                yield from vector_routings(part)
    elif isinstance(network, nn.Module):
        yield from (part for part in network.modules() if isinstance(part, VectorRouting))


def check_network(network: nn.Module, name: str = "network") -> None:
    """Raise unless the network consists only of routings and compositions. The error names the bad part."""
    if isinstance(network, PerVector | VectorRouting | GeneralRouting):
        return
    if isinstance(network, MatrixRouting):
        raise TypeError(f"{name} is a MatrixRouting, which routes matrices: only vectors have credit here")
    if not isinstance(network, Network):
        raise TypeError(
            f"{name} is a {type(network).__name__}, which may mix vectors, so credit cannot pass through it: "
            f"wrap it in vecroute.PerVector if it treats each vector separately, or build {name} from "
            "routings with vecroute.Sequential, Residual, Sum and Concat"
        )
    parts = network.branches if isinstance(network, Sum | Concat) else network
    for key, part in parts.named_children():
        check_network(part, f"{name}.{key}")


def check_parts(network: Any, name: str = "network") -> None:
    """Raise unless all parts of the network may have contributions. The error names the bad part."""
    if isinstance(network, MatrixRouting):
        raise TypeError(f"{name} is a MatrixRouting, which routes matrices: only vectors have credit here")
    if not callable(network):
        raise TypeError(f"{name} must be a module, got {type(network).__name__}")
    if isinstance(network, Network) and not isinstance(network, PerVector):
        parts = network.branches if isinstance(network, Sum | Concat) else network
        for key, part in parts.named_children():
            check_parts(part, f"{name}.{key}")


def is_foreign(network: Any) -> bool:
    """Return whether a network has parts that are neither routings nor compositions of this library."""
    if not isinstance(network, Network) or isinstance(network, PerVector):
        return not isinstance(network, PerVector | VectorRouting | GeneralRouting)
    parts = network.branches if isinstance(network, Sum | Concat) else network
    return any(map(is_foreign, parts.children()))


def check_pair_mask(network: nn.Module, masks: Any) -> None:
    """Raise if no routing of the network uses the pair_mask."""
    given = any(m.pair_mask is not None for m in leaves(masks))
    if given and after(network, masks).pair_mask is not None:
        raise ValueError(
            f"pair_mask needs a routing that receives the inputs, but {module_name(network)} has none"
        )


def module_name(module: object) -> str:
    """Return the name of a module or function for error messages."""
    name = getattr(module, "__name__", type(module).__name__)
    inner = module.module if isinstance(module, PerVector) else getattr(module, "routing", None)
    return name if inner is None else f"{name}({module_name(inner)})"


def check_one_tensor(module: nn.Module, x: Any) -> None:
    """Raise if x is a tuple, which only modules with branches take."""
    if not isinstance(x, Tensor):
        expected = "one tensor x_inp [..., n_inp, d_inp]"
        raise TypeError(f"{module_name(module)} takes {expected}, got {type(x).__name__}")


def _forward(module: nn.Module, x: Any, masks: Any) -> tuple[Tensor, None]:
    if isinstance(module, Network):
        return module(x, *as_arguments(masks), is_part=True), None
    check_one_tensor(module, x)
    if isinstance(module, VectorRouting | GeneralRouting):
        return module(x, masks.input_mask, masks.pair_mask), None
    if masks.input_mask is not None or masks.pair_mask is not None:
        raise ValueError(
            f"masks cannot pass through {type(module).__name__}: wrap it in vecroute.PerVector if it treats "
            "each vector separately"
        )
    return module(x), None


def _route(module: nn.Module, x: Any, masks: Any) -> tuple[Tensor, Factor]:
    if isinstance(module, Network):
        x_out, factor = module.run(x, masks, _route)
        assert factor is not None
        return x_out, factor
    check_one_tensor(module, x)
    assert isinstance(module, VectorRouting | GeneralRouting)  # checked by check_network
    if isinstance(module, GeneralRouting):
        check_independent_votes(module, x)
    x_out, phi = module.route(x, masks.input_mask, masks.pair_mask)
    return x_out, Matrix(phi)


def check_independent_votes(layer: GeneralRouting, x: Tensor) -> None:
    """Raise if the votes of an input depend on other inputs. If the layer does not declare it, test F."""
    name = f"F ({module_name(layer.F)}) of GeneralRouting"
    if layer.independent_votes is None:
        check_independent(name, layer.F, x, layer.probed)
    elif not layer.independent_votes:
        raise ValueError(f"{name} mixes inputs (independent_votes=False), so credit cannot pass through it")


def _run_branches(network: Sum | Concat, x: Any, masks: Any, visit: Visit):
    """Run each branch on its own input, or all on the same one, and return their outputs and factors."""
    visits = zip(network.branches, _split(network, x), _split(network, masks), strict=True)
    results = [visit(*arguments) for arguments in visits]
    return [x_out for x_out, _ in results], [factor for _, factor in results]


def _split(network: Sum | Concat, given: Any) -> Sequence[Any]:
    """Return one item per branch: the tuple itself, or the same item for every branch."""
    if isinstance(given, Masks) or not isinstance(given, tuple):
        return [given] * len(network.branches)
    if len(given) != len(network.branches):
        kind, n = type(network).__name__, len(network.branches)
        raise ValueError(
            f"x_inp must be one tensor or a tuple of {n}, one per branch of {kind}, got {len(given)}"
        )
    return given


def _identity(x: Tensor, input_mask: Tensor | None) -> Factor:
    ones = x.new_ones(()).expand(x.shape[:-1])  # [..., i]
    return Diagonal(ones if input_mask is None else ones * input_mask)


def _joined(factors: Sequence[Factor | None], *, stack: bool, beside: bool) -> Factor | None:
    """Join factors: one above the other (stack), side by side (beside), on the diagonal (both), or added."""
    blocks, i, j = [], 0, 0
    for factor in factors:
        if factor is None:
            return None
        blocks.append(Block(factor, i, j))
        n_inp, n_out = factor.shape[-2:]
        i, j = i + n_inp * stack, j + n_out * beside
    return Blocks(blocks, i or n_inp, j or n_out)


def _check_modules(name: str, modules: Sequence[object]) -> None:
    if not modules:
        raise ValueError(f"{name} needs at least one module, got none")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"{name} takes modules, got {type(module).__name__}")


def _shapes(xs: Sequence[Tensor]) -> str:
    return ", ".join(str(list(x.shape)) for x in xs)
