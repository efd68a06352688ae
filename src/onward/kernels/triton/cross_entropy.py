"""Cross-entropy of given logits, with and without label smoothing, and its gradient.

The forward reads a row of logits and writes its log-probabilities; rows of more than 4096 classes
are read twice, the second time from cache where they fit. The gradient is one pass. Bytes per logit
of f32: 8 to 12 forward and 8 backward, where torch's operators move as many forward, 4 more with
smoothing, and 16 to 24 backward in several launches for each MiB. Losses and the labels' weights
are summed in a fixed order.

A label that is no class is flagged; torch's operator ends the device's context.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from onward.graph.ops.loss import ignored_label
from onward.graph.types import DType, Type
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch
from onward.kernels.triton.supported import other_types, where

_TILE = 4096  # logits that a program holds
_COLUMNS_GRAD = 2048  # classes of a block of the gradient
_PROGRAMS = 1024  # at most, that share the rows' losses
_LABELS = 1024  # labels that a program reads at once
_SUMS = 256  # programs at most that add up the labels' weights


def _logits_at(op: str) -> int:
    return 1 if op.endswith("Grad") else 0


def _unsupported(spec: KernelSpec) -> str | None:
    at = _logits_at(spec.op)
    logits, labels = spec.inputs[at], spec.inputs[at + 1]
    assert logits is not None and labels is not None
    if logits.rank != 2:
        return "logits of more than two dims"
    if logits.shape[1] == 0:
        return "no classes"
    if labels.dtype not in (DType.INT64, DType.INT32):
        return f"labels of {labels.dtype.name.lower()}"
    floating = (t for t in (*spec.inputs, *spec.outputs) if t is not None and t.is_floating)
    return other_types(floating)


def _padded(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _programs(rows: int, height: int, most: int) -> tuple[int, int]:
    """The programs that share the rows, and the blocks of `height` rows of each."""
    blocks = max(1, math.ceil(rows / height))
    each = math.ceil(blocks / most)
    return math.ceil(blocks / each), each


def _sizes(spec: KernelSpec) -> tuple[int, int]:
    """The rows and the classes of a call."""
    logits = spec.inputs[_logits_at(spec.op)]
    assert logits is not None
    rows, classes = logits.shape
    assert isinstance(rows, int) and isinstance(classes, int)
    return rows, classes


def _tile(classes: int, widest: int) -> tuple[int, int]:
    """The rows and classes of a block."""
    columns = min(_padded(classes), widest)
    return _TILE // columns, columns


def _most(rows: int, height: int, most: int) -> int:
    """The programs of a call at most: fewer rows may have as many, never more."""
    return min(most, max(1, math.ceil(rows / height)))


def _scratch(spec: KernelSpec) -> list[Type]:
    """Each program's sums of losses and of labels' weights, f32[programs,2]."""
    rows, classes = _sizes(spec)
    return [Type(DType.FLOAT, (_most(rows, _tile(classes, _TILE)[0], _PROGRAMS), 2))]


def _scratch_grad(spec: KernelSpec) -> list[Type]:
    """Each program's sum of labels' weights, and the sum of all class weights."""
    return [
        Type(DType.FLOAT, (_most(_sizes(spec)[0], _LABELS, _SUMS),)),
        Type(DType.FLOAT, ()),
    ]


def _weight(args: KernelArguments, at: int) -> torch.Tensor | None:
    return args.inputs[at] if len(args.inputs) > at else None


def _warps(columns: int) -> int:
    return 4 if columns <= 2048 else 8


def _numbers(args: KernelArguments, classes: int) -> tuple[int, float, float, bool]:
    """Returns the ignored label, 1 - smoothing, smoothing / classes, and whether there is any."""
    smoothing = float(args.attrs.get("label_smoothing", 0.0))
    ignore = ignored_label(args.attrs)
    return ignore, 1.0 - smoothing, smoothing / classes, smoothing > 0.0


def _bind(args: KernelArguments) -> Launch:
    from onward.kernels.triton import cross_entropy_device as device

    logits, labels, weight = args.x(0), args.x(1), _weight(args, 2)
    loss, log_prob = args.outputs
    rows, classes = logits.shape
    height, columns = _tile(classes, _TILE)
    programs, blocks = _programs(rows, height, _PROGRAMS)
    partial = args.scratch[0][:programs]  # f32[programs,2]
    ignore, kept, even, smooths = _numbers(args, classes)
    reduction = args.attrs.get("reduction", "mean")
    adds = reduction != "none"
    kernel: Any = device.cross_entropy
    join: Any = device.joined_loss

    def launch() -> None:
        if rows or adds:
            kernel[(programs,)](
                logits, log_prob, loss, partial, labels, logits if weight is None else weight,
                args.flag, rows, blocks, classes, ignore, kept, even,
                HAS_WEIGHT=weight is not None, SMOOTHS=smooths, ADDS=adds,
                ONCE=columns >= classes, ROWS=height, COLUMNS=columns, num_warps=_warps(columns),
            )  # fmt: skip
        if adds:
            join[(1,)](partial, loss, programs, MEAN=reduction == "mean", PARTS=_PROGRAMS)

    return launch


def _bind_grad(args: KernelArguments) -> Launch:
    from onward.kernels.triton import cross_entropy_device as device

    dloss, log_prob, labels, dz = args.x(0), args.x(1), args.x(2), args.y
    weight, (partial, mass) = _weight(args, 3), args.scratch
    rows, classes = log_prob.shape
    height, columns = _tile(classes, _COLUMNS_GRAD)
    programs, blocks = _programs(rows, _LABELS, _SUMS)
    ignore, kept, even, smooths = _numbers(args, classes)
    reduction = args.attrs.get("reduction", "mean")
    of_label = log_prob if weight is None else weight
    grid = (math.ceil(rows / height) * math.ceil(classes / columns),)
    add: Any = device.label_weights
    kernel: Any = device.cross_entropy_gradient

    def launch() -> None:
        if not rows:
            return
        if reduction == "mean":
            add[(programs,)](
                labels, of_label, partial, rows, blocks, classes, ignore,
                HAS_WEIGHT=weight is not None, ROWS=_LABELS,
            )  # fmt: skip
        if weight is None:
            mass.fill_(classes)
        elif smooths:
            torch.sum(weight, 0, dtype=torch.float32, out=mass)
        kernel[grid](
            dloss, log_prob, labels, of_label, partial, mass, dz, rows, programs, classes, ignore,
            kept, even, HAS_WEIGHT=weight is not None, SMOOTHS=smooths, MEAN=reduction == "mean",
            EACH=reduction == "none", PARTS=_SUMS, ROWS=height, COLUMNS=columns,
        )  # fmt: skip

    return launch


def _no_such_class(args: KernelArguments, flag: Sequence[int]) -> IndexError:
    """The error for a label that is not a class. flag: the lowest and the highest such label."""
    bad, classes = flag[0] or flag[1], args.x(0).shape[1]
    return IndexError(f"the label {bad} is out of range for {classes} classes")


KERNELS: dict[str, Kernel] = {
    op: Kernel(
        "triton.cross_entropy", _bind, unsupported=_unsupported, where=where, inplace=((1, 0),),
        contiguous=None, scratch=_scratch, input_error=_no_such_class,
    )
    for op in ("SoftmaxCrossEntropyLoss", "CrossEntropyLoss")
}  # fmt: skip
# the forward has refused labels that are no classes
KERNELS["SoftmaxCrossEntropyLossGrad"] = Kernel(
    "triton.cross_entropy_grad", _bind_grad, unsupported=_unsupported, where=where,
    inplace=((0, 1),), contiguous=None, scratch=_scratch_grad,
)  # fmt: skip
