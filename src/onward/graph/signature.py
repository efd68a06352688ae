"""Signature: the meaning of a graph's inputs and outputs to the stages that follow.

A name exists so that a graph can be saved, printed and read; it says nothing to a program. What an
input is for, and which output is the next value of which input, stands here, by typed keys, and no
stage takes a name apart. So a parameter may have any name, that of another's state too.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True, order=True)
class Hyperparameter:
    """A scalar that a schedule may move: `lr` of an optimizer's param_group."""

    group: int
    name: str


@dataclass(frozen=True, order=True)
class Slot:
    """A state tensor that an optimizer keeps for a parameter: `exp_avg` of a graph input."""

    parameter: str
    name: str


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs of a graph by what they mean; every value is a name in the graph.

    Inputs. seed: i64[2], two words of 32 bits, of the step's generator. sample_offset: i64[], the
    first sample's number in the accumulation window. rows: the numbers `i64[R]` of the rows that
    are read, by the name of R. cotangents: the weight of an output in the gradients, by output.
    hyperparameters: f64[]. clocks: i64[], the number of the update, by clock (parameters that have
    always moved together share one). slots: optimizer state. accumulators: sums of gradients, by
    parameter. loss_scale: f32[], what the cotangents are multiplied by and gradients divided by.
    growth_tracker: i64[], updates in a row that the scale has stayed as it is.

    Outputs. loss: f[]. results: the model's own, by the user's name. gradients: by input. parts:
    by its place in the model, what a part that runs in PyTorch returns and no loss reads: its code
    runs in every call all the same.
    grad_norm: f[], of all gradients before clipping. finite: b[], whether all gradients are; where
    it is false nothing that outlives the step may be written.

    Both. updated, accumulated: the output that is the next value of an input: of parameters and
    slots, and of accumulators. written: the same of buffers that the forward writes, such as
    running statistics. rescaled: the same of the loss scale and its tracker, which move whether
    gradients are finite or not: whoever runs the graph hands them on to the next run.

    split_halves: whether what the model's own outputs need runs first, by itself, and the gradients
    later, for cotangents that nobody knows before.
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
    loss: str | None = None
    results: dict[str, str] = field(default_factory=dict)
    gradients: dict[str, str] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    grad_norm: str | None = None
    finite: str | None = None
    updated: dict[str, str] = field(default_factory=dict)
    accumulated: dict[str, str] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)
    rescaled: dict[str, str] = field(default_factory=dict)
    split_halves: bool = False

    @property
    def differentiated_outputs(self) -> list[str]:
        """The outputs that a step differentiates: the loss. Raises ValueError without one."""
        if self.loss is None:
            raise ValueError("a forward without a loss has no gradients")
        return [self.loss]

    def but(self, **entries: Any) -> Signature:
        """A signature with other entries: a single name in the place of one, a mapping added to
        what there is."""
        merged = {
            name: {**getattr(self, name), **value} if isinstance(value, dict) else value
            for name, value in entries.items()
        }
        return replace(self, **merged)

    def within(self, inputs: Collection[str], outputs: Collection[str]) -> Signature:
        """The part of a signature that concerns these inputs and outputs."""
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
        """The outputs of a run: the loss, results of these names, and what it does besides: next
        values of buffers that the forward writes, parts that run in PyTorch, and the update of
        parameters and state; where `update` is false the sums of gradients instead, where it is
        None neither."""
        names = [] if self.loss is None else [self.loss]
        names += [self.results[name] for name in results if name in self.results]
        names += [*self.written.values(), *self.parts.values()]
        if update:
            names += [*self.updated.values(), *(n for n in (self.grad_norm, self.finite) if n)]
            names += self.rescaled.values()
        elif update is False:
            names += self.accumulated.values()
        return names


_OUTPUTS = frozenset({
    "loss", "results", "gradients", "parts", "grad_norm", "finite", "updated", "accumulated",
    "written", "rescaled",
})  # fmt: skip

__all__ = ["Hyperparameter", "Signature", "Slot"]
