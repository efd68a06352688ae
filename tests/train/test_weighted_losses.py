"""WeightedLosses: the weighted sum is trained, each loss is told; eager PyTorch is the oracle."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import onward

F = nn.functional
Target = Mapping[str, torch.Tensor]


class TwoHeads(nn.Module):
    """x f32[B,8] -> words f32[B,5], order f32[B]."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.words, self.order = nn.Linear(8, 16), nn.Linear(16, 5), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = torch.relu(self.body(x))
        return {"words": self.words(h), "order": self.order(h).squeeze(-1)}


def words(outputs: Any, target: Target) -> torch.Tensor:
    return F.cross_entropy(outputs["words"], target["words"])


def order(outputs: Any, target: Target) -> torch.Tensor:
    return F.mse_loss(outputs["order"], target["order"])


def both(outputs: Any, target: Target) -> dict[str, torch.Tensor]:
    return {"words": words(outputs, target), "order": order(outputs, target)}


class Order(nn.Module):
    """The squared distance to the order, scaled by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, outputs: Any, target: Target) -> torch.Tensor:
        return self.scale * order(outputs, target)


def batch(count: int = 6) -> tuple[torch.Tensor, Target]:
    target = {"words": torch.randint(0, 5, (count,)), "order": torch.randn(count)}
    return torch.randn(count, 8), target


FORMS: dict[str, Callable[[], onward.WeightedLosses]] = {
    "functions": lambda: onward.WeightedLosses({"words": words, "order": order}, {"order": 0.3}),
    "one function": lambda: onward.WeightedLosses(both, {"order": 0.3, "words": -2}),
    "no weights": lambda: onward.WeightedLosses(both),
    "a weight of 0": lambda: onward.WeightedLosses(both, {"words": 0.0}),
    "one loss": lambda: onward.WeightedLosses({"words": words}, {"words": 0.25}),
    "a module": lambda: onward.WeightedLosses({"words": words, "order": Order()}, {"words": 2}),
    "an output's name": lambda: onward.WeightedLosses({"loss": words, "output": order}),
}


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("name", FORMS)
def test_steps_are_those_of_eager_pytorch(name: str, window: int) -> None:
    torch.manual_seed(0)
    ours, losses = TwoHeads(), FORMS[name]()
    theirs = copy.deepcopy(ours)
    trainer = onward.Trainer(
        ours,
        torch.optim.SGD(ours.parameters(), lr=0.1),
        losses,
        options={
            "gradient_accumulation_steps": window, "verify": True,
            "gradient_accumulation_average": "micro_batches",
        },
    )  # fmt: skip
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for step in range(2 * window):
        x, target = batch()
        result = trainer.train_step(x, target)
        outputs = theirs(x)
        parts = losses.parts(outputs, target)
        total = sum(losses.weights.get(key, 1.0) * part for key, part in parts.items())
        assert isinstance(total, torch.Tensor)
        torch.testing.assert_close(result.loss, total.detach())
        assert list(result.losses) == list(parts)
        for key, part in parts.items():
            torch.testing.assert_close(result.losses[key], part.detach())
        (total / window).backward()
        if step % window == window - 1:
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    x, target = batch()
    with torch.no_grad():
        parts = losses.parts(theirs(x), target)
    found = trainer.eval_step(x, target)
    for key, part in parts.items():
        torch.testing.assert_close(found.losses[key], part, rtol=1e-4, atol=1e-5)


def test_a_weight_may_change_between_steps() -> None:
    torch.manual_seed(0)
    net = TwoHeads()
    losses = onward.WeightedLosses({"words": words, "order": order}, {"order": 1.0})
    trainer = onward.Trainer(net, onward.optim.SGD(lr=0.0), losses)
    x, target = batch()
    for weight in (1.0, 0.1, 0.1, 1.0):
        losses.weights["order"] = weight
        result = trainer.train_step(x, target)
        total = result.losses["words"] + weight * result.losses["order"]
        torch.testing.assert_close(result.loss, total)


def test_losses_in_bf16_and_by_evaluate() -> None:
    torch.manual_seed(0)
    losses = onward.WeightedLosses(both, {"order": 0.5})
    trainer = onward.Trainer(
        TwoHeads(), onward.optim.SGD(lr=0.1), losses, options={"mixed_precision": "bf16"}
    )
    x, target = batch()
    result = trainer.train_step(x, target)
    total = result.losses["words"] + 0.5 * result.losses["order"]
    torch.testing.assert_close(result.loss, total, rtol=1e-2, atol=1e-2)
    found = onward.evaluate(trainer, [(x, target)])
    assert set(found.named()) >= {"eval_loss", "eval_words", "eval_order"}
    assert found.loss == pytest.approx(
        found.losses["words"] + 0.5 * found.losses["order"], rel=1e-2
    )


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a weight for no loss": (
        lambda: onward.WeightedLosses({"words": words}, {"order": 1.0}), "'order'",
    ),
    "a weight that is no number": (
        lambda: onward.WeightedLosses({"words": words}, {"words": "1"}), "'words' is '1'",  # type: ignore[dict-item]
    ),
    "a loss that is no function": (lambda: onward.WeightedLosses({"words": 3}), "'words' is 3"),  # type: ignore[dict-item]
    "a class": (lambda: onward.WeightedLosses({"words": Order}), "is <class"),  # type: ignore[dict-item]
    "a weight for none of a mapping": (
        lambda: onward.WeightedLosses(both, {"sentences": 1.0}), "'sentences'",
    ),
    "rows": (
        lambda: onward.WeightedLosses({"rows": lambda o, t: o["order"]}), "'rows' has 1 dim",
    ),
    "nothing": (lambda: onward.WeightedLosses(lambda o, t: {}), "no losses"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_sum_of_losses_is_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(onward.OnwardError, match=message):
        onward.Trainer(TwoHeads(), onward.optim.SGD(lr=0.1), make()).train_step(*batch())
