"""`Trainer.state_dict`: it holds everything, and what does not fit is refused before a write."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from states import alike, assert_refused
from torch import nn

import onward
from onward import OnwardError, TrainerOptions
from onward.train.state_part import StatePart, restore, saved
from onward.train.torch_optimizer import TorchOptimizer

pytestmark = pytest.mark.usefixtures("captures_kept")

loss_fn = nn.functional.cross_entropy
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
Y = torch.arange(6) % 3


class Net(nn.Module):
    """Three parameters, a buffer, and dropout."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(4, 3))
        self.v = nn.Parameter(torch.randn(4, 3))
        self.b = nn.Parameter(torch.randn(3))
        self.drop = nn.Dropout(0.2)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ self.w) + x @ self.v
        return self.drop(y * self.scale) + self.b


def trainer_of(every: int = 1, seed: int | None = 3, kind: str = "adamw") -> onward.Trainer:
    model = Net().train()
    groups = [{"params": [model.w]}, {"params": [model.v], "lr": 0.03},
              {"params": [model.b]}]  # fmt: skip
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(groups, lr=0.02)
        if kind == "adamw"
        else torch.optim.SGD(groups, lr=0.02, momentum=0.9, dampening=0.1)
    )
    options = TrainerOptions(seed=seed, gradient_accumulation_steps=every)
    return onward.Trainer(model, optimizer, loss_fn=loss_fn, options=options)


def run(trainer: onward.Trainer, n: int) -> list[float]:
    return [float(trainer.train_step(X, Y).loss) for _ in range(n)]


@pytest.mark.parametrize("kind", ["adamw", "momentum"])
@pytest.mark.parametrize("at", [2, 3], ids=["between windows", "within one"])
def test_settings_are_saved_with_the_state(kind: str, at: int) -> None:
    """Learning rates and all, as a schedule has left them."""
    whole = trainer_of(2, kind=kind)
    run(whole, at)
    for i, group in enumerate(whole.optimizer.param_groups):
        group.update(lr=0.01 * (i + 1), weight_decay=0.2, initial_lr=0.5, max_lr=0.7)
        group.update({"betas": (0.7, 0.8)} if kind == "adamw" else {"momentum": 0.6})
    state = copy.deepcopy(whole.state_dict())
    expected = run(whole, 4)
    resumed = trainer_of(2, seed=9, kind=kind)
    run(resumed, 1)
    identities = [id(g) for g in resumed.optimizer.param_groups]
    resumed.load_state_dict(state)
    assert [id(g) for g in resumed.optimizer.param_groups] == identities
    for group, given in zip(resumed.optimizer.param_groups, state["param_groups"], strict=True):
        assert {k: v for k, v in group.items() if k != "params"} == {
            k: v for k, v in given.items() if k != "params"
        }
    assert run(resumed, 4) == expected
    for p, q in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_state_between_windows_fits_a_window_of_any_length() -> None:
    three, two = trainer_of(3), trainer_of(2)
    run(three, 3)
    two.load_state_dict(three.state_dict())
    assert two.updates == 1
    assert [two.train_step(X, Y).updated for _ in range(4)] == [False, True] * 2
    run(three, 2)
    with pytest.raises(
        OnwardError, match=r"middle of an accumulation over 3 micro-batches, but .* is 2 here"
    ):
        two.load_state_dict(three.state_dict())


def first(d: dict[str, Any], value: Any) -> None:
    d[next(iter(d))] = value


Spoil = Callable[[dict[str, Any]], Any]
SPOILT: dict[str, Spoil] = {
    **{
        f"no {k}": (lambda s, k=k: s.pop(k))
        for k in (
            "model",
            "optimizer",
            "optimizer_class",
            "param_groups",
            "updates",
            "counts",
            "gradient_accumulation_steps",
            "micro_steps",
            "samples",
            "seed",
            "generator",
        )
    },
    "model is a list": lambda s: s.update(model=[]),
    "optimizer is none": lambda s: s.update(optimizer=None),
    "counts is a list": lambda s: s.update(counts=[]),
    "groups are a dict": lambda s: s.update(param_groups={}),
    "weight is a list": lambda s: first(s["model"], [1.0]),
    "weight in fp64": lambda s: first(s["model"], torch.zeros(4, 3, dtype=torch.float64)),
    "weight on meta": lambda s: first(s["model"], torch.zeros(4, 3, device="meta")),
    "buffer gone": lambda s: s["model"].pop("scale"),
    "moment in fp64": lambda s: first(s["optimizer"], torch.zeros(4, 3, dtype=torch.float64)),
    "moment is a number": lambda s: first(s["optimizer"], 1.0),
    "moment gone": lambda s: s["optimizer"].pop("exp_avg_sq.w"),
    "moment of nobody": lambda s: s["optimizer"].update({"exp_avg.q": torch.zeros(4, 3)}),
    "slot of nobody": lambda s: s["optimizer"].update({"max.w": torch.zeros(4, 3)}),
    "accumulator of no window": lambda s: s["optimizer"].update(
        {"accumulator.w": torch.zeros(4, 3)}
    ),
    "count gone": lambda s: s["counts"].pop("w"),
    "count of nobody": lambda s: s["counts"].update(q=1),
    "count is a float": lambda s: s["counts"].update(w=1.5),
    "count is negative": lambda s: s["counts"].update(w=-1),
    "count is none of a run": lambda s: s["counts"].update(w=2**63),
    "updates are none of a run": lambda s: s.update(updates=10**30),
    "samples are none of a run": lambda s: s.update(samples=2**64),
    "a seed of more bits": lambda s: s.update(stream=[0, 2**64]),
    "updates is a string": lambda s: s.update(updates="3"),
    "micro_steps beyond": lambda s: s.update(micro_steps=1),
    "micro_steps none": lambda s: s.update(micro_steps=None),
    "samples negative": lambda s: s.update(samples=-2),
    "another class": lambda s: s.update(optimizer_class="SGD"),
    "a group less": lambda s: s["param_groups"].pop(),
    "groups exchanged": lambda s: s["param_groups"].reverse(),
    "group is a list": lambda s: s["param_groups"].__setitem__(0, []),
    "no lr": lambda s: s["param_groups"][0].pop("lr"),
    "no flag": lambda s: s["param_groups"][2].pop("amsgrad"),
    "a setting that no graph has": lambda s: s["param_groups"][1].update(differentiable=True),
    "an attribute is none": lambda s: s["param_groups"][0].update(decoupled_weight_decay=None),
    "lr is a string": lambda s: s["param_groups"][1].update(lr="high"),
    "betas is a number": lambda s: s["param_groups"][1].update(betas=0.9),
    "seed too short": lambda s: s.update(seed=torch.zeros(1, dtype=torch.int64)),
    "seed is a list": lambda s: s.update(seed=[1, 2]),
    "generator too short": lambda s: s.update(generator=torch.zeros(3, dtype=torch.uint8)),
    "generator of floats": lambda s: s.update(generator=torch.zeros(3)),
    "generator is a number": lambda s: s.update(generator=3),
}


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    source, trainer = trainer_of(seed=4), trainer_of(seed=5)
    run(source, 2)
    run(trainer, 1)
    good = source.state_dict()
    assert_refused(trainer, good, SPOILT)
    for strange in (None, [], 3):
        with pytest.raises(OnwardError, match=", not a dict"):
            trainer.load_state_dict(strange)  # type: ignore[arg-type]
    trainer.load_state_dict(good)
    assert run(trainer, 2) == run(source, 2)


