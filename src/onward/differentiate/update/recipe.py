"""Recipe: what a step does with its gradients, as an immutable value."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from onward.graph.ops.optimizers import Optimizer
from onward.graph.types import DType
from onward.options import LossScale
from onward.shards import PipelineCut, Shard


@dataclass(frozen=True)
class UpdateGroup:
    """Parameters that share an update rule and hyperparameters (a torch `param_group`).

    index: of the param_group. parameters: graph inputs. attributes: of the optimizer's op. slots:
    names of the state tensors of each parameter. clock: the count of updates; parameters that have
    always been updated together share one. form: of the state, a key of `Optimizer.forms` or "".
    maximize: whether the loss is to grow.
    """

    index: int
    parameters: tuple[str, ...]
    optimizer: Optimizer
    attributes: dict[str, Any] = field(hash=False)
    slots: tuple[str, ...] = ()
    clock: int = 0
    form: str = ""
    maximize: bool = False


@dataclass(frozen=True)
class Recipe:
    """How a step gets from its loss to the next weights.

    groups: what is updated, and how; the loss depends on each of their parameters. left_gradients:
    parameters whose gradients the step leaves to an optimizer outside of the graph. max_grad_norm:
    the 2-norm that all gradients as one vector are clipped to; None: no clipping. accumulate:
    whether several micro-batches make one update. accumulator: the type in which sums of f32
    gradients are kept between them; None: f32. skip_nonfinite: whether an update is skipped if a
    gradient is infinite or NaN. loss_scale: the loss's factor in backward, a number or the rule by
    which it moves, which needs `skip_nonfinite`; None: 1. average: the window's loss is the mean
    over its "labels" or of its "micro_batches"; "auto": over labels where the loss is such a mean.
    max_grad_value: the bound of each element of a gradient, up and down; None: no clipping. joint:
    whether several ranks share each batch, so that the step records what is summed over the samples
    of one rank (`Signature.local_gradients`). shards: by parameter, the part that this rank
    updates, where ranks update a part each. summed_parts: parameters of whose gradients each rank
    sums a part over a window, so that ranks exchange those of every micro-batch. held: by
    parameter, trained or not, the part that this rank has in the place of the whole. cuts: by
    parameter, the dim along which ranks have a part each, and the number of groups of it. adasum:
    whether the ranks of a replica of the data take the mean over its own labels, since replicas are
    combined adaptively. pipeline: how ranks share the layers; None where they do not. sequence:
    whether ranks with parts of weights also have parts of the positions between them. offloaded:
    whether the optimizer's state lies outside of the device's memory. attention: the method by
    which ranks with parts of sequences attend to the positions of others.
    """

    groups: tuple[UpdateGroup, ...] = ()
    max_grad_norm: float | None = None
    accumulate: bool = False
    skip_nonfinite: bool = False
    loss_scale: float | LossScale | None = None
    accumulator: DType | None = None
    left_gradients: tuple[str, ...] = ()
    average: str = "micro_batches"
    max_grad_value: float | None = None
    joint: bool = False
    shards: Mapping[str, Shard] = field(default_factory=dict, hash=False)
    summed_parts: tuple[str, ...] = ()
    held: Mapping[str, Shard] = field(default_factory=dict, hash=False)
    cuts: Mapping[str, tuple[int, int]] = field(default_factory=dict, hash=False)
    adasum: bool = False
    pipeline: PipelineCut | None = None
    sequence: bool = False
    offloaded: bool = False
    attention: str = "auto"

    @property
    def by_replica(self) -> bool:
        """Whether gradients are to be those of the mean over one replica's labels."""
        return self.joint and self.adasum

    @property
    def splits_positions(self) -> bool:
        """Whether ranks with parts of weights have parts of the positions between them."""
        return self.sequence and bool(self.cuts)

    @property
    def parameters(self) -> list[str]:
        """The graph inputs that are trained: group by group, then those of `left_gradients`."""
        updated = [name for group in self.groups for name in group.parameters]
        return [*updated, *self.left_gradients]

    def only(self, parameters: Collection[str]) -> Recipe:
        """The recipe for these of its parameters. A group that has none of them is still there, so
        that its settings are inputs of every rank's graph."""
        groups = [
            replace(group, parameters=tuple(n for n in group.parameters if n in parameters))
            for group in self.groups
        ]
        left = tuple(name for name in self.left_gradients if name in parameters)
        return replace(self, groups=tuple(groups), left_gradients=left)
