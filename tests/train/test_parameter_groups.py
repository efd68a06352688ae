"""Descriptions of optimizers: groups by patterns of names, defaults, and Muon beside AdamW."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from test_optimizers import Mixed, batches
from torch import nn
from update_cases import muon

import onward
from onward import OnwardError, optim
from onward.graph.ops.optimizers import OPTIMIZERS
from onward.train.optim import to_torch

pytestmark = pytest.mark.usefixtures("captures_kept")


def mixed() -> Mixed:
    torch.manual_seed(0)
    return Mixed()


def names(model: nn.Module, group: dict[str, Any]) -> list[str]:
    held = {p: n for n, p in model.named_parameters()}
    return [held[p] for p in group["params"]]


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if hasattr(torch.optim, n)])
def test_defaults_are_torchs(name: str) -> None:
    record = OPTIMIZERS[name]
    ours = {k: v for k, v in vars(record.description()).items() if k not in record.own_fields}
    theirs = getattr(torch.optim, name)([torch.zeros(2, 2)]).defaults
    differing = {k for k, v in ours.items() if theirs[k] != v}
    assert differing <= ({"lr"} if name == "SGD" else set())


def test_groups_are_those_of_the_patterns_then_all_others() -> None:
    model = mixed()
    groups: list[dict[str, Any]] = [
        {"params": ["*.bias", "norm.weight"], "weight_decay": 0.0},
        {"params": "words.*", "lr": 1e-4},
        {"params": [model.scale], "betas": (0.5, 0.6)},
    ]
    made = to_torch(optim.AdamW(lr=1e-2, groups=groups), model).param_groups
    assert [names(model, g) for g in made] == [
        ["inner.bias", "norm.bias", "outer.bias", "norm.weight"], ["words.weight"], ["scale"],
        ["inner.weight", "outer.weight"],
    ]  # fmt: skip
    assert [g["weight_decay"] for g in made] == [0.0, 0.01, 0.01, 0.01]
    assert [g["lr"] for g in made] == [1e-2, 1e-4, 1e-2, 1e-2]
    assert made[2]["betas"] == (0.5, 0.6)


def test_groups_that_have_all_parameters_leave_no_other() -> None:
    made = to_torch(optim.SGD(groups=[{"params": "*", "lr": 0.5}]), mixed()).param_groups
    assert [g["lr"] for g in made] == [0.5]


def test_a_tied_weight_has_all_of_its_names() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(5, 4), nn.Linear(4, 5)
            self.head.weight = self.words.weight

    model = Tied()
    made = to_torch(optim.Lion(groups=[{"params": "head.weight"}]), model).param_groups
    assert made[0]["params"] == [model.words.weight]


REFUSED: dict[str, tuple[Any, str]] = {
    "no such name": ([{"params": "nope.*"}], r"groups\[0\] has the pattern 'nope.\*', which "),
    "one of two": ([{"params": ["*.bias", "bias"]}], "the pattern 'bias', which matches no "),
    "frozen": ([{"params": "frozen"}], "'frozen', which matches no parameter that requires grad"),
    "twice": (
        [{"params": "*.bias"}, {"params": "inner.*"}],
        r"groups\[0\] and groups\[1\] both have the parameter 'inner.bias'",
    ),
    "unknown setting": ([{"params": "*", "wd": 0.0}], "sets 'wd', which this optimizer does not"),
    "no params": ([{"lr": 0.1}], "has no 'params'"),
    "no dict": (["*.bias"], "has no 'params'"),
    "nothing": ([{"params": []}], "has no parameters"),
    "another's": ([{"params": [torch.zeros(3)]}], r"a parameter of shape \[3\] that the model"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_groups_that_cannot_be_meant_are_refused(name: str) -> None:
    groups, message = REFUSED[name]
    with pytest.raises(OnwardError, match=message) as error:
        onward.Trainer(mixed(), optim.AdamW(groups=groups))
    assert "\n" not in str(error.value) and "fix: " in str(error.value)


def test_lamb_leaves_the_ratio_out_where_a_group_says_so() -> None:
    """BERT's pre-training excludes biases and norms; limits that are both 1 give the same step."""
    plain = [{"params": ["*.bias", "norm.*"], "adapt": False}]
    limited = [{"params": ["*.bias", "norm.*"], "ratio_min": 1.0, "ratio_max": 1.0}]
    ends = []
    for groups in (plain, limited, ()):
        model = mixed()
        trainer = onward.Trainer(model, optim.LAMB(lr=0.02, groups=groups))
        for x, y in batches(6):
            trainer.train_step(x, y)
        ends.append([p.detach().clone() for p in model.parameters()])
    for p, q in zip(ends[0], ends[1], strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert any(not torch.allclose(p, q, atol=1e-3) for p, q in zip(ends[0], ends[2], strict=True))


SETTINGS_REFUSED: dict[str, tuple[Any, str]] = {
    "lr": (optim.Lion(lr=-1.0), "lr=-1.0 is not a setting; fix: 0 or more"),
    "nan": (optim.Lion(lr=math.nan), "lr=nan is not a setting"),
    "betas": (optim.LAMB(betas=(0.9, 1.0)), "below 1"),
    "limits": (optim.LAMB(ratio_min=2.0, ratio_max=1.0), "ratio_max=1.0 .* fix: 2 or more"),
    "adjust": (optim.MuonWithAdamW(adjust_lr_fn="mine"), "adjust_lr_fn='mine' is unknown"),
    "no matrix": (
        optim.MuonWithAdamW(groups=[{"params": "scale", "use_muon": True}]), "updates matrices",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS_REFUSED)
def test_settings_out_of_range_are_refused(name: str) -> None:
    description, message = SETTINGS_REFUSED[name]
    with pytest.raises(OnwardError, match=message):
        onward.Trainer(mixed(), description)


def test_muon_for_matrices_and_adamw_for_the_rest() -> None:
    model = mixed()
    description = optim.MuonWithAdamW(
        lr=0.02,
        weight_decay=0.1,
        groups=[{"params": "*.bias", "weight_decay": 0.0}],
        adamw="outer.*",
    )
    twin, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    trainer = onward.Trainer(model, description)
    found = {tuple(names(model, g)): g["use_muon"] for g in trainer.optimizer.param_groups}
    assert found == {
        ("inner.bias", "norm.bias", "outer.bias"): False,
        ("scale", "words.weight", "norm.weight", "outer.weight"): False,
        ("inner.weight",): True,
    }
    references = []
    for other in (twin, exact):
        held = dict(other.named_parameters())
        bias = [held[n] for n in ("inner.bias", "norm.bias", "outer.bias")]
        rest = [held[n] for n in ("scale", "words.weight", "norm.weight", "outer.weight")]
        groups = [{"params": bias, "weight_decay": 0.0}, {"params": rest}]
        adamw = torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1)
        references.append((adamw, held["inner.weight"], {}))
    steps = 20
    for i, (x, y) in enumerate(batches(steps)):
        trainer.train_step(x, y)
        for other, (adamw, matrix, state) in zip((twin, exact), references, strict=True):
            adamw.zero_grad()
            matrix.grad = None
            other(x, y)["loss"].backward()
            adamw.step()
            with torch.no_grad():
                muon(
                    matrix, matrix.grad, state, i + 1, lr=0.02, weight_decay=0.1, momentum=0.95,
                    nesterov=True, ns_coefficients=(3.4445, -4.775, 2.0315), eps=1e-7, ns_steps=5,
                    adjust_lr_fn="match_rms_adamw",
                )  # fmt: skip
    for (n, p), q, r in zip(
        model.named_parameters(), twin.parameters(), exact.parameters(), strict=True
    ):
        far, own = (p.double() - r).norm(), (q.double() - r).norm()
        assert far <= 2 * own + 1e-5 * r.norm(), n
    assert set(trainer.optimizer.state[model.inner.weight]) == {"momentum_buffer"}
    assert set(trainer.optimizer.state[model.scale]) == {"step", "exp_avg", "exp_avg_sq"}


def test_muon_with_adamw_goes_on_in_eager() -> None:
    model = mixed()
    trainer = onward.Trainer(model, optim.MuonWithAdamW(lr=0.01))
    for x, y in batches(3):
        trainer.train_step(x, y)
    twin = mixed()
    twin.load_state_dict(model.state_dict())
    theirs = to_torch(optim.MuonWithAdamW(lr=0.01), twin)
    theirs.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))
    x, y = next(batches(1))
    trainer.train_step(x, y)
    twin(x, y)["loss"].backward()
    theirs.step()
    for (n, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        matrix = n in ("inner.weight", "outer.weight")  # in bf16, in torch
        torch.testing.assert_close(p, q, rtol=0.0, atol=5e-3 if matrix else 1e-5, msg=n)
        have, want = trainer.optimizer.state.get(p, {}), theirs.state.get(q, {})
        torch.testing.assert_close(dict(have), dict(want), rtol=1e-4, atol=1e-6)


def test_a_described_run_is_saved_and_resumed(tmp_path: Any) -> None:
    groups = [{"params": "*.bias", "weight_decay": 0.0}]
    for description in (optim.MuonWithAdamW(groups=groups), optim.NAdam(groups=groups)):
        one, two = mixed(), mixed()
        first, second = onward.Trainer(one, description), onward.Trainer(two, description)
        given = list(batches(6))
        for x, y in given[:3]:
            first.train_step(x, y)
        folder = tmp_path / type(description).__name__
        first.save(folder)
        second.resume(folder)
        for x, y in given[3:]:
            first.train_step(x, y)
            second.train_step(x, y)
        assert all(
            torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True)
        )
