"""The law of mixed precision: as near to an fp64 run as `torch.autocast` is.

Per tensor, as a root mean square over batches, at most 1.25 times its distance. That of a few
numbers, such as the loss, is a draw of noise on so few batches: they may be off by twice that and a
quarter of a unit of bf16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from tiny_families import rms

ROOM, FEW = 1.25, 16
Found = Sequence[Mapping[str, torch.Tensor]]


def assert_as_near(exact: Found, theirs: Found, ours: Found) -> None:
    """Tensors by name, of each batch."""
    broken = []
    for name in exact[0]:
        truth = [e[name].double() for e in exact]
        own, other = (
            rms([float((y[name].double() - t).norm()) for y, t in zip(found, truth, strict=True)])
            for found in (ours, theirs)
        )
        size = rms([float(t.norm()) for t in truth])
        few = truth[0].numel() < FEW
        allowed = (2 if few else ROOM) * other + (2.0**-11 if few else 1e-7) * size
        if not own <= allowed:
            broken.append(f"{name}: {own:.3e}, allowed {allowed:.3e}")
    assert not broken, "\n".join(broken)
