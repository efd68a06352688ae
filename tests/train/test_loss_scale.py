"""The loss scale of fp16 beside `torch.amp.GradScaler`: its trace, what a skipped update leaves,
saved state, clipping, and steps of whole models."""

from __future__ import annotations

import copy
import logging
import random
from typing import Any

import pytest
import torch
from states import alike
from tiny import batch, bert, gpt2
from torch import nn
from torch.optim import lr_scheduler

import onward
from onward import LossScale, OnwardError, TrainerOptions

pytestmark = pytest.mark.usefixtures("captures_kept")
INF, NAN = float("inf"), float("nan")
QUICK = {"init_scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2}


class Held(nn.Module):
    """The gradient is the batch, in fp32: finite or not whatever the scale."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.tensor([0.5, -2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.p * x).sum()


class Product(nn.Module):
    """The weight's gradient is a product in fp16: the scale decides whether it is finite."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).float().mean()


class Eager:
    """PyTorch's own loop with autocast and GradScaler."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int = 1,
        max_grad_norm: float | None = None,
        **scaler: Any,
    ) -> None:
        self.model, self.optimizer, self.every, self.most = model, optimizer, every, max_grad_norm
        self.scaler = torch.amp.GradScaler("cpu", **scaler)
        self.done = 0
        self.norm: torch.Tensor | None = None

    def step(self, *args: torch.Tensor, **data: torch.Tensor) -> float:
        with torch.autocast("cpu", torch.float16):
            found = self.model(*args, **data)
        loss = found if isinstance(found, torch.Tensor) else found.loss
        self.scaler.scale(loss / self.every).backward()  # type: ignore[union-attr]
        self.done += 1
        if self.done % self.every == 0:
            if self.most is not None:
                self.scaler.unscale_(self.optimizer)
                self.norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.most)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
        return float(loss.detach())

    @property
    def trace(self) -> tuple[float, int]:
        return self.scaler.get_scale(), self.scaler.state_dict()["_growth_tracker"]


def trainer_of(model: nn.Module, optimizer: Any = None, **options: Any) -> onward.Trainer:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    return onward.Trainer(model, optimizer, options={"mixed_precision": "fp16", **options})


def trace_of(trainer: onward.Trainer) -> tuple[float, int]:
    held = trainer.state_dict()["loss_scale"]
    assert held["scale"] == trainer.loss_scale
    return held["scale"], held["growth_tracker"]


# ---- the trace

RULES: dict[str, dict[str, Any]] = {
    "every update": {**QUICK, "growth_interval": 1},
    "every third": {**QUICK, "growth_interval": 3, "init_scale": 2.0**16},
    "odd factors": {**QUICK, "growth_factor": 1.1, "backoff_factor": 0.7, "init_scale": 77.7},
    "up to the end": {**QUICK, "growth_interval": 1, "growth_factor": 2.0**30},
    "torch's own": {},
}


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("rule", RULES)
def test_the_trace_is_gradscalers_for_any_pattern_of_overflows(rule: str, every: int) -> None:
    """100 patterns of overflows for each rule and window, 1000 in all, from states of any kind."""
    draw = random.Random(f"{rule} {every}")
    settings = RULES[rule]
    model = Held()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = trainer_of(model, loss_scale=settings, gradient_accumulation_steps=every)
    theirs = Held()
    eager = Eager(theirs, torch.optim.SGD(theirs.parameters(), lr=0.0), every, **settings)
    state, scaler = trainer.state_dict(), eager.scaler.state_dict()
    assert trainer.optimizer is not optimizer
    for _ in range(100):
        interval, often = scaler["growth_interval"], draw.choice([0.1, 0.3, 0.6])
        tracker = draw.randrange(max(0, interval - 3), interval)
        scale = draw.choice([scaler["scale"], 2.0**20, 3.0, 1e-3])
        trainer.load_state_dict({
            **state, "loss_scale": {"scale": scale, "growth_tracker": tracker}
        })  # fmt: skip
        scale = trace_of(trainer)[0]
        eager.scaler.load_state_dict({**scaler, "scale": scale, "_growth_tracker": tracker})
        for _ in range(4 * every):
            x = torch.tensor([1.0, -0.25])
            if draw.random() < often / every:
                x[draw.randrange(2)] = draw.choice([INF, -INF, NAN])
            before, inside = eager.trace, (eager.done + 1) % every != 0
            eager.step(x)
            step = trainer.train_step(x)
            assert trace_of(trainer) == eager.trace
            assert not inside or eager.trace == before
            assert step.skipped == (not inside and eager.trace[0] < before[0])
            assert step.updated == (not inside and not step.skipped)


@pytest.mark.parametrize("every", [1, 2])
def test_products_that_overflow_find_the_scale_that_torch_finds(every: int) -> None:
    """Powers of 2, so that both engines' numbers are the same; weights move alike too."""
    draw = random.Random(every)
    models = [Product(), Product()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=2.0**-20, momentum=0.5) for m in models]
    rule = {"init_scale": 2.0**20, "growth_interval": 3}
    trainer = trainer_of(
        models[0], optimizers[0], loss_scale=rule, gradient_accumulation_steps=every
    )
    eager = Eager(models[1], optimizers[1], every, **rule)
    skipped, scales = 0, set()
    for _ in range(60 * every):
        x = torch.full((2, 4), 2.0 ** draw.randrange(-4, 9))
        assert float(trainer.train_step(x).loss) == pytest.approx(eager.step(x), rel=2e-3, abs=0.5)
        assert trace_of(trainer) == eager.trace
        scales.add(trainer.loss_scale)
    skipped = 60 - trainer.updates
    assert skipped > 5 and len(scales) > 4
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_the_least_scale_is_one_that_gradients_can_be_divided_by() -> None:
    """torch's goes on to 0."""
    trainer = trainer_of(Held(), loss_scale={"init_scale": 2.0**-124})
    for _ in range(4):
        assert trainer.train_step(torch.tensor([INF, 0.0])).skipped
    assert trainer.loss_scale == 2.0**-126
    step = trainer.train_step(torch.tensor([1.0, 1.0]))
    assert step.updated and all(p.isfinite().all() for p in trainer.model.parameters())


