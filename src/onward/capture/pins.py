"""Choices of the forward by the batch's numbers: `if mask.any():`, pinned in a capture.

A graph has one of both sides. The first run, in eager mode, says which; the export takes the same
side, and what was asked (a tensor of one bool) is computed again from every later batch. A batch
that answers otherwise gets a capture of its own. Questions that parameters or random numbers decide
are refused: their answers change from step to step.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.overrides import TorchFunctionMode

from onward.capture.attention_forms import Given
from onward.config import CaptureError

_MOST = 64  # questions of one forward
_FRAMES = 4  # innermost ones that say where a question comes from

Answer: TypeAlias = tuple[Any, bool]  # where it was asked, and what was said

_RANDOM = ("rand", "rand_like", "bernoulli")
_LESS = ("lt.Scalar", "less.Scalar")


class Unasked(CaptureError):
    """A question that the run before did not hear."""


class Asked(TorchFunctionMode):
    """Within it, answers to `bool(tensor)`, and to `torch.equal`, are those given, in order; or,
    without any, the tensor's own, and noted.

    A forward may ask more in eager mode than while it is traced: an answer is for the next question
    from its own place.

    questions: the tensors that were asked. answers: what was said.
    """

    def __init__(self, answers: Sequence[Answer] | None = None) -> None:
        super().__init__()
        self.given = None if answers is None else iter(answers)
        self.questions: list[torch.Tensor] = []
        self.answers: list[Answer] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.equal, torch.Tensor.equal):
            one, other = args
            if one.shape != other.shape:
                return False
            return self._answer((one == other).all())
        if func is not torch.Tensor.__bool__:
            return func(*args, **(kwargs or {}))
        return self._answer(args[0])

    def _answer(self, question: torch.Tensor) -> bool:
        place = _place()
        if self.given is None:
            answer = bool(question)
        else:
            said = next((a for where, a in self.given if where == place), None)
            if said is None:
                raise Unasked("the forward asks a tensor")
            answer = said
        if len(self.answers) >= _MOST:
            raise CaptureError(
                f"the forward asks more than {_MOST} tensors for their truth, such as in a loop; "
                "fix: compute with the tensors instead of choosing by them"
            )
        self.answers.append((place, answer))
        # of its own, since what is written later is no matter of this question
        self.questions.append(question.detach().clone())
        return answer


def _place() -> Any:
    """Where in the forward the question is asked."""
    frame, found = sys._getframe(3), []
    while frame is not None and len(found) < _FRAMES:
        found.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


@dataclass(frozen=True)
class Pinned:
    """One question, as a program over the batch's leaves, and the answer of the capture."""

    question: torch.fx.GraphModule
    answer: bool

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        with torch.no_grad():
            return bool(self.question(*[t.detach() for t in tensors])) is self.answer


def take(program: Any, answers: Sequence[bool], tensors: Sequence[torch.Tensor]) -> list[Pinned]:
    """Takes the questions, which are the program's last outputs, out of it. answers: what they were
    answered. tensors: the first batch's leaves.

    Raises CaptureError for one that does not follow from the batch, or that the trace has mistaken
    for another.
    """
    output = next(n for n in program.graph.nodes if n.op == "output")
    results = output.args[0]
    first = len(results) - len(answers)
    kept, asked = results[:first], results[first:]
    given = Given(program)
    found = [
        Pinned(_question(node, given, len(tensors)), answer)
        for node, answer in zip(asked, answers, strict=True)
        if not _never(node, answer)
    ]
    if not all(pinned.holds(tensors) for pinned in found):
        raise CaptureError(
            "data-dependent control flow: the forward asks other tensors while it is traced; fix: "
            "compute both sides and choose with torch.where"
        )
    output.args = (tuple(kept),)
    return found


def _question(node: Any, given: Given, leaves: int) -> torch.fx.GraphModule:
    steps = given.steps(node)
    if steps is None:
        where = list((node.meta.get("nn_module_stack") or {}).values())
        path = (where[-1][0] if where else "").replace("L['self'].model", "model")
        raise CaptureError(
            f"data-dependent control flow at {path or 'the top'}: an `if` (or `while`, `assert`) "
            "on a tensor that parameters or random numbers decide, which a graph has no place for; "
            "fix: compute both sides and choose with torch.where"
        )
    graph = torch.fx.Graph()
    places = [graph.placeholder(f"leaf_{i}") for i in range(leaves)]
    held: dict[Any, Any] = {}
    constants = torch.nn.Module()
    for step in steps:
        size, leaf = given.size(step), given.leaves.get(step.name)
        if size is not None:
            held[step] = graph.call_function(
                torch.ops.aten.sym_size.int, (places[size[0]], size[1])
            )
        elif leaf is not None:
            held[step] = places[leaf]
        elif step.name in given.constants:
            constants.register_buffer(step.name, given.constants[step.name], persistent=False)
            held[step] = graph.get_attr(step.name)
        elif step.op == "get_attr":  # a region
            constants.add_module(step.target, getattr(step.graph.owning_module, step.target))
            held[step] = graph.get_attr(step.target)
        else:
            held[step] = graph.node_copy(step, held.__getitem__)
    graph.output(held[node])
    return torch.fx.GraphModule(constants, graph)


def _never(node: Any, answer: bool) -> bool:
    """Whether it asks if a random number from 0 to 1 lies below 0 or less: layers are dropped with
    such a probability."""
    while node.op == "call_function" and _name(node) in ("detach.default", "clone.default"):
        node = node.args[0]
    if answer or node.op != "call_function" or _name(node) not in _LESS or node.args[1] > 0:
        return False
    number = node.args[0]
    return number.op == "call_function" and _name(number).partition(".")[0] in _RANDOM


def _name(node: Any) -> str:
    return str(node.target).removeprefix("aten.")


__all__ = ["Asked", "Pinned", "Unasked", "take"]
