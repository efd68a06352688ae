"""Trainers with every optimizer beside eager PyTorch, over fifty steps of one model.

The model has a scalar, vectors, matrices, an embedding with rows that no batch reads and a frozen
parameter, in two groups with other settings; a scheduler changes the learning rate in mid-run.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from update_cases import CASES, UpdateCase

import onward
from onward import OnwardError
from onward.graph.ops.optimizers import OPTIMIZERS

pytestmark = pytest.mark.usefixtures("captures_kept")
STEPS = 50


class Mixed(nn.Module):
    """A classifier of words with parameters of every shape."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 6)  # batches hold words below 6
        self.inner, self.norm, self.outer = nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.frozen = nn.Parameter(torch.linspace(0.5, 1.5, 5), requires_grad=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        h = torch.tanh(self.norm(self.inner(self.words(x).mean(1))) * self.scale) * self.frozen
        return {"loss": nn.functional.cross_entropy(self.outer(h), y)}


class Matrices(nn.Module):
    """A model of matrices alone, for Muon."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 5, bias=False), nn.Linear(5, 3, bias=False)
        self.table: torch.Tensor
        self.register_buffer("table", torch.randn(9, 6))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        h = torch.tanh(self.inner(self.table[x].mean(1)))
        return {"loss": nn.functional.cross_entropy(self.outer(h), y)}


def model_for(case: UpdateCase) -> nn.Module:
    torch.manual_seed(0)
    return Matrices() if case.name == "Muon" else Mixed()


def batches(steps: int = STEPS) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    dice = torch.Generator().manual_seed(3)
    for _ in range(steps):
        yield torch.randint(6, (8, 3), generator=dice), torch.randint(3, (8,), generator=dice)


def grouped(model: nn.Module, case: UpdateCase) -> list[dict[str, Any]]:
    """Two groups; the second one has a third of the learning rate."""
    parameters = list(model.parameters())
    lr = case.settings["lr"] / 3
    return [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": lr}]


class Run:
    """A model that a plain loop trains, in any precision."""

    def __init__(self, case: UpdateCase, dtype: torch.dtype, clip: float | None = None) -> None:
        self.model, self.clip = model_for(case).to(dtype), clip
        self.optimizer = case.reference(grouped(self.model, case))
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [20, 35], 0.3)

    def step(self, *micro: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.optimizer.zero_grad()
        for x, y in micro:
            (self.model(x, y)["loss"] / len(micro)).backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.schedule.step()


def trained(case: UpdateCase, **options: Any) -> tuple[onward.Trainer, Any]:
    """A Trainer and the schedule of its learning rates."""
    model = model_for(case)
    optimizer = case.made(grouped(model, case))
    trainer = onward.Trainer(model, optimizer, options=options)
    return trainer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [20, 35], 0.3)


def assert_near(have: nn.Module, eager: nn.Module, exact: nn.Module) -> None:
    """Assert twice eager's distance to fp64 at most."""
    theirs, precise = dict(eager.named_parameters()), dict(exact.named_parameters())
    for name, p in have.named_parameters():
        q, r = theirs[name].double(), precise[name]
        far, own = (p.double() - r).norm(), (q - r).norm()
        assert far <= 2 * own + 1e-5 * r.norm() + 1e-7, f"{name}: {far:.1e}, eager {own:.1e}"


@pytest.mark.sample(9)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fifty_steps_are_eagers(case: UpdateCase) -> None:
    trainer, schedule = trained(case)
    eager, exact = Run(case, torch.float32), Run(case, torch.float64)
    for x, y in batches():
        trainer.train_step(x, y)
        schedule.step()
        eager.step((x, y))
        exact.step((x, y))
    assert_near(trainer.model, eager.model, exact.model)
    update = OPTIMIZERS[case.name].update.name
    ops = [launch.op for launch in trainer.plan.launches]
    if case.name not in ("Adafactor", "Muon"):
        held = [p for p in trainer.model.parameters() if p.requires_grad]
        assert ops.count(update) == len(held), "one pass over memory each"


def one_of_each() -> list[UpdateCase]:
    """The last case of each optimizer, which has most settings on."""
    return list({case.name: case for case in CASES}.values())


EACH = pytest.mark.parametrize("case", one_of_each(), ids=lambda case: case.name)


@pytest.mark.sample(2)
@EACH
def test_accumulated_and_clipped(case: UpdateCase) -> None:
    options = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.3}
    trainer, schedule = trained(case, **options)
    eager, exact = (Run(case, d, clip=0.3) for d in (torch.float32, torch.float64))
    given = list(batches(24))
    for micro in zip(given[::2], given[1::2], strict=True):
        for x, y in micro:
            trainer.train_step(x, y)
        schedule.step()
        eager.step(*micro)
        exact.step(*micro)
    assert_near(trainer.model, eager.model, exact.model)


