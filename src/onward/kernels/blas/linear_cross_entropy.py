"""Head and cross-entropy in row blocks, on a BLAS called from the kernel's own threads.

The logits of at most 512 rows exist at a time, in panels of one or two thousand classes.
Milliseconds of LinearCrossEntropyStep on 2 threads of an AMD EPYC (AVX-512), 2026-11-21, best of 5
to 15 runs, with blocks of at most 512 and of 256 rows:

    1024 rows, 512 features, 50257 classes    800, 842    750 for the products alone (210 GFLOP/s)
    700 rows, 200 features, 28785 classes     132, 137    121 for the products alone (200 GFLOP/s)

With blocks of aten's operators the first takes 1102, without blocks 1205.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch

from onward.graph.types import DType, Type
from onward.kernels.blas.choice import TORCH, Shape, choose_called, forced
from onward.kernels.blas.engines import engines
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch
from onward.kernels.native.library import library, only_f32, where
from onward.kernels.target import Target

ROWS = 512  # rows of a block


def block_rows(rows: int, most: int) -> int:
    """The rows of a block: as few blocks as `most` allows, all of one size."""
    blocks = max(1, math.ceil(rows / most))
    return max(1, math.ceil(rows / blocks))


def _panels(classes: int, features: int, threads: int) -> tuple[int, int]:
    """The classes of a panel, and the number of panels: a multiple of the threads, so that none
    idles.

    Narrow models do little arithmetic per logit, so that their panels should stay in cache: with
    200 features, 1024 classes take 140 ms and 2048 take 154; with 512 features 824 and 815.
    """
    most = 2048 if features >= 512 else 1024
    count = threads * max(1, math.ceil(classes / (threads * most)))
    width = math.ceil(classes / count / 16) * 16
    return width, count


def _sizes(spec: KernelSpec) -> tuple[int, int, int]:
    """The sizes of a call: rows, features, classes."""
    x, w = spec.inputs[:2] if spec.op == "LinearCrossEntropy" else spec.inputs[1:3]
    assert x is not None and w is not None
    n, d, v = x.shape[0], x.shape[1], w.shape[0]
    assert isinstance(n, int) and isinstance(d, int) and isinstance(v, int)
    return n, d, v


def _scratch(spec: KernelSpec) -> list[Type]:
    n, d, v = _sizes(spec)
    threads = torch.get_num_threads()
    rows = min(n, int(spec.attrs.get("rows", ROWS)))  # most rows of a block; grows with n
    width, count = _panels(v, d, threads)
    panels = count * rows * width
    room = panels + 3 * count * rows + 4 * rows + threads * rows * d
    # the size of the second records the threads planned for, whatever the setting is later
    return [Type(DType.FLOAT, (room,)), Type(DType.INT64, (threads,))]


def bind(op: str, args: KernelArguments) -> Launch:
    native = library()
    assert native is not None
    inputs = [*args.inputs, None, None]
    dloss = inputs.pop(0) if op != "LinearCrossEntropy" else None
    x, w, bias, labels, weight = inputs[:5]
    assert x is not None and w is not None and labels is not None
    outputs: list[torch.Tensor | None] = list(args.outputs)
    loss = outputs.pop(0) if op != "LinearCrossEntropyGrad" else None
    dx, dw, dbias = [*outputs, None, None, None][:3]
    (n, d), v = x.shape, w.shape[0]
    rows, threads = block_rows(n, int(args.attrs.get("rows", ROWS))), args.scratch[1].numel()
    width, count = _panels(v, d, threads)
    engine = engines()[
        choose_called(
            Shape(rows, width, d, False, True),  # logits
            Shape(rows, d, width, False, False),  # dx
            Shape(width, d, rows, True, False),  # dw
        )
    ]
    return native.launch(
        "onward_head", blas=engine.layout, x=x, w=w, bias=bias, labels=labels, weight=weight,
        dloss=dloss, loss=loss, dx=dx, dw=dw, dbias=dbias, n=n, d=d, v=v,
        ignore=int(args.attrs["ignore_index"]), mean=int(args.attrs["reduction"] == "mean"),
        smoothing=float(args.attrs.get("label_smoothing", 0.0)), rows=rows, chunk=width,
        chunks=count, threads=threads, scratch=args.scratch[0], flag=args.flag,
    )  # fmt: skip


def _no_such_class(op: str, args: KernelArguments, flag: Sequence[int]) -> IndexError:
    """The error for a label that is not a class. flag: a row, counted from 1, and its label."""
    classes = args.x(1 if op == "LinearCrossEntropy" else 2).shape[0]
    return IndexError(
        f"the label {flag[1]} in row {flag[0] - 1} is out of range for {classes} classes"
    )


def _faster(spec: KernelSpec) -> str | None:
    return TORCH if forced() == TORCH else None


def _known(spec: KernelSpec) -> str | None:
    if spec.attrs["reduction"] not in ("mean", "sum"):
        return f"reduction {spec.attrs['reduction']}"
    return only_f32(spec)


def _where(target: Target) -> str | None:
    return where(target) or (None if engines() else "no BLAS to call")


def _kernel(op: str) -> Kernel:
    return Kernel(
        "blas.linear_cross_entropy",
        lambda args: bind(op, args),
        where=_where,
        unsupported=_known,
        faster=_faster,
        contiguous=None,
        scratch=_scratch,
        input_error=partial(_no_such_class, op),
    )


KERNELS: dict[str, tuple[Kernel, ...]] = {
    op: (_kernel(op),)
    for op in ("LinearCrossEntropy", "LinearCrossEntropyGrad", "LinearCrossEntropyStep")
}