def test_settings_that_the_form_of_the_state_does_not_have_are_refused() -> None:
    model = nn.Linear(64, 64)
    options = {"optimizer_state": "8bit"}
    trainer = onward.Trainer(
        model, onward.optim.Adam(lr=1e-3), loss_fn=nn.functional.mse_loss, options=options
    )
    trainer.train_step(torch.randn(2, 64), torch.randn(2, 64))
    state = trainer.state_dict()
    spoilt = copy.deepcopy(state)
    spoilt["param_groups"][0]["amsgrad"] = True
    with pytest.raises(OnwardError, match=r"does not fit .*not supported with amsgrad=True"):
        trainer.load_state_dict(spoilt)
    assert alike(trainer.state_dict(), state)


def test_model_that_will_not_be_loaded_stays_as_it_was() -> None:
    """A hook of the model's own may raise when half is written."""
    source, trainer = trainer_of(), trainer_of()
    run(source, 2)
    before = trainer.state_dict()

    def refuse(*_: Any) -> None:
        raise RuntimeError("not today")

    trainer.model.register_load_state_dict_post_hook(refuse)
    with pytest.raises(RuntimeError, match="not today"):
        trainer.load_state_dict(source.state_dict())
    assert alike(trainer.state_dict(), before)


def test_where_the_last_part_fails_those_before_it_go_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, trainer, twin = trainer_of(seed=4), trainer_of(seed=5), trainer_of(seed=5)
    run(source, 2)
    run(trainer, 1)
    run(twin, 1)
    before = trainer.state_dict()
    with monkeypatch.context() as patch:
        patch.setattr(TorchOptimizer, "restore", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            trainer.load_state_dict(source.state_dict())
    assert alike(trainer.state_dict(), before)
    assert run(trainer, 2) == run(twin, 2), "the same masks, rates and moments"


def test_parts_are_checked_before_one_writes_and_go_back_in_reverse() -> None:
    done: list[str] = []

    def part(name: str, checks: bool = True, writes: bool = True) -> StatePart:
        def check(state: Any) -> None:
            done.append(f"check {name}")
            assert checks

        def write(state: Any) -> Callable[[], None]:
            assert writes
            done.append(f"write {name}")
            return lambda: done.append(f"back {name}")

        return StatePart(lambda: {name: 1}, check, write)

    assert saved([part("a"), part("b")]) == {"a": 1, "b": 1}
    with pytest.raises(OnwardError, match="does not fit this Trainer: AssertionError"):
        restore([part("a"), part("b", checks=False)], {})
    assert done == ["check a", "check b"]
    done.clear()
    with pytest.raises(AssertionError):
        restore([part("a"), part("b"), part("c", writes=False)], {})
    assert done[3:] == ["write a", "write b", "back b", "back a"]


def test_state_loaded_into_the_optimizer_is_what_is_saved() -> None:
    source, trainer = trainer_of(), trainer_of()
    run(source, 3)
    trainer.optimizer.load_state_dict(copy.deepcopy(source.optimizer.state_dict()))
    have, want = trainer.state_dict(), source.state_dict()
    for key in ("optimizer", "counts", "param_groups"):
        assert alike(have[key], want[key]), key


def test_a_value_that_no_part_looks_for_is_refused_in_one_line() -> None:
    """Whatever the check of a part raises for it."""
    part = StatePart(dict, lambda state: state["x"].tolist(), lambda state: lambda: None)
    for value, error in ((1, "AttributeError"), (None, "AttributeError")):
        with pytest.raises(OnwardError, match=f"does not fit this Trainer: {error}") as raised:
            restore([part], {"x": value})
        assert str(raised.value).isprintable()
    with pytest.raises(OnwardError, match="does not fit this Trainer: KeyError"):
        restore([part], {})
