"""The graph with casts on engines that are not ours: bf16 on onnx's reference evaluator, fp16 on
stock onnxruntime; forward and gradients.

What they find is as near an fp64 run as `torch.autocast`: the graph alone says so, without our
kernels. Where an engine rounds as often as Onward does, the two agree to fp32's rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from near_autocast import assert_near, shuffled
from tiny import (
    Compiled,
    Tensors,
    batch,
    bert,
    compiled,
    execute,
    gpt2,
    onnxruntime,
    plain,
    reference,
    trained,
)
from tiny_families import CASES, Towers, pairs

from onward.graph.graph import Graph, type_of
from onward.graph.types import DType
from onward.rewrite import Policy

pytestmark = pytest.mark.usefixtures("captures_kept")

MODELS: dict[str, tuple[Callable[[], Any], Callable[[int], Tensors]]] = {
    "GPT-2": (lambda: gpt2(dropout=0.0), lambda seed: batch(4, 8, seed=seed)),
    "BERT": (
        lambda: bert(dropout=0.0), lambda seed: batch(4, 8, "right", ignored=True, seed=seed + 1)
    ),
    "T5": (CASES["T5"][0], lambda seed: shuffled(CASES["T5"][1](), seed)),
    "Llama": (CASES["Llama"][0], lambda seed: shuffled(CASES["Llama"][1](), seed)),
    "two towers": (Towers, lambda seed: pairs(seed + 1)),
}  # fmt: skip
ENGINES: dict[DType, Callable[..., Tensors]] = {
    DType.BFLOAT16: reference, DType.FLOAT16: onnxruntime,
}  # fmt: skip
TORCH = {DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16}
EACH_LOW = pytest.mark.parametrize("low", ENGINES, ids=str)
EACH_MODEL = pytest.mark.parametrize("name", MODELS)


def with_gradients(model: Any, data: Tensors, policy: Policy) -> tuple[Compiled, Graph]:
    made = compiled(model, data, policy=policy)
    graph = made.differentiated(trained(made)).clone()
    graph.outputs = {n: y for n, y in graph.outputs.items() if n == "loss" or n.startswith("grad.")}
    assert {type_of(y).dtype for node in graph for y in node.outputs} >= {policy.low, DType.FLOAT}
    return made, graph


@pytest.mark.sample(4)
@EACH_LOW
@EACH_MODEL
def test_loss_and_gradients_are_as_near_as_autocast(name: str, low: DType) -> None:
    make, draw = MODELS[name]
    torch.manual_seed(0)
    model, batches = make().train(), [draw(seed) for seed in range(4)]
    made, graph = with_gradients(model, batches[0], Policy(low))
    found = [plain(ENGINES[low](made, graph, data)) for data in batches]
    assert_near(model, batches, found, TORCH[low])


DROPPED = {
    **{name: (make, draw(0)) for name, (make, draw) in MODELS.items()},
    "GPT-2, dropout": (gpt2, batch(4, 8)),
    "BERT, dropout": (bert, batch(4, 8, "right", ignored=True)),
}  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", DROPPED)
def test_onward_rounds_where_the_graph_says(name: str) -> None:
    """Nothing but the order of fp32 sums is Onward's own, and now and then a rounding that it turns
    over; masks are those of the graph. The head is fp32: what its kernel rounds is its own."""
    make, data = DROPPED[name]
    torch.manual_seed(0)
    policy = Policy(DType.BFLOAT16, ("LinearCrossEntropy", "lm_head"))
    made, graph = with_gradients(make().train(), data, policy)
    ours, theirs = execute(made, graph, data), reference(made, graph, data)
    scale = max(float(t.norm()) for t in theirs.values())
    for key, value in theirs.items():
        gap = float((ours[key] - value).norm())
        assert gap <= 1e-4 * float(value.norm()) + 1e-6 * scale, f"{key}: {gap:.3e}"
