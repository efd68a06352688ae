"""Rules of attention whose keys and values travel round a ring of ranks, so that no rank has all of
them (ring attention, arXiv 2310.01889).

    turn t:   a rank has the keys and values of the rank t before it, and sends them on while it
              attends to them; what it has made of earlier turns is joined by log-sum-exp
    backward: keys and values travel once more; what ranks add to the gradients of a rank's keys
              and values is added up on the way, and arrives there with the last turn

Under a causal mask a rank skips the keys of ranks behind it. Where dropout or a mask depends on the
place of a query or key in its sequence, they have coordinates, as in `attention_queries.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from onward.distribute.collectives import StartedCollective
from onward.distribute.tensor.rules.attention import INPUTS
from onward.distribute.tensor.rules.attention_methods import POSITIONS, drops, method_of
from onward.distribute.tensor.rules.attention_queries import (
    coordinates_of,
    of_mask,
    one_sample,
    samples_apart,
)
from onward.distribute.tensor.rules.drawn_rows import numbers_along
from onward.distribute.tensor.sharding import split
from onward.distribute.tensor.ways import RankPlace, ShardedCall, Way, same_op, way_rule
from onward.graph.build import Builder
from onward.graph.graph import Node, Value, attributes, type_of, where


@way_rule("FlashAttention", "FlashAttentionGrad")
def _in_turns(call: ShardedCall) -> Iterator[Way]:
    if method_of(call) != "ring":
        return
    first, own, shared = INPUTS[call.node.op_type]
    found = dict.fromkeys(own, POSITIONS)
    if not drops(call.attrs):
        found |= {i: of_mask(call.type(i), call.type(first)) for i in shared if call.present(i)}
    made = tuple(POSITIONS for _ in call.results)
    keys = (call.type(first + 1), call.type(first + 2))
    if call.node.op_type == "FlashAttention":
        yield Way(call.inputs(found), made, _forward, passed=keys, method="ring")
    else:
        yield Way(call.inputs(found), made, _backward, passed=keys * 2, method="ring")


@dataclass(frozen=True)
class RingCall:
    """A call of attention in turns, on one rank. queries, keys, values: of the rank's own positions
    f[B,H,Q,K], f[B,G,S,K], f[B,G,S,E]. mask, bias: of its queries and all keys. draw: seed and
    offset."""

    b: Builder
    node: Node
    place: RankPlace
    queries: Value
    keys: Value
    values: Value
    mask: Value | None
    bias: Value | None
    draw: tuple[Value | None, Value | None]

    @property
    def is_causal(self) -> bool:
        return bool(attributes(self.node).get("is_causal"))

    @property
    def by_coordinates(self) -> bool:
        return drops(attributes(self.node))

    @property
    def may_be_infinite(self) -> bool:
        """Whether all scores of a query may be -infinity."""
        added = (self.mask, self.bias)
        return any(x is not None and type_of(x).is_floating for x in added)

    def part(self, turn: int) -> int:
        """The rank whose keys this one has in a turn."""
        return (self.place.at - turn) % self.place.ranks

    def sees(self, part: int) -> bool:
        """Whether queries of this rank may see keys of a rank."""
        return not self.is_causal or part <= self.place.at

    def rows(self, x: Value) -> Value:
        """The rows of queries, keys or values as a call has them: packed where they have
        coordinates."""
        found = one_sample(self.b, x) if self.by_coordinates else x
        assert found is not None
        return found

    def apart(self, x: Value, like: Value) -> Value:
        """A result of packed rows as that of samples with so many rows as `like` has."""
        if not self.by_coordinates:
            return x
        samples, _, rows, *_ = type_of(like).shape
        return samples_apart(self.b, x, samples, rows, type_of(x).rank)

    def around(self, part: int) -> tuple[list[Value | None], list[Value | None], dict[str, int]]:
        """What a call on the keys of a rank has beside queries, keys and values: mask, seed and
        offset; coordinates and bias; attributes."""
        attrs = {"is_causal": int(self.is_causal and part == self.place.at)}
        mask = self._of_keys(self.mask, part)
        if not self.by_coordinates:
            return [mask, *self.draw], [None, None, self._of_keys(self.bias, part)], attrs
        at = [
            self._coordinates(self.queries, self.place.at, None),
            self._coordinates(self.keys, part, mask),
        ]
        return [None, *self.draw], [*at, None], attrs

    def _of_keys(self, x: Value | None, part: int) -> Value | None:
        """The columns of a mask or bias that are of a rank's keys."""
        if x is None or type_of(x).shape[-1] == 1:
            return x
        size = type_of(self.keys).shape[2]
        return self.b.slice(x, type_of(x).rank - 1, part * size, (part + 1) * size)

    def _coordinates(self, x: Value, part: int, mask: Value | None) -> Value:
        samples, _, rows, _ = type_of(x).shape
        of_rank = replace(self.place, at=part)
        positions = numbers_along(self.b, (samples, rows), 1, split(1), of_rank)
        return coordinates_of(self.b, samples, positions, mask)

    def reading(self, result: Value, *xs: Value) -> Value:
        """The result as it is. A rank that does not see the keys of the last turn reads them
        all the same, since an exchange is in the graphs of all ranks or of none."""
        if self.sees(self.part(self.place.ranks - 1)):
            return result
        for x in xs:
            kind = type_of(x)
            none = self.b.Where(np.array(False), x, np.zeros((), kind.dtype.numpy()))
            zero = self.b.reduce_sum(none, list(range(kind.rank)), keepdims=False)
            result = self.b.Add(result, self.b.cast(zero, type_of(result).dtype))
        return result

    def send(self, x: Value, what: str, placed: int = 0) -> StartedCollective:
        """Starts to send a tensor to the rank behind this one, and to receive that of the rank
        before."""
        record = f"{what} of {where(self.node) or 'attention'}, round the ring"
        attrs = {"shift": 1} | ({"placed": 1} if placed else {})
        axis = self.place.axis
        return self.place.exchange.start(self.b, "ExchangeStart", [x], axis, record, **attrs)


