"""Recorded passes: C starts the same commands with the addresses of each call."""

import ctypes
from array import array

import pytest
import torch

from vecroute.ops import recording
from vecroute.ops.launch import Memory
from vecroute.ops.recording import TENSOR, Pass, Recorder, references

pytest.importorskip("triton")

POINTER, NUMBER = ctypes.c_void_p, ctypes.c_uint
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, POINTER, *[NUMBER] * 7, POINTER, POINTER, POINTER)
MULTIPLY = ctypes.CFUNCTYPE(ctypes.c_int, *[POINTER] * 14, ctypes.c_size_t, POINTER)


class Driver:
    """Stands in for CUDA's driver and for cuBLASLt: notes every call, and may fail."""

    def __init__(self, status: int = 0):
        self.calls, self.status = [], status
        self.launch, self.multiply = LAUNCH(self.launched), MULTIPLY(self.multiplied)

    def launched(self, function, x, y, z, threads, one, two, shared, stream, none, extra):
        places = (POINTER * 5).from_address(extra)
        n_bytes = ctypes.c_size_t.from_address(places[3]).value
        arguments = ctypes.string_at(places[1], n_bytes)
        self.calls.append((function, (x, y, z), threads, (one, two), shared, stream, none, arguments))
        return self.status

    def multiplied(self, *arguments):
        self.calls.append(arguments)
        return 0

    def run(self, recorder: Recorder, stream: int, handle: int, *addresses: int) -> int:
        functions = (recording.address_of(f) for f in (self.launch, self.multiply))
        program = array("Q", [len(recorder.launches), *functions, *recorder.words])
        return recording.replayer()(program.buffer_info()[0], stream, handle, *addresses)


def recorder() -> Recorder:
    return Recorder(torch.device("cuda", 0))


def test_a_kernel_gets_addresses_and_numbers():
    """Two pointers, then an int32 and an int64, which the C compiler would align in the same way."""
    arguments = [*references((TENSOR + 256, 0)), 7, 2**40]
    r = recorder()
    r.add("kernel", "kernel", [11, 2, 3, 4, 128, 4096, 2, 32, *arguments])
    driver = Driver()
    assert driver.run(r, 55, 66, 1000, 2000) == 0
    expected = array("Q", [2256, 1000, 7, 2**40]).tobytes()
    assert driver.calls == [(11, (2, 3, 4), 128, (1, 1), 4096, 55, None, expected)]


def test_arguments_end_where_the_kernel_expects():
    """The driver refuses arguments with more bytes than its kernel has."""
    r = recorder()
    r.add("kernel", "kernel", [11, 1, 1, 1, 32, 0, 1, 12, *references([0]), 9])
    driver = Driver()
    assert driver.run(r, 0, 0, 1000) == 0
    assert driver.calls[0][-1] == array("Q", [1000]).tobytes() + (9).to_bytes(4, "little")


def test_a_product_gets_its_operands():
    r = recorder()
    pointers = 16, TENSOR, 2 * TENSOR + 32, 3 * TENSOR
    r.add("product", "product", [1, 2, 3, 4, 5, 6, 7, 8, *references(pointers)])
    driver = Driver()
    assert driver.run(r, 55, 66, 1000, 2000, 3000, 4000) == 0
    assert driver.calls == [(66, 1, 2, 1016, 3, 2000, 4, 5, 3032, 6, 3032, 6, 7, 4000, 8, 55)]


def test_commands_run_in_order_up_to_the_first_that_fails():
    r = recorder()
    for function in (11, 12, 13):
        r.add("kernel", "kernel", [function, 1, 1, 1, 32, 0, 0, 0])
    good, bad = Driver(), Driver(status=700)
    assert good.run(r, 0, 0) == 0
    assert [call[0] for call in good.calls] == [11, 12, 13]
    assert bad.run(r, 0, 0) == 2**32 + 700
    assert len(bad.calls) == 1


def test_wrong_numbers_are_errors():
    run = recording.replayer()
    with pytest.raises(TypeError, match="3 to 67 numbers, got 2"):
        run(1, 2)
    with pytest.raises((TypeError, OverflowError)):
        run(array("Q", [0, 0, 0]).buffer_info()[0], 0, 0, -1)


def test_arrays_of_a_memory_are_offsets_in_a_recording():
    memory = Memory({"a": ((3,), torch.float32), "b": ((2, 2), torch.float16)})
    assert memory.at(5 * TENSOR) == {"a": 5 * TENSOR, "b": 5 * TENSOR + 256}
    assert references([memory.at(5 * TENSOR)["b"]]) == [5, 256]


def test_interpreted_passes_run_at_once():
    """Without a GPU, a pass calls its launches with the tensors themselves."""
    seen = []
    each = Pass(lambda stream, at: seen.append((stream.interpreted, at)))
    x = torch.zeros(2)
    each(torch.device("cpu"), {"x": x})
    assert len(seen) == 1
    assert seen[0][0]
    assert seen[0][1]["x"] is x
