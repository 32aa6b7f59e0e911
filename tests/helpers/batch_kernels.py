"""Calls that together use every kernel of the batch path, and a script that compiles the kernels of a call.

``python -m tests.helpers.batch_kernels NAME`` prints the name and the bytes of shared memory of each kernel.
It needs no GPU. Run it without TRITON_INTERPRET, because Triton's interpreter compiles nothing.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vecroute.ops.launch import Launch
from vecroute.ops.paths.batch.steps import Steps
from vecroute.ops.plan import Case, Device, Tuning, make_plan

H200 = Device("cuda", (9, 0), 227 * 1024, 132, True)
POINTERS = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64",
    torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
MULTIPLE_OF_16 = [["tt.divisibility", 16]]


def call(shape: tuple[int, ...], n_out: int, d_out: int, *, masked: bool = False, **changes: Any) -> Case:
    """Return a call with padded x_inp of variable length in tf32. Arguments change it."""
    dtype = changes.pop("dtype", torch.float32)
    given = {
        "n_iters": 2,
        "variable": True,
        "packed": None,
        "tf32": dtype == torch.float32,
        "need_phi": False,
    }
    return Case(
        shape, dtype, dtype, dtype, n_out, d_out, input_mask=masked,
        use_strides=(shape[-2] * n_out, n_out, 1) if masked else None, prior=1 / n_out,
        implementation="fused",
        tuning=Tuning(), group=False, device=H200, **given | changes,
    )  # fmt: skip


CALLS = {
    "variable": call((32, 1850, 1024), 64, 1024),
    "128 outputs": call((16, 4925, 1024), 128, 1024),
    "fixed": call((32, 64, 1024), 64, 1024, variable=False),
    "masked": call((4, 300, 130), 17, 64, masked=True, n_iters=3, need_phi=True),
    "masked, fixed": call((4, 300, 130), 17, 64, masked=True, variable=False),
    "packed": call((20000, 384), 64, 384, packed=(64, torch.int32)),
    "ieee": call((32, 1850, 1024), 64, 1024, tf32=False),
    "ieee, fixed": call((4, 300, 130), 4, 64, variable=False, tf32=False),
    "float16": call((4, 300, 128), 4, 64, dtype=torch.float16),
    "bfloat16": call((16, 400, 384), 64, 384, dtype=torch.bfloat16),
    "float64": call((4, 30, 64), 17, 64, dtype=torch.float64),
}


def launches(case: Case) -> Iterator[Launch]:
    """Return all launches that the batch path prepares for a call."""
    plan = make_plan(case)
    assert plan.path == "batch", plan.why
    return _launches_in(list(vars(Steps(plan)).values()))


def _launches_in(value: Any) -> Iterator[Launch]:
    if isinstance(value, Launch):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _launches_in(each)


def specialisation(launch: Launch) -> tuple[dict, dict, dict, dict]:
    """Return the specialisation for which Triton compiles a kernel.

    Returns:
        The types by name; the values of constants (including sizes of 1) and the properties of other
        arguments, by position; the options of the compiler.
    """
    kinds, values, known = {}, {}, {}
    n_pointers, arguments = len(launch.dtypes), [*launch.dtypes, *launch.sizes]
    for k, parameter in enumerate(launch.kernel.params):
        name, specialises = parameter.name, not parameter.do_not_specialize
        if k < n_pointers:
            kinds[name], known[k,] = POINTERS[arguments[k]], MULTIPLE_OF_16
        elif k >= len(arguments):
            kinds[name], values[k,] = "constexpr", launch.constants[name]
        elif arguments[k] == 1 and specialises:
            kinds[name], values[k,] = "constexpr", 1
        else:
            kinds[name] = "i32" if arguments[k] < 2**31 else "i64"
            if arguments[k] % 16 == 0 and specialises:
                known[k,] = MULTIPLE_OF_16
    return kinds, values, known, {name: v for name, v in launch.constants.items() if name not in kinds}


def compiled(case: Case) -> set[tuple[str, str]]:
    """Return what Triton compiles for a call: names of kernels, and all that they are specialised for."""
    return {(each.kernel.__name__, str(specialisation(each))) for each in launches(case)}


def of_other_lengths() -> None:
    """Print the kernels that a call compiles anew if only the length of its samples differs."""
    for first, n in ((100, 4928), (1000, 1001), (1000, 1024), (4096, 4925)):
        new = compiled(call((8, n, 384), 16, 384)) - compiled(call((8, first, 384), 16, 384))
        print(*sorted({name for name, _ in new}), sep="\n", end="\n" * bool(new))
    for total in (20_000, 20_001, 4096):
        packed = {"packed": (64, torch.int32)}
        new = compiled(call((total, 384), 16, 384, **packed)) - compiled(call((9999, 384), 16, 384, **packed))
        print(*sorted({name for name, _ in new}), sep="\n", end="\n" * bool(new))


def main(name: str) -> None:
    """Compile every kernel of the named call for a Hopper GPU, each specialisation once."""
    seen = set()
    for launch in launches(CALLS[name]):
        kinds, values, known, options = specialisation(launch)
        key = launch.kernel.__name__, str((kinds, values, known, options))
        if key in seen:
            continue
        seen.add(key)
        source = ASTSource(fn=launch.kernel, signature=kinds, constexprs=values, attrs=known)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert launch.kernel.__name__ in compiled.asm["ptx"]
        print(launch.kernel.__name__, compiled.metadata.shared)


if __name__ == "__main__":
    if sys.argv[1] == "lengths":
        sys.exit(of_other_lengths())
    main(sys.argv[1])
