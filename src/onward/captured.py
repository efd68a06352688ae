"""Captured: a forward graph, and what ties it to its owner's world. No torch stands in it.

Whatever can say this much can be trained: a module captured by `torch.export`, a graph read from a
file with the arrays that are its weights, another front end's program.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from onward.graph.graph import Graph


class Captured(Protocol):
    """A captured call.

    graph: its signature names the loss and the results. owned: the tensors of parameters and
    buffers by graph input; they stay where they are. leaves: from a leaf of the batch to its graph
    input. reached: parameters that the loss has a gradient by, if only of zeros. frozen: parameters
    that ask for none. constants: tensors of the owner's that the graph holds as they were. notes:
    what was presumed, for the user to read. regions: by their site, the parts that the owner runs
    itself (`kernels.Part`). reads: what was read of plain objects, such as a configuration.
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
        """Size by symbol, of a batch's leaves; None where the capture is not of such a batch."""
        ...

    def suits(self, leaves: list[Any], /) -> bool:
        """Whether what is presumed beyond sizes holds: numbers, and how they lie in memory."""
        ...
