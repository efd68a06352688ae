"""Finds to which of an op's inputs autograd passes a gradient, by running it on meta tensors.

Schemas do not say: in `nll_loss` the input gets one and the class weights none, in `zeros_like` no
input does, and in `copy_` the tensor that it overwrites gets a gradient of zeros.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch

from onward.capture.trace.aliasing import hollow, on_meta_device

# ops whose result does not depend on their inputs, or that autograd does not record
_CUT = (
    "linspace", "logspace", "detach", "zeros_like", "ones_like", "full_like", "empty_like",
    "rand_like", "randn_like", "randint_like", "new_zeros", "new_ones", "new_full", "new_empty",
    "new_empty_strided",
)  # fmt: skip
_FIRST_ONLY = ("expand_as", "view_as", "reshape_as", "type_as")


class Edges(NamedTuple):
    """Inputs of an op that get a gradient, as indices into `node.all_input_nodes`.

    results: for each result, the inputs that get one from it. written: for each input, those that
    get one from its value after the op, which may write into it."""

    results: tuple[frozenset[int], ...]
    written: dict[int, frozenset[int]]


class GradientEdges:
    """The gradient edges of a program's ops, found once for each op and types of inputs."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Edges | None] = {}

    def of_result(self, node: Any, number: int | None) -> list[Any]:
        """Returns the inputs that get a gradient from the op's result `number`; None: from any."""
        inputs, edges = list(node.all_input_nodes), self._edges(node)
        if edges is None:
            return _by_name(node, inputs)
        results = edges.results if number is None else edges.results[number : number + 1]
        return [inputs[i] for i in sorted(frozenset[int]().union(*results))]

    def of_written(self, node: Any, written: Any) -> list[Any]:
        """Returns the inputs that get a gradient from the value of the input `written` after the
        op, which writes into it."""
        inputs, edges = list(node.all_input_nodes), self._edges(node)
        if edges is None:
            return _by_name(node, inputs)
        return [inputs[i] for i in sorted(edges.written.get(inputs.index(written), ()))]

    def _edges(self, node: Any) -> Edges | None:
        """Returns the edges of an op; None where it does not run on meta tensors, or autograd does
        not record it there as in the trace."""
        if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace == "onward":
            return None
        if _stem(node) in _CUT:
            return None
        key = _spelling(node)
        if key not in self._known:
            self._known[key] = _asked(node)
        return self._known[key]


def carries(value: Any) -> bool:
    """Returns whether a value is a tensor of a dtype that has gradients."""
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _spelling(node: Any) -> Hashable:
    """Returns a key that is equal for the same op with the same arguments and types of inputs."""
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
        return leaf.clone()  # autograd forbids writes into a leaf

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
    """Returns the indices of the leaves that autograd reaches from these tensors."""
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
    """Returns the inputs that get a gradient judging by the op's name: all, but for known ops."""
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
    """Returns an op's name without namespace and overload, `add` for `add_`."""
    return _name(node).partition("::")[2].removesuffix("_")


__all__ = ["GradientEdges", "carries"]
