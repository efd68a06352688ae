"""Tables of tensors that one launch reads (`multi_tensor_device.py`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

SIZE = 4096  # elements of a block
ALIGNMENT = 16  # bytes


def tables(
    calls: Sequence[Sequence[torch.Tensor | None]],
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Returns a table i64[n,C] and its blocks i32[P,2] for calls on tensors of equally many
    elements, and whether all addresses are multiples of 16 bytes. An absent tensor's address is
    0."""
    rows: list[list[int]] = []
    counts: list[int] = []
    for call in calls:
        addresses = [0 if x is None else x.data_ptr() for x in call]
        count = next(x.numel() for x in call if x is not None)
        rows.append([*addresses, count])
        counts.append(-(-count // SIZE))
    device = next(x.device for call in calls for x in call if x is not None)
    of_call = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))  # i64[P]
    ends = torch.tensor(counts).cumsum(0)  # i64[n]
    block = torch.arange(len(of_call)) - (ends - torch.tensor(counts))[of_call]
    blocks = torch.stack([of_call, block], 1).to(torch.int32)
    aligned = not any(address % ALIGNMENT for row in rows for address in row[:-1])
    return torch.tensor(rows, dtype=torch.int64).to(device), blocks.to(device), aligned
