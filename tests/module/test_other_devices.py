"""Models on devices of a kind that Onward does not compute on, as Apple's and Intel's GPUs. The
kind of the CPU is taken for such a one here."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import onward
from onward.errors import CaptureError, EagerWarning
from onward.model_state import device

SAID = (
    r'the parameters are on cpu.* computes on CPUs and CUDA devices alone; fix: model.to\("cpu"\)'
)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    monkeypatch.setattr(device, "_COMPUTING", ("cuda",))
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))


@pytest.mark.parametrize("wrap", [onward.accelerate, onward.Module])
def test_calls_run_in_eager_pytorch(model: nn.Module, wrap: type) -> None:
    x = torch.randn(3, 4)
    want = model(x)
    with pytest.warns(EagerWarning, match=SAID):
        y = wrap(model)(x)
    assert torch.equal(y, want)


def test_strict_calls_are_refused(model: nn.Module) -> None:
    with pytest.raises(CaptureError, match=SAID):
        onward.accelerate(model, strict=True)(torch.randn(3, 4))


def test_a_trainer_refuses_the_model(model: nn.Module) -> None:
    with pytest.raises(CaptureError, match=SAID):
        onward.Trainer(model, onward.optim.SGD(lr=0.1), nn.functional.cross_entropy)


def test_an_explanation_says_so(model: nn.Module) -> None:
    assert "computes on CPUs and CUDA devices alone" in str(
        onward.explain(model, torch.randn(3, 4))
    )
