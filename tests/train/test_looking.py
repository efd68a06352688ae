"""Looking at a Trainer: reports, short forms for a prompt and a notebook, profiles that train
nothing, what the log tells."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import batch, gpt2, mlp
from torch import nn

import onward
from onward import OnwardError, TrainerOptions

pytestmark = pytest.mark.usefixtures("captures_kept")

loss_fn = nn.functional.cross_entropy
X, Y = torch.randn(6, 8), torch.arange(6) % 5


@pytest.fixture(scope="module")
def trained() -> onward.Trainer:
    """After one step on padded rows."""
    trainer = onward.Trainer(gpt2(), onward.optim.AdamW())
    trainer.train_step(batch(4, 12, "right"))
    return trainer


# ---- report


def test_report_is_a_dict_that_json_knows_and_prints_as_a_table(trained: onward.Trainer) -> None:
    report = trained.report()
    assert json.loads(json.dumps(report)) == report == report.to_dict() == dict(report)
    assert type(report.to_dict()) is dict
    lines = str(report).splitlines()
    for stage, seconds in report["compile_seconds"].items():
        assert any(line.split()[-1] == f"{seconds:.3f}" and stage in line for line in lines)
    for item in report["passes"]:
        assert [item["name"], f"{item['seconds']:.3f}", str(item["edits"]), str(item["nodes"])] in [
            line.split() for line in lines
        ]
    assert f"launches        {len(trained.plan.launches)}" in lines
    assert any(f"{trained.plan.peak / 2**20:.2f} MiB" in line for line in lines)
    share = f"{report['rows']['arithmetic_done']:.1%} of the arithmetic done"
    assert any(share in line for line in lines)
    assert all(f"note: {note}" in lines for note in report["notes"]) and report["notes"]


def test_what_was_not_fused_is_told_with_its_reason(build: Callable[[str], None]) -> None:
    """Without native kernels the residual sums of both layers stay apart from their norms."""
    build("0")
    trainer = onward.Trainer(gpt2(), onward.optim.AdamW(lr=1e-3))
    trainer.train_step(batch(4, 12, "right"))
    report = trainer.report()
    assert json.loads(json.dumps(report)) == report
    [norm] = [m for m in report["near_misses"] if m["op"] == "AddLayerNormalization"]
    assert norm["pass"] == "add_layer_norm"
    assert norm["modules"] == [
        "transformer.h.0.ln_2", "transformer.h.1.ln_1", "transformer.h.1.ln_2", "transformer.ln_f",
    ]  # fmt: skip
    assert "no native library" in norm["reason"]
    line = "not fused: AddLayerNormalization at transformer.h.0.ln_2 and 3 more: " + norm["reason"]
    assert line in str(report).splitlines()
    build("plain")
    trainer = onward.Trainer(gpt2(), onward.optim.AdamW(lr=1e-3))
    trainer.train_step(batch(4, 12, "right"))
    assert not trainer.report()["near_misses"]


def test_a_report_is_the_callers_own(trained: onward.Trainer) -> None:
    report = trained.report()
    report["rows"]["counts"].clear()
    report["passes"][0]["edits"] = -1
    report["compile_seconds"].clear()
    again = trained.report()
    assert again["compile_seconds"] and again["passes"][0]["edits"] >= 0
    assert again["rows"]["counts"]


LOOKS: dict[str, Callable[[onward.Trainer], Any]] = {
    "report": lambda t: t.report(),
    "plan": lambda t: t.plan,
    "profile": lambda t: t.profile(),
}


@pytest.mark.parametrize("evaluated", [False, True])
@pytest.mark.parametrize("name", LOOKS)
def test_before_a_training_step_there_is_nothing_to_look_at(name: str, evaluated: bool) -> None:
    trainer = onward.Trainer(mlp(), onward.optim.SGD(), loss_fn)
    if evaluated:
        trainer.eval_step(X, Y)
    with pytest.raises(OnwardError, match="no step has run yet; fix: call train_step first"):
        LOOKS[name](trainer)
    trainer.train_step(X, Y)
    assert LOOKS[name](trainer)


def test_a_report_is_of_the_last_run_until_a_changed_model_runs() -> None:
    model = mlp()
    trainer = onward.Trainer(model, onward.optim.SGD(), loss_fn)
    trainer.train_step(X, Y)
    before, plan, ops = trainer.report(), trainer.plan, trainer.profile().keys()
    assert not [op for op in ops if "Sigmoid" in op]
    model.add_module("drop", nn.Sigmoid())
    assert trainer.report() == before and trainer.plan is plan and trainer.profile().keys() == ops
    trainer.eval_step(X, Y)
    assert trainer.report() == before, "an evaluation is no training step"
    trainer.train_step(X, Y)
    assert trainer.plan is not plan and trainer.report() != before
    assert [op for op in trainer.profile() if "Sigmoid" in op], "the changed model's"


# ---- short forms

SHORT: dict[str, Callable[[onward.Trainer], Any]] = {
    "Trainer": lambda t: t,
    "Plan": lambda t: t.plan,
    "Report": lambda t: t.report(),
    "StepResult": lambda t: t.eval_step(batch(4, 12, "right"), fetch="logits"),
    "StepExplanation": lambda t: t.explain(batch(4, 12, "right")),
}


@pytest.mark.parametrize("name", SHORT)
def test_repr_is_one_short_line(name: str, trained: onward.Trainer) -> None:
    text = repr(SHORT[name](trained))
    assert text.startswith(f"{name}(") and text.endswith(")")
    assert len(text) < 240 and "\n" not in text


@pytest.mark.parametrize("name", SHORT)
def test_notebooks_show_the_whole(name: str, trained: onward.Trainer) -> None:
    import xml.etree.ElementTree as xml

    html = SHORT[name](trained)._repr_html_()
    root = xml.fromstring(f"<div>{html}</div>")  # well-formed, with nothing left unescaped
    text = "".join(root.itertext())
    whole = {
        "Plan": "max-live lower bound",
        "StepExplanation": "of the arithmetic spared",
        "StepResult": "logits: float32[4, 12, 97]",
    }
    assert whole.get(name, "predicted peak") in text


def test_print_stays_the_whole_table(trained: onward.Trainer) -> None:
    plan = trained.plan
    text = str(plan)
    assert text == f"{plan}" and all(b.name[:43] in text for b in plan.buffers)
    assert "\nrow demand: " in str(trained.explain(batch(4, 12, "right")))


def test_a_trainer_that_has_not_run_can_be_shown() -> None:
    trainer = onward.Trainer(mlp(), onward.optim.SGD(), loss_fn)
    assert repr(trainer) == "Trainer(Mlp, SGD, 0 updates, nothing compiled yet)"
    assert "nothing compiled yet" in trainer._repr_html_()
    trainer.eval_step(X, Y)
    assert "nothing compiled yet" in trainer._repr_html_()


def test_a_result_shows_numbers_and_the_shapes_of_outputs() -> None:
    options = TrainerOptions(max_grad_norm=1.0, fetch="output")
    trainer = onward.Trainer(mlp(), onward.optim.SGD(lr=0.25), loss_fn, options=options)
    result = trainer.train_step(X, Y)
    assert result.grad_norm is not None
    assert repr(result) == (
        f"StepResult(loss={float(result.loss):.6g}, grad_norm={float(result.grad_norm):.6g}, "
        "lr=0.25, skipped=False, updated=True, outputs={output: float32[6, 5]})"
    )


def test_a_snapshot_is_what_a_trainer_is_at_that_moment() -> None:
    options = TrainerOptions(gradient_accumulation_steps=2)
    trainer = onward.Trainer(mlp(), onward.optim.SGD(), loss_fn, options=options)
    before = trainer.snapshot()
    assert before.last is None and before.model is trainer.model and before.loss_fn is loss_fn
    assert (before.optimizer, before.options) == ("SGD", options)
    with pytest.raises(onward.OnwardError, match="no step has run yet"):
        _ = before.last_run
    for _ in range(3):
        trainer.train_step(X, Y)
    after = trainer.snapshot()
    assert (before.updates, before.micro_steps) == (0, 0), "it does not follow"
    assert (after.updates, after.micro_steps, after.loss_scale) == (1, 1, None)
    assert after.last_run.plan is trainer.plan and after.last_run.batch.target == (Y,)
    with pytest.raises(dataclasses.FrozenInstanceError):
        after.updates = 5  # type: ignore[misc]


# ---- profile

OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda: onward.optim.AdamW(lr=0.1),
    "momentum": lambda: onward.optim.SGD(lr=0.1, momentum=0.9),
    "torch's own": None,
}


def everything(trainer: onward.Trainer) -> dict[str, Any]:
    """All that a further step would read."""
    state = trainer.state_dict()
    return {
        **{f"model {k}": v for k, v in state["model"].items()},
        **{f"optimizer {k}": v for k, v in state["optimizer"].items()},
        "counters": torch.tensor([state["updates"], state["micro_steps"], state["samples"]]),
        "counts": torch.tensor(list(state["counts"].values())),
        "seed": state["seed"],
        "generator": torch.get_rng_state() if state["generator"] is None else state["generator"],
    }


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_profile_leaves_everything_as_it_was_to_the_bit(kind: str, window: int) -> None:
    """After each micro-step; and the run goes on as one that nobody looked at."""
    runs = []
    for looked in (True, False):
        torch.manual_seed(3)
        model = mlp(dropout=0.3)
        make = OPTIMIZERS[kind]
        optimizer = make() if make else torch.optim.Adam(model.parameters(), lr=0.1)
        options = TrainerOptions(gradient_accumulation_steps=window, max_grad_norm=1.0, seed=5)
        trainer = onward.Trainer(model, optimizer, loss_fn, options=options)
        for i in range(2 * window):
            trainer.train_step(X + i, Y)
            if looked:
                before = everything(trainer)
                assert trainer.profile()
                after = everything(trainer)
                assert [n for n in before if not torch.equal(before[n], after[n])] == []
        runs.append(everything(trainer))
    assert runs[0].keys() == runs[1].keys()
    assert [n for n in runs[0] if not torch.equal(runs[0][n], runs[1][n])] == []


def test_a_profile_runs_on_the_last_training_batch_though_others_ran_since() -> None:
    """What the memory of the step holds by then is other batches' data."""
    data = batch(4, 12, "right")
    trainer, twin = (onward.Trainer(gpt2(dropout=0.0), onward.optim.AdamW()) for _ in range(2))
    for one in (trainer, twin):
        one.train_step(data)
    trainer.eval_step(batch(7, 30, "right", seed=8))
    trainer.explain(batch(5, 9, "right", seed=9))
    before = everything(trainer)
    rows = copy.deepcopy(trainer.report()["rows"])
    assert trainer.profile().keys() == {x.op for x in trainer.plan.launches}
    assert trainer.report()["rows"] == rows
    after = everything(trainer)
    assert [n for n in before if not torch.equal(before[n], after[n])] == []
    assert torch.equal(trainer._last_run().prepared.loss, twin.train_step(data).loss)


