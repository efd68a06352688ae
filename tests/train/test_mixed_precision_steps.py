"""Training steps in mixed precision: options, combinations, what stays fp32."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from tiny import batch, bert, gpt2

import onward
from onward.kernels import Target
from onward.train.precision import policy_of

STEPS = 12


def trained(model: Any, **options: Any) -> tuple[list[float], Any]:
    """The losses of a few steps, and the Trainer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    trainer = onward.Trainer(
        model, optimizer, options={"seed": 3, "mixed_precision": "bf16", **options}
    )
    data: Any = batch(4, 12, padding="right")
    return [float(trainer.train_step(**data).loss) for _ in range(STEPS)], trainer


def under_autocast(model: Any, max_grad_norm: float | None = None) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, data = [], batch(4, 12, padding="right")
    for _ in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**data).loss
        loss.backward()
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.sample(1)
@pytest.mark.parametrize("clipped", [None, 0.5])
@pytest.mark.parametrize("kind", [gpt2, bert])
def test_losses_follow_those_of_autocast(kind: Any, clipped: float | None) -> None:
    model = kind(dropout=0.0)
    twin = copy.deepcopy(model)
    ours, trainer = trained(model, max_grad_norm=clipped)
    theirs = under_autocast(twin, clipped)
    assert ours[-1] < 0.8 * ours[0]
    assert ours == pytest.approx(theirs, rel=0.01)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    for state in trainer.optimizer.state.values():
        assert all(s.dtype == torch.float32 for s in state.values())


COMBINATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a budget": {"memory_budget": 0.3},
    "clipping": {"max_grad_norm": 0.5},
    "no look at what is finite": {"skip_nonfinite": False},
    "every row": {"disable": "row_demand"},
    "no fusion": {"disable": "add_layer_norm,bias_activation,flash_attention"},
    "casts as they are written": {"disable": "move_casts,cancel_casts,fold_casts"},
    "a head in fp32": {"keep_in_fp32": "LinearCrossEntropy"},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [gpt2, bert])
def test_combinations_draw_the_same_masks(kind: Any) -> None:
    """With dropout on, all forms of a step give nearly the same losses: with other masks they would
    be farther apart by far."""
    found = {name: trained(kind(dropout=0.3), **more)[0] for name, more in COMBINATIONS.items()}
    for name, losses in found.items():
        assert losses[:4] == pytest.approx(found["plain"][:4], rel=4e-3), name
    other = trained(kind(dropout=0.3), seed=4)[0]
    assert other[:4] != pytest.approx(found["plain"][:4], rel=4e-3)


def test_accumulated_micro_batches_are_one_batch() -> None:
    """Two halves of a batch whose halves have as many labels."""
    data: Any = batch(8, 12)
    halves: Any = [{k: v[i : i + 4] for k, v in data.items()} for i in (0, 4)]
    models = [gpt2(dropout=0.0) for _ in range(2)]
    whole, parts = (
        onward.Trainer(
            m, torch.optim.SGD(m.parameters(), lr=0.1),
            options={"mixed_precision": "bf16", "gradient_accumulation_steps": n},
        )
        for m, n in zip(models, (1, 2), strict=True)
    )  # fmt: skip
    whole.train_step(**data)
    for half in halves:
        parts.train_step(**half)
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2e-4, msg=name)


def test_a_gradient_that_is_not_finite_is_skipped() -> None:
    model: Any = gpt2(dropout=0.0)
    _, trainer = trained(model)
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        kept = model.transformer.h[0].mlp.c_fc.weight[0, 0].clone()
        model.transformer.h[0].mlp.c_fc.weight[0, 0] = float("inf")
    step = trainer.train_step(**batch(4, 12, padding="right"))
    assert step.skipped
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.weight[0, 0] = kept
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_evaluation_is_in_the_same_precision() -> None:
    model = gpt2(dropout=0.0)
    _, trainer = trained(model)
    data = batch(4, 12)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        want = float(model.eval()(**data).loss)
    assert float(trainer.eval_step(**data).loss) == pytest.approx(want, rel=2e-3)


@pytest.mark.parametrize("able", [True, False])
def test_auto_is_bf16_where_the_processor_multiplies_it(
    able: bool, caplog: pytest.LogCaptureFixture
) -> None:
    options = onward.TrainerOptions(mixed_precision="auto")
    with caplog.at_level(logging.WARNING, "onward"):
        policy = policy_of(options, Target(multiplies_bf16=able))
    assert (policy is not None) == able
    assert ("fp32 here" in caplog.text) == (not able)


def test_reports_count_casts_and_explain_shows_the_same_step() -> None:
    model = gpt2(dropout=0.0)
    _, trainer = trained(model)
    edits = {p["name"]: p["edits"] for p in trainer.report()["passes"]}
    assert edits["write_casts"] > 10
    found = onward.explain(trainer)
    assert "write_casts" in str(found)


@pytest.mark.parametrize("norm", [None, 1.0], ids=["as they are", "clipped"])
def test_updates_read_low_gradients(norm: float | None) -> None:
    """A gradient that comes from matrix products alone stays in bf16 until its update, at 2 bytes a
    weight."""
    model = gpt2(dropout=0.0)
    trainer: Any = onward.Trainer(
        model, torch.optim.AdamW(model.parameters()),
        options={"mixed_precision": "bf16", "max_grad_norm": norm},
    )  # fmt: skip
    trainer.train_step(**batch(3, 9))
    updates = [launch.spec for launch in trainer.plan.launches if launch.op == "AdamUpdate"]
    matrices = [u for u in updates if u.inputs[0] is not None and u.inputs[0].rank == 2]
    low = [u for u in matrices if u.inputs[1] is not None and u.inputs[1].is_low]
    assert len(low) == len(matrices) - 2  # not of the two embeddings, which rows are added to
