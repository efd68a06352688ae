"""The law of mixed precision: as near an fp64 run of eager PyTorch as `torch.autocast`.

Per tensor, the distance of loss and gradients to an fp64 run is at most 1.25 times that of
autocast, as a root mean square over the batches. The distance of a few numbers, such as the loss,
is a draw of noise on so few batches: they may be off by twice that and an eighth of a rounding of
the low type.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from tiny import Tensors, eager
from tiny_families import rms

ROOM, FEW = 1.25, 16
Found = Sequence[Mapping[str, torch.Tensor]]
ZERO = 1e-12  # of all gradients: what fp64 leaves of terms that cancel


def autocast(
    model: torch.nn.Module, data: Tensors, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0
) -> Tensors:
    """Loss and gradients of eager PyTorch under autocast. scale: multiplies the loss for backward,
    as a GradScaler does."""
    twin = copy.deepcopy(model)
    with torch.autocast("cpu", dtype):
        outputs = twin(**data)
    loss = outputs if isinstance(outputs, torch.Tensor) else outputs.loss
    (loss.float() * scale).backward()
    found = {f"grad.{n}": p.grad / scale for n, p in twin.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


def assert_near(
    model: torch.nn.Module,
    batches: list[Tensors],
    ours: list[Tensors],
    dtype: torch.dtype = torch.bfloat16,
    room: float = ROOM,
) -> None:
    """Assert the law for these results, one for each batch."""
    exact = [eager(model, data, torch.float64) for data in batches]
    assert_as_near(exact, [autocast(model, data, dtype) for data in batches], ours, dtype, room)


def assert_as_near(
    exact: Found,
    theirs: Found,
    ours: Found,
    dtype: torch.dtype = torch.bfloat16,
    room: float = ROOM,
    mean: Callable[[list[float]], float] = rms,
    few: int = FEW,
) -> None:
    """Assert the law for tensors by name, of each batch. mean: over batches; few: the element count
    below which a tensor is small."""
    broken = []
    for name in exact[0]:
        truth = [e[name].double() for e in exact]
        own, other = (
            mean([float((y[name].double() - t).norm()) for y, t in zip(found, truth, strict=True)])
            for found in (ours, theirs)
        )
        size = mean([float(t.norm()) for t in truth])
        whole = mean([math.hypot(*(float(t.norm()) for t in e.values())) for e in exact])
        small = truth[0].numel() < few
        allowed = (2 if small else room) * other + (
            torch.finfo(dtype).eps / 16 if small else 1e-7
        ) * size
        if size <= ZERO * whole:  # by construction: noise in any engine, of the terms that cancel
            allowed = max(allowed, torch.finfo(dtype).eps / 2 * whole)
        if not own <= allowed:
            broken.append(f"{name}: {own:.3e}, allowed {allowed:.3e}")
    assert not broken, "\n".join(broken)


def shuffled(data: Tensors, seed: int) -> Tensors:
    """The batch with other tokens; padding and the tokens that mark it stay."""
    ids = data.get("input_ids")
    if ids is None or not seed:
        return data
    turned = (ids - 3 + 7 * seed) % 90 + 3
    return {**data, "input_ids": torch.where(ids < 3, ids, turned)}
