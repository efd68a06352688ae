"""`optimizer.state` and `param_groups` are the truth between steps: what a user does to them holds
at the next step as in a plain PyTorch loop, or is refused before anything moves."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pairs import KINDS, MicroPair, X, Y, loss_fn, net
from torch import nn

import onward
import onward.compile
from onward import OnwardError, TrainerOptions

pytestmark = pytest.mark.usefixtures("captures_kept")

FIRST = {"adamw": "exp_avg", "momentum": "momentum_buffer"}


def frozen_copy(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(model: nn.Module, before: list[torch.Tensor]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


# ---- what is done to the state


def replace(o: Any, ps: list[Any], slot: str) -> None:
    o.state[ps[0]][slot] = torch.full_like(ps[0], 0.25)


def swap(o: Any, ps: list[Any], slot: str) -> None:
    """Swap the two moments, which have to be read before they are written."""
    for p in ps:
        entry = o.state[p]
        entry["exp_avg"].abs_()
        entry["exp_avg"], entry["exp_avg_sq"] = entry["exp_avg_sq"], entry["exp_avg"]


def set_data(o: Any, ps: list[Any], slot: str) -> None:
    o.state[ps[2]][slot].data = torch.full_like(ps[2], -0.5)


def reload(o: Any, ps: list[Any], slot: str) -> None:
    saved = copy.deepcopy(o.state_dict())
    for entry in saved["state"].values():
        entry[slot].mul_(3.0)
        if "step" in entry:
            entry["step"].fill_(9.0)
    saved["param_groups"][0]["lr"] = 0.05
    o.load_state_dict(saved)


CHANGES: dict[str, Callable[[Any, list[Any], str], Any]] = {
    "clear": lambda o, ps, slot: o.state.clear(),
    "delete": lambda o, ps, slot: o.state.pop(ps[1]),
    "empty entry": lambda o, ps, slot: o.state[ps[1]].clear(),
    "zero in place": lambda o, ps, slot: o.state[ps[0]][slot].zero_(),
    "replace": replace,
    "set data": set_data,
    "reload": reload,
    "new dict": lambda o, ps, slot: setattr(o, "state", {p: dict(e) for p, e in o.state.items()}),
    "look": lambda o, ps, slot: o.state[ps[0]],
}
OF_ADAM: dict[str, Callable[[Any, list[Any], str], Any]] = {
    "swap": swap,
    "one step in place": lambda o, ps, slot: o.state[ps[0]]["step"].fill_(40.0),
    "one step replaced": lambda o, ps, slot: o.state[ps[0]].update(step=torch.tensor(40.0)),
    "all steps": lambda o, ps, slot: [o.state[p]["step"].add_(5) for p in ps],
}
ALL = [(kind, c) for kind in KINDS for c in CHANGES] + [("adamw", c) for c in OF_ADAM]
ONE_BY_ONE = {"delete", "empty entry", "one step in place", "one step replaced"}


@pytest.mark.parametrize(("kind", "change"), ALL)
def test_changes_of_the_state_hold(kind: str, change: str, captures: list[int]) -> None:
    pair = MicroPair(KINDS[kind])
    pair.steps(2)
    pair.both(lambda o, ps: (CHANGES | OF_ADAM)[change](o, ps, FIRST[kind]))
    pair.steps(2)
    pair.assert_alike()
    if change not in ONE_BY_ONE:
        assert len(captures) == 1, "parameters that are counted alike share a graph"


def test_updates_are_those_of_the_parameter_that_had_most() -> None:
    """The count of updates is that of the parameter that had most, in an optimizer that has stepped
    before and in one loaded in mid-run."""
    model = net()
    optimizer = KINDS["adamw"](model.parameters())
    first, *rest = model.parameters()
    for step in range(3):
        loss_fn(model(X), Y).backward()
        for p in rest if step else ():  # torch leaves out what has no gradient
            p.grad = None
        optimizer.step()
    assert [float(optimizer.state[p]["step"]) for p in (first, rest[0])] == [3.0, 1.0]
    saved = copy.deepcopy(optimizer.state_dict())
    trainer = onward.Trainer(model, optimizer, loss_fn=loss_fn)
    assert trainer.updates == 3
    trainer.train_step(X, Y)
    assert trainer.updates == 4
    optimizer.load_state_dict(saved)
    trainer.train_step(X, Y)
    assert trainer.updates == 4


def test_velocity_that_is_none_begins_anew() -> None:
    pair = MicroPair(KINDS["momentum"])
    pair.steps(2)
    pair.both(lambda o, ps: o.state[ps[0]].update(momentum_buffer=None))
    pair.steps(2)
    pair.assert_alike()


def test_state_shows_no_parameter_before_its_first_update() -> None:
    """State lists no parameter before its first update; a velocity of zeros would count as one that
    was made."""
    pair = MicroPair(KINDS["momentum"], every=2)
    pair.micro()
    assert not pair.ours.state
    assert not pair.trainer.state_dict()["counts"]
    pair.micro()
    pair.update()
    pair.assert_alike()


NO_STATE: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "no second moment": ("no tensor 'exp_avg_sq'", lambda e, p: e.pop("exp_avg_sq")),
    "no moments": ("no tensor 'exp_av", lambda e, p: (e.clear(), e.update(step=torch.tensor(3.0)))),
    "no step": ("'step'", lambda e, p: e.pop("step")),
    "number as step": ("'step'", lambda e, p: e.update(step=3.0)),
    "half a step": ("step is 2.5", lambda e, p: e["step"].fill_(2.5)),
    "negative step": ("step is -1", lambda e, p: e["step"].fill_(-1.0)),
    "nan step": ("step is nan", lambda e, p: e["step"].fill_(torch.nan)),
    "shape": (r"exp_avg is .* \[2, 2\]", lambda e, p: e.update(exp_avg=torch.zeros(2, 2))),
    "dtype": ("exp_avg is torch.float64", lambda e, p: e.update(exp_avg=p.detach().double())),
    "list": ("no tensor 'exp_avg", lambda e, p: e.update(exp_avg=[1.0])),
}


def test_state_that_torch_could_not_go_on_from_is_refused() -> None:
    pair = MicroPair(KINDS["adamw"])
    pair.steps(1)
    before = frozen_copy(pair.model)
    for message, spoil in NO_STATE.values():
        p = pair.model.get_parameter("0.weight")
        entry = pair.ours.state[p]
        kept = {k: v.clone() for k, v in entry.items()}
        spoil(entry, p)
        for call in (lambda: pair.trainer.train_step(X, Y), pair.trainer.state_dict):
            with pytest.raises(OnwardError, match=message):
                call()
        assert same(pair.model, before)
        entry.clear()
        entry.update(kept)
    pair.steps(2)
    pair.assert_alike()


# ---- settings


def settings(**values: Any) -> Callable[[Any, list[Any]], None]:
    return lambda o, ps: o.param_groups[0].update(values)


@pytest.mark.parametrize("every", [1, 2])
def test_momentum_switched_on_off_and_on(every: int) -> None:
    """A velocity begins with the gradient, however many updates came before; one that was left
    alone goes on."""
    pair = MicroPair(lambda p: torch.optim.SGD(p, lr=0.1, dampening=0.4), every)
    for momentum in (0.0, 0.9, 0.0, 0.8):
        pair.both(settings(momentum=momentum))
        pair.steps(2)
        pair.assert_alike()


def test_settings_changed_within_a_window_hold_at_its_end() -> None:
    pair = MicroPair(KINDS["adamw"], every=2)
    pair.steps(1)
    pair.micro()
    pair.both(settings(lr=0.3, betas=(0.5, 0.6), eps=1e-3, weight_decay=0.5))
    pair.micro()
    pair.update()
    pair.assert_alike()


@pytest.mark.parametrize("flag", ["differentiable"])
def test_what_no_graph_has_is_refused_later_too_if_strict(flag: str) -> None:
    """`test_own_steps.py` trains with it."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    trainer = onward.Trainer(model, optimizer, loss_fn=loss_fn, options={"strict": True})
    trainer.train_step(X, Y)
    before = frozen_copy(model)
    optimizer.param_groups[0][flag] = True
    with pytest.raises(OnwardError, match=f"{flag}=True in parameter group 0"):
        trainer.train_step(X, Y)
    assert same(model, before)


