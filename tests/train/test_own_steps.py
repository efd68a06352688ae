"""An optimizer that no graph has makes its own step on the graph's gradients, as in PyTorch."""

from __future__ import annotations

import copy
import itertools
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from own_optimizers import MAKERS, PACKAGES, Heavy, Make, Momentary, Renamed
from torch import nn

import onward
from onward import CaptureError, OnwardError
from onward.train.own_step import OwnStep

pytestmark = pytest.mark.usefixtures("captures_kept")

loss_fn = nn.functional.cross_entropy


class Net(nn.Module):
    """Tied weights, biases with one gradient, a gradient that is a constant, a parameter that is
    frozen and one that the loss does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.inner = nn.Embedding(7, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.table.weight
        self.one, self.two = nn.Parameter(torch.randn(7)), nn.Parameter(torch.randn(7))
        self.added = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.unused = nn.Linear(2, 2)

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor, scale: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        h = torch.tanh(self.inner(self.table(ids)) + self.frozen)
        logits = self.head(h) + self.one + self.two
        loss = loss_fn(logits * scale, labels) + 0.01 * self.added.sum()
        return {"loss": loss, "logits": logits}


def groups_of(model: Net) -> list[dict[str, Any]]:
    """All parameters, in two groups."""
    tied = {id(model.table.weight), id(model.one)}
    return [
        {"params": [p for p in model.parameters() if id(p) in tied]},
        {"params": [p for p in model.parameters() if id(p) not in tied]},
    ]


def batch(seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(0, 7, (2, 8), generator=made)
    return {"ids": ids, "labels": labels, "scale": torch.tensor(scale)}


def trainer_of(make: Make, **options: Any) -> tuple[Net, onward.Trainer]:
    model = Net()
    return model, onward.Trainer(model, make(groups_of(model)), options=options)


def assert_alike(model: nn.Module, twin: nn.Module) -> None:
    theirs = dict(twin.named_parameters())
    for name, p in model.named_parameters():
        torch.testing.assert_close(
            p, theirs[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


class Eager:
    """A loop of plain PyTorch, beside the Trainer's."""

    def __init__(self, make: Make, every: int = 1, norm: float | None = None) -> None:
        self.model, self.every, self.norm = Net(), every, norm
        self.optimizer = make(groups_of(self.model))

    def gradients(self, *batches: Any) -> None:
        self.optimizer.zero_grad()
        for given in batches:
            (self.model(**given)["loss"] / self.every).backward()
        if self.norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.norm)

    def step(self, *batches: Any) -> None:
        self.gradients(*batches)
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        if all(bool(g.isfinite().all()) for g in grads):
            self.optimizer.step()


MODES: dict[str, dict[str, Any]] = {
    "a step is skipped": {},
    "accumulated and clipped": {"gradient_accumulation_steps": 3, "max_grad_norm": 0.3},
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("mode", MODES)
def test_ten_steps_are_pytorchs(mode: str, name: str) -> None:
    make, options = MAKERS[name], MODES[mode]
    every = options.get("gradient_accumulation_steps", 1)
    model, trainer = trainer_of(make, **options)
    eager = Eager(make, every, options.get("max_grad_norm"))
    for i in range(10):
        scale = float("inf") if mode == "a step is skipped" and i == 4 else 1.0
        batches = [batch(i * every + j, scale) for j in range(every)]
        results = [trainer.train_step(given) for given in batches]
        eager.step(*batches)
        assert [r.updated for r in results] == [False] * (every - 1) + [scale == 1.0]
        assert results[-1].skipped == (scale != 1.0)
        assert all(p.grad is None for p in model.parameters())
        assert_alike(model, eager.model)
    assert trainer.updates == 10 - (mode == "a step is skipped")
    assert trainer.report()["own_step"]


@pytest.mark.parametrize("name", PACKAGES)
def test_optimizers_of_packages(name: str) -> None:
    """SOAP's eigenvectors enlarge what fp32 rounds: so its step is compared on equal gradients, to
    the bit, and these with PyTorch's at the same weights."""
    package, make = PACKAGES[name]
    pytest.importorskip(package)
    _, trainer = trainer_of(make, gradient_accumulation_steps=3, max_grad_norm=0.3)
    eager = Eager(make, 3, 0.3)
    held = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    twins = [p for group in eager.optimizer.param_groups for p in group["params"]]

    def compare(*_: Any) -> None:
        for p, q in zip(held, twins, strict=True):
            if q.grad is None:
                assert p.grad is None
            else:
                assert p.grad is not None
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)
                q.grad.copy_(p.grad)

    trainer.optimizer.register_step_pre_hook(compare)
    for i in range(10):
        batches = [batch(3 * i + j) for j in range(3)]
        eager.gradients(*batches)
        for given in batches:
            trainer.train_step(given)
        eager.optimizer.step()
        assert all(map(torch.equal, held, twins))
    assert trainer.updates == 10


