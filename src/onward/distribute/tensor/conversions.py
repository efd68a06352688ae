"""Conversions: from the sharding that a value has to another, as collectives, and their time.

    terms  -> whole     all-reduce            part -> whole        all-gather
    terms  -> part      reduce-scatter        part -> other part   all-to-all
    whole  -> part      a slice               whole -> terms       zeros on all ranks but the first

Norms are exchanged as squares in f64, whose range the square of any f32 has; bools as the largest
of their negations. Collectives cut along dim 0, so that other dims are moved there and back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np

from onward.distribute.collectives import StartedCollective
from onward.distribute.tensor.sharding import (
    ALL,
    MAX,
    NORM,
    PARTIAL,
    REPLICATED,
    ROWS,
    SUM,
    Sharding,
)
from onward.distribute.tensor.ways import RankPlace
from onward.graph.build import Builder
from onward.graph.graph import Value, array_of, type_of
from onward.graph.types import DType, Size, Type, divide, product, substitute


@dataclass(frozen=True)
class DeviceRates:
    """Approximate rates of a rank and of the links between ranks, for the choice of shardings. Only
    their ratios matter. link_bytes_per_second: that a rank receives. hop_seconds: the latency of a
    collective for each other rank. The defaults are those of an H100 with NVLink."""

    flops_per_second: float = 400e12
    bytes_per_second: float = 2.5e12
    launch_seconds: float = 4e-6
    link_bytes_per_second: float = 300e9
    hop_seconds: float = 3e-6


@dataclass(frozen=True)
class Costs:
    """The time of work and of collectives. sizes: numbers for symbols, or 64 for those that are
    missing."""

    rates: DeviceRates
    ranks: int
    sizes: Mapping[str, int]

    def number(self, size: Size) -> int:
        """A size as a number."""
        if isinstance(size, int):
            return size
        known: dict[str, Size] = {n: self.sizes.get(n, 64) for n in size.symbols}
        found = substitute(size, known)
        assert isinstance(found, int)
        return found

    def nbytes(self, type: Type) -> int:
        """The bytes of a tensor."""
        return self.number(product(type.shape)) * int(type.dtype.itemsize)

    def work(self, flops: float, nbytes: float) -> float:
        """Seconds of one launch."""
        rates = self.rates
        moved = nbytes / rates.bytes_per_second
        return rates.launch_seconds + max(flops / rates.flops_per_second, moved)

    def collective(self, nbytes: float, ways: int) -> float:
        """Seconds of a collective on `nbytes`, of the whole tensor, that passes it round `ways`
        times."""
        others = self.ranks - 1
        once = nbytes * others / self.ranks / self.rates.link_bytes_per_second
        return ways * (once + others * self.rates.hop_seconds)

    def conversion(self, type: Type, have: Sharding, want: Sharding) -> float:
        """Seconds of a conversion of a value of this type."""
        if have == want:
            return 0.0
        nbytes = self.nbytes(type)
        if want.terms == ROWS:  # any rows will do that are right
            return 0.0 if have == REPLICATED else self.conversion(type, have, REPLICATED)
        if have.terms == ROWS and want != REPLICATED:
            return self.work(0, 2 * nbytes) + self.conversion(type, PARTIAL, want)
        if have.terms:
            if want.dim is not None and have == PARTIAL:
                return self.collective(nbytes, 1)
            back = 0.0 if want == REPLICATED else self.conversion(type, REPLICATED, want)
            return self.collective(nbytes, 2) + back
        if want.terms and have.dim is not None:
            return self.work(0, nbytes)
        if have == REPLICATED:
            share = nbytes / (1 if want.dim is None else self.ranks)
            return 0.0 if want.terms in (MAX, ALL) else self.work(0, 2 * share)
        if want.dim is not None and want.dim != have.dim:
            return self.collective(nbytes / self.ranks, 1)
        back = 0.0 if want == REPLICATED else self.conversion(type, REPLICATED, want)
        return self.collective(nbytes, 1) + back


def costs_of_memory(ranks: int, parts: Collection[str]) -> Costs:
    """The costs by which whatever can be is split, since memory asks for it: those of a slow device
    with fast links. parts: names of the symbols of ranks' parts of a length."""
    rates = DeviceRates(
        flops_per_second=1e10, bytes_per_second=1e11, launch_seconds=0.0,
        link_bytes_per_second=2e10, hop_seconds=1e-9,
    )  # fmt: skip
    return Costs(rates, ranks, {"B": 8, **dict.fromkeys(parts, 512)})


