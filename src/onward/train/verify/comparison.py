"""Comparisons of Onward with another engine, a row for each tensor."""

from __future__ import annotations

import math

from onward.graph.graph import Graph
from onward.train.verify.draws import Draws, close_weights
from onward.train.verify.engines import Engines
from onward.train.verify.graphs import compared_outputs, without_dropout
from onward.train.verify.law import FP32, distance
from onward.train.verify.report import Row

ORACLE = 1e-5  # of the tensor's own norm: two engines on one graph, sums in other orders
REPLICAS = (8, 24)  # further draws of rounding noise, where one draw, or nine, say too little


def against_eager(engines: Engines, graph: Graph, form: str = "dropout off") -> list[Row]:
    """The law for each tensor: on the batch, and where that says no, over several runs."""
    engine, quiet = f"{engines.eager_name} ({form})", without_dropout(graph)
    ours, exact, own = engines.onward(quiet), engines.exact, engines.own
    common = [n for n in exact if n in ours]
    draws = Draws(engines.law)
    draws.add(ours, own, exact)
    rows = {
        name: Row(
            engine, name, distance(ours[name], exact[name]),
            max(engines.law.allowed(own[name], exact[name]), draws.zero.get(name, 0.0)),
        )
        for name in common
    }  # fmt: skip
    for more in REPLICAS:
        doubtful = [n for n in common if not rows[n].ok and draws.is_doubtful(n)]
        if doubtful:
            _draw_more(draws, engines, quiet, more)
            rows |= {n: draws.row(engine, n) for n in doubtful}
    missing = sorted(set(exact) - set(ours))
    return [*rows.values(), *(Row(engine, name, math.nan, 0.0) for name in missing)]


def _draw_more(draws: Draws, engines: Engines, graph: Graph, more: int) -> None:
    """Adds so many runs, of weights close to the model's."""
    for seed in range(draws.runs, draws.runs + more):
        weights = close_weights(engines.captured.parameters, seed, engines.law.close)
        draws.add(
            engines.onward(graph, weights),
            engines.eager(False, weights),
            engines.eager(True, weights),
        )


def against_onnxruntime(engines: Engines, graph: Graph) -> list[Row]:
    """The same graph on both, masks and all."""
    outputs = compared_outputs(graph)
    ours, theirs = engines.values(graph, outputs), engines.onnxruntime(graph)
    scale = max(float(theirs[made].norm()) for made in outputs.values())
    return [
        Row(
            "stock onnxruntime (dropout on)", name, float((ours[name] - theirs[made]).norm()),
            ORACLE * float(theirs[made].norm()) + FP32.tensor * scale,
        )
        for name, made in outputs.items()
    ]  # fmt: skip
