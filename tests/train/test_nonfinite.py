"""Infinite and NaN gradients: the update is skipped, their origin named, and a lost run stopped."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

import onward

NAN, INF = float("nan"), float("inf")


class Scores(nn.Module):
    """A model whose middle function is given; `inner` lets a path be named."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.inner = Inner(function)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = self.last(self.inner(self.first(x))).squeeze(-1)
        return (found - y).pow(2).mean()


class Inner(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def batch(**places: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of 5 samples; `x=NAN` and the like put a number into it."""
    generator = torch.Generator().manual_seed(5)
    x, y = (
        torch.randn(5, 4, generator=generator),
        torch.randn(5, generator=generator),
    )
    for name, number in places.items():
        {"x": x[1], "y": y}[name][2] = number
    return x, y


def trainer_of(model: nn.Module, **options: Any) -> onward.Trainer:
    return onward.Trainer(model, torch.optim.AdamW(model.parameters(), lr=1e-3), options=options)


def state_of(trainer: onward.Trainer) -> list[torch.Tensor]:
    state = trainer.state_dict()
    return [t.clone() for part in ("model", "optimizer") for t in state[part].values()]


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    """Whether tensors are equal to the bit, NaN included."""
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        if a.dim()
        else bool((a == b) | (a.isnan() & b.isnan()))
        for a, b in zip(found, wanted, strict=True)
    )


# what is done, the origin: kind, op or input, module, worst number
FAULTS: dict[str, tuple[Callable[..., Any], dict[str, float], tuple[str, str, str, str]]] = {
    "NaN in the batch": (torch.tanh, {"x": NAN}, ("batch", "x", "", "NaN")),
    "an infinite target": (torch.tanh, {"y": INF}, ("batch", "y", "", "an infinite number")),
    "a logarithm of what is negative": (
        lambda h: torch.log(h - h.abs() - 1), {}, ("op", "Log", "inner", "NaN"),
    ),
    "a division by zero": (
        lambda h: h / (h - h), {}, ("op", "Div", "inner", "an infinite number"),
    ),
    "an exponential": (
        lambda h: torch.exp(h * 1e4), {}, ("op", "Exp", "inner", "an infinite number"),
    ),
    "the gradient of a root of zero": (
        lambda h: torch.sqrt(h * 0), {}, ("op", "", "inner", "an infinite number"),
    ),
    "a masked row without a place": (
        lambda h: torch.softmax(h.masked_fill(h < 1e9, -INF), -1),
        {}, ("op", "Softmax", "inner", "NaN"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_origin_is_named_and_nothing_changes(fault: str, steps: int) -> None:
    function, places, (kind, name, module, worst) = FAULTS[fault]
    model = Scores(torch.tanh)
    trainer = trainer_of(model, gradient_accumulation_steps=steps)
    for _ in range(steps):
        trainer.train_step(*batch())
    assert trainer.nonfinite_origin() is None
    before = state_of(trainer)
    model.inner.function = function
    results = [trainer.train_step(*batch(**places)) for _ in range(steps)]
    origin = trainer.nonfinite_origin()
    assert same(state_of(trainer), before)
    assert results[-1].skipped and not results[-1].updated
    assert origin is not None
    if steps > 1:  # the first micro-batch has left its gradients in the window's sums
        assert origin.kind in (kind, "state")
        return
    chain = [origin] if origin.infinite is None else [origin, origin.infinite]
    told = [(o.kind, o.module, o.worst.words) for o in chain]
    at = told.index((kind, module, worst))  # an infinite number becomes NaN further on
    assert name in chain[at].name and str(chain[at]) in str(origin)


def eager_origin(model: nn.Module, call: Callable[[], Any]) -> str:
    """The path of the first module whose output is not finite although its inputs are, in eager
    PyTorch."""
    found: list[str] = []

    def look(path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            tensors = [t for t in args if isinstance(t, torch.Tensor) and t.is_floating_point()]
            fine = all(bool(torch.isfinite(t).all()) for t in tensors)
            y = output[0] if isinstance(output, tuple) else output
            if isinstance(y, torch.Tensor) and fine and not bool(torch.isfinite(y).all()):
                found.append(path)

        return hook

    handles = [
        m.register_forward_hook(look(n)) for n, m in model.named_modules() if not [*m.children()]
    ]
    call()
    for handle in handles:
        handle.remove()
    return found[0]


class Spoiled(nn.Module):
    """Makes one number infinite or NaN, as a layer with a fault would."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            x * torch.exp(x.abs().sum() * 0 + 1e4) if self.kind == "inf" else torch.log(x * 0 - 1)
        )


@pytest.mark.parametrize("kind", ["inf", "nan"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_the_layer_is_that_of_eager(family: str, precision: str, kind: str) -> None:
    torch.manual_seed(0)
    if family == "gpt2":
        model: Any = GPT2LMHeadModel(
            GPT2Config(vocab_size=64, n_layer=3, n_embd=16, n_head=2, n_positions=16)
        )
        model.transformer.h[1].mlp.act = Spoiled(kind)
    else:
        model = BertForMaskedLM(
            BertConfig(
                vocab_size=64, hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
                intermediate_size=32, max_position_embeddings=16,
            )
        )  # fmt: skip
        model.bert.encoder.layer[1].intermediate.intermediate_act_fn = Spoiled(kind)
    ids = torch.randint(0, 64, (2, 12))
    where = eager_origin(model, lambda: model(input_ids=ids, labels=ids))
    trainer = trainer_of(model, mixed_precision=precision)
    assert trainer.train_step(input_ids=ids, labels=ids).skipped
    origin = trainer.nonfinite_origin()
    assert origin is not None and not origin.backward
    first = origin if origin.infinite is None else origin.infinite
    assert first.module == where


def test_a_weight_that_is_not_finite_is_named() -> None:
    model = Scores(torch.nn.functional.relu)
    with torch.no_grad():
        model.first.weight[2, 1] = INF
    trainer = trainer_of(model)
    trainer.train_step(*batch())
    assert str(trainer.nonfinite_origin()) == (
        "the parameter 'first.weight' holds an infinite number"
    )


# ---- a run that learns nothing ends


def test_it_ends_after_so_many_in_a_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_of(Scores(torch.tanh), max_skipped_updates=3)
    trainer.train_step(*batch())
    path = trainer.save(tmp_path)
    before = state_of(trainer)
    for _ in range(2):
        trainer.train_step(*batch(x=NAN))
    trainer.train_step(*batch())  # a finite one: the count begins again
    after = state_of(trainer)
    assert not same(after, before)
    with caplog.at_level(logging.WARNING, logger="onward"):
        for _ in range(2):
            trainer.train_step(*batch(x=NAN))
        with pytest.raises(onward.NonfiniteError, match="3 updates in a row") as raised:
            trainer.train_step(*batch(x=NAN))
    assert "the batch 'x' holds NaN" in str(raised.value) and str(path) in str(raised.value)
    told = [r.message for r in caplog.records if r.name == "onward" and "finite" in r.message][-3:]
    assert ["holds NaN" in text for text in told] == [True, False, True]
    assert same(state_of(trainer), after)
    assert not trainer.train_step(*batch()).skipped  # who catches it may go on


@pytest.mark.parametrize("way", ["resume", "load_state_dict"])
def test_the_count_begins_again_where_a_state_is_loaded(way: str, tmp_path: Path) -> None:
    trainer = trainer_of(Scores(torch.tanh), max_skipped_updates=2)
    trainer.train_step(*batch())
    saved: Any = trainer.save(tmp_path) if way == "resume" else trainer.state_dict()
    for _ in range(2):
        assert trainer.train_step(*batch(x=NAN)).skipped
        getattr(trainer, way)(saved)
    assert trainer.train_step(*batch(x=NAN)).skipped
    with pytest.raises(onward.NonfiniteError, match="2 updates in a row"):
        trainer.train_step(*batch(x=NAN))


def test_none_never_ends_it() -> None:
    trainer = trainer_of(Scores(torch.tanh), max_skipped_updates=None)
    assert all(trainer.train_step(*batch(x=NAN)).skipped for _ in range(20))


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8"])
def test_a_wrong_limit_is_refused(value: Any) -> None:
    with pytest.raises(onward.OnwardError, match=r"max_skipped_updates=.* is invalid; fix: "):
        onward.TrainerOptions(max_skipped_updates=value)


def test_the_search_for_a_loss_scale_does_not_count() -> None:
    """A scale of 2**120 overflows until it has fallen far; only then skips count."""
    options = {"mixed_precision": "fp16", "loss_scale": {"init_scale": 2.0**120}}
    trainer = trainer_of(Scores(torch.tanh), max_skipped_updates=2, **options)
    skipped = 0
    while trainer.train_step(*batch()).skipped:
        skipped += 1
        assert skipped < 130
    assert skipped > 2
    with pytest.raises(onward.NonfiniteError):
        for _ in range(3):
            trainer.train_step(*batch(x=NAN))


def test_eager_goes_on_with_nan_where_it_is_asked_to() -> None:
    model = Scores(torch.tanh)
    trainer = trainer_of(model, skip_nonfinite=False, max_skipped_updates=1)
    assert not trainer.train_step(*batch(x=NAN)).skipped
    assert bool(model.first.weight.isnan().any())
    assert trainer.nonfinite_origin() is None  # nothing was tested in this step
