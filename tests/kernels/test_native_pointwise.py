"""The native pointwise kernels beyond the table of sample calls: accuracy, odd sizes, both builds.

The oracle is PyTorch in fp64; "as accurate as eager" means a distance to it of at most twice that
of PyTorch in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from kernel_calls import raise_input_error
from torch.nn import functional as F

from onward.graph.types import DType, Type
from onward.kernels import NATIVE, Kernel, KernelArguments, KernelSpec
from onward.kernels.native import activation, embedding, library, reduce, update
from onward.kernels.native.library import Library, files, usable

Tensors = list[torch.Tensor]


@pytest.fixture(params=usable())
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library:
    """Each build in turn; the kernels are bound to it."""
    made = Library(files()[request.param])
    for family in (activation, embedding, reduce, update):
        monkeypatch.setattr(family, "library", lambda: made)
    return made


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_builds_are_there() -> None:
    assert library.library() is not None
    assert "plain" in usable()


_DTYPES = {torch.float32: DType.FLOAT, torch.float64: DType.DOUBLE, torch.int64: DType.INT64}


def type_of(x: torch.Tensor) -> Type:
    dtype = _DTYPES[x.dtype]
    return Type(dtype, tuple(x.shape))


def bound(op: str, inputs: list[Any], outputs: Tensors, **attrs: Any) -> Callable[[], Any]:
    """The native kernel's launch, which keeps its memory alive; its temporaries hold rubbish."""
    spec = KernelSpec(
        op, attrs, tuple(None if x is None else type_of(x) for x in inputs),
        tuple(type_of(y) for y in outputs),
    )  # fmt: skip
    (kernel,) = NATIVE[op]
    assert kernel.unsupported(spec) is None
    args = KernelArguments(attrs, inputs, outputs, _rubbish(kernel, spec))
    launch = kernel.bind(args)
    return lambda: (launch(), raise_input_error(kernel, args))


def _rubbish(kernel: Kernel, spec: KernelSpec) -> Tensors:
    made: Tensors = []
    for type in kernel.scratch(spec):
        shape = [int(n) for n in type.shape]  # type: ignore[arg-type]
        whole = type.dtype == DType.INT64
        dtype = torch.float64 if type.dtype == DType.DOUBLE else torch.float32
        made.append(torch.full(shape, 77) if whole else torch.full(shape, torch.nan, dtype=dtype))
    return made


def call(op: str, inputs: list[Any], shapes: list[Any], **attrs: Any) -> Tensors:
    outputs = [torch.full(shape, torch.nan) for shape in shapes]
    bound(op, inputs, outputs, **attrs)()
    return outputs


# ---- math.h


