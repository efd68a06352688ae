"""The native norms: accuracy beside torch's, odd sizes, threads, both builds, dropout's bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from onward.graph.types import DType, Type
from onward.kernels import NATIVE, Kernel, KernelArguments, KernelSpec
from onward.kernels.native import norm, random
from onward.kernels.native.library import Library, files, library, usable

pytestmark = pytest.mark.skipif(library() is None, reason="no native library here")

EPSILON = 1e-5
DROP = {"ratio": 0.3, "site": 7, "sample_dim": 0}
SIZES = [(1, 1), (3, 3), (2, 31), (5, 33), (17, 64), (33, 200), (40, 257), (513, 96), (2, 2500)]
EACH_SIZE = pytest.mark.parametrize("size", SIZES, ids=str)


@pytest.fixture(params=usable())
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each compiled library in turn."""
    loaded = Library(files()[request.param])
    for module in (norm, random):
        monkeypatch.setattr(module, "library", lambda: loaded)
    return loaded.level


@pytest.fixture
def threads() -> Iterator[Any]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def kernel_of(op: str) -> Kernel:
    (kernel,) = NATIVE[op]
    return kernel


def call(
    op: str, attrs: dict[str, Any], inputs: list[torch.Tensor | None], outputs: int
) -> list[torch.Tensor]:
    """Runs the native kernel on fresh outputs full of NaN; outputs are shaped like the op's."""
    kernel = kernel_of(op)
    x = inputs[2] if op == "AddLayerNormalizationGrad" else inputs[0]
    assert x is not None
    *outer, features = x.shape
    rows, row = [*outer, 1], [features]
    shapes = {
        "LayerNormalization": [x.shape, rows, rows],
        "LayerNormalizationGrad": [x.shape, row, row],
        "AddLayerNormalization": [x.shape, rows, rows, x.shape],
        "AddLayerNormalizationGrad": [x.shape, row, row, x.shape][:outputs],
    }[op]
    results = [torch.full([int(n) for n in s], torch.nan) for s in shapes]
    spec = KernelSpec(op, attrs, tuple(_type(v) for v in inputs), tuple(_typed(y) for y in results))
    assert kernel.unsupported(spec) is None
    scratch = [torch.full([int(n) for n in t.shape], torch.nan) for t in kernel.scratch(spec)]  # type: ignore[arg-type]
    kernel.bind(KernelArguments(attrs, inputs, results, scratch))()
    return results


def _typed(x: torch.Tensor) -> Type:
    return Type(DType.INT64 if x.dtype == torch.int64 else DType.FLOAT, tuple(x.shape))


def _type(x: torch.Tensor | None) -> Type | None:
    return None if x is None else _typed(x)


def dropout(x: torch.Tensor, seed: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    y = torch.full_like(x, torch.nan)
    kernel_of("Dropout").bind(KernelArguments(DROP, [x, seed, offset], [y], []))()
    return y


class Numbers:
    """Inputs of one size. `r` lies far from zero, where a careless variance loses its digits."""

    def __init__(self, size: tuple[int, ...], far: float = 0.0) -> None:
        torch.manual_seed(0)
        self.x, self.dy, self.dr = (torch.randn(size) for _ in range(3))
        self.residual = torch.randn(size) + far
        self.scale, self.bias = torch.randn(size[-1]) + 1, torch.randn(size[-1])
        self.seed, self.offset = torch.tensor([2**32 - 5, 12345]), torch.tensor(3)

    def torch(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """y, then the gradients at the sum, the scale and the bias, by torch."""
        r = (self.residual + self.x).to(dtype).requires_grad_()
        scale = self.scale.to(dtype).requires_grad_()
        bias = self.bias.to(dtype).requires_grad_()
        y = torch.nn.functional.layer_norm(r, [r.shape[-1]], scale, bias, EPSILON)
        torch.autograd.backward([y, r], [self.dy.to(dtype), self.dr.to(dtype)])
        assert r.grad is not None and scale.grad is not None and bias.grad is not None
        return [y.detach(), r.grad, scale.grad, bias.grad]

    def forward(self, dropped: bool) -> list[torch.Tensor]:
        inputs = [self.x, self.residual, self.scale, self.bias, self.seed, self.offset]
        attrs = {"epsilon": EPSILON, **(DROP if dropped else {})}
        return call("AddLayerNormalization", attrs, [*inputs], 4)

    def backward(self, forward: list[torch.Tensor], dropped: bool) -> list[torch.Tensor]:
        _, mean, invstd, r = forward
        inputs = [self.dy, self.dr, r, self.scale, mean, invstd, self.seed, self.offset]
        attrs = DROP if dropped else {}
        return call("AddLayerNormalizationGrad", attrs, [*inputs], 4 if dropped else 3)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b).norm())


@EACH_SIZE
@pytest.mark.parametrize("far", [0.0, 30.0, 1000.0])
def test_as_near_to_fp64_as_torch(size: tuple[int, int], far: float, build: str) -> None:
    """At most torch's own distance, plus some units of rounding where torch's happens to be 0."""
    numbers = Numbers(size, far)
    exact, plain = numbers.torch(torch.float64), numbers.torch(torch.float32)
    forward = numbers.forward(dropped=False)
    ours = [forward[0], *numbers.backward(forward, dropped=False)]
    for have, theirs, truth in zip(ours, plain, exact, strict=True):
        allowed = 1.2 * distance(theirs, truth) + 3e-7 * float(truth.norm())
        if size[1] == 1:  # the exact gradient is dr, or 0: what remains is rounding alone
            allowed += 1e-6 * (1 + far)
        assert distance(have, truth) <= allowed


