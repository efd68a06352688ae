"""Ops that move data: copies where no view is possible, gathers, scatters, concatenation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch

from onward.graph.types import DType, Type
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch


def _bind_reshape(args: KernelArguments) -> Launch:
    """Binds a reshape that is not a view: copies the source's elements in row-major order."""
    x, y = args.x(), args.y
    return partial(y.view(x.shape).copy_, x)


def _bind_copy(args: KernelArguments) -> Launch:
    return partial(args.y.copy_, args.x())


def _bind_expand(args: KernelArguments) -> Launch:
    return partial(args.y.copy_, args.x().expand(args.y.shape))


def _bind_transpose(args: KernelArguments) -> Launch:
    x = args.x()
    perm = args.attrs.get("perm") or list(reversed(range(x.dim())))
    return partial(args.y.copy_, x.permute(perm))


def _bind_concat(args: KernelArguments) -> Launch:
    parts = [t for t in args.inputs if t is not None]
    return partial(torch.cat, parts, dim=args.attrs["axis"], out=args.y)


def _bind_pad(args: KernelArguments) -> Launch:
    x, y = args.x(), args.y
    pads = [int(n) for n in args.x(1)]
    fill = args.inputs[2] if len(args.inputs) > 2 else None
    number = 0.0 if fill is None else fill.item()
    inner = y
    for dim, size in enumerate(x.shape):
        inner = inner.narrow(dim, pads[dim], size)

    def launch() -> None:
        y.fill_(number)
        inner.copy_(x)

    return launch


def _bind_range(args: KernelArguments) -> Launch:
    start, end, step = (t.item() for t in args.inputs if t is not None)
    return partial(torch.arange, start, end, step, out=args.y)


def _bind_gather(args: KernelArguments, negative: bool = True) -> Launch:
    x, ids, y = args.x(0), args.x(1), args.y
    dim = args.attrs.get("axis", 0) % x.dim()
    flat = y.view(*x.shape[:dim], ids.numel(), *x.shape[dim + 1 :])
    if x.device.type == "cpu":
        return partial(torch.index_select, x, dim, ids.reshape(-1), out=flat)
    place = _flat_index(x.shape[dim : dim + 1], ids.reshape(-1, 1), args.flag, negative)
    return lambda: torch.index_select(x, dim, place(), out=flat)


def _bind_gather_elements(args: KernelArguments) -> Launch:
    return partial(torch.gather, args.x(0), args.attrs.get("axis", 0), args.x(1), out=args.y)


def _flat_index(
    x_shape: Sequence[int], index: torch.Tensor, flag: torch.Tensor, negative: bool = True
) -> Callable[[], torch.Tensor]:
    """Returns a call that converts `index i64[...,k]` to flat positions in the first k dims of x.
    It sets the flag for an index out of range, whose flat position would belong to another row, and
    returns some valid position instead. negative: whether -1 means the last row."""
    sizes = x_shape[: index.shape[-1]]
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    size = torch.tensor(sizes, dtype=torch.int64, device=index.device)
    scale = torch.tensor(strides, dtype=torch.int64, device=index.device)
    rows, most, outside = index.reshape(-1, len(sizes)), size - 1, flag[0]
    least = -size if negative else torch.zeros_like(size)

    def flat() -> torch.Tensor:
        within = rows.clamp(least, most)
        outside.copy_((within != rows).any())
        return torch.where(within < 0, within + size, within).mul_(scale).sum(-1)  # -1 is the last

    return flat


def _no_such_row(args: KernelArguments, flag: Sequence[int]) -> IndexError:
    dim = args.attrs.get("axis", 0)
    return IndexError(
        "an index is out of range for a table (such as nn.Embedding) of "
        f"{args.x(0).shape[dim]} rows"
    )


def _no_such_place(args: KernelArguments, flag: Sequence[int]) -> IndexError:
    sizes = list(args.x().shape[: args.x(1).shape[-1]])
    return IndexError(f"an index is out of range for dims of {sizes}")