def test_sums_in_bf16() -> None:
    """Sums are rounded between micro-batches, so that weights are near PyTorch's."""
    options = {"gradient_accumulation_steps": 2, "gradient_accumulation_dtype": "bf16"}
    model, trainer = trainer_of(Heavy, **options)
    eager = Eager(Heavy, 2)
    for i in range(4):
        for given in (batch(i), batch(i + 9)):
            trainer.train_step(given)
        eager.step(batch(i), batch(i + 9))
    for p, q in zip(model.parameters(), eager.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=3e-3)


@pytest.mark.parametrize("fp", ["bf16", "fp16"])
def test_in_mixed_precision(fp: str) -> None:
    model, trainer = trainer_of(Heavy, mixed_precision=fp)
    eager = Eager(Heavy)
    for i in range(5):
        trainer.train_step(batch(i))
        eager.step(batch(i))
    for p, q in zip(model.parameters(), eager.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2e-2)


def test_the_loss_scale_moves_as_grad_scalers() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    rule = onward.LossScale(init_scale=2.0**10, growth_interval=2)
    model, trainer = trainer_of(Heavy, mixed_precision="fp16", loss_scale=rule)
    eager = Eager(Heavy)
    for i, scale in enumerate([1.0, 1.0, float("inf"), 1.0, 1.0]):
        assert trainer.loss_scale == scaler.get_scale()
        trainer.train_step(batch(i, scale))
        eager.optimizer.zero_grad()
        scaler.scale(eager.model(**batch(i, scale))["loss"]).backward()
        scaler.step(eager.optimizer)
        scaler.update()
        for p, q in zip(model.parameters(), eager.model.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=2e-2)
    assert trainer.updates == 4


# ---- what the optimizer sees


