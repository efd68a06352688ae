"""Options of a Trainer together: each optimizer with windows that end early, clipping, averaged
weights, skipped updates and checkpoints, beside eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from own_optimizers import Heavy, Signed
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import onward

pytestmark = pytest.mark.usefixtures("captures_kept")

STEPS, DECAY = 3, 0.8

# in the graph, and by their own step
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02, amsgrad=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.02),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "Heavy": Heavy,
    "Signed": lambda p: Signed(p, lr=0.02),
}
CLIPPING: dict[str, dict[str, float]] = {
    "none": {},
    "norm": {"max_grad_norm": 0.05},
    "value": {"max_grad_value": 0.01},
}


class Net(nn.Module):
    """Two layers; the mean cross entropy of their output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.last(torch.tanh(self.first(x))), labels)


def data(i: int, bad: bool = False) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(i)
    x, y = torch.randn(4, 6, generator=draw), torch.randint(0, 4, (4,), generator=draw)
    if bad:
        x[1, 2] = float("nan")
    return {"x": x, "labels": y}


# sizes of the windows; a negative one holds NaN, so that its update is skipped
WINDOWS = (3, 2, 3, -3, 1, 3, -2, 3)


def eager(made: Callable[[Any], Any], clipping: dict[str, float]) -> tuple[nn.Module, Any, Any]:
    """The windows in a plain loop. Returns the model, the optimizer and the averaged model."""
    model = Net()
    optimizer = made(model.parameters())
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    at = 0
    for size in WINDOWS:
        optimizer.zero_grad()
        for _ in range(abs(size)):
            (model(**data(at, size < 0)) / abs(size)).backward()
            at += 1
        if size < 0:
            continue
        if "max_grad_norm" in clipping:
            nn.utils.clip_grad_norm_(model.parameters(), clipping["max_grad_norm"])
        if "max_grad_value" in clipping:
            nn.utils.clip_grad_value_(model.parameters(), clipping["max_grad_value"])
        optimizer.step()
        averaged.update_parameters(model)
    return model, optimizer, averaged


def trainer_of(made: Callable[[Any], Any], clipping: dict[str, float]) -> Any:
    model = Net()
    options = {"gradient_accumulation_steps": STEPS, "ema_decay": DECAY, **clipping}
    return onward.Trainer(model, made(model.parameters()), options=options)


def run(trainer: Any, windows: tuple[int, ...], at: int = 0) -> int:
    """Trains the windows from micro-batch `at` on, and returns the next one's number."""
    for size in windows:
        for _ in range(abs(size)):
            result = trainer.train_step(**data(at, size < 0))
            at += 1
        if abs(size) < STEPS:
            assert not result.updated and trainer.micro_steps == abs(size)
            result = trainer.update()
        assert trainer.micro_steps == 0
        assert (result.updated, result.skipped) == (size > 0, size < 0)
    return at


def near(found: Any, wanted: Any) -> None:
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=2e-5, atol=2e-6, msg=name)


@pytest.mark.parametrize("clipping", CLIPPING)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_they_are_eagers(name: str, clipping: str) -> None:
    made = OPTIMIZERS[name]
    model, _, averaged = eager(made, CLIPPING[clipping])
    trainer = trainer_of(made, CLIPPING[clipping])
    run(trainer, WINDOWS)
    assert trainer.updates == sum(size > 0 for size in WINDOWS)
    near(trainer.model.state_dict(), model.state_dict())
    near(trainer.ema_state_dict(), averaged.module.state_dict())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_checkpoint_goes_on_to_the_bit(name: str, tmp_path: Path) -> None:
    made = OPTIMIZERS[name]
    trainer = trainer_of(made, CLIPPING["norm"])
    at = run(trainer, WINDOWS[:3])
    trainer.train_step(**data(at))  # an open window
    trainer.save(tmp_path)
    again = trainer_of(made, CLIPPING["norm"])
    again.resume(tmp_path)
    for one in (trainer, again):
        one.train_step(**data(at + 1))
        one.update()
        run(one, (3, 2), at + 2)
    for mine, other in zip(trainer.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(mine, other)
    first, second = trainer.ema_state_dict(), again.ema_state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_a_lost_run_of_an_own_step_ends() -> None:
    model = Net()
    trainer = onward.Trainer(model, Heavy(model.parameters()), options={"max_skipped_updates": 2})
    before = copy.deepcopy(model.state_dict())
    trainer.train_step(**data(0, bad=True))
    with pytest.raises(onward.NonfiniteError, match="'x' holds NaN"):
        trainer.train_step(**data(0, bad=True))
    assert all(torch.equal(before[k], t) for k, t in model.state_dict().items())
