"""The choice between an attention's two forms; the compact one presumes something of a batch.

A compact mask gives 0 in a row of queries that sees no key. So does torch's sdpa under a mask of
bools, and then there is no choice. Elsewhere eager PyTorch adds the least float to every score of
such a row, whose probabilities are then equal: the compact form holds for batches without such
rows, which is checked on every batch, and others get a capture with the mask written out.

Under torch's sdpa and a mask that is added, such batches are refused: its gradient there is not
that of its loss, since it keeps `peak + log(sum)`, in which so large a peak absorbs the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from onward.capture.translate.batch_program import KnownInputs
from onward.errors import CaptureError

_MASK, _PADDING, _BIAS, _CAUSAL, _COMPACT = 3, 4, 5, 6, 9  # arguments of onward::attention
_HIDDEN = -1e30  # what is added to a score that is not to count


@dataclass(frozen=True)
class Shown:
    """Every row of queries sees a key, under the mask that `steps` make of the batch's leaves.

    first: attention is causal, so that the first key has to be visible. added: the mask is added
    by torch's sdpa, which gives 0 in a row that -infinity hides throughout, as the graph does.
    """

    mask: Any
    steps: tuple[Any, ...]
    given: KnownInputs
    first: bool
    added: bool = False

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        found: dict[Any, Any] = {}
        with torch.no_grad():
            for node in self.steps:
                found[node] = self.given.value(node, tensors, found)
        mask = found[self.mask]
        if mask.is_floating_point():
            nothing = (mask == -torch.inf).all(-1, keepdim=True) if self.added else False
            mask = (mask > _HIDDEN) | nothing
        return bool((mask[..., 0] if self.first else mask.any(-1)).all())


def choose(program: Any, tensors: Sequence[torch.Tensor]) -> list[Shown]:
    """Leaves each attention of the exported program one form, the compact one where this batch
    allows it, and nothing that nobody reads. Returns what was presumed."""
    given = KnownInputs(program)
    presumed: dict[tuple[Any, bool], Shown | None] = {}
    for module in _modules(program.graph_module):
        _drop_unread(module.graph)  # of an attention that nobody reads nothing is presumed
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
                holds = shown is not None and shown.holds(tensors)
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
    """Notes what is presumed of torch's sdpa under an added mask of the user's own. Raises
    CaptureError where this batch has a row of queries that sees no key."""
    mask = [*node.args, None][3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    if mask is None or not mask.meta["val"].is_floating_point() or (mask, False) in presumed:
        return
    shown = _shown(mask, False, given)
    shown = None if shown is None else replace(shown, added=True)
    if shown is not None and not shown.holds(tensors):
        raise CaptureError(_NO_KEY)
    presumed[mask, False] = shown


def _shown(mask: Any, first: bool, given: KnownInputs) -> Shown | None:
    """The presumption about a mask; None where it is not made of the batch alone."""
    steps = given.steps(mask)
    return None if steps is None else Shown(mask, steps, given, first)


def _modules(module: Any) -> Iterator[Any]:
    """A program's graph module and those of its regions."""
    yield module
    for _, inner in module.named_children():
        if isinstance(inner, torch.fx.GraphModule):
            yield from _modules(inner)


def _drop_unread(graph: Any) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function" or node.users:
            continue
        if isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.is_mutable:
            graph.erase_node(node)


__all__ = ["Shown", "choose"]
