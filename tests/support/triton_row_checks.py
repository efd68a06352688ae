"""Rows read, set and added by Triton's interpreter beside PyTorch: tails, strides, repeated and bad
numbers, and segments of updates that several programs share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from kernel_calls import rubbish

from onward.graph.types import DType, Type
from onward.kernels import TRITON, KernelArguments, KernelSpec, torch_dtype
from onward.kernels.triton import rows

CHECKS: dict[str, Callable[[], None]] = {}
_TYPES = {
    torch_dtype(d): d
    for d in (DType.FLOAT, DType.FLOAT16, DType.DOUBLE, DType.INT64, DType.INT32, DType.BOOL)
}
_FLOATS = {"float": torch.float32, "float16": torch.float16}
_AROUND = 64  # numbers around each tensor that is written


def _type(x: torch.Tensor) -> Type:
    return Type(_TYPES[x.dtype], tuple(x.shape))


def _guarded(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of rubbish within ones, and all of it."""
    inner = rubbish(Type(_TYPES[dtype], shape))
    room = torch.full((inner.numel() + 2 * _AROUND,), 1).to(dtype)
    room[_AROUND : _AROUND + inner.numel()] = inner.flatten()
    return room[_AROUND : _AROUND + inner.numel()].view(shape), room


def _run(
    op: str,
    inputs: list[torch.Tensor],
    shape: tuple[int, ...],
    attrs: dict[str, Any],
    inplace: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches a kernel whose output has this shape; returns y and the flag. Nothing around y and
    the scratch may be written."""
    (kernel,) = TRITON[op]
    y, room = _guarded(shape, inputs[0].dtype)
    if inplace:
        inputs = [y.copy_(inputs[0]), *inputs[1:]]
    before = [x.clone() for x in inputs[inplace:]]
    spec = KernelSpec(op, attrs, tuple(_type(x) for x in inputs), (_type(y),))
    assert kernel.unsupported(spec) is None, kernel.unsupported(spec)
    made = [_guarded(tuple(t.shape), torch_dtype(t.dtype)) for t in kernel.scratch(spec)]  # type: ignore[arg-type]
    args = KernelArguments(attrs, [*inputs], [y], [x for x, _ in made])
    kernel.bind(args)()
    for around in (room, *(held for _, held in made)):
        assert (around[:_AROUND] == 1).all() and (around[-_AROUND:] == 1).all(), "beside a tensor"
    for x, kept in zip(inputs[inplace:], before, strict=True):
        assert torch.equal(x.nan_to_num(), kept.nan_to_num()), "an input was written to"
    assert kernel.input_error is not None
    error = kernel.input_error(args, args.flag.tolist())
    assert isinstance(error, IndexError) and args.flag.tolist()[0] in (0, 1)
    return y, args.flag


def _numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
    return x > 0 if dtype == torch.bool else x.to(dtype)


def _chosen(below: int, shape: tuple[int, ...], least: int = 0) -> torch.Tensor:
    return torch.randint(least, below, shape, generator=torch.Generator().manual_seed(5))


# ---- reading

# a table, its axis and how many rows are read
_TABLES: dict[str, tuple[Callable[[torch.dtype], torch.Tensor], int, int]] = {
    "plain": (lambda d: _numbers((50, 64), d), 0, 143),
    "odd width": (lambda d: _numbers((50, 131), d), 0, 40),
    "wide": (lambda d: _numbers((5, 1500), d), 0, 7),
    "numbers": (lambda d: _numbers((50,), d), 0, 2500),
    "inner axis": (lambda d: _numbers((3, 20, 2, 9), d), 1, 33),
    "last axis": (lambda d: _numbers((3, 4, 20), d), -1, 5),
    "a part": (lambda d: _numbers((50, 96), d)[:, 32:64], 0, 20),
    "transposed": (lambda d: _numbers((24, 50), d).t(), 0, 20),
    "expanded": (lambda d: _numbers((1, 24), d).expand(50, 24), 0, 20),
    "inner part": (lambda d: _numbers((4, 20, 30), d)[:, 3:15, 4:20], 1, 20),
    "odd strides": (lambda d: _numbers((20, 6, 10), d)[:, ::2, ::3], 0, 20),
    "no rows read": (lambda d: _numbers((50, 8), d), 0, 0),
    "no columns": (lambda d: _numbers((50, 0), d), 0, 4),
    "no rows outside": (lambda d: _numbers((0, 5, 3), d), 1, 4),
}


def _read(name: str, dtype: torch.dtype, ids: torch.dtype = torch.int64) -> None:
    make, axis, count = _TABLES[name]
    x = make(dtype)
    size = x.shape[axis]
    # PyTorch's operator, which reads odd strides, takes no negative number on a CPU
    index = _chosen(size, (count,), 0 if name == "odd strides" else -size).to(ids)
    want = x.index_select(axis, index.long() % size)
    y, flag = _run("Gather", [x, index], tuple(want.shape), {"axis": axis})
    assert torch.equal(y, want) and not flag.any()
    if axis == 0:
        y, flag = _run("Embedding", [x, index % size], tuple(want.shape), {"padding_idx": 1})
        assert torch.equal(y, want) and not flag.any()


for _name in _TABLES:
    for _low, _dtype in _FLOATS.items():
        CHECKS[f"rows Gather {_name} {_low}"] = partial(_read, _name, _dtype)
for _dtype in (torch.bool, torch.int64, torch.int32, torch.float64):
    for _name in ("plain", "inner axis"):
        CHECKS[f"rows Gather {_name} {_dtype}"] = partial(_read, _name, _dtype)
CHECKS["rows Gather short numbers"] = partial(_read, "plain", torch.float32, torch.int32)


def _read_by_several(dtype: torch.dtype) -> None:
    for shape, depth in (((6, 5, 70), 2), ((3, 4, 2, 5), 3), ((3, 4, 2, 5), 4), ((4, 3), 1)):
        x = _numbers(shape, dtype)
        columns = [_chosen(n, (3, 31), -n) for n in shape[:depth]]
        want = x[tuple(columns)]
        y, flag = _run("GatherND", [x, torch.stack(columns, -1)], tuple(want.shape), {})
        assert torch.equal(y, want) and not flag.any()


for _low, _dtype in _FLOATS.items():
    CHECKS[f"rows GatherND {_low}"] = partial(_read_by_several, _dtype)


# ---- adding

# What 40 rows are added to, in these ways of lying in memory:
_STARTS: dict[str, Callable[[int, torch.dtype], torch.Tensor]] = {
    "zero": lambda width, d: torch.zeros((), dtype=d).expand(40, width),
    "contiguous": lambda width, d: _numbers((40, width), d),
    "a row": lambda width, d: _numbers((1, width), d).expand(40, width),
    "transposed": lambda width, d: _numbers((width, 40), d).t(),
    "in place": lambda width, d: _numbers((40, width), d),
}


def _add(
    start: str,
    width: int,
    dtype: torch.dtype,
    count: int = 90,
    updated: torch.dtype | None = None,
    hot: float = 0.3,
    ranked: int = 8192,
    tile: int = 4096,
) -> None:
    """Adds rows, a share `hot` of which to one row. ranked: how many are not sorted by PyTorch;
    tile: elements that a program holds."""
    data = _STARTS[start](width, dtype)
    updates = _numbers((count, width), updated or dtype, 1)
    index = _chosen(40, (count,), -40)
    index[_chosen(1000, (count,)) < 1000 * hot] = -7
    want = data.double().index_add(0, index % 40, updates.double())
    with patch.object(rows, "_RANKED", ranked), patch.object(rows, "_TILE", tile):
        y, flag = _run(
            "ScatterND", [data, index[:, None], updates], (40, width), {"reduction": "add"},
            start == "in place",
        )  # fmt: skip
    assert not flag.any()
    unit = 1e-6 if dtype == torch.float32 else 1e-3
    scale = data.double().abs().index_add(0, index % 40, updates.double().abs())
    assert ((y.double() - want).abs() <= unit * (scale if dtype == torch.float32 else want.abs())
            + 1e-6 * scale).all()  # fmt: skip


for _low, _dtype in _FLOATS.items():
    for _name in _STARTS:
        CHECKS[f"rows ScatterND added {_name} {_low}"] = partial(_add, _name, 20, _dtype)
    for _width in (1, 3, 35, 130):
        CHECKS[f"rows ScatterND added width{_width} {_low}"] = partial(
            _add, "zero", _width, _dtype, 300 if _width < 20 else 70
        )
    CHECKS[f"rows ScatterND added sorted {_low}"] = partial(_add, "zero", 20, _dtype, ranked=50)
    CHECKS[f"rows ScatterND added one {_low}"] = partial(_add, "in place", 33, _dtype, 1)
    CHECKS[f"rows ScatterND added none {_low}"] = partial(_add, "a row", 3, _dtype, 0)
    CHECKS[f"rows ScatterND added nothing {_low}"] = partial(_add, "zero", 0, _dtype)
    # 38 segments of 32 updates, of which 16 are read at once
    CHECKS[f"rows ScatterND added hot {_low}"] = partial(
        _add, "contiguous", 5, _dtype, 1200, hot=0.97, tile=128
    )
CHECKS["rows ScatterND added many"] = partial(_add, "zero", 1, torch.float32, 700, hot=0.6)
CHECKS["rows ScatterND added low to wide"] = partial(
    _add, "zero", 20, torch.float32, updated=torch.float16
)


def _add_by_several(dtype: torch.dtype) -> None:
    for shape, depth in (((3, 4, 10), 2), ((2, 3, 2), 3)):
        data = _numbers(shape, dtype)
        columns = [_chosen(n, (5, 9), -n) for n in shape[:depth]]
        updates = _numbers((5, 9, *shape[depth:]), dtype, 1)
        want = data.double().index_put(tuple(columns), updates.double(), accumulate=True)
        given = [data, torch.stack(columns, -1), updates]
        y, flag = _run("ScatterND", given, shape, {"reduction": "add"})
        allowed = 1e-5 if dtype == torch.float32 else 3e-3
        torch.testing.assert_close(y.double(), want, rtol=allowed, atol=allowed)
        assert not flag.any()


for _low, _dtype in _FLOATS.items():
    CHECKS[f"rows ScatterND added by several {_low}"] = partial(_add_by_several, _dtype)


def _add_odd() -> None:
    """What is not finite stays in its row."""
    updates = torch.ones(70, 5)
    updates[3], updates[9, 2] = torch.nan, torch.inf
    index = torch.arange(70)[:, None] // 2
    y, _ = _run("ScatterND", [torch.zeros(40, 5), index, updates], (40, 5), {"reduction": "add"})
    want = torch.zeros(40, 5).index_add(0, index[:, 0], updates)
    assert torch.equal(y.nan_to_num(7.0), want.nan_to_num(7.0))


CHECKS["rows ScatterND added that are not finite"] = _add_odd


# ---- setting


def _set(start: str, width: int, dtype: torch.dtype) -> None:
    data = _numbers((40, width), dtype)
    data = data if start == "in place" else _STARTS[start](width, dtype)
    index = torch.randperm(40, generator=torch.Generator().manual_seed(2))[:23]
    updates = _numbers((23, width), dtype, 1)
    want = data.clone().index_copy_(0, index, updates)
    index[::2] -= 40
    given = [data, index[:, None], updates]
    y, flag = _run("ScatterND", given, (40, width), {}, start == "in place")
    assert torch.equal(y, want) and not flag.any()


for _name in _STARTS:
    for _low, _dtype in _FLOATS.items():
        CHECKS[f"rows ScatterND set {_name} {_low}"] = partial(_set, _name, 70, _dtype)
for _dtype in (torch.bool, torch.int64, torch.float64):
    CHECKS[f"rows ScatterND set {_dtype}"] = partial(_set, "contiguous", 3, _dtype)


# ---- bad numbers


def _bad(op: str, bad: list[int], attrs: dict[str, Any], ranked: int = 8192) -> None:
    """A number out of range sets the flag; other rows are as without it."""
    depth = len(bad)
    x = _numbers((50, 4, 8), torch.float32)
    columns = [_chosen(n, (70,)) for n in x.shape[:depth]]
    places = torch.stack(columns, -1)
    places[41] = torch.tensor(bad)
    given, shape = [x, places if op.endswith("ND") else places[:, 0]], (70, *x.shape[depth:])
    if op == "ScatterND":
        given, shape = [*given, _numbers(shape, torch.float32, 1)], tuple(x.shape)
    with patch.object(rows, "_RANKED", ranked):
        y, flag = _run(op, given, shape, attrs)
    assert flag.tolist() == [1, 0]
    kept = torch.arange(70) != 41
    if op != "ScatterND":
        assert torch.equal(y[kept], x[tuple(columns)][kept])
    elif attrs:
        named = tuple(c[kept] for c in columns)
        want = x.index_put(named, given[2][kept], accumulate=True)
        torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)


for _number in (50, -51, 2**31 + 3, 2**40, -(2**40), 2**63 - 1, -(2**63)):
    CHECKS[f"rows Gather bad {_number}"] = partial(_bad, "Gather", [_number], {"axis": 0})
    CHECKS[f"rows ScatterND bad {_number}"] = partial(
        _bad, "ScatterND", [_number], {"reduction": "add"}
    )
CHECKS["rows Embedding bad"] = partial(_bad, "Embedding", [-1], {"padding_idx": 0})
for _name in ("GatherND", "ScatterND"):
    CHECKS[f"rows {_name} bad second"] = partial(_bad, _name, [3, 4], {})
CHECKS["rows ScatterND bad sorted"] = partial(
    _bad, "ScatterND", [2**40], {"reduction": "add"}, ranked=50
)
