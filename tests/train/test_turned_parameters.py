"""Transposed and channels-last parameters: what torch's fused updates read has their strides."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import onward

Make = Callable[[Any], torch.optim.Optimizer]

FUSED: dict[str, Make] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.05, fused=True),
    "amsgrad": lambda ps: torch.optim.Adam(ps, lr=0.05, fused=True, amsgrad=True),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, fused=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.05, fused=True),
}  # fmt: skip
loss_fn = nn.functional.cross_entropy


def made() -> nn.Module:
    """A convolution and a linear layer whose weights do not lie row by row."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 5))
    model = model.to(memory_format=torch.channels_last)
    head = model[3]
    assert isinstance(head, nn.Linear)
    head.weight.data = head.weight.data.t().contiguous().t()
    assert sum(not p.is_contiguous() for p in model.parameters()) == 2
    return model


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    seeded = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 3, 6, 6, generator=seeded)
    return x, torch.randint(0, 5, (4,), generator=seeded)


def eager(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    x, y = batch(seed)
    loss_fn(model(x), y).backward()
    optimizer.step()


def pair(make: Make) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    models = [made(), made()]
    return models, [make(m.parameters()) for m in models]


def assert_alike(model: nn.Module, twin: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("keeps", [False, True], ids=["shown", "copied"])
@pytest.mark.parametrize("name", FUSED)
def test_an_own_step_gets_gradients_in_the_strides_of_parameters(name: str, keeps: bool) -> None:
    (model, twin), (ours, theirs) = pair(FUSED[name])
    kept: list[Any] = []

    def look(*_: Any) -> None:
        for p in model.parameters():
            assert p.grad is not None
            assert p.grad.stride() == p.stride()
            kept.append(p.grad if keeps else None)

    ours.register_step_pre_hook(look)
    trainer = onward.Trainer(model, ours, loss_fn)
    for i in range(4):
        trainer.train_step(*batch(i))
        eager(twin, theirs, i)
        assert_alike(model, twin)
    assert trainer.report()["own_step"]


@pytest.mark.parametrize("how", ["the Trainer ends", "state_dict", "deepcopied", "own step"])
@pytest.mark.parametrize("name", FUSED)
def test_state_goes_back_to_pytorch(name: str, how: str) -> None:
    (model, twin), (ours, theirs) = pair(FUSED[name])
    trainer: onward.Trainer | None = onward.Trainer(model, ours, loss_fn)
    for i in range(3):
        assert trainer is not None
        trainer.train_step(*batch(i))
        eager(twin, theirs, i)
    if how in ("state_dict", "deepcopied"):
        saved = ours.state_dict() if how == "state_dict" else copy.deepcopy(ours.state_dict())
        held = [e for e in saved["state"].values() for e in e.values() if e.dim() > 1]
        assert held
        assert all(not e.is_contiguous() for e in held)
        model = copy.deepcopy(model)
        ours = FUSED[name](model.parameters())
        ours.load_state_dict(saved)
    if how == "own step":
        ours.register_step_post_hook(lambda *_: None)
        trainer = onward.Trainer(model, ours, loss_fn)
    else:
        trainer = None
    for i in range(3, 6):
        if trainer is None:
            eager(model, ours, i)
        else:
            trainer.train_step(*batch(i))
        eager(twin, theirs, i)
        assert_alike(model, twin)


def test_another_trainer_goes_on_from_state_in_strides() -> None:
    (model, twin), (ours, theirs) = pair(FUSED["adamw"])
    onward.Trainer(model, ours, loss_fn).train_step(*batch(0))
    eager(twin, theirs, 0)
    eager(model, ours, 1)
    eager(twin, theirs, 1)
    trainer = onward.Trainer(model, ours, loss_fn)
    for i in range(2, 4):
        trainer.train_step(*batch(i))
        eager(twin, theirs, i)
    assert_alike(model, twin)
    trainer.load_state_dict(copy.deepcopy(trainer.state_dict()))
    trainer.train_step(*batch(4))
    eager(twin, theirs, 4)
    assert_alike(model, twin)


def test_moments_stay_views_while_the_trainer_lives() -> None:
    """What the user writes into them takes effect at once, also beside a `state_dict`."""
    (model, twin), (ours, theirs) = pair(FUSED["momentum"])
    trainer = onward.Trainer(model, ours, loss_fn)
    for i in range(3):
        trainer.train_step(*batch(i))
        eager(twin, theirs, i)
        ours.state_dict()
        for optimizer in (ours, theirs):
            for entry in optimizer.state.values():
                entry["momentum_buffer"].mul_(0.5)
    assert_alike(model, twin)


@pytest.mark.parametrize("form", ["bf16", "8bit"])
def test_moments_in_fewer_bytes_are_shown_in_strides(form: str) -> None:
    model = nn.Linear(128, 64)
    model.weight.data = model.weight.data.t().contiguous().t()
    ours = torch.optim.AdamW(model.parameters(), fused=True)
    options = {"optimizer_state": form}
    trainer = onward.Trainer(model, ours, nn.functional.mse_loss, options=options)
    trainer.train_step(torch.randn(4, 128), torch.randn(4, 64))
    saved = ours.state_dict()["state"][0]
    del trainer
    ours.step()
    for entry in (saved, ours.state[model.weight]):
        assert entry["exp_avg"].stride() == entry["exp_avg_sq"].stride() == model.weight.stride()


@pytest.mark.parametrize("own", [False, True], ids=["graph", "own step"])
def test_sums_of_an_open_window_come_back_in_strides(own: bool) -> None:
    (model, twin), (ours, theirs) = pair(FUSED["adamw"])
    if own:
        ours.register_step_post_hook(lambda *_: None)
    options = {"gradient_accumulation_steps": 3}
    trainer = onward.Trainer(model, ours, loss_fn, options=options)
    for i in range(2):
        trainer.train_step(*batch(i))
        x, y = batch(i)
        (loss_fn(twin(x), y) / 3).backward()
    trainer._optimizer.give_back()
    for p in model.parameters():
        assert p.grad is not None
        assert p.grad.stride() == p.stride()
    ours.step()
    theirs.step()
    assert_alike(model, twin)


@pytest.mark.parametrize("own", [False, True], ids=["graph", "own step"])
def test_parameters_with_gaps_keep_gradients_by_rows(own: bool) -> None:
    """PyTorch gives those no strides of their own either, and its plain updates compare strides."""
    models: list[nn.Linear] = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Linear(4, 6))
        wide = models[-1].weight.data
        models[-1].weight.data = torch.stack([wide, wide + 9], -1).flatten(1)[:, ::2]
    model, twin = models
    ours, theirs = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in models]
    if own:
        ours.register_step_post_hook(lambda *_: None)
    trainer: onward.Trainer | None = onward.Trainer(model, ours, loss_fn)
    x, y = torch.randn(3, 4), torch.tensor([1, 2, 5])
    for i in range(6):
        if i == 3:
            trainer = None
        for m, o in ((model, ours), (twin, theirs)):
            if m is model and trainer is not None:
                trainer.train_step(x, y)
                continue
            o.zero_grad()
            loss_fn(m(x), y).backward()
            o.step()
        assert_alike(model, twin)