def ulps(y: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest distance, in units of the last place of the exact result."""
    spacing = np.spacing(np.abs(exact.float().numpy())).astype(np.float64)
    return float((np.abs(y.double().numpy() - exact.numpy()) / spacing).max())


def values(build: Library, which: int, x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    build.launch("onward_math", x=x, y=y, n=x.numel(), which=which)()
    return y


def test_exp_is_exact_to_one_ulp(build: Library) -> None:
    for low, high in ((-87.336, 88.0), (-1.0, 1.0), (-1e-3, 1e-3)):
        x = torch.linspace(low, high, 1_000_001)
        assert ulps(values(build, 0, x), x.double().exp()) <= 1.0


def test_exp_at_the_edges(build: Library) -> None:
    lowest = torch.finfo(torch.float32).min
    x = torch.tensor([0.0, -0.0, -87.4, -1e5, lowest, -torch.inf, torch.nan])
    want = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 0.0, torch.nan])
    assert torch.equal(values(build, 0, x).nan_to_num(-1.0), want.nan_to_num(-1.0))


def test_sigmoid_is_exact_to_three_ulp(build: Library) -> None:
    x = torch.linspace(-87, 100, 300_001)
    assert ulps(values(build, 1, x), x.double().sigmoid()) <= 3.0


def test_normal_distribution(build: Library) -> None:
    x = torch.linspace(-20, 20, 400_001)
    exact = 0.5 * torch.special.erfc(-x.double() * 0.5**0.5)
    have = values(build, 2, x).double()
    assert float((have - exact).abs().max()) <= 1e-7
    near = x.abs() <= 5  # in the tail x^2 / 2 is rounded, so the relative error grows with it
    assert float(((have - exact).abs() / exact)[near].max()) <= 2e-6
    assert values(build, 2, torch.zeros(1)).item() == 0.5


# ---- activations

TORCH: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu,
    "silu": F.silu,
}  # fmt: skip
EACH = pytest.mark.parametrize("name", TORCH)


def derived(
    name: str, x: torch.Tensor, bias: torch.Tensor, dy: torch.Tensor, dtype: torch.dtype
) -> Tensors:
    """y, dx and dbias by PyTorch's autograd in this precision."""
    x, bias = x.to(dtype).requires_grad_(), bias.to(dtype).requires_grad_()
    y = TORCH[name](x + bias)
    return [y.detach(), *torch.autograd.grad(y, [x, bias], dy.to(dtype))]


def assert_as_accurate_as_eager(have: Tensors, eager: Tensors, exact: Tensors) -> None:
    for y, plain, truth in zip(have, eager, exact, strict=True):
        allowed = 2 * (plain.double() - truth).norm() + 1e-8 * truth.norm()
        assert (y.double() - truth).norm() <= allowed


@EACH
@pytest.mark.parametrize("size", [0.1, 1.0, 4.0, 20.0])
def test_activations_are_as_accurate_as_eager(build: Library, name: str, size: float) -> None:
    x, bias, dy = torch.randn(401, 301) * size, torch.randn(301) * size, torch.randn(401, 301)
    (y,) = call("BiasActivation", [x, bias], [x.shape], activation=name)
    dx, dbias = call("BiasActivationGrad", [dy, x, bias], [x.shape, bias.shape], activation=name)
    eager = derived(name, x, bias, dy, torch.float32)
    assert_as_accurate_as_eager([y, dx, dbias], eager, derived(name, x, bias, dy, torch.float64))


@pytest.mark.sample(1)
@EACH
@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 3), (3, 1), (2, 7), (37, 9), (5, 2, 33), (0, 4), (129, 65), (1025, 16)],
    ids=str,
)  # fmt: skip
def test_activations_at_odd_sizes(
    build: Library, threads: int, name: str, shape: tuple[int, ...]
) -> None:
    x, dy, bias = torch.randn(shape), torch.randn(shape), torch.randn(shape[-1])
    want = derived(name, x, bias, dy, torch.float64)
    have = call("BiasActivation", [x, bias], [shape], activation=name)
    have += call("BiasActivationGrad", [dy, x, bias], [shape, bias.shape], activation=name)
    for y, truth in zip(have, want, strict=True):
        torch.testing.assert_close(y.double(), truth, rtol=2e-6, atol=2e-6)
    if name == "relu":  # y tells its slope as well
        again = call("BiasActivationGrad", [dy, have[0]], [shape, bias.shape], activation=name)
        assert all(torch.equal(a, b) for a, b in zip(again, have[1:], strict=True))


@pytest.mark.parametrize("n", [0, 1, 7, 2047, 2048, 2049, 10_007])
def test_activations_without_a_bias(build: Library, threads: int, n: int) -> None:
    x, dy, zero = torch.randn(n), torch.randn(n), torch.zeros(n)
    for kind, name in (("none", "gelu"), ("tanh", "gelu_tanh")):
        y, dx, _ = derived(name, x, zero, dy, torch.float64)
        (have,) = call("Gelu", [x], [(n,)], approximate=kind)
        torch.testing.assert_close(have.double(), y, rtol=1e-6, atol=1e-6)
        (have,) = call("GeluGrad", [dy, x], [(n,)], approximate=kind)
        torch.testing.assert_close(have.double(), dx, rtol=1e-6, atol=1e-6)
    (have,) = call("Relu", [x], [(n,)])
    assert torch.equal(have, x.relu())


@EACH
def test_what_is_not_a_number_stays_so_and_large_numbers_have_their_limits(
    build: Library, name: str
) -> None:
    x = torch.tensor([[torch.nan, 1e4, -1e4, 1e18, -1e18, torch.inf, 0.0, -0.0, 50.0, -50.0]])
    bias, ones = torch.zeros(10), torch.ones(1, 10)
    (y,) = call("BiasActivation", [x, bias], [x.shape], activation=name)
    dx, _ = call("BiasActivationGrad", [ones, x, bias], [x.shape, bias.shape], activation=name)
    assert y[0, 0].isnan()
    torch.testing.assert_close(y[0, 1:], torch.relu(x)[0, 1:], rtol=0, atol=1e-18)
    slopes = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0])
    torch.testing.assert_close(dx[0, [1, 2, 3, 4, 8, 9]], slopes, rtol=1e-6, atol=1e-18)


