"""Batches in parts (auto_micro_batch): the step of the whole batch, or a refusal in one line.

A table says into how many parts a batch is split here; a real shortage is in test_shortages.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import onward
from onward.errors import OnwardError, OutOfMemoryError
from onward.execute import Executable

F = nn.functional


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=61, n_layer=2, n_embd=32, n_head=2, n_positions=32, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=48, max_position_embeddings=32,
        )
    )  # fmt: skip


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))


def words(samples: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 61, (samples, length))
    labels = ids.clone()
    labels[: samples // 2, 3:] = -100  # other numbers of labels in each part
    return {"input_ids": ids, "labels": labels}


def padded(samples: int, length: int) -> dict[str, torch.Tensor]:
    batch = words(samples, length)
    mask = torch.ones_like(batch["input_ids"])
    mask[1::2, length // 2 :] = 0
    return batch | {"attention_mask": mask}


def points(samples: int, length: int) -> dict[str, torch.Tensor]:
    del length
    return {"input": torch.randn(samples, 6), "labels": torch.randint(0, 3, (samples,))}


Make = tuple[Callable[[], nn.Module], Callable[[int, int], dict[str, torch.Tensor]], Any]
MODELS: dict[str, Make] = {
    "gpt2": (gpt2, words, None),
    "padded bert": (bert, padded, None),
    "cross entropy": (classifier, points, F.cross_entropy),
    "a mean of squares": (
        classifier, points, lambda found, y: (found - y[:, None].float()).square().mean(),
    ),
}  # fmt: skip


def trained(
    make: Make, parts: int, lr: float = 0.5, **options: Any
) -> tuple[nn.Module, list[onward.StepResult], onward.Trainer]:
    """Three batches of other lengths, each in so many parts."""
    model, batch, loss_fn = make
    torch.manual_seed(0)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    options = {"auto_micro_batch": True, "max_grad_norm": 1.0} | options
    trainer = onward.Trainer(net, optimizer, loss_fn, options=options)
    found: list[onward.StepResult] = []
    for length in (9, 12, 7):
        given = batch(7, length)
        split_into(trainer, given, parts)
        found.append(trainer.train_step(given, fetch="output" if loss_fn else "logits"))
    return net, found, trainer


def split_into(trainer: onward.Trainer, batch: dict[str, torch.Tensor], parts: int) -> None:
    bound = trainer._bind((), dict(batch))
    trainer._parts._counts[bound.signature] = parts


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("parts", [2, 3, 7])
@pytest.mark.parametrize("name", MODELS)
def test_parts_are_the_step_of_the_whole_batch(name: str, parts: int, window: int) -> None:
    """Loss, norm of the gradient, outputs and weights; dropout is on."""
    options = {"gradient_accumulation_steps": window}
    whole, wanted, _ = trained(MODELS[name], 1, **options)
    split, found, trainer = trained(MODELS[name], parts, **options)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.loss, other.loss, rtol=1e-5, atol=1e-6)
        assert (one.updated, one.skipped) == (other.updated, other.skipped)
        if other.grad_norm is not None:
            torch.testing.assert_close(one.grad_norm, other.grad_norm, rtol=1e-4, atol=1e-6)
        if other.window_loss is not None:
            torch.testing.assert_close(one.window_loss, other.window_loss, rtol=1e-5, atol=1e-6)
        for key, output in other.outputs.items():
            torch.testing.assert_close(one.outputs[key], output, rtol=1e-4, atol=1e-5)
    for a, b in zip(split.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert trainer.micro_steps == 0
    assert trainer.updates == 3 // window


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_parts_in_mixed_precision(precision: str) -> None:
    make, scale = MODELS["gpt2"], {"loss_scale": 1024} if precision == "fp16" else {}
    whole, wanted, _ = trained(make, 1, mixed_precision=precision, **scale)
    split, found, _ = trained(make, 3, mixed_precision=precision, **scale)
    assert [r.updated for r in found] == [r.updated for r in wanted]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.loss, other.loss, rtol=2e-2, atol=1e-2)
    for a, b in zip(split.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=5e-2, atol=2e-2)


# ---- what cannot be split


class Contrastive(nn.Module):
    """The other samples of the batch are the negatives."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(6, 8)

    def forward(self, input: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.a(input) @ self.b(input).T + labels[:, None]
        return F.cross_entropy(scores, torch.arange(len(input), device=input.device))


class Returning(nn.Module):
    """A model that returns its loss, of the logits of an inner one."""

    def __init__(self, inner: nn.Module, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.loss = inner, loss

    def forward(self, input: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(self.inner(input), labels)


class Standardized(nn.Module):
    """Standardizes by the batch's own mean and deviation, without buffers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean(0)) / (x.std(0) + 1e-3)


class FirstToLast(nn.Module):
    """Adds to each sample the one after it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.roll(1, 0)


def on_logits(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: Returning(nn.Sequential(*layers, nn.Linear(6, 3)), F.cross_entropy)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "contrastive": (Contrastive, "depend on each other|does not say"),
    "statistics of the batch": (on_logits(Standardized()), "depend on each other"),
    "neighbours": (on_logits(FirstToLast()), "depend on each other|does not say"),
    "batch norm": (on_logits(nn.BatchNorm1d(6)), "writes the buffer"),
    "a sum": (
        lambda: Returning(nn.Linear(6, 3), lambda x, y: F.cross_entropy(x, y, reduction="sum")),
        "not a mean",
    ),
    "two means": (
        lambda: Returning(nn.Linear(6, 3), lambda x, y: F.cross_entropy(x, y) + x.square().mean()),
        "not a mean",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_split_is_refused_and_nothing_has_changed(name: str) -> None:
    make, words_ = REFUSED[name]
    torch.manual_seed(0)
    net = make()
    trainer = onward.Trainer(net, onward.optim.SGD(lr=0.1), options={"auto_micro_batch": True})
    trainer.train_step(points(6, 0))  # whole, it trains
    before, batch = copy.deepcopy(trainer.state_dict()), points(8, 0)
    split_into(trainer, batch, 2)
    with pytest.raises(OnwardError, match=words_) as error:
        trainer.train_step(batch)
    assert len(str(error.value)) < 300
    after = trainer.state_dict()
    assert all(torch.equal(x, after["model"][k]) for k, x in before["model"].items())
    assert (after["updates"], trainer.micro_steps) == (before["updates"], 0)
    trainer.train_step(points(6, 0))


def test_an_input_that_is_as_long_by_chance_is_refused() -> None:
    """A table with as many rows as the batch has samples would be cut."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(6, 3)

        def forward(
            self, input: torch.Tensor, table: torch.Tensor, labels: torch.Tensor
        ) -> torch.Tensor:
            return F.cross_entropy(self.body(input) + table.mean(0), labels)

    trainer = onward.Trainer(Table(), onward.optim.SGD(lr=0.1), options={"auto_micro_batch": True})
    batch = points(8, 0) | {"table": torch.randn(8, 3)}
    split_into(trainer, batch, 2)
    with pytest.raises(OnwardError, match=r"does not say which inputs|depend on each other"):
        trainer.train_step(batch)
    batch["table"] = torch.randn(5, 3)  # of another length it goes with every part
    split_into(trainer, batch, 2)
    assert trainer.train_step(batch).updated


def test_a_mean_that_counts_no_labels_contradicts_it() -> None:
    options = {"auto_micro_batch": True, "gradient_accumulation_average": "micro_batches"}
    with pytest.raises(OnwardError, match=r"auto_micro_batch .*by their labels, .*; fix: leave"):
        onward.TrainerOptions.of(options)
    for average in ("auto", "labels"):
        options["gradient_accumulation_average"] = average
        assert onward.TrainerOptions.of(options).auto_micro_batch


# ---- faults in the middle


def interrupting(monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException) -> None:
    """Has the run of a part with this number raise."""
    real, count = Executable.run, [0]

    def run(self: Executable, *args: Any, **kwargs: Any) -> bool:
        count[0] += len(args) > 2  # those that only look at a batch give no `done`
        if count[0] == at:
            raise error
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Executable, "run", run)


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("a kernel")])
def test_a_step_that_fails_between_parts_has_not_been(at: int, error: BaseException) -> None:
    make, batch = MODELS["gpt2"], words(6, 9)
    nets = [trained(make, 2) for _ in range(2)]
    for i, (_, _, trainer) in enumerate(nets):
        split_into(trainer, batch, 3)
        if i == 0:
            with pytest.MonkeyPatch.context() as patch:
                interrupting(patch, at, error)
                with pytest.raises(type(error)):
                    trainer.train_step(batch)
            assert trainer.micro_steps == 0
        trainer.train_step(batch)
    first, second = (net.state_dict() for net, _, _ in nets)
    assert all(torch.equal(x, second[name]) for name, x in first.items())


def test_a_part_that_fails_in_an_open_window_is_told() -> None:
    _, _, trainer = trained(MODELS["cross entropy"], 1, gradient_accumulation_steps=3)
    saved, batch = trainer.state_dict(), points(6, 9)
    split_into(trainer, batch, 3)
    trainer.train_step(batch)
    with pytest.MonkeyPatch.context() as patch:
        interrupting(patch, 2, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            trainer.train_step(batch)
    with pytest.raises(OnwardError, match=r"a batch in parts.*load_state_dict"):
        trainer.train_step(batch)
    trainer.load_state_dict(saved)
    assert trainer.train_step(batch).loss.isfinite()


def test_parts_are_halved_until_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of more than two samples are short of memory here."""
    real = Executable.run

    def run(self: Executable, inputs: Any, dims: Any = None, *rest: Any, **named: Any) -> bool:
        if max(dims.values(), default=1) > 2:
            raise OutOfMemoryError("out of memory")
        return real(self, inputs, dims, *rest, **named)

    make = MODELS["cross entropy"]
    whole, wanted, _ = trained(make, 1)
    torch.manual_seed(0)
    net = make[0]()
    trainer = onward.Trainer(
        net,
        torch.optim.SGD(net.parameters(), lr=0.5),
        make[2],
        options={"auto_micro_batch": True, "max_grad_norm": 1.0},
    )
    batches = [points(7, 0) for _ in range(3)]
    monkeypatch.setattr("onward.train.micro_batches._TRIED", 2)
    monkeypatch.setattr(Executable, "run", run)
    found = [trainer.train_step(b) for b in batches]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.loss, other.loss, rtol=1e-5, atol=1e-6)
    for a, b in zip(net.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert set(trainer._parts._counts.values()) == {4}


def test_one_sample_that_does_not_fit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args: Any, **named: Any) -> bool:
        raise OutOfMemoryError("out of memory")

    _, _, trainer = trained(MODELS["cross entropy"], 1)
    monkeypatch.setattr(Executable, "run", run)
    with pytest.raises(OutOfMemoryError):
        trainer.train_step(points(4, 0))
    monkeypatch.undo()
    assert trainer.train_step(points(4, 0)).updated
