"""An accumulation window beside eager PyTorch's one big batch, where micro-batches hold different
numbers of labels; and windows that `update()` ends early."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from states import alike
from tiny import Tensors, batch, bert, gpt2, mlp
from torch import nn

import onward
from onward import OnwardError

pytestmark = pytest.mark.usefixtures("captures_kept")

CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-6}
LOW: dict[str, Any] = {"rtol": 0.02, "atol": 0.004}


def language_batches() -> list[Tensors]:
    """Micro-batches with 0 to 24 labels, the first without any, the last smaller."""
    made = [
        batch(3, 9, padding="right", seed=0),
        batch(3, 9, padding="left", ignored=True, seed=1),
        batch(3, 9, padding="middle", seed=2),
        batch(2, 9, padding="right", ignored=True, seed=3),
    ]
    made[0]["labels"][:] = -100
    return made


def big_batch(batches: Sequence[Tensors]) -> Tensors:
    return {key: torch.cat([b[key] for b in batches]) for key in batches[0]}


def optimizer_of(model: nn.Module, kind: str = "sgd") -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=1.0)
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)


def eager(model: nn.Module, batches: Sequence[Tensors], optimizer: str, norm: float | None) -> Any:
    """A copy of the model after one update by one big batch, the loss, and the gradients' norm."""
    twin = copy.deepcopy(model)
    made = optimizer_of(twin, optimizer)
    loss = twin(**big_batch(batches)).loss
    loss.backward()
    found = torch.nn.utils.clip_grad_norm_(twin.parameters(), norm or 3e38)
    made.step()
    return twin, loss.detach(), found


def assert_same(model: nn.Module, twin: nn.Module, **tolerance: Any) -> None:
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), **(tolerance or CLOSE))


MODELS: dict[str, Any] = {"gpt2": lambda: gpt2(0.0, layers=1), "bert": lambda: bert(0.0, layers=1)}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "labels": {"gradient_accumulation_average": "labels"},
    "every row": {"disable": "row_demand"},
    "clipped": {"max_grad_norm": 0.05},
    "budget": {"memory_budget": 0.5},
    "unskipped": {"skip_nonfinite": False},
    "logits": {"fetch": "logits"},
    "bf16 sums": {"gradient_accumulation_dtype": "bf16"},
    "bf16": {"mixed_precision": "bf16"},
    "fp16": {"mixed_precision": "fp16"},
    "fixed scale": {"mixed_precision": "fp16", "loss_scale": 64.0, "max_grad_norm": 0.05},
    "verified": {"verify": True},
}
LOWER = ("bf16 sums", "bf16", "fp16", "fixed scale")


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "setting", "optimizer"),
    [("gpt2", setting, "sgd") for setting in SETTINGS]
    + [("bert", "plain", "sgd"), ("bert", "clipped", "adamw"), ("gpt2", "plain", "adamw")],
)
@pytest.mark.parametrize("early", [False, True], ids=["whole", "early"])
def test_a_window_is_one_big_batch(name: str, setting: str, optimizer: str, early: bool) -> None:
    """`early`: the window has room for three more micro-batches, and `update()` ends it."""
    model, batches = MODELS[name](), language_batches()
    options = SETTINGS[setting]
    if setting == "verified":  # whose first batch must have a loss
        batches.reverse()
    twin, loss, norm = eager(model, batches, optimizer, options.get("max_grad_norm"))
    trainer: Any = onward.Trainer(
        model, optimizer_of(model, optimizer),
        options={"gradient_accumulation_steps": len(batches) + 3 * early, **options},
    )  # fmt: skip
    for i, data in enumerate(batches):
        result = trainer.train_step(**data)
        assert (result.window_loss is not None) == result.updated == (i == 3 and not early)
    if early:
        result = trainer.update()
    low = setting in LOWER
    torch.testing.assert_close(result.window_loss, loss, **(LOW if low else CLOSE))
    assert_same(model, twin, **(LOW if low else CLOSE))
    assert trainer.updates == 1
    assert trainer.micro_steps == 0
    if "max_grad_norm" in options:
        torch.testing.assert_close(result.grad_norm, norm, **(LOW if low else CLOSE))


