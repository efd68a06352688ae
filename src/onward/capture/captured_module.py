"""CapturedModule: a module's forward graph, with its tensors and the batches that it serves."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import CodeType
from typing import TypeAlias

import numpy as np
import torch

from onward.capture.batch_guards.attention_forms import Shown
from onward.capture.batch_guards.batch_writes import Unchanged
from onward.capture.batch_guards.pinned import Pinned
from onward.capture.output_tree import OutputTree
from onward.capture.regions import CapturedRegion
from onward.graph.graph import Graph
from onward.graph.types import Size
from onward.model_state import Reads
from onward.model_state.effects import Effects

# strides (True for a contiguous tensor), and the storage offset in elements
Layout: TypeAlias = tuple[bool | tuple[int, ...], int]

# a size of the batch in a condition of torch.export
_SIZE = re.compile(r"L\[['\"]leaves['\"]\]\[(\d+)\]\.size\(\)\[(\d+)\]")


@dataclass
class CapturedModule:
    """A forward graph and what ties it to the user's module (`onward.captured.Captured`).

    parameters, buffers: graph input -> the user's tensor (tied ones appear once).
    leaves: index among the batch's tensors -> graph input; other arguments are baked in.
    constants: the user's tensors that are baked in, since no module registers them.
    literals: how many of the constants are `torch.tensor(...)` of Python numbers.
    regions: the parts of the model that run in PyTorch, in the order of their sites.
    reached: parameters that autograd would give a gradient, if only zeros.
    frozen: parameters whose `requires_grad` was off.
    reaches: result of a whole call -> graph inputs of the parameters and leaves that autograd
    reaches from it.
    parts_reached: result -> (site, index) of each output of a PyTorch region that autograd reaches
    from it.
    tree: how the results form the model's outputs; None where the call is not captured whole.
    autocast: the dtype of `torch.autocast` around the call; None where it is off.
    reads: which attributes of plain objects, such as a configuration, the capture has read.
    effects: the side effects of the forward; None where unknown.
    asks: why evaluation may differ from this call in more than dropout; "" where it does not
    (evaluation.py).
    """

    graph: Graph
    parameters: dict[str, torch.nn.Parameter]
    buffers: dict[str, torch.Tensor]
    leaves: dict[int, str]
    notes: list[str] = field(default_factory=list)
    constants: list[torch.Tensor] = field(default_factory=list)
    regions: list[CapturedRegion] = field(default_factory=list)
    reached: set[str] = field(default_factory=set)
    frozen: set[str] = field(default_factory=set)
    reaches: dict[str, set[str]] = field(default_factory=dict)
    parts_reached: dict[str, set[tuple[int, int]]] = field(default_factory=dict)
    tree: OutputTree | None = None
    autocast: torch.dtype | None = None
    reads: Reads = field(default_factory=Reads)
    literals: int = 0
    effects: Effects | None = None
    asks: str = "it is made without gradients"
    _guards: list[CodeType] = field(default_factory=list)
    _conditions: list[str] = field(default_factory=list)  # the source text of `_guards`
    _sizes: list[tuple[int, int, Size]] = field(default_factory=list)
    _presumed: list[Shown | Unchanged] = field(default_factory=list)
    _pinned: list[Pinned] = field(default_factory=list)  # in the forward's order
    _layouts: list[Layout] | None = None  # of the batch's tensors, where they matter

    @property
    def owned(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by graph input name."""
        return {**self.parameters, **self.buffers}

    @property
    def branches(self) -> int:
        """The number of branches on a batch's numbers that the graph holds one side of."""
        return len(self._pinned)

    @property
    def presumes(self) -> list[str]:
        """What the graph presumes of a batch besides its sizes and branches, as text."""
        shown = any(isinstance(fact, Shown) for fact in self._presumed)
        unchanged = any(isinstance(fact, Unchanged) for fact in self._presumed)
        return ["no row of an attention mask hides every key"] * shown + [
            "what the forward writes into the batch in place is there already"
        ] * unchanged

    @property
    def size_conditions(self) -> list[str]:
        """The conditions on a batch's sizes, as Python expressions over their symbols."""
        sizes = {(leaf, dim): size for leaf, dim, size in self._sizes}

        def symbol(found: re.Match[str]) -> str:
            size = sizes.get((int(found[1]), int(found[2])))
            return found[0] if size is None else f"({size})"

        return [_SIZE.sub(symbol, text) for text in self._conditions]

    def arrays(self) -> dict[str, np.ndarray]:
        """Parameters and buffers as numpy arrays; on the CPU they share the tensors' memory."""
        return {name: t.detach().cpu().numpy() for name, t in self.owned.items()}

    def suits(self, tensors: list[torch.Tensor]) -> bool:
        """Returns whether a batch's numbers and memory layouts are what the capture presumes."""
        if self._layouts not in (None, list(map(layout, tensors))):
            return False
        return all(fact.holds(tensors) for fact in (*self._pinned, *self._presumed))

    def dims(self, tensors: list[torch.Tensor]) -> dict[str, int] | None:
        """Returns symbol -> size for a batch's tensors (in leaf order); None where the graph does
        not serve them."""
        dims: dict[str, int] = {}
        for leaf, dim, size in self._sizes:
            have = tensors[leaf].shape[dim]
            if isinstance(size, int):
                if have != size:
                    return None
                continue
            name, factor = size.multiple  # factor above 1: the size is held to be a multiple of it
            count, rest = divmod(have, factor)
            if rest or count < 2 or dims.setdefault(name, count) != count:
                return None  # sizes 0 and 1 broadcast, and have captures of their own
        scope = {"L": {"leaves": tensors}, "math": math, "torch": torch}
        if not all(eval(guard, scope) for guard in self._guards):
            return None
        return dims if self.suits(tensors) else None  # last, since it may assume these sizes

    def smaller(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the batch's tensors with each variable size one smaller, cut at the end."""
        dims = {symbol: max(n - 1, 1) for symbol, n in (self.dims(tensors) or {}).items()}
        cut = list(tensors)
        for leaf, dim, size in self._sizes:
            if not isinstance(size, int) and size.symbols <= dims.keys():
                cut[leaf] = cut[leaf].narrow(dim, 0, size.number(dims))
        return cut

    def leading_leaves(self, tensors: list[torch.Tensor]) -> list[int]:
        """Returns the leaves whose dim 0 is the batch size, which is dim 0 of the first tensor that
        has dims."""
        first = {leaf: size for leaf, dim, size in self._sizes if dim == 0}
        if not first:
            return []
        count = tensors[min(first)].shape[0]
        varies = not isinstance(first[min(first)], int)
        return [
            leaf
            for leaf, size in sorted(first.items())
            if tensors[leaf].shape[0] == count and isinstance(size, int) != varies
        ]

    def sample_leaves(self, tensors: list[torch.Tensor]) -> list[int]:
        """Returns the leaves with a row for each sample: those whose dim 0 is, in every batch, as
        large as dim 0 of the first tensor that has dims. Empty where the graph does not say so: it
        is for this size alone, or another dim has the size by chance."""
        first = {leaf: size for leaf, dim, size in self._sizes if dim == 0}
        if not first or isinstance(size := first[min(first)], int):
            return []
        name, factor = size.multiple
        count = tensors[min(first)].shape[0]
        others = [(leaf, dim) for leaf, dim, s in self._sizes if s != size or dim]
        doubtful = [tensors[leaf].shape[dim] == count for leaf, dim in others if dim == 0]
        within = [name in getattr(s, "symbols", ()) for _, dim, s in self._sizes if dim]
        if factor != 1 or any(doubtful) or any(within):
            return []
        return sorted(leaf for leaf, found in first.items() if found == size)

    def leading(self, tensors: list[torch.Tensor]) -> dict[str, int]:
        """Returns symbol -> factor, where the batch size is factor * symbol. Empty where the graph
        is for this batch size alone."""
        sizes = {leaf: size for leaf, dim, size in self._sizes if dim == 0}
        found = [sizes[leaf] for leaf in self.leading_leaves(tensors)]
        dims = [size for size in found if not isinstance(size, int)]
        plain = all(size.multiple[0] in size.symbols for size in dims)
        return dict(size.multiple for size in dims) if plain else {}

    def guard(self, texts: Iterable[str]) -> None:
        """Adds conditions on a batch's sizes, as Python expressions over `L["leaves"]`."""
        given = list(texts)
        self._conditions += given
        self._guards += [compile(text, "<shape guard>", "eval") for text in given]


def layout(x: torch.Tensor) -> Layout:
    """Returns a tensor's strides and storage offset, True in place of strides if contiguous."""
    return x.is_contiguous() or x.stride(), int(x.storage_offset())


__all__ = ["CapturedModule", "layout"]