def test_the_bias_gradient_does_not_depend_on_the_number_of_threads(build: Library) -> None:
    x, dy, bias = torch.randn(700, 65), torch.randn(700, 65), torch.randn(65)
    results = []
    for n in (1, 2, 3):
        torch.set_num_threads(n)
        results.append(
            call("BiasActivationGrad", [dy, x, bias], [x.shape, (65,)], activation="gelu")
            + call("ReduceSum", [dy, torch.tensor([0])], [(65,)], keepdims=0)
            + call("ReduceL2", [dy], [()], keepdims=0)
        )
    torch.set_num_threads(1)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


# ---- sums


@pytest.mark.parametrize(
    ("shape", "count"),
    [((1, 1), 1), ((3, 5), 1), ((17, 3), 1), ((1030, 9), 1), ((4, 70, 33), 2), ((4, 70, 33), 1),
     ((2, 5000), 1), ((0, 4), 1), ((7, 0), 1), ((33, 33), 1)],
    ids=str,
)  # fmt: skip
def test_sums_over_leading_dims(
    build: Library, threads: int, shape: tuple[int, ...], count: int
) -> None:
    x, dims = torch.randn(shape), torch.arange(count)
    for keep in (0, 1):
        want = x.double().sum(dims.tolist(), keepdim=bool(keep))
        (have,) = call("ReduceSum", [x, dims], [want.shape], keepdims=keep)
        torch.testing.assert_close(have.double(), want, rtol=1e-5, atol=1e-5)
    (plain,) = call("ReduceSum", [x, dims - x.dim()], [shape[count:]], keepdims=0)
    assert torch.equal(plain, have.reshape(plain.shape))


def test_a_sum_whose_types_do_not_tell_the_dim_is_over_the_dim_asked_for(build: Library) -> None:
    x = torch.randn(4, 4)
    for dim in (0, 1):
        (y,) = call("ReduceSum", [x, torch.tensor([dim])], [(4,)], keepdims=0)
        torch.testing.assert_close(y, x.sum(dim))
        (y,) = call("ReduceSum", [x.t(), torch.tensor([dim])], [(4,)], keepdims=0)
        torch.testing.assert_close(y, x.t().sum(dim))


def test_a_sum_of_many_rows_is_as_accurate_as_eager(build: Library) -> None:
    x = torch.rand(20_000, 8)
    (y,) = call("ReduceSum", [x, torch.tensor([0])], [(8,)], keepdims=0)
    exact = x.double().sum(0)
    assert (y - exact).norm() <= 2 * (x.sum(0) - exact).norm() + 1e-7 * exact.norm()


@pytest.mark.parametrize("n", [0, 1, 3, 16_384, 16_385, 100_003])
def test_norms(build: Library, threads: int, n: int) -> None:
    x = torch.randn(n)
    (y,) = call("ReduceL2", [x], [()], keepdims=0)
    assert float(y) == pytest.approx(float(x.double().norm()), rel=6e-8)


def test_a_norm_does_not_overflow_on_the_way(build: Library) -> None:
    (y,) = call("ReduceL2", [torch.full((5, 5), 1e30)], [(1, 1)], keepdims=1)
    assert float(y) == pytest.approx(5e30)
    (y,) = call("ReduceL2", [torch.tensor([1.0, torch.nan])], [()], keepdims=0)
    assert y.isnan()


# ---- updates


