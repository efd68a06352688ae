"""A session's training step as ONNX: stock onnxruntime goes on with it, in a process without torch
and Onward, and trains as the session does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx_files import words_batches, words_file
from plain_run import run
from safetensors.numpy import load_file

import onward
from onward import TrainingSession, loss
from onward.errors import OnwardError

STEPS = 20


OPTIMIZERS = {
    "AdamW": lambda: onward.optim.AdamW(lr=1e-2),
    "SGD": lambda: onward.optim.SGD(lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_onnxruntime_goes_on_as_the_session(name: str, tmp_path: Path) -> None:
    session = TrainingSession(
        words_file(), OPTIMIZERS[name](), loss.cross_entropy("logits"),
        options=onward.TrainerOptions(max_grad_norm=1.0),
    )  # fmt: skip
    for batch in words_batches(STEPS)[:2]:
        session.step(batch)
    folder = session.export_training(tmp_path / "exported")
    losses, state = run(folder, words_batches(STEPS))
    expected = [session.step(batch).loss for batch in words_batches(STEPS)]
    expected.append(session.evaluate(words_batches(STEPS)[-1]).loss)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    found = load_file(state)
    for path, parameter in session.module.named_parameters():
        np.testing.assert_allclose(found[f"param.{path}"], parameter.detach(), atol=2e-5)


def test_the_batch_that_shows_the_inputs_may_have_one_row(tmp_path: Path) -> None:
    """The files take any number of rows nevertheless."""
    session = TrainingSession(words_file(), onward.optim.SGD(lr=0.1), loss.cross_entropy("logits"))
    one = {name: array[:1] for name, array in words_batches(STEPS)[0].items()}
    folder = session.export_training(tmp_path / "exported", feeds=one)
    losses, _ = run(folder, words_batches(STEPS, rows=3))
    expected = [session.step(batch).loss for batch in words_batches(STEPS, rows=3)]
    np.testing.assert_allclose(losses[:-1], expected, rtol=1e-5)


def test_what_cannot_be_exported_is_one_line(tmp_path: Path) -> None:
    session = TrainingSession(words_file(), onward.optim.SGD(lr=0.1), loss.cross_entropy("logits"))
    with pytest.raises(
        OnwardError, match=r"needs an example batch; fix: run a step first, or give feeds"
    ):
        session.export_training(tmp_path / "exported")
    with pytest.raises(OnwardError, match=r"feeds lacks labels"):
        session.export_training(
            tmp_path / "exported", feeds={"ids": words_batches(STEPS)[0]["ids"]}
        )
    with pytest.raises(OnwardError, match=r"this session has no loss"):
        TrainingSession(words_file()).export_training(tmp_path / "exported")
    assert not list(tmp_path.iterdir())
