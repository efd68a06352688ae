"""Context parallelism: each rank along `cp` computes its part of the positions of every sequence.

    ids i64[B,T]          of all positions, on every rank
    x f32[B,T/N,D]        of the rank's positions: products, norms, dropout need no others
    q of its positions    k, v of all: gathered in forward, once more in backward
    dk, dv                terms of all ranks, added up and cut: reduce-scatter
    dweights, loss        terms, added up once by `data_parallel`, in buckets

Weights, their state and the batch are whole on every rank. The solver of tensor parallelism finds
the way of each call; none of its inputs is split by a cut of a parameter here, but where a call
reads positions of a value that all ranks have. Keys and values are gathered, as in Llama 3 (arXiv
2407.21783, section 3.3.2), or, where ranks divide the heads and fewer bytes are passed, positions
are exchanged for heads (DeepSpeed-Ulysses, arXiv 2309.14509).

A length T is written as `N * part`, so that ranks divide it; `length_parts` gives the sizes of
parts for those of a batch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from onward.distribute.collectives import Collectives
from onward.distribute.mesh import Mesh
from onward.distribute.tensor.conversions import Costs, DeviceRates
from onward.distribute.tensor.sharding import PARTIAL, REPLICATED, Sharding, split
from onward.distribute.tensor.solve import StepSharding
from onward.distribute.tensor.ways import RankPlace, Shardings, Way
from onward.distribute.tensor.write import write_rank
from onward.errors import OnwardError
from onward.graph.graph import Graph, Node, Role, Value, type_of
from onward.graph.types import Dim, DType, Size, divide, symbol

AXIS = "cp"
# A slow device with fast links, so that whatever can be is split: memory asks for it
_RATES = DeviceRates(
    flops_per_second=1e10, bytes_per_second=1e11, launch_seconds=0.0, link_bytes_per_second=2e10,
    hop_seconds=1e-9,
)  # fmt: skip
_SIZES = {"B": 8}
_PART = 512  # positions of a rank, for the choice of ways
_NAMED = re.compile(r"(.+)_cp(\d+)")
_SUMS = ("labels", "loss")  # of `Signature.local_sums`: over what each rank has of the sequence


def context_parallel(graph: Graph, mesh: Mesh) -> Graph:
    """Returns the graph of this rank of a mesh, whose gradients and sums are terms that
    `data_parallel` has to add up along `cp` (`Signature.local_gradients`, `local_sums`).

    Inputs and outputs keep their names, and their shapes but for the symbols of lengths. Sums of an
    accumulation window are those of one rank. Raises OnwardError for a step that reads no
    sequences.
    """
    ranks = mesh.size(AXIS)
    if ranks == 1 or not graph.inputs_with(Role.BATCH):  # an update alone, by sums of each rank
        return graph
    lengths = _lengths(graph)
    named = {name: ranks * symbol(f"{name}_cp{ranks}") for name in lengths if isinstance(name, str)}
    graph = graph.clone(named)
    parts = {str(divide(size, ranks)): _PART for size in named.values()}
    costs = Costs(_RATES, ranks, {**_SIZES, **parts})
    solution = ContextSharding(graph, costs, parts, lengths).solution({})
    solution.gathers_again = True
    if not any(way.shares_work for way in solution.ways.values()):
        raise OnwardError(
            f"a step on {mesh} cannot be distributed along cp: none of its calls works on a part "
            "of the positions; fix: another axis"
        )
    made = Graph(graph.name)
    place = RankPlace(AXIS, ranks, mesh.coordinate(AXIS), Collectives(made, mesh), {})
    return write_rank(graph, solution, made, place)


def _lengths(graph: Graph) -> list[str | int]:
    """The lengths of sequences, the second dim of each input of the batch: a symbol's name or a
    number. Raises OnwardError where there is none."""
    found: dict[str | int, None] = {}
    for value in graph.inputs_with(Role.BATCH):
        shape = type_of(value).shape
        if len(shape) < 2:
            continue
        size = shape[1]
        if isinstance(size, Dim):
            found.update(dict.fromkeys(sorted(size.symbols)))
        elif not type_of(value).is_floating and len(shape) == 2:
            found[size] = None
    if not found:
        raise OnwardError(
            "a mesh with cp splits sequences, and no input of the batch has a second dim of "
            "positions; fix: another axis"
        )
    return list(found)


def length_parts(names: Collection[str], sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes of the ranks' parts of lengths. names: symbols of a graph, among which those that
    `context_parallel` has made are meant. sizes: of the batch, by symbol. Raises OnwardError for a
    length that the ranks do not divide."""
    found: dict[str, int] = {}
    for name in names:
        match = None if name in sizes else _NAMED.fullmatch(name)
        if match is None or match[1] not in sizes:
            continue
        length, ranks = sizes[match[1]], int(match[2])
        if length % ranks:
            raise OnwardError(
                f"a length of {length} positions cannot be split over {ranks} ranks along cp; fix: "
                f"pad batches to a multiple of {ranks} (pad_to_multiple_of={ranks} of a collator)"
            )
        found[name] = length // ranks
    return found