# ---- what is left out


def whole(trainer: onward.Trainer) -> dict[str, Any]:
    """Weights, optimizer state, counts and settings, copied."""
    state = trainer.state_dict()
    held = {k: state[k] for k in ("model", "optimizer", "param_groups", "updates", "counts")}
    torchs = copy.deepcopy(trainer.optimizer.state_dict()["state"])
    return {**held, "torch": torchs}


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
}


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("clipped", [None, 1.0])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_skipped_update_leaves_everything_as_it_is(
    kind: str, clipped: float | None, every: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = Product()
    trainer = trainer_of(
        model, OPTIMIZERS[kind](model.parameters()), loss_scale=QUICK, max_grad_norm=clipped,
        gradient_accumulation_steps=every,
    )  # fmt: skip
    good, bad = torch.ones(2, 4), torch.full((2, 4), INF)
    for _ in range(every):
        trainer.train_step(good)
    before, seed = whole(trainer), trainer.state_dict()["seed"]
    with caplog.at_level(logging.WARNING, "onward"):
        for i in range(every):
            step = trainer.train_step(good if i else bad)
    assert step.skipped and not step.updated
    assert "update 2 is skipped; the loss scale is now 4" in caplog.text
    assert alike(whole(trainer), before)
    assert trainer.loss_scale == 4.0
    assert not torch.equal(trainer.state_dict()["seed"], seed)  # its masks were drawn
    for _ in range(every):
        step = trainer.train_step(good)
    assert step.updated and trainer.updates == 2 and not alike(whole(trainer), before)


def test_the_first_update_may_be_skipped() -> None:
    """There is no state of the optimizer then, and no count."""
    model = Product()
    trainer = trainer_of(model, torch.optim.AdamW(model.parameters()), loss_scale=QUICK)
    before = whole(trainer)
    assert trainer.train_step(torch.full((2, 4), INF)).skipped
    assert alike(whole(trainer), before) and trainer.updates == 0


def test_a_schedule_that_goes_by_updates_is_torchs() -> None:
    models = [Product(), Product()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in models]
    schedules = [lr_scheduler.StepLR(o, 2, gamma=0.5) for o in optimizers]
    trainer = trainer_of(models[0], optimizers[0], loss_scale=QUICK)
    eager = Eager(models[1], optimizers[1], **QUICK)
    for i in range(12):
        x = torch.full((2, 4), INF if i % 5 == 1 else 0.25)
        scale = eager.trace[0]
        eager.step(x)
        if eager.trace[0] >= scale:
            schedules[1].step()
        if trainer.train_step(x).updated:
            schedules[0].step()
        assert schedules[0].get_last_lr() == schedules[1].get_last_lr()
    assert trainer.updates == 9
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-5)


