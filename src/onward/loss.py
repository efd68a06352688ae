"""Losses of models that are graphs already: of their outputs, and of labels that a step is given.

A loss is data: `onward.loss.cross_entropy("logits")`. It names outputs of the model and says which
labels it needs; `write` adds it to a graph. Labels come in as inputs of these names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import onnx_ir as ir

from onward.errors import OnwardError
from onward.graph.build import Builder
from onward.graph.graph import type_of
from onward.graph.types import DType, Type, parse_dtype

Value = ir.Value
Values = Mapping[str, Value]


class Loss(Protocol):
    """A loss by the outputs of a model."""

    def labels(self, outputs: Values) -> dict[str, Type]:
        """The inputs that the loss needs beside the model's, with their types. Raises OnwardError
        for an output that the model lacks, or that has no such loss."""
        ...

    def write(self, b: Builder, outputs: Values, labels: Values) -> Value:
        """Writes the loss, `f32[]`."""
        ...


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy of logits `f32[..., C]` and labels `i64[...]`, the mean over those that are not
    `ignore_index` (`torch.nn.functional.cross_entropy`). shift: position t of dim 1 predicts the
    label at t + 1, as in a causal language model."""

    output: str = "logits"
    target: str = "labels"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    shift: bool = False

    def labels(self, outputs: Values) -> dict[str, Type]:
        logits = type_of(_output(outputs, self.output, least=2))
        if self.shift and logits.rank != 3:
            raise OnwardError(
                f"the output '{self.output}' is {logits}, and shift=True needs f32[B,T,C]; fix: "
                "leave shift out"
            )
        return {self.target: Type(DType.INT64, logits.shape[:-1])}

    def write(self, b: Builder, outputs: Values, labels: Values) -> Value:
        logits, target = outputs[self.output], labels[self.target]
        if self.shift:  # of the labels alone, so that the head and its loss stay next to each other
            rows, length = type_of(target).shape
            none = b.full(self.ignore_index, Type(DType.INT64, (rows, 1)))
            target = b.Concat(b.slice(target, 1, 1, length), none, axis=1)
        shape = type_of(logits).shape
        rows = _product(shape[:-1])
        logits, target = b.reshape(logits, (rows, shape[-1])), b.reshape(target, (rows,))
        attrs: dict[str, Any] = {"ignore_index": self.ignore_index, "reduction": "mean"}
        if self.label_smoothing:
            found = b.CrossEntropyLoss(
                logits, target, label_smoothing=self.label_smoothing, **attrs
            )
        else:
            found = b.SoftmaxCrossEntropyLoss(logits, target, **attrs)
        return found[0] if isinstance(found, tuple) else found


@dataclass(frozen=True)
class MeanOfError:
    """The mean of a function of `output - target`: its square or its magnitude
    (`torch.nn.functional.mse_loss`, `l1_loss`)."""

    output: str
    target: str = "labels"
    power: int = 2

    def labels(self, outputs: Values) -> dict[str, Type]:
        return {self.target: type_of(_output(outputs, self.output))}

    def write(self, b: Builder, outputs: Values, labels: Values) -> Value:
        error = b.Sub(outputs[self.output], labels[self.target])
        return b.ReduceMean(b.Mul(error, error) if self.power == 2 else b.Abs(error), keepdims=0)


@dataclass(frozen=True)
class BinaryCrossEntropy:
    """Binary cross-entropy of logits and labels from 0 to 1, the mean over all
    (`torch.nn.functional.binary_cross_entropy_with_logits`)."""

    output: str = "logits"
    target: str = "labels"

    def labels(self, outputs: Values) -> dict[str, Type]:
        return {self.target: type_of(_output(outputs, self.output))}

    def write(self, b: Builder, outputs: Values, labels: Values) -> Value:
        x, y = outputs[self.output], labels[self.target]
        # log(1 + exp(x)) is -log(1 - p) of p = sigmoid(x); in this form nothing cancels, and its
        # gradient at 0 is p - y, which max(x, 0) and |x| have not
        rest = b.Sub(b.scalar(1.0, type_of(y).dtype), y)
        terms = b.Add(b.Mul(rest, b.Softplus(x)), b.Mul(y, b.Softplus(b.Neg(x))))
        return b.ReduceMean(terms, keepdims=0)


