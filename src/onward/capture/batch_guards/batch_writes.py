"""Writes into a batch's tensors: a forward may make them where they change nothing.

Eager PyTorch leaves the user's tensor changed; a step leaves a batch as it is. `positions.clamp_()`
of positions within the limits changes none, which is checked on every batch by what the forward
computes of the batch alone. Another batch is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onward.capture.translate.batch_program import KnownInputs
from onward.capture.translate.translator import module_path
from onward.errors import CaptureError


@dataclass(frozen=True)
class Unchanged:
    """A leaf of the batch holds, before the forward, what `steps` write into it."""

    leaf: Any
    steps: tuple[Any, ...]
    given: KnownInputs

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        found: dict[Any, Any] = {}
        with torch.no_grad():
            for node in self.steps:
                found[node] = self.given.value(node, tensors, found)
        return torch.equal(found[self.leaf], tensors[self.given.leaves[self.leaf.name]])


def require_unchanged(
    program: Any,
    batch: Mapping[Any, Sequence[Any]],
    tensors: Sequence[torch.Tensor],
    names: Sequence[str],
) -> list[Unchanged]:
    """Raises CaptureError where a batch's tensor holds other numbers after the forward than before,
    or where more than the batch decides that. batch: a leaf's node -> those that write into it;
    tensors, names: of the leaves."""
    given, found = KnownInputs(program), []
    for leaf, writers in batch.items():
        if not writers:
            continue
        steps = given.steps(writers[-1])
        if steps is not None:
            found.append(Unchanged(leaf, steps, given))
        if steps is None or not found[-1].holds(tensors):
            op, path = str(writers[-1].target).removeprefix("aten."), module_path(writers[-1])
            name = names[given.leaves[leaf.name]]
            raise CaptureError(
                f"{op} at {path} writes in place into the batch's {name}, which a compiled "
                "step leaves unchanged; fix: use the op that returns a new tensor"
            )
    return found


__all__ = ["Unchanged", "require_unchanged"]
