"""What a subclass overrides, a callback reads and the user does by hand, beside transformers'."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_runs import (
    KINDS,
    arguments,
    assert_near_run,
    assert_same_run,
    assert_same_weights,
    causal_lm,
    clear_lm,
    history,
    language,
    run,
)
from own_optimizers import Shrinking
from texts import language_rows
from transformers import TrainerCallback

from onward.errors import OnwardError
from onward.integrations.transformers import Trainer
from onward.module import accelerated

SAID = "forward and backward run as graphs, and transformers makes the optimizer step itself"


# ---- what a subclass overrides


def double_loss(base: Any) -> Any:
    class Doubles(base):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().compute_loss(*args, **kwargs)

    return Doubles


def halved_gradients(base: Any) -> Any:
    class Halves(base):
        def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(model, *args, **kwargs)
            for p in model.parameters():
                p.grad *= 0.5
            return loss

    return Halves


def clipped_values(base: Any) -> Any:
    class Clips(base):
        def _clip_grad_norm(self, model: Any) -> Any:
            norm = super()._clip_grad_norm(model)
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
            return norm

    return Clips


def doubled_norm(base: Any) -> Any:
    class Tells(base):
        def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
            return 2 * super()._get_grad_norm(model, grad_norm=grad_norm)

    return Tells


def own_clipping_of_accelerate(base: Any) -> Any:
    class Replaces(base):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            clip = self.accelerator.clip_grad_norm_
            self.accelerator.clip_grad_norm_ = lambda parameters, norm: clip(parameters, 0.1)

    return Replaces


def patched_object(base: Any) -> Any:
    class Plain(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            within = self.compute_loss
            self.compute_loss = lambda *a, **k: 3 * within(*a, **k)

    return Plain


OVERRIDES = (
    double_loss, halved_gradients, clipped_values, doubled_norm, own_clipping_of_accelerate,
    patched_object,
)  # fmt: skip
V5_ALONE = (clipped_values, doubled_norm)  # methods that transformers 4 does not have


@pytest.mark.sample(3)
@pytest.mark.parametrize("made", OVERRIDES)
def test_what_a_subclass_overrides(made: Callable[[Any], Any], tmp_path: Path, said: Any) -> None:
    if made in V5_ALONE and not hasattr(transformers.Trainer, "_clip_grad_norm"):
        pytest.skip("transformers 4 clips within its loop")
    trainers = run(tmp_path, kinds=[made(kind) for kind in KINDS], gradient_accumulation_steps=2)
    assert_same_run(*trainers)
    assert ran(trainers[0]) and len(said()) == 1
    name = type(trainers[0]).__name__
    expected = "Accelerator" if made is own_clipping_of_accelerate else name
    assert said()[0].startswith(f"{expected}.") and said()[0].endswith(SAID)


def test_a_context_of_the_loss_is_entered(tmp_path: Path) -> None:
    """An autocast context of the loss is honoured: products run in bf16."""
    entered = []

    def casts(base: Any) -> Any:
        class Casts(base):
            def compute_loss_context_manager(self) -> Any:
                entered.append(base)
                return torch.autocast("cpu", torch.bfloat16)

        return Casts

    ours, eager = run(tmp_path, kinds=[casts(kind) for kind in KINDS], max_steps=3)
    assert_near_run(ours, eager)
    assert [entered.count(kind) for kind in KINDS] == [3, 3]
    held = accelerated(ours.model)
    assert held is not None
    assert "write_casts" in [line["name"] for line in held.report()["passes"]]


def test_strict_refuses_what_one_graph_cannot_honour(tmp_path: Path) -> None:
    """Options that only the update in one graph reads are refused without such a graph."""
    for options in ({"strict": True}, {"seed": 1}, {"mixed_precision": "bf16"}, {"verify": True}):
        with pytest.raises(
            OnwardError, match=rf"Doubles.compute_loss .*{next(iter(options))} would"
        ):
            language(
                double_loss(Trainer), causal_lm(), arguments(tmp_path / "run"), options=options
            )
        assert not (tmp_path / "run").exists()
        trainer = language(Trainer, causal_lm(), arguments(tmp_path / "b"), options=options)
        trainer.add_callback(reads("on_optimizer_step"))
        with pytest.raises(OnwardError, match=r"^Reads.on_optimizer_step may read .* fix: remove"):
            trainer.train()


# ---- callbacks


class Reads(TrainerCallback):
    """Notes the norm of the gradients at an event, and multiplies them."""

    def __init__(self, event: str, factor: float = 1.0) -> None:
        self.norms: list[float] = []

        def at_event(*_: Any, model: Any, **__: Any) -> None:
            grads = [p.grad for p in model.parameters()]
            self.norms.append(float(torch.nn.utils.get_total_norm(grads)))
            for grad in grads:
                grad *= factor

        setattr(type(self), event, lambda own, *a, **k: own.at_event(*a, **k))
        self.at_event = at_event


def reads(event: str, factor: float = 1.0) -> Any:
    return type("Reads", (Reads,), {})(event, factor)


@pytest.mark.sample(2)
@pytest.mark.parametrize("event", ["on_pre_optimizer_step", "on_optimizer_step", "on_substep_end"])
@pytest.mark.parametrize("late", ["at first", "between", "within a run", "within a window"])
def test_a_callback_that_reads_gradients(event: str, late: str, tmp_path: Path, said: Any) -> None:
    """A callback that reads gradients may be added at any time, also within a window."""
    readers, trainers = [], []
    for kind in KINDS:
        one = reads(event, 0.5)
        args = arguments(tmp_path, gradient_accumulation_steps=3, max_steps=3)
        trainer = language(kind, causal_lm(dropout=0.0), args)
        if late == "at first":
            trainer.add_callback(one)
        elif late == "between":
            trainer.train()
            trainer.add_callback(one)
        else:
            adds_at = "on_step_begin" if late == "within a run" else "on_log"
            if late == "within a window":
                trainer.train_dataset = Adding(trainer, one)
            else:
                trainer.add_callback(adds(trainer, one, adds_at))
        trainer.train()
        readers.append(one)
        trainers.append(trainer)
    assert_same_run(*trainers)
    assert len(readers[0].norms) == len(readers[1].norms) > 0
    torch.testing.assert_close(*(torch.tensor(r.norms) for r in readers), rtol=2e-4, atol=1e-6)
    assert [line for line in said() if line.startswith(f"Reads.{event} may read")]
    assert ("between" in late or "within a" in late) == (trainers[0]._step_trainer is not None)


def adds(trainer: Any, one: Any, event: str) -> Any:
    """A callback that adds another at the second such event."""
    times: list[int] = []

    def at_event(own: Any, *_: Any, **__: Any) -> None:
        times.append(1)
        if len(times) == 2:
            trainer.add_callback(one)

    return type("Adds", (TrainerCallback,), {event: at_event})()


class Adding(torch.utils.data.Dataset[Any]):
    """A data set during which a callback is added, while the second window is open."""

    def __init__(self, trainer: Any, one: Any) -> None:
        self.rows: Any = language_rows(36, unlabelled=6)[:28]
        seen: list[int] = []
        count = trainer.floating_point_ops

        def counted(inputs: Any) -> Any:
            seen.append(1)
            if len(seen) == 4:
                trainer.add_callback(one)
            return count(inputs)

        trainer.floating_point_ops = counted

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def test_gradients_of_a_callback_s_own_are_added(tmp_path: Path, said: Any) -> None:
    """A callback runs a backward of its own before a step: the update has both."""

    class Backs(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                (100 * kwargs["model"].lm_head.weight.square().sum()).backward()

    ours, eager = run(tmp_path, max_steps=3, callbacks=[Backs])
    assert_same_run(ours, eager)
    assert ours.onward_trainer.updates >= 2, "the other steps are one graph each"
    assert len(said()) == 1


def test_a_checkpoint_just_in_time(tmp_path: Path) -> None:
    """transformers' own callback saves before an update that it hears of; steps are one graph."""
    jit = pytest.importorskip("transformers.trainer_jit_checkpoint")

    class Asks(TrainerCallback):
        manager: Any = None

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                self.manager.is_checkpoint_requested = True

    trainers, saved = [], []
    for kind in KINDS:
        asks, callback = Asks(), jit.JITCheckpointCallback()
        folder = tmp_path / kind.__module__
        args = arguments(folder, max_steps=5)
        trainer = language(kind, causal_lm(), args, callbacks=[callback, asks])
        callback.trainer = trainer
        callback.jit_manager = asks.manager = jit.CheckpointManager(trainer)
        trainer.train()
        trainers.append(trainer)
        saved.append(transformers.GPT2LMHeadModel.from_pretrained(folder / "checkpoint-2"))
    assert trainers[0].state.global_step == trainers[1].state.global_step == 3
    assert_same_run(*trainers)
    assert_same_weights(*saved)
    assert trainers[0].onward_trainer.updates == 3