def test_a_step_that_fails_and_a_profile_leave_the_scale() -> None:
    model: Any = gpt2(dropout=0.0, layers=1)
    trainer = trainer_of(model, loss_scale=QUICK)
    data: Any = batch(4, 12)
    trainer.train_step(**data)
    before = trace_of(trainer)
    with pytest.raises(IndexError):
        trainer.train_step(**{**data, "labels": torch.full_like(data["labels"], 500)})
    assert trace_of(trainer) == before
    trainer.profile()
    assert trace_of(trainer) == before
    float(trainer.eval_step(**data).loss)
    assert trace_of(trainer) == before == (8.0, 1)
    trainer.train_step(**data)
    assert trace_of(trainer) == (16.0, 0)


# ---- small gradients, fixed scales, clipping


@pytest.mark.parametrize(
    ("scale", "lost"), [(1.0, True), (2.0**16, False), ("dynamic", False), (3e5, False)]
)
def test_gradients_that_underflow_in_fp16_do_not_with_a_scale(scale: Any, lost: bool) -> None:
    """The gradient of an output, 1e-9, is 0 in fp16."""

    class Small(Product):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).float().sum() * 1e-9

    model = Small()
    exact = copy.deepcopy(model).double()
    x = torch.randn(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e6)
    before = [p.detach().clone() for p in model.parameters()]
    trainer_of(model, optimizer, loss_scale=scale).train_step(x)
    (exact.linear(x.double()).sum() * 1e-9).backward()
    for p, was, q in zip(model.parameters(), before, exact.parameters(), strict=True):
        if lost:
            assert torch.equal(p, was)
        else:
            want = q.grad.float() * -1e6  # type: ignore[union-attr]
            torch.testing.assert_close(p.detach() - was, want, rtol=4e-3, atol=1e-7)


@pytest.mark.parametrize("scale", [1024.0, 3.0, "dynamic"])
@pytest.mark.parametrize("every", [1, 3])
def test_clipping_is_of_gradients_without_the_scale(scale: Any, every: int) -> None:
    models = [Product(), Product()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    trainer = trainer_of(
        models[0], optimizers[0], loss_scale=scale, max_grad_norm=0.5,
        gradient_accumulation_steps=every,
    )  # fmt: skip
    eager = Eager(models[1], optimizers[1], every, 0.5)
    for i in range(6):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(i)) * (0.1 if i % 2 else 2.0)
        step = trainer.train_step(x)
        assert float(step.loss) == pytest.approx(eager.step(x), rel=2e-3, abs=1e-3)
        if (i + 1) % every == 0:
            assert step.grad_norm is not None and eager.norm is not None
            torch.testing.assert_close(step.grad_norm, eager.norm, rtol=2e-3, atol=1e-5)
    assert trainer.loss_scale == (2.0**16 if scale == "dynamic" else scale)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


def test_a_norm_that_overflows_is_no_reason_to_move_by_nothing() -> None:
    """Each gradient is finite, and their norm is not: the update is left out, the scale falls."""
    model = Held()
    trainer = trainer_of(model, max_grad_norm=1.0, loss_scale={"init_scale": 2.0**126})
    before = model.p.detach().clone()
    assert trainer.train_step(torch.tensor([3.0, 3.0])).skipped
    assert torch.equal(model.p, before) and trainer.loss_scale == 2.0**125
    step = trainer.train_step(torch.tensor([3.0, 3.0]))
    assert step.updated and step.grad_norm is not None
    assert float(step.grad_norm) == pytest.approx(18**0.5)