@pytest.mark.parametrize("flag", [{"foreach": True}, {"fused": True}, {"capturable": True}, {}])
def test_flags_of_torchs_own_loops_are_accepted(flag: dict[str, bool]) -> None:
    model, twin = net(), net()
    ours = torch.optim.AdamW(model.parameters(), lr=0.02, **flag)  # type: ignore[arg-type]
    theirs = torch.optim.AdamW(twin.parameters(), lr=0.02)
    trainer = onward.Trainer(model, ours, loss_fn=loss_fn)
    for _ in range(2):
        trainer.train_step(X, Y)
        theirs.zero_grad()
        loss_fn(twin(X), Y).backward()
        theirs.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("hook", ["register_step_pre_hook", "register_step_post_hook"])
def test_hooks_on_the_step_are_refused_if_strict(hook: str, when: str) -> None:
    model, options = net(), onward.TrainerOptions(strict=True)
    optimizer = torch.optim.SGD(model.parameters())
    if when == "before":
        getattr(optimizer, hook)(lambda *_: None)
        with pytest.raises(OnwardError, match="hooks"):
            onward.Trainer(model, optimizer, loss_fn=loss_fn, options=options)
        return
    trainer = onward.Trainer(model, optimizer, loss_fn=loss_fn, options=options)
    handle = getattr(optimizer, hook)(lambda *_: None)
    with pytest.raises(OnwardError, match="hooks"):
        trainer.train_step(X, Y)
    handle.remove()
    assert trainer.train_step(X, Y).updated