@EACH_SIZE
def test_statistics(size: tuple[int, int], build: str) -> None:
    numbers = Numbers(size, 100.0)
    _, mean, invstd, r = numbers.forward(dropped=False)
    assert torch.equal(r, numbers.residual + numbers.x)
    exact = r.double()
    torch.testing.assert_close(mean.double(), exact.mean(-1, keepdim=True), rtol=1e-7, atol=0)
    variance = exact.var(-1, correction=0, keepdim=True)
    # where all of a row is one number the variance is what the mean's rounding leaves
    torch.testing.assert_close(
        invstd.double(), (variance + EPSILON).rsqrt(), rtol=2e-6 if size[1] > 1 else 1e-4, atol=0
    )


@EACH_SIZE
@pytest.mark.parametrize("dropped", [False, True], ids=["plain", "dropped"])
def test_the_fused_forward_has_the_bits_of_its_parts(
    size: tuple[int, int], dropped: bool, build: str
) -> None:
    numbers = Numbers(size)
    y, mean, invstd, r = numbers.forward(dropped)
    x = dropout(numbers.x, numbers.seed, numbers.offset) if dropped else numbers.x
    assert torch.equal(r, torch.add(numbers.residual, x))
    inputs = [r, numbers.scale, numbers.bias]
    parts = call("LayerNormalization", {"epsilon": EPSILON}, [*inputs], 3)
    for have, want in zip((y, mean, invstd), parts, strict=True):
        assert torch.equal(have, want)


@EACH_SIZE
def test_the_fused_gradient_draws_dropouts_mask(size: tuple[int, int], build: str) -> None:
    numbers = Numbers(size)
    forward = numbers.forward(dropped=True)
    dresidual, dscale, dbias, dx = numbers.backward(forward, dropped=True)
    assert torch.equal(dx, dropout(dresidual, numbers.seed, numbers.offset))
    inputs = [numbers.dy, forward[3], numbers.scale, *forward[1:3]]
    alone = call("LayerNormalizationGrad", {"axis": -1}, [*inputs], 3)
    torch.testing.assert_close(dresidual, alone[0] + numbers.dr, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close([dscale, dbias], alone[1:], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [(3, 3), (33, 200), (513, 96)], ids=str)
@pytest.mark.parametrize("dropped", [False, True], ids=["plain", "dropped"])
def test_the_number_of_threads_changes_no_bit(
    size: tuple[int, int], dropped: bool, build: str, threads: Any
) -> None:
    numbers = Numbers(size)
    results = []
    for count in (1, 2, 3):
        threads(count)
        forward = numbers.forward(dropped)
        results.append([*forward, *numbers.backward(forward, dropped)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_masks_follow_every_logical_index(build: str) -> None:
    """Rows of four dims, the sample in the second, counted from an offset."""
    numbers = Numbers((2, 3, 4, 19))
    attrs = {**DROP, "sample_dim": 1}
    inputs = [numbers.x, numbers.residual, numbers.scale, None, numbers.seed, numbers.offset]
    r = call("AddLayerNormalization", attrs, [*inputs], 4)[3]
    x = torch.empty_like(numbers.x)
    kernel_of("Dropout").bind(
        KernelArguments(attrs, [numbers.x, numbers.seed, numbers.offset], [x], [])
    )()
    assert torch.equal(r, numbers.residual + x)


def test_no_rows_give_gradients_of_zero(build: str) -> None:
    numbers = Numbers((0, 5))
    forward = numbers.forward(dropped=True)
    dresidual, dscale, dbias, dx = numbers.backward(forward, dropped=True)
    assert dresidual.shape == dx.shape == (0, 5)
    assert torch.equal(dscale, torch.zeros(5)) and torch.equal(dbias, torch.zeros(5))


def test_what_is_not_a_number_stays_in_its_row(build: str) -> None:
    numbers = Numbers((3, 40))
    numbers.x[1, 7] = torch.inf
    forward = numbers.forward(dropped=False)
    dresidual = numbers.backward(forward, dropped=False)[0]
    for result in (forward[0], dresidual):
        assert result[1].isnan().all()
        assert result[::2].isfinite().all()


def test_dropout_of_everything_is_left_to_the_body() -> None:
    x = Type(DType.FLOAT, (2, 3))
    for op in ("AddLayerNormalization", "AddLayerNormalizationGrad"):
        spec = KernelSpec(op, {**DROP, "ratio": 1.0}, (x, x, x), (x,))
        assert kernel_of(op).unsupported(spec) == "ratio 1"


def test_results_do_not_depend_on_where_rows_lie(build: str) -> None:
    """A row has the same bits alone and among others, at any alignment."""
    numbers = Numbers((9, 37))
    whole = numbers.forward(dropped=False)[0]
    for k in range(9):
        part = [v[k : k + 1].clone() for v in (numbers.x, numbers.residual)]
        inputs = [*part, numbers.scale, numbers.bias]
        alone = call("AddLayerNormalization", {"epsilon": EPSILON}, [*inputs], 4)[0]
        np.testing.assert_array_equal(alone[0].numpy(), whole[k].numpy())
