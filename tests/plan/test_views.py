"""Views: strides against those of torch and numpy, and the numbers read through them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases import Known, OpCase, cases_of

from onward.graph.graph import Role, type_of
from onward.graph.types import DType, Type, value
from onward.plan.views import VIEWS, Layout, contiguous, dense, reshape_strides, view


def factorings(n: int) -> st.SearchStrategy[list[int]]:
    """Shapes of n elements, ones among them."""

    @st.composite
    def draw_one(draw: st.DrawFn) -> list[int]:
        out: list[int] = []
        left = n
        while left > 1:
            divisors = [d for d in range(1, left + 1) if left % d == 0]
            out.append(draw(st.sampled_from(divisors)))
            left //= out[-1]
            if len(out) > 5:
                out.append(left)
                break
        for _ in range(draw(st.integers(0, 2))):
            out.insert(draw(st.integers(0, len(out))), 1)
        return out

    return draw_one()


@st.composite
def strided_tensors(draw: st.DrawFn) -> torch.Tensor:
    """Transposed, sliced, expanded windows of a block of memory."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    x = torch.arange(math.prod(shape)).reshape(shape)
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["permute", "slice", "expand", "unsqueeze", "step"]))
        dim = draw(st.integers(0, x.dim() - 1))
        if kind == "permute":
            x = x.permute(draw(st.permutations(range(x.dim()))))
        elif kind == "slice":
            start = draw(st.integers(0, x.shape[dim] - 1))
            x = x.narrow(dim, start, draw(st.integers(1, x.shape[dim] - start)))
        elif kind == "expand" and x.shape[dim] == 1:
            x = x.expand([3 if d == dim else n for d, n in enumerate(x.shape)])
        elif kind == "unsqueeze" and x.dim() < 5:
            x = x.unsqueeze(dim)
        elif kind == "step":
            x = x[(slice(None),) * dim + (slice(None, None, 2),)]
    return x


@settings(max_examples=500)
@given(st.data())
def test_a_reshape_is_a_view_where_it_is_one_to_torch(data: st.DataObject) -> None:
    x = data.draw(strided_tensors())
    new = tuple(data.draw(factorings(x.numel())))
    have = reshape_strides(tuple(x.shape), x.stride(), new)
    try:
        x.view(new)
    except RuntimeError:
        assert have is None
    else:
        assert have is not None
    if have is not None:
        strides = [value(n) for n in have]
        read = x.as_strided(new, strides, x.storage_offset())
        assert torch.equal(read, x.reshape(new))


@pytest.mark.parametrize(
    ("shape", "new"), [((0, 3), (3, 0)), ((2, 0), (0,)), ((0,), (0, 5))], ids=str
)
def test_a_reshape_of_nothing_is_a_view(shape: tuple[int, ...], new: tuple[int, ...]) -> None:
    assert reshape_strides(shape, dense(shape), new) == dense(new)


@given(st.lists(st.integers(1, 5), max_size=4))
def test_dense_strides_are_numpys(shape: list[int]) -> None:
    array = np.empty(shape, dtype=np.int32)
    assert dense(tuple(shape)) == tuple(s // 4 for s in array.strides)
    assert contiguous(0, Type(DType.INT32, tuple(shape))).is_contiguous


def _numpy(case: OpCase, x: np.ndarray) -> list[np.ndarray]:
    """What numpy makes of the call; reshapes that numpy copies share no memory with x."""

    def known(i: int) -> list[int]:
        item = case.inputs[i]
        assert isinstance(item, Known)
        return [int(n) for n in item.array]

    match case.op:
        case "Identity":
            return [x]
        case "Reshape":
            shape = [x.shape[i] if n == 0 else n for i, n in enumerate(known(1))]
            return [x.reshape(shape)]
        case "Transpose":
            return [np.transpose(x, case.attrs.get("perm"))]
        case "Unsqueeze":
            return [np.expand_dims(x, tuple(known(1)))]
        case "Squeeze":
            return [np.squeeze(x, tuple(known(1)) if len(case.inputs) > 1 else None)]
        case "Expand":
            return [np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(known(1))))]
        case "Split":
            return np.split(x, np.cumsum(known(1))[:-1], axis=case.attrs.get("axis", 0))
        case "Slice":
            index = [slice(None)] * x.ndim
            dims = known(3) if len(case.inputs) > 3 else range(len(known(1)))
            for start, end, dim in zip(known(1), known(2), dims, strict=True):
                index[dim] = slice(start, end)
            return [x[tuple(index)]]
        case other:
            raise AssertionError(f"{other} is a view and has no spelling in numpy here")


