"""Products of bf16 and fp16 by widened blocks, beside fp64: each number is rounded once."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_calls import rubbish

from onward.graph.types import DType, Type
from onward.kernels import KERNELS, KernelArguments, KernelSpec, Refusal, host, kernel_for
from onward.kernels.blas import low_product as module
from onward.kernels.blas.engines import engines
from onward.kernels.blas.low_product import low_product, low_scratch

pytestmark = pytest.mark.skipif(not engines(), reason="no BLAS to call")
EPS = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
LOW = {torch.bfloat16: DType.BFLOAT16, torch.float16: DType.FLOAT16}
SIZES = [
    (1, 1, 1), (3, 5, 7), (17, 33, 70), (40, 8, 300), (9, 120, 31), (0, 4, 4), (4, 0, 4), (4, 4, 0),
    (1, 64, 5), (64, 1, 5), (50, 2, 90),
]  # fmt: skip


def operand(rows: int, columns: int, turned: bool, dtype: torch.dtype) -> torch.Tensor:
    """A matrix within a wider one, stored transposed or not."""
    shape = (columns, rows) if turned else (rows, columns)
    wide = torch.randn(shape[0], shape[1] + 3).to(dtype)[:, 1 : 1 + shape[1]]
    return wide.t() if turned else wide


def check(
    size: tuple[int, int, int], ta: bool, tb: bool, dtype: torch.dtype, c: torch.Tensor | None,
    room: tuple[int, int, int] | None = None,
) -> None:  # fmt: skip
    m, n, k = size
    a, b = operand(m, k, ta, dtype), operand(k, n, tb, dtype)
    y = torch.full((m, n + 2), 7.0, dtype=dtype)[:, :n]
    scratch = [rubbish(t) for t in low_scratch(*(room or size))]
    launch = low_product(a, b, y, scratch, c)
    assert launch is not None
    launch()
    want = a.double() @ b.double() + (0 if c is None else c.double())
    # f32 sums have an error of their terms, which are larger than their sum
    terms = a.double().abs() @ b.double().abs()
    allowed = EPS[dtype] * want.abs() + 1e-6 * terms + 1e-7
    assert ((y.double() - want).abs() <= allowed).all()
    assert (y._base[:, n:] == 7.0).all(), "beside y"  # type: ignore[index]


@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize(("ta", "tb"), list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("blocks", [(512, 256, 2048), (4, 16, 8)], ids=["one", "several"])
def test_numbers_are_those_of_fp64_rounded(
    size: Any, ta: bool, tb: bool, dtype: torch.dtype, blocks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in zip(("_ROWS", "_COLUMNS", "_DEPTH"), blocks, strict=True):
        monkeypatch.setattr(module, name, value)
    torch.manual_seed(sum(size))
    m, n, _ = size
    for c in (None, torch.randn(n).to(dtype), torch.randn(m, n).to(dtype)):
        check(size, ta, tb, dtype, c)


def test_scratch_may_be_that_of_a_larger_product() -> None:
    for size in ((5, 6, 7), (5, 70, 7), (5, 7, 70)):
        check(size, False, False, torch.bfloat16, None, (20, 90, 90))


def test_scratch_is_enough_for_all_smaller_sizes() -> None:
    """Rows of a batch that is smaller than planned may be any of the three sizes."""
    sizes = (0, 1, 17, 257, 512, 513, 2049, 3000, 9000)
    for threads in (1, 2, 3, 16):
        used: dict[tuple[int, int, int], int] = {}
        for m, n, k in itertools.product(sizes, repeat=3):
            used[m, n, k] = module._used(m, n, k, threads)  # pyright: ignore[reportPrivateUsage]
        for m, n, k in itertools.product(sizes, repeat=3):
            room = module._room(m, n, k, threads)  # pyright: ignore[reportPrivateUsage]
            most = max(u for (a, b, c), u in used.items() if a <= m and b <= n and c <= k)
            assert most <= room, (m, n, k, threads)


def turned(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t()


ODD: dict[str, Any] = {  # operands in memory as views leave them
    "a repeated row": lambda a, b, c: (a[:1].expand_as(a), b, c),
    "a repeated column": lambda a, b, c: (a, b[:, :1].expand_as(b), c),
    "every other column": lambda a, b, c: (a, b.repeat_interleave(2, 1)[:, ::2], c),
    "c transposed": lambda a, b, c: (a, b, turned(c)),
    "c one number": lambda a, b, c: (a, b, c[:1, :1].expand_as(c)),
    "c a column": lambda a, b, c: (a, b, c[:, :1].expand_as(c)),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("form", ODD)
def test_strides_that_no_blas_has_and_other_threads(form: str, threads: int) -> None:
    """Planned for all threads, and run with fewer."""
    kernel = next(k for k in KERNELS["Gemm"] if k.name == "blas.bf16_gemm")
    a, b, c = ODD[form](*(torch.randn(s).bfloat16() for s in ((9, 20), (20, 33), (9, 33))))
    types = [Type(DType.BFLOAT16, tuple(x.shape)) for x in (a, b, c)]
    spec = KernelSpec("Gemm", {}, tuple(types), (types[2],))
    y, scratch = torch.empty(9, 33).bfloat16(), [rubbish(t) for t in kernel.scratch(spec)]
    launch = kernel.bind(KernelArguments({}, [a, b, c], [y], scratch))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        launch()
    finally:
        torch.set_num_threads(before)
    want = (a.double() @ b.double() + c.double()).bfloat16()
    torch.testing.assert_close(y, want, rtol=2**-7, atol=2e-2)


def test_y_may_be_c() -> None:
    a, b, c = (torch.randn(6, 6).bfloat16() for _ in range(3))
    want = (a.double() @ b.double() + c.double()).bfloat16()
    scratch = [rubbish(t) for t in low_scratch(6, 6, 6)]
    launch = low_product(a, b, c, scratch, c)
    assert launch is not None
    launch()
    torch.testing.assert_close(c, want)


def test_what_is_not_finite_stays_so() -> None:
    a = torch.tensor([[6e4, 1.0], [torch.inf, 1.0], [torch.nan, 1.0]], dtype=torch.float16)
    b = torch.tensor([[2.0, 1.0], [0.0, 0.0]], dtype=torch.float16)
    y = torch.empty(3, 2, dtype=torch.float16)
    scratch = [rubbish(t) for t in low_scratch(3, 2, 2)]
    launch = low_product(a, b, y, scratch)
    assert launch is not None
    launch()
    want = torch.tensor([[torch.inf, 6e4], [torch.inf, torch.inf], [torch.nan, torch.nan]])
    torch.testing.assert_close(y.float(), want.half().float(), equal_nan=True)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("op", ["Gemm", "MatMul"])
def test_it_is_taken_where_the_processor_has_no_such_product(op: str, dtype: Any) -> None:
    types = [Type(LOW[dtype], shape) for shape in ((4, 6), (6, 5), (4, 5))]
    spec = KernelSpec(op, {}, (types[0], types[1]), (types[2],))
    without = replace(host(), multiplies_bf16=False, multiplies_fp16=False)
    both = replace(host(), multiplies_bf16=True, multiplies_fp16=True)
    found, other = kernel_for(spec, without), kernel_for(spec, both)
    assert not isinstance(found, Refusal) and not isinstance(other, Refusal)
    name = "bf16" if dtype == torch.bfloat16 else "fp16"
    assert found.name == f"blas.{name}_gemm" and other.name.startswith("aten.")
    a, b = torch.randn(4, 6).to(dtype), torch.randn(6, 5).to(dtype)
    results = []
    for kernel in (found, other):
        y = torch.empty(4, 5, dtype=dtype)
        scratch = [rubbish(t) for t in kernel.scratch(spec)]
        kernel.bind(KernelArguments({}, [a, b], [y], scratch))()
        results.append(y)
    torch.testing.assert_close(*results)


def test_gemm_takes_its_attributes() -> None:
    kernel = next(k for k in KERNELS["Gemm"] if k.name == "blas.bf16_gemm")
    a, b, c = torch.randn(6, 4), torch.randn(5, 6), torch.randn(5)
    low = [x.bfloat16() for x in (a, b, c)]
    shapes = [Type(DType.BFLOAT16, tuple(x.shape)) for x in (*low, torch.empty(4, 5))]
    attrs = {"transA": 1, "transB": 1}
    spec = KernelSpec("Gemm", attrs, tuple(shapes[:3]), (shapes[3],))
    assert kernel.unsupported(spec) is None
    assert "alpha" in str(kernel.unsupported(replace(spec, attrs={**attrs, "alpha": 2.0})))
    y = torch.empty(4, 5, dtype=torch.bfloat16)
    scratch = [rubbish(t) for t in kernel.scratch(spec)]
    kernel.bind(KernelArguments(attrs, list(low), [y], scratch))()
    want = low[0].double().t() @ low[1].double().t() + low[2].double()
    torch.testing.assert_close(y, want.bfloat16(), rtol=2**-7, atol=1e-2)