@pytest.mark.parametrize("skip", [True, False])
def test_a_fixed_scale_stays(skip: bool) -> None:
    model = Held()
    trainer = trainer_of(model, loss_scale=64, skip_nonfinite=skip)
    step = trainer.train_step(torch.tensor([INF, 1.0]))
    assert step.skipped == skip and step.updated != skip
    assert bool(model.p.isfinite().all()) == skip
    assert trainer.loss_scale == 64.0 and trace_of(trainer) == (64.0, 0)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_elsewhere_there_is_no_scale_and_updates_are_skipped_all_the_same(precision: str) -> None:
    model = Held()
    trainer = trainer_of(model, mixed_precision=precision)
    before = whole(trainer)
    assert trainer.train_step(torch.tensor([NAN, 1.0])).skipped
    assert alike(whole(trainer), before)
    assert trainer.loss_scale is None and "loss_scale" not in trainer.state_dict()


# ---- saved and restored


@pytest.mark.parametrize("at", [3, 4, 7], ids=["in a window", "between", "in a later one"])
def test_a_run_goes_on_from_a_saved_state(at: int) -> None:
    """The scale, its tracker and gradients that wait, scaled: to the bit."""

    def run(trainer: onward.Trainer, numbers: range) -> list[str]:
        found: list[str] = []
        for i in numbers:
            x = torch.full((2, 4), INF if i in (2, 9) else 0.5 + i)
            step = trainer.train_step(x)
            found.append(f"{step.loss} {step.skipped} {trace_of(trainer)}")
        return found

    def made() -> onward.Trainer:
        model = Product()
        return trainer_of(
            model, torch.optim.AdamW(model.parameters(), lr=0.01), loss_scale=QUICK,
            gradient_accumulation_steps=2, seed=1,
        )  # fmt: skip

    first = made()
    run(first, range(at))
    state = copy.deepcopy(first.state_dict())
    want = run(first, range(at, 16))
    second = made()
    run(second, range(3))
    second.load_state_dict(state)
    assert run(second, range(at, 16)) == want
    assert alike(whole(second), whole(first))


def test_a_state_without_a_scale_begins_with_the_first() -> None:
    plain, trainer = trainer_of(Held(), mixed_precision="no"), trainer_of(Held(), loss_scale=QUICK)
    for _ in range(3):
        plain.train_step(torch.ones(2))
        trainer.train_step(torch.ones(2))
    assert trace_of(trainer) == (16.0, 1)
    trainer.load_state_dict(plain.state_dict())
    assert trace_of(trainer) == (8.0, 0) and trainer.updates == 3
    plain.load_state_dict(trainer.state_dict())
    assert plain.loss_scale is None and plain.train_step(torch.ones(2)).updated


WINDOWS: dict[str, Any] = {
    "fp32": {"mixed_precision": "no"}, "bf16": {"mixed_precision": "bf16"}, "dynamic": {},
    "of 8": {"loss_scale": 8}, "of 64": {"loss_scale": 64}, "of 1": {"loss_scale": 1.0},
}  # fmt: skip


@pytest.mark.parametrize("here", WINDOWS)
@pytest.mark.parametrize("saved", WINDOWS)
def test_gradients_that_wait_are_never_taken_for_others(saved: str, here: str) -> None:
    """From the middle of a window: the scale goes on, or the state is refused."""
    scales = {"fp32": 1.0, "bf16": 1.0, "dynamic": 2.0**16, "of 8": 8.0, "of 64": 64.0, "of 1": 1.0}
    source, target, whole_run = (
        trainer_of(Held(), gradient_accumulation_steps=2, **WINDOWS[name])
        for name in (saved, here, "fp32")
    )
    x = torch.tensor([2.0, 0.5])
    source.train_step(x)
    state, before = source.state_dict(), whole(target)
    moves_on = here == "dynamic" and saved not in ("fp32", "bf16")
    if not moves_on and (scales[saved] != scales[here] or here == "dynamic"):
        with pytest.raises(OnwardError, match="with gradients scaled by"):
            target.load_state_dict(state)
        assert alike(whole(target), before) and target.micro_steps == 0
        return
    target.load_state_dict(state)
    for trainer in (whole_run, whole_run, target):
        trainer.train_step(x)
    torch.testing.assert_close(target.model.p, whole_run.model.p, rtol=1e-6, atol=0)


