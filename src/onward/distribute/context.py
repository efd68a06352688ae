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
are exchanged for heads (DeepSpeed-Ulysses, arXiv 2309.14509), or go round a ring of ranks (arXiv
2310.01889), where none is to have all of them (`tensor/rules/attention_methods.py`).

A length T is written as `N * part`, so that ranks divide it (`lengths.py`). A graph that
`tensor_parallel` has made is taken as it is: exchanges along `tp` are then of a rank's positions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from onward.distribute.collectives import Collectives, number_in_order
from onward.distribute.lengths import SplitLengths, split_lengths
from onward.distribute.mesh import Mesh
from onward.distribute.tensor.conversions import costs_of_memory
from onward.distribute.tensor.sharding import PARTIAL, REPLICATED, Sharding, split
from onward.distribute.tensor.solve import StepSharding
from onward.distribute.tensor.ways import RankPlace, Shardings, Way
from onward.distribute.tensor.write import write_rank
from onward.errors import OnwardError
from onward.graph.graph import Graph, Node, Role, Value, type_of
from onward.graph.types import Dim, DType

AXIS = "cp"
_SUMS = ("labels", "loss")  # of `Signature.local_sums`: over what each rank has of the sequence


def context_parallel(
    graph: Graph, mesh: Mesh, summed: Collection[str] = (), method: str = "auto"
) -> Graph:
    """Returns the graph of this rank of a mesh, whose gradients and sums are terms that
    `data_parallel` has to add up along `cp` (`Signature.local_gradients`, `local_sums`).

    graph: of one rank, or what `tensor_parallel` has made of it; or forward and gradients of all
    stages of a pipeline, whose outputs are terms then. Inputs and outputs keep their names, and
    their shapes but for the symbols of lengths. Sums of an accumulation window are those
    of one rank, but for the parameters `summed`, whose gradients are added up in each micro-batch.
    method: of attention to positions of other ranks, one of `METHODS`; a call that cannot take it
    has that of "auto". Raises OnwardError for a step that reads no sequences.
    """
    ranks = mesh.size(AXIS)
    if ranks == 1 or not graph.inputs_with(Role.BATCH):  # an update alone, by sums of each rank
        return graph
    made = split_lengths(graph, AXIS, ranks)
    solution = ContextSharding(made, ranks, summed, method).solution({})
    solution.gathers_again = True
    if not any(way.shares_work for way in solution.ways.values()):
        raise OnwardError(
            f"a step on {mesh} cannot be distributed along cp: no op of it can run on a part of "
            "each sequence; fix: another axis of the mesh"
        )
    own = Graph(made.graph.name)
    place = RankPlace(AXIS, ranks, mesh.coordinate(AXIS), Collectives(own, mesh), {})
    own = write_rank(made.graph, solution, own, place)
    number_in_order(own)  # also those that the graph had along `tp`
    return own


class ContextSharding(StepSharding):
    """The choice of ways where ranks have parts of the positions. lengths: of the sequences.
    summed, method: as in `context_parallel`."""

    def __init__(
        self,
        lengths: SplitLengths,
        ranks: int,
        summed: Collection[str] = (),
        method: str = "auto",
    ) -> None:
        graph = lengths.graph
        super().__init__(graph, costs_of_memory(ranks, lengths.parts))
        self.method = method
        self._of_batch = _computed_from_batch(graph)
        self._lengths, self._along = lengths, ranks
        signature = graph.signature
        named = [*signature.local_gradients.values()]
        named += [out for key, out in signature.local_sums.items() if key in _SUMS]
        self._terms = {graph.outputs[name].producer() for name in named}
        of_terms = [name for name in signature.accumulators if name not in summed]
        accumulated = signature.accumulated
        self._windows = {accumulated[name] for name in of_terms if name in accumulated}
        held = {signature.accumulators[name] for name in of_terms}
        self._sums_held = [v for v in graph.inputs if v.name in held]
        self._summed_later = _sums_of_micro_batches(graph)
        self._rounded = {
            maker for name in self._windows
            if (maker := graph.outputs[name].producer()) is not None and maker.op_type == "Cast"
        }  # fmt: skip

    def input_shardings(self, cuts: Mapping[Value, Sharding]) -> dict[Value, Sharding]:
        """Sums over a window are those of a rank's positions."""
        return dict.fromkeys(self._sums_held, PARTIAL)

    def wanted(self, name: str, cuts: Mapping[Value, Sharding]) -> Sharding:
        return PARTIAL if name in self._windows | self._summed_later else REPLICATED

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
            # other dims may have the number of a length too
            is_named = isinstance(size, Dim) or (dim == 1 and value.producer() is None)
            if is_named and self._lengths.is_length(size, self._along):
                yield split(dim)


def _sums_of_micro_batches(graph: Graph) -> set[str]:
    """The outputs of a graph without an update that a pipeline adds up over its micro-batches: the
    loss, which is a sum, its divisor, and gradients."""
    signature = graph.signature
    if signature.divisor is None or signature.loss is None:
        return set()
    loss = graph.outputs[signature.loss]
    named = {name for name, value in graph.outputs.items() if value is loss}
    return named | {signature.divisor, *signature.gradients.values()}


def _computed_from_batch(graph: Graph) -> set[Value]:
    """The inputs of the batch, and what is computed from their numbers."""
    found = set(graph.inputs_with(Role.BATCH))
    for node in graph:
        if node.op_type != "Shape" and not found.isdisjoint(node.inputs):
            found.update(node.outputs)
    return found


__all__ = ["AXIS", "ContextSharding", "context_parallel"]
