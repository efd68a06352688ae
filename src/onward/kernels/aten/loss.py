"""Cross-entropy, with and without label smoothing, and its gradient, in the logits' own memory."""

from __future__ import annotations

from functools import partial

import torch

from onward.graph.ops.loss import ignored_label
from onward.graph.types import DType, Type
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch

aten = torch.ops.aten
_REDUCTION = {"none": 0, "mean": 1, "sum": 2}
_BLOCK_BYTES = 1 << 20  # a block of rows stays in the second-level cache between passes


def _two_dims(spec: KernelSpec) -> str | None:
    x = spec.inputs[1 if spec.op == "SoftmaxCrossEntropyLossGrad" else 0]
    assert x is not None
    return None if x.rank == 2 else "logits of more than two dims"


def _total(spec: KernelSpec) -> list[Type]:
    return [Type(spec.outputs[0].dtype, ())]


def _bind_loss(args: KernelArguments) -> Launch:
    logits, labels = args.x(0), args.x(1)
    weight = args.inputs[2] if len(args.inputs) > 2 else None
    loss, log_prob = args.outputs
    log_softmax = partial(aten._log_softmax.out, logits, 1, False, out=log_prob)
    nll = partial(
        aten.nll_loss_forward.output, log_prob, labels, weight,
        _REDUCTION[args.attrs.get("reduction", "mean")], ignored_label(args.attrs),
        output=loss, total_weight=args.scratch[0],
    )  # fmt: skip

    def launch() -> None:
        log_softmax()
        nll()

    return launch


def _smoothed_scratch(spec: KernelSpec) -> list[Type]:
    labels, dtype = spec.inputs[1], spec.outputs[0].dtype
    assert labels is not None
    return [
        Type(dtype, ()),  # total weight of the labels that count
        Type(DType.BOOL, labels.shape),  # ignored
        Type(dtype, labels.shape),  # mean weighted log-probability of each row
        Type(dtype, ()),  # their sum
    ]


def _bind_smoothed(args: KernelArguments) -> Launch:
    """Binds the smoothed loss, `(1 - e) nll - e mean_c(weight_c log_prob_c)`."""
    labels = args.x(1)
    weight = args.inputs[2] if len(args.inputs) > 2 else None
    loss, log_prob = args.outputs
    total, ignored, rows, added = args.scratch
    ignore, smoothing = ignored_label(args.attrs), args.attrs["label_smoothing"]
    reduction = args.attrs.get("reduction", "mean")
    smooth = rows if reduction == "none" else added
    plain = _bind_loss(args)

    def launch() -> None:
        plain()
        torch.eq(labels, ignore, out=ignored)
        if weight is None:
            torch.mean(log_prob, 1, out=rows)
        else:
            torch.mv(log_prob, weight, out=rows)
            rows.div_(log_prob.shape[1])
        rows.masked_fill_(ignored, 0.0)
        if reduction != "none":
            torch.sum(rows, 0, out=added)
        if reduction == "mean":
            added.div_(total)
        loss.mul_(1.0 - smoothing)
        loss.sub_(smooth, alpha=smoothing)

    return launch


def _grad_scratch(spec: KernelSpec) -> list[Type]:
    labels = spec.inputs[2]
    assert labels is not None
    dtype = spec.outputs[0].dtype
    smooth = [Type(dtype, labels.shape)] if spec.attrs.get("label_smoothing", 0.0) else []
    return [
        labels,  # the label, 0 where ignored
        Type(DType.BOOL, labels.shape),  # ignored
        Type(dtype, labels.shape),  # each row's share of the loss gradient
        Type(dtype, labels.shape),  # its negative
        Type(dtype, ()),
        *smooth,  # each row's share of the gradient of the smooth loss
    ]


def _bind_grad(args: KernelArguments) -> Launch:
    """Binds the logits' gradient, `dlogits = (exp(log_prob) - onehot) * share`, in blocks of
    rows."""
    dloss, log_prob, labels, dx = args.x(0), args.x(1), args.x(2), args.y
    weight = args.inputs[3] if len(args.inputs) > 3 else None
    label, ignored, share, negative, total = args.scratch[:5]
    even = args.scratch[5] if len(args.scratch) > 5 else share
    smoothing = float(args.attrs.get("label_smoothing", 0.0))
    ignore = ignored_label(args.attrs)
    mean = args.attrs.get("reduction", "mean") == "mean"
    rows = max(1, _BLOCK_BYTES // (dx.shape[1] * dx.element_size()))
    blocks = [
        (
            log_prob[i : i + rows],
            dx[i : i + rows],
            share[i : i + rows, None],
            label[i : i + rows, None],
            negative[i : i + rows, None],
            even[i : i + rows],
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
        share.masked_fill_(ignored, 0.0)  # 0/0 where no label counts
        if smoothing:
            smooth()
        else:
            torch.neg(share, out=negative)
        for p, d, s, index, n, e in blocks:
            torch.exp(p, out=d)
            d.mul_(s)
            if smoothing and weight is not None:
                d.addr_(e, weight, alpha=-1)
            elif smoothing:
                d.sub_(e[:, None])
            d.scatter_add_(1, index, n)

    def smooth() -> None:
        """Computes the gradient of a smoothed loss, `dlogits = p ((1-e) share + e mean(weight)
        even) - onehot (1-e) share - e/C weight even`.

        `even` is `share` without the label's class weight; without class weights both are equal.
        """
        torch.mul(share, smoothing - 1.0, out=negative)
        if weight is None:
            torch.mul(share, smoothing / dx.shape[1], out=even)
            share.add_(negative, alpha=0.0)  # an infinite share makes every class p inf - inf = NaN
            return
        even.fill_(1.0)
        if mean:
            even.div_(total)
        even.mul_(dloss)
        even.masked_fill_(ignored, 0.0)
        share.mul_(1.0 - smoothing)
        torch.mean(weight, 0, out=total)
        share.addcmul_(even, total, value=smoothing)
        even.mul_(smoothing / dx.shape[1])
        share.add_(even, alpha=0.0)

    return launch


KERNELS: dict[str, Kernel] = {
    "SoftmaxCrossEntropyLoss": Kernel(
        "aten.log_softmax+nll_loss", _bind_loss, unsupported=_two_dims, inplace=((1, 0),),
        contiguous=(0, 1), scratch=_total,
    ),
    "CrossEntropyLoss": Kernel(
        "aten.log_softmax+nll_loss+mean", _bind_smoothed, unsupported=_two_dims, inplace=((1, 0),),
        contiguous=(0, 1), scratch=_smoothed_scratch,
    ),
    "SoftmaxCrossEntropyLossGrad": Kernel(
        "aten.exp+scatter_add", _bind_grad, unsupported=_two_dims, inplace=((0, 1),),
        contiguous=(1, 2), scratch=_grad_scratch,
    ),
}  # fmt: skip
