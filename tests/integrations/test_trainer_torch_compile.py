"""torch.compile, asked of the Trainer in the place of transformers', whose step is one graph."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import transformers
from hf_runs import arguments, assert_same_run, causal_lm, language
from test_trainer_served import halved_gradients

from onward.integrations.transformers import Trainer

BACKEND = "ACCELERATE_DYNAMO_BACKEND"
REGIONS = "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"
# arguments, the environment that `accelerate launch` makes
ASKED: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "torch_compile": ({"torch_compile": True}, {}),
    "a backend": ({"torch_compile_backend": "eager"}, {}),
    "a mode": ({"torch_compile_mode": "reduce-overhead"}, {}),
    "accelerate launch": ({}, {BACKEND: "inductor"}),
    "accelerate launch, by regions": ({"torch_compile": True}, {REGIONS: "true"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("served", [False, True], ids=["one graph", "an override"])
@pytest.mark.parametrize("name", ASKED)
def test_it_is_ignored_and_said_once(
    name: str, served: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Numbers are those of transformers' Trainer without it, the log has one line of it, and other
    Trainers of the process are asked as before."""
    caplog.set_level(logging.WARNING, "onward")
    asked, environment = ASKED[name]
    both: dict[str, Any] = {
        "max_steps": 3, "gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
    }  # fmt: skip
    kinds: list[Any] = [transformers.Trainer, Trainer]
    if served:
        kinds = [halved_gradients(kind) for kind in kinds]
    for variable in (BACKEND, REGIONS, "ACCELERATE_DYNAMO_MODE"):  # some versions set them
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    eager = language(kinds[0], causal_lm(), arguments(tmp_path / "eager", **both))
    for _ in range(2):
        eager.train()
        eager.evaluate()
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    args = arguments(tmp_path / "ours", **both, **asked)
    ours = language(kinds[1], causal_lm(), args)
    before = ours.accelerator.state.dynamo_plugin
    assert before.backend.value in ("INDUCTOR", "EAGER")
    for _ in range(2):
        ours.train()
        ours.evaluate()
    assert_same_run(ours, eager)
    assert ours.model_wrapped is ours.model
    said = [r.getMessage() for r in caplog.records if "torch_compile" in r.getMessage()]
    assert said == [
        f"torch_compile (backend {before.backend.value.lower()}) is ignored, since the step is "
        "one compiled graph already"
    ]
    assert ours.accelerator.state.dynamo_plugin is before
