"""Prepared batch: an executable with its inputs, and the request that it serves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from onward.execute import Executable, ExecutableHalves
from onward.graph.graph import Graph
from onward.graph.signature import Signature


@dataclass(frozen=True)
class OutputRequest:
    """The outputs that a run computes: results of the model by name, and whether it updates
    (`Signature.requested`)."""

    results: tuple[str, ...]
    update: bool | None = None

    def outputs(self, graph: Graph) -> list[str]:
        """The names of the requested outputs in a graph."""
        return graph.signature.requested(self.results, self.update)


# what runs a plan: a whole step, or its halves
Bound = TypeVar("Bound", Executable, ExecutableHalves)


@dataclass(frozen=True)
class PreparedBatch(Generic[Bound]):
    """An executable, and the sizes and tensors with which it runs a batch.

    share: the FLOPs done as a share of those for all rows. counts: the rows computed, by set of
    rows.
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
        """The share of the arithmetic and the row counts, for reports."""
        return {"arithmetic_done": self.share, "counts": dict(self.counts)}

    @property
    def loss(self) -> torch.Tensor:
        """A copy of the loss, even where the model has a result called `loss`."""
        assert self.signature.loss is not None, "a step has a loss"
        return self.executable.output(self.signature.loss)

    @property
    def losses(self) -> dict[str, torch.Tensor]:
        """Copies of the losses that the loss is a weighted sum of, by the user's names."""
        output = self.executable.output
        return {name: output(found) for name, found in self.signature.losses.items()}

    def output(self, name: str) -> torch.Tensor:
        """A copy of a result by the user's name; `loss` is the training loss unless the model has a
        result of that name."""
        found = self.signature.results.get(name)
        assert found is not None or name == "loss", f"nothing is called {name}"
        return self.loss if found is None else self.executable.output(found)


def scalars(signature: Signature, seed: torch.Tensor, offset: int, weight: float) -> dict[str, Any]:
    """The scalar inputs of a run, by graph input: the seed `i64[2]`, the number of the batch's
    first sample within the window, and the cotangent of each differentiated output (`weight`)."""
    given: dict[str, Any] = dict.fromkeys(signature.cotangents.values(), weight)
    drawn = ((signature.seed, seed), (signature.sample_offset, offset))
    return given | {name: value for name, value in drawn if name is not None}
