"""Chooses between the compact and the dense mask of an attention, per capture.

The two differ for a query that sees no key. With a compact mask its result is 0, as in torch's sdpa
with a boolean mask, where there is no choice to make. Elsewhere eager PyTorch adds the lowest float
to all of its scores, so that its probabilities are uniform. There the compact form presumes that
every query sees a key, which is checked on every batch; others get a capture with the dense mask.

With torch's sdpa and a float mask, batches with such a query are refused: PyTorch's gradient is
wrong there, since sdpa saves `peak + log(sum)`, in which so large a peak absorbs the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from onward.capture.translate.batch_program import KnownInputs
from onward.errors import CaptureError

_MASK, _PADDING, _BIAS, _CAUSAL, _COMPACT = 3, 4, 5, 6, 9  # arguments of onward::attention
_HIDDEN = -1e30  # a float mask at or below this hides a key


@dataclass(frozen=True)
class Shown:
    """The presumption that every query sees a key under a mask.

    mask: the mask's node. steps: the nodes that compute it from what is `given`, the batch.
    first: whether attention is causal, so that the first key has to be visible. added: whether
    sdpa adds the mask to the scores; a query whose mask is -infinity throughout is then allowed,
    since sdpa and the graph both give 0.
    """

    mask: Any
    steps: tuple[Any, ...]
    given: KnownInputs
    first: bool
    added: bool = False

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Returns whether a batch's tensors fulfil the presumption."""
        found: dict[Any, Any] = {}
        with torch.no_grad():
            for node in self.steps:
                found[node] = self.given.value(node, tensors, found)
        mask = found[self.mask]
        if mask.is_floating_point():
            nothing = (mask == -torch.inf).all(-1, keepdim=True) if self.added else False
            mask = (mask > _HIDDEN) | nothing
        return bool((mask[..., 0] if self.first else mask.any(-1)).all())


def choose(program: Any, tensors: Sequence[torch.Tensor], presumes: bool = True) -> list[Shown]:
    """Leaves each attention of an exported program one form of its mask, the compact one if the
    first batch allows it, and removes unread nodes. Returns the presumptions to check on later
    batches. presumes: whether there may be any where the dense form has none. Raises CaptureError
    where a query sees no key and PyTorch's gradient is wrong."""
    given = KnownInputs(program)
    presumed: dict[tuple[Any, bool], Shown | None] = {}
    for module in _modules(program.graph_module):
        _drop_unread(module.graph)  # an attention that nothing reads needs no presumption
        for node in module.graph.nodes:
            if node.target is torch.ops.aten.scaled_dot_product_attention.default:
                _presume_of_added(node, given, tensors, presumed)
            if node.target is not torch.ops.onward.attention.default:
                continue
            padding, first = node.args[_PADDING], node.args[_CAUSAL]
            if node.args[_MASK] is None or padding is None:
                continue
            if (padding, first) not in presumed:
                shown = _shown(padding, first, given)
                wanted = presumes or node.args[_COMPACT]
                holds = wanted and shown is not None and shown.holds(tensors)
                presumed[padding, first] = shown if holds else None
            args = list(node.args)
            if presumed[padding, first] is None:
                if node.args[_COMPACT]:
                    raise CaptureError(_NO_KEY)
                args[_PADDING], args[_BIAS], args[_CAUSAL] = None, None, False
            else:
                args[_MASK] = None
            node.args = tuple(args)
        _drop_unread(module.graph)
    return [shown for shown in presumed.values() if shown is not None]


_NO_KEY = (
    "a row of the attention mask may hide every key, and there the gradient of "
    "scaled_dot_product_attention is wrong in PyTorch; fix: leave out samples without "
    'tokens, or attn_implementation="eager"'
)


def _presume_of_added(
    node: Any,
    given: KnownInputs,
    tensors: Sequence[torch.Tensor],
    presumed: dict[tuple[Any, bool], Shown | None],
) -> None:
    """Adds the presumption about a float mask that the user passes to torch's sdpa. Raises
    CaptureError where the first batch has a query that sees no key."""
    mask = [*node.args, None][3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    if mask is None or not mask.meta["val"].is_floating_point() or (mask, False) in presumed:
        return
    shown = _shown(mask, False, given)
    shown = None if shown is None else replace(shown, added=True)
    if shown is not None and not shown.holds(tensors):
        raise CaptureError(_NO_KEY)
    presumed[mask, False] = shown


def _shown(mask: Any, first: bool, given: KnownInputs) -> Shown | None:
    """Returns the presumption about a mask; None where more than the batch decides the mask."""
    steps = given.steps(mask)
    return None if steps is None else Shown(mask, steps, given, first)


def _modules(module: Any) -> Iterator[Any]:
    """Yields a program's graph module and those of its gradient-mode regions."""
    yield module
    for _, inner in module.named_children():
        if isinstance(inner, torch.fx.GraphModule):
            yield from _modules(inner)


def _drop_unread(graph: Any) -> None:
    """Removes nodes that nothing reads, unless they write."""
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function" or node.users:
            continue
        if isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.is_mutable:
            graph.erase_node(node)


__all__ = ["Shown", "choose"]
