"""SoftmaxCrossEntropyLoss and its gradient; both work in the logits' own memory."""

from __future__ import annotations

from functools import partial

import torch

from onward.graph.types import DType, Type
from onward.kernels.kernel import Kernel, Launch, Need, Use

aten = torch.ops.aten
_REDUCTION = {"none": 0, "mean": 1, "sum": 2}
_BLOCK_BYTES = 1 << 20  # rows of a block stay in the second-level cache between its passes


def _two_dims(need: Need) -> str | None:
    x = need.inputs[0 if need.op == "SoftmaxCrossEntropyLoss" else 1]
    assert x is not None
    return None if x.rank == 2 else "logits of more than two dims"


def _total(need: Need) -> list[Type]:
    return [Type(need.outputs[0].dtype, ())]


def _bind_loss(use: Use) -> Launch:
    logits, labels = use.x(0), use.x(1)
    weight = use.inputs[2] if len(use.inputs) > 2 else None
    loss, log_prob = use.outputs
    log_softmax = partial(aten._log_softmax.out, logits, 1, False, out=log_prob)
    nll = partial(
        aten.nll_loss_forward.output, log_prob, labels, weight,
        _REDUCTION[use.attrs.get("reduction", "mean")], int(use.attrs.get("ignore_index", -100)),
        output=loss, total_weight=use.scratch[0],
    )  # fmt: skip

    def launch() -> None:
        log_softmax()
        nll()

    return launch


def _grad_scratch(need: Need) -> list[Type]:
    labels = need.inputs[2]
    assert labels is not None
    dtype = need.outputs[0].dtype
    return [
        labels,  # the label, 0 where ignored
        Type(DType.BOOL, labels.shape),  # ignored
        Type(dtype, labels.shape),  # each row's share of the loss gradient
        Type(dtype, labels.shape),  # its negative
        Type(dtype, ()),
    ]


def _bind_grad(use: Use) -> Launch:
    """`dlogits = (exp(log_prob) - onehot) * share`, a few rows at a time."""
    dloss, log_prob, labels, dx = use.x(0), use.x(1), use.x(2), use.y
    weight = use.inputs[3] if len(use.inputs) > 3 else None
    label, ignored, share, negative, total = use.scratch
    ignore = int(use.attrs.get("ignore_index", -100))
    mean = use.attrs.get("reduction", "mean") == "mean"
    rows = max(1, _BLOCK_BYTES // (dx.shape[1] * dx.element_size()))
    blocks = [
        (
            log_prob[i : i + rows],
            dx[i : i + rows],
            share[i : i + rows, None],
            label[i : i + rows, None],
            negative[i : i + rows, None],
        )
        for i in range(0, dx.shape[0], rows)
    ]

    def launch() -> None:
        torch.eq(labels, ignore, out=ignored)
        label.copy_(labels)
        label.masked_fill_(ignored, 0)
        if weight is None:
            share.fill_(1.0)
        else:
            torch.index_select(weight, 0, label, out=share)
        share.masked_fill_(ignored, 0.0)
        if mean:
            torch.sum(share, 0, out=total)
            share.div_(total)
        share.mul_(dloss)
        share.masked_fill_(ignored, 0.0)  # 0/0 where nothing counts
        torch.neg(share, out=negative)
        for p, d, s, index, n in blocks:
            torch.exp(p, out=d)
            d.mul_(s)
            d.scatter_add_(1, index, n)

    return launch


KERNELS: dict[str, Kernel] = {
    "SoftmaxCrossEntropyLoss": Kernel(
        "aten.log_softmax+nll_loss", _bind_loss, why_not=_two_dims, inplace=((1, 0),),
        contiguous=(0, 1), scratch=_total,
    ),
    "SoftmaxCrossEntropyLossGrad": Kernel(
        "aten.exp+scatter_add", _bind_grad, why_not=_two_dims, inplace=((0, 1),),
        contiguous=(1, 2), scratch=_grad_scratch,
    ),
}  # fmt: skip
