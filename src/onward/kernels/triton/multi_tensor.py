"""Tables of tensors that one launch reads (`multi_tensor_device.py`)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from onward.kernels.aten.product import in_order
from onward.kernels.kernel import KernelArguments, Launch

SIZE = 4096  # elements of a block
ALIGNMENT = 16  # bytes


def by_kind(
    calls: Sequence[KernelArguments],
    kind: Callable[[KernelArguments], Hashable],
    launch: Callable[[Sequence[KernelArguments]], Launch],
) -> Launch:
    """Binds calls of the same kind together, by `launch`, and all kinds as one launch."""
    groups: dict[Hashable, list[KernelArguments]] = {}
    for call in calls:
        groups.setdefault(kind(call), []).append(call)
    return in_order([launch(group) for group in groups.values()])


def tables(
    calls: Sequence[Sequence[torch.Tensor | int | None]], size: int = SIZE
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Returns the table of addresses i64[n,C] and the list of blocks i32[P,2] of a multi-tensor
    kernel, and whether all addresses are multiples of 16 bytes. A call's elements are those of its
    first tensor. An absent tensor has the address 0; numbers are in the table by value. size:
    elements of a block."""
    rows: list[list[int]] = []
    counts: list[int] = []
    tensors = [[x for x in call if isinstance(x, torch.Tensor)] for call in calls]
    for call, own in zip(calls, tensors, strict=True):
        cells = [x.data_ptr() if isinstance(x, torch.Tensor) else x or 0 for x in call]
        count = own[0].numel()
        rows.append([*cells, count])
        counts.append(-(-count // size))
    device = tensors[0][0].device
    of_call = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))  # i64[P]
    ends = torch.tensor(counts).cumsum(0)  # i64[n]
    block = torch.arange(len(of_call)) - (ends - torch.tensor(counts))[of_call]
    blocks = torch.stack([of_call, block], 1).to(torch.int32)
    aligned = not any(x.data_ptr() % ALIGNMENT for own in tensors for x in own)
    return torch.tensor(rows, dtype=torch.int64).to(device), blocks.to(device), aligned
