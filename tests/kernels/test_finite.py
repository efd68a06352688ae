"""Whether gradients are finite, against numpy: each kernel, each kind of number, each place."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from onward.graph.build import Builder
from onward.graph.evaluate import evaluate
from onward.graph.graph import Graph, Role
from onward.graph.types import DType, Type
from onward.kernels import KERNELS, TRITON, KernelArguments, KernelSpec
from onward.kernels.kernel import Kernel

F32 = np.finfo(np.float32)
NUMBERS = [
    0.0, -0.0, 1.0, F32.max, F32.min, F32.tiny, 1e-45, np.inf, -np.inf, np.nan, -np.nan,
]  # fmt: skip
SHAPES: list[tuple[int, ...]] = [(1,), (3, 5), (70_001,), (0,), ()]
FINITE = [k for k in KERNELS["AllFinite"] if k not in TRITON["AllFinite"]]


def run(kernel: Kernel, norm: float | None, arrays: list[np.ndarray]) -> bool:
    y = torch.zeros((), dtype=torch.bool)
    given = [torch.from_numpy(np.array(a)) for a in arrays]
    first = None if norm is None else torch.tensor(norm)
    kernel.bind(KernelArguments({}, [first, *given], [y], []))()
    return bool(y)


@pytest.mark.parametrize("kernel", FINITE, ids=[k.name for k in FINITE])
@pytest.mark.parametrize("number", NUMBERS, ids=str)
def test_every_number_at_every_place(number: float, kernel: Kernel) -> None:
    for at, shape in enumerate(SHAPES):
        arrays = [np.ones(s, np.float32) for s in SHAPES]
        size = arrays[at].size
        for place in sorted({0, size // 2, size - 1}) if size else []:
            flat = np.ones(size, np.float32)
            flat[place] = number
            arrays[at] = flat.reshape(shape)
            want = all(bool(np.isfinite(a).all()) for a in arrays)
            assert run(kernel, None, arrays) == want, (shape, place)


@pytest.mark.parametrize("kernel", FINITE, ids=[k.name for k in FINITE])
def test_a_norm_that_is_not_finite_decides_nothing(kernel: Kernel) -> None:
    """A norm may have overflowed while every gradient is finite: the tensors themselves decide."""
    fine, odd = np.ones(5, np.float32), np.array([1.0, np.nan], np.float32)
    for norm in (np.inf, np.nan):
        assert run(kernel, norm, [fine])
        assert not run(kernel, norm, [fine, odd])
    assert run(kernel, 3.0, [fine])


@pytest.mark.parametrize("dtype", [DType.FLOAT, DType.DOUBLE])
def test_the_body_says_the_same(
    dtype: DType, execute: Callable[..., dict[str, np.ndarray]]
) -> None:
    for number in NUMBERS:
        graph = Graph()
        xs = [graph.input(f"x{i}", Type(dtype, s), Role.BATCH) for i, s in enumerate(SHAPES)]
        graph.outputs = {"y": Builder(graph).AllFinite(None, *xs)}
        feeds = {f"x{i}": np.ones(s, dtype.numpy()) for i, s in enumerate(SHAPES)}
        feeds["x1"][1, 2] = number
        want = np.isfinite(number)
        assert evaluate(graph, feeds)["y"] == want
        assert execute(graph, feeds)["y"] == want


def test_other_types_are_left_to_aten() -> None:
    spec = KernelSpec("AllFinite", {}, (None, Type(DType.DOUBLE, (3,))), (Type(DType.BOOL, ()),))
    assert [k.name for k in FINITE if k.unsupported(spec) is None] == ["aten.all_finite"]