# ---- which parameters


def remove_one(o: Any, ps: list[Any]) -> None:
    del o.param_groups[0]["params"][0]


def move_one(o: Any, ps: list[Any]) -> None:
    """Move one parameter into a group of its own, with its state."""
    del o.param_groups[0]["params"][2]
    o.add_param_group({"params": [ps[2]], "lr": 0.3, "weight_decay": 0.0})


def exchange(o: Any, ps: list[Any]) -> None:
    """Exchange two parameters between the groups, whose sizes stay."""
    first, second = o.param_groups
    first["params"][0], second["params"][0] = second["params"][0], first["params"][0]


@pytest.mark.parametrize("change", [remove_one, move_one, exchange])
def test_groups_changed_later_are_followed(change: Any) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        ps = list(parameters)
        groups = [{"params": ps[:3]}, {"params": ps[3:], "lr": 0.2}]
        return torch.optim.AdamW(groups, lr=0.02)

    pair = MicroPair(make)
    pair.steps(2)
    pair.both(change)
    pair.steps(2)
    pair.assert_alike()


def test_replaced_parameter_has_no_state_of_its_predecessor() -> None:
    pair = MicroPair(KINDS["adamw"])
    pair.steps(2)
    for model, optimizer in ((pair.model, pair.ours), (pair.twin, pair.theirs)):
        new = nn.Parameter(model.get_parameter("2.weight").detach() * 0.5)
        model[2].weight = new
        optimizer.add_param_group({"params": [new]})
    pair.steps(2)
    pair.assert_alike()


def test_optimizer_of_other_parameters_is_refused() -> None:
    model, other = net(), net(1)
    for held in (other.parameters(), [*model.parameters(), other.get_parameter("0.weight")]):
        optimizer = torch.optim.AdamW(held)
        with pytest.raises(OnwardError, match=r"tensors in the optimizer are not param"):
            onward.Trainer(model, optimizer, loss_fn=loss_fn)
        assert type(optimizer).step is optimizer.step.__func__, "left as it was"  # type: ignore[attr-defined]
    frozen = other.get_parameter("0.weight").requires_grad_(False)
    optimizer = torch.optim.AdamW([*model.parameters(), frozen])
    trainer = onward.Trainer(model, optimizer, loss_fn=loss_fn)
    before = frozen_copy(model)
    optimizer.add_param_group({"params": [other[2].weight]})
    with pytest.raises(OnwardError, match="1 of the 6 tensors"):
        trainer.train_step(X, Y)
    del optimizer.param_groups[1]
    optimizer.param_groups[0]["params"].append(model[0].weight)
    with pytest.raises(OnwardError, match=r"'0\.weight' twice"):
        trainer.train_step(X, Y)
    assert same(model, before)


