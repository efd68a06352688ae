"""A linear head and its cross-entropy in blocks of rows.

Products are cuBLAS's; logits are f32 whatever the type of x. Between the products one kernel reads
a block of logits twice and writes their gradient in the type of x: 10 bytes per logit of bf16,
where PyTorch's operators move about 50. Symbols are those of
`kernels/aten/linear_cross_entropy.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onward.graph.types import LOW, DType, Type
from onward.kernels.aten.linear_cross_entropy import (
    HeadOperands,
    blocks_of,
    head_operands,
    no_such_class,
    weigh_labels,
)
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch
from onward.kernels.triton.supported import where

ROWS = 2048  # rows of a block
_COLUMNS = 4096  # logits that a program reads at once


def padded(classes: int) -> int:
    """The numbers from one row of logits to the next: a multiple of 16, of which Triton makes whole
    vectors. cuBLAS has slow products where rows of 16-bit numbers are no multiple of 8 apart
    (GPT-2's 50257 classes)."""
    return -(-classes // 16) * 16


def _operands(spec: KernelSpec) -> tuple[Type, Type]:
    x, w = spec.inputs[:2] if spec.op == "LinearCrossEntropy" else spec.inputs[1:3]
    assert x is not None and w is not None
    return x, w


def _unsupported(spec: KernelSpec) -> str | None:
    x, w = _operands(spec)
    if x.dtype != w.dtype or x.dtype not in (DType.FLOAT, *LOW):
        return f"{x.dtype.name.lower()} and {w.dtype.name.lower()} tensors"
    rest = spec.inputs[2:] if spec.op == "LinearCrossEntropy" else spec.inputs[3:]
    for t in rest:
        if t is not None and t.is_floating and t.dtype != DType.FLOAT:
            return f"a bias or weights of {t.dtype.name.lower()}"
    reduction = spec.attrs["reduction"]
    return None if reduction in ("mean", "sum") else f"reduction {reduction}"


def _scratch(spec: KernelSpec) -> list[Type]:
    """The scratch of a call: logits, label, ignored, share, nll and, for low precision, the
    logits' gradients."""
    x, w = _operands(spec)
    n, classes = x.shape[0], w.shape[0]
    assert isinstance(n, int) and isinstance(classes, int)
    rows = min(n, int(spec.attrs.get("rows", ROWS)))
    row = padded(classes)
    low = [Type(x.dtype, (rows, row))] if x.is_low else []
    return [
        Type(DType.FLOAT, (rows, row)),
        Type(DType.INT64, (n,)),
        Type(DType.BOOL, (n,)),
        Type(DType.FLOAT, (n,)),
        Type(DType.FLOAT, (n,)),
        *low,
    ]


def _small_bytes(spec: KernelSpec) -> int:
    """Bytes of divisors and sums outside of scratch."""
    x, w = _operands(spec)
    assert isinstance(x.shape[0], int) and isinstance(w.shape[0], int)
    return 4 * (w.shape[0] + 2 * x.shape[0]) + 4096


def by_eights(classes: int) -> Iterator[slice]:
    """The classes in two parts, all but at most 7 first: cuBLAS has fast products of half precision
    only for multiples of 8."""
    whole = classes - classes % 8
    return (part for part in (slice(0, whole), slice(whole, classes)) if part.start < part.stop)


def product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Writes a b f[N,M] to out, which may be f32 where a and b are of low precision."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda:
        torch.ops.aten.mm.dtype_out(a, b, out.dtype, out=out)
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def add_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Adds a b f[N,M] to out, which may be f32 where a and b are of low precision."""
    if out.dtype == a.dtype:
        out.addmm_(a, b)
    elif a.is_cuda:
        torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, out=out)
    else:
        out.addmm_(a.to(out.dtype), b.to(out.dtype))


@dataclass(frozen=True)
class _Call(HeadOperands):
    """The tensors that one launch reads, writes and uses as scratch. Bias, weights, losses, dw and
    dbias are f32 whatever the type of x."""

    logits: Tensor  # f32[R,V]
    label: Tensor  # i64[N]
    ignored: Tensor  # b[N]
    share: Tensor  # f32[N]
    nll: Tensor  # f32[N]
    gradients: Tensor  # f[R,V]; the logits themselves in fp32. Rows are `padded(V)` apart
    ends: tuple[Tensor, Tensor]

    def blocks(self) -> Iterator[slice]:
        return blocks_of(self.x.shape[0], self.logits.shape[0])


def _call(args: KernelArguments) -> _Call:
    given = head_operands(args)
    logits, label, ignored, share, nll = args.scratch[:5]
    gradients = [*args.scratch, logits][5]
    return _Call(
        **vars(given), logits=logits[:, : given.classes], label=label, ignored=ignored,
        share=share, nll=nll, gradients=gradients[:, : given.classes],
        ends=(args.flag[0], args.flag[1]),
    )  # fmt: skip


def _bind(args: KernelArguments) -> Launch:
    from onward.kernels.triton import linear_cross_entropy_device as device

    c = _call(args)
    kernel: Any = device.cross_entropy
    smoothing = float(args.attrs.get("label_smoothing", 0.0))
    ignore, mean = int(args.attrs["ignore_index"]), args.attrs["reduction"] == "mean"
    flags = {
        "HAS_BIAS": c.bias is not None, "HAS_WEIGHT": c.weight is not None,
        "SMOOTHS": smoothing > 0.0, "LOSS": c.loss is not None, "GRADIENT": c.dx is not None,
        "COLUMNS": _COLUMNS, "num_warps": 8,
    }  # fmt: skip
    numbers = (1.0 - smoothing, smoothing / max(c.classes, 1))

    def cross_entropy(rows: slice, unit: Tensor, mass: Tensor) -> Tensor:
        """Writes the losses of a block's rows; returns the gradient f[R,V] of its logits."""
        n = c.label[rows].shape[0]
        z, dz = c.logits[:n], c.gradients[:n]
        for part in by_eights(c.classes):
            product(c.x[rows], c.w[part].t(), z[:, part])
        bias = z if c.bias is None else c.bias
        weight = z if c.weight is None else c.weight
        kernel[(n,)](
            z, dz, c.nll[rows], c.label[rows], c.share[rows], c.ignored[rows].view(torch.uint8),
            bias, weight, unit, mass, c.classes, z.stride(0), dz.stride(0), *numbers, **flags,
        )  # fmt: skip
        return dz

    def launch() -> None:
        weigh_labels(c.labels, c.weight, c.classes, ignore, c.label, c.ignored, c.share, c.ends)
        divisor = c.share.sum() if mean else c.share.new_ones(())  # f32[]
        mass = c.share.new_full((), c.classes) if c.weight is None else c.weight.sum()  # f32[]
        unit = divisor if c.dloss is None else c.dloss / divisor  # f32[]
        if not c.x.shape[0]:
            for gradient in (c.dw, c.dbias):
                if gradient is not None:
                    gradient.zero_()
        for rows in c.blocks() if c.x.shape[0] else ():
            dz = cross_entropy(rows, unit, mass)
            if c.dx is None or c.dw is None:
                continue
            few, *most = reversed([*by_eights(c.classes)])  # the larger product rounds last
            torch.mm(dz[:, few], c.w[few], out=c.dx[rows])
            for part in most:
                c.dx[rows].addmm_(dz[:, part], c.w[part])
            combine = product if rows.start == 0 else add_product
            combine(dz.t(), c.x[rows], c.dw)
            if c.dbias is not None:
                sums = dz.sum(0, dtype=c.dbias.dtype)
                c.dbias.copy_(sums) if rows.start == 0 else c.dbias.add_(sums)
        if c.loss is not None:
            torch.div(c.nll.sum(), divisor, out=c.loss)

    return launch


KERNELS: dict[str, Kernel] = {
    op: Kernel(
        "triton.linear_cross_entropy", _bind, unsupported=_unsupported, where=where,
        contiguous=None, scratch=_scratch, workspace=_small_bytes,
        input_error=partial(no_such_class, op),
    )
    for op in ("LinearCrossEntropy", "LinearCrossEntropyGrad", "LinearCrossEntropyStep")
}  # fmt: skip
