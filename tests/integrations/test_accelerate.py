"""accelerate: `prepare` of an accelerated model, as of the eager model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from hf_runs import CLOSE, assert_same_weights, causal_lm
from texts import language_rows

import onward
from onward.module import accelerated


@pytest.fixture(autouse=True)
def state_of_its_own() -> Iterator[None]:
    """accelerate keeps one state for the process."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()


def trained(model: Any, accelerator: Accelerator, epochs: int = 1) -> tuple[Any, list[float]]:
    rows: Any = language_rows(24, unlabelled=6)
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=4)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule: Any = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses = []
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch, use_cache=False).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return model, losses


@pytest.mark.parametrize("wrap", [onward.accelerate, onward.Module], ids=["accelerate", "Module"])
def test_prepare_and_accumulate(wrap: Any, captures: list[int]) -> None:
    wrapped = wrap(causal_lm(), strict=True)
    ours, found = trained(wrapped, Accelerator(cpu=True, gradient_accumulation_steps=2))
    _, want = trained(eager := causal_lm(), Accelerator(cpu=True, gradient_accumulation_steps=2))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(want), **CLOSE)
    assert_same_weights(getattr(ours, "module", ours), eager)
    assert len(captures) == 1


def test_states_are_saved_and_loaded(tmp_path: Any) -> None:
    accelerator = Accelerator(cpu=True)
    model, _ = trained(onward.accelerate(causal_lm(), strict=True), accelerator)
    accelerator.save_state(str(tmp_path))
    saved = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    accelerator.load_state(str(tmp_path))
    assert_same_weights(model, saved, rtol=0, atol=0)
    batch = {k: v[None] for k, v in language_rows(1)[0].items()}
    ours, eager = (m(**batch, use_cache=False).loss for m in (model, saved))
    torch.testing.assert_close(ours, eager, **CLOSE)
    assert accelerator.unwrap_model(model) is model
    assert accelerated(model) is not None


def test_mixed_precision() -> None:
    """accelerate puts autocast into the model's forward, and casts its outputs up."""
    ours, eager = onward.accelerate(causal_lm(), strict=True), causal_lm()
    _, found = trained(ours, Accelerator(cpu=True, mixed_precision="bf16"))
    AcceleratorState._shared_state.clear()
    _, want = trained(eager, Accelerator(cpu=True, mixed_precision="bf16"))
    AcceleratorState._shared_state.clear()
    _, full = trained(causal_lm(), Accelerator(cpu=True))
    assert found == pytest.approx(want, rel=2e-3)
    assert found != pytest.approx(full, rel=1e-6)
    text = {k: v[None] for k, v in language_rows(1)[0].items()}
    outputs = [m(**text, use_cache=False) for m in (ours, eager)]
    assert [o.logits.dtype for o in outputs] == [torch.float32] * 2