class Looks(Heavy):
    """An optimizer that looks at what its step finds, and calls back."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.seen: list[list[torch.Tensor | None]] = []
        self.places: list[tuple[int, int]] = []
        self.then: Any = lambda: None

    def step(self, closure: Any = None) -> None:
        held = [p for group in self.param_groups for p in group["params"]]
        self.seen.append([None if p.grad is None else p.grad.clone() for p in held])
        with_grad = [p.grad for p in held if p.grad is not None]
        self.places = [(g.data_ptr(), g.data_ptr() + g.nbytes) for g in with_grad]
        self.storages = {g.untyped_storage().nbytes() for g in with_grad}
        self.then()
        super().step()


def looks(trainer: onward.Trainer) -> Looks:
    assert isinstance(trainer.optimizer, Looks)
    return trainer.optimizer


@pytest.mark.parametrize("norm", [None, 0.3])
def test_gradients_are_what_eager_has_at_that_moment(norm: float | None) -> None:
    options = {} if norm is None else {"max_grad_norm": norm}
    _, trainer = trainer_of(Looks, **options)
    eager = Eager(Looks, norm=norm)
    for i in range(3):
        trainer.train_step(batch(i))
        eager.step(batch(i))
    assert isinstance(eager.optimizer, Looks)
    for mine, theirs in zip(looks(trainer).seen, eager.optimizer.seen, strict=True):
        assert sum(g is None for g in mine) == 3, "one frozen, two not in the loss"
        for g, h in zip(mine, theirs, strict=True):
            assert (g is None) == (h is None)
            if g is not None:
                torch.testing.assert_close(g, h, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("every", [1, 2])
def test_gradients_lie_in_the_plan_and_share_no_memory(every: int) -> None:
    _, trainer = trainer_of(Looks, gradient_accumulation_steps=every)
    for i in range(every):
        trainer.train_step(batch(i))
    places = sorted(looks(trainer).places)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))
    named = [b for b in trainer.plan.buffers if b.name.startswith("gradient.param.")]
    assert len(named) == len(places) == 6 and "gradient.param.inner.bias" in str(trainer.plan)
    assert looks(trainer).storages == {trainer.memory.arena_bytes(named[0].region)}


def test_a_gradient_that_was_there_is_there_afterwards() -> None:
    model, trainer = trainer_of(Heavy)
    mine = model.one.grad = torch.ones(7)
    trainer.train_step(batch(0))
    assert model.one.grad is mine and torch.equal(mine, torch.ones(7))
    eager = Eager(Heavy)
    eager.step(batch(0))
    assert_alike(model, eager.model)


def test_gradients_that_are_kept_are_not_overwritten() -> None:
    _, trainer = trainer_of(Momentary)
    for i in range(3):
        trainer.train_step(batch(i))
        kept = [entry["before"] for entry in trainer.optimizer.state.values()]
        copies = [g.clone() for g in kept]
        trainer.eval_step(batch(7))
        trainer.train_step(batch(8))
        assert all(map(torch.equal, kept, copies))


# ---- code around the step, and changes of the optimizer


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.02)


def doubled(optimizer: Any, *_: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad.mul_(2)


def _twice(optimizer: Any) -> Any:
    step = optimizer.step
    optimizer.step = lambda: (step(), step())
    return lambda: optimizer.__dict__.pop("step")


CHANGES: dict[str, Any] = {
    "pre-hook": lambda o: o.register_step_pre_hook(doubled).remove,
    "post-hook": lambda o: (
        o.register_step_post_hook(
            lambda o, *_: [p.detach().mul_(0.99) for g in o.param_groups for p in g["params"]]
        ).remove
    ),
    "step replaced": _twice,
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_update_changes_hands_and_goes_on(change: str, caplog: Any) -> None:
    """Updates move from the graph to the optimizer's own step and back, with the moments so far."""
    model, trainer = trainer_of(adamw, gradient_accumulation_steps=2)
    eager = Eager(adamw, 2)

    def steps() -> None:
        for i in range(3):
            for given in (batch(i), batch(i + 20)):
                trainer.train_step(given)
            eager.step(batch(i), batch(i + 20))
            assert_alike(model, eager.model)

    steps()
    assert trainer.report()["own_step"] is None
    undo = [CHANGES[change](o) for o in (trainer.optimizer, eager.optimizer)]
    steps()
    assert trainer.report()["own_step"]
    said = [r.message for r in caplog.records if "makes the update" in r.message]
    assert len(said) == 1 and trainer.report()["own_step"] in said[0]
    for each in undo:
        each()
    if change == "step replaced":
        return  # what a lambda held is gone, and with it Onward's own
    steps()
    assert trainer.report()["own_step"] is None and trainer.updates == 9


def test_a_change_within_a_window_is_refused() -> None:
    model, trainer = trainer_of(adamw, gradient_accumulation_steps=2)
    trainer.train_step(batch(0))
    before = copy.deepcopy(model)
    handle = trainer.optimizer.register_step_pre_hook(doubled)
    with pytest.raises(OnwardError, match=r"middle of gradient accumulation: .*pre-hook doubled"):
        trainer.train_step(batch(1))
    handle.remove()
    assert trainer.micro_steps == 1
    for p, q in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(p, q)
    assert trainer.train_step(batch(1)).updated


@pytest.mark.parametrize("make", [Heavy, Renamed], ids=["user's", "torch's"])
def test_schedulers_see_the_steps(make: Any) -> None:
    model, trainer = trainer_of(make)
    eager = Eager(make)
    schedules = [
        torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5)
        for o in (trainer.optimizer, eager.optimizer)
    ]
    for i in range(6):
        trainer.train_step(batch(i))
        eager.step(batch(i))
        for schedule in schedules:  # a warning, and warnings are errors, if it saw no step
            schedule.step()
    assert_alike(model, eager.model)
    assert trainer.train_step(batch(0)).lr == eager.optimizer.param_groups[0]["lr"]