@pytest.mark.sample(1)
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("n", [1, 7, 10_007])
def test_adam_follows_torch(
    build: Library, threads: int, decoupled: bool, decay: float, n: int
) -> None:
    """Ten steps with clipping and a rate that changes: as far from fp64 as torch, twice at most."""
    start = torch.randn(n)
    betas, eps = (0.9, 0.99), 1e-8
    types = (torch.float32, torch.float64)
    twins = [torch.nn.Parameter(start.clone().to(dtype)) for dtype in types]
    make = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizers = [make([p], lr=0.0, betas=betas, eps=eps, weight_decay=decay) for p in twins]
    p, m, v = start.clone(), torch.zeros(n), torch.zeros(n)
    g, step, scale = torch.empty(n), torch.tensor(0), torch.empty(())
    hyper = [torch.tensor(x, dtype=torch.float64) for x in (0.0, *betas, eps, decay)]
    launch = bound(
        "AdamUpdate", [p, g, m, v, None, *hyper, step, scale], [p, m, v], decoupled=int(decoupled)
    )
    for i in range(10):
        g.copy_(torch.randn(n))
        hyper[0].fill_(0.01 * (i + 1))
        step.add_(1)
        scale.copy_((0.5 / (g.norm() + 1e-6)).clamp(max=1.0))
        for twin, optimizer in zip(twins, optimizers, strict=True):
            twin.grad = g.clone().to(twin.dtype)  # clipping writes to it
            torch.nn.utils.clip_grad_norm_([twin], 0.5)
            optimizer.param_groups[0]["lr"] = 0.01 * (i + 1)
            optimizer.step()
        launch()
    eager, exact = twins[0].detach(), twins[1].detach()
    assert (p - exact).norm() <= 2 * (eager - exact).norm() + 1e-5 * exact.norm()
    assert not torch.equal(p, start)


def test_an_update_may_lie_elsewhere_than_what_it_updates(build: Library) -> None:
    p, g, m = torch.randn(100), torch.randn(100), torch.randn(100)
    v, step = torch.rand(100), torch.tensor(3)
    hyper = [torch.tensor(x, dtype=torch.float64) for x in (0.1, 0.9, 0.99, 1e-8, 0.1)]
    inputs = [p, g, m, v, None, *hyper, step]
    apart = call("AdamUpdate", inputs, [(100,)] * 3, decoupled=1)
    bound("AdamUpdate", inputs, [p, m, v], decoupled=1)()
    assert all(torch.equal(a, b) for a, b in zip(apart, (p, m, v), strict=True))


# ---- embeddings


@pytest.mark.parametrize("op", ["Gather", "Embedding"])
@pytest.mark.parametrize("width", [1, 3, 64, 130])
def test_rows_of_a_table(build: Library, threads: int, op: str, width: int) -> None:
    table, ids = torch.randn(50, width), torch.randint(0, 50, (13, 11))
    (y,) = call(op, [table, ids], [(13, 11, width)], axis=0)
    assert torch.equal(y, table[ids])
    with pytest.raises(IndexError, match="index -1 is out of range for a table"):
        call(op, [table, torch.tensor([7, -1])], [(2, width)], axis=0)
    (y,) = call(op, [table, torch.zeros(0, dtype=torch.int64)], [(0, width)], axis=0)
    assert y.numel() == 0


@pytest.mark.parametrize("width", [1, 3, 64, 130])
@pytest.mark.parametrize("start", ["zero", "contiguous", "strided", "in place"])
def test_rows_added_to_a_table(build: Library, threads: int, width: int, start: str) -> None:
    ids, updates = torch.randint(-50, 50, (300, 1)), torch.randn(300, width)
    data = {
        "zero": torch.zeros(()).expand(50, width), "strided": torch.randn(width, 50).t(),
    }.get(start, torch.randn(50, width))  # fmt: skip
    want = data.double().index_add(0, ids.reshape(-1) % 50, updates.double())
    y = data if start == "in place" else torch.full((50, width), torch.nan)
    bound("ScatterND", [data, ids, updates], [y], reduction="add")()
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", [50, -51, 2**40, -(2**62)])
def test_a_row_that_is_not_there_is_named_and_nothing_is_written(build: Library, bad: int) -> None:
    table, ids = torch.randn(50, 8), torch.tensor([3, bad, 50])
    y = torch.full((3, 8), 5.0)
    with pytest.raises(IndexError, match=f"Gather: the index {bad} is out of range .* of 50 rows"):
        bound("Gather", [table, ids], [y], axis=0)()
    assert bool((y == 5.0).all())
    y = torch.full((50, 8), 5.0)
    with pytest.raises(
        IndexError, match=f"ScatterND: the index {bad} is out of range .* of 50 rows"
    ):
        bound("ScatterND", [table, ids[:, None], torch.ones(3, 8)], [y], reduction="add")()
    assert bool((y == 5.0).all())