BROKEN: dict[str, Any] = {
    "no mapping": 3.0, "no scale": {"growth_tracker": 1}, "no tracker": {"scale": 2.0},
    "zero": {"scale": 0.0, "growth_tracker": 0}, "nan": {"scale": NAN, "growth_tracker": 0},
    "infinite": {"scale": INF, "growth_tracker": 0}, "text": {"scale": "8", "growth_tracker": 0},
    "negative": {"scale": 8.0, "growth_tracker": -1}, "half": {"scale": 8.0, "growth_tracker": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_scale_that_cannot_be_is_refused(name: str) -> None:
    trainer = trainer_of(Held(), loss_scale=QUICK)
    trainer.train_step(torch.ones(2))
    state, before = trainer.state_dict(), trace_of(trainer)
    with pytest.raises(
        OnwardError,
        match=r"the state_dict does not fit .*loss_scale.*nothing was loaded",
    ):
        trainer.load_state_dict({**state, "loss_scale": BROKEN[name]})
    assert trace_of(trainer) == before


# ---- whole models

COMBINATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a fixed scale": {"loss_scale": 4096.0},
    "a scale that is too large at first": {"loss_scale": {"init_scale": 2.0**30}},
    "a budget": {"memory_budget": 0.3},
    "clipping": {"max_grad_norm": 0.5},
    "windows": {"gradient_accumulation_steps": 2},
    "every row": {"disable": "row_demand"},
    "no fusion": {"disable": "add_layer_norm,bias_activation,flash_attention,linear_cross_entropy"},
    "casts as they are written": {"disable": "move_casts,cancel_casts,fold_casts"},
    "a head in fp32": {"keep_in_fp32": "LinearCrossEntropy"},
    "nothing in fp16": {"keep_in_fp32": "*"},
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", COMBINATIONS)
@pytest.mark.parametrize("kind", [gpt2, bert])
def test_losses_follow_those_of_autocast_and_gradscaler(kind: Any, name: str) -> None:
    options = COMBINATIONS[name]
    models = [kind(dropout=0.0) for _ in range(2)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=3e-3) for m in models]
    trainer = trainer_of(models[0], optimizers[0], **options)
    rule = options.get("loss_scale", {})
    eager = Eager(
        models[1], optimizers[1], options.get("gradient_accumulation_steps", 1),
        options.get("max_grad_norm"), **(rule if isinstance(rule, dict) else {}),
    )  # fmt: skip
    data: Any = batch(4, 12, padding="right")
    steps = [trainer.train_step(**data) for _ in range(24)]
    ours, theirs = [float(step.loss) for step in steps], [eager.step(**data) for _ in range(24)]
    assert ours == pytest.approx(theirs, rel=4e-3)
    assert ours[-1] < 0.8 * ours[0]
    if "init_scale" in str(rule):
        assert steps[0].skipped and trace_of(trainer) == eager.trace
    assert all(p.dtype == torch.float32 for p in models[0].parameters())
    for state in trainer.optimizer.state.values():
        assert all(s.dtype == torch.float32 for s in state.values())


def test_options_are_those_of_gradscaler() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=7)
    held = LossScale(init_scale=4.0, growth_interval=7)
    assert TrainerOptions(mixed_precision="fp16", loss_scale=held).scaling == held
    assert scaler.get_scale() == held.init_scale
    assert scaler.get_growth_factor() == held.growth_factor
    assert scaler.get_backoff_factor() == held.backoff_factor
    assert scaler.get_growth_interval() == held.growth_interval
    own = torch.amp.GradScaler("cpu")
    assert (own.get_scale(), own.get_growth_interval()) == (2.0**16, 2000)
    assert (LossScale().init_scale, LossScale().growth_interval) == (2.0**16, 2000)
