"""Generators of random numbers: those of a model's devices are put back, and no others touched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import onward


class Loudest(torch.nn.Module):
    """A part that no graph can hold: it reads its data on the host, and draws."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(np.abs(x.detach().cpu().numpy()).max()) + torch.rand_like(x)


class Net(torch.nn.Module):
    """Layers around a part; without one, dropout. It sets an attribute, which is judged."""

    def __init__(self, part: torch.nn.Module) -> None:
        super().__init__()
        self.first, self.part, self.last = torch.nn.Linear(8, 8), part, torch.nn.Linear(8, 1)
        self.calls: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = "called"
        return self.last(self.part(self.first(x)).tanh()).square().mean()


def trained(model: torch.nn.Module, x: torch.Tensor) -> None:
    trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        trainer.train_step({"x": x})
    if isinstance(model.part, torch.nn.Dropout):
        assert trainer.verify({"x": x}).ok


PARTS = {"dropout": lambda: torch.nn.Dropout(0.1), "a region": Loudest}


@pytest.mark.filterwarnings("ignore::onward.errors.EagerWarning")
@pytest.mark.parametrize("name", PARTS)
def test_no_device_without_tensors_is_asked_for_its_state(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine with several GPUs a fork of all generators initializes each and warns."""
    asked: list[list[int]] = []
    plain = torch.random.fork_rng

    def fork(devices: Any = None, enabled: bool = True, **more: Any) -> Any:
        assert devices is not None, "all devices of the machine"
        asked.append(list(devices))
        return plain(devices, enabled, **more)

    monkeypatch.setenv("ONWARD_CACHE", "")
    monkeypatch.setattr(torch.random, "fork_rng", fork)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda _: pytest.fail("all are seeded"))
    trained(Net(PARTS[name]()), torch.ones(4, 8))
    assert asked and not any(asked)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore::onward.errors.EagerWarning")
@pytest.mark.parametrize("name", PARTS)
def test_the_generator_of_a_models_device_goes_on_as_before(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONWARD_CACHE", "")
    before = torch.cuda.get_rng_state(), torch.get_rng_state()
    model = Net(PARTS[name]())
    torch.set_rng_state(before[1])
    trained(model.cuda(), torch.ones(4, 8, device="cuda"))
    after = torch.cuda.get_rng_state(), torch.get_rng_state()
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