@pytest.mark.parametrize("own", ["a subclass's", "the object's"])
@pytest.mark.parametrize("fails", ["the optimizer", "the capture"])
def test_inputs_are_prepared_once(fails: str, own: str, tmp_path: Path, said: Any) -> None:
    """Inputs are prepared once, also where the first step cannot be a graph."""

    def skewed(prepare: Any, calls: list[int]) -> Any:
        def prepared(inputs: Any) -> Any:
            calls.append(1)
            found = prepare(inputs)
            return {**found, "input_ids": (found["input_ids"] + len(calls)) % 7}

        return prepared

    def reading(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return outputs["logits"].square().mean() / float(num_items_in_batch)

    class Prepares:
        def _prepare_inputs(self, inputs: Any) -> Any:
            return skewed(super()._prepare_inputs, self.calls)(inputs)  # type: ignore[misc]

    trainers: list[Any] = []
    for kind in KINDS:
        model = clear_lm()
        args = arguments(tmp_path, max_steps=3, gradient_accumulation_steps=2)
        more: dict[str, Any] = {"compute_loss_func": reading}
        if fails == "the optimizer":
            more = {"optimizers": (Closed(model.parameters(), lr=1e-2), None)}
        kind = type("Own", (Prepares, kind), {}) if own == "a subclass's" else kind
        trainer = language(kind, model, args, **more)
        trainer.calls = []
        if own == "the object's":
            trainer._prepare_inputs = skewed(trainer._prepare_inputs, trainer.calls)
            mine = trainer._prepare_inputs
        trainer.train()
        assert vars(trainer).get("_prepare_inputs") is (mine if own == "the object's" else None)
        trainers.append(trainer)
    assert_same_run(*trainers)
    assert [len(t.calls) for t in trainers] == [6, 6]
    assert len(said()) == 1


# ---- optimizers


class Closed(Shrinking):
    """An optimizer whose step cannot be called without a closure, be it None."""

    def step(self, closure: Any) -> Any:
        return super().step(closure)


# ---- by hand


def test_training_step_by_hand(tmp_path: Path) -> None:
    """`training_step` gives gradients without an update before, after and within a run."""
    found: list[Any] = []
    for kind in KINDS:
        args = arguments(tmp_path, max_steps=2)
        trainer = language(kind, causal_lm(), args)
        trainer.current_gradient_accumulation_steps = 1
        batch = next(iter(trainer.get_train_dataloader()))
        seen = [stepped(trainer, batch)]

        class Steps(TrainerCallback):
            def on_step_end(
                self, *_: Any, own: Any = trainer, seen: Any = seen, batch: Any = batch, **__: Any
            ) -> None:
                seen.append(stepped(own, batch))

        trainer.add_callback(Steps())
        trainer.train()
        seen.append(stepped(trainer, batch))
        found.append((trainer, seen))
    (ours, mine), (eager, theirs) = found
    assert len(mine) == len(theirs) == 4
    torch.testing.assert_close(mine, theirs, rtol=2e-4, atol=1e-6)
    assert_same_run(ours, eager)
    assert ours.onward_trainer.updates == 2


def again(trainer: Any) -> None:
    trainer.train()


def resumed(trainer: Any) -> None:
    trainer.train(resume_from_checkpoint=True)


def by_hand(trainer: Any) -> None:
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.zero_grad()
    trainer.model(**batch).loss.backward()
    trainer.optimizer.optimizer.step()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("ends", "then"),
    [(KeyboardInterrupt, resumed), (IndexError, by_hand), (None, again), (None, by_hand)],
)
def test_a_run_that_ends_within_a_window(ends: Any, then: Any, tmp_path: Path) -> None:
    """What comes after an interrupt, an error or a stop has no gradients of the open window."""
    trainers = []
    for kind in KINDS:

        class Breaks(kind):  # type: ignore[misc, valid-type]
            batches = 0

            def _prepare_inputs(self, inputs: Any) -> Any:
                self.batches += 1
                if ends is not None and self.batches == 6:  # the window's third of four
                    raise ends
                return super()._prepare_inputs(inputs)

        class Stops(TrainerCallback):
            runs = 0

            def on_train_begin(self, *_: Any, **__: Any) -> None:
                self.runs += 1

            def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                first = ends is None and self.runs == 1
                control.should_training_stop = first and state.global_step == 1

        args = arguments(
            tmp_path / kind.__module__, max_steps=3, gradient_accumulation_steps=4, optim="sgd",
            learning_rate=0.1, save_strategy="steps", save_steps=1,
        )  # fmt: skip
        trainer = language(Breaks, causal_lm(), args, callbacks=[Stops()])
        with contextlib.suppress(KeyboardInterrupt, IndexError):
            trainer.train()
        assert trainer.state.global_step == 1
        then(trainer)
        trainers.append(trainer)
    assert_same_run(*trainers)
    assert trainers[0].onward_trainer.micro_steps == 0


