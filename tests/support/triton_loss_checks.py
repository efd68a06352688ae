"""Triton kernels of activations with the bias before them, and of cross-entropy, beside PyTorch in
fp64, by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from kernel_calls import rubbish
from triton_calls import DTYPES, launch, maxima_of_devices, near, type_of

from onward.graph.types import DType
from onward.kernels import TRITON, KernelArguments, KernelSpec, torch_dtype
from onward.kernels.triton import bias_activation, cross_entropy

CHECKS: dict[str, Callable[[], None]] = {}

# ---- activations with the bias before them

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
}
SHAPES = ((0, 4), (3, 0), (1, 1), (37, 3), (5, 2, 33), (129, 65), (4300, 16), (3, 2100))


def run_activation(name: str, shape: tuple[int, ...], programs: int, dtype: DType) -> None:
    """y, dx and dbias beside autograd in fp64, with a bias of x's dtype and of f32, in given memory
    and over what it is computed from. programs: those that share a gradient, about."""
    low, g = torch_dtype(dtype), torch.Generator().manual_seed(5)
    x, dy = (torch.randn(shape, generator=g).to(low) * 3 for _ in range(2))
    for bias in (torch.randn(shape[-1:], generator=g).to(t) for t in {low, torch.float32}):
        leaves = [t.double().requires_grad_() for t in (x, bias)]
        with torch.enable_grad():
            want = ACTIVATIONS[name](leaves[0] + leaves[1])
        truth = [want.detach(), *torch.autograd.grad(want, leaves, dy.double())]
        y, dx, dbias = torch.empty_like(x), torch.empty_like(x), torch.empty_like(bias)
        attrs = {"activation": name}
        launch("BiasActivation", attrs, [x, bias], [y])
        with patch.object(bias_activation, "_PROGRAMS", programs):
            launch("BiasActivationGrad", attrs, [dy, x, bias], [dx, dbias])
            made = (x.double() + bias.double()).to(low)
            summed = made if name != "relu" else y  # the slope of relu shows in y as well
            again = [torch.empty_like(x), torch.empty_like(bias)]
            launch("BiasActivationGrad", attrs, [dy, summed, None], again)
        for what, have, exact in zip(("y", "dx", "dbias"), (y, dx, dbias), truth, strict=True):
            near(what, have, exact, low)
        if dtype == DType.FLOAT:
            near("dx without a bias", again[0], truth[1])
            near("dbias without a bias", again[1], truth[2])
        for i in range(2):
            over = [dy.clone(), x.clone()]
            bind_over("BiasActivationGrad", attrs, [*over, bias], [over[i], again[1]])
            assert torch.equal(over[i], dx), "over its input"


def bind_over(
    op: str, attrs: dict[str, Any], inputs: list[torch.Tensor | None], outputs: list[torch.Tensor]
) -> None:
    """Launches a kernel whose outputs may lie where inputs do."""
    (kernel,) = TRITON[op]
    types = tuple(type_of(x) for x in inputs)
    spec = KernelSpec(op, attrs, types, tuple(t for y in outputs if (t := type_of(y)) is not None))
    scratch = [rubbish(t) for t in kernel.scratch(spec)]
    kernel.bind(KernelArguments(attrs, inputs, outputs, scratch))()


def run_extremes(name: str) -> None:
    """Large numbers have the limits of an activation, and what is not a number stays so."""
    x = torch.tensor([[torch.nan, 1e4, -1e4, 1e18, -1e18, torch.inf, 0.0, -0.0, 50.0, -50.0]])
    ones, zero = torch.ones(1, 10), torch.zeros(10)
    y, dx, dbias = torch.empty(1, 10), torch.empty(1, 10), torch.empty(10)
    launch("BiasActivation", {"activation": name}, [x, zero], [y])
    launch("BiasActivationGrad", {"activation": name}, [ones, x, zero], [dx, dbias])
    assert y[0, 0].isnan()
    torch.testing.assert_close(y[0, 1:], torch.relu(x)[0, 1:], rtol=0, atol=1e-18)
    slopes = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0])
    torch.testing.assert_close(dx[0, [1, 2, 3, 4, 5, 8, 9]], slopes, rtol=1e-6, atol=1e-18)
    nan = torch.full((10,), torch.nan)
    launch("BiasActivationGrad", {"activation": name}, [ones, x, nan], [dx, dbias])
    assert dbias.isnan().all() or name == "relu"


for _name in ACTIVATIONS:
    CHECKS[f"extremes of BiasActivation BiasActivationGrad {_name} float"] = partial(
        run_extremes, _name
    )
    for _shape in SHAPES:
        for _programs in (1024, 3) if _shape[0] > 100 else (1024,):
            for _dtype in DTYPES:
                CHECKS[f"{_name} {_shape} by {_programs} {_dtype.name.lower()}"] = partial(
                    run_activation, _name, _shape, _programs, _dtype
                )


# ---- cross-entropy of given logits

LOGITS: dict[str, dict[str, Any]] = {
    **{f"{kind} {size}": {"reduction": kind, "size": size}
       for kind in ("mean", "sum", "none")
       for size in ((37, 70), (3, 5000), (1, 1), (0, 7), (5, 4096), (70, 3))},
    "weights": {"weights": True},
    "f32 weights": {"weights": True, "whole": True},
    "smoothing": {"label_smoothing": 0.1},
    "smoothing alone": {"label_smoothing": 1.0, "weights": True},
    "smoothing of wide rows": {"label_smoothing": 0.1, "weights": True, "size": (5, 5000)},
    "smoothing of each": {"label_smoothing": 0.1, "weights": True, "reduction": "none"},
    "a class ignored": {"ignore_index": 1, "weights": True},
    "all ignored": {"labels": -100},
    "all ignored in a sum": {"labels": -100, "reduction": "sum", "label_smoothing": 0.1},
    "few programs": {"size": (300, 70), "weights": True, "few": True},
    "i32 labels": {"narrow": True},
    "infinite": {"dloss": float("inf")},
    "infinite with smoothing": {"dloss": float("inf"), "label_smoothing": 0.1},
    "hidden classes": {"hidden": True},
    "hidden classes in wide rows": {"hidden": True, "size": (5, 5000)},
    "large logits": {"shift": 3e4},
    "bad label": {"label": 70},
    "huge label": {"label": 2**40, "weights": True},
    "negative label": {"label": -(2**40), "label_smoothing": 0.1},
    "negative label of an i32": {"label": -1, "narrow": True, "reduction": "none"},
}  # fmt: skip


def run_logits(form: dict[str, Any], dtype: DType) -> None:
    """Loss, log-probabilities and the logits' gradient beside PyTorch's in fp64."""
    low, g = torch_dtype(dtype), torch.Generator().manual_seed(11)
    rows, classes = form.get("size", (37, 70))
    z = (torch.randn(rows, classes, generator=g) + form.get("shift", 0.0)).to(low)
    if "hidden" in form:
        z[:, 2::3] = -torch.inf
    weight = torch.rand(classes, generator=g) + 0.1 if "weights" in form else None
    if weight is not None and "whole" not in form:
        weight = weight.to(low)
    labels = torch.randint(0, classes, (rows,), generator=g)
    labels[labels % 3 == 2] -= 2 * ("hidden" in form)
    labels[3::4] = form.get("ignore_index", -100)
    if "label" in form:
        labels[5] = form["label"]
    if "labels" in form:
        labels.fill_(form["labels"])
    kind, smoothing = form.get("reduction", "mean"), form.get("label_smoothing", 0.0)
    attrs = {"reduction": kind, "ignore_index": form.get("ignore_index", -100)}
    attrs |= {"label_smoothing": smoothing} if smoothing else {}
    op = "CrossEntropyLoss" if smoothing else "SoftmaxCrossEntropyLoss"
    given = labels.to(torch.int32) if "narrow" in form else labels
    inputs: list[torch.Tensor | None] = [z, given, *([] if weight is None else [weight])]
    loss = torch.empty(labels.shape if kind == "none" else (), dtype=low)
    log_prob, dz = torch.empty_like(z), torch.empty_like(z)
    dloss = torch.full_like(loss, form.get("dloss", 0.75))
    few = {"_PROGRAMS": 4, "_SUMS": 2, "_LABELS": 64} if "few" in form else {}
    with patch.dict(vars(cross_entropy), few):
        flag = launch(op, attrs, inputs, [loss, log_prob])
        launch("SoftmaxCrossEntropyLossGrad", attrs, [dloss, log_prob, *inputs[1:]], [dz])
        bind_over(op, attrs, [(one := z.clone()), *inputs[1:]], [loss.clone(), one])
        bind_over(
            "SoftmaxCrossEntropyLossGrad", attrs,
            [dloss, (other := log_prob.clone()), *inputs[1:]], [other],
        )  # fmt: skip
    torch.testing.assert_close(one, log_prob, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(other, dz, rtol=0, atol=0, equal_nan=True)
    (kernel,) = TRITON[op]
    assert kernel.input_error is not None
    if "label" in form:
        error = kernel.input_error(KernelArguments(attrs, inputs, [], [], flag), flag.tolist())
        assert isinstance(error, IndexError) and str(form["label"]) in str(error)
        return
    assert not flag.any()
    leaf = z.double().requires_grad_()
    with torch.enable_grad():
        want = torch.nn.functional.cross_entropy(
            leaf, labels, None if weight is None else weight.double(), reduction=kind,
            ignore_index=attrs["ignore_index"], label_smoothing=smoothing,
        )  # fmt: skip
    (truth,) = torch.autograd.grad(want, leaf, dloss.double())
    exact = z.double().log_softmax(1)
    same = exact.isinf()
    assert torch.equal(log_prob.isinf(), same)
    near("log_prob", log_prob[~same], exact[~same])
    if dtype == DType.FLOAT:  # beside numbers of size 3e4 too
        rounded = 1e-6 * z[~same].abs().amax() if rows else torch.tensor(0.0)
        assert ((log_prob - exact)[~same].abs() <= rounded + 1e-6).all()
    if want.isfinite().all():
        near("loss", loss, want.detach(), low)
    else:
        torch.testing.assert_close(loss.double(), want.detach(), equal_nan=True)
    if dloss.isfinite().all():
        near("dz", dz, truth)
    else:  # the step is refused: it is enough that no gradient is finite where eager's is not
        assert not dz[~truth.isfinite()].isfinite().any()


def run_odd_logits(classes: int, smoothing: float, dtype: DType) -> None:
    """Rows that are NaN or hold one, beside PyTorch's: their losses, log-probabilities and
    gradients are NaN, and no other's."""
    low, g = torch_dtype(dtype), torch.Generator().manual_seed(11)
    z = torch.randn(9, classes, generator=g).to(low)
    z[2], z[5, 3], z[6] = torch.nan, torch.nan, -torch.inf
    z[6, 1] = torch.nan
    labels = torch.arange(9) % classes
    attrs = {"reduction": "none", **({"label_smoothing": smoothing} if smoothing else {})}
    op = "CrossEntropyLoss" if smoothing else "SoftmaxCrossEntropyLoss"
    loss, log_prob, dz = torch.empty(9, dtype=low), torch.empty_like(z), torch.empty_like(z)
    with maxima_of_devices():
        launch(op, attrs, [z, labels], [loss, log_prob])
        launch(
            "SoftmaxCrossEntropyLossGrad", attrs, [torch.ones_like(loss), log_prob, labels], [dz]
        )
    leaf = z.double().requires_grad_()
    with torch.enable_grad():
        want = torch.nn.functional.cross_entropy(
            leaf, labels, reduction="none", label_smoothing=smoothing
        )
        (truth,) = torch.autograd.grad(want.sum(), leaf)
    for name, have, exact in (
        ("loss", loss, want.detach()), ("log_prob", log_prob, z.double().log_softmax(1)),
        ("dz", dz, truth),
    ):  # fmt: skip
        odd = exact.isnan()
        assert odd.any() and torch.equal(have.isnan(), odd), name
        near(name, have[~odd], exact[~odd])


for _classes in (70, 5000):
    for _smoothing in (0.0, 0.1):
        for _dtype in DTYPES:
            CHECKS[f"logits NaN {_classes} {_smoothing} {_dtype.name.lower()}"] = partial(
                run_odd_logits, _classes, _smoothing, _dtype
            )
for _form in LOGITS:
    for _dtype in DTYPES:
        if _form == "large logits" and _dtype == DType.FLOAT16:
            continue  # which has no numbers between those of 3e4
        CHECKS[f"logits {_form} {_dtype.name.lower()}"] = partial(run_logits, LOGITS[_form], _dtype)
