"""Stock onnxruntime runs the training graph of every stage and finds what the executor finds.

Dropout is on: the masks are part of the graph. The engine's own optimiser is off.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import (
    Tensors,
    batch,
    bert,
    compiled,
    dropout_nodes,
    eager,
    execute,
    gpt2,
    onnxruntime,
    trained,
)

from onward.differentiate import vjp
from onward.graph.printer import graph_text
from onward.rewrite import FORWARD, STEP

pytestmark = pytest.mark.usefixtures("captures_kept")

MAKERS = {"gpt2": gpt2, "bert": bert}
ALL = {p.name for p in (*FORWARD, *STEP)}


def results(graph: Any) -> list[str]:
    return [n for n in graph.outputs if n == "loss" or n.startswith("grad.")]


def assert_engines_agree(made: Any, graph: Any, data: Tensors, stage: str) -> Tensors:
    """Returns the executor's loss and gradients."""
    graph = graph.clone()
    graph.outputs = {n: graph.outputs[n] for n in results(graph)}
    ours, theirs = execute(made, graph, data), onnxruntime(made, graph, data)
    scale = max(float(t.norm()) for t in theirs.values())
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        gap = float((ours[name] - value).norm())
        # two engines sum in other orders; the floor is for tensors that are noise around zero
        assert gap <= 1e-5 * float(value.norm()) + 1e-7 * scale, f"{stage}: {name} {gap:.3e}"
    return ours


@pytest.mark.parametrize("kind", MAKERS)
def test_graph_without_any_rewrite(kind: str) -> None:
    data = batch(3, 10, "right", ignored=True)
    model = MAKERS[kind]()
    made = compiled(model, data, disable=ALL, keep_stages=True)
    graph = made.differentiated(trained(made))
    assert [name for name, _ in made.journal.stages or []] == ["capture", "differentiate"]
    assert len(dropout_nodes(graph)) == 2 * (1 + 3 * 2)
    ours = assert_engines_agree(made, graph, data, "unrewritten")
    assert len(ours) == 1 + len(list(model.parameters()))
    # the masks matter: without dropout the loss is another
    assert abs(float(ours["loss"]) - float(eager(model.eval(), data, torch.float64)["loss"])) > 1e-4


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", MAKERS)
def test_graph_after_every_pass(kind: str) -> None:
    data = batch(3, 10, "right", ignored=True)
    made = compiled(MAKERS[kind](), data, keep_stages=True)
    names = trained(made)
    made.differentiated(names)
    stages = list(made.journal.stages or [])
    assert [name for name, _ in stages] == [
        "capture",
        *(f"forward-{p.name}" for p in FORWARD),
        "differentiate",
        *(f"gradients-{p.name}" for p in STEP),
    ]
    exact = {f"forward-{p.name}": p.exact for p in FORWARD}
    exact |= {f"gradients-{p.name}": p.exact for p in STEP}
    before: Tensors | None = None
    text = ""
    passes = [s for s, _ in stages if s not in ("capture", "differentiate")]
    edits = dict(zip(passes, [r.edits for r in made.journal.reports], strict=True))
    for stage, graph in stages:
        said, text = text, graph_text(graph)
        if text == said and edits.get(stage) == 0:
            continue  # the pass has changed nothing
        if not any(n.startswith("grad.") for n in graph.outputs):
            graph = vjp(graph, ["loss"], names)
        ours = assert_engines_agree(made, graph, data, stage)
        if before is not None and exact.get(stage, False):
            # a forward pass leaves the forward's bits alone; what is derived from the rewritten
            # forward may add up in another order
            compared = ["loss"] if stage.startswith("forward") else list(ours)
            changed = [n for n in compared if not torch.equal(ours[n], before[n])]
            assert not changed, f"{stage} is called exact, yet changed {changed}"
        before = ours


def test_step_graph_before_and_after_rewriting_updates_alike() -> None:
    """AdamW and clipping, as the step graph writes them, on both engines."""
    from onward.differentiate import Recipe, UpdateGroup, add_updates
    from onward.graph.ops.optimizers import OPTIMIZERS

    data = batch(3, 10)
    made = compiled(gpt2(layers=1), data)
    names = tuple(trained(made))
    adamw = OPTIMIZERS["AdamW"]
    slots = ("exp_avg", "exp_avg_sq")  # those without amsgrad
    recipe = Recipe((UpdateGroup(0, names, adamw, {"decoupled": 1}, slots),), 0.5)
    plain = add_updates(vjp(made.forward, ["loss"], names), recipe)
    step = made.compiler.step(made.forward, recipe)
    import tiny

    state = {
        v.name: torch.full([int(s) for s in v.meta["type"].shape], 1e-3)
        for v in step.inputs
        if (v.name or "").startswith("exp_avg")
    }
    assert len(state) == 2 * len(names)
    feeds = {
        "step.0": 3, "lr.0": 1e-2, "beta1.0": 0.9, "beta2.0": 0.99, "eps.0": 1e-8,
        "weight_decay.0": 0.1,
    }  # fmt: skip
    outputs = {}
    for label, graph in (("plain", plain), ("rewritten", step)):
        graph = graph.clone()
        graph.state = {}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**feeds, **state}.items():
                patch.setitem(tiny.FEEDS, name, value)
            outputs[label] = onnxruntime(made, graph, data)
    assert {f"next.{n}" for n in names} <= set(outputs["plain"])
    for name, value in outputs["plain"].items():
        torch.testing.assert_close(
            outputs["rewritten"][name], value, rtol=1e-4, atol=1e-7, msg=name
        )