def stepped(trainer: Any, batch: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    loss = trainer.training_step(trainer.model, dict(batch))
    grads = [p.grad.clone() for p in trainer.model.parameters()]
    trainer.model.zero_grad()
    return loss, grads


@pytest.mark.sample(2)
@pytest.mark.parametrize("optim", ["adamw_torch", "sgd"])
@pytest.mark.parametrize("state", ["fp32", "bf16"])
def test_the_optimizer_is_the_user_s_after_a_run(optim: str, state: str, tmp_path: Path) -> None:
    """A step by hand continues from the run's moments, and the next run from that step's."""
    if (optim, state) == ("sgd", "bf16"):
        pytest.skip("SGD has no moments in another form")
    trainers = []
    for kind in KINDS:
        args = arguments(
            tmp_path,
            max_steps=3,
            optim=optim,
            optim_args="momentum=0.9" if optim == "sgd" else None,
        )
        named = {"options": {"optimizer_state": state}} if kind is Trainer else {}
        trainer = language(kind, clear_lm(), args, **named)
        trainer.train()
        batch = next(iter(trainer.get_train_dataloader()))
        for _ in range(2):
            for group in trainer.optimizer.param_groups:
                group["lr"] = 1e-2
            trainer.model(**batch).loss.backward()
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
        trainer.train()
        trainers.append(trainer)
    if state == "fp32":
        assert_same_run(*trainers)
    else:
        assert_near_run(*trainers)
        for p, q in zip(*(t.model.parameters() for t in trainers), strict=True):
            assert (p - q).norm() <= 0.01 * q.norm()
    assert trainers[0].onward_trainer.updates >= 6


# ---- losses and models


def read_items(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> Any:
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return loss / num_items_in_batch.item()


def whole_items(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> Any:
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return loss / max(1, int(num_items_in_batch))


@pytest.mark.parametrize("function", [read_items, whole_items])
def test_a_loss_that_reads_the_number_of_items(function: Any, tmp_path: Path) -> None:
    ours, eager = run(
        tmp_path, compute_loss_func=function, gradient_accumulation_steps=2, max_steps=3
    )
    assert_same_run(ours, eager)


class Line(torch.nn.Module):
    """A model y = a x + b of two numbers, returned in the form `form`."""

    def __init__(self, form: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.tensor(0.5))
        self.b = torch.nn.Parameter(torch.tensor(0.25))
        self.form, self.config = form, None

    def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
        y = x * self.a + self.b
        return self.form((y - labels).square(), y)


FORMS: dict[str, Any] = {
    "(loss, y)": lambda error, y: (error.mean(), y),
    "(loss, y, y)": lambda error, y: (error.mean(), y, y),
    "[loss, y]": lambda error, y: [error.mean(), y],
    "(loss,)": lambda error, y: (error.mean(),),
    "dict": lambda error, y: {"y": y, "loss": error.mean()},
    "the loss is not first": lambda error, y: {"other": y.mean(), "loss": error.mean()},
}
WRONG: dict[str, Any] = {
    "another name": lambda error, y: {"score": error.mean()},
    "another name of two": lambda error, y: {"score": error.mean(), "y": y},
    "one number in a row": lambda error, y: (error.mean().reshape(1), y),
    "no scalar": lambda error, y: (error, y),
    "no scalar in a dict": lambda error, y: {"loss": error},
    "loss alone": lambda error, y: error.mean(),
    "nothing": lambda error, y: (),
}


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(0)
    xs = torch.randn(count, 3, generator=drawn)
    return [{"x": x, "labels": 2 * x + 3} for x in xs]


@pytest.mark.sample(3)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_where_a_model_s_loss_is(form: Any, tmp_path: Path) -> None:
    trainers = []
    for kind in KINDS:
        args = arguments(tmp_path, max_steps=3, learning_rate=0.1)
        trainer = kind(Line(form), args, train_dataset=rows(12))
        trainer.train()
        trainers.append(trainer)
    assert_same_run(*trainers)
    assert trainers[0].onward_trainer.updates == 3


@pytest.mark.filterwarnings("ignore::onward.EagerWarning")
@pytest.mark.sample(2)
@pytest.mark.parametrize("form", WRONG.values(), ids=WRONG)
def test_a_loss_that_transformers_refuses(form: Any, tmp_path: Path) -> None:
    """A wrong loss raises the error that transformers raises."""
    errors = []
    for kind in KINDS:
        model = Line(form)
        trainer = kind(model, arguments(tmp_path, max_steps=3), train_dataset=rows(12))
        with pytest.raises(Exception) as error:  # compared below
            trainer.train()
        errors.append((error.type, str(error.value).split("\n")[0], model.a.item()))
    assert errors[0] == errors[1]


# ---- precision


def test_fp16(tmp_path: Path, said: Any) -> None:
    """accelerate's gradient scaler is served by transformers' own loop around a graph."""
    ours, eager = run(tmp_path, max_steps=3, gradient_accumulation_steps=2, fp16=True)
    assert_near_run(ours, eager)
    assert said() == [f"accelerate's scaler reads gradients (fp16): {SAID}"] and ran(ours)


@pytest.mark.parametrize("name", ["bf16_full_eval", "fp16_full_eval"])
@pytest.mark.filterwarnings("ignore::onward.EagerWarning")
def test_evaluation_in_16_bits(name: str, tmp_path: Path) -> None:
    trainers = run(tmp_path, max_steps=2, **{name: True})
    found, want = (t.evaluate()["eval_loss"] for t in trainers)
    assert abs(found - want) <= 0.02 * want
    assert_same_run_but_rounding(*trainers)


def assert_same_run_but_rounding(ours: Any, eager: Any) -> None:
    for p, q in zip(ours.model.parameters(), eager.model.parameters(), strict=True):
        assert p.dtype == q.dtype
        torch.testing.assert_close(p, q, rtol=0.01, atol=1e-3)
    assert [*map(len, history(ours))] == [*map(len, history(eager))]


# ----


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """A function that gives the warnings about gradients that are shown."""
    with caplog.at_level(logging.WARNING, "onward"):
        yield lambda: [r.getMessage() for r in caplog.records if SAID in r.getMessage()]


def ran(trainer: Any) -> bool:
    """Whether the trainer's model has run as a graph."""
    held = accelerated(trainer.model)
    with contextlib.suppress(OnwardError):
        return held is not None and len(held.plan.launches) > 0
    return False
