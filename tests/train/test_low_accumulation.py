"""`gradient_accumulation_dtype="bf16"`: sums of gradients beside those of eager PyTorch, with the
same rounding; what they hold, and what is saved of an open window."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from states import alike
from tiny import batch, gpt2
from torch import nn

import onward

pytestmark = pytest.mark.usefixtures("captures_kept")

loss_fn = nn.functional.mse_loss
STEPS = 4


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 8))


def micro_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(5, 24, generator=draw), torch.randn(5, 8, generator=draw))
            for _ in range(STEPS)]  # fmt: skip


def trainer_of(model: nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    window = {"gradient_accumulation_steps": STEPS, "gradient_accumulation_dtype": "bf16"}
    return onward.Trainer(model, optimizer, loss_fn, options=window | options)


def moved(model: nn.Module, **options: Any) -> list[torch.Tensor]:
    """The change of each weight in a window of SGD with rate 1: the gradient."""
    before = [p.detach().clone() for p in model.parameters()]
    trainer = trainer_of(model, **options)
    for x, y in micro_batches():
        trainer.train_step(x, target=y)
    return [a - p.detach() for a, p in zip(before, model.parameters(), strict=True)]


def eager_sums(rounds: bool) -> list[torch.Tensor]:
    """Eager gradients summed over a window, each a part of its mean; `rounds`: all sums but the
    last are rounded."""
    model = net()
    sums = [torch.zeros_like(p) for p in model.parameters()]
    for i, (x, y) in enumerate(micro_batches()):
        gradients = torch.autograd.grad(loss_fn(model(x), y) / STEPS, list(model.parameters()))
        sums = [s + g for s, g in zip(sums, gradients, strict=True)]
        if rounds and i < STEPS - 1:
            sums = [s.bfloat16().float() for s in sums]
    return sums


def share_equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """The share of elements that are equal but for the rounding of fp32."""
    same = [((x - y).abs() <= 1e-6 + 1e-5 * y.abs()).flatten() for x, y in zip(a, b, strict=True)]
    return float(torch.cat(same).double().mean())


def test_sums_are_those_of_eager_with_the_same_rounding() -> None:
    """A sum between two bf16 numbers may fall on the other side of the middle, rarely."""
    ours = moved(net())
    assert share_equal(ours, eager_sums(rounds=True)) > 0.99
    assert share_equal(ours, eager_sums(rounds=False)) < 0.2
    assert share_equal(moved(net(), gradient_accumulation_dtype="fp32"), eager_sums(False)) == 1.0


def test_one_micro_batch_makes_no_sums() -> None:
    low, own = (
        moved(net(), gradient_accumulation_steps=1, gradient_accumulation_dtype=d)
        for d in ("bf16", "fp32")
    )
    assert all(map(torch.equal, low, own))


@pytest.mark.parametrize("more", [
    {}, {"max_grad_norm": 0.1}, {"mixed_precision": "bf16"}, {"mixed_precision": "fp16"},
    {"optimizer_state": "bf16", "seed": 0}, {"memory_budget": 0.5}, {"disable": "row_demand"},
], ids=str)  # fmt: skip
def test_with_other_options(more: dict[str, Any]) -> None:
    """A padded GPT-2's weights after three windows are near those of sums in fp32."""
    found = []
    for kind in ("fp32", "bf16"):
        model = gpt2(dropout=0.0)
        trainer: Any = onward.Trainer(
            model, torch.optim.AdamW(model.parameters(), lr=1e-3),
            options={"gradient_accumulation_steps": 2, "gradient_accumulation_dtype": kind, **more},
        )  # fmt: skip
        for i in range(6):
            result = trainer.train_step(**batch(3, 9, padding="right", seed=i))
            assert not result.skipped
        found.append([p.detach() for p in model.parameters()])
    own, low = (torch.cat([p.flatten() for p in weights]) for weights in found)
    assert 0 < float((low - own).norm()) < 0.01 * float(own.norm())


def test_bytes_that_sums_take() -> None:
    held = {}
    for kind in ("fp32", "bf16"):
        model = net()
        trainer = trainer_of(model, gradient_accumulation_dtype=kind)
        for x, y in micro_batches()[:1]:
            trainer.train_step(x, target=y)
        plan = trainer.plan
        sums = {plan.inputs[n].buffer for n in plan.signature.accumulators.values()}
        held[kind] = sum(b.nbytes for b in plan.buffers if b.index in sums)
    numbers = sum(p.numel() for p in net().parameters())
    assert held == {"fp32": 4 * numbers, "bf16": 2 * numbers}


@pytest.mark.parametrize("then", ["bf16", "fp32"])
def test_an_open_window_is_saved_and_goes_on(then: str) -> None:
    """The sums of an open window are saved in fp32, whatever they are kept in, so that either
    option can load them."""
    model = net()
    trainer = trainer_of(model)
    pairs = micro_batches()
    for x, y in pairs[:2]:
        trainer.train_step(x, target=y)
    state, weights = trainer.state_dict(), copy.deepcopy(model.state_dict())
    assert all(t.dtype == torch.float32 for t in state["optimizer"].values())
    other = net()
    other.load_state_dict(weights)
    again = trainer_of(other, gradient_accumulation_dtype=then)
    again.load_state_dict(state)
    assert alike(again.state_dict(), state)
    for x, y in pairs[2:]:
        trainer.train_step(x, target=y)
        again.train_step(x, target=y)
    if then == "bf16":
        assert alike(other.state_dict(), model.state_dict())
    else:
        torch.testing.assert_close(dict(other.state_dict()), dict(model.state_dict()),
                                   rtol=0.01, atol=0.01)  # fmt: skip
