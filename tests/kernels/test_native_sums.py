"""Native sums of several precisions beyond a block of the kernel, in memory of their terms too."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from onward.kernels import KERNELS, KernelArguments, host

KERNEL = KERNELS["WideSum"][0]
LOW = (torch.bfloat16, torch.float16)
pytestmark = pytest.mark.skipif(
    KERNEL.where(host()) is not None, reason="the native library is not built here"
)


def terms(low: int, wide: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(low + 7 * wide + count)
    made = [torch.randn(count, generator=g) for _ in range(low + wide)]
    return [x.to(dtype) if i < low else x for i, x in enumerate(made)]


def summed(given: list[torch.Tensor], y: torch.Tensor) -> torch.Tensor:
    inputs: list[Any] = [*given]
    KERNEL.bind(KernelArguments({}, inputs, [y], []))()
    return y


@pytest.mark.parametrize("count", [1, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize(("low", "wide"), [(1, 1), (3, 1), (4, 4), (2, 0), (0, 2), (0, 7)])
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_every_block_is_pytorchs_sum_to_the_bit(
    dtype: torch.dtype, low: int, wide: int, count: int
) -> None:
    given = terms(low, wide, count, dtype)
    want = given[0].float()
    for x in given[1:]:
        want = want + x.float()
    room = torch.full((count + 2,), torch.nan)
    assert torch.equal(summed(given, room[1:-1]), want)
    assert room[0].isnan() and room[-1].isnan()
    places = [i for i, x in enumerate(given) if x.dtype == torch.float32]
    for i, threads in itertools.product(places, (1, 2)):  # y over a term of f32
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            again = terms(low, wide, count, dtype)
            assert torch.equal(summed(again, again[i]), want), f"over term {i}"
        finally:
            torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_signs_of_zero_infinities_and_nan(dtype: torch.dtype) -> None:
    odd = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0])
    x, y = (z.reshape(-1) for z in torch.meshgrid(odd, odd, indexing="ij"))
    found, want = summed([x.to(dtype), y.clone()], torch.empty(36)), x + y
    torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found.signbit()[~want.isnan()], want.signbit()[~want.isnan()])
