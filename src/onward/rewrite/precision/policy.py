"""The cast policy: which op computes in which precision, each line with its reason.

The classes are those of torch's CPU autocast
(https://docs.pytorch.org/docs/stable/amp.html#cpu-op-specific-behavior), with differences that make
results more exact: ops that autocast runs "in the type of its input" run in fp32 if they round more
than once (softmax, log-softmax, exponentials, sums), and statistics of norms are fp32. A fused op
loads and stores its operands' type and computes in fp32 in between.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from onward.errors import CaptureError
from onward.graph.graph import Graph, Node, precision_said, precisions_said, type_of, where
from onward.graph.ops import OPS
from onward.graph.types import DType


class Precision(enum.Enum):
    """The type that an op's floating operands are cast to."""

    LOW = "low"  # f32 operands are cast down
    FULL = "full"  # low operands are cast up
    WIDEST = "widest"  # low if all floating operands are low, else f32
    FOLLOWS = "follows"  # moves elements: like WIDEST, but numbers never change


@dataclass(frozen=True)
class Line:
    """One line of the table. operands: those that the class applies to; None: all floating ones.
    Other operands of a LOW op stay f32; those of a WIDEST op follow, unless `others_stay`. alone:
    if the op has other floating operands, all are f32. widens: results may have twice the exponent
    of the operands, too large for fp16, where the op is FULL."""

    precision: Precision
    ops: tuple[str, ...]
    reason: str
    operands: tuple[int, ...] | None = None
    alone: bool = False
    others_stay: bool = False
    widens: bool = False


_TABLE = (
    Line(
        Precision.LOW,
        ("MatMul", "Gemm", "Conv", "ConvTranspose", "GroupedMatMul"),
        "the arithmetic of a step: two to three times as fast, sums of products are fp32",
    ),
    Line(
        Precision.LOW,
        ("LinearCrossEntropy",),
        "a product with its loss: logits are rounded once, the loss and sums over rows are fp32",
        operands=(0, 1),
    ),
    Line(
        Precision.LOW,
        ("FlashAttention",),
        "products again; scores, softmax and sums within it are fp32. What is added to the scores "
        "(a bias, a mask of numbers) has a range and a gradient that are fp32, and so is all then",
        operands=(0, 1, 2),
        alone=True,
    ),
    Line(
        Precision.WIDEST,
        ("BiasActivation",),
        "the product before decides, whose bias it is: autocast rounds a product's bias too",
        operands=(0,),
    ),
    Line(
        Precision.WIDEST,
        ("Rotary",),
        "its angles are fp32, and one rounding is left, as attention after it would round",
        operands=(0,),
        others_stay=True,
    ),
    Line(
        Precision.WIDEST,
        ("GatedActivation", "Gelu", "Dropout", "Relu", "Neg", "Abs"),
        "one pass over memory, fp32 within, and one rounding of each result",
    ),
    Line(
        Precision.WIDEST,
        ("Add", "Sub", "Max", "Min"),
        "one rounding; a residual stream of fp32 stays so, as in autocast",
    ),
    Line(
        Precision.WIDEST,
        ("Mul",),
        "the same. A model's own `.float()` before a square is none in the fp32 that is captured: "
        "in fp16 the square is fp32 without it",
        widens=True,
    ),
    Line(
        Precision.FOLLOWS,
        (
            "Identity", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Expand", "Slice", "Split",
            "Concat", "Gather", "GatherElements", "GatherND", "Pad", "StopGradient", "Trilu",
        ),
        "numbers are moved, not computed",
    ),
)  # fmt: skip

_REST = Line(
    Precision.FULL,
    (),
    "statistics, exponentials, losses and sums over a batch: rounding there costs accuracy and "
    "saves little time",
)
_BY_OP = {op: line for line in _TABLE for op in line.ops}


def precision_of(op: str) -> Line:
    """The table's line for an op."""
    return _BY_OP.get(op, _REST)


def lines() -> Iterator[tuple[Line, tuple[str, ...]]]:
    """The lines of the table, each with its ops; the last line's ops are listed too."""
    for line in _TABLE:
        yield line, line.ops
    yield _REST, tuple(sorted(OPS.keys() - _BY_OP.keys()))


@dataclass(frozen=True)
class Policy:
    """A cast policy for a graph.

    low: the element type of LOW, bf16 or fp16. full: shell-style patterns (`decoder.*`) of module
    paths and op names whose ops stay in fp32 whatever the table says. everywhere: applies to all
    ops; if False, only to ops within autocast blocks of the model (`precision_said`).
    """

    low: DType
    full: tuple[str, ...] = ()
    everywhere: bool = True

    def line(self, node: Node) -> Line:
        """The table's line for a node. Where the model turns autocast off, all ops are FULL: an
        fp32 graph does not show which values the model's own code casts up there."""
        line = precision_of(node.op_type)
        if line.precision is Precision.FOLLOWS:
            return line
        said = precision_said(node)
        if said == DType.FLOAT.name or not (said or self.everywhere):
            return _REST
        if line.widens and self.low == DType.FLOAT16:
            return _REST
        if line.precision is not Precision.LOW:
            return line
        return _REST if self._kept(node) or (line.alone and _has_others(node, line)) else line

    def _kept(self, node: Node) -> bool:
        names = (node.op_type, where(node))
        return any(
            fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
            for pattern in self.full
            for name in names
        )


def policy_for(graph: Graph, given: Policy | None) -> Policy | None:
    """The policy of a captured graph: the given one, else one for the model's own autocast blocks,
    if any. Raises CaptureError where these blocks use different types."""
    said = {DType[name] for name in precisions_said(graph)}
    if given is not None:
        said.add(given.low)
    if len(said) > 1:
        names = " and ".join(sorted(kind.numpy().name for kind in said))
        raise CaptureError(
            f"the forward is cast to {names}, but a step has one low "
            "precision; fix: use the same dtype in every autocast block"
        )
    if given is not None or not said:
        return given
    return Policy(said.pop(), everywhere=False)


def _has_others(node: Node, line: Line) -> bool:
    """Whether a node has floating operands that the line does not apply to."""
    own = line.operands or ()
    others = (x for i, x in enumerate(node.inputs) if x is not None and i not in own)
    return any(type_of(x).is_floating for x in others)


__all__ = ["Line", "Policy", "Precision", "lines", "policy_for", "precision_of"]
