"""Kernels in CUDA C++: a kernel that does not compile is an error, a missing compiler is a warning."""

import pytest
import torch

from vecroute.ops.paths.long import hopper
from vecroute.ops.plan import case


def test_a_kernel_that_does_not_compile_is_an_error_with_its_log(monkeypatch):
    def compile(*args, **kwargs):
        raise RuntimeError('Kernel compilation failed:\nk.cu(3): error: identifier "x" is undefined')

    monkeypatch.setattr(torch.cuda, "_compile_kernel", compile)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())  # a context that needs no GPU
    with pytest.raises(RuntimeError, match=r'kernel iteration .*cuda:0: (.|\n)*identifier "x" is undefined'):
        hopper.compiled("", "iteration", 0, torch.device("cuda", 0))


def test_other_errors_are_not_hidden(monkeypatch):
    monkeypatch.delattr(torch.cuda, "_compile_kernel")
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    with pytest.raises(AttributeError, match="_compile_kernel"):
        hopper.compiled("", "iteration", 0, torch.device("cuda", 0))


def test_a_missing_compiler_is_one_warning(monkeypatch):
    def find():
        raise OSError("Could not find any NVRTC library")

    monkeypatch.setattr("torch.cuda._utils._get_gpu_rtc_library", find)
    with pytest.warns(UserWarning, match="NVRTC: Could not find"):
        assert not case.has_compiler()
    monkeypatch.setattr("torch.cuda._utils._get_gpu_rtc_library", lambda: None)
    assert case.has_compiler()
