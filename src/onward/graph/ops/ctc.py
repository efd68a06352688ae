"""Connectionist temporal classification (A. Graves et al., "Connectionist Temporal Classification",
ICML 2006) and its gradient. The body is unrolled over the steps, whose number must be known."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onward.graph.graph import type_of
from onward.graph.ops.call import Call
from onward.graph.ops.record import Op
from onward.graph.types import DType, Type

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value


class _Lattice:
    """The states of each sample in CTC, i64[N,2S+1]: its labels, with blanks before, between and
    after."""

    def __init__(self, b: Builder, inputs: list[Value | None], blank: int) -> None:
        x, targets, steps, lengths = inputs
        assert x is not None and targets is not None and steps is not None and lengths is not None
        self.b, self.x, self.steps, self.lengths = b, x, steps, lengths
        self.count, self.batch, self.classes = type_of(x).shape
        labels = type_of(targets).shape[1]
        if not isinstance(self.count, int) or not isinstance(labels, int):
            raise ValueError("CTCLoss over a number of steps or labels that is not known")
        self.states, self.dtype = 2 * labels + 1, type_of(x).dtype
        self.dead = b.scalar(-math.inf, self.dtype)
        known = b.Less(np.arange(labels, dtype=np.int64), b.unsqueeze(lengths, [1]))
        safe = b.Where(known, targets, b.scalar(blank, DType.INT64))
        pair = b.Concat(b.full(blank, self._whole(labels, 1)), b.unsqueeze(safe, [2]), axis=2)
        pairs = b.reshape(pair, (self.batch, 2 * labels))
        self.labels = b.Concat(pairs, b.full(blank, self._whole(1)), axis=1)
        last = b.unsqueeze(b.Mul(lengths, 2), [1])
        state = np.arange(self.states, dtype=np.int64)
        before = b.Equal(b.const(state + 1), last)
        self.ends = b.Or(b.Equal(state, last), before)

    def _whole(self, *sizes: int) -> Type:
        return Type(DType.INT64, (self.batch, *sizes))

    def emitted(self, step: int) -> Value:
        """The log-probability of each state's label at a step, f[N,2S+1]."""
        b = self.b
        row = b.squeeze(b.slice(self.x, 0, step, step + 1), [0])
        return b.GatherElements(row, self.labels, axis=1)

    def moved(self, x: Value, by: int, fill: Value) -> Value:
        """x[N,2S+1] shifted by `by` states towards the end, or towards the start if negative;
        `fill` enters."""
        keep = self.states - abs(by)
        if keep <= 0:
            return self.b.expand(fill, type_of(x).shape)
        part = self.b.slice(x, 1, max(0, -by), max(0, -by) + keep)
        pads = [0, max(0, by), 0, max(0, -by)]
        return self.b.Pad(part, self.b.ints(pads), fill)

    def together(self, *parts: Value) -> Value:
        """The log of a sum, given the logs of its terms."""
        b, most = self.b, parts[0]
        for part in parts[1:]:
            most = b.Max(most, part)
        none, zero = b.Equal(most, self.dead), b.scalar(0.0, self.dtype)
        level = b.Where(none, zero, most)
        total: Any = None
        for part in parts:
            share = b.Exp(b.Sub(part, level))
            total = share if total is None else b.Add(total, share)
        found = b.Add(b.Log(b.Where(none, b.scalar(1.0, self.dtype), total)), level)
        return b.Where(none, self.dead, found)

    def next(self, x: Value, by: int) -> Value:
        """Log-probabilities one transition later (by 1) or earlier (by -1). A transition stays,
        moves one state, or skips a blank between two different labels."""
        none = self.b.scalar(-1, DType.INT64)
        other = self.b.Not(self.b.Equal(self.labels, self.moved(self.labels, 2 * by, none)))
        far = self.b.Where(other, self.moved(x, 2 * by, self.dead), self.dead)
        return self.together(x, self.moved(x, by, self.dead), far)

    def within(self, step: int) -> Value:
        return self.b.unsqueeze(self.b.Less(np.array(step, np.int64), self.steps), [1])

    def forwards(self) -> list[Value]:
        """The log-probabilities (alpha) of all paths to each state, by step; constant after a
        sample's last step."""
        b = self.b
        first = b.const(np.arange(self.states)[None] < 2)
        alpha = b.Where(first, self.emitted(0), self.dead)
        found = [alpha]
        for step in range(1, int(self.count)):  # type: ignore[arg-type]
            new = b.Add(self.next(alpha, 1), self.emitted(step))
            alpha = b.Where(self.within(step), new, alpha)
            found.append(alpha)
        return found

    def loss(self, alpha: Value) -> Value:
        """The loss f[N], from alpha at the last step."""
        b, zero = self.b, self.b.scalar(0.0, self.dtype)
        ends = b.Where(self.ends, alpha, self.dead)
        most = b.ReduceMax(ends, b.ints([1]), keepdims=1)
        none = b.Equal(most, self.dead)
        level = b.Where(none, zero, most)
        total = b.reduce_sum(b.Exp(b.Sub(ends, level)), [1], keepdims=True)
        found = b.Add(b.Log(b.Where(none, b.scalar(1.0, self.dtype), total)), level)
        loss = b.squeeze(b.Where(none, b.scalar(math.inf, self.dtype), b.Neg(found)), [1])
        nothing = b.Equal(self.steps, b.scalar(0, DType.INT64))
        empty = b.Equal(self.lengths, b.scalar(0, DType.INT64))
        return b.Where(nothing, b.Where(empty, zero, b.scalar(math.inf, self.dtype)), loss)

    def shares(self, alphas: list[Value], loss: Value) -> list[Value]:
        """The posterior probability of each state given the labels, f[N,2S+1] for each step."""
        b, zero = self.b, self.b.scalar(0.0, self.dtype)
        finite = b.Less(b.unsqueeze(loss, [1]), b.scalar(math.inf, self.dtype))
        level = b.Where(finite, b.unsqueeze(loss, [1]), zero)
        # log-probabilities of all paths from a state on, without its own label
        beta: Value | None = None
        found: list[Value] = []
        for step in reversed(range(int(self.count))):  # type: ignore[arg-type]
            last = b.unsqueeze(b.Equal(np.array(step + 1, np.int64), self.steps), [1])
            start = b.Where(self.ends, zero, self.dead)
            if beta is None:
                beta = b.Where(last, start, self.dead)
            else:
                beta = b.Where(last, start, self.next(b.Add(beta, self.emitted(step + 1)), -1))
            whole = b.Add(alphas[step], beta)
            alive = b.And(b.Greater(whole, self.dead), b.And(finite, self.within(step)))
            found.append(b.Where(alive, b.Exp(b.Add(b.Where(alive, whole, zero), level)), zero))
        return found[::-1]

    def probabilities(self, loss: Value, zero_infinity: int) -> list[Value]:
        """The posterior probabilities of the classes, f[N,C] for each step; 0 for steps that do not
        count."""
        b, zero = self.b, self.b.scalar(0.0, self.dtype)
        finite = b.unsqueeze(b.Less(loss, b.scalar(math.inf, self.dtype)), [1])
        found = []
        for step in range(int(self.count)):  # type: ignore[arg-type]
            row = b.Exp(b.squeeze(b.slice(self.x, 0, step, step + 1), [0]))
            counted = self.within(step)
            counted = b.And(counted, finite) if zero_infinity else counted
            found.append(b.Where(counted, row, zero))
        return found


