"""Head and cross-entropy in row blocks on PyTorch's operators: any device, any floating dtype.

The reference of the kernel in `kernels/blas/head.py`, and what runs where that one does not.
"""

from __future__ import annotations

import math

import torch

from onward.graph.types import DType, Type
from onward.kernels.kernel import Kernel, Launch, Need, Use

ROWS = 512  # of a block


def _sizes(need: Need) -> tuple[Type, int, int]:
    """The type of x, rows of a block at most, classes. They grow with x, as scratch has to."""
    x, w = need.inputs[:2] if need.op == "LinearCrossEntropy" else need.inputs[1:3]
    assert x is not None and w is not None
    rows, classes = x.shape[0], w.shape[0]
    assert isinstance(rows, int) and isinstance(classes, int)
    return x, min(rows, int(need.attrs.get("rows", ROWS))), classes


def _scratch(need: Need) -> list[Type]:
    """A block's logits and their exponentials, the rows' shares, labels, log-sum-exps."""
    x, rows, classes = _sizes(need)
    n = x.shape[0]
    return [
        Type(x.dtype, (rows, classes)),
        Type(DType.INT64, (n,)),
        Type(DType.BOOL, (n,)),
        Type(x.dtype, (n,)),
        Type(x.dtype, (n,)),
    ]


def _small_bytes(need: Need) -> int:
    """Temporaries of a block's rows, a few of each size that is no scratch."""
    x, rows, classes = _sizes(need)
    size = int(x.dtype.itemsize)
    return size * (16 * rows + 4 * classes + 64) + size * rows * classes


def _known(need: Need) -> str | None:
    reduction = need.attrs["reduction"]
    return None if reduction in ("mean", "sum") else f"reduction {reduction}"


def _bind(use: Use) -> Launch:
    inputs, outputs = [*use.inputs, None, None], list(use.outputs)
    forward = len(outputs[0].shape) == 0
    dloss = inputs.pop(0) if len(use.outputs) > 1 else None
    loss = outputs.pop(0) if forward else None
    x, w, bias, labels, weight = inputs[:5]
    assert x is not None and w is not None and labels is not None
    dx, dw, dbias = [*outputs, None, None, None][:3]
    logits, label, ignored, share, nll = use.scratch
    ignore, mean = int(use.attrs["ignore_index"]), use.attrs["reduction"] == "mean"
    smoothing = float(use.attrs.get("label_smoothing", 0.0))
    classes, blocks = w.shape[0], math.ceil(x.shape[0] / max(1, logits.shape[0]))
    step = math.ceil(x.shape[0] / max(1, blocks))  # blocks of one size
    even = smoothing / classes

    def prepare() -> torch.Tensor:
        """Each row's class weight, 0 where ignored; returns what the sum is divided by."""
        torch.eq(labels, ignore, out=ignored)
        label.copy_(labels)
        label.masked_fill_(ignored, 0)
        if label.device.type == "cpu" and label.numel():  # elsewhere the check would synchronise
            low, high = int(label.min()), int(label.max())
            if low < 0 or high >= classes:
                bad = low if low < 0 else high
                raise IndexError(f"label {bad} is not one of {classes} classes")
        if weight is None:
            share.fill_(1.0)
        else:
            torch.index_select(weight, 0, label, out=share)
        share.masked_fill_(ignored, 0.0)
        return share.sum() if mean else share.new_ones(())

    def launch() -> None:
        divisor = prepare()
        mass = float(classes) if weight is None else weight.sum()
        if not blocks:  # no rows, of which the first would write them
            for gradient in (dw, dbias):
                if gradient is not None:
                    gradient.zero_()
        for i in range(0, x.shape[0], max(1, step)):
            rows = x[i : i + step]
            block, y = logits[: rows.shape[0]], label[i : i + step, None]
            out, own = ignored[i : i + step, None], share[i : i + step, None]
            if bias is None:
                torch.mm(rows, w.t(), out=block)
            else:
                torch.addmm(bias, rows, w.t(), out=block)
            torch.ops.aten._log_softmax.out(block, 1, False, out=block)  # log p
            if loss is not None:
                total = block.gather(1, y).mul_(own).mul_(smoothing - 1.0)
                if smoothing:
                    every = block.sum(1) if weight is None else block @ weight
                    total.sub_(every[:, None].mul_(even).masked_fill_(out, 0.0))
                nll[i : i + step] = total.masked_fill_(out, 0.0)[:, 0]
            if dx is None or dw is None or dloss is None:
                continue
            unit = dloss / divisor
            factor = own * (1.0 - smoothing) + even * mass
            block.exp_().mul_(factor)
            if smoothing:
                block.sub_(even if weight is None else weight * even)
            block.scatter_add_(1, y, own * (smoothing - 1.0))
            block.mul_(unit).masked_fill_(out, 0.0)
            torch.mm(block, w, out=dx[i : i + step])
            if i == 0:
                torch.mm(block.t(), rows, out=dw)
            else:
                dw.addmm_(block.t(), rows)
            if dbias is not None:
                dbias.copy_(block.sum(0)) if i == 0 else dbias.add_(block.sum(0))
        if loss is not None:
            torch.div(nll.sum(), divisor, out=loss)

    return launch


KERNELS: dict[str, Kernel] = {
    op: Kernel(
        "aten.linear_cross_entropy", _bind, why_not=_known, contiguous=None, scratch=_scratch,
        workspace=_small_bytes,
    )
    for op in ("LinearCrossEntropy", "LinearCrossEntropyGrad", "LinearCrossEntropyStep")
}  # fmt: skip
