"""Comparisons of Onward with another engine, one row for each tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from onward.graph.graph import Graph
from onward.graph.names import some, user_name
from onward.prepare.graphs import Graphs
from onward.train.verify.draws import RepeatedDraws, close_weights
from onward.train.verify.engines import Engines
from onward.train.verify.graphs import compared_outputs, gradient, without_dropout
from onward.train.verify.law import FP32, distance
from onward.train.verify.report import ComparedTensor

_IDLE = (
    "gradients are zero in this batch where eager PyTorch has grad=None, so that weight "
    "decay still moves"
)
ORACLE = 1e-5  # of the tensor's own norm: both engines run one graph but sum in different orders
ROUNDING = 2.0**-23  # the relative change of weights that shows what a rounding may do
MOVED = 3  # times what it does, which another order of sums may do
REPLICAS = (8, 24)  # numbers of further draws of rounding noise: after one draw, and after nine


def against_eager(
    engines: Engines, graph: Graph, form: str = "dropout off"
) -> list[ComparedTensor]:
    """Compares each tensor with eager PyTorch by the law: on the batch, and where it fails, over
    several runs."""
    engine, quiet = f"{engines.eager_name} ({form})", without_dropout(graph)
    ours, exact, own = engines.onward(quiet), engines.exact, engines.own
    common = [n for n in exact if n in ours]
    draws = RepeatedDraws(engines.law)
    draws.add(ours, own, exact)
    rows = {
        name: ComparedTensor(
            engine, name, distance(ours[name], exact[name]),
            max(engines.law.allowed(own[name], exact[name]), draws.zero.get(name, 0.0)),
            eager=distance(own[name], exact[name]), norm=float(exact[name].norm()),
        )
        for name in common
    }  # fmt: skip
    for more in REPLICAS:
        doubtful = [n for n in common if not rows[n].ok and draws.is_doubtful(n)]
        if doubtful:
            _draw_more(draws, engines, quiet, more)
            rows |= {n: draws.row(engine, n) for n in doubtful}
    missing = sorted(set(exact) - set(ours))
    return [*rows.values(), *(ComparedTensor(engine, name, math.nan, 0.0) for name in missing)]


def moved_as_in_eager(engines: Engines, graph: Graph) -> tuple[list[str], list[str]]:
    """Compares which parameters a step updates with those that have a gradient in eager PyTorch.
    Returns the mismatches, a line of a few names for each kind, and notes of parameters that only
    this batch leaves out, such as experts that no token is sent to."""
    theirs, ours = engines.own, engines.captured.reached
    lacking = [n for n in engines.names if gradient(n) in theirs and n not in ours]
    beyond = [n for n in engines.names if gradient(n) not in theirs and n in ours]
    idle = _idle(engines, graph, beyond) if beyond else []
    ways = {
        "no gradient where eager PyTorch has one": lacking,
        "a gradient where eager PyTorch has none": [n for n in beyond if n not in idle],
    }
    lines = [f"{way}: {some(map(user_name, names))}" for way, names in ways.items() if names]
    notes = [f"{_IDLE}: {some(map(user_name, idle))}"] if idle else []
    return lines, notes


def _idle(engines: Engines, graph: Graph, names: Sequence[str]) -> list[str]:
    """The parameters whose gradient is zero on this batch although the loss depends on them."""
    forward = Graphs(engines.compiler.quiet(), engines.captured).forward
    led = engines.compiler.quiet().gradients(forward, names, ()).signature.gradients
    found = engines.onward(without_dropout(graph))
    return [n for n in names if n in led and not found[gradient(n)].any()]


def zero_as_in_eager(engines: Engines, rows: Iterable[ComparedTensor]) -> list[str]:
    """Lists the failed gradients that are exactly zero in eager PyTorch; AdamW would turn noise in
    them into full steps."""
    failed = {row.name for row in rows if not row.ok}
    odd = [n for n in engines.names if gradient(n) in failed and _is_zero(engines, gradient(n))]
    line = "a gradient that is not zero where eager PyTorch's is exactly zero"
    return [f"{line}: {some(map(user_name, odd))}"] if odd else []


def _is_zero(engines: Engines, name: str) -> bool:
    found = [run[name] for run in (engines.own, engines.exact) if name in run]
    return bool(found) and not any(t.any() for t in found)


def _draw_more(draws: RepeatedDraws, engines: Engines, graph: Graph, more: int) -> None:
    """Adds `more` runs, with weights close to the model's."""
    for seed in range(draws.runs, draws.runs + more):
        weights = close_weights(engines.captured.parameters, seed, engines.law.close)
        draws.add(
            engines.onward(graph, weights),
            engines.eager(False, weights),
            engines.eager(True, weights),
        )


def against_onnxruntime(engines: Engines, graph: Graph) -> list[ComparedTensor]:
    """Compares Onward with stock onnxruntime on one graph, with one set of dropout masks. Where a
    tensor is further off than rounding usually is, the weights are changed by a rounding: what
    onnxruntime makes of these says how far rounding reaches in this model."""
    outputs = compared_outputs(graph)
    ours, [theirs] = engines.values(graph, outputs), engines.onnxruntime(graph)
    scale = max(float(theirs[made].norm()) for made in outputs.values())
    off = {name: float((ours[name] - theirs[made]).norm()) for name, made in outputs.items()}
    allowed = {
        name: ORACLE * float(theirs[made].norm()) + FP32.tensor * scale
        for name, made in outputs.items()
    }
    if any(not off[name] <= allowed[name] for name in outputs):
        for moved in engines.onnxruntime(graph, _rounded(engines)):
            for name, made in outputs.items():
                reached = MOVED * float((moved[made] - theirs[made]).norm())
                allowed[name] = max(allowed[name], reached)
    said = "stock onnxruntime (dropout on)"
    return [ComparedTensor(said, name, off[name], allowed[name]) for name in outputs]


def _rounded(engines: Engines) -> list[dict[str, torch.Tensor]]:
    """Three draws of the model's parameters, each changed by about a rounding of fp32."""
    generator = torch.Generator().manual_seed(0)
    held = {n: p.detach().cpu() for n, p in engines.captured.parameters.items()}
    return [
        {
            name: p * (1 + ROUNDING * torch.randn(p.shape, generator=generator))
            for name, p in held.items()
            if p.dtype == torch.float32
        }
        for _ in range(3)
    ]