def test_groups_and_frozen_parameters_may_change() -> None:
    def make(groups: Any) -> torch.optim.Optimizer:
        return Heavy(groups[:1])

    model, trainer = trainer_of(make)
    eager = Eager(make)

    def steps() -> None:
        for i in range(2):
            trainer.train_step(batch(i))
            eager.step(batch(i))
        assert_alike(model, eager.model)

    steps()
    for net, optimizer in ((model, trainer.optimizer), (eager.model, eager.optimizer)):
        optimizer.add_param_group(groups_of(net)[1])
    steps()
    for net in (model, eager.model):
        net.one.requires_grad_(False)
        net.frozen.requires_grad_(True)
    steps()


# ---- failures


@pytest.mark.parametrize("late", [False, True], ids=["before a write", "after one"])
def test_a_step_that_raises(late: bool) -> None:
    model, trainer = trainer_of(Looks)
    trainer.train_step(batch(0))
    saved = trainer.state_dict()

    def fails() -> None:
        if late:
            model.one.detach().add_(1)
        raise ValueError("not in the mood")

    looks(trainer).then = fails
    with pytest.raises(ValueError, match="not in the mood"):
        trainer.train_step(batch(1))
    looks(trainer).then = lambda: None
    assert trainer.updates == 1 and all(p.grad is None for p in model.parameters())
    if late:
        with pytest.raises(OnwardError, match="not all of it was made"):
            trainer.train_step(batch(1))
        trainer.load_state_dict(saved)
    trainer.train_step(batch(1))
    eager = Eager(Looks)
    eager.step(batch(0))
    eager.step(batch(1))
    assert_alike(model, eager.model)


CALLS: dict[str, Any] = {
    "train_step": lambda t: t.train_step(batch(0)),
    "eval_step": lambda t: t.eval_step(batch(0)),
    "profile": lambda t: t.profile(),
    "explain": lambda t: t.explain(batch(0)),
}


@pytest.mark.parametrize("call", CALLS)
def test_another_run_within_the_step_is_refused(call: str) -> None:
    _, trainer = trainer_of(Looks)
    looks(trainer).then = lambda: CALLS[call](trainer)
    with pytest.raises(OnwardError, match="within the optimizer's step"):
        trainer.train_step(batch(0))
    looks(trainer).then = lambda: None
    assert trainer.train_step(batch(0)).updated