VIEW_CALLS = cases_of(*VIEWS)


@pytest.mark.parametrize("turned", [False, True], ids=["dense", "turned"])
@pytest.mark.parametrize("case", VIEW_CALLS, ids=str)
def test_views_are_numpys(case: OpCase, turned: bool) -> None:
    """Shape, strides and first element of every window, on dense and on turned memory."""
    graph = case.graph()
    node = next(iter(graph))
    shape = tuple(int(n) for n in type_of(node.inputs[0]).shape)  # type: ignore[arg-type]
    memory = np.arange(math.prod(shape) + 5, dtype=np.float32)
    offset = 5
    block = memory[offset:].reshape(shape[::-1] if turned else shape)
    x = block.T if turned else block
    strides = tuple(s // 4 for s in x.strides)
    made = view(node, Layout(7, DType.FLOAT, shape, strides, offset))
    for i, want in enumerate(_numpy(case, x)):
        if not np.shares_memory(want, memory) and want.size:
            assert made is None, "numpy had to copy"
            continue
        assert made is not None
        layout = made[i]
        assert (layout.buffer, layout.dtype) == (7, DType.FLOAT)
        assert layout.shape == want.shape == tuple(type_of(node.outputs[i]).shape)
        read = np.lib.stride_tricks.as_strided(
            memory[value(layout.offset) :],
            [value(n) for n in layout.shape],
            [4 * value(n) for n in layout.strides],
        )
        np.testing.assert_array_equal(read, want)
        for n, have, there in zip(want.shape, layout.strides, want.strides, strict=True):
            assert n <= 1 or want.size == 0 or have * 4 == there
        if want.size:
            assert layout.is_contiguous == want.flags.c_contiguous


def test_an_op_that_computes_is_no_view() -> None:
    for case in cases_of("Neg", "Concat", "Gather"):
        node = next(iter(case.graph(DType.FLOAT)))
        shape = tuple(int(n) for n in type_of(node.inputs[0]).shape)  # type: ignore[arg-type]
        assert view(node, contiguous(0, Type(DType.FLOAT, shape))) is None
        assert node.op_type not in VIEWS


@pytest.mark.parametrize("case", VIEW_CALLS, ids=str)
def test_views_of_views_give_the_right_numbers_when_run(case: OpCase, execute: Any) -> None:
    """Between two transposes, through plan and executor, against the reference evaluator."""
    from onward.graph.build import Builder
    from onward.graph.evaluate import evaluate

    graph = case.graph()
    node = next(iter(graph))
    source = graph.inputs[0]
    turned = source.meta["type"].with_shape(reversed(type_of(source).shape))
    other = graph.input("turned", turned, Role.BATCH)
    back = Builder(graph, before=node).Transpose(other)
    node.replace_input_with(0, back)
    b = Builder(graph)
    graph.outputs = {f"y{i}": b.Neg(b.Transpose(y)) for i, y in enumerate(list(node.outputs))}
    feeds = case.feeds()
    feeds["turned"] = np.array(feeds["x0"].T, order="C")
    want = evaluate(graph, feeds)
    for name, y in execute(graph, feeds).items():
        np.testing.assert_array_equal(y, want[name])