def test_a_window_without_labels_is_eagers() -> None:
    """The loss is no number, gradients are zeros, and AdamW's decay acts all the same."""
    model, [first, *_] = gpt2(0.0, layers=1), language_batches()
    twin, loss, _ = eager(model, [first, first], "adamw", None)
    assert loss.isnan()
    trainer: Any = onward.Trainer(
        model, optimizer_of(model, "adamw"), options={"gradient_accumulation_steps": 2}
    )
    trainer.train_step(**first)
    result = trainer.train_step(**first)
    assert result.window_loss is not None
    assert result.window_loss.isnan()
    assert_same(model, twin)


def test_windows_one_after_the_other() -> None:
    """Sums of one window do not reach into the next, early or whole; AdamW's moments go on."""
    model, batches = gpt2(0.0, layers=1), language_batches()
    twin = copy.deepcopy(model)
    ours, theirs = optimizer_of(model, "adamw"), optimizer_of(twin, "adamw")
    trainer: Any = onward.Trainer(model, ours, options={"gradient_accumulation_steps": 3})
    for window in (batches[:3], batches[1:3], batches[2:], batches[1:], batches[3:]):
        for data in window:
            result: Any = trainer.train_step(**data)
        if len(window) < 3:
            result = trainer.update()
        assert trainer.update() is None
        loss = twin(**big_batch(window)).loss
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        torch.testing.assert_close(result.window_loss, loss.detach(), **CLOSE)
        assert_same(model, twin)
    assert trainer.updates == 5


# ---- which losses are means over labels

Y = 5  # classes of an Mlp


