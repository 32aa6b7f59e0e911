"""Sequence parallelism: each rank of a process group holds some of the input vectors.

Routing sums over inputs, so that ranks have little to tell one another: in each iteration their sums
y [..., j, d] and s [..., j], backward the gradients of what they have alike. Every rank has all outputs.
"""

from collections.abc import Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from vecroute.compose import Concat, Contributions, Credit, PerVector, Sequential, Sum
from vecroute.compose.modules import NetworkHead, module_name
from vecroute.layers import VectorRouting
from vecroute.ops.checks import check_size
from vecroute.ops.group import together

WITH_I = ("W_A", "B_A", "W_S", "B_S", "beta_use", "beta_ign")  # of a fixed length

Module = TypeVar("Module", bound=nn.Module)
Mesh = DeviceMesh | dist.ProcessGroup


def shard_inputs(module: Module, mesh: Mesh, *, check: bool = True) -> Module:
    """Have each rank route some of the inputs of a layer, network or head, in place; the module is returned.

    Every rank then calls it with its own rows of x_inp [..., i, d] (and of the masks), maybe none; outputs
    are those of all inputs, the same on every rank, and so must be the loss that is computed from them.
    Gradients are those of one process: of parameters all of it on every rank, of x_inp that of the own rows.
    Credit and contributions are those of the own inputs; see ``gather``.

    With variable length (n_inp=None) a rank may hold any number of rows. With a fixed length it holds
    ``own_rows(n_inp, mesh)``, and so it is with the parameters that have an i, which become ``DTensor``
    sharded over i. All ranks start from the parameters of the first.

    Args:
        module: a ``VectorRouting``, a network of routings that begins with per-vector modules or such a
            layer, or a ``RoutingHead``: its hidden states [..., n_pos, depth, d_emb] are sharded over n_pos.
        mesh: a mesh of one dimension, such as ``mesh["sp"]``, or a process group. Other dimensions are
            free for data parallelism.
        check: whether ranks make sure in each call that they agree on shapes and dtypes, and that none
            failed; otherwise they wait for one that did until the time-out of the group.

    Raises:
        ValueError, TypeError: a mesh or module that will not do, or that differs from rank to rank.
    """
    mesh = _as_mesh(mesh)
    group = mesh.get_group().group_name
    with together(group) as alike:
        parts = list(_parts_that_meet_inputs(module, "module"))
        for name, parameter in module.named_parameters():
            alike[f"parameter {name}"] = [list(parameter.shape), parameter.dtype]
            if parameter.device.type not in (mesh.device_type, "meta"):
                kind = parameter.device.type
                raise ValueError(f"mesh must be of the device of the module, {kind}, got {mesh.device_type}")
    for part in parts:
        part.group = group
        if isinstance(part, VectorRouting):
            part.check_ranks = check
            for name in WITH_I if part.n_inp is not None else ():
                whole = getattr(part, name)
                sharded = distribute_tensor(whole.detach(), mesh, [Shard(0)])
                setattr(part, name, nn.Parameter(sharded, requires_grad=whole.requires_grad))
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if not isinstance(tensor, torch.distributed.tensor.DTensor) and not tensor.is_meta:
                dist.broadcast(tensor, group=mesh.get_group(), group_src=0)
    return module


