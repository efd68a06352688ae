"""The choice of shardings: how parameters are cut, and from that the way of every call.

Given the cuts, one pass over the nodes takes for each the way that costs least: conversions of its
inputs that are not there yet, its work, and what its results still owe, since terms have to be
added up later. The cuts are found by descent: a move cuts the parameters of one kind, those of all
layers alike, and cuts with them every parameter whose gradient then comes in parts. A second move
cuts or joins one kind alone. The cost is the time of the whole step, and a little for memory.

Alpa (arXiv 2201.12023) solves the choice of ways as an integer program; here the cuts of a few
kinds of parameters decide nearly all of it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from onward.distribute.tensor.conversions import Costs
from onward.distribute.tensor.sharding import MAX, PARTIAL, REPLICATED, ROWS, SUM, Sharding, split
from onward.distribute.tensor.ways import Shardings, Way, ways_of
from onward.graph.graph import Graph, Node, Role, Value, needed, role_of, type_of
from onward.graph.ops import flops, moved, op_of
from onward.graph.ops.collective import WAIT, start_of
from onward.graph.ops.optimizers import OPTIMIZERS
from onward.graph.types import Size, Type

# elements of a block, by the names of state tensors that have one number for each
BLOCKS = {
    name: form.block
    for optimizer in OPTIMIZERS.values()
    for form in optimizer.forms.values()
    for name in form.tensors
    if name not in optimizer.slots
}
MEMORY = 1e-13  # seconds for a byte that a rank holds: less than any exchange of it
ROUNDS = 6  # of moves, at most
MOST_PIECES = 8  # of one weight: more are heads


@dataclass
class Solution:
    """The way of every node, and what has to be converted. inputs: the shardings of graph inputs
    that are cut. made: of every value. conversions: for a value and a sharding in which it is read,
    the one from which it is converted. gathers_again: whether backward gathers parts of a forward
    value anew, so that no rank keeps the whole, but for those that are gathered_once. seconds: the
    estimated time of a step."""

    inputs: dict[Value, Sharding]
    ways: dict[Node, Way] = field(default_factory=dict)
    made: dict[Value, Sharding] = field(default_factory=dict)
    conversions: dict[tuple[Value, Sharding], Sharding] = field(default_factory=dict)
    gathers_again: bool = False
    gathered_once: Collection[Value] = ()
    wanted: dict[str, Sharding] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class PricedWay:
    """A way with its cost: its work, and what its results owe more than its inputs did."""

    way: Way
    wants: tuple[tuple[Value, Sharding], ...]
    seconds: float
    owed: float


@dataclass
class ParameterKind:
    """Parameters of all layers that are cut alike: names that differ in numbers alone, of one
    type."""

    values: list[Value]

    @property
    def type(self) -> Type:
        return type_of(self.values[0])


class StepSharding:
    """The search for the shardings of one graph. method: by which attention on positions is asked
    to exchange, "" where ranks have no parts of sequences."""

    method = ""

    def __init__(self, graph: Graph, costs: Costs) -> None:
        self._graph, self._costs, self._ranks = graph, costs, costs.ranks
        self._nodes = list(graph)
        signature = graph.signature
        self.kinds = _kinds(graph)
        self._followers = _followers(graph)
        self._parameters = {v.name: v for kind in self.kinds for v in kind.values}
        self._pieces, self._owner = _pieces(self._nodes), self._owners()
        slots = signature.slots.items()
        self._blocks = {name: BLOCKS[slot.name] for slot, name in slots if slot.name in BLOCKS}
        self._held = {out: held for held, out in signature.updated.items()}
        self._forced = self._records()
        self._gradients = self._gradient_values()
        outputs = set(graph.outputs) - set(signature.results.values())
        self._counted = needed(graph, outputs)
        self._priced: dict[tuple[int, Shardings], list[PricedWay]] = {}
        self._converted: dict[tuple[Value, Sharding, Sharding], float] = {}
        self._readers: dict[Value, list[str]] = {}
        for name, value in graph.outputs.items():
            self._readers.setdefault(value, []).append(name)

    # ---- the search

    def solve(self) -> Solution:
        """The best solution that descent finds."""
        best = self.solution({})
        for _ in range(ROUNDS):
            before = best.seconds
            for kind, option in self._moves(seeds=True):
                found = self._followed({**self._cuts(best), **_each(kind, option)})
                best = min(best, found, key=lambda s: s.seconds)
            for kind, option in self._moves(seeds=False):
                found = self.solution({**self._cuts(best), **_each(kind, option)})
                best = min(best, found, key=lambda s: s.seconds)
            if best.seconds >= before:
                break
        return best

    def _moves(self, seeds: bool) -> Iterator[tuple[ParameterKind, Sharding]]:
        """Kinds with a sharding for each; as seeds those of matrices, the largest first."""
        for kind in sorted(self.kinds, key=lambda k: -self._costs.nbytes(k.type)):
            if seeds and kind.type.rank < 2:
                continue
            if not seeds:
                yield kind, REPLICATED
            for option in self._options(kind):
                yield kind, option

    def _options(self, kind: ParameterKind) -> list[Sharding]:
        """The splits of a parameter: along each dim, and in groups where a value of that size is
        taken apart into so many."""
        found: list[Sharding] = []
        for dim, size in enumerate(kind.type.shape):
            for groups in sorted({1, *self._pieces.get(size, ())} if isinstance(size, int) else ()):
                option = split(dim, groups)
                if option.fits(kind.type, self._ranks):
                    found.append(option)
        return found

    def _cuts(self, solution: Solution) -> dict[Value, Sharding]:
        return {v: s for v, s in solution.inputs.items() if role_of(v) is Role.PARAM}

    def _followed(self, cuts: Mapping[Value, Sharding]) -> Solution:
        """The solution with these cuts and those of parameters whose gradients come in parts."""
        best = found = self.solution(cuts)
        for _ in range(3):
            more = dict(self._cuts(found))
            for kind in self.kinds:
                came = {found.made[g] for v in kind.values if (g := self._gradients.get(v))}
                if len(came) == 1 and (it := came.pop()).dim is not None:
                    more |= _each(kind, it)
            if more == self._cuts(found):
                break
            found = self.solution(more)
            best = min(best, found, key=lambda s: s.seconds)
        return best

    # ---- one solution

    def solution(self, cuts: Mapping[Value, Sharding]) -> Solution:
        """The solution that follows from the cuts of parameters."""
        cuts = {v: s for v, s in cuts.items() if s != REPLICATED}
        inputs = self.input_shardings(cuts)
        found = Solution(inputs)
        made = found.made
        for value in (*self._graph.inputs, *self._graph.ir.initializers.values()):
            made[value] = inputs.get(value, REPLICATED)
        there: dict[Value, list[Sharding]] = {}
        found.wanted = {name: self.wanted(name, cuts) for name in self._graph.outputs}
        for number, node in enumerate(self._nodes):
            given = tuple(None if x is None else made[x] for x in node.inputs)
            counts = node in self._counted
            chosen = self._best(number, node, given, found, there, cuts)
            for x, want in chosen.wants:
                seconds = self._convert(x, want, found, there)
                found.seconds += seconds if counts else 0.0
            found.seconds += chosen.seconds if counts else 0.0
            found.ways[node] = chosen.way
            made.update(zip(node.outputs, chosen.way.outputs, strict=True))
        for name, value in self._graph.outputs.items():
            seconds = self._convert(value, found.wanted[name], found, there)
            counts = name not in self._graph.signature.results.values()
            found.seconds += seconds if counts else 0.0
        held = [v for v in self._graph.inputs if role_of(v) in (Role.PARAM, Role.STATE)]
        for value in held:
            share = self._ranks if value in inputs else 1
            found.seconds += MEMORY * self._costs.nbytes(type_of(value)) / share
        return found

    def _best(
        self, number: int, node: Node, given: Shardings, found: Solution,
        there: dict[Value, list[Sharding]], cuts: Mapping[Value, Sharding],
    ) -> PricedWay:  # fmt: skip
        """The way of a node that costs least where it stands."""
        recorded = self.recorded(node, cuts)
        if node.op_type == WAIT:  # of an exchange along another axis
            recorded = _waited(node, found.ways[start_of(node)])
        if recorded is not None:
            return PricedWay(recorded, _wants(node, recorded), 0.0, 0.0)
        best: tuple[float, PricedWay] | None = None
        for priced in self._offers(number, node, given):
            cost = priced.seconds + priced.owed
            for x, want in priced.wants:
                cost += self._price(x, want, found, there)[0]
            for y, s in zip(node.outputs, priced.way.outputs, strict=True):
                for name in self._readers.get(y, ()):
                    cost += self._conversion(y, s, found.wanted[name])
            if best is None or cost < best[0]:
                best = (cost, priced)
        assert best is not None, "every call can be run whole"
        return best[1]

    def _offers(self, number: int, node: Node, given: Shardings) -> list[PricedWay]:
        key = (number, given)
        if key not in self._priced:
            ways = ways_of(node, self._ranks, given, self.method)
            for other in self.also_given(node, given):
                found = ways_of(node, self._ranks, other, self.method)
                ways += [way for way in found if way not in ways]
            self._priced[key] = [self._with_price(node, way) for way in ways]
        return self._priced[key]

    def _with_price(self, node: Node, way: Way) -> PricedWay:
        share = self._ranks if way.shares_work else 1
        seconds = 0.0
        if not op_of(node).view:
            costs = self._costs
            amount, nbytes = costs.number(flops(node)), costs.number(moved(node))
            seconds = costs.work(amount / share, nbytes / share)
        if way.exchanged:
            seconds += 2 * self._costs.collective(sum(map(self._costs.nbytes, way.exchanged)), 2)
        if way.passed:
            seconds += self._costs.collective(sum(map(self._costs.nbytes, way.passed)), 1)
        wants = _wants(node, way)
        owed = sum(self._owed(y, s) for y, s in zip(node.outputs, way.outputs, strict=True))
        return PricedWay(way, wants, seconds, owed - sum(self._owed(x, s) for x, s in wants))

    def _owed(self, value: Value, sharding: Sharding) -> float:
        """Seconds of the exchange that adds up terms; 0 for NORM and ALL, since those of all
        tensors share one small exchange."""
        is_own = sharding.terms in (SUM, MAX, ROWS)
        return self._conversion(value, sharding, REPLICATED) if is_own else 0.0

    def _conversion(self, value: Value, have: Sharding, want: Sharding) -> float:
        key = (value, have, want)
        if key not in self._converted:
            self._converted[key] = self._costs.conversion(type_of(value), have, want)
        return self._converted[key]

    def _price(
        self, value: Value, want: Sharding, found: Solution, there: dict[Value, list[Sharding]]
    ) -> tuple[float, Sharding]:
        """Seconds of a conversion from what there is of a value, and from which."""
        made = found.made[value]
        if want == made or (value, want) in found.conversions:
            return 0.0, want
        sources = [made]
        if not want.terms:  # no term is made of what an exchange has made
            sources += there.get(value, ())
        return min(((self._conversion(value, s, want), s) for s in sources), key=lambda p: p[0])

    def _convert(
        self, value: Value, want: Sharding, found: Solution, there: dict[Value, list[Sharding]]
    ) -> float:
        seconds, source = self._price(value, want, found, there)
        if source != want:
            found.conversions[value, want] = source
            there.setdefault(value, []).append(want)
        return seconds

    # ---- what is asked of some values; other ways of sharing the work override these

    def input_shardings(self, cuts: Mapping[Value, Sharding]) -> dict[Value, Sharding]:
        """The shardings of graph inputs that are not replicated: of parameters that are cut, and of
        their state."""
        inputs = dict(cuts)
        for value, parameter in self._followers.items():
            if parameter in cuts:
                inputs[value] = self._following(value.name or "", value, parameter, cuts[parameter])
        return {value: sharding for value, sharding in inputs.items() if sharding != REPLICATED}

    def also_given(self, node: Node, given: Shardings) -> Iterator[Shardings]:
        """Yields other shardings of a node's inputs with which its ways may begin: rows are terms
        too."""
        if any(s is not None and s.terms == ROWS for s in given):
            yield tuple(PARTIAL if s is not None and s.terms == ROWS else s for s in given)

    def wanted(self, name: str, cuts: Mapping[Value, Sharding]) -> Sharding:
        """The sharding of an output: of a parameter's next value, its state's, its gradient's."""
        source = self._owner.get(name)
        if source is None:
            return REPLICATED
        cut, value = cuts.get(source, REPLICATED), self._graph.outputs[name]
        return self._following(self._held.get(name, ""), value, source, cut)

    def _following(self, held: str, value: Value, parameter: Value, cut: Sharding) -> Sharding:
        """The sharding of what belongs to a parameter that is cut: as the parameter where it has
        its shape; numbers for each block of elements where parts are whole blocks. held: the
        graph input that the value is, or the next of."""
        kind, block = type_of(parameter), self._blocks.get(held)
        if type_of(value).shape == kind.shape:
            return cut
        if block is None or cut.dim is None or kind.numel // self._ranks % block:
            return REPLICATED
        return split(0)

    def _owners(self) -> dict[str, Value]:
        """The parameter that an output belongs to."""
        signature = self._graph.signature
        of = {v.name: p for v, p in self._followers.items()}
        of |= dict(self._parameters)
        pairs = [*signature.updated.items(), *signature.accumulated.items()]
        for table in (signature.gradients, signature.left_gradients, signature.local_gradients):
            pairs += table.items()
        return {out: of[held] for held, out in pairs if held in of}

    def _records(self) -> dict[Node, Value | None]:
        """The nodes that record sums over the samples of one rank (`Signature.local_sums`), which
        are of whole values, and gradients, which are cut like their parameters."""
        signature = self._graph.signature
        found: dict[Node, Value | None] = {}
        for name in signature.local_sums.values():
            node = self._graph.outputs[name].producer()
            if node is not None:
                found[node] = None
        for parameter, name in signature.local_gradients.items():
            node = self._graph.outputs[name].producer()
            if node is not None:
                found[node] = self._parameters.get(parameter)
        return found

    def recorded(self, node: Node, cuts: Mapping[Value, Sharding]) -> Way | None:
        """The way of a node that records a sum or a gradient; None for other nodes."""
        if node not in self._forced:
            return None
        parameter = self._forced[node]
        found = REPLICATED if parameter is None else cuts.get(parameter, REPLICATED)
        return Way((found,), (found,))

    def _gradient_values(self) -> dict[Value, Value]:
        """The gradient of each parameter, as backward makes it."""
        signature, graph = self._graph.signature, self._graph
        found: dict[Value, Value] = {}
        for table in (signature.gradients, signature.left_gradients):
            for name, out in table.items():
                if name in self._parameters:
                    found[self._parameters[name]] = graph.outputs[out]
        for name, out in signature.updated.items():
            node = graph.outputs[out].producer()
            if name in self._parameters and node is not None and len(node.inputs) > 1:
                gradient = node.inputs[1]
                if gradient is not None:
                    found[self._parameters[name]] = gradient
        for name, out in signature.local_gradients.items():
            node = graph.outputs[out].producer()
            if name in self._parameters and node is not None and node.inputs[0] is not None:
                found[self._parameters[name]] = node.inputs[0]
        return found


