"""Parameters that are out of the model for a while: the optimizer still holds them, with all state,
whatever else changes meanwhile."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import onward

pytestmark = pytest.mark.usefixtures("captures_kept")

Change = Callable[[Any, torch.optim.Optimizer], None]

MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
}


class Net(nn.Module):
    """A body, and a head that is exchanged."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(torch.tanh(self.body(x))), y)


def other_head() -> nn.Linear:
    torch.manual_seed(7)
    return nn.Linear(4, 3)


def nothing(model: Any, optimizer: torch.optim.Optimizer) -> None:
    pass


def group_added(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": list(model.head.parameters())})


def state_loaded(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def state_written(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for name, tensor in optimizer.state[model.body.bias].items():
        if name != "step":
            optimizer.state[model.body.bias][name] = torch.ones_like(tensor)


def setting_changed(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["maximize"] = True


CHANGES: dict[str, Change] = {
    f.__name__: f for f in (nothing, group_added, state_loaded, state_written, setting_changed)
}


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    seeded = torch.Generator().manual_seed(seed)
    return torch.randn(5, 4, generator=seeded), torch.randint(0, 3, (5,), generator=seeded)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("change", CHANGES)
def test_state_of_a_head_that_is_out_goes_on(change: str, name: str) -> None:
    models = [Net(), Net()]
    ours, theirs = [MAKERS[name](m.parameters()) for m in models]
    model, twin = models
    trainer = onward.Trainer(model, ours)
    heads = [m.head for m in models]

    def step(i: int) -> None:
        loss = trainer.train_step(*batch(i)).loss
        theirs.zero_grad()
        want = twin(*batch(i))
        want.backward()
        theirs.step()
        torch.testing.assert_close(loss, want.detach(), rtol=1e-4, atol=1e-5)

    def assert_alike() -> None:
        held = [zip(m.parameters(), n.parameters(), strict=True) for m, n in [models, heads]]
        for p, q in (both for pairs in held for both in pairs):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
            mine, eager = ours.state.get(p, {}), theirs.state.get(q, {})
            assert mine.keys() == eager.keys()
            for slot, tensor in eager.items():
                torch.testing.assert_close(mine[slot], tensor, rtol=1e-4, atol=1e-5)

    for i in range(3):
        step(i)
    for m, o in ((model, ours), (twin, theirs)):
        m.head = other_head()
        CHANGES[change](m, o)
    for i in range(3, 5):
        step(i)
        assert_alike()
    for m, head in zip(models, heads, strict=True):
        m.head = head
    for i in range(5, 8):
        step(i)
        assert_alike()


def test_a_head_that_the_optimizer_gives_up_loses_its_state() -> None:
    """Nothing that neither the model nor the optimizer holds is kept or written."""
    model = Net()
    optimizer = MAKERS["adam"](model.parameters())
    trainer = onward.Trainer(model, optimizer)
    trainer.train_step(*batch(0))
    head, model.head = model.head, other_head()
    given_up = {id(p) for p in head.parameters()}
    group = optimizer.param_groups[0]
    group["params"] = [p for p in group["params"] if id(p) not in given_up]
    trainer.train_step(*batch(1))
    assert not any(id(p) in given_up for p in trainer._optimizer.updates.names)
