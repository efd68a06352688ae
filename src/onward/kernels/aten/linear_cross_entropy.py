"""Linear cross-entropy in row blocks on PyTorch's operators: any device, any floating dtype.

It is the reference of the kernel in `kernels/blas/linear_cross_entropy.py`, and runs where that one
does not apply. With N rows of D features, V classes, labels y, class weights c (1 by default), and
smoothing s:

    z = x w^T + bias                                 f[N,V]  logits
    t = c_v ((1 - s) [v = y] + s / V)                f[N,V]  target, a row of zeros where ignored
    loss = -sum(t log softmax(z)) / divisor          f[]     divisor: sum of c_y, or 1
    dz = (softmax(z) sum_v(t) - t) dloss / divisor   f[N,V]
    dx, dw, dbias = dz w, dz^T x, sum of dz's rows   f[N,D], f[V,D], f[V]

z and dz exist for R rows at a time, in one buffer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from onward.graph.types import DType, Type
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch

ROWS = 512  # rows of a block


def _sizes(spec: KernelSpec) -> tuple[Type, int, int]:
    """The type of x, the most rows of a block, and the number of classes. The rows grow with x, as
    scratch must."""
    x, w = spec.inputs[:2] if spec.op == "LinearCrossEntropy" else spec.inputs[1:3]
    assert x is not None and w is not None
    rows, classes = x.shape[0], w.shape[0]
    assert isinstance(rows, int) and isinstance(classes, int)
    return x, min(rows, int(spec.attrs.get("rows", ROWS))), classes


def _scratch(spec: KernelSpec) -> list[Type]:
    """The scratch tensors of a call: `block`, `label`, `ignored`, `share` and `nll`."""
    x, rows, classes = _sizes(spec)
    n = x.shape[0]
    return [
        Type(x.dtype, (rows, classes)),
        Type(DType.INT64, (n,)),
        Type(DType.BOOL, (n,)),
        Type(x.dtype, (n,)),
        Type(x.dtype, (n,)),
    ]


def _small_bytes(spec: KernelSpec) -> int:
    """Bytes of a block's small temporaries outside of scratch."""
    x, rows, classes = _sizes(spec)
    size = int(x.dtype.itemsize)
    return size * (16 * rows + 4 * classes + 64) + size * rows * classes


def _known(spec: KernelSpec) -> str | None:
    if any(t is not None and t.is_low for t in spec.inputs):
        return "low precision, whose sums over rows are f32"
    reduction = spec.attrs["reduction"]
    return None if reduction in ("mean", "sum") else f"reduction {reduction}"


def blocks_of(
    n: int, most: int, rounded: Callable[[int], int] = lambda rows: rows
) -> Iterator[slice]:
    """Divides n rows into as few blocks of at most `most` rows as possible. All have the same size,
    passed through `rounded`, except the last, which has the remaining rows."""
    count = max(1, math.ceil(n / max(1, most)))
    step = max(1, min(rounded(math.ceil(n / count)), most))
    return (slice(i, min(i + step, n)) for i in range(0, n, step))