class ContextSharding(StepSharding):
    """The choice of ways where ranks have parts of the positions. parts: names of the symbols of
    their sizes. lengths: of sequences, as symbols' names or numbers."""

    def __init__(
        self, graph: Graph, costs: Costs, parts: Collection[str], lengths: Collection[str | int]
    ) -> None:
        super().__init__(graph, costs)
        self._of_batch = _computed_from_batch(graph)
        self._parts, self._ranks_along = frozenset(parts), costs.ranks
        self._numbers = {n for n in lengths if isinstance(n, int) and n % costs.ranks == 0}
        signature = graph.signature
        named = [*signature.local_gradients.values()]
        named += [out for key, out in signature.local_sums.items() if key in _SUMS]
        self._terms = {graph.outputs[name].producer() for name in named}
        self._windows = set(signature.accumulated.values())
        held = signature.accumulators.values()
        self._sums_held = [v for v in graph.inputs if v.name in held]
        self._rounded = {
            maker for name in self._windows
            if (maker := graph.outputs[name].producer()) is not None and maker.op_type == "Cast"
        }  # fmt: skip

    def input_shardings(self, cuts: Mapping[Value, Sharding]) -> dict[Value, Sharding]:
        """Sums over a window are those of a rank's positions."""
        return dict.fromkeys(self._sums_held, PARTIAL)

    def wanted(self, name: str, cuts: Mapping[Value, Sharding]) -> Sharding:
        return PARTIAL if name in self._windows else REPLICATED

    def recorded(self, node: Node, cuts: Mapping[Value, Sharding]) -> Way | None:
        """Records of gradients and sums take terms; what reads them gets all ranks' sum, by the
        exchange that is written in their place."""
        if node in self._terms:
            return Way((PARTIAL,), (REPLICATED,))
        if node in self._rounded:
            return Way((PARTIAL,), (PARTIAL,))
        return super().recorded(node, cuts)

    def also_given(self, node: Node, given: Shardings) -> Iterator[Shardings]:
        """Positions of what all ranks have: of the batch, and of what is computed from it. Masks
        stay whole, since their positions may be those of keys."""
        if any(type_of(y).dtype == DType.BOOL for y in node.outputs):
            return
        for i, (x, s) in enumerate(zip(node.inputs, given, strict=True)):
            if x is None or s != REPLICATED:
                continue
            for found in self._entries(x):
                yield (*given[:i], found, *given[i + 1 :])

    def _entries(self, value: Value) -> Iterator[Sharding]:
        shape = type_of(value).shape
        if value not in self._of_batch or type_of(value).dtype == DType.BOOL:
            return
        for dim, size in enumerate(shape):
            if self._is_length(size) or (
                dim == 1 and size in self._numbers and value.producer() is None
            ):
                yield split(dim)

    def _is_length(self, size: Size) -> bool:
        part = divide(size, self._ranks_along) if isinstance(size, Dim) else None
        return part is not None and str(part) in self._parts


def _computed_from_batch(graph: Graph) -> set[Value]:
    """The inputs of the batch, and what is computed from their numbers."""
    found = set(graph.inputs_with(Role.BATCH))
    for node in graph:
        if node.op_type != "Shape" and not found.isdisjoint(node.inputs):
            found.update(node.outputs)
    return found


__all__ = ["AXIS", "ContextSharding", "context_parallel", "length_parts"]
