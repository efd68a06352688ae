"""Inputs of an op that its gradient goes on to: torch's autograd is asked, without data.

Schemas do not say it: `nll_loss` has a gradient by its input and none by its class weights,
`zeros_like` none at all, `copy_` one of zeros by what it overwrites.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch

from onward.capture.trace.aliasing import hollow, on_meta_device

# what they return does not depend on what they are given, or autograd does not record it
_CUT = (
    "linspace", "logspace", "detach", "zeros_like", "ones_like", "full_like", "empty_like",
    "rand_like", "randn_like", "randint_like", "new_zeros", "new_ones", "new_full", "new_empty",
    "new_empty_strided",
)  # fmt: skip
_FIRST_ONLY = ("expand_as", "view_as", "reshape_as", "type_as")


class Edges(NamedTuple):
    """Numbers of inputs (`node.all_input_nodes`): by each result, and by each input that the op
    writes into, which then holds what has these gradients."""

    results: tuple[frozenset[int], ...]
    written: dict[int, frozenset[int]]


class GradientEdges:
    """The edges of one program's ops; an op is asked once for tensors of the same types."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Edges | None] = {}

    def of_result(self, node: Any, number: int | None) -> list[Any]:
        """Inputs that have a gradient by the op's result of this number; None: by any result."""
        inputs, edges = list(node.all_input_nodes), self._edges(node)
        if edges is None:
            return _by_name(node, inputs)
        results = edges.results if number is None else edges.results[number : number + 1]
        return [inputs[i] for i in sorted(frozenset[int]().union(*results))]

    def of_written(self, node: Any, written: Any) -> list[Any]:
        """Inputs that have a gradient by what stands in one of them, `written`, after the op."""
        inputs, edges = list(node.all_input_nodes), self._edges(node)
        if edges is None:
            return _by_name(node, inputs)
        return [inputs[i] for i in sorted(edges.written.get(inputs.index(written), ()))]

    def _edges(self, node: Any) -> Edges | None:
        """The edges of an op; None where torch has no form of it for tensors without data, or one
        that has other gradients."""
        if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace == "onward":
            return None
        if _stem(node) in _CUT:
            return None
        key = _spelling(node)
        if key not in self._known:
            self._known[key] = _asked(node)
        return self._known[key]


def carries(value: Any) -> bool:
    """Whether a tensor is of a type that has gradients."""
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _spelling(node: Any) -> Hashable:
    """The op with what it is given, up to the names of nodes."""
    numbers = {n: f"%{i}" for i, n in enumerate(node.all_input_nodes)}
    args, kwargs = cast("Any", torch.fx.map_arg((node.args, node.kwargs), numbers.__getitem__))
    types = [_type(hollow(n.meta.get("val"))) for n in numbers]
    return node.target, repr((args, kwargs)), repr(types)


def _type(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.stride()
    return [_type(v) for v in value] if isinstance(value, (list, tuple)) else value


def _asked(node: Any) -> Edges | None:
    leaves: dict[Any, int] = {}

    def differentiable(value: Any, number: int) -> Any:
        if isinstance(value, (list, tuple)):
            return [differentiable(v, number) for v in value]
        if not carries(value):
            return value
        leaf = value.requires_grad_()
        leaves[leaf] = number
        return leaf.clone()  # a leaf is written into by nobody

    draws = torch.Tag.nondeterministic_seeded in node.target.tags
    with torch.enable_grad(), torch.random.fork_rng(devices=[], enabled=draws):
        inputs = list(node.all_input_nodes)
        given = {n: differentiable(hollow(n.meta.get("val")), i) for i, n in enumerate(inputs)}
        args, kwargs = cast("Any", torch.fx.map_arg((node.args, node.kwargs), given.__getitem__))
        try:
            made = node.target(
                *map(on_meta_device, args), **{k: on_meta_device(a) for k, a in kwargs.items()}
            )
        except Exception:
            return None
    results = made if isinstance(made, (list, tuple)) else [made]
    written = {
        i: _behind([t], leaves) for i, t in enumerate(given.values()) if isinstance(t, torch.Tensor)
    }
    return Edges(tuple(_behind([y], leaves) for y in results), written)


def _behind(tensors: Sequence[Any], leaves: dict[Any, int]) -> frozenset[int]:
    """The numbers of the leaves that autograd reaches from these tensors."""
    return frozenset(leaves[leaf] for t in _tensors(tensors) for leaf in _leaves_of(t.grad_fn))


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _leaves_of(end: Any) -> set[Any]:
    seen: set[Any] = set()
    stack = [end]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack += [before for before, _ in node.next_functions]
    return {node.variable for node in seen if hasattr(node, "variable")}


def _by_name(node: Any, inputs: list[Any]) -> list[Any]:
    """The inputs that have a gradient, by the op's name alone: all, but for ops that are known."""
    if _name(node) == "onward::with_gradient":
        return list(node.args[3])
    stem = _stem(node)
    if stem in _CUT:
        return []
    return inputs[:1] if stem in _FIRST_ONLY else inputs


def _name(node: Any) -> str:
    target = node.target
    return target._schema.name if isinstance(target, torch._ops.OpOverload) else ""


def _stem(node: Any) -> str:
    """The name of an op without its namespace, in the form that does not write in place."""
    return _name(node).partition("::")[2].removesuffix("_")


__all__ = ["GradientEdges", "carries"]
