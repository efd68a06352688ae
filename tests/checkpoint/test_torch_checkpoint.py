"""A Trainer's state by `torch.distributed.checkpoint`: whole, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import onward
from onward.checkpoint import empty_state
from onward.errors import CheckpointError, OnwardError

# torch says so where one process reads and writes
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
X, Y = torch.linspace(-1, 1, 20).view(5, 4), torch.tensor([0, 1, 2, 0, 1])


def made(optimizer: object = None) -> onward.Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 3))
    chosen = onward.optim.AdamW(lr=1e-2) if optimizer is None else optimizer
    return onward.Trainer(model, chosen, nn.functional.cross_entropy)  # type: ignore[arg-type]


def losses(trainer: onward.Trainer, steps: int) -> list[float]:
    return [float(trainer.train_step(X, Y).loss) for _ in range(steps)]


def test_a_state_comes_back_whole(tmp_path: Path) -> None:
    trainer = made()
    losses(trainer, 3)
    save({"trainer": trainer.state_dict(), "epoch": 4}, checkpoint_id=tmp_path)
    want = losses(trainer, 3)
    state = empty_state(tmp_path)
    held = state["trainer"]["optimizer"]["exp_avg.0.weight"]
    assert held.shape == (8, 4) and state["epoch"] is None
    load(state, checkpoint_id=tmp_path)
    assert state["epoch"] == 4 and isinstance(state["trainer"]["param_groups"], list)
    other = made()
    other.load_state_dict(state["trainer"])
    assert other.updates == 3 and losses(other, 3) == want


def test_a_state_without_its_moments_is_refused(tmp_path: Path) -> None:
    """torch fills what a new Trainer has, which is no moments yet."""
    trainer = made()
    losses(trainer, 3)
    save({"trainer": trainer.state_dict()}, checkpoint_id=tmp_path)
    other = made()
    with pytest.raises(OnwardError, match="3 updates and none of the optimizer's state"):
        load({"trainer": other}, checkpoint_id=tmp_path)
    assert other.updates == 0
    plain = made(onward.optim.SGD(lr=0.1))  # keeps nothing
    losses(plain, 3)
    again = made(onward.optim.SGD(lr=0.1))
    again.load_state_dict(plain.state_dict())
    assert again.updates == 3


@pytest.mark.parametrize("content", [None, b"", b"no pickle"])
def test_a_folder_without_a_state(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"holds no state of torch\.distributed\.checkpoint"):
        empty_state(tmp_path)