def _bind_in_range(args: KernelArguments) -> Launch:
    """Binds InRange. Writes into the flag whether a number is out of range, and the first one."""
    numbers, limit, y, flag = args.x(0), args.x(1), args.y, args.flag
    ignored, wraps = args.attrs.get("ignored"), args.attrs.get("wraps", 0)
    flat = y.view(-1)  # y is contiguous, numbers may be a slice

    def launch() -> None:
        y.copy_(numbers)
        if not flat.numel():
            return
        bad = (flat >= limit) | (flat < (-limit if wraps else 0))
        if ignored is not None:
            bad &= flat != ignored
        flag[:1].copy_(bad.any())
        first = bad.to(torch.uint8).argmax(keepdim=True)
        flag[1:].copy_(flat.gather(0, first) * flag[0])

    return launch


def _in_range_bytes(spec: KernelSpec) -> int:
    numbers = spec.inputs[0]
    assert numbers is not None
    return 4 * numbers.numel + 64


def _none_such(args: KernelArguments, flag: Sequence[int]) -> IndexError:
    """The error for a number out of range. flag: 1, and the first such number."""
    limit = int(args.x(1))
    if args.attrs["what"] == "label":
        return IndexError(f"the label {flag[1]} is out of range for {limit} classes")
    return IndexError(
        f"the index {flag[1]} is out of range for a table (such as nn.Embedding) of {limit} rows"
    )


def _bind_gather_nd(args: KernelArguments) -> Launch:
    x, index, y = args.x(0), args.x(1), args.y
    k = index.shape[-1]
    rows = x.reshape(math.prod(x.shape[:k]), *x.shape[k:])  # -1 is ambiguous if a size is 0
    flat = y.view(math.prod(index.shape[:-1]), *x.shape[k:])
    place = _flat_index(x.shape, index, args.flag)
    return lambda: torch.index_select(rows, 0, place(), out=flat)


_REDUCED = {"mul": "prod", "max": "amax", "min": "amin"}  # ONNX's names -> torch's


def _bind_scatter_nd(args: KernelArguments) -> Launch:
    """Binds ScatterND: copies data to y, then sets, adds, multiplies or compares rows at the
    index."""
    data, index, rows, y = args.x(0), args.x(1), args.x(2), args.y
    k = index.shape[-1]
    flat = y.view(math.prod(y.shape[:k]), *y.shape[k:])
    updates = rows.reshape(math.prod(index.shape[:-1]), *y.shape[k:])
    copied = data.data_ptr() == y.data_ptr()
    kind = args.attrs.get("reduction", "none")
    # On the CPU torch's operator refuses an invalid row; on a device it makes the device unusable.
    single = index.reshape(-1) if k == 1 and y.device.type == "cpu" else None
    place = _flat_index(y.shape, index, args.flag) if single is None else lambda: single

    def launch() -> None:
        if not copied:
            y.copy_(data)
        if kind == "add":
            flat.index_add_(0, place(), updates)
        elif kind == "none":
            flat.index_copy_(0, place(), updates)
        else:
            wide = place().view(-1, *[1] * (flat.dim() - 1)).expand_as(updates)
            flat.scatter_reduce_(0, wide, updates, _REDUCED[kind])

    return launch


def _bind_scatter_elements(args: KernelArguments) -> Launch:
    data, index, updates, y = args.x(0), args.x(1), args.x(2), args.y
    dim, copied = args.attrs.get("axis", 0), data.data_ptr() == y.data_ptr()
    kind = args.attrs.get("reduction", "none")

    def launch() -> None:
        if not copied:
            y.copy_(data)
        if kind == "add":
            y.scatter_add_(dim, index, updates)
        elif kind == "none":
            y.scatter_(dim, index, updates)
        else:
            y.scatter_reduce_(dim, index, updates, _REDUCED[kind])

    return launch