@dataclass(frozen=True)
class JoinedRows:
    """Attention's result over the keys of some ranks: y f[B,H,Q,E], in the precision of sums; each
    row's highest score and sum f[B,H,Q]."""

    y: Value
    peak: Value
    total: Value

    def join(self, b: Builder, other: JoinedRows, infinite: bool) -> JoinedRows:
        """The result over both. infinite: whether a row's highest score may be -infinity in
        both."""
        peak = b.Max(self.peak, other.peak)
        before = self._weight(b, peak, infinite)
        here = other._weight(b, peak, infinite)
        total = b.Add(before, here)
        last = [type_of(self.y).rank - 1]
        y = b.Add(
            b.Mul(self.y, b.unsqueeze(b.Div(before, total), last)),
            b.Mul(other.y, b.unsqueeze(b.Div(here, total), last)),
        )
        return JoinedRows(y, peak, total)

    def _weight(self, b: Builder, peak: Value, infinite: bool) -> Value:
        below = b.Sub(self.peak, peak)
        if infinite:
            zero = np.zeros((), dtype=type_of(peak).dtype.numpy())
            below = b.Where(b.Equal(self.peak, peak), zero, below)
        return b.Mul(self.total, b.Exp(below))


def _forward(
    b: Builder, node: Node, inputs: list[Value | None], place: RankPlace
) -> Sequence[Value]:
    q, k, v, mask, seed, offset, _, _, bias = [*inputs, *[None] * 6][:9]
    assert q is not None and k is not None and v is not None
    ring = RingCall(b, node, place, q, k, v, mask, bias, (seed, offset))
    rows = ring.rows(q)
    joined: JoinedRows | None = None
    for turn in range(place.ranks):
        sent = [] if turn == place.ranks - 1 else [ring.send(x, n) for x, n in ((k, "k"), (v, "v"))]
        part = ring.part(turn)
        if ring.sees(part):
            some, more, attrs = ring.around(part)
            given = _trimmed([rows, ring.rows(k), ring.rows(v), *some, *more])
            y, peak, total = same_op(b, node, given, **attrs)
            found = JoinedRows(b.cast(y, type_of(peak).dtype), peak, total)
            infinite = ring.may_be_infinite
            joined = found if joined is None else joined.join(b, found, infinite)
        k, v = (x.wait(b)[0] for x in sent) if sent else (k, v)
    assert joined is not None, "a rank sees its own keys"
    peak = ring.reading(joined.peak, k, v)
    made = (b.cast(joined.y, type_of(q).dtype), peak, joined.total)
    return [ring.apart(x, q) for x in made]


