"""Never stale: what changes is noticed, what does not change is not captured again."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import Mlp, Tensors, batch, gpt2, mlp
from torch import nn

import onward
import onward.compile
from onward import OnwardError


def sgd(model: nn.Module, lr: float = 0.1, **more: Any) -> onward.Trainer:
    return onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=lr, **more))


def test_new_shape_is_planned_not_captured(captures: list[int]) -> None:
    model = gpt2(dropout=0.0)
    twin = copy.deepcopy(model)
    trainer = sgd(model, lr=0.0)
    for size, length in ((4, 12), (3, 7), (8, 20), (4, 12), (2, 2)):
        data = batch(size, length)
        got = trainer.train_step(data).loss
        torch.testing.assert_close(got, twin(**data).loss.detach(), rtol=1e-5, atol=0)
    assert len(captures) == 1
    trainer.train_step(batch(1, 12))
    assert len(captures) == 2, "size 1 is another program"
    trainer.train_step(batch(1, 9))
    assert len(captures) == 2
    trainer.train_step(batch(3, 9, "right"))
    assert len(captures) == 3, "a mask is another input"
    trainer.eval_step(batch(3, 9))
    assert len(captures) == 3, "an evaluation is made of training's capture"
    trainer.eval_step(batch(5, 6))
    trainer.train_step(batch(4, 12))
    assert len(captures) == 3


def test_python_values_of_the_batch_are_part_of_the_program(captures: list[int]) -> None:
    class Scaled(Mlp):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:  # type: ignore[override]
            y = super().forward(x)
            return {"loss": (y * y).mean() * scale}

    trainer = sgd(Scaled().train(), lr=0.0)
    x = torch.randn(4, 8)
    one, two = (float(trainer.train_step(x=x, scale=s).loss) for s in (1.0, 2.0))
    assert two == pytest.approx(2 * one, rel=1e-6)
    assert len(captures) == 2
    assert float(trainer.train_step(x=x, scale=1.0).loss) == one
    assert len(captures) == 2


def eager_step(model: nn.Module, data: Tensors, lr: float = 0.1) -> tuple[float, nn.Module]:
    """Run a step of plain SGD on a copy."""
    twin = copy.deepcopy(model)
    loss = twin(**data).loss
    loss.backward()
    with torch.no_grad():
        for p in twin.parameters():
            if p.requires_grad and p.grad is not None:
                p.sub_(lr * p.grad)
    return loss.item(), twin


def assert_follows(trainer: onward.Trainer, data: Tensors) -> None:
    loss, twin = eager_step(trainer.model, data)
    assert float(trainer.train_step(data).loss) == pytest.approx(loss, rel=1e-5)
    for (name, p), q in zip(trainer.model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6, msg=name)


def freeze(model: Any) -> None:
    model.transformer.h[0].requires_grad_(False)


def thaw(model: Any) -> None:
    model.requires_grad_(True)


def replace(model: Any) -> None:
    with torch.no_grad():
        model.transformer.ln_f.weight = nn.Parameter(model.transformer.ln_f.weight * 1.5)


def move(model: Any) -> None:
    """Move each parameter to other memory, keeping the Parameter object."""
    for p in model.parameters():
        p.data = p.data.clone()


def write(model: Any) -> None:
    with torch.no_grad():
        model.transformer.wte.weight.mul_(0.5)


def swap(model: Any) -> None:
    model.transformer.h[1] = copy.deepcopy(model.transformer.h[0])
    model.transformer.h[1].attn.layer_idx = 1


def untie(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


CHANGES: dict[str, Callable[[Any], None]] = {
    f.__name__: f for f in (freeze, thaw, replace, move, write, swap, untie)
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("change", CHANGES)
def test_changed_model_is_noticed(change: str) -> None:
    model, data = gpt2(dropout=0.0), batch()
    if change == "thaw":
        freeze(model)
    trainer = sgd(model)
    assert_follows(trainer, data)
    CHANGES[change](model)
    known = {id(p) for g in trainer.optimizer.param_groups for p in g["params"]}
    new = [p for p in model.parameters() if id(p) not in known]
    assert bool(new) == (change in ("replace", "swap", "untie"))
    if new:
        # the optimizer does not hold it: as in PyTorch it stays where it is
        kept = [p.detach().clone() for p in new]
        loss, _ = eager_step(model, data)
        assert float(trainer.train_step(data).loss) == pytest.approx(loss, rel=1e-5)
        assert all(torch.equal(p, q) for p, q in zip(new, kept, strict=True))
        trainer.optimizer.add_param_group({"params": new})
    assert_follows(trainer, data)
    assert_follows(trainer, data)


@pytest.mark.sample(3)
@pytest.mark.parametrize("place", ["module", "attention", "flag"])
def test_changed_dropout_is_noticed(place: str) -> None:
    """A changed p of a Dropout module or of attention is noticed, and so is a submodule in
    evaluation mode."""
    model, data = gpt2(dropout=0.5), batch()
    trainer = sgd(model, lr=0.0)
    eager = model.eval()(**data).loss.item()
    model.train()
    assert abs(float(trainer.train_step(data).loss) - eager) > 1e-3
    if place == "flag":
        model.eval()
        model.train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.eval()
        for name, module in model.named_modules():
            if name.endswith(".attn"):
                module.eval()
    else:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        if place == "attention":
            for name, module in model.named_modules():
                if name.endswith("attn_dropout") and isinstance(module, nn.Dropout):
                    module.p = 0.7
    loss = float(trainer.train_step(data).loss)
    if place == "attention":
        assert abs(loss - eager) > 1e-4
    else:
        assert loss == pytest.approx(eager, rel=1e-5)


def test_evaluating_between_steps_costs_no_capture(captures: list[int]) -> None:
    model, data = gpt2(), batch()
    trainer = sgd(model)
    for _ in range(2):
        model.train()
        trainer.train_step(data)
        model.eval()
        trainer.eval_step(data)
    assert len(captures) == 1


OPTIMIZER_CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "betas": lambda g: g.update(betas=(0.5, 0.6)),
    "weight_decay": lambda g: g.update(weight_decay=0.5),
    "eps": lambda g: g.update(eps=1e-2),
    "lr": lambda g: g.update(lr=0.05),
}


@pytest.mark.parametrize("change", OPTIMIZER_CHANGES)
def test_changed_optimizer_settings_are_noticed(change: str) -> None:
    """A changed setting holds from the next step on and the moments stay, as in torch's own
    AdamW."""
    model = mlp()
    twin = copy.deepcopy(model)
    loss_fn = nn.functional.cross_entropy
    x, y = torch.randn(6, 8), torch.arange(6) % 5
    ours = torch.optim.AdamW(model.parameters(), lr=0.01)
    theirs = torch.optim.AdamW(twin.parameters(), lr=0.01)
    trainer = onward.Trainer(model, ours, loss_fn=loss_fn)
    for i in range(4):
        if i == 2:
            for optimizer in (ours, theirs):
                OPTIMIZER_CHANGES[change](optimizer.param_groups[0])
        trainer.train_step(x, y)
        theirs.zero_grad()
        loss_fn(twin(x), y).backward()
        theirs.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


# ---- one owner of the weights


def test_parameters_stay_where_they_are_and_stale_graphs_raise() -> None:
    model, data = gpt2(), batch()
    trainer = onward.Trainer(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    pointers = [p.data_ptr() for p in model.parameters()]
    trainer.train_step(data)
    versions = [p._version for p in model.parameters()]
    stale = model(**data).loss
    before = [p.detach().clone() for p in model.parameters()]
    trainer.train_step(data)
    assert [p.data_ptr() for p in model.parameters()] == pointers
    for p, version, old in zip(model.parameters(), versions, before, strict=True):
        assert not torch.equal(p, old)
        assert p._version > version
        assert p.grad is None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


def test_what_does_not_write_leaves_the_version_alone() -> None:
    model, data = gpt2(), batch()
    trainer = onward.Trainer(
        model, onward.optim.AdamW(), options=onward.TrainerOptions(gradient_accumulation_steps=2)
    )
    trainer.train_step(data)  # a micro-step
    trainer.eval_step(data)
    trainer.verify(data)
    assert [p._version for p in model.parameters()] == [p._version for p in gpt2().parameters()]


def test_frozen_parameters_have_no_state_and_do_not_move() -> None:
    model, data = gpt2(), batch()
    freeze(model)
    trainer = onward.Trainer(model, onward.optim.AdamW(lr=0.1))
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    trainer.train_step(data)
    named = dict(model.named_parameters())
    assert all(torch.equal(named[n], p) for n, p in frozen.items())
    assert not any(n.partition(".")[2] in frozen for n in trainer.state_dict()["optimizer"])


def test_batch_of_another_kind_is_refused_or_right() -> None:
    trainer = sgd(gpt2(), lr=0.0)
    trainer.train_step(batch())
    with pytest.raises(OnwardError, match="no tensor"):
        trainer.train_step()
    data = batch()
    as_int32 = {**data, "input_ids": data["input_ids"].to(torch.int32)}
    start = trainer.state_dict()  # which has the number of the step, hence its masks
    first = trainer.train_step(data).loss
    trainer.load_state_dict(start)
    assert torch.equal(trainer.train_step(as_int32).loss, first)


def test_the_least_recently_used_shape_is_dropped(
    captures: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many shapes keep a bounded number of bound plans, and a dropped shape still works."""
    monkeypatch.setattr("onward.prepare.prepared_step.KEPT", 2)
    model = gpt2(dropout=0.0)
    twin = copy.deepcopy(model)
    trainer = sgd(model, lr=0.0)
    for length in (5, 6, 5, 7, 5, 6):
        data = batch(2, length)
        got = trainer.train_step(data).loss
        torch.testing.assert_close(got, twin(**data).loss.detach(), rtol=1e-5, atol=0)
        [step] = trainer._steps.train
        assert len(step.padded) <= 2
    assert len(captures) == 1


