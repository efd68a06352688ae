"""The extension interface: ops, gradient rules, kernels, translations, optimizers and passes of
other packages. The library fills its own tables by the same calls, `register` of each stage.

    from onward import extend
    def plugin() -> None:
        extend.op(SQUARED_RELU, gradient=squared_relu_gradient)
        extend.kernel("SquaredRelu", KERNEL)

Call such a function by hand, or as an entry point of the group `onward.plugins`: a callable without
arguments, called once, before the first Trainer is made. What is registered after a Trainer has
compiled a batch affects only later compilations: existing graphs stay as they are. Registering the
same record again does nothing; another record of the same name is refused with an OnwardError that
names both places. A plugin imports nothing else from Onward: the types that records consist of
are here too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from onward import rewrite
from onward.capture import aten
from onward.capture.aten import AtenCall as AtenCall
from onward.capture.aten import Translation
from onward.differentiate import rule_table
from onward.differentiate.rule_table import Gradients
from onward.differentiate.rule_table import Rule as GradientRule
from onward.errors import OnwardError
from onward.forks import Lock
from onward.graph import ops
from onward.graph.build import Builder
from onward.graph.graph import (
    Graph,
    Node,
    Value,
    array_of,
    attributes,
    content_of,
    type_of,
    where,
)
from onward.graph.ops import OPS, Op, optimizers
from onward.graph.ops.call import Call
from onward.graph.ops.optimizers import OPTIMIZERS, Optimizer
from onward.graph.ops.optimizers.arithmetic import correction, one_less, scaled
from onward.graph.ops.optimizers.record import Group, setting, updated_types
from onward.graph.ops.record import axis_attribute, no_axes
from onward.graph.registry import place_of
from onward.graph.types import DType, Shape, Size, Type, parse_type, product
from onward.kernels import KERNELS, Kernel, KernelArguments, KernelSpec, Target
from onward.kernels import register as register_kernel
from onward.kernels.kernel import Launch
from onward.rewrite import AnyPass, Context, FusionPass, Pass
from onward.rewrite.rows import RowRule
from onward.rewrite.rows import register as register_rows
from onward.rewrite.rows.demand import DEMAND, Answer, Demand, Question, aligned, others_whole
from onward.rewrite.rows.packer import PACK, Packer
from onward.rewrite.rows.rules.along_rows import packed_along_rows
from onward.rewrite.rows.rules.norm import along_a_dim

GROUP = "onward.plugins"
log = logging.getLogger("onward")

# Row rule of an op on `f[*S,D]` that treats each row by itself: it works along `Op.axes` of its
# first input, and reads all of the others.
ALONG_ROWS = RowRule(along_a_dim, packed_along_rows)


# ---- registration


def op(record: Op, gradient: GradientRule | None = None, rows: RowRule | None = None) -> None:
    """Registers an op: its record, with a body in standard ops unless ONNX has the op.

    gradient: its rule; None: an own op is differentiated through its body, which then also replaces
    it in training. rows: its rule of row demand; None: by its traits (elementwise), else it reads
    all rows. Without a kernel an own op runs as its body. Raises OnwardError where the name is
    taken.
    """
    _expect("op", record, Op)
    with _refused():
        ops.register(record)
        if gradient is not None:
            rule_table.register(record.name, gradient)
        if rows is not None:
            register_rows(record.name, rows)


def gradient(op_name: str, rule: GradientRule) -> None:
    """Registers the gradient rule `(b, dys, ys, xs, attrs) -> [dx...]` of an op that has none."""
    with _refused():
        rule_table.register(op_name, rule)


def kernel(op_name: str, kernel: Kernel) -> None:
    """Registers a kernel of an op. It is tried before the op's other kernels, which run where it
    does not apply."""
    _expect("kernel", kernel, Kernel)
    if op_name not in OPS:
        raise OnwardError(f"there is no op {op_name}; fix: register the op before its kernel")
    with _refused():
        register_kernel(op_name, kernel)


def translation(overload: str, function: Translation) -> None:
    """Registers the translation of an ATen overload, such as `softplus.default`, or of another
    library's op, `library.op.default`: a function `(call, *args, **kwargs) -> Value`, written with
    the Builder."""
    with _refused():
        aten.register(overload, function)


def optimizer(record: Optimizer) -> None:
    """Registers an optimizer with its update op; its description becomes `onward.optim.<name>`."""
    _expect("optimizer", record, Optimizer)
    with _refused():
        optimizers.register(record)


def rewrite_pass(
    item: AnyPass,
    stage: Literal["forward", "step"] = "forward",
    *,
    before: str = "",
    after: str = "",
    reason: str,
) -> None:
    """Registers a pass directly before or after another of the stage's list, with the reason for
    its place.

    Its function's name switches it off (`TrainerOptions(disable=...)`) and appears in reports.
    """
    _expect("pass", item, (Pass, FusionPass))
    if not reason or bool(before) == bool(after):
        raise OnwardError(
            f"the pass {item.name} lacks a position or a reason; fix: give before= or after= "
            "(the name of another pass), and reason="
        )
    with _refused():
        rewrite.register(item, stage, before, after)
    neighbour = f"before {before}" if before else f"after {after}"
    log.info("pass %s (%s) %s: %s", item.name, place_of(item.apply), neighbour, reason)


def _expect(what: str, given: Any, kind: type | tuple[type, ...]) -> None:
    if not isinstance(given, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        raise OnwardError(
            f"{given!r} is not a {what}; fix: pass an "
            f"onward.extend.{' or onward.extend.'.join(k.__name__ for k in kinds)}"
        )


@contextmanager
def _refused() -> Iterator[None]:
    """A context that turns a ValueError of a stage's table into an OnwardError."""
    try:
        yield
    except OnwardError:
        raise
    except ValueError as error:
        raise OnwardError(str(error)) from error


