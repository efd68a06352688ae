"""Pins the answers to data branches (`if mask.any():`) that a capture was made with.

Each question of the forward (`trace/data_branches.py`) becomes a program over the batch's leaves,
which runs on every later batch. A batch with another answer gets a capture of its own. A question
that parameters or random numbers decide is refused, since its answer changes from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from onward.capture.trace.aliasing import mutates
from onward.capture.trace.data_branches import said
from onward.capture.trace.refusals import layer_drop
from onward.capture.translate.batch_program import KnownInputs, place, placed
from onward.errors import CaptureError

_RANDOM = ("rand", "rand_like", "bernoulli")
_LESS = ("lt.Scalar", "less.Scalar")
_COMPARES = (*_LESS, "le.Scalar", "gt.Scalar", "ge.Scalar")


@dataclass(frozen=True)
class Pinned:
    """The presumption that `question`, a program over the batch's leaves, gives `answer`."""

    question: torch.fx.GraphModule
    answer: Any
    # by the batch's device
    _placed: dict[Any, torch.fx.GraphModule] = field(
        default_factory=dict[Any, torch.fx.GraphModule], compare=False, repr=False
    )

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Returns whether a batch's tensors give the answer."""
        device = place(tensors)
        if device not in self._placed:
            self._placed[device] = placed(self.question, device)
        with torch.no_grad():
            made = self._placed[device](*[t.detach() for t in tensors])
        return bool(said(made, type(self.answer)) == self.answer)


def take(
    program: Any, answers: Sequence[Any], tensors: Sequence[torch.Tensor], model: torch.nn.Module
) -> list[Pinned]:
    """Removes the questions, the program's last outputs, and returns them with their answers.

    answers: those of the traced run, in order. tensors: the first batch's leaves. model: the module
    whose forward asks. Raises CaptureError for a question that the batch does not decide, or where
    the trace asked other questions than the first run.
    """
    output = next(n for n in program.graph.nodes if n.op == "output")
    results = output.args[0]
    first = len(results) - len(answers)
    kept, asked = results[:first], results[first:]
    given = KnownInputs(program)
    found = [
        Pinned(_question(node, given, len(tensors), model), answer)
        for node, answer in zip(asked, answers, strict=True)
        if not _never(node, answer)
    ]
    if not all(pinned.holds(tensors) for pinned in found):
        raise CaptureError(
            "data-dependent control flow: the forward branches on other tensors in a trace than in "
            "eager mode; fix: compute both sides and choose with torch.where"
        )
    output.args = (tuple(kept),)
    return found


def _undecided(node: Any, model: torch.nn.Module) -> CaptureError:
    """Returns the error for a question that the batch does not decide."""
    where = list((node.meta.get("nn_module_stack") or {}).values())
    path = (where[-1][0] if where else "").replace("L['self'].model", "model")
    place = path.removeprefix("model").removeprefix(".")
    asked = _bare(node)
    error = layer_drop(model, place, asked.args[1]) if _name(asked) in _COMPARES else None
    if error is None:
        error = CaptureError(
            f"data-dependent control flow at {path or 'the top'}: an `if` (or `while`, `assert`) "
            "on a tensor that parameters or random numbers decide, which a graph has no place for; "
            "fix: compute both sides and choose with torch.where"
        )
    error.places = (place,)
    return error


def _question(
    node: Any, given: KnownInputs, leaves: int, model: torch.nn.Module
) -> torch.fx.GraphModule:
    steps = given.steps(node)
    if steps is None:
        raise _undecided(node, model)
    graph = torch.fx.Graph()
    places = [graph.placeholder(f"leaf_{i}") for i in range(leaves)]
    held: dict[Any, Any] = {}
    constants = torch.nn.Module()
    writes = any(mutates(step.target) for step in steps)
    for step in steps:
        size, leaf = given.size(step), given.leaves.get(step.name)
        if size is not None:
            held[step] = graph.call_function(size, tuple(places))
        elif leaf is not None:
            held[step] = places[leaf]
            if writes:  # not into leaves, but `leaf.contiguous()` may be the leaf itself
                held[step] = graph.call_function(torch.ops.aten.clone.default, (places[leaf],))
        elif step.name in given.constants:
            constants.register_buffer(step.name, given.constants[step.name], persistent=False)
            held[step] = graph.get_attr(step.name)
        elif step.op == "get_attr":  # the body of a gradient-mode region
            constants.add_module(step.target, getattr(step.graph.owning_module, step.target))
            held[step] = graph.get_attr(step.target)
        else:
            held[step] = graph.node_copy(step, held.__getitem__)
    graph.output(held[node])
    return torch.fx.GraphModule(constants, graph)


def _never(node: Any, answer: Any) -> bool:
    """Returns whether a question asks if a random number in [0, 1) is below a threshold <= 0, which
    it never is: layer drop with probability 0 asks so."""
    node = _bare(node)
    if answer or node.op != "call_function" or _name(node) not in _LESS or node.args[1] > 0:
        return False
    number = node.args[0]
    return number.op == "call_function" and _name(number).partition(".")[0] in _RANDOM


def _bare(node: Any) -> Any:
    """Returns the node that a chain of detach and clone starts from."""
    while node.op == "call_function" and _name(node) in ("detach.default", "clone.default"):
        node = node.args[0]
    return node


def _name(node: Any) -> str:
    return str(node.target).removeprefix("aten.")


__all__ = ["Pinned", "take"]