class Fixed(Mlp):
    """A model whose shapes are numbers in its graph, so that each batch size has its own."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = super().forward(x)
        return {"loss": (y * y).mean() * float(x.shape[0])}


def test_the_graph_used_longest_ago_is_dropped(
    captures: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where each size has its own graph, a long run keeps a bounded number of them."""
    monkeypatch.setattr("onward.train.prepared_steps.STEPS", 2)
    model = Fixed().train()
    twin = copy.deepcopy(model)
    trainer = sgd(model, lr=0.0)
    made, steps = [], []
    for size in (5, 6, 5, 7, 5, 6):
        x = torch.randn(size, 8)
        torch.testing.assert_close(
            trainer.train_step(x=x).loss, twin(x)["loss"].detach(), rtol=1e-5, atol=0
        )
        assert len(trainer._steps.train) <= 2
        made.append(len(captures))
        steps.append(weakref.ref(trainer._steps.train[0]))
    assert made == [1, 2, 2, 3, 3, 4], "5 was used last when 7 came, so 6 was dropped"
    gc.collect()
    assert steps[1]() is None and steps[3]() is None, "what is dropped holds no memory"
    for size in (5, 6, 7):
        trainer.eval_step(x=torch.randn(size, 8))
    assert len(trainer._steps.eval) <= 2
    assert len([r for r in caplog.records if "used longest ago" in r.message]) == 1
