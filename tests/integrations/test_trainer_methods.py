"""Every method of transformers' Trainer and every event of its callbacks is in one table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from hf_runs import KINDS, arguments, causal_lm, language
from packaging.version import Version
from transformers import TrainerCallback

from onward.integrations import trainer_methods
from onward.integrations.trainer_methods import EVENTS, HONOURED, METHODS, heard, overridden

# Methods that transformers 4.57 has and transformers 5 has not.
OLDER = """
    _activate_neftune _add_sm_patterns_to_gitignore _align_special_tokens _deactivate_neftune
    _fsdp_qlora_plugin_updates _gather_and_numpify _is_attention_mask_causal _nested_gather
    _rotate_checkpoints _save_tpu _sorted_checkpoints compare_trainer_and_checkpoint_args
    num_tokens prediction_loop propagate_args_to_deepspeed tokenizer torch_jit_model_eval
"""
V5 = Version(transformers.__version__) >= Version("5")


def methods() -> set[str]:
    kinds = transformers.Trainer, transformers.Seq2SeqTrainer
    return {
        name
        for kind in kinds
        for name, value in vars(kind).items()
        if not name.startswith("__") and (callable(value) or hasattr(value, "__get__"))
    }


def test_every_method_is_in_the_table() -> None:
    """No method is missing from the table, and each one in it is a method of a supported
    transformers."""
    assert methods() - METHODS.keys() == set()
    if V5:
        assert METHODS.keys() - methods() == set(OLDER.split())


def test_every_event_is_in_the_table() -> None:
    events = {name for name in vars(TrainerCallback) if name.startswith("on_")}
    assert events - EVENTS.keys() == set()
    if V5:
        assert EVENTS.keys() - events == set()


def test_transformers_own_callbacks_read_no_gradients() -> None:
    """Each callback of transformers that hears an event between backward and update is listed
    here."""
    kinds, known = [TrainerCallback], set()
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
        if kind.__module__.startswith("transformers.") and "Handler" not in kind.__name__:
            known |= {(kind.__name__, n) for n in trainer_methods.SERVED_EVENTS if n in vars(kind)}
    known -= {("TrainerCallback", name) for name in trainer_methods.SERVED_EVENTS}
    assert known <= {("JITCheckpointCallback", "on_pre_optimizer_step")}


@pytest.mark.parametrize("name", [*METHODS])
def test_an_override_is_seen(name: str) -> None:
    """An override is found in a subclass, on an object and in transformers' own class, if it is
    served."""

    def other(*_: Any, **__: Any) -> None: ...

    plain = object.__new__(transformers.Trainer)
    assert overridden(plain) is None
    served = METHODS[name] != HONOURED
    if name not in methods():
        assert not served or not V5
        return
    mine = type("Mine", (transformers.Trainer,), {name: other})
    assert overridden(object.__new__(mine)) == (f"Mine.{name}" if served else None)
    vars(plain)[name] = other
    assert overridden(plain) == (f"Trainer.{name}" if served else None)
    del vars(plain)[name]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(transformers.Trainer, name, other, raising=False)
        assert overridden(plain) == (f"Trainer.{name}" if served else None)
    assert overridden(plain) is None


@pytest.mark.parametrize("name", [*EVENTS])
def test_who_hears_an_event_is_seen(name: str) -> None:
    def other(*_: Any, **__: Any) -> None: ...

    served, plain = EVENTS[name] != HONOURED, TrainerCallback()
    assert heard(plain) is None
    mine = type("Mine", (TrainerCallback,), {name: other})
    assert heard(mine()) == (f"Mine.{name}" if served else None)
    vars(plain)[name] = other
    assert heard(plain) == (f"TrainerCallback.{name}" if served else None)


def test_a_replaced_accelerator_is_seen() -> None:
    one = object.__new__(accelerate.Accelerator)
    assert trainer_methods.replaced(one) is None
    vars(one)["backward"] = lambda loss: None
    assert trainer_methods.replaced(one) == "Accelerator.backward"
    mine = type("Mine", (accelerate.Accelerator,), {"clip_grad_norm_": lambda *_: None})
    assert trainer_methods.replaced(object.__new__(mine)) == "Mine.clip_grad_norm_"


def test_a_callback_clips_gradients_of_its_own(tmp_path: Path) -> None:
    """accelerate clips another model's gradients, and the trained model's where a callback asks."""
    seen: list[list[float]] = []
    for kind in KINDS:
        other, norms = torch.nn.Linear(3, 1, bias=False), list[float]()
        torch.nn.init.ones_(other.weight)

        class Clips(TrainerCallback):
            trainer: Any = None

            def on_step_end(
                self, *_: Any, own: Any = other, out: Any = norms, **given: Any
            ) -> None:
                own.zero_grad()
                (40 * own.weight.square().sum()).backward()
                clip = self.trainer.accelerator.clip_grad_norm_
                out.append(float(clip(own.parameters(), max_norm=1.0)))
                out.append(float(clip([own.weight], 0.5)))
                out.append(float(own.weight.grad.norm()))
                out.append(float(clip(given["model"].parameters(), 1.0)))

        one, args = Clips(), arguments(tmp_path, max_steps=2)
        one.trainer = trainer = language(kind, causal_lm(), args, callbacks=[one])
        trainer.train()
        norms += [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
        seen.append(norms)
    assert seen[0] == pytest.approx(seen[1], rel=2e-4)
    assert seen[1][:4] == pytest.approx([80 * 3**0.5, 1.0, 0.5, 0.0], rel=1e-4)
