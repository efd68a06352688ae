"""LinearCrossEntropy in bf16 and fp16: products by torch.mm, or as blas/low_head.py makes them,
with native code for the losses between.

A block of rows has logits of the low type; log-sum-exp, loss and gradients are computed from them
in f32, and the logits' gradients overwrite them. dw and dbias are f32 sums over the rows; each
block adds one product of the low type for each panel of classes.

    z = x w^T                        f[R,V]  of a block of R rows, low
    dz over z, losses                f[R,V], f32[R]
    dx = dz w                        f[R,D]  low
    dw[panel] += dz[:,panel]^T x     f32[V,D], the product low
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from onward.graph.types import DType, Type
from onward.kernels.aten.linear_cross_entropy import ROWS, blocks_of, no_such_class, weigh_labels
from onward.kernels.aten.row_counts import behind, further, lengthened, rounded
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch
from onward.kernels.native.library import library, where

PANEL = 4096  # classes of one product for dw; 2048 to 16384 take equally long
# Bytes of dw up to which blocks have half the rows. dw is read and written once per block, which is
# free while it stays in cache (22 MiB: 44.0 ms with half the rows, 44.8 without); else it costs 5 %
# (98 MiB: 225 and 213 ms).
CACHED = 32 << 20


# makes the launch of `y = a b`
Multiply = Callable[[Tensor, Tensor, Tensor], Launch]


def _by_torch(a: Tensor, b: Tensor, y: Tensor) -> Launch:
    return partial(torch.mm, a, b, out=y)


def head_sizes(spec: KernelSpec) -> tuple[Type, Type]:
    x, w = spec.inputs[:2] if spec.op == "LinearCrossEntropy" else spec.inputs[1:3]
    assert x is not None and w is not None
    return x, w


def scratch(spec: KernelSpec) -> list[Type]:
    """The scratch of a call: `z`, a panel's `dw`, each row's `loss`, `label` and whether it is
    `ignored`, and three sums."""
    x, w = head_sizes(spec)
    n, classes, features = x.shape[0], w.shape[0], w.shape[1]
    assert isinstance(n, int) and isinstance(classes, int) and isinstance(features, int)
    panel = min(classes, PANEL) if spec.op != "LinearCrossEntropy" else 1
    few = 4 * classes * features <= CACHED
    rows = int(spec.attrs.get("rows", ROWS // 2 if few else ROWS))
    return [
        Type(x.dtype, (min(rounded(n), rows), classes)),
        Type(x.dtype, (panel, features)),
        Type(DType.FLOAT, (n,)),
        Type(DType.INT64, (n,)),
        Type(DType.BOOL, (n,)),
        Type(DType.FLOAT, (3,)),
    ]


def unsupported(spec: KernelSpec) -> str | None:
    x, w = head_sizes(spec)
    if not x.is_low or x.dtype != w.dtype:
        return "x and w are not both of one low type"
    others = (t for t in spec.inputs if t is not x and t is not w)
    if any(t is not None and t.is_floating and t.dtype != DType.FLOAT for t in others):
        return "a bias or weights that are not f32"
    reduction = spec.attrs["reduction"]
    return None if reduction in ("mean", "sum") else f"reduction {reduction}"


def workspace(spec: KernelSpec) -> int:
    """Bytes of small temporaries with one number per row."""
    n = head_sizes(spec)[0].shape[0]
    assert isinstance(n, int)
    return 64 * n + 4096


def bind(op: str, args: KernelArguments, multiply: Multiply = _by_torch) -> Launch:
    """The launch of a head, with its products by `multiply`."""
    inputs, outputs = [*args.inputs, None, None], list(args.outputs)
    dloss = None if op == "LinearCrossEntropy" else inputs.pop(0)
    loss = outputs.pop(0) if op != "LinearCrossEntropyGrad" else None
    x, w, bias, labels, weight = inputs[:5]
    dx, dw, dbias = [*outputs, None, None, None][:3]
    assert x is not None and w is not None and labels is not None
    z, panel, losses, label, ignored, sums = args.scratch[:6]
    divisor, unit, weights = sums[0:1], sums[1:2], sums[2:3]
    ignore, classes = int(args.attrs["ignore_index"]), w.shape[0]
    ends = (args.flag[0], args.flag[1])
    steps = [
        step
        for rows in blocks_of(x.shape[0], z.shape[0], rounded)
        for step in _block(
            x, w, bias, labels, weight, dx, dw, dbias, z, panel, losses, weights,
            None if dloss is None else unit, rows, ignore,
            float(args.attrs.get("label_smoothing", 0.0)), args.spare, multiply,
        )
    ]  # fmt: skip
    mean = args.attrs["reduction"] == "mean"

    def launch() -> None:
        # the labels' weights lie where their rows' losses are written later
        weigh_labels(labels, weight, classes, ignore, label, ignored, losses, ends)
        divisor.copy_(losses.sum()) if mean else divisor.fill_(1.0)
        if weight is None:
            weights.fill_(float(classes))
        else:
            torch.sum(weight, 0, keepdim=True, out=weights)
        if dloss is not None:
            torch.div(dloss, divisor, out=unit)
        if not x.shape[0]:
            for gradient in (dw, dbias):
                if gradient is not None:
                    gradient.zero_()
        for step in steps:
            step()
        if loss is not None:
            torch.div(losses.sum(), divisor[0], out=loss)

    return launch


def _block(
    x: Tensor, w: Tensor, bias: Tensor | None, labels: Tensor, weight: Tensor | None,
    dx: Tensor | None, dw: Tensor | None, dbias: Tensor | None, z: Tensor, panel: Tensor,
    losses: Tensor, weights: Tensor, unit: Tensor | None, rows: slice, ignore: int,
    smoothing: float, spare: Callable[[Tensor], int], multiply: Multiply,
) -> Iterator[Launch]:  # fmt: skip
    """Yields the calls for a block's rows, in order. The first block writes dw, later ones add to
    it."""
    native = library()
    assert native is not None
    first = rows.start == 0
    count = rows.stop - rows.start
    # the last block includes spare rows, so that products have few different row counts
    room = [z.shape[0] - count, spare(x), *([] if dx is None else [spare(dx)])]
    more = further(count, *room) if rows.stop == x.shape[0] else 0
    xs = lengthened(x[rows], more)  # f[R,D]
    wide = z[: count + more]  # f[R,V]
    zs = z[:count]  # without spare rows
    if more:
        yield behind(x[rows], more).zero_  # zeros, so that their products are zeros too
    yield multiply(xs, w.t(), wide)
    yield native.launch(
        "onward_cross_entropy", z=zs, bias=bias, labels=labels[rows], weight=weight,
        all_weights=weights, unit=unit, loss=losses[rows], rows=zs.shape[0],
        classes=zs.shape[1], ignore=ignore, smoothing=smoothing,
    )  # fmt: skip
    if dx is None or dw is None:
        return
    yield multiply(wide, w, lengthened(dx[rows], more))
    for start in range(0, w.shape[0], max(1, panel.shape[0])):
        part = panel[: min(panel.shape[0], w.shape[0] - start)]  # f[C,D]
        yield multiply(wide[:, start : start + part.shape[0]].t(), xs, part)
        yield native.launch(
            "onward_accumulate", x=part, y=dw[start : start + part.shape[0]], n=part.numel(),
            adds=int(not first),
        )  # fmt: skip
    if dbias is not None:
        yield native.launch(
            "onward_sum_rows_into", z=zs, y=dbias, rows=zs.shape[0], classes=zs.shape[1],
            adds=int(not first),
        )  # fmt: skip


KERNELS: dict[str, Kernel] = {
    op: Kernel(
        "native.linear_cross_entropy", partial(bind, op), unsupported=unsupported, where=where,
        contiguous=None, scratch=scratch, workspace=workspace,
        input_error=partial(no_such_class, op),
    )
    for op in ("LinearCrossEntropy", "LinearCrossEntropyGrad", "LinearCrossEntropyStep")
}  # fmt: skip
