"""docs/operators.md: of each op of ai.onnx how it is run, how it is differentiated, and what the
node tests say. Written by `make node-tests`; a test holds it against code and committed table."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import onnx
from nodes.more_cases import every
from nodes.table import Row, table
from nodes.torch_forms import AT_KINKS, FORMS, WITHOUT_TORCH

from onward.differentiate.rule_table import RULES, WITHOUT_GRADIENT
from onward.graph.importer import CONSTANT, DECOMPOSITIONS, REFUSED
from onward.graph.ops import STANDARD
from onward.kernels import KERNELS
from onward.plan.views import VIEWS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operators.md"
FIRST = 20  # the opset from which on ops are listed
EQUAL, BY_KERNELS = "equal", "equal to differences of our forward"
HEAD = """# Operators of ONNX

Every operator of ai.onnx at the opsets {first} to {last}. This page is written by `make node-tests`
from the tables of the code and from the outcome of onnx's own {tests} backend node tests, which
`tests/nodes/outcomes.json` keeps.

A model is read by `onward.graph.importer.from_onnx`. "Runs by" says what becomes of an op there:
a node with a kernel, a view of its input's memory, nodes that it is decomposed into, the function
body that ONNX gives for it, or nothing, because it is computed while the model is read. "Gradient"
says the same of differentiation: a rule of its own, the rules of what it is made of, or none, and
why. "Tests" are the node tests whose results the executor reproduces to the test's own tolerance,
of all that there are; "differences" are those whose gradients, in fp64, equal central differences,
"torch" those whose results and gradients, in fp64, equal PyTorch's and its autograd's, and behind
the plus the calls that those tests leave out (other ranks, groups, directions; ties and kinks).

{ops} operators: {run} run, {refused} are refused with a reason; {rule} have a gradient, through
{nothing} none flows. {equal} node tests are reproduced, {folded} are computed while they are read,
{not_run} are not run; {gradients} have gradients equal to differences. Beside torch {torch} node
tests and {calls} calls of {forms} operators are equal; {without} with a gradient have none there.

| op | versions | runs by | gradient | tests | differences | torch |
|---|---|---|---|---|---|---|
"""


def names() -> dict[str, list[int]]:
    """The ops and the versions that are in force at one of the opsets."""
    versions: dict[str, set[int]] = defaultdict(set)
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "":
            versions[schema.name].add(schema.since_version)
    kept: dict[str, list[int]] = {}
    for name, found in sorted(versions.items()):
        least = max((v for v in found if v <= FIRST), default=FIRST)
        kept[name] = sorted(v for v in found if v >= least)
    return kept


def has_function(name: str) -> bool:
    schema: Any = onnx.defs.get_schema(name)
    return bool(schema.has_function or schema.has_context_dependent_function)


def runs_by(name: str) -> str:
    """How the op runs; empty where nobody says."""
    if name in REFUSED:
        return f"refused: {REFUSED[name]}"
    kernel = name in STANDARD and name in KERNELS
    if name in DECOMPOSITIONS:
        return "a kernel; other forms are decomposed" if kernel else "a decomposition"
    if name in CONSTANT:
        return "computed while it is read"
    if kernel:
        return "a kernel"
    if name in VIEWS:
        return "a view"
    return "ONNX's function body" if has_function(name) else ""


def gradient(name: str) -> str:
    """How it is differentiated; empty where nobody says."""
    if name in REFUSED:
        return "-"
    if name in RULES and name in STANDARD:
        return "a rule"
    for why, ops in WITHOUT_GRADIENT.items():
        if name in ops:
            return f"none: {why}"
    if name in CONSTANT:
        return f"none: {CONSTANT[name]}"
    if not _may_float(name):
        return "none: its result is no real number"
    if name in DECOMPOSITIONS or has_function(name):
        return "by the rules of what it is made of"
    return ""


def _may_float(name: str) -> bool:
    return any("tensor(float)" in output.types for output in onnx.defs.get_schema(name).outputs)


def page() -> str:
    """The text, from the tables as they are."""
    found, ops = table(), names()
    by_op: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    for op, *row in found.values():
        by_op[op].append((row[0], row[1], row[2]))
    calls = Counter(call.op for call in every())
    rows: list[str] = []
    for name, versions in ops.items():
        outcomes = by_op[name]
        equal = sum(first == EQUAL for first, _, _ in outcomes)
        same = sum(second in (EQUAL, BY_KERNELS) for _, second, _ in outcomes)
        torch = sum(third == EQUAL for _, _, third in outcomes)
        beside = f"{torch} + {calls[name]}" if calls[name] else f"{torch or '-'}"
        tests = f"{equal} of {len(outcomes)}" if outcomes else "-"
        rows.append(
            f"| {name} | {', '.join(map(str, versions))} | {runs_by(name)} | {gradient(name)} | "
            f"{tests} | {same or '-'} | {beside} |"
        )
    results = Counter(row[1] for row in found.values())
    kinds = Counter(gradient(name).split(":")[0] for name in ops)
    head = HEAD.format(
        first=FIRST, last=onnx.defs.onnx_opset_version(), tests=len(found), ops=len(ops),
        run=sum(name not in REFUSED for name in ops), refused=sum(name in REFUSED for name in ops),
        rule=sum(kinds.values()) - kinds["-"] - kinds["none"], nothing=kinds["none"],
        equal=results[EQUAL], folded=results["computed while it is read"],
        not_run=len(found) - results[EQUAL] - results["computed while it is read"],
        gradients=sum(row[2] in (EQUAL, BY_KERNELS) for row in found.values()),
        torch=sum(row[3] == EQUAL for row in found.values()), calls=calls.total(),
        forms=len(FORMS), without=sum(name in ops for name in WITHOUT_TORCH),
    )  # fmt: skip
    return head + "\n".join(rows) + "\n\n" + _reasons(found)


_TAKEN = ("equal", "computed", "nothing")


def _reasons(found: dict[str, Row]) -> str:
    """What is not run, and what is not compared, by cause."""
    text = ""
    titles = (
        "Node tests that are not reproduced",
        "Gradients that are not compared with differences",
        "Gradients that are not compared with torch's",
    )
    for i, title in enumerate(titles, 1):
        counts = Counter(row[i] for row in found.values() if not row[i].startswith(_TAKEN))
        text += f"## {title}\n\n| count | why |\n|---|---|\n"
        for why, n in sorted(counts.items(), key=lambda x: (-x[1], x[0])):
            text += f"| {n} | {why.replace('|', '/')} |\n"
        text += "\n"
    text += "## Gradients at ties and kinks\n\nWhere a gradient is not unique it is torch's:\n\n"
    text += "| op | there |\n|---|---|\n"
    text += "".join(f"| {op} | {there} |\n" for op, there in sorted(AT_KINKS.items()))
    text += "\n## Operators without a form in torch\n\n| op | why |\n|---|---|\n"
    return text + "".join(f"| {op} | {why} |\n" for op, why in sorted(WITHOUT_TORCH.items()))
