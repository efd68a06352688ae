"""Verification compares which parameters have a gradient at all, and which have one of zeros."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_loops import LOOPS, Experts, batch
from torch import nn

import onward
from onward import OnwardError
from onward.differentiate.rule_table import RULES


class Rotary(nn.Module):
    """Queries and keys reach the loss through complex numbers alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(6))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            z = torch.view_as_complex(part(x).unflatten(-1, (4, 2)))
            x = x + torch.view_as_real(z * torch.polar(torch.ones(4), torch.arange(4.0))).flatten(2)
        return (self.scale * x * torch.arange(8)).square().mean()


FIVE = ", ".join(f"parts.{i}.weight" for i in range(5))


def test_a_parameter_that_only_eager_moves_is_not_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 3, 8)
    assert onward.Trainer(Rotary(), onward.optim.AdamW()).verify(x).ok

    def floating(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.is_floating_point()

    monkeypatch.setattr("onward.capture.translate.autograd_reach.carries", floating)
    said = f"no gradient where eager PyTorch has one: {FIVE}, ... (6 parameters)"
    report = onward.Trainer(Rotary(), onward.optim.AdamW()).verify(x)
    assert not report.ok
    assert report.mismatches == [said]
    assert f"DIFFERS {said}" in str(report)
    with pytest.raises(OnwardError, match="verification failed") as raised:
        onward.Trainer(Rotary(), onward.optim.AdamW(), verify=True).train_step(x)
    assert said in str(raised.value)


def test_a_parameter_that_eager_leaves_alone_is_not_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    class Detached(Rotary):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.spare.detach()

    x = torch.randn(2, 3, 8)
    trainer = onward.Trainer(Detached(), onward.optim.AdamW())
    assert trainer.verify(x).ok
    monkeypatch.setattr("onward.capture.translate.autograd_reach.stops", lambda node: False)
    monkeypatch.setattr(
        "onward.capture.trace.gradient_edges.GradientEdges.of_result",
        lambda self, node, number: list(node.all_input_nodes),
    )
    report = onward.Trainer(Detached(), onward.optim.AdamW()).verify(x)
    said = "a gradient where eager PyTorch has none: spare (1 parameter)"
    assert report.mismatches == [said]


def test_experts_that_a_batch_leaves_out_are_noted() -> None:
    model, data = Experts(LOOPS["from_a_list"]), batch(5, 1, 30.0)
    report = onward.Trainer(model, onward.optim.AdamW()).verify(data)
    assert report.ok
    [note] = [n for n in report.notes if n.startswith("gradients are zero in this batch")]
    model(**data).backward()
    left = [n for n, p in model.named_parameters() if p.grad is None and n.startswith("list.")]
    assert note.endswith(f": {', '.join(left[:5])}, ... ({len(left)} parameters)")


def test_what_is_exactly_zero_in_eager_is_to_be_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """AdamW divides by its size: a gradient that is next to nothing moves as any other does."""

    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.v = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ((x * self.w).clamp(max=-1e9) * 1e-9 + x * torch.tanh(self.v)).square().mean()

    x = torch.randn(4, 8)
    assert onward.Trainer(Clamped(), onward.optim.AdamW()).verify(x).ok
    plain = RULES["Where"]

    def wrong(b: Any, dys: Any, ys: Any, xs: Any, attrs: Any) -> Any:
        made = list(plain(b, dys, ys, xs, attrs))
        return [d if d is None or i == 0 else b.Add(d, 1e-12) for i, d in enumerate(made)]

    monkeypatch.setitem(RULES, "Where", wrong)
    monkeypatch.setitem(
        RULES, "Clip", lambda b, dys, ys, xs, attrs: [b.Mul(dys[0], 1e-3), None, None]
    )
    monkeypatch.setitem(
        RULES, "Min", lambda b, dys, ys, xs, attrs: [b.Mul(dys[0], 1e-3) for _ in xs]
    )
    report = onward.Trainer(Clamped(), onward.optim.AdamW()).verify(x)
    assert not report.ok
    assert report.mismatches == [
        "a gradient that is not zero where eager PyTorch's is exactly zero: w (1 parameter)"
    ]
