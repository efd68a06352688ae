"""Rules for the graph at the end of each stage: literal tables, each line with its reason.

`check.py` has the invariants of all graphs. A later stage may rely on these additional rules;
`ONWARD_CHECK=1` checks them where the stage ends.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

from onward.graph.graph import Graph, Node, Role, Value, needed, role_of, type_of
from onward.graph.ops import OPS
from onward.graph.ops.collective import broken_halves, is_collective
from onward.graph.ops.optimizers import OPTIMIZERS
from onward.graph.printer import node_text
from onward.graph.signature import Signature
from onward.graph.types import DType, Type


class Stage(enum.Enum):
    """A stage that ends with a graph; the value is its name in dumps and reports."""

    CAPTURED = "capture"
    FORWARD = "forward"
    PRECISION = "precision"  # a forward with the casts of mixed precision
    PORTABLE = "portable"  # a forward for other engines, in the precision of the export
    PACKED = "pack"  # a forward for the rows that are read
    GRADIENTS = "gradients"
    HALVES = "halves"  # a forward, and gradients for cotangents that come later
    STEP = "step"
    SPECIALIZED = "specialize"  # any of these, for one size of batch


FORWARDS = (Stage.CAPTURED, Stage.FORWARD, Stage.PRECISION, Stage.PORTABLE, Stage.PACKED)
DIFFERENTIATED = (Stage.GRADIENTS, Stage.HALVES, Stage.STEP)
ALL = tuple(Stage)

# The stages after which inputs of each role may exist; a specialized graph may be of any stage.
ROLES: dict[Role, tuple[Stage, ...]] = {
    Role.PARAM: ALL,
    Role.BUFFER: ALL,
    Role.BATCH: ALL,
    Role.RANDOM: ALL,
    Role.COTANGENT: (*DIFFERENTIATED, Stage.SPECIALIZED),  # added by differentiation
    Role.HYPER: (Stage.STEP, Stage.SPECIALIZED),  # added by the update
    Role.STATE: (Stage.STEP, Stage.SPECIALIZED),
    Role.SIZE: (Stage.SPECIALIZED,),  # before that, sizes are symbols
}

# The stages after which each entry of the signature may exist.
ENTRIES: dict[str, tuple[Stage, ...]] = {
    "seed": ALL,
    "sample_offset": ALL,
    "loss": ALL,
    "results": ALL,
    "parts": ALL,
    "written": ALL,
    "rows": (Stage.PACKED, *DIFFERENTIATED, Stage.SPECIALIZED),  # added by row demand
    "cotangents": (*DIFFERENTIATED, Stage.SPECIALIZED),
    # the update of a step consumes them
    "gradients": (Stage.GRADIENTS, Stage.HALVES, Stage.SPECIALIZED),
    "split_halves": (Stage.HALVES, Stage.SPECIALIZED),
    "divisor": (),  # the update consumes it, before the step's graph is whole
    "local_gradients": (),  # distribution consumes both
    "local_sums": (),
    **dict.fromkeys(
        (
            "hyperparameters", "clocks", "slots", "accumulators", "loss_scale", "growth_tracker",
            "grad_norm", "finite", "updated", "accumulated", "rescaled", "left_gradients",
            "window", "window_scale", "windowed", "sent",
        ),
        (Stage.STEP, Stage.SPECIALIZED),
    ),
}  # fmt: skip

# The role of an input that an entry of the signature names.
ROLE_OF_ENTRY = {
    "seed": Role.RANDOM,
    "sample_offset": Role.RANDOM,
    "cotangents": Role.COTANGENT,
    "hyperparameters": Role.HYPER,
    "clocks": Role.HYPER,
    "window": Role.HYPER,
    "window_scale": Role.HYPER,
    "slots": Role.STATE,
    "accumulators": Role.STATE,
}

# Entries that pair an input with its next value.
NEXT_VALUES = ("updated", "accumulated", "written")

# Types of single inputs and outputs, by entry; None: any element type.
SCALARS: dict[str, tuple[DType | None, tuple[int, ...]]] = {
    "seed": (DType.INT64, (2,)),
    "sample_offset": (DType.INT64, ()),
    "loss_scale": (DType.FLOAT, ()),
    "growth_tracker": (DType.INT64, ()),
    "window": (DType.DOUBLE, ()),
    "window_scale": (DType.DOUBLE, ()),
    "windowed": (DType.DOUBLE, ()),
    "loss": (None, ()),
    "grad_norm": (None, ()),
    "finite": (DType.BOOL, ()),
}

LOW = (DType.FLOAT16, DType.BFLOAT16)


@dataclass(frozen=True)
class Rule:
    """One rule. breaks: yields descriptions of what breaks it in a graph of a stage. reason: who
    relies on it."""

    name: str
    stages: tuple[Stage, ...]
    breaks: Callable[[Graph, Stage], Iterator[str]]
    reason: str


def _named(graph: Graph, entry: str) -> list[str]:
    """The names of inputs or outputs that an entry of the signature holds."""
    held = getattr(graph.signature, entry)
    if isinstance(held, dict):
        return list(held.values())
    return [held] if isinstance(held, str) else []


def _inputs(graph: Graph) -> dict[str, Value]:
    return {value.name or "": value for value in graph.inputs}


def _roles(graph: Graph, stage: Stage) -> Iterator[str]:
    for value in graph.inputs:
        role = role_of(value)
        if role is not None and stage not in ROLES[role]:
            yield f"input %{value.name} has the role {role.value}"


def _entries(graph: Graph, stage: Stage) -> Iterator[str]:
    for entry in fields(Signature):
        held = getattr(graph.signature, entry.name)
        if held and stage not in ENTRIES[entry.name]:
            yield f"the signature has {entry.name}"


def _names(graph: Graph, stage: Stage) -> Iterator[str]:
    there = {*_inputs(graph), *graph.outputs, *(str(n) for n in graph.counts)}
    for entry in ENTRIES:
        for name in _named(graph, entry):
            if name not in there:
                yield f"{entry} names {name}, which is no input and no output"


def _entry_roles(graph: Graph, stage: Stage) -> Iterator[str]:
    inputs = _inputs(graph)
    for entry, role in ROLE_OF_ENTRY.items():
        for name in _named(graph, entry):
            if name in inputs and role_of(inputs[name]) is not role:
                yield f"{name} is in {entry} and has not the role {role.value}"


def _scalars(graph: Graph, stage: Stage) -> Iterator[str]:
    values = {**graph.outputs, **_inputs(graph)}
    for entry, (dtype, shape) in SCALARS.items():
        for name in _named(graph, entry):
            found: Type = type_of(values[name])
            if found.shape != shape or dtype not in (None, found.dtype):
                yield f"{entry} {name} is {found}"


def _pairs(graph: Graph, stage: Stage) -> Iterator[str]:
    sums, inputs = graph.signature.accumulators, _inputs(graph)
    for entry in NEXT_VALUES:
        for key, name in getattr(graph.signature, entry).items():
            source = sums.get(key) if entry == "accumulated" else key
            value = graph.state.get(name)
            if value is None or value.name != source:
                yield f"output {name} is not paired with the input {source} of {entry}"
    for source, name in graph.signature.rescaled.items():  # the caller passes them to the next run
        if source not in inputs or type_of(inputs[source]) != type_of(graph.outputs[name]):
            yield f"output {name} has not the type of the input {source} of rescaled"


def _updates(graph: Graph, stage: Stage) -> Iterator[str]:
    if not graph.signature.updated and not graph.signature.left_gradients:
        yield "no parameter has a next value, and no gradient is left"


def _gradients(graph: Graph, stage: Stage) -> Iterator[str]:
    inputs, signature = _inputs(graph), graph.signature
    for source, name in (*signature.gradients.items(), *signature.left_gradients.items()):
        if source in inputs and type_of(graph.outputs[name]) != type_of(inputs[source]):
            yield f"the gradient {name} is not of the type of {source}"


def _without(reject: Callable[[Node], bool]) -> Callable[[Graph, Stage], Iterator[str]]:
    """A rule that rejects nodes for which `reject` is true."""

    def breaks(graph: Graph, stage: Stage) -> Iterator[str]:
        for node in graph:
            if reject(node):
                yield node_text(node)

    return breaks


def _is_gradient(node: Node) -> bool:
    return node.op_type.endswith("Grad") or bool(node.meta.get("backward"))


def _is_update(node: Node) -> bool:
    return any(node.op_type == op.name for o in OPTIMIZERS.values() for op in o.updates)


def _is_stop(node: Node) -> bool:
    return node.op_type == "StopGradient"


def _is_own_gradient(node: Node) -> bool:
    return node.op_type == "WithGradient"


def _is_low(node: Node) -> bool:
    return any(type_of(y).dtype in LOW for y in node.outputs)


def _one_low_type(graph: Graph, stage: Stage) -> Iterator[str]:
    found = {type_of(y).dtype for node in graph for y in node.outputs} & set(LOW)
    if len(found) > 1:
        yield f"values of {' and '.join(sorted(map(str, found)))}"


def _owned_are_wide(graph: Graph, stage: Stage) -> Iterator[str]:
    for value in graph.inputs:
        if role_of(value) in (Role.PARAM, Role.BUFFER, Role.BATCH) and type_of(value).dtype in LOW:
            yield f"input %{value.name} is {type_of(value)}"


def _broken_halves(graph: Graph, stage: Stage) -> Iterator[str]:
    yield from broken_halves(graph)


def _results_do_not_wait(graph: Graph, stage: Stage) -> Iterator[str]:
    for node in needed(graph, graph.signature.results.values()):
        for x in node.inputs:
            if x is not None and role_of(x) is Role.COTANGENT:
                yield f"{node_text(node)} reads a cotangent, and a result needs it"


def _split(graph: Graph, stage: Stage) -> Iterator[str]:
    if not graph.signature.split_halves:
        yield "the signature does not split halves"


def _counted(graph: Graph, stage: Stage) -> Iterator[str]:
    if not graph.counts and not graph.signature.rows:
        yield "no size is counted in the batch"


def _sizes(graph: Graph, stage: Stage) -> Iterator[str]:
    made = (y for node in graph for y in node.outputs)
    for value in (*graph.inputs, *made):
        if any(not isinstance(d, int) and d.at is None for d in type_of(value).shape):
            yield f"{value.name}: {type_of(value)} stayed symbolic"


def _bodies(node: Node) -> bool:
    return bool(node.domain) and node.op_type in OPS and OPS[node.op_type].body is None


RULES: tuple[Rule, ...] = (
    Rule("roles", ALL, _roles, "the role of an input decides who fills it"),
    Rule("entries", ALL, _entries, "a stage reads only entries that earlier stages have made"),
    Rule("names", ALL, _names, "a plan finds inputs and outputs by the signature's names"),
    Rule("entry roles", ALL, _entry_roles, "state is kept between steps by role, set by entry"),
    Rule("scalars", ALL, _scalars, "they are filled and read without checking their types"),
    Rule("pairs", ALL, _pairs, "a next value takes the place of its input"),
    Rule("bodies", ALL, _without(_bodies), "an own op without a body has no meaning elsewhere"),
    Rule(
        "no gradients", FORWARDS, _without(_is_gradient),
        "row demand and differentiation read a forward alone",
    ),
    Rule(
        "no updates", (*FORWARDS, Stage.GRADIENTS, Stage.HALVES), _without(_is_update),
        "an evaluation, and a loop of the user's own, change no parameter",
    ),
    Rule(
        "no stops", (*DIFFERENTIATED, Stage.SPECIALIZED), _without(_is_stop),
        "they compute nothing, and hide equal values from fusions",
    ),
    Rule(
        "no gradients of the model's own", DIFFERENTIATED, _without(_is_own_gradient),
        "differentiation has run the code of their backward; an evaluation runs their body",
    ),
    Rule(
        "full precision", (Stage.CAPTURED, Stage.FORWARD), _without(_is_low),
        "the policy writes every cast to a type below f32",
    ),
    Rule(
        "one low type", (Stage.PRECISION, Stage.PACKED, Stage.GRADIENTS, Stage.HALVES),
        _one_low_type,
        "a policy has one type below f32; a step's state and sums may have another",
    ),
    Rule(
        "owned in full precision", (*FORWARDS, *DIFFERENTIATED), _owned_are_wide,
        "the user's tensors are read in place, and are never of a low type",
    ),
    Rule("counts", (Stage.PACKED,), _counted, "a packed form has counted rows"),
    Rule("split halves", (Stage.HALVES,), _split, "the signature says where a plan is cut"),
    Rule(
        "results do not wait", (Stage.HALVES,), _results_do_not_wait,
        "they are computed before a cotangent is known",
    ),
    Rule(
        "gradient types", DIFFERENTIATED, _gradients,
        "a gradient is stored in a tensor like its parameter",
    ),
    Rule(
        "no collectives", (*FORWARDS, Stage.GRADIENTS, Stage.HALVES), _without(is_collective),
        "a step is distributed when it is whole",
    ),
    Rule(
        "halves of collectives", (Stage.STEP, Stage.SPECIALIZED), _broken_halves,
        "their memory is in use from the start to the wait, and ranks meet by their numbers",
    ),
    Rule("updates", (Stage.STEP,), _updates, "a step moves a parameter, or leaves what moves one"),
    Rule("sizes", (Stage.SPECIALIZED,), _sizes, "a plan places every byte"),
)  # fmt: skip


def conform(graph: Graph, stage: Stage) -> None:
    """Raises AssertionError with the rule that a graph breaks at a stage, and with the reason."""
    for rule in RULES:
        if stage in rule.stages:
            for what in rule.breaks(graph, stage):
                raise AssertionError(
                    f"after {stage.value}, {rule.name}: {what}; since {rule.reason}"
                )
