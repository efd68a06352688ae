"""A Trainer keeps the steps of each state that its model comes back to: one capture for each."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from loops import OPTIMIZERS
from torch import nn

import onward
from onward.train import prepared_steps


class Net(nn.Module):
    """Four layers in a row, the last of two heads; `head` says which is used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))
        self.head = 0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.heads[self.head](x), y)


def train(model: Net, which: Callable[[str], bool]) -> None:
    for name, p in model.named_parameters():
        p.requires_grad_(which(name))


def halves(model: Net, i: int) -> None:
    """One part learns while the other stands, as in a GAN."""
    train(model, lambda n: n.startswith("layers") == (i % 2 == 0))


def modules(model: Net, i: int) -> None:
    model.layers.requires_grad_(i % 2 == 0)
    model.heads.requires_grad_(True)


def adapters(model: Net, i: int) -> None:
    model.head = i % 2
    train(model, lambda n: n.startswith(f"heads.{i % 2}"))


def one_parameter(model: Net, i: int) -> None:
    model.layers[1].weight.requires_grad_(i % 2 == 0)


def three(model: Net, i: int) -> None:
    train(model, lambda n: not n.startswith(f"layers.{i % 3}"))


def unfreezing(model: Net, i: int) -> None:
    """A layer more in every other step."""
    train(model, lambda n: n.startswith("heads") or int(n.split(".")[1]) >= 2 - i // 2)


def evaluated_parts(model: Net, i: int) -> None:
    model.layers[0].train(i % 2 == 0)


CYCLES: dict[str, tuple[Callable[[Net, int], None], int]] = {  # with how many states
    "halves": (halves, 2), "modules": (modules, 2), "adapters": (adapters, 2),
    "one parameter": (one_parameter, 2), "three": (three, 3), "unfreezing": (unfreezing, 3),
    "evaluated parts": (evaluated_parts, 2),
}  # fmt: skip


class Pair:
    """A Trainer, and the plain loop that it stands for."""

    def __init__(self, optimizer: str = "adamw", **options: Any) -> None:
        self.model = Net()
        self.twin = copy.deepcopy(self.model)
        self.ours = OPTIMIZERS[optimizer](self.model.parameters())
        self.theirs = OPTIMIZERS[optimizer](self.twin.parameters())
        self.options = onward.TrainerOptions(**options)
        self.trainer = onward.Trainer(self.model, self.ours, options=self.options)

    def toggle(self, change: Callable[[Net, int], None], i: int) -> None:
        change(self.model, i)
        change(self.twin, i)

    def update(self, batches: Iterator[Any]) -> None:
        """A window of micro-batches, each with its loss."""
        every = self.options.gradient_accumulation_steps
        for _ in range(every):
            x, y = next(batches)
            want = self.twin(x, y)
            (want / every).backward()
            torch.testing.assert_close(self.trainer.train_step(x, y).loss, want.detach())
        if self.options.max_grad_norm is not None:
            moved = [p for p in self.twin.parameters() if p.grad is not None]
            nn.utils.clip_grad_norm_(moved, self.options.max_grad_norm)
        self.theirs.step()
        self.theirs.zero_grad()

    def assert_alike(self) -> None:
        for (name, p), q in zip(self.model.named_parameters(), self.twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6, msg=name)
            ours, theirs = self.ours.state.get(p, {}), self.theirs.state.get(q, {})
            assert ours.keys() == theirs.keys(), name
            for key, held in theirs.items():
                if held is not None:
                    torch.testing.assert_close(ours[key], held, rtol=1e-4, atol=1e-7, msg=name)


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randn(5, 6, generator=generator), torch.arange(5) % 3


@pytest.mark.parametrize("cycle", CYCLES)
def test_a_state_is_captured_once(cycle: str, captures: list[int]) -> None:
    change, states = CYCLES[cycle]
    pair, data = Pair(), batches()
    for i in range(8):
        pair.toggle(change, i)
        pair.update(data)
        pair.assert_alike()
    assert len(captures) == states


@pytest.mark.sample(2)
@pytest.mark.parametrize("cycle", ["halves", "one parameter", "three"])
@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "momentum"},
        {"max_grad_norm": 0.05},
        {"gradient_accumulation_steps": 2},
        {"gradient_accumulation_steps": 2, "max_grad_norm": 0.05, "optimizer": "momentum"},
    ],
    ids=lambda s: "-".join(s),
)
def test_with_other_updates(cycle: str, settings: dict[str, Any], captures: list[int]) -> None:
    change, states = CYCLES[cycle]
    pair, data = Pair(**settings), batches()
    for i in range(6):
        pair.toggle(change, i)
        pair.update(data)
        pair.assert_alike()
    assert len(captures) == states


@pytest.mark.parametrize("cycle", ["halves", "modules"])
def test_evaluations_between_and_a_state_restored(cycle: str, captures: list[int]) -> None:
    change, states = CYCLES[cycle]
    pair, data = Pair(), batches()
    x, y = next(data)
    saved: Any = None
    for i in range(8):
        pair.toggle(change, i)
        pair.update(data)
        with torch.no_grad():
            want = pair.twin.eval()(x, y)
        pair.twin.train()
        torch.testing.assert_close(pair.trainer.eval_step(x, y).loss, want)
        if i == 2:
            saved = copy.deepcopy(
                (pair.trainer.state_dict(), pair.twin.state_dict(), pair.theirs.state_dict())
            )
        if i == 5:
            pair.trainer.load_state_dict(saved[0])
            pair.twin.load_state_dict(saved[1])
            pair.theirs.load_state_dict(saved[2])
        pair.assert_alike()
    assert len(captures) == states  # of which evaluations are made


def test_a_toggle_within_a_window_is_refused(captures: list[int]) -> None:
    pair, data = Pair(gradient_accumulation_steps=2), batches()
    pair.toggle(halves, 0)
    pair.update(data)
    pair.trainer.train_step(*next(data))
    pair.toggle(halves, 1)
    with pytest.raises(onward.OnwardError, match="change requires_grad and"):
        pair.trainer.train_step(*next(data))
    pair.toggle(halves, 0)
    pair.trainer.train_step(*next(data))
    assert len(captures) == 2


def test_another_parameter_in_the_place_of_one_ends_what_was_kept(captures: list[int]) -> None:
    pair, data = Pair(), batches()
    for i in range(4):
        pair.toggle(halves, i)
        pair.update(data)
    for model, optimizer in ((pair.model, pair.ours), (pair.twin, pair.theirs)):
        layer = model.get_submodule("layers.0")
        old = layer.get_parameter("weight")
        new = layer.weight = nn.Parameter(old.detach() * 0.5)
        optimizer.param_groups[0]["params"] = [
            new if p is old else p for p in optimizer.param_groups[0]["params"]
        ]
        optimizer.state.pop(old)
    for i in range(4):
        pair.toggle(halves, i)
        pair.update(data)
        pair.assert_alike()
    assert len(captures) == 4


@pytest.mark.slow
def test_no_more_states_are_kept_than_so_many(
    captures: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared_steps, "KEPT", 2)
    pair, data = Pair(), batches()

    def held() -> tuple[int, int]:
        gc.collect()
        plans = [x for x in gc.get_objects() if type(x).__name__ == "Executable"]
        return len(plans), len(pair.trainer._steps._states)

    seen = []
    for i in range(6):
        pair.toggle(three, i)
        pair.update(data)
        seen.append(held())
    assert {states for _, states in seen[2:]} == {2}
    assert len({plans for plans, _ in seen[2:]}) == 1, "plans of states that are gone go as well"
    assert len(captures) == 6
