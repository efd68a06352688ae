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

    A mapping has an entry for each parameter that it names, by graph input.
    """

    groups: tuple[UpdateGroup, ...] = ()
    """The parameters that are updated, and how; the loss depends on each of them."""
    max_grad_norm: float | None = None
    """The 2-norm that all gradients as one vector are clipped to; None: no clipping."""
    accumulate: bool = False
    """Whether several micro-batches make one update."""
    skip_nonfinite: bool = False
    """Whether an update is skipped if a gradient is infinite or NaN."""
    loss_scale: float | LossScale | None = None
    """The loss's factor in backward: a number, or the rule by which it moves, which needs
    `skip_nonfinite`; None: 1."""
    accumulator: DType | None = None
    """The type that sums of f32 gradients have between micro-batches; None: f32."""
    left_gradients: tuple[str, ...] = ()
    """Parameters whose gradients are left to an optimizer outside of the graph."""
    average: str = "micro_batches"
    """The loss of a window is the mean over its "labels" or of its "micro_batches"; "auto": over
    labels where the loss is such a mean."""
    max_grad_value: float | None = None
    """The bound of each element of a gradient, up and down; None: no clipping."""
    joint: bool = False
    """Whether several ranks share each batch, so that the step records what is summed over the
    samples of one rank (`Signature.local_gradients`)."""
    shards: Mapping[str, Shard] = field(default_factory=dict, hash=False)
    """The flat piece of each parameter that this rank updates (ZeRO)."""
    summed_parts: tuple[str, ...] = ()
    """Parameters of whose gradients each rank adds up a piece over a window (ZeRO 2 and 3), so that
    ranks exchange those of every micro-batch."""
    held: Mapping[str, Shard] = field(default_factory=dict, hash=False)
    """The flat piece that this rank has in the place of a parameter, trained or not (ZeRO 3)."""
    cuts: Mapping[str, tuple[int, int]] = field(default_factory=dict, hash=False)
    """The dim along which each rank of `tp` has a part of a parameter, and its number of groups."""
    adasum: bool = False
    """Whether a replica of the data takes the mean over its own labels, since replicas are combined
    by AdaSum."""
    pipeline: PipelineCut | None = None
    """The way in which ranks share the layers; None where they do not."""
    sequence: bool = False
    """Whether ranks along `tp` have parts of the positions too, between the cut products."""
    offloaded: bool = False
    """Whether the optimizer's state lies outside of the device's memory."""
    attention: str = "auto"
    """The method by which ranks along `cp` attend to the positions of others."""

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
