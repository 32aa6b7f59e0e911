"""Sequence parallelism: each rank of a process group holds some of the input vectors.

Routing sums over inputs, so ranks exchange little: in each iteration the sums y [..., j, d] and s [..., j],
and in the backward pass the gradients of shared parameters. Every rank has all outputs.
"""

from collections.abc import Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from vecroute.compose import Concat, Contributions, Credit, PerVector, Sequential, Sum
from vecroute.compose.members import Each
from vecroute.compose.modules import NetworkHead, module_name
from vecroute.layers import VectorRouting
from vecroute.ops.checks import check_size
from vecroute.ops.group import together

# Parameters with one row per input, in layers of fixed length.
WITH_I = ("W_A", "B_A", "W_S", "B_S", "beta_use", "beta_ign")

Module = TypeVar("Module", bound=nn.Module)
Mesh = DeviceMesh | dist.ProcessGroup


def shard_inputs(module: Module, mesh: Mesh, *, check: bool = True) -> Module:
    """Divide the inputs of a layer, network or head among ranks. Changes the module in place and returns it.

    Every rank then calls the module with its own rows of x_inp [..., i, d] and of the masks. A rank may have
    no rows. The outputs depend on all inputs and are the same on every rank. Compute the same loss from them
    on every rank. Gradients equal the gradients in one process: every rank has the whole gradient of the
    parameters, and the gradient of its own rows of x_inp. Credit and contributions cover the rank's own
    inputs; ``gather`` joins them.

    With variable length (n_inp=None), a rank may hold any number of rows. With a fixed length, it holds
    ``own_rows(n_inp, mesh)``, and parameters with one row per input become ``DTensor`` sharded over i. All
    ranks start with the parameters of the first rank.

    Args:
        module: a ``VectorRouting``, a network of routings that begins with per-vector modules or such a
            layer, or a ``RoutingHead``: its hidden states [..., n_pos, depth, d_emb] are sharded over n_pos.
        mesh: a mesh of one dimension, such as ``mesh["sp"]``, or a process group. You may use other
            dimensions for data parallelism.
        check: True to check in each call that no rank failed and that all ranks agree on shapes and dtypes.
            Otherwise ranks wait for a failed rank until the group times out.

    Raises:
        ValueError, TypeError: the mesh or the module is unsuitable, or differs between ranks.
    """
    mesh = _as_mesh(mesh)
    group = mesh.get_group().group_name
    with together(group) as alike:
        parts = list(_parts_that_meet_inputs(module, "module"))
        for name, parameter in module.named_parameters():
            alike[f"parameter {name}"] = [list(parameter.shape), parameter.dtype]
            if parameter.device.type not in (mesh.device_type, "meta"):
                kind = parameter.device.type
                raise ValueError(
                    f"mesh must have the device type of the module, {kind}, got {mesh.device_type}"
                )
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
    """Return the slice of the n_inp rows that belongs to this rank.

    Each rank has ceil(n_inp / number of ranks) rows. The last ranks have the rest, or no rows.
    """
    check_size("n_inp", n_inp)
    mesh = _as_mesh(mesh)
    size = -(-n_inp // mesh.size())
    start = min(mesh.get_local_rank() * size, n_inp)
    return slice(start, min(start + size, n_inp))


def gather(value: Any, mesh: Mesh, dim: int = -2) -> Any:
    """Concatenate the values that each rank has for its own inputs. Every rank receives the result.

    Args:
        value: a ``Credit``, ``Contributions``, or a tensor such as the phi [..., i, j] of a layer.
        mesh: the mesh that was given to ``shard_inputs``.
        dim: the dimension of i, if value is a tensor.
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
    """Concatenate tensors of different lengths along dim. They are padded for the exchange."""
    group = mesh.get_group()
    rows = own.detach().movedim(dim, 0).contiguous()  # [i, ...]
    with together(group.group_name) as alike:
        alike |= {"the shape, but for i,": list(rows.shape[1:]), "dtype": rows.dtype}
    lengths = [torch.zeros(1, dtype=torch.int64, device=own.device) for _ in range(mesh.size())]
    dist.all_gather(lengths, torch.tensor([len(rows)], device=own.device), group=group)
    most = max(int(n) for n in lengths)
    filled = rows.new_zeros(most, *rows.shape[1:])  # [most, ...]
    filled[: len(rows)] = rows
    parts = [torch.empty_like(filled) for _ in lengths]
    dist.all_gather(parts, filled, group=group)
    return torch.cat([part[: int(n)] for part, n in zip(parts, lengths, strict=True)]).movedim(0, dim)


def _parts_that_meet_inputs(module: nn.Module, name: str) -> Iterator[PerVector | VectorRouting]:
    """Yield the parts that receive sharded vectors: all up to and including the first routing."""
    if isinstance(module, NetworkHead):
        yield from _parts_that_meet_inputs(module.network, f"{name}.network")
    elif isinstance(module, Sequential):
        for key, part in module.named_children():
            yield from _parts_that_meet_inputs(part, f"{name}.{key}")
            if _routes(part):
                break
    elif isinstance(module, Each):
        for key, part in module.named_children():
            yield from _parts_that_meet_inputs(part, f"{name}.{key}")
    elif isinstance(module, Sum | Concat):
        for key, branch in module.branches.named_children():
            if not _routes(branch):
                raise ValueError(
                    f"inputs cannot be sharded: {name}.{key} joins vectors before they are routed"
                )
            yield from _parts_that_meet_inputs(branch, f"{name}.{key}")
    elif isinstance(module, VectorRouting | PerVector):
        if module.group:
            raise ValueError(f"the inputs of {name} are already sharded")
        if isinstance(module, VectorRouting) and module.implementation == "reference":
            raise ValueError(f"inputs cannot be sharded: {name} has implementation='reference'")
        yield module
    else:
        raise TypeError(
            f"inputs cannot be sharded: {name} is a {module_name(module)}, expected a VectorRouting, "
            "PerVector, Sequential, Sum, Concat or RoutingHead before the first routing"
        )


def _routes(module: nn.Module) -> bool:
    """Return whether a part contains a routing."""
    return any(isinstance(part, VectorRouting) for part in module.modules())


def _as_mesh(mesh: object) -> DeviceMesh:
    """Return the mesh, or a mesh for the group. Raise unless it has one dimension and contains this rank."""
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
