"""Prepared batch: all that one run needs, and what it was asked to compute."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from onward.execute import Executable, ExecutableHalves
from onward.graph.graph import Graph
from onward.graph.signature import Signature


@dataclass(frozen=True)
class OutputRequest:
    """What a run is to compute: results of the model by name, and what it does besides
    (`Signature.requested`)."""

    results: tuple[str, ...]
    update: bool | None = None

    def outputs(self, graph: Graph) -> list[str]:
        """The graph's names of them."""
        return graph.signature.requested(self.results, self.update)


# what runs a plan: a whole step, or its halves
Bound = TypeVar("Bound", Executable, ExecutableHalves)


@dataclass(frozen=True)
class PreparedBatch(Generic[Bound]):
    """An executable, and the sizes and tensors with which it runs a batch.

    share: of the arithmetic on every row, what is done. counts: of the rows that are read, by set.
    """

    executable: Bound
    dims: dict[str, int]
    inputs: dict[str, torch.Tensor]
    share: float = 1.0
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def signature(self) -> Signature:
        return self.executable.plan.signature

    @property
    def rows(self) -> dict[str, Any]:
        """For reports."""
        return {"arithmetic_done": self.share, "counts": dict(self.counts)}

    @property
    def loss(self) -> torch.Tensor:
        """A copy of what is minimised, whatever results of the model are called."""
        assert self.signature.loss is not None, "a step has a loss"
        return self.executable.output(self.signature.loss)

    def output(self, name: str) -> torch.Tensor:
        """A copy of a result by the user's name; `loss` is the loss where the model has no result
        of that name."""
        found = self.signature.results.get(name)
        assert found is not None or name == "loss", f"nothing is called {name}"
        return self.loss if found is None else self.executable.output(found)


def scalars(signature: Signature, seed: torch.Tensor, offset: int, weight: float) -> dict[str, Any]:
    """Inputs by name: the words `i64[2]` of the seed, the first sample's number in the window, and
    the weight of each output that is differentiated."""
    given: dict[str, Any] = dict.fromkeys(signature.cotangents.values(), weight)
    drawn = ((signature.seed, seed), (signature.sample_offset, offset))
    return given | {name: value for name, value in drawn if name is not None}
