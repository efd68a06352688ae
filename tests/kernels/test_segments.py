"""Dot products and mixes by segment, whatever the piece that is converted at once, against numpy
in f64; several rows in a piece, and several pieces in a row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onward.kernels import KERNELS, KernelArguments
from onward.kernels.aten import adasum

SIZES = [5, 1, 9, 2]


@pytest.mark.parametrize("piece", [1, 4, 12, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_in_pieces(piece: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adasum, "_PIECE", piece)
    a, b = torch.randn(2, 6, sum(SIZES)).to(dtype)
    factors = torch.randn(2, len(SIZES), dtype=torch.float64)
    dots, mixed = torch.full((3, len(SIZES)), torch.nan, dtype=torch.float64), torch.empty_like(a)
    for op, inputs, y in (
        ("DotsBySegment", [a, b], dots),
        ("MixBySegment", [a, b, factors], mixed),
    ):
        [kernel] = KERNELS[op]
        kernel.bind(KernelArguments({"sizes": SIZES}, [*inputs], [y], []))()
    ends = np.cumsum(SIZES)[:-1]
    lefts, rights = (np.split(x.double().numpy(), ends, 1) for x in (a, b))
    f = factors.numpy()
    for i, (u, v) in enumerate(zip(lefts, rights, strict=True)):
        want = [(u * v).sum(), (u * u).sum(), (v * v).sum()]
        np.testing.assert_allclose(dots[:, i], want, rtol=1e-12, atol=1e-13)
        found = np.split(mixed.double().numpy(), ends, 1)[i]
        near = 1e-2 if dtype == torch.bfloat16 else 1e-6
        np.testing.assert_allclose(found, f[0, i] * u + f[1, i] * v, rtol=near, atol=near)