def _ctc_loss(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    lattice = _Lattice(b, inputs, attrs["blank"])
    return [lattice.loss(lattice.forwards()[-1])]


def _ctc_loss_grad(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    dy = inputs[0]
    assert dy is not None
    lattice = _Lattice(b, inputs[1:], attrs["blank"])
    alphas = lattice.forwards()
    loss = lattice.loss(alphas[-1])
    shares = lattice.shares(alphas, loss)
    zeros = b.full(0.0, Type(lattice.dtype, (lattice.batch, lattice.classes)))
    down, rows = b.unsqueeze(b.Neg(dy), [1]), []
    whole = lattice.probabilities(loss, attrs["zero_infinity"]) if attrs["normal"] else None
    for step, share in enumerate(shares):
        row = b.ScatterElements(zeros, lattice.labels, b.Mul(share, down), axis=1, reduction="add")
        if whole is not None:
            row = b.Add(row, b.Mul(whole[step], b.unsqueeze(dy, [1])))
        rows.append(b.unsqueeze(row, [0]))
    return [rows[0] if len(rows) == 1 else b.Concat(*rows, axis=0)]


def _check(call: Call, first: int) -> None:
    x, targets = call.type(first), call.shape(first + 1)
    if x.rank != 3 or len(targets) != 2:
        raise ValueError(f"{call.op_type}({x}, {targets}): log-probabilities f[T,N,C], i64[N,S]")


def _infer(call: Call) -> Type:
    _check(call, 0)
    return call.type().with_shape(call.shape()[1:2])


def _infer_grad(call: Call) -> Type:
    _check(call, 1)
    return call.type(1)


def _case(blank: int, zero_infinity: int, normal: int = 0) -> dict[str, Any]:
    return {"blank": blank, "zero_infinity": zero_infinity, "normal": normal}


_CASES = (
    (_case(0, 0), ("f32[5,3,4]", "i64[3,2]", "i64[3]", "i64[3]")),
    (_case(3, 1), ("f32[4,2,4]", "i64[2,1]", "i64[2]", "i64[2]")),
    (_case(1, 0), ("f32[1,2,3]", "i64[2,1]", "i64[2]", "i64[2]")),
)
OPS = (
    Op(
        name="CTCLoss",
        infer=_infer,
        body=_ctc_loss,
        doc="log-probabilities f[T,N,C], labels i64[N,S], how many steps and labels of each sample "
        "count i64[N] twice -> -log p(labels) f[N]. The attribute `blank` is the class of no "
        "label. Samples without a path have the loss infinity; with `zero_infinity` no gradient. "
        "With `normal` the gradient is that of log-probabilities whose exponentials sum to 1 in "
        "each step, however they are moved, as torch's is.",
        cases=_CASES,
    ),
    Op(
        name="CTCLossGrad",
        infer=_infer_grad,
        body=_ctc_loss_grad,
        doc="dx f[T,N,C] of CTCLoss, from dy f[N] and its inputs: of each class, less how likely "
        "it is at a step, given the labels; with `normal` more by its probability.",
        cases=tuple(
            ({**attrs, "normal": normal}, (types[3].replace("i64", "f32"), *types))
            for attrs, types in _CASES
            for normal in (0, 1)
        ),
    ),
)