@dataclass(frozen=True)
class Contrastive:
    """Cross-entropy of each row of one output among all rows of another, by their cosine over a
    temperature: in-batch negatives (arXiv 1807.03748). Both are `f32[B,D]`."""

    first: str
    second: str
    temperature: float = 0.05

    def labels(self, outputs: Values) -> dict[str, Type]:
        for name in (self.first, self.second):
            if type_of(_output(outputs, name, least=2)).rank != 2:
                raise OnwardError(f"the output '{name}' is no f32[B,D]; fix: name a pooled output")
        return {}

    def write(self, b: Builder, outputs: Values, labels: Values) -> Value:
        a, c = (_normalized(b, outputs[n]) for n in (self.first, self.second))
        scores = b.MatMul(a, b.transpose(c, [1, 0]))
        scores = b.Div(scores, b.scalar(self.temperature, type_of(scores).dtype))
        target = b.arange(type_of(scores).shape[0])
        found = b.SoftmaxCrossEntropyLoss(scores, target, reduction="mean")
        return found[0] if isinstance(found, tuple) else found


@dataclass(frozen=True)
class Like:
    """The type of labels by an output of the model: its first `dims` dims (None: all; below 0: all
    but the last ones), and a dtype such as `"i64"` (None: the output's)."""

    output: str
    dtype: str | None = None
    dims: int | None = None

    def type(self, outputs: Values) -> Type:
        """The type. Raises OnwardError for an output or a dtype that there is not."""
        if self.output not in outputs:
            raise OnwardError(
                f"labels are like the output '{self.output}', which the model does not have; fix: "
                f"one of {', '.join(outputs)}"
            )
        found = type_of(outputs[self.output])
        try:
            dtype = found.dtype if self.dtype is None else parse_dtype(self.dtype)
        except KeyError as error:
            raise OnwardError(f"labels are of {self.dtype!r}: {error.args[0]}") from error
        return Type(dtype, found.shape[: self.dims])


@dataclass(frozen=True)
class WrittenLoss:
    """A loss that a function writes into the graph (`function`)."""

    write_loss: Callable[..., Value]
    given: Mapping[str, Like]
    named: Mapping[str, str] = field(default_factory=dict)

    @property
    def _names(self) -> list[str]:
        """The values that the function takes, by the names of its parameters without a default."""
        held = list(inspect.signature(self.write_loss).parameters.values())[1:]
        return [p.name for p in held if p.default is inspect.Parameter.empty]

    def labels(self, outputs: Values) -> dict[str, Type]:
        wanted = [self.named.get(n, n) for n in self._names if n not in self.given]
        unknown = [name for name in wanted if name not in outputs]
        if unknown:
            raise OnwardError(
                f"the loss takes '{unknown[0]}', which is no output of the model; fix: one of "
                f"{', '.join(outputs)} (outputs={{...}} for names that Python lacks), or say its "
                "type in labels={...}"
            )
        return {name: like.type(outputs) for name, like in self.given.items()}

    def write(self, b: Builder, outputs: Values, labels: Values) -> Value:
        values = {
            n: labels[n] if n in self.given else outputs[self.named.get(n, n)] for n in self._names
        }
        try:
            found = self.write_loss(b, **values)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise OnwardError(f"the function of the loss raised: {error}") from error
        if not isinstance(found, Value) or type_of(found) != Type(DType.FLOAT, ()):
            what = str(type_of(found)) if isinstance(found, Value) else type(found).__name__
            raise OnwardError(
                f"the function of the loss returned {what}; fix: one number, f32[], as "
                "b.ReduceMean(x, keepdims=0) is"
            )
        return found


