"""The target that this process runs on."""

from __future__ import annotations

import functools
from importlib.util import find_spec

import torch

from onward.kernels.gpus import UNKNOWN_GPU, rates_of_gpu
from onward.kernels.native.library import library
from onward.kernels.target import NO_LIBRARY, Rates, Target, takes_triton

_BF16 = {"AVX512-BF16": "_is_avx512_bf16_supported", "AMX": "_is_amx_tile_supported"}


def host(device: str | torch.device = "cpu") -> Target:
    """The target for a device of this machine ("cpu", "cuda:1"), as the environment configures it.
    A GPU without a number is the current one."""
    where = torch.device(device)
    found = library() if where.type == "cpu" else None
    level = NO_LIBRARY if found is None else found.level
    low = _multiplies_bf16(where)
    rates, capability = _rates(where), capability_of(where)
    triton = where.type == "cuda" and find_spec("triton") is not None and takes_triton(capability)
    return Target(
        where.type, level, triton, multiplies_bf16=low, multiplies_fp16=_multiplies_fp16(where),
        rates=rates, capability=capability,
    )  # fmt: skip


@functools.cache
def _multiplies_bf16(device: torch.device) -> bool:
    if device.type == "cpu":
        return bool(bf16_instructions())
    if not torch.cuda.is_available():
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_bf16_supported(including_emulation=False)


@functools.cache
def _multiplies_fp16(device: torch.device) -> bool:
    if device.type != "cpu":
        return True
    found = getattr(torch.cpu, "get_capabilities", dict)()
    return any(bool(found.get(name)) for name in ("avx512_fp16", "amx_fp16"))


def bf16_instructions() -> tuple[str, ...]:
    """This processor's instructions for bf16 products, as PyTorch detects them."""
    # torch lacks these functions on other processors
    return tuple(name for name, ask in _BF16.items() if getattr(torch.cpu, ask, bool)())


@functools.cache
def capability_of(device: torch.device) -> str | tuple[int, int]:
    """`Target.capability` of a device of this machine."""
    if device.type == "cpu":
        return torch.backends.cpu.get_cpu_capability()
    if not torch.cuda.is_available():
        return ""
    if torch.version.hip is not None:  # such as "gfx942:sramecc+:xnack-"
        architecture: str = torch.cuda.get_device_properties(device).gcnArchName
        return architecture.partition(":")[0]
    return torch.cuda.get_device_capability(device)


@functools.cache
def _rates(device: torch.device) -> Rates:
    """The rates of a device: the same for all CPUs, by name for a GPU."""
    if device.type == "cpu":
        return Rates()
    return (
        rates_of_gpu(torch.cuda.get_device_name(device))
        if torch.cuda.is_available()
        else UNKNOWN_GPU
    )