def masked(out: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    each = F.cross_entropy(out, y.clamp(min=0), reduction="none")
    return each, (y != -100).float()


def over_mask(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    each, mask = masked(out, y)
    return (each * mask).sum() / mask.sum()


def over_clamped(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    each, mask = masked(out, y)
    return (each * mask).sum() / mask.sum().clamp(min=7)


def over_more(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    each, mask = masked(out, y)
    return 3 * (each * mask).sum() / (mask.sum() + 2)


def weighted(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out, y, weight=torch.tensor([1.0, 2.0, 0.5, 3.0, 0.25]))


def squared(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((out - y[:, None]) ** 2).mean() / 10000


MEANS: dict[str, Any] = {
    "cross entropy": F.cross_entropy,
    "another index": lambda out, y: F.cross_entropy(out, y.clamp(min=0), ignore_index=0),
    "class weights": weighted,
    "smoothed": lambda out, y: F.cross_entropy(out, y, label_smoothing=0.2),
    "nll": lambda out, y: F.nll_loss(out.log_softmax(1), y),
    "half": lambda out, y: 0.5 * F.cross_entropy(out, y) / 3,
    "masked": over_mask,
    "masked, clamped": over_clamped,
    "masked, more": over_more,
    "rows": squared,
    "negative": lambda out, y: -(out.log_softmax(1)[:, 0]).mean(),
    "by length": lambda out, y: out.square().sum() / out.shape[0],
}
OTHERS: dict[str, tuple[Any, str]] = {
    "sum": (lambda out, y: F.cross_entropy(out, y, reduction="sum") / 9, "a sum, not a mean"),
    "two means": (
        lambda out, y: F.cross_entropy(out, y) + out.square().mean(), "ends in Add",
    ),
    "two counts": (
        lambda out, y: F.cross_entropy(out, y) + F.cross_entropy(out, y.clamp(min=0)),
        "ends in Add",
    ),
    "classes": (lambda out, y: out.mean(0).exp().mean(), "not over the samples"),
    "pairs": (lambda out, y: (out @ out.T).square().mean(), "not over the samples"),
    "trained divisor": (lambda out, y: out.sum() / out.square().sum(), "depends on a Gemm"),
    "share": (
        lambda out, y: out.sum() / ((y > 0) / (y > 0).sum()).sum(), "depends on a ReduceSum",
    ),
    "largest": (lambda out, y: out.square().max(), "ends in ReduceMax"),
}  # fmt: skip


def rows(n: int, labels: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs f32[n, 8] and targets i64[n], of which `labels` count."""
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randn(n, 8, generator=draw), torch.randint(1, Y, (n,), generator=draw)
    y[labels:] = -100
    return x, y


def window() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [rows(6, 6, 1), rows(6, 2, 2), rows(6, 0, 3), rows(4, 3, 4)]


def moved(loss_fn: Any, **options: Any) -> tuple[nn.Module, list[Any]]:
    model = mlp()
    trainer: Any = onward.Trainer(
        model, optimizer_of(model), loss_fn, options={"gradient_accumulation_steps": 4, **options}
    )
    return model, [trainer.train_step(x, target=y) for x, y in window()]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MEANS)
def test_losses_that_are_means(name: str) -> None:
    loss_fn = MEANS[name]
    model, results = moved(loss_fn, gradient_accumulation_average="labels")
    twin = mlp()
    x, y = (torch.cat(parts) for parts in zip(*window(), strict=True))
    loss = loss_fn(twin(x), y)
    loss.backward()
    optimizer_of(twin).step()
    assert_same(model, twin)
    torch.testing.assert_close(results[-1].window_loss, loss.detach(), **CLOSE)
    for result, (x, y) in zip(results[:1], window(), strict=False):
        torch.testing.assert_close(result.loss, loss_fn(mlp()(x), y).detach(), **CLOSE)


def over_rows(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A mean over samples of their own means."""
    return out.square().mean(-1).mean()


ONE_ROW: dict[str, Any] = {
    "means of means": over_rows,
    "kept dims": lambda out, y: out.square().mean(-1, keepdim=True).mean(),
    "means of sums": lambda out, y: out.square().sum(-1).mean(),
    "one output": lambda out, y: F.mse_loss(out[:, :1], y[:, None] / 100.0),
    "squeezed": lambda out, y: (out[:, :1].squeeze(-1) - y / 100.0).square().mean(),
    "one logit": lambda out, y: F.binary_cross_entropy_with_logits(out[:, 0], (y > 2).float()),
    "each": lambda out, y: masked(out, y)[0].mean(),
    "one by one": lambda out, y: -F.logsigmoid(out[:, 0] - out[:, 1]).mean(),
    "scaled": lambda out, y: 0.5 * out.square().mean(-1).mean() / 3,
    "wrapped": lambda out, y: F.cross_entropy(out, y).unsqueeze(0).mean(),
    "wrapped twice": lambda out, y: F.cross_entropy(out, y).reshape(1, 1).mean(),
    "stacked": lambda out, y: torch.stack([F.cross_entropy(out, y)]).mean(),
    "by one dim, then the other": lambda out, y: out.square().mean(1).mean(0),
    "of a norm": lambda out, y: out.norm(dim=1).mean(),
    "of a largest": lambda out, y: out.amax(dim=1).mean(),
    "of a row each": lambda out, y: out.square().reshape(len(out), -1).mean(1).mean(),
    "transposed": lambda out, y: out.square().T.mean(0).mean(),
    "logsumexp": lambda out, y: out.logsumexp(1).mean(),
    "smooth": lambda out, y: F.smooth_l1_loss(out.mean(1), y / 100.0),
    "no dim": lambda out, y: F.cross_entropy(out, y).mean(),
    "sum of one": lambda out, y: (out[:, 0].square() * (y > 0)).sum() / (y > 0).sum(),
}


@pytest.mark.parametrize("name", [name for name in [*MEANS, *ONE_ROW] if name != "by length"])
def test_a_micro_batch_of_one_row(name: str) -> None:
    """A row counts alike in a micro-batch of its own, whose graph shows no number of samples."""
    loss_fn = (MEANS | ONE_ROW)[name]
    parts = [rows(6, 5, 1), rows(1, 1, 2), rows(5, 3, 3), rows(1, 1, 4)]
    model, twin = mlp(), mlp()
    trainer: Any = onward.Trainer(
        model, optimizer_of(model), loss_fn,
        options={"gradient_accumulation_steps": 4, "gradient_accumulation_average": "labels"},
    )  # fmt: skip
    results = [trainer.train_step(x, target=y) for x, y in parts]
    x, y = (torch.cat(each) for each in zip(*parts, strict=True))
    loss = loss_fn(twin(x), y)
    loss.backward()
    optimizer_of(twin).step()
    assert_same(model, twin)
    torch.testing.assert_close(results[-1].window_loss, loss.detach(), **CLOSE)


def test_a_sum_over_one_row_is_no_mean() -> None:
    """One row divided by their number is the sum, which a mean over rows would not be."""
    model = mlp()
    trainer: Any = onward.Trainer(
        model, optimizer_of(model), MEANS["by length"], options={"gradient_accumulation_steps": 2}
    )
    x, y = rows(6, 5, 1)
    trainer.train_step(x, target=y)
    with pytest.raises(OnwardError, match="is the mean over its labels, but this micro-batch's"):
        trainer.train_step(x[:1], target=y[:1])


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", OTHERS)
def test_losses_that_are_not(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Refused where labels are asked for; else the mean of the micro-batches' losses, as is said in
    one line."""
    loss_fn, reason = OTHERS[name]
    with pytest.raises(OnwardError, match=rf"needs a loss that is a mean: .*{reason}.*; fix:"):
        moved(loss_fn, gradient_accumulation_average="labels")
    with caplog.at_level(logging.WARNING, logger="onward"):
        first = rows(6, 6, 1), rows(6, 2, 2)
        model = mlp()
        trainer: Any = onward.Trainer(
            model, optimizer_of(model), loss_fn, options={"gradient_accumulation_steps": 2}
        )
        results = [trainer.train_step(x, target=y) for x, y in first]
    assert [r.getMessage() for r in caplog.records if reason in r.getMessage()]
    twin = mlp()
    loss = torch.stack([loss_fn(twin(x), y) for x, y in first]).mean()
    loss.backward()
    optimizer_of(twin).step()
    assert_same(model, twin)
    torch.testing.assert_close(results[-1].window_loss, loss.detach(), **CLOSE)


@pytest.mark.parametrize("count", [1, 3, 4])
def test_the_mean_of_micro_batches(count: int) -> None:
    """Asked for, it is the mean over the micro-batches that there were."""
    model, batches = gpt2(0.0, layers=1), language_batches()[1:] * 2
    twin = copy.deepcopy(model)
    trainer: Any = onward.Trainer(
        model, optimizer_of(model),
        options={
            "gradient_accumulation_steps": 4, "gradient_accumulation_average": "micro_batches",
        },
    )  # fmt: skip
    for data in batches[:count]:
        result = trainer.train_step(**data)
    result = trainer.update() or result
    loss = torch.stack([twin(**data).loss for data in batches[:count]]).mean()
    loss.backward()
    optimizer_of(twin).step()
    assert_same(model, twin)
    torch.testing.assert_close(result.window_loss, loss.detach(), **CLOSE)


def test_one_window_takes_one_mean() -> None:
    model = mlp()
    trainer: Any = onward.Trainer(
        model, optimizer_of(model), F.cross_entropy, options={"gradient_accumulation_steps": 2}
    )
    trainer.train_step(*rows(6, 6, 1))
    trainer.loss_fn = OTHERS["sum"][0]
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(OnwardError, match="is the mean over its labels, but this micro-batch's"):
        trainer.train_step(*rows(6, 6, 2))
    assert trainer.micro_steps == 1
    assert alike(model.state_dict(), before)
    trainer.loss_fn = F.cross_entropy
    assert trainer.train_step(*rows(6, 6, 2)).updated


# ---- saved and resumed in a window

WAYS: dict[str, dict[str, Any]] = {
    "labels": {},
    "micro-batches": {"gradient_accumulation_average": "micro_batches"},
    "fp16": {"mixed_precision": "fp16", "max_grad_norm": 0.1},
    "bf16 moments": {"optimizer_state": "bf16", "gradient_accumulation_dtype": "bf16", "seed": 3},
}


def trainer_of(model: nn.Module, **options: Any) -> Any:
    return onward.Trainer(
        model, optimizer_of(model, "adamw"), options={"gradient_accumulation_steps": 4, **options}
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_resumed_in_a_window(way: str, at: int, tmp_path: Path) -> None:
    """To the bit, from a checkpoint and from a state_dict, to the window's own end and by
    `update()`, which needs no step in the new process."""
    batches = language_batches()[1:] * 3
    model = gpt2(0.1, layers=1)
    trainer = trainer_of(model, **WAYS[way])
    for data in batches[: 4 + at]:
        trainer.train_step(**data)
    path, state = trainer.save(tmp_path), trainer.state_dict()
    other, third = gpt2(0.1, layers=1), gpt2(0.1, layers=1)
    again, early = trainer_of(other, **WAYS[way]), trainer_of(third, **WAYS[way])
    again.resume(path)
    early.load_state_dict(state)
    ours, theirs = trainer.state_dict(), again.state_dict()
    assert alike(ours, theirs)
    result = early.update()
    for data in batches[4 + at : 8]:
        ends = [t.train_step(**data) for t in (trainer, again)]
    assert alike(other.state_dict(), model.state_dict())
    assert torch.equal(ends[0].window_loss, ends[1].window_loss)
    trainer.load_state_dict(state)
    want = trainer.update()
    assert alike(third.state_dict(), model.state_dict())
    assert torch.equal(result.window_loss, want.window_loss)


def test_a_window_saved_by_an_older_version() -> None:
    """Micro-batches counted as one each then."""
    kept = {"gradient_accumulation_average": "micro_batches"}
    batches = language_batches()[1:]
    model, other = gpt2(0.0, layers=1), gpt2(0.0, layers=1)
    trainer, again = trainer_of(model, **kept), trainer_of(other, **kept)
    for data in batches[:2]:
        trainer.train_step(**data)
    state = trainer.state_dict()
    del state["window_sums"], state["window_by_labels"]
    again.load_state_dict(state)
    trainer.update()
    result = again.update()
    assert alike(other.state_dict(), model.state_dict())
    assert result.window_loss.isnan()
    labels = trainer_of(gpt2(0.0, layers=1))
    labels.load_state_dict(state)
    with pytest.raises(OnwardError, match="is the mean of the micro-batches' losses, but this"):
        labels.train_step(**batches[2])


@pytest.mark.parametrize("key", ["window_sums", "window_by_labels"])
def test_a_damaged_window_is_refused(key: str) -> None:
    model = mlp()
    trainer: Any = onward.Trainer(model, optimizer_of(model), F.cross_entropy)
    state = trainer.state_dict() | {key: torch.zeros(3)}
    with pytest.raises(OnwardError, match=f"does not fit this Trainer: {key}"):
        trainer.load_state_dict(state)


# ---- update() and what else may happen


def test_update_of_an_empty_window_does_nothing() -> None:
    model = mlp()
    trainer: Any = onward.Trainer(model, optimizer_of(model, "adamw"), F.cross_entropy)
    assert trainer.update() is None
    trainer.train_step(*rows(6, 6, 1))
    before, state = copy.deepcopy(model.state_dict()), trainer.state_dict()
    assert trainer.update() is None
    assert alike(model.state_dict(), before)
    assert alike(trainer.state_dict(), state)


def test_update_skips_what_is_not_finite() -> None:
    model = mlp()
    trainer: Any = onward.Trainer(
        model, optimizer_of(model), F.cross_entropy,
        options={"gradient_accumulation_steps": 4, "mixed_precision": "fp16"},
    )  # fmt: skip
    before, scale = copy.deepcopy(model.state_dict()), trainer.loss_scale
    x, y = rows(6, 6, 1)
    trainer.train_step(x, y)
    trainer.train_step(x.fill_(torch.inf), y)
    result = trainer.update()
    assert result.skipped
    assert not result.updated
    assert trainer.loss_scale == scale / 2
    assert trainer.updates == trainer.micro_steps == 0
    assert alike(model.state_dict(), before)
    trainer.train_step(*rows(6, 6, 1))
    assert trainer.update().updated


def test_update_of_changed_parameters_is_refused() -> None:
    """A micro-batch that trains other parameters than those before it is refused likewise."""
    model = mlp()
    trainer: Any = onward.Trainer(
        model, optimizer_of(model), F.cross_entropy, options={"gradient_accumulation_steps": 2}
    )
    trainer.train_step(*rows(6, 6, 1))
    model.inner.requires_grad_(False)
    with pytest.raises(OnwardError, match="got gradients in some micro-batches"):
        trainer.update()
    model.inner.requires_grad_(True)
    assert trainer.update().updated


def test_update_reads_the_learning_rate_and_parameters_in_place() -> None:
    """A transposed parameter keeps its memory, and a rate set before `update()` counts."""
    model = mlp()
    model.inner.weight = nn.Parameter(model.inner.weight.detach().T.contiguous().T)
    twin, address = copy.deepcopy(model), model.inner.weight.data_ptr()
    optimizer = optimizer_of(model)
    trainer: Any = onward.Trainer(
        model, optimizer, F.cross_entropy, options={"gradient_accumulation_steps": 2}
    )
    for rate in (1.0, 0.25):
        x, y = rows(6, 6, 1)
        trainer.train_step(x, y)
        optimizer.param_groups[0]["lr"] = rate
        result = trainer.update()
        assert result.lr == rate
        made = torch.optim.SGD(twin.parameters(), lr=rate)
        made.zero_grad()
        F.cross_entropy(twin(x), y).backward()
        made.step()
    assert_same(model, twin)
    assert model.inner.weight.data_ptr() == address
