"""onward.integrations.transformers.Trainer, in the place of transformers': one graph per step."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_runs import (
    BF16,
    arguments,
    assert_near_run,
    assert_same_run,
    assert_same_weights,
    causal_lm,
    classification,
    classifier,
    history,
    language,
)
from texts import language_rows
from transformers import TrainerCallback

import onward
from onward.errors import MissingExtraError, OnwardError
from onward.integrations import refused_arguments
from onward.integrations.transformers import Seq2SeqTrainer, Trainer
from onward.module import accelerated
from onward.options import TrainerOptions

RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation, clipping, a schedule": {
        "gradient_accumulation_steps": 3, "max_grad_norm": 0.5, "warmup_steps": 2,
        "lr_scheduler_type": "cosine", "weight_decay": 0.1,
    },
    "epochs that end within a window": {
        "gradient_accumulation_steps": 4, "max_steps": -1, "num_train_epochs": 2,
    },
    "no clipping": {"max_grad_norm": 0.0},
    "evaluation with metrics": {"eval_strategy": "steps", "eval_steps": 3},
    "label smoothing": {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2},
    "another optimizer": {"optim": "sgd", "learning_rate": 0.5},
    "a schedule of the loss": {
        "lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 2,
        "metric_for_best_model": "loss", "lr_scheduler_kwargs": {"patience": 0, "threshold": 0.5},
    },
    "activation checkpointing": {"activation_checkpointing": True},
    "a group by length": {"train_sampling_strategy": "group_by_length"},
}  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("changes", RUNS.values(), ids=RUNS)
def test_a_language_model(changes: dict[str, Any], tmp_path: Path, captures: list[int]) -> None:
    ours, eager = both(language, causal_lm, tmp_path, **changes)
    assert_same_run(ours, eager)
    assert ours.onward_trainer.updates == ours.state.global_step
    assert len(captures) == (2 if "eval_steps" in changes else 1)


def test_a_classifier_of_padded_lines(tmp_path: Path, captures: list[int]) -> None:
    ours, eager = both(
        classification, classifier, tmp_path, eval_strategy="epoch", save_strategy="epoch",
        max_steps=-1, num_train_epochs=2, gradient_accumulation_steps=2, max_grad_norm=0.3,
        load_best_model_at_end=True, metric_for_best_model="right",
    )  # fmt: skip
    assert_same_run(ours, eager)
    assert (
        Path(ours.state.best_model_checkpoint).name == Path(eager.state.best_model_checkpoint).name
    )
    found, want = (t.predict(t.eval_dataset).predictions for t in (ours, eager))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(want), rtol=2e-4, atol=2e-5)


def weighted_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> Any:
    logits, count = outputs["logits"][:, :-1].flatten(0, 1), num_items_in_batch
    loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return WEIGHT[0] * loss / count


WEIGHT = [0.7]


@pytest.mark.slow
def test_a_loss_function_of_the_user_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss function may read a global, also one that changes between runs."""
    changes: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_steps": 3}
    ours, eager = both(language, causal_lm, tmp_path, compute_loss_func=weighted_loss, **changes)
    assert_same_run(ours, eager)
    monkeypatch.setitem(globals(), "WEIGHT", [2.5])
    for trainer in (ours, eager):
        trainer.train()
    assert_same_run(ours, eager)


@pytest.mark.sample(3)
@pytest.mark.parametrize("first, second", [(True, True), (True, False), (False, True)])
def test_a_checkpoint_is_resumed(first: bool, second: bool, tmp_path: Path) -> None:
    """A run broken off in either Trainer is resumed in the other as if it had never stopped."""
    changes: dict[str, Any] = {
        "save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2,
        "warmup_steps": 1,
    }  # fmt: skip
    kinds = {True: Trainer, False: transformers.Trainer}
    whole = language(transformers.Trainer, causal_lm(), arguments(tmp_path / "whole", **changes))
    whole.train()
    broken = language(kinds[first], causal_lm(), arguments(tmp_path / "b", **changes))
    broken.train()
    resumed = language(kinds[second], causal_lm(), arguments(tmp_path / "b", **changes))
    resumed.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-3"))
    assert_same_run(resumed, whole)