def own_rows(n_inp: int, mesh: Mesh) -> slice:
    """The rows of n_inp that this rank holds: n_inp / ranks, rounded up, and the last ranks the rest."""
    check_size("n_inp", n_inp)
    mesh = _as_mesh(mesh)
    size = -(-n_inp // mesh.size())
    start = min(mesh.get_local_rank() * size, n_inp)
    return slice(start, min(start + size, n_inp))


def gather(value: Any, mesh: Mesh, dim: int = -2) -> Any:
    """What each rank has of its own inputs, one after the other, on every rank.

    Args:
        value: a ``Credit``, ``Contributions``, or a tensor such as the phi [..., i, j] of a layer.
        mesh: as given to ``shard_inputs``.
        dim: the dimension of i, of a tensor.
    """
    mesh = _as_mesh(mesh)
    if isinstance(value, Credit):
        mask = torch.ones(()) if value.input_mask is None else value.input_mask
        mask = mask.bool().to(value.factor.like.device).expand(value.shape[:-1])  # [..., i]
        return Credit(_gather_tensor(value.dense(), mesh, -2), _gather_tensor(mask, mesh, -1))
    if isinstance(value, Contributions):
        return value._replace(values=_gather_tensor(value.values, mesh, -1))
    if not isinstance(value, Tensor):
        raise TypeError(f"value must be a Credit, Contributions or a tensor, got {type(value).__name__}")
    return _gather_tensor(value, mesh, dim)


def _gather_tensor(own: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Tensors that differ in the length of one dimension; those of others are filled up on the way."""
    group = mesh.get_group()
    rows = own.detach().movedim(dim, 0).contiguous()  # [i, ...]
    with together(group.group_name) as alike:
        alike |= {"the shape, but for i,": list(rows.shape[1:]), "dtype": rows.dtype}
    lengths = [torch.zeros(1, dtype=torch.int64, device=own.device) for _ in range(mesh.size())]
    dist.all_gather(lengths, torch.tensor([len(rows)], device=own.device), group=group)
    most = max(int(n) for n in lengths)
    filled = rows.new_zeros(most, *rows.shape[1:])  # [i of the longest, ...]
    filled[: len(rows)] = rows
    parts = [torch.empty_like(filled) for _ in lengths]
    dist.all_gather(parts, filled, group=group)
    return torch.cat([part[: int(n)] for part, n in zip(parts, lengths, strict=True)]).movedim(0, dim)


def _parts_that_meet_inputs(module: nn.Module, name: str) -> Iterator[PerVector | VectorRouting]:
    """The parts that see sharded vectors: up to the first routing, after which every rank has all."""
    if isinstance(module, NetworkHead):
        yield from _parts_that_meet_inputs(module.network, f"{name}.network")
    elif isinstance(module, Sequential):
        for key, part in module.named_children():
            yield from _parts_that_meet_inputs(part, f"{name}.{key}")
            if _routes(part):
                break
    elif isinstance(module, Sum | Concat):
        for key, branch in module.branches.named_children():
            if not _routes(branch):
                raise ValueError(f"inputs cannot be sharded: {name}.{key} joins them before they are routed")
            yield from _parts_that_meet_inputs(branch, f"{name}.{key}")
    elif isinstance(module, VectorRouting | PerVector):
        if module.group:
            raise ValueError(f"the inputs of {name} are sharded already")
        if isinstance(module, VectorRouting) and module.implementation == "reference":
            raise ValueError(f"inputs cannot be sharded: {name} has implementation='reference'")
        yield module
    else:
        raise TypeError(
            f"inputs cannot be sharded: {name} is a {module_name(module)}, expected a VectorRouting, "
            "PerVector, Sequential, Sum, Concat or RoutingHead before the first routing"
        )


def _routes(module: nn.Module) -> bool:
    """Whether a part has a routing in it."""
    return any(isinstance(part, VectorRouting) for part in module.modules())


def _as_mesh(mesh: object) -> DeviceMesh:
    """A mesh of one dimension that this rank is in."""
    if isinstance(mesh, dist.ProcessGroup):
        kind = "cuda" if "nccl" in dist.get_backend_config(mesh) else "cpu"
        mesh = DeviceMesh.from_group(mesh, kind)
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh or a process group, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ("...",)
        raise ValueError(
            f"mesh must have one dimension, such as mesh[{names[0]!r}], got {mesh.ndim} of sizes "
            f"{list(mesh.mesh.shape)}"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"mesh must contain this rank, {dist.get_rank()}, got the ranks {mesh.mesh.tolist()}"
        )
    return mesh
