"""The target that this process runs on."""

from __future__ import annotations

from importlib.util import find_spec

from onward.kernels.native.library import library
from onward.kernels.target import NO_LIBRARY, Rates, Target


def host(device: str = "cpu") -> Target:
    """The target of a kind of device ("cpu", "cuda") of this machine, as the environment has it."""
    found = library() if device == "cpu" else None
    triton = device == "cuda" and find_spec("triton") is not None
    level = NO_LIBRARY if found is None else found.level
    return Target(device, level, triton, rates=_rates(device))


def _rates(device: str) -> Rates:
    """Those of one machine for all: what a machine measures of itself is to be read here."""
    return Rates()