Finish = Callable[[Builder], Value]


def start_conversion(
    b: Builder, x: Value, whole: Type, have: Sharding, want: Sharding, place: RankPlace, what: str,
    placed: int = 0,
) -> Finish:  # fmt: skip
    """Begins a conversion of what a rank has of a value; returns a function that ends it where the
    result is read. whole: the type of the value. what: the value, for the collective's record.
    placed: 1 where a gathering starts no earlier than here, whatever else the plan could do."""
    if have == want:
        return lambda _: x
    if type_of(x).dtype == DType.BOOL and have.dim is not None and not want.terms:
        bits, kind = b.cast(x, DType.UINT8), whole.with_dtype(DType.UINT8)
        end = start_conversion(b, bits, kind, have, want, place, what, placed)
        return lambda late: late.cast(end(late), DType.BOOL)
    if have.terms == ROWS:
        x, have = _own_rows(b, x, have, place), PARTIAL
        if want == PARTIAL:
            return lambda _: x
    if have == PARTIAL and want.dim is not None:
        return _scattered(b, x, whole, want, place, what)
    if have.dim is not None and want.dim not in (None, have.dim):
        return _swapped(b, x, whole, have, want, place, what)
    if have.dim is not None and want == PARTIAL:
        return lambda _: _among_zeros(b, x, whole, have, place)
    first = _to_whole(b, x, whole, have, place, what, placed)
    if want == REPLICATED:
        return first
    return lambda late: from_whole(late, first(late), want, place)


def from_whole(b: Builder, x: Value, want: Sharding, place: RankPlace) -> Value:
    """What a rank has of a value that every rank has: its part, or its term."""
    if want.terms in (MAX, ALL, ROWS):
        return x
    if want.terms:  # every rank reads x, so that exchanges which make it are alive on all of them
        return b.Where(b.const(np.array(place.at == 0)), x, b.scalar(0, type_of(x).dtype))
    if want.dim is None:
        return x
    local = want.local(type_of(x), place.ranks)
    array = array_of(x)
    if array is not None:
        grouped = array.reshape([int(n) for n in _grouped(type_of(x), want, place)])  # type: ignore[arg-type]
        return b.const(np.take(grouped, place.at, want.dim + 1).reshape(local.shape))  # type: ignore[arg-type]
    maker = x.producer()
    if maker is not None and maker.op_type == "Expand" and not type_of(maker.inputs[0]).rank:
        assert maker.inputs[0] is not None
        return b.expand(maker.inputs[0], local.shape)
    dim, size = want.dim, local.shape[want.dim]
    if want.groups == 1:
        return b.slice(x, dim, place.at * size, (place.at + 1) * size)
    grouped_shape = _grouped(type_of(x), want, place)
    part = b.slice(b.reshape(x, grouped_shape), dim + 1, place.at, place.at + 1)
    return b.reshape(part, local.shape)


def _own_rows(b: Builder, x: Value, have: Sharding, place: RankPlace) -> Value:
    """The rows that a rank has, with zeros in the place of others."""
    own: Value = place.shared["own rows", have.owner]
    behind = type_of(x).rank - 1
    shaped = b.reshape(own, (*type_of(own).shape, *[1] * behind))
    return b.Where(shaped, x, b.scalar(0, type_of(x).dtype))


def _among_zeros(b: Builder, x: Value, whole: Type, have: Sharding, place: RankPlace) -> Value:
    """A rank's part in its place, with zeros in those of the others, as a term of the value."""
    shape, dim = list(_grouped(whole, have, place)), have.dim
    assert dim is not None
    shape[dim + 1] = 1
    before, behind = ([0] * len(shape) for _ in range(2))
    before[dim + 1], behind[dim + 1] = place.at, place.ranks - 1 - place.at
    wide = b.Pad(b.reshape(x, tuple(shape)), b.ints([*before, *behind]), b.scalar(0, whole.dtype))
    return b.reshape(wide, whole.shape)