def test_dropout_is_the_same_after_a_resume(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
    whole = language(Trainer, causal_lm(dropout=0.2), arguments(tmp_path, **changes))
    whole.train()
    resumed = language(Trainer, causal_lm(dropout=0.2), arguments(tmp_path, **changes))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_same_weights(resumed.model, whole.model, rtol=0, atol=0)
    assert history(resumed) == history(whole)


def test_dropout_is_the_same_after_a_resume_by_one_trainer(tmp_path: Path) -> None:
    """A checkpoint one step before the end: the step after it has the number of the last one."""
    changes: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "max_steps": 4}
    trainer = language(Trainer, causal_lm(dropout=0.2), arguments(tmp_path, **changes))
    trainer.train()
    want = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for name, p in trainer.model.named_parameters():
        torch.testing.assert_close(p.detach(), want[name], rtol=0, atol=0)


def test_low_moments_are_the_same_after_a_resume(tmp_path: Path) -> None:
    """transformers saves torch's `optimizer.state_dict()`: f32, whose bits come back."""
    changes: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
    found = []
    for resume in (None, str(tmp_path / "checkpoint-3")):
        trainer = language(
            Trainer, causal_lm(dropout=0.2), arguments(tmp_path, **changes),
            options={"optimizer_state": "bf16"},
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        assert trainer.onward_trainer.options.optimizer_state == "bf16"
        saved = trainer.onward_trainer.state_dict()["optimizer"]
        assert {x.dtype for x in saved.values()} == {torch.bfloat16}
        found.append((trainer, saved))
    (whole, want), (resumed, have) = found
    assert_same_weights(resumed.model, whole.model, rtol=0, atol=0)
    assert history(resumed) == history(whole)
    assert have.keys() == want.keys() and all(torch.equal(have[k], want[k]) for k in want)


def test_train_twice_and_with_other_arguments(tmp_path: Path) -> None:
    ours, eager = both(language, causal_lm, tmp_path, max_steps=3)
    for trainer in (ours, eager):
        trainer.args.gradient_accumulation_steps, trainer.args.max_grad_norm = 2, 0.2
        trainer.train()
    assert_same_run(ours, eager)


def test_a_model_that_is_made_by_a_function(tmp_path: Path) -> None:
    trainers = []
    for kind in (Trainer, transformers.Trainer):
        trainer = language(kind, None, arguments(tmp_path), model_init=lambda trial: causal_lm())
        trainer.train()
        trainers.append(trainer)
    assert_same_run(*trainers)
    assert accelerated(trainers[0].model) is not None


def test_seq2seq(tmp_path: Path) -> None:
    from texts import VOCABULARY, language_rows
    from transformers import T5Config, T5ForConditionalGeneration

    config: Any = T5Config
    trainers = []
    for kind in (Seq2SeqTrainer, transformers.Seq2SeqTrainer):
        torch.manual_seed(0)
        model = T5ForConditionalGeneration(
            config(
                vocab_size=VOCABULARY,
                d_model=16,
                d_kv=8,
                d_ff=32,
                num_layers=1,
                num_heads=2,
                dropout_rate=0.0,
                decoder_start_token_id=0,
                pad_token_id=0,
                eos_token_id=1,
            )
        )
        plain = arguments(tmp_path).to_dict()
        args = transformers.Seq2SeqTrainingArguments(
            **{k: plain[k] for k in ("output_dir", "use_cpu", "max_steps", "report_to",
                                     "disable_tqdm", "log_level", "learning_rate")},
            logging_steps=1, per_device_train_batch_size=4, save_strategy="no",
            dataloader_pin_memory=False, gradient_accumulation_steps=2,
        )  # fmt: skip
        rows: Any = language_rows(28, unlabelled=4)
        trainer = kind(model, args, train_dataset=rows)
        trainer.train()
        trainers.append(trainer)
    assert_same_run(*trainers)
    assert type(trainers[0]).__mro__.index(Trainer) < type(trainers[0]).__mro__.index(
        transformers.Seq2SeqTrainer
    )


# ---- callbacks


class Seen(TrainerCallback):
    """The events that a run calls, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        for name in vars(TrainerCallback):
            if name.startswith("on_") and name != "on_pre_optimizer_step":
                setattr(self, name, lambda *_, n=name, **__: self.events.append(n))


class Stops(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == 2


def test_callbacks_are_called_as_ever(tmp_path: Path) -> None:
    seen = [Seen(), Seen()]
    for kind, one in zip((Trainer, transformers.Trainer), seen, strict=True):
        args = arguments(tmp_path, gradient_accumulation_steps=2, eval_strategy="epoch")
        trainer = language(kind, causal_lm(), args, callbacks=[one, Stops])
        trainer.train()
        assert trainer.state.global_step == 2
    assert seen[0].events == seen[1].events
    assert {"on_optimizer_step", "on_substep_end", "on_log"} <= set(seen[0].events)


def test_bf16(tmp_path: Path, captures: list[int]) -> None:
    ours, eager = both(language, causal_lm, tmp_path, **BF16)
    assert_near_run(ours, eager)
    passes = [line["name"] for line in ours.onward_trainer.report()["passes"]]
    assert "write_casts" in passes
    assert len(captures) == 2  # the step, and the calls of evaluation


def test_other_options_reach_the_step(tmp_path: Path) -> None:
    trainer = language(
        Trainer, causal_lm(), arguments(tmp_path),
        options={"mixed_precision": "bf16", "keep_in_fp32": "lm_head", "strict": True},
    )  # fmt: skip
    trainer.train()
    found = trainer.onward_trainer.options
    assert (found.mixed_precision, found.strict) == ("bf16", True)
    assert tuple(found.keep_in_fp32) == ("lm_head",)


# ---- what is refused


@pytest.mark.parametrize("name", refused_arguments.REFUSED)
def test_arguments_that_one_graph_cannot_honour(name: str, tmp_path: Path) -> None:
    args = arguments(tmp_path / "run")
    assert hasattr(args, name), "transformers has this argument"
    setattr(args, name, {"stage": 2} if name == "deepspeed" else True)
    with pytest.raises(OnwardError, match=rf"^these TrainingArguments .*{name}=.*fix: "):
        language(Trainer, causal_lm(), args)
    assert not (tmp_path / "run").exists(), "nothing is written"


@pytest.mark.parametrize(
    "options",
    [{"mixed_precision": said} for said in ("fp16", "no", "auto")]
    + [TrainerOptions(mixed_precision="fp16")],
    ids=["fp16", "no", "auto", "TrainerOptions"],
)
def test_two_precisions_are_refused(options: Any, tmp_path: Path) -> None:
    with pytest.raises(OnwardError) as error:
        language(Trainer, causal_lm(), arguments(tmp_path / "run", bf16=True), options=options)
    said = TrainerOptions.of(options).mixed_precision
    assert str(error.value) == (
        f'TrainingArguments(bf16=True) and options={{"mixed_precision": "{said}"}} contradict each '
        "other; fix: leave one of them out"
    )
    assert not (tmp_path / "run").exists(), "nothing is written"


@pytest.mark.parametrize(
    "options",
    [{"mixed_precision": "bf16"}, {"seed": 3}, TrainerOptions(), None],
    ids=["bf16", "other options", "TrainerOptions", "none"],
)
def test_one_precision_is_taken(options: Any, tmp_path: Path) -> None:
    args = arguments(tmp_path, bf16=True, max_steps=1)
    trainer = language(Trainer, causal_lm(), args, options=options)
    trainer.train()
    assert trainer.onward_trainer.options.mixed_precision == "bf16"


def test_accelerate_s_own_fp8_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.Accelerator.mixed_precision", "fp8")
    with pytest.raises(OnwardError, match=r"mixed_precision=fp8 is not supported; fix: bf16=True"):
        language(Trainer, causal_lm(), arguments(tmp_path / "run"))


def test_accelerate_s_own_bf16_and_another_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accelerate.Accelerator.mixed_precision", "bf16")
    with pytest.raises(OnwardError, match=r"^accelerate's mixed_precision=bf16 and options=.*fix:"):
        language(
            Trainer, causal_lm(), arguments(tmp_path / "run"), options={"mixed_precision": "fp16"}
        )


NOT_SPLIT = (
    r"^options has auto_micro_batch, but transformers\.Trainer says what each micro-batch weighs, "
    r".*fix: .*per_device_train_batch_size"
)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"max_grad_norm": 1.0}, "TrainingArguments\\(max_grad_norm="),
        ({"gradient_accumulation_steps": 2}, "TrainingArguments\\(gradient_accumulation_steps="),
        ({"fetch": "logits"}, "leave it out"),
        ({"auto_micro_batch": True}, NOT_SPLIT),
        ({"auto_micro_batch": True, "loss_spikes": "skip"}, NOT_SPLIT),
        ({"memory": 1}, "unknown option in options: 'memory'"),
    ],
)
def test_options_that_are_arguments(options: Mapping[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(OnwardError, match=said):
        language(Trainer, causal_lm(), arguments(tmp_path / "run"), options=options)
    assert not (tmp_path / "run").exists()


def test_nothing_has_run_yet(tmp_path: Path) -> None:
    trainer = language(Trainer, causal_lm(), arguments(tmp_path, max_steps=1))
    with pytest.raises(OnwardError, match="no whole step has run as one graph"):
        _ = trainer.onward_trainer


# ---- options, and what a step says


def test_options_of_a_step(tmp_path: Path) -> None:
    options = {"memory_budget": 0.5, "verify": True, "disable": "gemm_add"}
    ours = language(Trainer, causal_lm(), arguments(tmp_path), options=options)
    eager = language(transformers.Trainer, causal_lm(), arguments(tmp_path))
    for trainer in (ours, eager):
        trainer.train()
    assert_same_run(ours, eager)
    held = ours.onward_trainer.options
    assert (held.memory_budget, held.verify, held.disable) == (0.5, True, ("gemm_add",))
    assert ours.onward_trainer.report()["launches"] > 0


def test_an_update_that_is_not_finite_is_left_out(tmp_path: Path) -> None:
    """A non-finite update is skipped together with its step of the schedule; the weights stay."""

    class Breaks(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            with torch.no_grad():
                kwargs["model"].transformer.ln_f.weight.mul_(
                    torch.inf if state.global_step == 1 else 1.0
                )

    args = arguments(tmp_path, max_steps=2, warmup_steps=4, logging_nan_inf_filter=False)
    trainer = language(Trainer, causal_lm(), args, callbacks=[Breaks])
    trainer.train()
    assert trainer.onward_trainer.updates == 1
    assert trainer.lr_scheduler.last_epoch == 1
    assert torch.isfinite(trainer.model.lm_head.weight).all()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("transformers", "accelerate"):
        with monkeypatch.context() as patched:
            patched.delitem(sys.modules, "onward.integrations.transformers")
            patched.setattr(
                "importlib.util.find_spec", lambda n, missing=name: None if n == missing else n
            )
            with pytest.raises(MissingExtraError, match=rf"{name} is not installed; .*\[hf\]"):
                importlib.import_module("onward.integrations.transformers")


def both(make: Any, model: Any, folder: Path, **changes: Any) -> tuple[Any, Any]:
    """A finished run of this Trainer, and one of transformers' own."""
    named = {k: changes.pop(k) for k in ("compute_loss_func",) if k in changes}
    trainers = []
    for kind in (Trainer, transformers.Trainer):
        args = arguments(folder / kind.__module__, **changes)
        trainers.append(make(kind, model(), args, **named))
        trainers[-1].train()
    return trainers[0], trainers[1]


@pytest.mark.parametrize("kind", ["own", "drop-in"])
def test_transformers_trainers_keep_their_weights(kind: str, tmp_path: Path) -> None:
    """A window in which every text is cut before its first label moves weights only by decay."""
    rows = language_rows(8)
    for row in rows:
        row["labels"] = [-100] * len(row["labels"])
    runs = []
    for ours in (True, False):
        model, made = causal_lm(), transformers.Trainer
        if ours and kind == "own":
            model = onward.accelerate(model, strict=True)
        elif ours:
            made = Trainer
        folder = tmp_path / str(ours)
        given = arguments(folder, max_steps=2, weight_decay=0.1, logging_steps=5)
        data: Any = rows
        made(model, given, train_dataset=data).train()
        runs.append(dict(model.named_parameters()))
    for name, p in runs[1].items():
        torch.testing.assert_close(runs[0][name], p)