# ---- the tables' content


def records() -> Iterator[tuple[str, str]]:
    """Every record that affects graphs, as `(table and name, place of its code)`; where order
    matters, with its number."""
    tables: dict[str, Mapping[str, Any]] = {
        "op": OPS,
        "gradient": rule_table.RULES,
        "demand": DEMAND,
        "pack": PACK,
        "optimizer": OPTIMIZERS,
        "kernel": {f"{op} {i}": k for op, held in KERNELS.items() for i, k in enumerate(held)},
        "forward": {f"{i} {item.name}": item.apply for i, item in enumerate(rewrite.FORWARD)},
        "precision": {f"{i} {item.name}": item.apply for i, item in enumerate(rewrite.PRECISION)},
        "step": {f"{i} {item.name}": item.apply for i, item in enumerate(rewrite.STEP)},
    }
    for table, held in tables.items():
        for name, record in held.items():
            parts = vars(record).values() if is_dataclass(record) else (record,)
            for part in parts:
                if callable(part):
                    yield f"{table} {name}", place_of(part)


# ---- installed plugins


class Plugins:
    """Loads the installed plugins once."""

    def __init__(self) -> None:
        self._lock = Lock()  # reentrant, since a plugin may make a Trainer
        self._begun = False
        self._failed = ""

    def load(self) -> None:
        """Calls all plugins in the order of their names; later calls do nothing. Raises
        OnwardError, every time, if one failed, and names it."""
        with self._lock:
            if self._failed:
                raise OnwardError(self._failed)
            if self._begun:
                return
            self._begun = True
            try:
                for entry in sorted(entry_points(group=GROUP), key=lambda e: (e.name, e.value)):
                    self._call(entry)
            except KeyboardInterrupt:
                self._begun = False
                raise

    def _call(self, entry: EntryPoint) -> None:
        try:
            entry.load()()
        except Exception as error:  # a plugin's code may raise anything
            package = entry.dist.name if entry.dist is not None else "its package"
            self._failed = (
                f"the plugin '{entry.name}' ({entry.value}) failed: {type(error).__name__}: "
                f"{' '.join(str(error).split())}; fix: repair or uninstall {package}"
            )
            raise OnwardError(self._failed) from error
        log.info("plugin '%s' (%s)", entry.name, entry.value)


load_plugins = Plugins().load

__all__ = [
    "ALONG_ROWS",
    "KERNELS",
    "OPS",
    "OPTIMIZERS",
    "Answer",
    "AtenCall",
    "Builder",
    "Call",
    "Context",
    "DType",
    "Demand",
    "FusionPass",
    "GradientRule",
    "Gradients",
    "Graph",
    "Group",
    "Kernel",
    "KernelArguments",
    "KernelSpec",
    "Launch",
    "Node",
    "OnwardError",
    "Op",
    "Optimizer",
    "Packer",
    "Pass",
    "Question",
    "RowRule",
    "Shape",
    "Size",
    "Target",
    "Translation",
    "Type",
    "Value",
    "aligned",
    "array_of",
    "attributes",
    "axis_attribute",
    "content_of",
    "correction",
    "gradient",
    "kernel",
    "load_plugins",
    "no_axes",
    "one_less",
    "op",
    "optimizer",
    "others_whole",
    "packed_along_rows",
    "parse_type",
    "product",
    "rewrite_pass",
    "scaled",
    "setting",
    "translation",
    "type_of",
    "updated_types",
    "where",
]
