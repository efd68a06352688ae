"""The head in row blocks against PyTorch in fp64, at sizes on both sides of blocks and panels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from kernel_calls import raise_input_error
from op_cases import Given, OpCase

from onward.graph.evaluate import evaluate
from onward.graph.types import DType, Type
from onward.kernels import KERNELS, TRITON, Kernel, KernelArguments, KernelSpec

OPS = ("LinearCrossEntropy", "LinearCrossEntropyGrad", "LinearCrossEntropyStep")
# test_low_cross_entropy.py has kernels of bf16 and fp16 alone
LOW = (
    "native.linear_cross_entropy", "blas.bf16_linear_cross_entropy",
    "blas.fp16_linear_cross_entropy",
)  # fmt: skip


def on_the_cpu(op: str) -> list[Kernel]:
    """The kernels of an op that take f32 and run on a processor."""
    return [k for k in KERNELS[op] if k.name not in LOW and k not in TRITON.get(op, ())]


EACH = pytest.mark.parametrize(
    ("op", "kernel"),
    [(op, kernel) for op in OPS for kernel in on_the_cpu(op)],
    ids=[f"{kernel.name}-{op}" for op in OPS for kernel in on_the_cpu(op)],
)


class Head:
    """Random operands; `run` gives the outputs of a kernel, `truth` those of torch in fp64."""

    def __init__(self, n: int, d: int, v: int, scale: float = 1.0) -> None:
        rng = np.random.default_rng([n, d, v])

        def real(*shape: int) -> torch.Tensor:
            return torch.from_numpy(rng.standard_normal(shape, np.float32)) * scale

        self.x, self.w, self.bias = real(n, d), real(v, d), real(v)
        self.weight = torch.from_numpy(rng.uniform(0.2, 2.0, v).astype(np.float32))
        self.labels = torch.from_numpy(rng.integers(0, v, n))
        self.labels[rng.integers(0, n)] = -100
        self.dloss = torch.tensor(0.37)

    def run(
        self,
        op: str,
        kernel: Kernel,
        bias: bool = True,
        weight: bool = True,
        room: Callable[[Type], torch.Tensor] | None = None,
        **attrs: Any,
    ) -> list[torch.Tensor]:
        attrs = {"ignore_index": -100, "reduction": "mean", **attrs}
        inputs: list[torch.Tensor | None] = [
            self.x, self.w, self.bias if bias else None, self.labels,
            self.weight if weight else None,
        ]  # fmt: skip
        like = [self.x, self.w, *([self.bias] if bias else [])]
        if op != "LinearCrossEntropy":
            inputs.insert(0, self.dloss)
        else:
            like = []
        if op != "LinearCrossEntropyGrad":
            like.insert(0, self.dloss)
        outputs = [torch.full_like(t, torch.nan) for t in like]
        spec = KernelSpec(
            op, attrs, tuple(None if t is None else _type(t) for t in inputs),
            tuple(_type(t) for t in outputs),
        )  # fmt: skip
        assert kernel.unsupported(spec) is None
        scratch = [(room or _rubbish)(t) for t in kernel.scratch(spec)]
        with torch.no_grad():
            args = KernelArguments(attrs, inputs, outputs, scratch)
            kernel.bind(args)()
        raise_input_error(kernel, args)
        return outputs

    def truth(
        self, op: str, dtype: torch.dtype, bias: bool = True, weight: bool = True, **attrs: Any
    ) -> list[torch.Tensor]:
        leaves = [t.clone().to(dtype).requires_grad_() for t in (self.x, self.w, self.bias)]
        logits = leaves[0] @ leaves[1].t() + (leaves[2] if bias else 0.0)
        loss = torch.nn.functional.cross_entropy(
            logits, self.labels, self.weight.to(dtype) if weight else None, **attrs
        )
        (loss * self.dloss.to(dtype)).backward()
        grads = [t.grad for t in leaves[: 3 if bias else 2] if t.grad is not None]
        return {"LinearCrossEntropy": [loss], "LinearCrossEntropyGrad": grads}.get(
            op, [loss, *grads]
        )


def _type(x: torch.Tensor) -> Type:
    return Type(DType.INT64 if x.dtype == torch.int64 else DType.FLOAT, tuple(x.shape))


def _rubbish(type: Type) -> torch.Tensor:
    shape = [int(n) for n in type.shape]  # type: ignore[arg-type]
    match type.dtype:
        case DType.INT64:
            return torch.full(shape, 77)
        case DType.BOOL:
            return torch.ones(shape, dtype=torch.bool)
        case _:
            return torch.full(shape, torch.nan)


def check(head: Head, op: str, kernel: Kernel, **how: Any) -> None:
    """Assert law 8: at most twice as far from the truth as eager fp32."""
    attrs = {k: v for k, v in how.items() if k != "rows"}
    have = head.run(op, kernel, **how)
    want, eager = head.truth(op, torch.float64, **attrs), head.truth(op, torch.float32, **attrs)
    for y, truth, other in zip(have, want, eager, strict=True):
        allowed = 2 * (other - truth).norm() + 2.4e-7 * truth.norm()
        assert (y - truth).norm() <= allowed


SIZES = [(1, 1, 2), (7, 3, 5), (5, 8, 16), (64, 32, 33), (33, 20, 4099), (3, 17, 2049)]


@EACH
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_loss_and_gradients_are_those_of_torch(
    op: str, kernel: Kernel, size: tuple[int, int, int]
) -> None:
    head = Head(*size)
    if size[0] == 1:
        head.labels[:] = 1
    check(head, op, kernel)
    check(head, op, kernel, bias=False, weight=False)
    check(head, op, kernel, reduction="sum", weight=False)


@EACH
@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_label_smoothing(op: str, kernel: Kernel, weight: bool, reduction: str) -> None:
    check(
        Head(9, 4, 31), op, kernel, weight=weight, reduction=reduction, label_smoothing=0.1
    )  # fmt: skip


@EACH
@pytest.mark.parametrize("rows", [1, 4, 10, 512])
def test_blocks_of_any_size_agree(op: str, kernel: Kernel, rows: int) -> None:
    check(Head(23, 6, 50), op, kernel, rows=rows)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("size", [(9, 4, 2050), (40, 3, 28785), (7, 2, 17), (5, 3, 6200)], ids=str)
def test_nothing_is_written_beyond_the_room_asked_for(
    size: tuple[int, int, int], threads: int
) -> None:
    """The number of threads may change between planning and binding."""
    head, op = Head(*size), "LinearCrossEntropyStep"
    kernel = on_the_cpu(op)[0]
    guard = 4096

    def roomy(type: Type) -> torch.Tensor:
        (n,) = type.shape
        assert isinstance(n, int)
        whole = torch.full((n + guard,), 7).to(_rubbish(type).dtype)
        guards.append(whole[n:])
        return whole[:n]

    guards: list[torch.Tensor] = []
    torch.set_num_threads(threads)
    try:
        head.run(op, kernel, room=roomy)
    finally:
        torch.set_num_threads(1)
    assert guards
    assert all(bool((g == 7).all()) for g in guards)


@EACH
def test_large_logits_do_not_overflow(op: str, kernel: Kernel) -> None:
    check(Head(8, 16, 40, scale=10.0), op, kernel)


@EACH
def test_another_ignored_label(op: str, kernel: Kernel) -> None:
    head = Head(12, 4, 6)
    head.labels[head.labels == -100] = 3
    check(head, op, kernel, ignore_index=3)


@EACH
def test_where_no_label_counts(op: str, kernel: Kernel) -> None:
    """A mean over no labels is 0/0, as in PyTorch; its gradients are 0, so that a step does no
    harm."""
    head = Head(4, 3, 5)
    head.labels[:] = -100
    have = head.run(op, kernel)
    if op != "LinearCrossEntropyGrad":
        assert torch.isnan(have.pop(0))
    assert all(not y.any() for y in have)


@EACH
@pytest.mark.parametrize("label", [-1, 5, 2**40])
def test_a_label_out_of_range_is_refused(op: str, kernel: Kernel, label: int) -> None:
    head = Head(4, 3, 5)
    head.labels[2] = label
    with pytest.raises(IndexError, match=str(label)):
        head.run(op, kernel)


@EACH
def test_a_nan_is_not_hidden(op: str, kernel: Kernel) -> None:
    head = Head(4, 3, 5)
    head.labels[:] = torch.arange(4)
    head.x[1, 1] = torch.nan
    assert all(torch.isnan(y).any() for y in head.run(op, kernel))


@EACH
def test_two_threads_agree_with_one(op: str, kernel: Kernel) -> None:
    head = Head(40, 24, 5000)
    one = head.run(op, kernel)
    torch.set_num_threads(2)
    try:
        two = head.run(op, kernel)
    finally:
        torch.set_num_threads(1)
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-6)


@EACH
def test_classes_that_no_row_can_have(op: str, kernel: Kernel) -> None:
    """Classes of -infinity fill whole panels, beside logits so low that e^-logit is no f32."""
    head = Head(6, 4, 4200)
    head.bias[:4100] = -torch.inf
    head.bias[4100:] -= 200
    head.labels = torch.randint(4100, 4200, (6,))
    check(head, op, kernel, weight=False)


@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_the_body_of_classes_that_no_row_can_have(op: str, weight: bool) -> None:
    """The body runs where no kernel takes a call's types; 0 times -infinity is no term of it."""
    head = Head(6, 4, 9)
    head.bias[5:] = -torch.inf
    head.labels %= 5
    given = [head.dloss] if op != "LinearCrossEntropy" else []
    given += [head.x, head.w, head.bias, head.labels, *([head.weight] if weight else [])]
    inputs = tuple(Given(t.numpy()) for t in given)
    case = OpCase(op, inputs, {"ignore_index": -100, "reduction": "mean"})
    found = evaluate(case.graph(), case.feeds())
    for y, t in zip(found.values(), head.truth(op, torch.float64, weight=weight), strict=True):
        np.testing.assert_allclose(y, t.detach(), rtol=1e-5, atol=1e-6)
