"""Signature: the meaning of a graph's inputs and outputs, for later stages.

Names serve files, printing and readers; programs do not interpret them. What an input is for, and
which output is its next value, is recorded here under typed keys. So a parameter may have any name,
even that of another parameter's state.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True, order=True)
class Hyperparameter:
    """A scalar that a schedule may change, such as `lr` of an optimizer's param_group."""

    group: int
    name: str


@dataclass(frozen=True, order=True)
class Slot:
    """A state tensor that an optimizer keeps for a parameter, such as `exp_avg`. parameter: a graph
    input."""

    parameter: str
    name: str


# What an accumulation window adds up. labels: counted so far, or the sum of their weights. divisor:
# of the window's loss, which is `labels` but for a lower bound. loss: the sum of the losses. unit:
# the first count above 0, by which sums are divided in backward, so that they are of a mean's size.
WINDOW: tuple[str, ...] = ("unit", "labels", "divisor", "loss")
# what a window adds up besides, where each replica of the data has a mean of its own
REPLICA: tuple[str, ...] = ("replica_labels", "replica_divisor")


@dataclass(frozen=True)
class Signature:
    """The inputs and outputs of a graph by meaning; every value below is a name in the graph.

    Inputs. seed: i64[2], two words of 32 bits. sample_offset: i64[], the number of the first sample
    in the accumulation window. rows: the row indices `i64[R]` of each set of rows, by the name of
    R. cotangents: the weight of an output in the gradients, by output. hyperparameters: f64[].
    clocks: i64[], the number of the update, by clock (parameters that have always moved together
    share one). slots: optimizer state. accumulators: sums of gradients, by parameter. loss_scale:
    f32[], a factor of the cotangents, by which gradients are divided. growth_tracker: i64[], the
    number of updates since the scale last changed. window: f64[], what an accumulation window whose
    loss is a mean over its labels has added up so far, by its name in `WINDOW` or `REPLICA`.
    window_scale:
    f64[], a factor of the accumulators, where no forward precedes the update.

    Outputs. loss: f[]. results: the model's own, by the user's name. losses: f[], those that the
    loss is a weighted sum of, by the user's name; they are results too. gradients: by input.
    left_gradients: those that a step leaves for an optimizer outside of the graph, by parameter; no
    other value shares their memory, so that the optimizer may write to them. parts:
    results of regions that no loss depends on, by the region's path; its code runs in every call
    all the same. grad_norm: f[], the norm of all gradients before clipping. finite: b[], whether
    all gradients are finite; if not, nothing that outlives the step may be written. divisor: f64[];
    the loss is a sum that is still to be divided by it (`differentiate/loss_sum.py`).
    local_gradients, by parameter, and local_sums, such as "labels" and "loss": Identities whose
    inputs are sums, or means, over the samples of one rank, and whose readers are to get those over
    the samples of all ranks; `distribute/data_parallel.py` writes the exchange in their place.
    sent: of sends to other ranks, by their numbers as text; they are no results, but have a run
    make them.

    Both. updated, accumulated: for an input, the output that is its next value: of parameters and
    slots, and of accumulators. written: the same for buffers that the forward writes, such as
    running statistics. rescaled: the same for the loss scale and its tracker; they change even if
    gradients are not finite, and the caller passes them to the next run. windowed: by the names of
    `WINDOW` and `REPLICA`, what the window has added up after this micro-batch, for the caller to
    pass on.

    split_halves: whether the model's own outputs are computed first, and gradients later, for
    cotangents that are unknown until then. offloaded: whether the tensors of `slots` lie outside of
    the device's memory, and are in it while a launch reads or writes them.
    """

    seed: str | None = None
    sample_offset: str | None = None
    rows: dict[str, str] = field(default_factory=dict)
    cotangents: dict[str, str] = field(default_factory=dict)
    hyperparameters: dict[Hyperparameter, str] = field(default_factory=dict)
    clocks: dict[int, str] = field(default_factory=dict)
    slots: dict[Slot, str] = field(default_factory=dict)
    accumulators: dict[str, str] = field(default_factory=dict)
    loss_scale: str | None = None
    growth_tracker: str | None = None
    window: dict[str, str] = field(default_factory=dict)
    window_scale: str | None = None
    loss: str | None = None
    results: dict[str, str] = field(default_factory=dict)
    losses: dict[str, str] = field(default_factory=dict)
    gradients: dict[str, str] = field(default_factory=dict)
    left_gradients: dict[str, str] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    grad_norm: str | None = None
    finite: str | None = None
    divisor: str | None = None
    local_gradients: dict[str, str] = field(default_factory=dict)
    local_sums: dict[str, str] = field(default_factory=dict)
    sent: dict[str, str] = field(default_factory=dict)
    updated: dict[str, str] = field(default_factory=dict)
    accumulated: dict[str, str] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)
    rescaled: dict[str, str] = field(default_factory=dict)
    windowed: dict[str, str] = field(default_factory=dict)
    split_halves: bool = False
    offloaded: bool = False

    @property
    def differentiated_outputs(self) -> list[str]:
        """The outputs that a step differentiates: the loss. Raises ValueError if there is none."""
        if self.loss is None:
            raise ValueError("a forward without a loss has no gradients")
        return [self.loss]

    def but(self, **entries: Any) -> Signature:
        """A copy with other entries: names are replaced, mappings are merged."""
        merged = {
            name: {**getattr(self, name), **value} if isinstance(value, dict) else value
            for name, value in entries.items()
        }
        return replace(self, **merged)

    def within(self, inputs: Collection[str], outputs: Collection[str]) -> Signature:
        """The part of the signature about these inputs and outputs."""
        kept: dict[str, Any] = {}
        for item in fields(self):
            held = getattr(self, item.name)
            there = outputs if item.name in _OUTPUTS else inputs
            if isinstance(held, bool):
                kept[item.name] = held
            elif isinstance(held, dict):
                kept[item.name] = {key: name for key, name in held.items() if name in there}
            else:
                kept[item.name] = held if held in there else None
        return Signature(**kept)

    def requested(self, results: Collection[str], update: bool | None) -> list[str]:
        """The outputs of a run: the loss, these results, and in any case the losses that it is a
        sum of, next values of buffers that the forward writes, results of regions, sends. update:
        True adds next parameters and state, or the gradients left in their place, False the sums of
        gradients, None neither. What a window adds up is always computed."""
        names = [] if self.loss is None else [self.loss]
        names += [self.results[name] for name in results if name in self.results]
        names += [name for name in self.losses.values() if name not in names]
        names += [*self.written.values(), *self.parts.values(), *self.sent.values()]
        if update:
            names += [*self.updated.values(), *(n for n in (self.grad_norm, self.finite) if n)]
            names += [*self.rescaled.values(), *self.left_gradients.values()]
        elif update is False:
            names += self.accumulated.values()
        return [*names, *self.windowed.values()]


_OUTPUTS = frozenset({
    "loss", "results", "losses", "gradients", "parts", "grad_norm", "finite", "updated",
    "accumulated", "written", "rescaled", "windowed", "divisor", "left_gradients",
    "local_gradients", "local_sums", "sent",
})  # fmt: skip

__all__ = ["REPLICA", "WINDOW", "Hyperparameter", "Signature", "Slot"]
