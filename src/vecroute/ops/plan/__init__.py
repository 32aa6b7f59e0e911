"""The plan of a call: its path, and everything that the engine decides by size, dtype or device.

``limits`` has the thresholds, ``case`` the facts of a call, ``paths`` the choice of the path, ``plan`` what
follows from it, ``hopper`` the memory of the CUDA C++ kernels, ``blocks`` the blocks of the Triton kernels.
"""

from vecroute.ops.plan.case import Case, Device, Tuning
from vecroute.ops.plan.paths import choose_path, make_plan
from vecroute.ops.plan.plan import Plan

__all__ = ["Case", "Device", "Plan", "Tuning", "choose_path", "make_plan"]
