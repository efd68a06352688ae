"""Writes in place into a batch's tensors, which are allowed where they change no numbers.

Eager PyTorch would leave the user's tensor changed; a step does not. `positions.clamp_()` changes
nothing if the positions are within limits, which is checked on every batch by evaluating the nodes
that compute the written numbers. A batch that would change is refused.
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
    """The presumption that a leaf of the batch already holds what the forward writes into it.

    leaf: its placeholder. steps: the nodes that compute the numbers, from what is `given`, the
    batch."""

    leaf: Any
    steps: tuple[Any, ...]
    given: KnownInputs

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Returns whether a batch's tensors fulfil the presumption."""
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
    """Returns the presumptions about the leaves that the forward writes into. Raises CaptureError
    where it changes the first batch's numbers, or where more than the batch decides them. batch:
    leaf's placeholder -> nodes that write into it. tensors, names: the leaves' of the first batch.
    """
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
