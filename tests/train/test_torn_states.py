"""A state that an exception has left half made: every public method of Trainer refuses it in the
same line, or cannot pass it on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import onward
from onward import OnwardError
from onward.train.averaged_weights import AveragedWeights

X, Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 5
TORN = "an exception interrupted an update, a batch in parts or a load"
Act = Callable[[onward.Trainer, Path], object]


class Net(nn.Module):
    """x f32[N,6] and labels i64[N] to the mean loss; counts its evaluations in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(6, 5)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if not self.training:
            self.seen.add_(1.0)  # a write that an evaluation commits
        return F.cross_entropy(self.layer(x), labels)


class OwnSGD(torch.optim.SGD):
    """An optimizer whose updates no graph makes, since its class is not torch's."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def made(kind: str) -> onward.Trainer:
    model = Net()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    if kind == "own":
        optimizer = OwnSGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = onward.Trainer(model, optimizer, options={"seed": 5, "ema_decay": 0.9})
    for _ in range(2):
        trainer.train_step(X, Y)
    trainer.eval_step(X, Y)
    return trainer


def averaged(trainer: onward.Trainer, _: Path) -> None:
    with trainer.ema_weights():
        pass


def predicted(trainer: onward.Trainer, _: Path) -> None:
    with suppress(OnwardError):  # of an optimizer of one's own there is no mesh
        trainer.explain_mesh(X, Y, mesh="dp_replicate=2")


REFUSES: dict[str, Act] = {
    "train_step": lambda t, _: t.train_step(X, Y),
    "update": lambda t, _: t.update(),
    "eval_step": lambda t, _: t.eval_step(X, Y),
    "state_dict": lambda t, _: t.state_dict(),
    "gather": lambda t, _: t.gather(),
    "ema_state_dict": lambda t, _: t.ema_state_dict(),
    "ema_weights": averaged,
    "save": lambda t, folder: t.save(folder),
    "export_onnx": lambda t, folder: t.export_onnx(folder / "model.onnx", (X, Y)),
    "export_training": lambda t, folder: t.export_training(folder / "step", (X, Y)),
}
HARMLESS: dict[str, Act] = {
    # count what has been done
    "updates": lambda t, _: t.updates,
    "micro_steps": lambda t, _: t.micro_steps,
    "loss_scale": lambda t, _: t.loss_scale,
    "checkpoint_name": lambda t, _: t.checkpoint_name,
    # describe the graph and the plan, which have no weights
    "report": lambda t, _: t.report(),
    "snapshot": lambda t, _: t.snapshot(),
    "plan": lambda t, _: t.plan,
    "explain": lambda t, _: t.explain(),
    "explain_mesh": predicted,
    "explain_call": lambda t, _: t.explain_call(None),
    "output_names": lambda t, _: t.output_names(X, Y),
    # leaves out gradients
    "zero_grad": lambda t, _: t.zero_grad(),
    # run the step once more, and put back what it wrote
    "profile": lambda t, _: t.profile(),
    "nonfinite_origin": lambda t, _: t.nonfinite_origin(),
    # both sides of the comparison have the same weights
    "verify": lambda t, _: t.verify(X, Y),
    # about checkpoints that are asked for before or after
    "finish_saves": lambda t, _: t.finish_saves(),
    "register_for_checkpointing": lambda t, _: t.register_for_checkpointing(),
}
# weights alone do not make a state whole
WEIGHTS = "load_weights"
WAYS_OUT = {"load_state_dict", "resume"}


def interrupt_an_update(trainer: onward.Trainer, patch: pytest.MonkeyPatch) -> None:
    """The weights are written, their average is not."""

    def sent(*_: Any) -> None:
        raise MemoryError("sent")

    with patch.context() as now:
        now.setattr(AveragedWeights, "update", sent)
        with pytest.raises(MemoryError, match="sent"):
            trainer.train_step(X, Y)


def interrupt_a_load(trainer: onward.Trainer, patch: pytest.MonkeyPatch) -> None:
    """The optimizer's tensors are begun, its counts are not there."""
    state = trainer.state_dict()
    trainer.train_step(X, Y)

    def sent(*_: Any) -> None:
        raise MemoryError("sent")

    with patch.context() as now:
        verb = "restore" if hasattr(trainer._updates, "restore") else "restore_sums"
        now.setattr(type(trainer._updates), verb, sent)
        with pytest.raises(MemoryError, match="sent"):
            trainer.load_state_dict(state)


def test_every_public_method_is_in_the_table() -> None:
    public = {name for name in dir(onward.Trainer) if not name.startswith("_")}
    assert public == {*REFUSES, *HARMLESS, *WAYS_OUT, WEIGHTS}


@pytest.mark.parametrize("kind", ["adamw", "own"])
@pytest.mark.parametrize("interrupt", [interrupt_an_update, interrupt_a_load])
def test_a_torn_state_is_passed_on_by_no_method(
    interrupt: Callable[..., None], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = made(kind)
    state, saved = trainer.state_dict(), trainer.save(tmp_path / "saved")
    weights = copy.deepcopy(trainer.model.state_dict())

    def refused() -> None:
        folder = tmp_path / "refused"
        folder.mkdir(exist_ok=True)
        for name, act in REFUSES.items():
            with pytest.raises(OnwardError, match=TORN):
                act(trainer, folder)
                pytest.fail(f"{name} accepts a torn state")
        assert not any(folder.iterdir())

    interrupt(trainer, monkeypatch)
    refused()
    held = copy.deepcopy(trainer.model.state_dict())
    for act in HARMLESS.values():
        act(trainer, tmp_path)
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(tensor, held[name]), name
    refused()
    trainer.load_weights(saved)
    refused()
    trainer.load_state_dict(state)
    assert all(torch.equal(t, weights[n]) for n, t in trainer.model.state_dict().items())
    assert trainer.train_step(X, Y).updated
    interrupt(trainer, monkeypatch)
    trainer.resume(saved)
    for name in ("eval_step", "state_dict", "ema_state_dict", "save", "train_step"):
        REFUSES[name](trainer, tmp_path)
