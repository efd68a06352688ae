"""Reports and explanations name the parameters that get no gradient, and those that are frozen."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import onward

UNREACHED = [f"spare.{i}.{kind}" for i in range(3) for kind in ("weight", "bias")]
LINES = {
    "no gradient": f"{', '.join(UNREACHED[:5])}, ... (6 parameters)",
    "frozen": "still.bias (1 parameter)",
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.still = nn.Linear(4, 4), nn.Linear(4, 4)
        self.still.bias.requires_grad_(False)
        self.spare = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.still(torch.tanh(self.used(x)))
        return {"loss": y.square().mean(), "more": self.spare[0](x.detach()).detach() + y}


def said(who: Any) -> Any:
    model = Net()
    x = torch.randn(3, 4)
    if who == "trainer":
        trainer = onward.Trainer(model, torch.optim.AdamW(model.parameters()))
        trainer.train_step(x)
        return trainer, trainer.report()
    onward.accelerate(model)
    for _ in range(2):
        model(x)["loss"].backward()
    return model, onward.explain(model)


def test_of_eager() -> None:
    model = Net()
    model(torch.randn(3, 4))["loss"].backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None]
    assert missing == ["still.bias", *UNREACHED]


def test_a_report() -> None:
    _, report = said("trainer")
    assert report["no_gradient"] == UNREACHED
    assert report["frozen"] == ["still.bias"]
    assert json.loads(json.dumps(report.to_dict()))["no_gradient"] == UNREACHED
    for what, names in LINES.items():
        assert f"\n{what:<16}{names}\n" in f"{report}\n"


def test_a_report_of_a_model_without_any_has_no_line() -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    trainer = onward.Trainer(
        model, torch.optim.AdamW(model.parameters()), loss_fn=nn.functional.mse_loss
    )
    trainer.train_step(torch.randn(3, 4), torch.randn(3, 2))
    report = trainer.report()
    assert (report["no_gradient"], report["frozen"]) == ([], [])
    assert not any(what in str(report) for what in LINES)


@pytest.mark.parametrize("who", ["trainer", "module"])
def test_an_explanation(who: str) -> None:
    found = onward.explain(said(who)[0])
    assert found.no_gradient == tuple(UNREACHED)
    assert found.frozen == ("still.bias",)
    held = json.loads(json.dumps(found.as_dict()))
    assert (held["no_gradient"], held["frozen"]) == (UNREACHED, ["still.bias"])
    for what, names in LINES.items():
        assert f"\n  {what}: {names}\n" in str(found)
        assert f"<li>{what}: {names}</li>" in found._repr_html_()


def test_what_is_frozen_later_is_said_of_the_next_step() -> None:
    model, x = Net(), torch.randn(3, 4)
    trainer = onward.Trainer(model, torch.optim.AdamW(model.parameters()))
    trainer.train_step(x)
    model.used.requires_grad_(False)
    assert trainer.report()["frozen"] == ["still.bias"]
    trainer.train_step(x)
    assert trainer.report()["frozen"] == ["used.weight", "used.bias", "still.bias"]