def _grouped(whole: Type, found: Sharding, place: RankPlace) -> tuple[Size, ...]:
    """The shape of a whole value with the dim that is split as groups, ranks and inner."""
    dim = found.dim
    assert dim is not None
    inner = divide(whole.shape[dim], found.groups * place.ranks)
    assert inner is not None, f"{whole} is not {found} over {place.ranks} ranks"
    middle = (found.groups, place.ranks, inner)
    return (*whole.shape[:dim], *middle, *whole.shape[dim + 1 :])


def _to_whole(
    b: Builder, x: Value, whole: Type, have: Sharding, place: RankPlace, what: str, placed: int
) -> Finish:
    if have == REPLICATED:
        return lambda _: x
    if have.dim is not None:
        return _gathered(b, x, whole, have, place, what, placed)
    match have.terms:
        case "norm":
            wide = b.cast(x, DType.DOUBLE)
            started = _start(b, "AllReduceStart", b.Mul(wide, wide), place, what, reduction="sum")
            return lambda late: late.cast(late.Sqrt(started.wait(late)[0]), whole.dtype)
        case "all":
            broken = b.cast(b.Not(x), DType.INT32)
            started = _start(b, "AllReduceStart", broken, place, what, reduction="max")
            return lambda late: late.Equal(started.wait(late)[0], 0)
        case by:
            started = _start(b, "AllReduceStart", x, place, what, reduction=by)
            return lambda late: started.wait(late)[0]


def _start(
    b: Builder, op: str, x: Value, place: RankPlace, what: str, **attrs: str | int
) -> StartedCollective:
    return place.exchange.start(b, op, [x], place.axis, what, **attrs)


def _gathered(
    b: Builder, x: Value, whole: Type, have: Sharding, place: RankPlace, what: str, placed: int
) -> Finish:
    dim, shape = have.dim, _grouped(whole, have, place)
    assert dim is not None
    attrs = {"placed": placed} if placed else {}
    if dim == 0 and have.groups == 1:
        started = _start(b, "AllGatherStart", x, place, what, **attrs)
        return lambda late: started.wait(late)[0]
    row = b.reshape(x, (1, *shape[: dim + 1], *shape[dim + 2 :]))
    started = _start(b, "AllGatherStart", row, place, what, **attrs)

    def finish(late: Builder) -> Value:
        [rows] = started.wait(late)
        others = list(range(1, len(shape)))
        perm = [*others[: dim + 1], 0, *others[dim + 1 :]]
        return late.reshape(late.transpose(rows, perm), whole.shape)

    return finish


def _in_front(b: Builder, x: Value, whole: Type, want: Sharding, place: RankPlace) -> Value:
    """A value whole along the dim of `want`, with the ranks' parts of it in front:
    [ranks, ..., groups, inner, ...]."""
    shape, dim = _grouped(whole, want, place), want.dim
    assert dim is not None
    wide = b.reshape(x, shape)
    others = [d for d in range(len(shape)) if d != dim + 1]
    return b.transpose(wide, [dim + 1, *others])


def _scattered(
    b: Builder, x: Value, whole: Type, want: Sharding, place: RankPlace, what: str
) -> Finish:
    local = want.local(whole, place.ranks)
    if want.dim != 0 or want.groups != 1:
        x = _in_front(b, x, whole, want, place)
    started = _start(b, "ReduceScatterStart", x, place, what, reduction=SUM)
    return lambda late: late.reshape(started.wait(late)[0], local.shape)


def _swapped(
    b: Builder, x: Value, whole: Type, have: Sharding, want: Sharding, place: RankPlace, what: str
) -> Finish:
    """From parts along one dim to parts along another, by an all-to-all."""
    local, here = have.local(whole, place.ranks), have.dim
    assert here is not None and want.dim is not None
    sent = _in_front(b, x, local, want, place)
    started = _start(b, "AllToAllStart", sent, place, what)
    target = want.local(whole, place.ranks)

    def finish(late: Builder) -> Value:
        [rows] = started.wait(late)  # a row for each rank: its part along `here`
        shape = _grouped(target, have, place)
        rows = late.reshape(rows, (place.ranks, *shape[: here + 1], *shape[here + 2 :]))
        others = list(range(1, len(shape)))
        perm = [*others[: here + 1], 0, *others[here + 1 :]]
        return late.reshape(late.transpose(rows, perm), target.shape)

    return finish


__all__ = [
    "NORM",
    "Costs",
    "DeviceRates",
    "Finish",
    "costs_of_memory",
    "from_whole",
    "start_conversion",
]