def _wants(node: Node, way: Way) -> tuple[tuple[Value, Sharding], ...]:
    """The inputs of a node with the shardings in which a way reads them."""
    pairs = zip(node.inputs, way.inputs, strict=True)
    return tuple((x, s) for x, s in pairs if x is not None and s is not None)


def _waited(node: Node, start: Way) -> Way:
    """The way of a wait, whose start runs in this way: results as they come, and inputs that it
    lets go of as the start has read them."""
    held = len(node.inputs) - len(start.outputs)
    return Way((*start.outputs, *start.inputs[:held]), start.outputs)


def _each(kind: ParameterKind, option: Sharding) -> dict[Value, Sharding]:
    return dict.fromkeys(kind.values, option)


def _kinds(graph: Graph) -> list[ParameterKind]:
    """The parameters, trained or not, those of all layers together."""
    found: dict[tuple[str, Type], ParameterKind] = {}
    for value in graph.inputs_with(Role.PARAM):
        key = (re.sub(r"\d+", "*", value.name or ""), type_of(value))
        found.setdefault(key, ParameterKind([])).values.append(value)
    return list(found.values())


def _followers(graph: Graph) -> dict[Value, Value]:
    """The state of each parameter: optimizer state and sums of gradients."""
    signature = graph.signature
    held = [(slot.parameter, name) for slot, name in signature.slots.items()]
    held += signature.accumulators.items()
    return {graph.find_input(name): graph.find_input(parameter) for parameter, name in held}


def _pieces(nodes: Sequence[Node]) -> dict[int, set[int]]:
    """By the size of a dim, the numbers of equal pieces that values are taken apart into."""
    found: dict[int, set[int]] = {}

    def note(size: Size, piece: Size, count: Size | None = None) -> None:
        if isinstance(size, int) and isinstance(piece, int) and 0 < piece < size:
            number = size // piece if count is None else count
            if isinstance(number, int) and size % piece == 0 and 1 < number <= MOST_PIECES:
                found.setdefault(size, set()).add(number)

    for node in nodes:
        x = node.inputs[0] if node.inputs else None
        if x is None or node.op_type not in ("Split", "Reshape", "Slice"):
            continue
        shape = type_of(x).shape
        for y in node.outputs:
            after = type_of(y).shape
            if node.op_type != "Reshape":
                for size, piece in zip(shape, after, strict=True):
                    note(size, piece)
            elif len(after) > len(shape):
                for size in shape:
                    for first in after:
                        note(size, first, first)
    return found


__all__ = ["ParameterKind", "PricedWay", "Solution", "StepSharding"]
