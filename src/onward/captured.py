"""Captured: a forward graph with its owner's tensors; a protocol that needs no torch.

Whatever implements it can be trained: a module captured by `torch.export`, a graph read from a file
with arrays as its weights, another front end's program.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from onward.graph.graph import Graph


class Captured(Protocol):
    """A captured call.

    graph: the forward; its signature names the loss and the results.
    owned: graph input -> the owner's tensor, for parameters and buffers; they stay where they are.
    leaves: index of a leaf of the batch -> graph input.
    reached: graph inputs of parameters that the loss has a gradient for, if only zeros.
    frozen: graph inputs of parameters that require no gradient.
    notes: what was presumed, one line each, for the user to read.
    constants: the owner's tensors whose numbers the graph holds as constants.
    regions: the parts that the owner runs itself (`kernels.EagerPart`), by their sites.
    reads: which attributes of plain objects, such as a configuration, the capture has read.
    """

    @property
    def graph(self) -> Graph: ...

    @property
    def owned(self) -> Mapping[str, Any]: ...

    @property
    def leaves(self) -> Mapping[int, str]: ...

    @property
    def reached(self) -> Collection[str]: ...

    @property
    def frozen(self) -> Collection[str]: ...

    @property
    def notes(self) -> Sequence[str]: ...

    @property
    def constants(self) -> Sequence[Any]: ...

    @property
    def regions(self) -> Sequence[Any]: ...

    @property
    def reads(self) -> Any: ...

    def dims(self, leaves: list[Any], /) -> dict[str, int] | None:
        """Returns symbol -> size for a batch's leaves; None where the graph does not serve it."""
        ...

    def suits(self, leaves: list[Any], /) -> bool:
        """Returns whether the presumptions about the leaves' numbers and memory layouts hold."""
        ...
