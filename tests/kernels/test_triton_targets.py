"""Triton's kernels are for devices that Triton compiles for; attention's choose blocks and
precision by the device."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_calls import spec_of
from op_cases import cases_of

from onward.kernels import GPUS, TRITON, Kernel, Target, host, kernel_for
from onward.kernels.triton import attention
from onward.kernels.triton.attention_blocks import AttentionBlocks, blocks_for, smallest_blocks

KERNELS = [kernel for kernels in TRITON.values() for kernel in kernels]


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0), (9, 0), (12, 0), "gfx942", ""])
def test_triton_kernels_are_for_ampere_and_later(capability: Any) -> None:
    old = capability in ((7, 0), (7, 5))
    said = {kernel.where(Target("cuda", triton=True, capability=capability)) for kernel in KERNELS}
    expected = "Triton supports GPUs of compute capability 8.0 and later" if old else None
    assert said == {expected}


def test_gpus_before_ampere_take_pytorchs_operators() -> None:
    without = {gpu.name for gpu in GPUS if not gpu.target.triton}
    assert without == {"V100", "T4"}
    spec = spec_of(cases_of("Dropout")[0])
    for gpu in GPUS:
        found = kernel_for(spec, gpu.target)
        assert isinstance(found, Kernel)
        assert found.name.startswith("aten." if gpu.name in without else "triton."), gpu.name


@pytest.fixture
def forget() -> Iterator[None]:
    """Has this process look at its devices again."""
    module = sys.modules["onward.kernels.host"]
    cached = [getattr(module, n) for n in ("_multiplies_bf16", "capability_of", "_rates")]
    for one in cached:
        one.cache_clear()
    yield
    for one in cached:
        one.cache_clear()


@pytest.mark.parametrize(
    ("capability", "architecture", "known", "triton"),
    [
        ((7, 5), None, (7, 5), False), ((8, 6), None, (8, 6), True),
        ((9, 4), "gfx942:sramecc+:xnack-", "gfx942", True), ((9, 0), "gfx90a", "gfx90a", True),
    ],
)  # fmt: skip
def test_a_device_is_known_by_capability_or_architecture(
    capability: tuple[int, int], architecture: str | None, known: Any, triton: bool, forget: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """ROCm gives its devices capabilities, which mean something else there."""
    module = sys.modules["onward.kernels.host"]
    monkeypatch.setattr(module, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.version, "hip", architecture and "6.4")
    cuda: dict[str, Any] = {
        "is_available": lambda: True, "get_device_capability": lambda d: capability,
        "get_device_properties": lambda d: SimpleNamespace(gcnArchName=architecture),
        "get_device_name": lambda d: "a device", "device": lambda d: nullcontext(),
        "is_bf16_supported": lambda including_emulation: True,
    }  # fmt: skip
    for name, function in cuda.items():
        monkeypatch.setattr(torch.cuda, name, function)
    found = host("cuda:0")
    assert (found.capability, found.triton) == (known, triton)


@pytest.mark.parametrize(
    ("capability", "dtype", "setting", "precision"),
    [
        ((9, 0), torch.float32, "tf32", "tf32"), ((9, 0), torch.float32, "ieee", "ieee"),
        ((9, 0), torch.bfloat16, "tf32", "ieee"), ("gfx942", torch.float32, "tf32", "tf32"),
        ("gfx90a", torch.float32, "tf32", "ieee"), ("gfx1100", torch.float16, "tf32", "ieee"),
    ],
)  # fmt: skip
def test_products_of_attention_are_tf32_where_the_device_has_it(
    capability: Any, dtype: torch.dtype, setting: str, precision: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Triton refuses the word for other devices of AMD, whatever the type of the operands."""
    monkeypatch.setattr(attention, "capability_of", lambda device: capability)
    products: Any = torch.backends.cuda.matmul
    before, products.fp32_precision = products.fp32_precision, setting
    try:
        assert attention._precision(torch.empty(2, 2, dtype=dtype)) == precision
    finally:
        products.fp32_precision = before


def test_scratch_is_enough_for_the_blocks_of_every_device() -> None:
    """A plan is made without the device."""
    for low in (False, True):
        for width in (16, 32, 64, 128, 256):
            least = smallest_blocks(low, width)
            made = [
                blocks_for(c, low, width) for c in ((8, 0), (9, 0), (10, 0), (12, 0), "gfx942", "")
            ]
            assert all(isinstance(blocks, AttentionBlocks) for blocks in made)
            assert least.forward.rows == min(b.forward.rows for b in made)
            assert least.by_query.rows == min(b.by_query.rows for b in made)
            assert least.by_key.keys == min(b.by_key.keys for b in made)