@pytest.mark.parametrize("checks", ["0", "1"])
def test_nothing_to_move_is_refused(checks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONWARD_CHECK", checks)
    model = net()
    options = TrainerOptions(max_grad_norm=1.0)
    optimizer = torch.optim.AdamW(model[0].parameters())
    trainer = onward.Trainer(model, optimizer, loss_fn=loss_fn, options=options)
    model[0].requires_grad_(False)
    with pytest.raises(OnwardError, match="depends on no parameter"):
        trainer.train_step(X, Y)
    assert trainer.updates == 0
    model[0].requires_grad_(True)
    assert trainer.train_step(X, Y).updated


def test_loss_function_with_parameters_is_refused() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return loss_fn(x * self.scale, y)

    with pytest.raises(OnwardError, match="loss_fn has parameters"):
        onward.Trainer(net(), onward.optim.SGD(), loss_fn=Loss())


# ---- the accumulation window


def freeze(pair: MicroPair, flag: bool) -> None:
    pair.model[0].weight.requires_grad_(flag)


def drop(pair: MicroPair, flag: bool) -> None:
    held = pair.ours.param_groups[0]["params"]
    held.insert(0, pair.model[0].weight) if flag else held.pop(0)


@pytest.mark.parametrize("change", [freeze, drop])
@pytest.mark.parametrize("late", [False, True])
def test_parameters_that_leave_or_join_within_a_window_are_refused(change: Any, late: bool) -> None:
    """A window is refused while a parameter has left or joined: torch would still apply its
    accumulated gradient. Once undone, the window goes on."""
    pair = MicroPair(KINDS["adamw"], every=2)
    pair.steps(1)
    if late:
        change(pair, False)
        pair.trainer.train_step(X, Y)
        change(pair, True)
    else:
        pair.micro()
        change(pair, False)
    before = frozen_copy(pair.model)
    with pytest.raises(OnwardError, match=r"0\.weight got gradients in some micro-batches"):
        pair.trainer.train_step(X, Y)
    assert same(pair.model, before)
    assert pair.trainer.micro_steps == 1
    change(pair, not late)
    if late:
        assert pair.trainer.train_step(X, Y).updated
        return
    pair.micro()
    pair.update()
    pair.assert_alike()


class TwoHeads(nn.Module):
    """A model whose loss reaches only the head that is asked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(4, 5)
        self.heads = nn.ModuleList(nn.Linear(5, 3) for _ in range(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor, head: int) -> torch.Tensor:
        found = self.heads[head](torch.tanh(self.trunk(x)))
        return loss_fn(found, y)


@pytest.mark.parametrize("order", [(0, 1, 0, 0, 1, 1, 0), (1, 1, 0, 1)])
def test_parameters_that_some_batches_reach_are_counted_by_themselves(order: tuple[int]) -> None:
    model, twin = TwoHeads().train(), TwoHeads().train()
    trainer = onward.Trainer(model, torch.optim.Adam(model.parameters(), lr=0.05))
    theirs = torch.optim.Adam(twin.parameters(), lr=0.05)
    for head in order:
        trainer.train_step(x=X, y=Y, head=head)
        theirs.zero_grad()
        twin(X, Y, head).backward()
        theirs.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        assert float(trainer.optimizer.state[p]["step"]) == float(theirs.state[q]["step"])


def test_micro_batches_that_reach_other_parameters_are_refused() -> None:
    model = TwoHeads().train()
    options = TrainerOptions(gradient_accumulation_steps=2)
    trainer = onward.Trainer(model, onward.optim.Adam(), options=options)
    trainer.train_step(x=X, y=Y, head=0)
    with pytest.raises(
        OnwardError, match=r"heads\.0\.bias, heads\.0\.weight, heads\.1\.bias got gra"
    ):
        trainer.train_step(x=X, y=Y, head=1)
    assert trainer.train_step(x=X, y=Y, head=0).updated


# ---- who has the optimizer


def test_later_trainer_goes_on_and_the_earlier_one_refuses() -> None:
    pair = MicroPair(KINDS["adamw"])
    pair.steps(2)
    earlier = pair.trainer
    pair.trainer = onward.Trainer(pair.model, pair.ours, loss_fn=loss_fn)
    before = frozen_copy(pair.model)
    state = earlier._updates  # alive
    for call in (
        lambda: earlier.train_step(X, Y),
        earlier.state_dict,
        lambda: earlier.load_state_dict({}),
    ):
        with pytest.raises(OnwardError, match="now belongs to"):
            call()
    assert same(pair.model, before)
    assert state is earlier._updates
    assert earlier.eval_step(X, Y).loss.isfinite()
    pair.steps(2)
    pair.assert_alike()


def test_an_open_window_is_not_taken_away() -> None:
    pair = MicroPair(KINDS["adamw"], every=2)
    pair.micro()
    with pytest.raises(OnwardError, match="middle of gradient accumulation"):
        onward.Trainer(pair.model, pair.ours, loss_fn=loss_fn)
    pair.micro()
    pair.update()
    pair.assert_alike()


@pytest.mark.parametrize("kind", KINDS)
def test_optimizer_of_a_dropped_trainer_is_torchs_again(kind: str) -> None:
    pair = MicroPair(KINDS[kind])
    pair.steps(2)
    with pytest.raises(OnwardError, match="train_step"):
        pair.ours.step()
    del pair.trainer
    gc.collect()
    for _ in range(2):
        for model, optimizer in ((pair.model, pair.ours), (pair.twin, pair.theirs)):
            optimizer.zero_grad()
            loss_fn(model(X), Y).backward()
            optimizer.step()
    pair.assert_alike()
    pair.theirs.zero_grad()
    pair.ours.zero_grad()
    pair.trainer = onward.Trainer(pair.model, pair.ours, loss_fn=loss_fn)
    pair.steps(2)
    pair.assert_alike()


def test_two_optimizers_of_one_model() -> None:
    model, twin = net(), net()
    ours = [torch.optim.AdamW(model[i].parameters(), lr=0.02) for i in (0, 2)]
    theirs = [torch.optim.AdamW(twin[i].parameters(), lr=0.02) for i in (0, 2)]
    trainers = [onward.Trainer(model, o, loss_fn=loss_fn) for o in ours]
    for i in (0, 1, 1, 0, 1):
        trainers[i].train_step(X, Y)
        twin.zero_grad()
        loss_fn(twin(X), Y).backward()
        theirs[i].step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def through_a_file(value: Any) -> Any:
    """A copy through torch.save and torch.load."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # noqa: TID251 - written right above


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "file": through_a_file,
}


@pytest.mark.parametrize("way", COPIES)
def test_trainer_is_not_copied(way: str) -> None:
    trainer = onward.Trainer(net(), onward.optim.SGD(), loss_fn=loss_fn)
    with pytest.raises(OnwardError, match="state_dict"):
        COPIES[way](trainer)


@pytest.mark.parametrize("way", ["deepcopy", "file"])
def test_copied_optimizer_and_model_are_torchs(way: str) -> None:
    """A copy belongs to no Trainer: it steps by itself, and leaves the first one's state alone."""
    pair = MicroPair(KINDS["adamw"])
    pair.steps(2)
    model, optimizer = COPIES[way]((pair.model, pair.ours))
    kept = copy.deepcopy(pair.ours.state_dict())
    loss_fn(model(X), Y).backward()
    optimizer.step()
    torch.testing.assert_close(pair.ours.state_dict()["state"], kept["state"], rtol=0, atol=0)
    pair.steps(1)
    pair.assert_alike()
    for p, q in zip(model.parameters(), pair.twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
