"""Parameters that begin to move late are counted from their own first update, as in torch."""

from __future__ import annotations

import copy

import pytest
import torch

import onward

X, Y = torch.randn(4, 3), torch.randn(4, 2)


def _model() -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))


def _adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def _eager_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(X), Y).backward()
    optimizer.step()


def _same(ours: torch.nn.Module, eager: torch.nn.Module) -> None:
    for (name, p), q in zip(ours.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("again", [False, True])
def test_thawed_layer_follows_torch(again: bool) -> None:
    """Freeze, train, thaw, train; with `again`, freeze and thaw a second time."""
    ours = _model()
    eager = copy.deepcopy(ours)
    theirs = _adam(eager)
    trainer = onward.Trainer(ours, _adam(ours), loss_fn=torch.nn.functional.mse_loss)
    for flag in (False, True, *((False, True) if again else ())):
        for model in (ours, eager):
            model[0].requires_grad_(flag)
        for _ in range(4):
            trainer.train_step(X, Y)
            _eager_step(eager, theirs)
    _same(ours, eager)
    counts = {n: int(trainer.optimizer.state[p]["step"]) for n, p in ours.named_parameters()}
    assert counts == {n: int(theirs.state[p]["step"]) for n, p in eager.named_parameters()}
    assert counts["0.weight"] != counts["2.weight"]


def test_added_group_and_resumed_state_keep_their_counts() -> None:
    ours = _model()
    eager = copy.deepcopy(ours)
    theirs = torch.optim.Adam(eager[2].parameters(), lr=0.01)
    trainer = onward.Trainer(
        ours, torch.optim.Adam(ours[2].parameters(), lr=0.01), loss_fn=torch.nn.functional.mse_loss
    )
    for _ in range(3):
        trainer.train_step(X, Y)
        _eager_step(eager, theirs)
    theirs.add_param_group({"params": list(eager[0].parameters())})
    trainer.optimizer.add_param_group({"params": list(ours[0].parameters())})
    for _ in range(3):
        trainer.train_step(X, Y)
        _eager_step(eager, theirs)
    _same(ours, eager)

    other = copy.deepcopy(ours)
    fresh = torch.optim.Adam([{"params": other[2].parameters()}, {"params": other[0].parameters()}])
    resumed = onward.Trainer(other, fresh, loss_fn=torch.nn.functional.mse_loss)
    fresh.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for _ in range(3):
        resumed.train_step(X, Y)
        _eager_step(eager, theirs)
    _same(other, eager)