def _backward(
    b: Builder, node: Node, inputs: list[Value | None], place: RankPlace
) -> Sequence[Value]:
    given = [*inputs, *[None] * 3][:13]
    dy, q, k, v, mask, seed, offset, y, peak, total, _, _, bias = given
    assert dy is not None and q is not None and k is not None and v is not None
    assert y is not None and peak is not None and total is not None
    ring = RingCall(b, node, place, q, k, v, mask, bias, (seed, offset))
    wide, last = type_of(peak).dtype, type_of(y).rank - 1
    delta = b.reduce_sum(b.Mul(b.cast(dy, wide), b.cast(y, wide)), [last], keepdims=False)
    dy_rows, q_rows, *row = (ring.rows(x) for x in (dy, q, peak, total, delta))
    dq: Value | None = None
    own: list[Value] = []
    sums: list[StartedCollective] = []  # of the gradients of keys and values of other ranks
    biases: dict[int, Value] = {}
    for turn in range(place.ranks):
        ends = turn == place.ranks - 1
        sent = [] if ends else [ring.send(x, n, turn == 0) for x, n in ((k, "k"), (v, "v"))]
        part = ring.part(turn)
        terms: list[Value] = []
        if ring.sees(part):
            some, more, attrs = ring.around(part)
            inner = [dy_rows, q_rows, ring.rows(k), ring.rows(v), *some, None, *row[:2], *more]
            found, dk, dv, *rest = same_op(b, node, [*inner, row[2]], **attrs)
            found = b.cast(found, wide)
            dq = found if dq is None else b.Add(dq, found)
            terms = [ring.apart(dk, k), ring.apart(dv, v)]
            biases |= dict.fromkeys([part], rest[0]) if rest else {}
        if turn == 0:
            own = terms
        else:
            arrived = [x.wait(b)[0] for x in sums]
            terms = _added(b, arrived, terms) or [b.full(0.0, type_of(x)) for x in (k, v)]
            sums = [ring.send(x, n) for x, n in zip(terms, ("dk", "dv"), strict=True)]
        k, v = (x.wait(b)[0] for x in sent) if sent else (k, v)
    assert dq is not None, "a rank sees its own keys"
    dk, dv = _added(b, [x.wait(b)[0] for x in sums], own)
    dq = b.cast(ring.reading(dq, k, v), type_of(q).dtype)
    made = [ring.apart(dq, q), dk, dv]
    return [*made, _columns(b, biases, place.ranks)] if biases else made


def _added(b: Builder, xs: Sequence[Value], ys: Sequence[Value]) -> list[Value]:
    """The sums of two lists, of which one may be empty."""
    return [b.Add(x, y) for x, y in zip(xs, ys, strict=True)] if xs and ys else [*xs, *ys]


def _columns(b: Builder, biases: dict[int, Value], ranks: int) -> Value:
    """The gradient of a bias f[B,H,Q,S] from those of its columns, by rank; zeros for those of
    keys that are not seen."""
    kind = type_of(next(iter(biases.values())))
    parts = [biases.get(part) for part in range(ranks)]
    return b.Concat(*(b.full(0.0, kind) if x is None else x for x in parts), axis=kind.rank - 1)


def _trimmed(inputs: list[Value | None]) -> list[Value | None]:
    """The inputs of a node without absent ones at the end."""
    found = list(inputs)
    while found[-1] is None:
        found.pop()
    return found
