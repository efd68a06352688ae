"""The memory of eager PyTorch on a GPU without one: beside bytes counted by hand, and beside those
that a GPU's allocator told."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

cases: Any = import_module("suite.cases")
eager_memory: Any = import_module("suite.eager_memory")
gpu_memory: Any = import_module("suite.gpu_memory")
model_flops: Any = import_module("suite.model_flops")
workloads: Any = import_module("suite.workloads")

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
D, H = 256, 1024  # features in and out, and within


class Mlp(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, H, bias=False), nn.Linear(H, D, bias=False)
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.dropout(self.up(x).relu(), self.p, self.training)
        return self.down(h).square().mean()


def test_weights_gradients_and_moments() -> None:
    """With one sample the step is fullest in its update: weights, gradients and two moments."""
    found = eager_memory.step_memory(Mlp, {"x": torch.zeros(1, D)})
    weights = 2 * D * H * 4
    assert found.held == weights + 4 * D
    assert found.peak == pytest.approx(4 * weights, rel=0.01)


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_each_sample_adds_what_the_operators_keep(p: float) -> None:
    """A large batch is fullest in its backward. relu keeps its result and dropout a byte per
    number, beside which are its result and the gradients of both."""
    few, many = (
        eager_memory.step_memory(lambda: Mlp(p), {"x": torch.zeros(n, D)}) for n in (4096, 8192)
    )
    added = (many.step - few.step) / 4096
    floats = 2 * H + 2 * D if not p else 3 * H + H / 4 + D
    assert added == pytest.approx(4 * floats, rel=0.3)


def test_the_largest_batch_is_exact() -> None:
    asked: list[int] = []

    def peak(n: int) -> int:
        asked.append(n)
        return 1000 + 7 * n + n // 50

    for limit in (1007, 1500, 12_345):
        found = gpu_memory.largest_within(peak, limit, 4, 1000 + 28)
        assert peak(found) <= limit < peak(found + 1)
    assert gpu_memory.largest_within(peak, 900, 4, 1028) == 0


def test_flops_of_a_step_are_six_per_weight_and_token() -> None:
    """Beside attention's scores, and without the tables of positions and, tied as it is, words."""
    case = next(c for c in cases.MEMORY if c.name == "GPT-2 medium").tiny()
    model = workloads.make_model(case)
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    weights -= model.get_parameter("transformer.wpe.weight").numel()
    config = model.config
    # the backward of attention computes the scores again
    attention = 3.5 * 4 * case.batch * case.tokens**2 * config.n_embd * config.n_layer
    expected = 6 * weights * case.tokens_per_step + attention
    assert model_flops.step_flops(case) == pytest.approx(expected, rel=0.01)


def test_predictions_are_near_what_was_measured() -> None:
    """Rows of the committed results whose case was measured on a GPU, whose bytes stand beside
    them: eager's within 5 %, Onward's within 2 %."""
    last = sorted(RESULTS.glob("gpu_memory-*.json"))[-1]
    found = json.loads(last.read_text())["cases"]
    assert {(c["name"], c["batch"]) for c in found} == {(c.name, c.batch) for c in cases.MEMORY}
    rows = [case for case in found if case["measured"]]
    assert len(rows) >= 4
    # plans of before 2026-11-27 had fewer kernels
    since, near = {"eager": "", "onward": "2026-11-27"}, {"eager": 0.05, "onward": 0.02}
    for engine, date in since.items():
        pairs = {r["name"]: (r[engine], *r["measured"][engine]) for r in rows}
        late = {name: (a, b) for name, (a, b, when) in pairs.items() if when >= date}
        assert len(late) >= 2, engine
        for name, (predicted, there) in late.items():
            assert predicted == pytest.approx(there, rel=near[engine]), (engine, name)