@EACH
def test_state_goes_to_eager_and_back(case: UpdateCase) -> None:
    """A state has torch's keys, shapes and dtypes; either side goes on from the other's."""
    trainer, _ = trained(case)
    given = list(batches(14))
    for x, y in given[:5]:
        trainer.train_step(x, y)
    eager = copy.deepcopy(trainer.model)
    theirs = case.made(grouped(eager, case))
    theirs.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))
    for x, y in given[5:9]:
        trainer.train_step(x, y)
        theirs.zero_grad()
        eager(x, y)["loss"].backward()
        theirs.step()
    assert_alike(trainer, eager, theirs)
    # the Trainer goes on from eager's state in mid-run
    trainer.optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
    with torch.no_grad():
        for p, q in zip(trainer.model.parameters(), eager.parameters(), strict=True):
            p.copy_(q)
    for x, y in given[9:]:
        trainer.train_step(x, y)
        theirs.zero_grad()
        eager(x, y)["loss"].backward()
        theirs.step()
    assert_alike(trainer, eager, theirs)


def assert_alike(trainer: onward.Trainer, eager: nn.Module, theirs: torch.optim.Optimizer) -> None:
    muon = type(theirs).__name__ == "Muon"  # in bf16, in torch
    for p, q in zip(trainer.model.parameters(), eager.parameters(), strict=True):
        have, want = trainer.optimizer.state.get(p, {}), theirs.state.get(q, {})
        assert have.keys() == want.keys()
        for slot, tensor in want.items():
            assert have[slot].shape == tensor.shape and have[slot].dtype == tensor.dtype
            if not muon:
                torch.testing.assert_close(have[slot], tensor, rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(p, q, rtol=0.0, atol=0.05 if muon else 2e-5)


@EACH
def test_a_skipped_update_leaves_everything(case: UpdateCase) -> None:
    trainer, _ = trained(case, skip_nonfinite=True, max_grad_norm=1.0)
    for x, y in batches(3):
        trainer.train_step(x, y)
    before = copy.deepcopy(trainer.state_dict())
    kept = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    target = next(p for n, p in trainer.model.named_parameters() if n.startswith("outer"))
    with torch.no_grad():
        held = target[0, 0].item()
        target[0, 0] = math.inf
    x, y = next(batches(1))
    assert trainer.train_step(x, y).skipped
    with torch.no_grad():
        target[0, 0] = held
    after = trainer.state_dict()
    assert before["counts"] == after["counts"]
    for name, tensor in before["optimizer"].items():
        assert torch.equal(tensor, after["optimizer"][name]), name
    assert all(torch.equal(p, kept[n]) for n, p in trainer.model.named_parameters())


@EACH
def test_a_trainer_goes_on_from_anothers_state(case: UpdateCase) -> None:
    first, _ = trained(case)
    given = list(batches(8))
    for x, y in given[:4]:
        first.train_step(x, y)
    second, _ = trained(case)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for x, y in given[4:]:
        first.train_step(x, y)
        second.train_step(x, y)
    for p, q in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(p, q)


FORMS = [(case.name, form) for case in one_of_each() for form in ("8bit", "bf16")]


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_forms_in_fewer_bytes_are_kept_where_they_are_sound(name: str, form: str) -> None:
    case = next(c for c in CASES if c.name == name)
    assert not case.settings.get("amsgrad")
    if name in ("Adam", "AdamW"):
        trained(case, optimizer_state=form)
        case = case._replace(settings={**case.settings, "amsgrad": True})
        message = rf"optimizer_state='{form}' is not supported with amsgrad=True; fix: "
    else:
        message = rf"optimizer_state='{form}' is not supported for \S+\.{name}; fix: use "
    with pytest.raises(OnwardError, match=message):
        trained(case, optimizer_state=form)


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if hasattr(torch.optim, n)])
def test_differentiable_steps_are_refused(name: str) -> None:
    model = Matrices()
    optimizer = getattr(torch.optim, name)(model.parameters())
    optimizer.param_groups[0]["differentiable"] = True
    with pytest.raises(OnwardError, match="differentiable=True in parameter group 0"):
        onward.Trainer(model, optimizer)


@pytest.mark.parametrize("flag", ["foreach", "fused", "capturable"])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop", "NAdam", "RAdam", "Adamax", "Adagrad"])
def test_flags_of_torchs_own_loops_change_nothing(name: str, flag: str) -> None:
    made = getattr(torch.optim, name)
    if flag not in made(Matrices().parameters()).param_groups[0]:
        pytest.skip(f"{name} has no {flag}")
    runs = []
    for settings in ({}, {flag: True}):
        torch.manual_seed(0)
        model = Matrices()
        trainer = onward.Trainer(model, made(model.parameters(), **settings))
        for x, y in batches(2):
            trainer.train_step(x, y)
        runs.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*runs, strict=True))


def test_maximize_and_amsgrad_may_be_switched_between_steps() -> None:
    case = next(c for c in CASES if c.name == "Adam")
    trainer, _ = trained(case)
    eager = Run(case, torch.float32)
    for i, (x, y) in enumerate(batches(6)):
        for optimizer in (trainer.optimizer, eager.optimizer):
            optimizer.param_groups[0]["maximize"] = i % 3 == 1
        trainer.train_step(x, y)
        eager.step((x, y))
    for p, q in zip(trainer.model.parameters(), eager.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    trainer.optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(OnwardError, match="no tensor 'max_exp_avg_sq'"):  # a KeyError in torch
        trainer.train_step(*next(batches(1)))
