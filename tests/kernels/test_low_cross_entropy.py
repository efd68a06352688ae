"""The linear head with its loss on bf16 and fp16, beside PyTorch's cross-entropy in fp64 on logits
that are rounded as the kernel rounds them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from onward.graph.types import DType, Type
from onward.kernels import KERNELS, Kernel, KernelArguments, KernelSpec, torch_dtype
from onward.kernels.blas.engines import engines
from onward.kernels.native import cross_entropy
from onward.kernels.native.library import library

pytestmark = pytest.mark.skipif(library() is None, reason="no native library here")
LOW = (DType.BFLOAT16, DType.FLOAT16)
OPS = ("LinearCrossEntropy", "LinearCrossEntropyGrad", "LinearCrossEntropyStep")
SIZES = [(1, 1, 1), (6, 4, 9), (5, 3, 70), (37, 16, 33), (64, 8, 131), (0, 4, 9)]
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "bias": {"bias": True},
    "classes that no row can have": {"bias": True, "hidden": True},
    "weights": {"weights": True},
    "smoothing": {"label_smoothing": 0.1},
    "all": {"bias": True, "weights": True, "label_smoothing": 0.2, "ignored": True},
    "ignored": {"ignored": True},
    "blocks of rows": {"rows": 8},
    "rows to spare": {"spare": 40, "bias": True},
    "rows to spare, in blocks": {"spare": 40, "rows": 32},
}


def type_of(x: torch.Tensor) -> Type:
    kinds = {torch_dtype(d): d for d in (*LOW, DType.FLOAT, DType.INT64)}
    return Type(kinds[x.dtype], tuple(x.shape))


# whose products: torch's, or widened ones of a BLAS
MAKERS = ["native", *(["blas"] if engines() else [])]
maker = ["native"]


@pytest.fixture(params=MAKERS, autouse=True)
def _of_maker(request: pytest.FixtureRequest) -> Iterator[None]:
    maker[0] = request.param
    yield
    maker[0] = "native"


def kernel_of(op: str, dtype: torch.dtype) -> Kernel:
    low = "bf16_" if dtype == torch.bfloat16 else "fp16_"
    name = f"{maker[0]}.{low if maker[0] == 'blas' else ''}linear_cross_entropy"
    return next(k for k in KERNELS[op] if k.name == name)


def launch(op: str, attrs: dict[str, Any], inputs: list[torch.Tensor | None]) -> Any:
    """The outputs, and what the kernel says of its input."""
    at = len(inputs) - 5 if op == "LinearCrossEntropy" else 1
    x, w, bias = inputs[at : at + 3]
    assert x is not None and w is not None
    spare = attrs.pop("spare", 0)
    x = inputs[at] = with_spare(x, spare)
    outputs = [] if op == "LinearCrossEntropyGrad" else [torch.full((), 9.0)]
    if op != "LinearCrossEntropy":
        outputs += [with_spare(torch.full_like(x, 9.0), spare), torch.full(w.shape, 9.0)]
        outputs += [] if bias is None else [torch.full(bias.shape, 9.0)]
    types = tuple(None if t is None else type_of(t) for t in inputs)
    spec = KernelSpec(op, attrs, types, tuple(map(type_of, outputs)))
    kernel = kernel_of(op, x.dtype)
    assert kernel.unsupported(spec) is None
    scratch = [
        torch.full([int(n) for n in t.shape], 7).to(torch_dtype(t.dtype))  # type: ignore[arg-type]
        for t in kernel.scratch(spec)
    ]
    roomy = {id(t) for t in (x, *outputs) if t.shape == x.shape and t.dtype == x.dtype}
    arguments = KernelArguments(
        attrs, inputs, outputs, scratch, spare=lambda t: spare if id(t) in roomy else 0
    )
    kernel.bind(arguments)()
    assert kernel.input_error is not None
    return outputs, kernel.input_error(arguments, arguments.flag.tolist())


def with_spare(x: torch.Tensor, rows: int) -> torch.Tensor:
    """x with so many rows behind it, of NaN."""
    behind = torch.full((rows, *x.shape[1:]), float("nan"), dtype=x.dtype)
    return torch.cat([x, behind])[: x.shape[0]]


def sample(size: tuple[int, int, int], dtype: DType, form: dict[str, Any]) -> Any:
    n, d, v = size
    torch.manual_seed(n + v)
    low = torch_dtype(dtype)
    x, w = torch.randn(n, d).to(low), torch.randn(v, d).to(low)
    bias = torch.randn(v) if form.get("bias") else None
    weights = torch.rand(v) + 0.1 if form.get("weights") else None
    labels = torch.randint(0, v, (n,))
    if form.get("ignored"):
        labels[::3] = -100
    if bias is not None and form.get("hidden"):
        bias[1 + v // 2 :] = -torch.inf
        labels %= 1 + v // 2
    attrs = {"ignore_index": -100, "reduction": form.get("reduction", "mean")}
    attrs |= {k: form[k] for k in ("label_smoothing", "rows", "spare") if k in form}
    return attrs, x, w, bias, labels, weights


def exact(
    attrs: dict[str, Any], x: Any, w: Any, bias: Any, labels: Any, weights: Any, dloss: float
) -> list[torch.Tensor]:
    """loss, dx, dw, dbias in fp64, of logits rounded to the low type."""
    logits = (x @ w.t()).double().requires_grad_()
    z = logits if bias is None else logits + bias.double()
    loss = torch.nn.functional.cross_entropy(
        z, labels, None if weights is None else weights.double(), ignore_index=-100,
        reduction=attrs["reduction"], label_smoothing=attrs.get("label_smoothing", 0.0),
    )  # fmt: skip
    (dz,) = torch.autograd.grad(loss, logits, torch.tensor(dloss, dtype=torch.float64))
    return [loss.detach(), dz @ w.double(), dz.t() @ x.double(), dz.sum(0)]


@pytest.mark.sample(24)
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_loss_and_gradients(op: str, size: Any, form: str, dtype: DType) -> None:
    attrs, x, w, bias, labels, weights = sample(size, dtype, FORMS[form])
    dloss = 0.75
    inputs = [x, w, bias, labels, weights]
    if op != "LinearCrossEntropy":
        inputs = [torch.tensor(dloss), *inputs]
    have, error = launch(op, attrs, inputs)
    assert error is None
    want = exact(attrs, x, w, bias, labels, weights, dloss)
    want = want[:1] if op == "LinearCrossEntropy" else want[0 if op.endswith("Step") else 1 :]
    unit = torch.finfo(torch_dtype(dtype)).eps
    for i, (y, truth) in enumerate(zip(have, want, strict=False)):
        if truth.isnan().any():  # no row counts: 0 / 0
            assert op.endswith("Grad") or y.isnan().all() or i
            continue
        scalar = not i and op != "LinearCrossEntropyGrad"
        allowed = 1e-5 * float(truth.abs()) + 1e-6 if scalar else unit * float(truth.norm()) + 1e-6
        assert float((y.double() - truth).norm()) <= allowed


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_panels_of_classes(dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "PANEL", 13)
    attrs, x, w, bias, labels, weights = sample((37, 16, 33), dtype, FORMS["all"])
    attrs["rows"] = 10
    inputs = [torch.tensor(1.0), x, w, bias, labels, weights]
    (_, dx, dw, dbias), _ = launch("LinearCrossEntropyStep", attrs, inputs)
    monkeypatch.undo()
    (_, whole_dx, whole_dw, whole_dbias), _ = launch("LinearCrossEntropyStep", attrs, inputs)
    assert torch.equal(dx, whole_dx)
    assert torch.equal(dbias, whole_dbias)
    torch.testing.assert_close(dw, whole_dw, rtol=torch.finfo(x.dtype).eps, atol=1e-3)


@pytest.mark.parametrize("label", [-1, 9, 2**40])
def test_a_label_that_is_no_class(label: int) -> None:
    attrs, x, w, bias, labels, weights = sample((6, 4, 9), DType.BFLOAT16, {"weights": True})
    labels[2] = label
    inputs = [torch.tensor(1.0), x, w, bias, labels, weights]
    _, error = launch("LinearCrossEntropyStep", attrs, inputs)
    assert isinstance(error, IndexError)
    assert str(label) in str(error)


def test_numbers_that_are_not_finite_are_told() -> None:
    attrs, x, w, bias, labels, weights = sample((6, 4, 9), DType.BFLOAT16, {})
    x[1, 2] = float("nan")
    (loss, dx, _), _ = launch(
        "LinearCrossEntropyStep", attrs, [torch.tensor(1.0), x, w, bias, labels, weights]
    )
    assert loss.isnan()
    assert dx[1].isnan().all()
    assert not dx[0].isnan().any()
