"""`ema_decay` beside `torch.optim.swa_utils.AveragedModel`: the same bits, and what becomes of them
in evaluation, in checkpoints and in windows."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from states import alike
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import onward
from onward import OnwardError

pytestmark = pytest.mark.usefixtures("captures_kept")

DECAY = 0.9


class Net(nn.Module):
    """Two layers, running statistics between them, a frozen bias, a parameter with two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = (
            nn.Linear(6, 8, bias=False),
            nn.BatchNorm1d(8),
            nn.Linear(8, 4),
        )
        self.again = self.norm.weight
        self.last.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def data(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(i)
    return torch.randn(8, 6, generator=draw), torch.randint(0, 4, (8,), generator=draw)


def trainer_of(model: nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01)
    return onward.Trainer(
        model, optimizer, F.cross_entropy, options={"ema_decay": DECAY, **options}
    )


def test_fifty_updates_are_torchs() -> None:
    """AveragedModel follows our own weights, so that the averages agree to the bit; buffers are
    those of the model."""
    model = Net()
    trainer, averaged = trainer_of(model), AveragedModel(
        model, multi_avg_fn=get_ema_multi_avg_fn(DECAY)
    )  # fmt: skip
    assert alike(trainer.ema_state_dict(), model.state_dict())
    for i in range(50):
        trainer.train_step(*data(i))
        averaged.update_parameters(model)
        if i in (0, 1, 49):
            assert alike(trainer.ema_state_dict(), averaged.module.state_dict())
    assert not alike(trainer.ema_state_dict(), model.state_dict())


def test_a_whole_run_is_near_eagers() -> None:
    model = Net()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.AdamW((p for p in twin.parameters() if p.requires_grad), lr=0.01)
    averaged = AveragedModel(twin, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    trainer = trainer_of(model)
    for i in range(50):
        x, y = data(i)
        trainer.train_step(x, y)
        optimizer.zero_grad()
        F.cross_entropy(twin(x), y).backward()
        optimizer.step()
        averaged.update_parameters(twin)
    torch.testing.assert_close(
        trainer.ema_state_dict(), dict(averaged.module.state_dict()), rtol=1e-3, atol=1e-5
    )


def test_the_average_moves_with_updates_only() -> None:
    """Neither micro-batches, nor skipped updates, nor a profile, nor a failed step move it; one
    that ends a window early does."""
    model = Net()
    trainer = trainer_of(model, gradient_accumulation_steps=2)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for i in range(4):
        if trainer.train_step(*data(i)).updated:
            averaged.update_parameters(model)
    trainer.train_step(*data(4))
    trainer.profile()
    x, y = data(5)
    assert trainer.train_step(x.fill_(torch.nan), y).skipped
    trainer.train_step(*data(6))
    assert trainer.update().updated
    averaged.update_parameters(model)
    with pytest.raises(IndexError):
        trainer.train_step(x, y + 9)
    for (name, ours), theirs in zip(
        trainer.ema_state_dict().items(), averaged.module.state_dict().values(), strict=True
    ):
        if "running" not in name and "tracked" not in name:
            assert torch.equal(ours, theirs), name


def test_the_model_has_them_within_the_context(tmp_path: Path) -> None:
    model = Net()
    trainer = trainer_of(model)
    for i in range(3):
        trainer.train_step(*data(i))
    own, average = copy.deepcopy(model.state_dict()), trainer.ema_state_dict()
    state = trainer.state_dict()
    addresses = [p.data_ptr() for p in model.parameters()]
    x, y = data(9)
    other = Net()
    other.load_state_dict(average)
    with trainer.ema_weights():
        assert alike(model.state_dict(), average)
        assert [p.data_ptr() for p in model.parameters()] == addresses
        want = F.cross_entropy(other.eval()(x), y)
        torch.testing.assert_close(trainer.eval_step(x, y).loss, want.detach())
        refused: list[Any] = [
            lambda: trainer.train_step(x, y), trainer.update, trainer.state_dict,
            lambda: trainer.save(tmp_path), lambda: trainer.load_state_dict(state),
            trainer.ema_state_dict, lambda: trainer.ema_weights().__enter__(),
        ]  # fmt: skip
        for call in refused:
            with pytest.raises(OnwardError, match=r"the model has its averaged weights"):
                call()
    assert alike(model.state_dict(), own)
    with pytest.raises(KeyError), trainer.ema_weights():
        raise KeyError
    assert alike(model.state_dict(), own)
    assert trainer.train_step(x, y).updated


def test_saved_and_resumed(tmp_path: Path) -> None:
    model, other, third = Net(), Net(), Net()
    trainer, again, loaded = trainer_of(model), trainer_of(other), trainer_of(third)
    for i in range(3):
        trainer.train_step(*data(i))
    again.resume(trainer.save(tmp_path))
    loaded.load_state_dict(trainer.state_dict())
    for i in range(3, 6):
        for each in (trainer, again, loaded):
            each.train_step(*data(i))
    assert alike(again.ema_state_dict(), trainer.ema_state_dict())
    assert alike(loaded.ema_state_dict(), trainer.ema_state_dict())


def test_states_with_and_without_an_average(caplog: pytest.LogCaptureFixture) -> None:
    """One without starts the average anew; one with it, where there is no option, is said."""
    model = Net()
    trainer, plain = trainer_of(model), trainer_of(Net(), ema_decay=None)
    plain.train_step(*data(0))
    trainer.train_step(*data(1))
    kept = trainer.state_dict()
    plain_state = plain.state_dict()
    assert "ema" not in plain_state
    trainer.load_state_dict(plain_state)
    assert alike(trainer.ema_state_dict(), model.state_dict())
    plain.load_state_dict(kept)
    assert [r for r in caplog.records if "averaged weights, which are left out" in r.message]
    for damaged in ({"ema": 3}, {"ema": {"nothing": torch.zeros(1)}},
                    {"ema": {"first.weight": torch.zeros(2)}}):  # fmt: skip
        with pytest.raises(OnwardError, match="does not fit this Trainer"):
            trainer.load_state_dict({**kept, **damaged})
    with pytest.raises(OnwardError, match=r"no averaged weights; fix: TrainerOptions\(ema_decay"):
        plain.ema_state_dict()
    with pytest.raises(OnwardError, match="no averaged weights"), plain.ema_weights():
        pass