def weigh_labels(
    labels: Tensor, weight: Tensor | None, classes: int, ignore: int, label: Tensor,
    ignored: Tensor, share: Tensor, ends: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    """Fills `label`, `ignored`, `share` and `ends`; see `_Call`."""
    torch.eq(labels, ignore, out=ignored)
    label.copy_(labels)
    label.masked_fill_(ignored, 0)
    if label.numel():
        torch.aminmax(label, out=ends)
        label.clamp_(0, classes - 1)
    if weight is None:
        share.fill_(1.0)
    else:
        torch.index_select(weight, 0, label, out=share)
    share.masked_fill_(ignored, 0.0)


@dataclass(frozen=True)
class HeadOperands:
    """The operands of one of the three ops, by name; absent ones are None."""

    x: Tensor  # f[N,D]
    w: Tensor  # f[V,D]
    bias: Tensor | None  # f[V]
    labels: Tensor  # i64[N]
    weight: Tensor | None  # f[V], class weights
    dloss: Tensor | None  # f[], if gradients are computed
    loss: Tensor | None  # f[], if the loss is computed
    dx: Tensor | None  # f[N,D]
    dw: Tensor | None  # f[V,D]
    dbias: Tensor | None  # f[V]

    @property
    def classes(self) -> int:
        return self.w.shape[0]


def head_operands(args: KernelArguments) -> HeadOperands:
    """Names the operands of a call."""
    inputs, outputs = [*args.inputs, None, None], list(args.outputs)
    with_loss = outputs[0].dim() == 0  # the loss, if computed, is the first output
    dloss = inputs.pop(0) if len(outputs) > 1 else None
    loss = outputs.pop(0) if with_loss else None
    x, w, bias, labels, weight = inputs[:5]
    assert x is not None and w is not None and labels is not None
    dx, dw, dbias = [*outputs, None, None, None][:3]
    return HeadOperands(x, w, bias, labels, weight, dloss, loss, dx, dw, dbias)


@dataclass(frozen=True)
class _Call(HeadOperands):
    """The tensors that one launch reads, writes and uses as scratch."""

    block: Tensor  # f[R,V]
    label: Tensor  # i64[N]: the labels; 0 where ignored, some valid class where out of range
    ignored: Tensor  # b[N]
    share: Tensor  # f[N]: the label's class weight, 0 where ignored
    nll: Tensor  # f[N]: each row's contribution to the loss
    ends: tuple[Tensor, Tensor]  # i64[], i64[]: the smallest and the largest label, in the flag
    ignore_index: int
    mean: bool
    smoothing: float

    @property
    def even(self) -> float:
        """The probability that smoothing gives to every class."""
        return self.smoothing / self.classes

    def blocks(self) -> Iterator[slice]:
        return blocks_of(self.x.shape[0], self.block.shape[0])


def _call(args: KernelArguments) -> _Call:
    block, label, ignored, share, nll = args.scratch
    return _Call(
        **vars(head_operands(args)), block=block, label=label, ignored=ignored, share=share,
        nll=nll,
        ends=(args.flag[0], args.flag[1]), ignore_index=int(args.attrs["ignore_index"]),
        mean=args.attrs["reduction"] == "mean",
        smoothing=float(args.attrs.get("label_smoothing", 0.0)),
    )  # fmt: skip


def _divisor(c: _Call) -> Tensor:
    """Weighs the labels; returns the divisor of the loss, f[]."""
    weigh_labels(c.labels, c.weight, c.classes, c.ignore_index, c.label, c.ignored, c.share, c.ends)
    return c.share.sum() if c.mean else c.share.new_ones(())


def _log_softmax(c: _Call, rows: slice) -> Tensor:
    """The log-probabilities f[R,V] of a block of rows."""
    x = c.x[rows]  # f[R,D]
    block = c.block[: x.shape[0]]  # f[R,V]
    if c.bias is None:
        torch.mm(x, c.w.t(), out=block)
    else:
        torch.addmm(c.bias, x, c.w.t(), out=block)
    torch.ops.aten._log_softmax.out(block, 1, False, out=block)
    return block


def _losses(c: _Call, rows: slice, log_p: Tensor) -> Tensor:
    """The losses f[R] of a block's rows, -sum(t log p); log_p: f[R,V]."""
    label, share = c.label[rows, None], c.share[rows, None]  # i64[R,1], f[R,1]
    ignored = c.ignored[rows, None]  # b[R,1]
    total = log_p.gather(1, label).mul_(share).mul_(c.smoothing - 1.0)  # f[R,1]
    if c.smoothing:
        every = log_p.sum(1) if c.weight is None else log_p @ c.weight  # f[R]
        total.sub_(every[:, None].mul_(c.even).masked_fill_(ignored, 0.0))
    return total.masked_fill_(ignored, 0.0)[:, 0]


def _logit_gradients(
    c: _Call, rows: slice, log_p: Tensor, unit: Tensor, mass: Tensor | float
) -> Tensor:
    """The logits' gradient dz f[R,V], written over log_p. unit: dloss / divisor, f[]. mass: sum of
    class weights, f[]."""
    label, share = c.label[rows, None], c.share[rows, None]  # i64[R,1], f[R,1]
    target = share * (1.0 - c.smoothing) + c.even * mass  # f[R,1], sum_v(t)
    if c.smoothing:  # with smoothing every class is in part the label's: inf - inf
        target = target + (unit - unit)
    dz = log_p.exp_().mul_(target)  # f[R,V]
    if c.smoothing:
        dz.sub_(c.even if c.weight is None else c.weight * c.even)
    dz.scatter_add_(1, label, share * (c.smoothing - 1.0))
    dz.mul_(unit).scatter_add_(1, label, (unit - unit).expand_as(label))  # inf - inf, as in PyTorch
    return dz.masked_fill_(c.ignored[rows, None], 0.0)


def _add_gradients(c: _Call, rows: slice, dz: Tensor) -> None:
    """Computes dx for a block's rows, and adds their part of dw and dbias; the first block
    overwrites these. dz: f[R,V]."""
    assert c.dx is not None and c.dw is not None
    first, x = rows.start == 0, c.x[rows]  # f[R,D]
    torch.mm(dz, c.w, out=c.dx[rows])
    if first:
        torch.mm(dz.t(), x, out=c.dw)
    else:
        c.dw.addmm_(dz.t(), x)
    if c.dbias is not None:
        c.dbias.copy_(dz.sum(0)) if first else c.dbias.add_(dz.sum(0))


def _bind(args: KernelArguments) -> Launch:
    c = _call(args)

    def launch() -> None:
        divisor = _divisor(c)  # f[]
        mass = float(c.classes) if c.weight is None else c.weight.sum()  # f[]
        unit = None if c.dloss is None else c.dloss / divisor  # f[]
        if not c.x.shape[0]:  # there is no first block
            for gradient in (c.dw, c.dbias):
                if gradient is not None:
                    gradient.zero_()
        for rows in c.blocks():
            log_p = _log_softmax(c, rows)  # f[R,V]
            if c.loss is not None:
                c.nll[rows] = _losses(c, rows, log_p)
            if unit is not None:
                _add_gradients(c, rows, _logit_gradients(c, rows, log_p, unit, mass))
        if c.loss is not None:
            torch.div(c.nll.sum(), divisor, out=c.loss)

    return launch


def _bind_scale(args: KernelArguments) -> Launch:
    """Binds the scaling of gradients made ahead. If the host may read dloss without waiting and it
    is finite, the labels do not matter; elsewhere x - x tells whether x is finite."""
    dloss, labels, *given = args.inputs
    assert dloss is not None and labels is not None
    ignore, by_rows = int(args.attrs["ignore_index"]), bool(args.attrs["rows"])
    smooth, on_host = bool(args.attrs.get("label_smoothing")), dloss.device.type == "cpu"
    pairs = [(g, y) for g, y in zip(given, args.outputs, strict=True) if g is not None]
    moved = [(g, y) for g, y in pairs if g.data_ptr() != y.data_ptr()]

    def launch() -> None:
        if on_host and bool(dloss.eq(1.0)):  # as in `loss.backward()`
            for g, y in moved:
                y.copy_(g)
        elif on_host and bool(dloss.isfinite()):
            for g, y in pairs:
                torch.mul(g, dloss, out=y)
        else:
            by_labels()

    def by_labels() -> None:
        off = dloss - dloss  # f[]: 0, or NaN
        clean = dloss.masked_fill(off.isnan(), 0.0)  # f[]
        counted = labels.ne(ignore)  # b[N]
        some = counted.any()  # b[]
        every = torch.where(some, dloss + off, clean)  # f[]
        for i, (g, y) in enumerate(pairs):
            if g.dim() == 2 and by_rows and not i:
                torch.mul(g, torch.where(counted, dloss + off, clean)[:, None], out=y)
            elif g.dim() == 2 or smooth:
                torch.mul(g, every, out=y)
            else:
                torch.mul(g, torch.where(some, dloss, clean), out=y)
                label = labels.masked_fill(~counted, 0)
                y.index_add_(0, label, off.expand(labels.shape).masked_fill(~counted, 0.0))

    return launch


def _scale_bytes(spec: KernelSpec) -> int:
    """Bytes of a few temporaries with one number per row."""
    rows = spec.inputs[1]
    assert rows is not None and isinstance(rows.shape[0], int)
    return 64 * rows.shape[0] + 4096


def no_such_class(op: str, args: KernelArguments, flag: Sequence[int]) -> IndexError | None:
    """The error for a label that is not a class. flag: the smallest and the largest label that
    count."""
    classes = args.x(1 if op == "LinearCrossEntropy" else 2).shape[0]
    bad = next((label for label in flag if not 0 <= label < classes), None)
    return (
        None
        if bad is None
        else IndexError(f"the label {bad} is out of range for {classes} classes")
    )


KERNELS: dict[str, Kernel] = {
    op: Kernel(
        "aten.linear_cross_entropy", _bind, unsupported=_known, contiguous=None, scratch=_scratch,
        workspace=_small_bytes, input_error=partial(no_such_class, op),
    )
    for op in ("LinearCrossEntropy", "LinearCrossEntropyGrad", "LinearCrossEntropyStep")
}  # fmt: skip
KERNELS["LinearCrossEntropyScale"] = Kernel(
    "aten.linear_cross_entropy_scale", _bind_scale, inplace=((0, 2), (1, 3), (2, 4)),
    workspace=_scale_bytes,
)  # fmt: skip