def lbfgs(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS([p for g in groups for p in g["params"]])


def sparse(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam([p for g in groups for p in g["params"]])


REFUSED: dict[str, tuple[Make, dict[str, Any], str]] = {
    "LBFGS": (lbfgs, {}, "LBFGS.step needs a closure"),
    "SparseAdam": (sparse, {}, "SparseAdam takes sparse gradients only"),
    "moments in bf16": (Heavy, {"optimizer_state": "bf16"}, "optimizer_state='bf16' is not"),
    "strict": (Heavy, {"strict": True}, "Heavy has no update in a graph, and strict=True"),
    "a flag, strict": (
        lambda groups: torch.optim.AdamW(groups, differentiable=True), {"strict": True},
        "differentiable=True in parameter group 0 has no update in a graph",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    make, options, text = REFUSED[name]
    with pytest.raises(OnwardError, match=text) as found:
        trainer_of(make, **options)
    assert "\n" not in str(found.value) and "fix: " in str(found.value)
    assert isinstance(found.value, CaptureError) == ("strict" in options)


# ---- saved, explained, compared


@pytest.mark.parametrize("name", ["rotated", "schedule-free", "with a hook"])
@pytest.mark.parametrize("way", ["state_dict", "save"])
def test_a_run_goes_on_from_its_state(way: str, name: str, tmp_path: Path) -> None:
    """A run goes on in the middle of a window, to the bit."""
    make, options = MAKERS[name], {"gradient_accumulation_steps": 2, "seed": 3}
    model, trainer = trainer_of(make, **options)
    for i in range(3):
        trainer.train_step(batch(i))
    state = trainer.state_dict()
    trainer.save(tmp_path)
    for i in range(3, 8):
        trainer.train_step(batch(i))
    other, resumed = trainer_of(make, **options)
    resumed.train_step(batch(11))
    for _ in range(2):  # a state shares no memory with a Trainer, so that it can be loaded again
        if way == "save":
            resumed.resume(tmp_path)
        else:
            resumed.load_state_dict(state)
        assert resumed.updates == 1 and resumed.micro_steps == 1
        for i in range(3, 8):
            resumed.train_step(batch(i))
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q)


class Odd(Heavy):
    """A state that is neither tensors nor JSON."""

    def step(self, closure: Any = None) -> None:
        super().step()
        self.state[self.param_groups[0]["params"][0]]["odd"] = slice(1)


def test_a_state_of_other_objects_is_refused_by_its_place(tmp_path: Path) -> None:
    _, trainer = trainer_of(Odd)
    trainer.train_step(batch(0))
    with pytest.raises(OnwardError, match=r"own_state\.state\.0\.odd is a builtins.slice"):
        trainer.save(tmp_path)
    assert not list(tmp_path.iterdir())


UNFIT: dict[str, tuple[Make, Make, str]] = {
    "another class": (Heavy, Momentary, "it is a state of Heavy, the optimizer is Momentary"),
    "other groups": (
        Heavy, lambda groups: Heavy([*groups][::-1]), "holds other parameters",
    ),
    "of a graph": (adamw, MAKERS["with a hook"], "its updates were made by step graphs"),
    "for a graph": (MAKERS["with a hook"], adamw, "AdamW made its updates itself"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_a_state_that_does_not_fit_is_refused(name: str) -> None:
    first, second, text = UNFIT[name]
    _, trainer = trainer_of(first)
    trainer.train_step(batch(0))
    model, other = trainer_of(second)
    other.train_step(batch(1))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(OnwardError, match=text):
        other.load_state_dict(trainer.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_looking_at_a_trainer() -> None:
    model, trainer = trainer_of(Heavy, verify=True)
    result = trainer.train_step(batch(0), fetch=["logits"])
    eager = Net()
    torch.testing.assert_close(result.outputs["logits"], eager(**batch(0))["logits"])
    assert trainer.verify(batch(1)).ok
    torch.testing.assert_close(
        trainer.eval_step(batch(1)).loss, model(**batch(1))["loss"].detach(), rtol=1e-5, atol=1e-6
    )
    line = "by the optimizer's own step(), since Heavy has no update in a graph"
    assert line in str(trainer.report())
    before = copy.deepcopy(model.state_dict())
    assert sum(trainer.profile().values()) > 0
    explained = trainer.explain(batch(0))
    kept = sum(e["velocity"].nbytes for e in trainer.optimizer.state.values())
    assert explained.memory is not None and explained.memory.kinds["optimizer"] == kept
    assert any("step() of your optimizer" in line for line in explained.memory.not_counted)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_an_interrupt_between_gradients_and_the_own_step_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The update is made whole, as in a run that nothing interrupts, and then the signal raises."""
    maker = MAKERS[next(iter(MAKERS))]
    _, plain = trainer_of(maker, gradient_accumulation_steps=2)
    _, trainer = trainer_of(maker, gradient_accumulation_steps=2)
    for number in range(4):
        plain.train_step(batch(number))
    for number in range(3):
        trainer.train_step(batch(number))
    advance = OwnStep.advance

    def interrupted(self: OwnStep, signature: Any) -> None:
        advance(self, signature)
        signal.raise_signal(signal.SIGINT)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(OwnStep, "advance", interrupted)
            trainer.train_step(batch(3))
    finally:
        signal.signal(signal.SIGINT, handler)
    assert trainer.updates == plain.updates
    want = plain.model.state_dict()
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(tensor, want[name]), name
    assert trainer.train_step(batch(4)).loss == plain.train_step(batch(4)).loss