def test_a_profile_that_fails_puts_back_what_it_wrote() -> None:
    trainer = onward.Trainer(mlp(), onward.optim.SGD(lr=0.5), loss_fn)
    trainer.train_step(X, Y)
    before = everything(trainer)
    launches = trainer._last_run().prepared.executable.launches

    def fails() -> None:
        raise RuntimeError("the last launch")

    launches[-1] = fails
    with pytest.raises(RuntimeError, match="the last launch"):
        trainer.profile()
    after = everything(trainer)
    assert [n for n in before if not torch.equal(before[n], after[n])] == []


# ---- the log


def test_the_log_tells_each_stage_and_nothing_is_printed(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "onward")
    trainer = onward.Trainer(mlp(), onward.optim.SGD(), loss_fn)
    trainer.train_step(X, Y)
    told = [r for r in caplog.records if r.name == "onward"]
    assert {r.__dict__["stage"] for r in told} == trainer.report()["compile_seconds"].keys()
    assert all(r.levelno == logging.INFO and r.getMessage().endswith(" s") for r in told)
    caplog.clear()
    trainer.train_step(X, Y)
    assert [r for r in caplog.records if r.name == "onward"] == [], "nothing was compiled"
    assert capfd.readouterr() == ("", "")


def test_nothing_is_printed_by_default(capfd: pytest.CaptureFixture[str]) -> None:
    onward.Trainer(mlp(), onward.optim.SGD(), loss_fn).train_step(X, Y)
    assert capfd.readouterr() == ("", "")
