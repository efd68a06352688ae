"""Presumptions about attention masks (`attention_forms.Shown`) as JSON: the batch's leaves, and the
listed operators that compute a mask from them."""

from __future__ import annotations

from typing import Any

import torch

from onward.capture.batch_guards.attention_forms import Shown
from onward.capture.translate.batch_program import KnownInputs
from onward.graph.archive import ArchiveError

# operators without side effects that may compute an attention mask
_OPERATORS = {
    "_to_copy.default", "bitwise_and.Tensor", "bitwise_not.default", "bitwise_or.Tensor",
    "eq.Scalar", "eq.Tensor", "expand.default", "ge.Scalar", "gt.Scalar", "le.Scalar",
    "logical_and.default", "logical_not.default", "logical_or.default", "lt.Scalar",
    "masked_fill.Scalar", "mul.Scalar", "mul.Tensor", "ne.Scalar", "ne.Tensor", "reshape.default",
    "rsub.Scalar", "select.int", "slice.Tensor", "squeeze.dim", "sub.Tensor", "to.device",
    "to.dtype", "transpose.int", "unsqueeze.default", "view.default", "where.self",
}  # fmt: skip
_PLAIN = (bool, int, float, str, type(None))
_DTYPES = {
    str(d): d for d in (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16,
                        torch.bfloat16, torch.float32, torch.float64)
}  # fmt: skip


def written_shown(fact: object) -> list[object]:
    """Returns a presumption about an attention mask as `[steps, index of the mask among the steps,
    first, added]`.

    Raises ArchiveError for a presumption of another kind, or with other operators."""
    if type(fact) is not Shown:
        raise ArchiveError("the forward writes into the batch")
    numbers: dict[torch.fx.Node, int] = {}
    steps: list[object] = []
    for node in fact.steps:
        if fact.given.size(node) is not None:
            raise ArchiveError("a mask that sizes decide")
        if node.op == "placeholder" and node.name in fact.given.leaves:
            steps.append(fact.given.leaves[node.name])
        else:
            name = str(node.target).removeprefix("aten.")
            if node.op != "call_function" or _operator(name) is not node.target:
                raise ArchiveError(f"a mask that {node.target} makes")
            arguments = [_plain(x, numbers) for x in node.args]
            steps.append([name, arguments, {k: _plain(x, numbers) for k, x in node.kwargs.items()}])
        numbers[node] = len(numbers)
    return [steps, numbers[fact.mask], fact.first, fact.added]


def read_shown(said: list[Any]) -> Shown:
    """Returns the presumption that `written_shown` has written. Raises ArchiveError for an operator
    that is not listed."""
    steps, mask, first, added = said
    graph, nodes, leaves = torch.fx.Graph(), list[torch.fx.Node](), dict[str, int]()
    for step in steps:
        if isinstance(step, int):
            nodes.append(graph.placeholder(f"leaves_{step}"))
            leaves[nodes[-1].name] = step
        else:
            name, arguments, named = step
            args = tuple(_value(x, nodes) for x in arguments)
            kwargs = {k: _value(x, nodes) for k, x in named.items()}
            nodes.append(graph.call_function(_operator(name), args, kwargs))
    return Shown(nodes[mask], tuple(nodes), KnownInputs.of_leaves(leaves), bool(first), bool(added))


def _operator(name: str) -> torch._ops.OpOverload:
    if name not in _OPERATORS:
        raise ArchiveError(f"a mask that {name} makes")
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


def _plain(x: object, numbers: dict[torch.fx.Node, int]) -> object:
    if isinstance(x, torch.fx.Node):
        return {"node": numbers[x]}
    if isinstance(x, (list, tuple)):
        return [_plain(y, numbers) for y in x]
    if isinstance(x, torch.dtype) and str(x) in _DTYPES:
        return {"dtype": str(x)}
    if isinstance(x, torch.device):
        return {"device": str(x)}
    if type(x) in _PLAIN:
        return x
    raise ArchiveError(f"a mask that {x!r} makes")


def _value(x: Any, nodes: list[torch.fx.Node]) -> Any:
    if isinstance(x, list):
        return [_value(y, nodes) for y in x]
    if not isinstance(x, dict):
        return x
    ((kind, value),) = x.items()
    if kind == "node":
        return nodes[value]
    return _DTYPES[value] if kind == "dtype" else torch.device(value)


__all__ = ["read_shown", "written_shown"]
