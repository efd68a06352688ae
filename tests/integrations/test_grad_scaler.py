"""torch.amp.GradScaler around an accelerated model: as around the eager one."""

from __future__ import annotations

from typing import Any

import torch
from hf_runs import CLOSE, assert_same_weights, causal_lm
from texts import language_rows

import onward
from onward.module import accelerated


def trained(model: Any, overflow_at: int) -> tuple[list[float], list[float]]:
    """Losses and scales of a run; at one step the gradients are not finite."""
    rows = language_rows(24)
    scaler = torch.amp.GradScaler(device="cpu", init_scale=2.0**10, growth_interval=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, scales = [], []
    for i in range(6):
        batch = {k: torch.stack([r[k] for r in rows[4 * i : 4 * i + 4]]) for k in rows[0]}
        loss = model(**batch, use_cache=False).loss
        scaler.scale(loss * (torch.inf if i == overflow_at else 1.0)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        scales.append(scaler.get_scale())
    return losses, scales


def test_scaled_gradients_and_skipped_updates() -> None:
    ours, eager = onward.accelerate(causal_lm(), strict=True), causal_lm()
    found, want = trained(ours, overflow_at=3), trained(eager, overflow_at=3)
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(want[0]), **CLOSE)
    assert found[1] == want[1] and want[1][3] < want[1][2], "the scale falls, as the step is left"
    assert_same_weights(ours, eager)
    held = accelerated(ours)
    assert held is not None and held.plan.launches
