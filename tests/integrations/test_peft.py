"""LoRA of peft on accelerated models: added before and after, switched off and on, merged, taken
away in the middle of a run. The numbers are eager's, whatever graph there was before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from hf_runs import CLOSE, assert_same_weights, causal_lm
from texts import language_rows

import onward
from onward.module import accelerated

# peft asks transformers' models by names of yesterday
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def adapted(model: Any, **changes: Any) -> Any:
    torch.manual_seed(3)
    config = peft.LoraConfig(
        r=2, lora_alpha=4, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True,
        init_lora_weights=False, task_type="CAUSAL_LM", **changes,
    )  # fmt: skip
    return peft.get_peft_model(model, config)


ROWS = language_rows(40)


def batch(i: int) -> dict[str, torch.Tensor]:
    return {k: torch.stack([r[k] for r in ROWS[4 * i : 4 * i + 4]]) for k in ROWS[0]}


class Run:
    """A run of one model, and its losses."""

    def __init__(self, accelerates: bool) -> None:
        self.accelerates, self.losses, self.done = accelerates, list[float](), 0

    def accelerate(self, model: Any) -> Any:
        return onward.accelerate(model, strict=True) if self.accelerates else model

    def train(self, model: Any, steps: int = 2) -> None:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        for _ in range(steps):
            loss = self.look(model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def look(self, model: Any) -> Any:
        loss = model(**batch(self.done % 10), use_cache=False).loss
        self.done += 1
        self.losses.append(float(loss.detach()))
        return loss


def added_before(run: Run) -> Any:
    model = adapted(causal_lm())
    run.train(run.accelerate(model))
    return model


def added_after(run: Run) -> Any:
    """The model within is the one that is accelerated."""
    inner = run.accelerate(causal_lm())
    run.train(inner)
    model = adapted(inner)
    run.train(model)
    run.train(inner)
    return model


@pytest.mark.parametrize("start, expected", [(added_before, 3), (added_after, 5)])
def test_adapters_come_and_go(
    start: Callable[[Run], Any], expected: int, captures: list[int]
) -> None:
    models = []
    for run in (ours := Run(True), eager := Run(False)):
        model = start(run)
        for _ in range(2):
            with model.disable_adapter():
                run.look(model)
            run.train(model, steps=1)
            model.merge_adapter()
            run.look(model)
            model.unmerge_adapter()
            run.train(model, steps=1)
        models.append(model)
        torch.testing.assert_close(
            torch.tensor(run.losses), torch.tensor(eager.losses or run.losses), **CLOSE
        )
    torch.testing.assert_close(torch.tensor(ours.losses), torch.tensor(eager.losses), **CLOSE)
    assert_same_weights(*models)
    # Adapters on, off and merged; each is found again. The bare model is a graph of its own, and
    # peft calls the model within with other keywords than we do.
    assert len(captures) == expected


def test_merged_for_good_and_trained_on() -> None:
    models = []
    for run in (ours := Run(True), eager := Run(False)):
        inner = run.accelerate(causal_lm())
        model = adapted(inner)
        run.train(model)
        plain = model.merge_and_unload()
        assert plain is inner
        plain.requires_grad_(True)
        run.train(plain)
        models.append(plain)
    torch.testing.assert_close(torch.tensor(ours.losses), torch.tensor(eager.losses), **CLOSE)
    assert_same_weights(*models)
    assert accelerated(models[0]) is not None


def test_two_adapters_in_turn() -> None:
    models = []
    for run in (ours := Run(True), eager := Run(False)):
        model = adapted(causal_lm())
        torch.manual_seed(4)
        model.add_adapter("second", peft.LoraConfig(
            r=3, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False,
        ))  # fmt: skip
        run.accelerate(model)
        for name in ("default", "second", "default", "second"):
            model.set_adapter(name)
            run.train(model, steps=1)
        model.set_adapter("default")
        model.delete_adapter("second")
        run.train(model, steps=1)
        models.append(model)
    torch.testing.assert_close(torch.tensor(ours.losses), torch.tensor(eager.losses), **CLOSE)
    assert_same_weights(*models)


@pytest.mark.parametrize("changes", [{"use_dora": True}, {"modules_to_save": ["ln_f"]},
                                     {"use_rslora": True}], ids=str)  # fmt: skip
def test_kinds_of_adapters(changes: dict[str, Any]) -> None:
    models = []
    for run in (ours := Run(True), eager := Run(False)):
        model = adapted(causal_lm(), **changes)
        run.train(run.accelerate(model), steps=3)
        models.append(model)
    torch.testing.assert_close(torch.tensor(ours.losses), torch.tensor(eager.losses), **CLOSE)
    assert_same_weights(*models)


def test_adapters_are_saved_and_loaded(tmp_path: Path) -> None:
    model = adapted(run_on := causal_lm())
    run = Run(True)
    run.train(run.accelerate(model))
    model.save_pretrained(tmp_path)
    loaded: Any = peft.PeftModel.from_pretrained(causal_lm(), tmp_path)
    del run_on
    want = loaded(**batch(9), use_cache=False).loss
    torch.testing.assert_close(model(**batch(9), use_cache=False).loss, want, **CLOSE)