def _bind_top_k(args: KernelArguments) -> Launch:
    """Binds TopK: sorts everything as `torch.sort(stable=True)` does, so that equal numbers keep
    their order."""
    x, (values, places) = args.x(0), args.outputs
    dim, largest = args.attrs.get("axis", -1), bool(args.attrs.get("largest", 1))
    if values.shape == x.shape:
        sort = partial(torch.sort, x, stable=True, dim=dim, descending=largest)
        return partial(sort, out=(values, places))
    k = values.shape[dim]
    return partial(torch.topk, x, k, dim, largest, True, out=(values, places))


def _sorted_bytes(spec: KernelSpec) -> int:
    x = spec.inputs[0]
    assert x is not None
    return 4 * x.nbytes + 16 * int(x.numel) + 1024


def _no_batch_dims(spec: KernelSpec) -> str | None:
    return "batch_dims" if spec.attrs.get("batch_dims", 0) else None


def _index_bytes(spec: KernelSpec) -> int:
    index = spec.inputs[1]
    assert index is not None
    return 3 * Type(DType.INT64, index.shape).nbytes + 64


def _bind_cumsum(args: KernelArguments) -> Launch:
    """Binds CumSum; an exclusive sum is shifted by one position."""
    x, y, dim = args.x(0), args.y, int(args.x(1))
    reverse, exclusive = bool(args.attrs.get("reverse", 0)), bool(args.attrs.get("exclusive", 0))
    if not reverse and not exclusive:
        return partial(torch.cumsum, x, dim, out=y)
    size = x.shape[dim]
    rest = max(0, size - 1)

    def launch() -> None:
        given = x.flip(dim) if reverse else x
        if exclusive:
            total = torch.zeros_like(given)
            if rest:
                total.narrow(dim, 1, rest).copy_(given.narrow(dim, 0, rest).cumsum(dim))
        else:
            total = given.cumsum(dim)
        y.copy_(total.flip(dim) if reverse else total)

    return launch


def _cumsum_bytes(spec: KernelSpec) -> int:
    plain = not spec.attrs.get("reverse", 0) and not spec.attrs.get("exclusive", 0)
    return 0 if plain else 4 * spec.outputs[0].nbytes


KERNELS: dict[str, Kernel] = {
    "Reshape": Kernel("aten.copy", _bind_reshape),
    "Squeeze": Kernel("aten.copy", _bind_reshape),
    "Unsqueeze": Kernel("aten.copy", _bind_reshape),
    "Transpose": Kernel("aten.copy", _bind_transpose),
    "Expand": Kernel("aten.copy", _bind_expand),
    "Contiguous": Kernel("aten.copy", _bind_copy),
    "Concat": Kernel("aten.cat", _bind_concat),
    "Pad": Kernel("aten.pad", _bind_pad),
    "Range": Kernel("aten.arange", _bind_range),
    "Gather": Kernel(
        "aten.index_select", _bind_gather, contiguous=(1,), workspace=_index_bytes,
        input_error=_no_such_row,
    ),
    "Embedding": Kernel(
        "aten.index_select", partial(_bind_gather, negative=False), contiguous=(1,),
        workspace=_index_bytes, input_error=_no_such_row,
    ),
    "InRange": Kernel(
        "aten.in_range", _bind_in_range, workspace=_in_range_bytes, input_error=_none_such,
    ),
    "GatherElements": Kernel("aten.gather", _bind_gather_elements),
    "GatherND": Kernel(
        "aten.index_select", _bind_gather_nd, unsupported=_no_batch_dims, contiguous=(0, 1),
        workspace=_index_bytes, input_error=_no_such_place,
    ),
    "ScatterND": Kernel(
        "aten.index_add", _bind_scatter_nd, inplace=((0, 0),), contiguous=(1, 2),
        workspace=_index_bytes, input_error=_no_such_place,
    ),
    "ScatterElements": Kernel("aten.scatter_add", _bind_scatter_elements, inplace=((0, 0),)),
    "TopK": Kernel("aten.topk", _bind_top_k, workspace=_sorted_bytes),
    "CumSum": Kernel("aten.cumsum", _bind_cumsum, workspace=_cumsum_bytes),
}  # fmt: skip
