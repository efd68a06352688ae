"""Bisection: finds the first compile stage, and the first node, whose results differ."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from onward.graph.graph import Graph, Node, type_of
from onward.graph.printer import node_text
from onward.train.verify.comparison import against_eager, against_onnxruntime
from onward.train.verify.engines import Engines
from onward.train.verify.graphs import LOSS, compared_outputs

# shares of a value's norm: nodes are searched for the large difference first, then the small one
NODE = (1e-4, 1e-5)


def first_departure(kinds: Iterable[Engines]) -> str:
    """Names the first stage whose loss or gradients differ from eager's, and the first such node.
    Searches fp32 before mixed precision."""
    found = (_departure(engines) for engines in kinds)
    return next((text for text in found if text), ("bisect: no stage differs from eager PyTorch"))


def _departure(engines: Engines) -> str:
    """Describes the first stage that differs; "" where none does."""
    first, low = True, engines.low is not None
    for stage, graph in engines.compiler.journal.stages or []:
        if stage in ("specialize", "plan") or (low and stage.startswith(("forward-", "pack-"))):
            # compiled under another stage's name or, without casts, already compared in fp32
            continue
        expected = {LOSS, *compared_outputs(graph)}
        rows = [r for r in against_eager(engines, graph) if r.name in expected]
        missing = set(engines.exact) - expected if stage == "differentiate" else set()
        bad = [*(r.name for r in rows if not r.ok), *sorted(missing)]
        if bad:
            kind = "first stage" if first and not low else "pass"
            where = " in mixed precision" if low else ""
            node = (
                "there is no reference for single nodes in mixed precision"
                if low
                else _first_node(engines, graph)
            )
            return (
                f"bisect: {bad[0]} differs from eager PyTorch{where} after {kind} '{stage}'; {node}"
            )
        first = False
    return ""


def _first_node(engines: Engines, graph: Graph) -> str:
    """Describes the first node on which Onward's executor and onnxruntime differ."""
    if not engines.has_onnxruntime():
        return "install onnxruntime to find the node"
    kept = graph.clone()
    results = kept.output_values()
    kept.outputs = {}
    nodes: dict[str, Node] = {}
    for node in kept:
        for value in node.outputs:
            if type_of(value).is_floating and (value.uses() or value in results):
                kept.outputs[value.name or ""] = value
                nodes[value.name or ""] = node
    ours = engines.values(kept, {name: name for name in kept.outputs})
    [theirs] = engines.onnxruntime(kept)
    for share in NODE:
        for name, value in ours.items():
            gap, size = _gap(value, theirs[name])
            if not gap <= share * size + 1e-2 * share:
                return f"first node: {node_text(nodes[name])} (difference {gap:.3e})"
    if all(row.ok for row in against_onnxruntime(engines, graph)):
        return (
            "every node agrees with onnxruntime: the graph itself computes something "
            "other than eager PyTorch"
        )
    return "every node agrees with onnxruntime when run alone: the memory plan overwrites a value"


def _gap(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[float, float]:
    """The norms of the difference and of `theirs`. Elements that are equal, or NaN in both, count
    as 0 in the difference."""
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    difference = torch.where(same, torch.zeros_like(ours), ours - theirs)
    finite = torch.where(theirs.isfinite(), theirs, torch.zeros_like(theirs))
    return float(difference.double().norm()), float(finite.double().norm())