def function(
    write: Callable[..., Value],
    labels: Mapping[str, Like | str] | None = None,
    outputs: Mapping[str, str] | None = None,
) -> WrittenLoss:
    """A loss of your own. write: takes a builder (`graph/build.py`), then values by the names of
    its parameters: outputs of the model, and labels; it makes ONNX ops by their names (of several
    outputs: a tuple; SoftmaxCrossEntropyLoss takes logits f32[N,C]), and returns f32[]. labels: the
    type of each label, as `Like` says, or the name of an output of that type; a label that has the
    name of an input of the model is that input. outputs: the name of an output by the parameter
    that takes it, where they differ. Raises OnwardError for a function without parameters, and for
    labels and outputs that it does not take.

        def huber(b, score, target):
            far = b.Abs(b.Sub(score, target))
            near = b.Less(far, 1.0)
            half = b.Mul(b.Mul(far, far), 0.5)
            return b.ReduceMean(b.Where(near, half, b.Sub(far, 0.5)), keepdims=0)

        loss = onward.loss.function(huber, labels={"target": "score"})
    """
    given = {n: Like(x) if isinstance(x, str) else x for n, x in (labels or {}).items()}
    made = WrittenLoss(write, given, dict(outputs or {}))
    kinds = {p.kind for p in inspect.signature(write).parameters.values()}
    plain = kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    if not plain or not made._names:
        raise OnwardError(
            "the function of a loss takes a builder, then values by name; fix: "
            "def loss(b, logits, labels): ..."
        )
    for word, named in (("labels", given), ("outputs", made.named)):
        strange = [name for name in named if name not in made._names]
        if strange:
            raise OnwardError(
                f"{word} names '{strange[0]}', which the function of the loss does not take; fix: "
                f"one of {', '.join(made._names)}"
            )
    return made


def cross_entropy(
    output: str = "logits",
    target: str = "labels",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    shift: bool = False,
) -> CrossEntropy:
    """Cross-entropy of logits `f32[..., C]` and labels `i64[...]`: see `CrossEntropy`."""
    return CrossEntropy(output, target, ignore_index, label_smoothing, shift)


def mse(output: str, target: str = "labels") -> MeanOfError:
    """The mean squared error of an output and labels of its shape."""
    return MeanOfError(output, target, 2)


def l1(output: str, target: str = "labels") -> MeanOfError:
    """The mean absolute error of an output and labels of its shape."""
    return MeanOfError(output, target, 1)


def bce_with_logits(output: str = "logits", target: str = "labels") -> BinaryCrossEntropy:
    """Binary cross-entropy of logits and labels from 0 to 1, of one shape."""
    return BinaryCrossEntropy(output, target)


def contrastive(first: str, second: str, temperature: float = 0.05) -> Contrastive:
    """In-batch negatives over two outputs `f32[B,D]`: see `Contrastive`."""
    return Contrastive(first, second, temperature)


def _output(outputs: Values, name: str, least: int = 0) -> Value:
    if name not in outputs:
        raise OnwardError(
            f"the loss names the output '{name}', which the model does not have; fix: one of "
            f"{', '.join(outputs)}"
        )
    found = type_of(outputs[name])
    if not found.is_floating or found.rank < least:
        raise OnwardError(
            f"the output '{name}' is {found}, of which there is no such loss; fix: name another"
        )
    return outputs[name]


def _normalized(b: Builder, x: Value) -> Value:
    """x f[B,D] over the length of each row, at least 1e-12 as in `torch.nn.functional.normalize`.
    The bound is one of the square, since the root of 0 has no finite gradient."""
    kind = type_of(x).dtype
    if kind not in (DType.FLOAT, DType.DOUBLE):
        x, kind = b.cast(x, DType.FLOAT), DType.FLOAT
    square = b.reduce_sum(b.Mul(x, x), [1], keepdims=True)
    return b.Div(x, b.Sqrt(b.Max(square, b.scalar(1e-24, kind))))


def _product(shape: tuple[Any, ...]) -> Any:
    total: Any = 1
    for size in shape:
        total = total * size
    return total


__all__ = [
    "BinaryCrossEntropy", "Contrastive", "CrossEntropy", "Like", "Loss", "MeanOfError",
    "WrittenLoss", "bce_with_logits", "contrastive", "cross_entropy", "function", "l1", "mse",
]  # fmt: skip
