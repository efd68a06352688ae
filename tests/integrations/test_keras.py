"""Keras models whose step runs in Onward, beside Keras's own `fit` on a model of equal weights, for
each backend that is installed: losses, metrics, weights, statistics, rates and counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("keras_program.py")
NEEDED = {"tensorflow": ("tensorflow", "tf2onnx"), "jax": ("jax", "jax2onnx"), "torch": ("torch",)}
NEAR = 1e-5
SAME = (
    "sgd", "momentum", "adam", "adamw_with_schedule_and_clipping", "rmsprop_with_average",
    "accumulation", "padding_and_validation", "probabilities", "two_outputs", "sample_weights",
    "subclassed_with_batch_norm_and_class_weight", "callbacks", "frozen_layer",
)  # fmt: skip
HUB = ("hub_bert", "hub_gpt2", "hub_t5")
MORE = ("dropout", "attention_dropout", "saved_and_gone_on", "refusals")
REFUSED = {
    "noise": "layer 'noisy' draws random numbers",
    "shape": "layer 'slices' has a noise_shape",
    "half": "layer 'half' computes in bfloat16",
    "eager": "run_eagerly=True",
    "own": "OwnStep.train_step is the model's own",
    "options": "global_clipnorm= of the Keras optimizer",
    "uncompiled": "model.compile(optimizer, loss) first",
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("keras") is None, reason="Keras is not installed"),
]
backends = pytest.mark.parametrize("backend", NEEDED)


@cache
def found(backend: str) -> dict[str, dict[str, Any]]:
    """What a process with this backend has found in all cases."""
    for package in NEEDED[backend]:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    cases = [*SAME, *MORE, *(HUB if find_spec("keras_hub") is not None else ())]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *cases], capture_output=True, text=True, timeout=3000,
        env={**os.environ, "KERAS_BACKEND": backend}, check=False,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr[-3000:]
    return {line["case"]: line for line in lines}


def result(backend: str, case: str) -> dict[str, Any]:
    results = found(backend)
    if case in HUB and find_spec("keras_hub") is None:
        pytest.skip("keras_hub is not installed")
    assert case in results, f"the process ended before {case}"
    assert "error" not in results[case], results[case]["error"]
    return results[case]


@backends
@pytest.mark.parametrize("case", [*SAME, *HUB])
def test_steps_are_those_of_keras(backend: str, case: str) -> None:
    """Twenty steps and more, the last batch of an epoch smaller than the others."""
    here = result(backend, case)
    assert "refused" not in here, here["refused"]
    assert here["names"]
    assert here["batches"] >= 20
    assert here["moved"] > 1e-4  # it trains
    for what in ("logs", "epochs", "weights", "others"):
        assert here[what] < NEAR, (what, here)
    for what in ("steps", "rate"):
        ours, theirs = here[what]
        assert ours == pytest.approx(theirs, rel=1e-6)


@backends
def test_dropout_is_in_training_alone(backend: str) -> None:
    here = result(backend, "dropout")
    for share in here["drops"]:  # of 25,600 numbers: four standard deviations are 0.011
        assert share == pytest.approx(0.25, abs=0.011)
    assert here["kinds"] == [0.0, pytest.approx(4 / 3, abs=1e-3)]
    assert here["again"] < 0.9  # masks of two steps differ: equal in 0.625 of the places
    assert abs(here["rows"]) < 0.25  # and so do those of two samples
    assert here["evaluated"] == pytest.approx(1.0, abs=1e-6)
    assert here["predicted"] == pytest.approx(1.0, abs=1e-6)


@backends
def test_dropouts_of_layers_within_layers_are_found(backend: str) -> None:
    here = result(backend, "attention_dropout")
    assert here["launches"] >= 2
    assert here["losses"][-1] < here["losses"][0]


@backends
def test_a_saved_model_goes_on(backend: str) -> None:
    here = result(backend, "saved_and_gone_on")
    ours, theirs = here["ends"]
    assert ours == pytest.approx(theirs, rel=NEAR)
    assert here["steps"] == 20


@backends
@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_graph_is_refused_in_one_line(backend: str, name: str) -> None:
    said = result(backend, "refusals")[name]
    assert REFUSED[name] in said
    assert "fix:" in said
    assert "\n" not in said


@backends
def test_the_example_learns(backend: str) -> None:
    for package in NEEDED[backend]:
        pytest.importorskip(package)
    program = PROGRAM.parents[2] / "examples" / "keras_model.py"
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=600,
        env={**os.environ, "KERAS_BACKEND": backend}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    right = int(done.stdout.rpartition("%")[0].split()[-1])
    assert right > 30  # of 32 words, one in three and not one in 32
