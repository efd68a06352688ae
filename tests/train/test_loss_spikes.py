"""Updates whose loss is a spike: logged, left out as if their batch had never come, or an error.

The oracle is an eager loop that never sees the odd batches.
"""

from __future__ import annotations

import copy
import logging
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onward

F = nn.functional
STEPS = 60
ODD = (40, 47, 48)  # updates whose labels are wrong


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def batch(i: int, odd: bool, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Points f32[N,8] and their classes i64[N]; those of an odd batch are other ones."""
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(i))
    y = x[:, :4].argmax(1)
    return x, (y + 1) % 4 if odd else y


def trainer_of(net: nn.Module, **options: Any) -> onward.Trainer:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    return onward.Trainer(net, optimizer, F.cross_entropy, options=options)


def eager(net: nn.Module, updates: list[list[tuple[torch.Tensor, torch.Tensor]]]) -> None:
    """Updates by the mean of the losses of each list of batches."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for batches in updates:
        optimizer.zero_grad()
        torch.stack([F.cross_entropy(net(x), y) for x, y in batches]).mean().backward()
        optimizer.step()


def close(net: nn.Module, other: nn.Module) -> None:
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("clip", [None, 1.0], ids=["", "clipped"])
@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("early", [False, True], ids=["", "ended early"])
def test_a_skipped_update_is_as_if_its_batches_had_never_come(
    window: int, early: bool, clip: float | None
) -> None:
    net = model()
    twin = copy.deepcopy(net)
    trainer = trainer_of(
        net,
        loss_spikes="skip",
        gradient_accumulation_steps=window + early,
        max_grad_norm=None if clip is None else 1e6,  # a norm is computed, and clips nothing
    )
    good = []
    for update in range(STEPS):
        batches = [batch(update * window + i, update in ODD) for i in range(window)]
        results = [trainer.train_step(*b) for b in batches]
        last = trainer.update() if early else results[-1]
        assert last is not None
        assert (last.skipped, last.updated) == (update in ODD, update not in ODD)
        if update not in ODD:
            good.append(batches)
    assert trainer.updates == len(good) == STEPS - len(ODD)
    eager(twin, good)
    close(net, twin)


def test_what_is_left_out_does_not_make_the_loss_scale_grow() -> None:
    net = model()
    trainer: Any = trainer_of(
        net, loss_spikes="skip", mixed_precision="fp16",
        loss_scale=onward.LossScale(init_scale=2.0, growth_interval=5),
    )  # fmt: skip
    for update in range(STEPS):
        before = trainer.state_dict()["loss_scale"]
        skipped = trainer.train_step(*batch(update, update in ODD)).skipped
        assert skipped == (update in ODD)
        assert (trainer.state_dict()["loss_scale"] == before) == skipped
    made = STEPS - len(ODD)
    assert trainer.state_dict()["loss_scale"] == {
        "scale": 2.0 ** (1 + made // 5), "growth_tracker": made % 5,
    }  # fmt: skip


def test_an_optimizer_that_makes_its_own_step_is_not_asked_to() -> None:
    class Own(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    net = model()
    twin = copy.deepcopy(net)
    trainer = onward.Trainer(
        net, Own(net.parameters(), lr=1e-2), F.cross_entropy, options={"loss_spikes": "skip"}
    )
    results = [trainer.train_step(*batch(i, i in ODD)) for i in range(STEPS)]
    assert [i for i, r in enumerate(results) if r.skipped] == list(ODD)
    eager(twin, [[batch(i, odd=False)] for i in range(STEPS) if i not in ODD])
    close(net, twin)


def test_a_warning_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    nets = [model(), model()]
    runs = [trainer_of(nets[0], loss_spikes="warn"), trainer_of(nets[1])]
    with caplog.at_level(logging.WARNING, logger="onward"):
        for i in range(STEPS):
            for trainer in runs:
                assert not trainer.train_step(*batch(i, i in ODD)).skipped
    assert [r.message.startswith("its loss") for r in caplog.records] == [True] * len(ODD)
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(p, q)


def test_an_error_names_loss_limit_and_checkpoint_and_training_goes_on(tmp_path: Path) -> None:
    net = model()
    trainer = trainer_of(net, loss_spikes="raise")
    for i in range(40):
        trainer.train_step(*batch(i, odd=False))
    saved = trainer.save(tmp_path)
    before = copy.deepcopy(trainer.state_dict())
    with pytest.raises(onward.LossSpikeError, match="update 41 is not made") as raised:
        trainer.train_step(*batch(40, odd=True))
    assert "is a spike: the median of the last 9 updates is" in str(raised.value)
    assert f"trainer.resume('{saved}')" in str(raised.value)
    after = trainer.state_dict()
    for name, tensor in before["model"].items():
        assert torch.equal(tensor, after["model"][name])
    for name, tensor in before["optimizer"].items():
        assert torch.equal(tensor, after["optimizer"][name])
    trainer.resume(saved)
    assert trainer.train_step(*batch(41, odd=False)).updated


def test_too_many_skips_in_a_row_are_an_error() -> None:
    trainer = trainer_of(model(), loss_spikes="skip", max_skipped_updates=3)
    for i in range(40):
        trainer.train_step(*batch(i, odd=False))
    for i in (40, 41):
        assert trainer.train_step(*batch(i, odd=True)).skipped
    with pytest.raises(onward.LossSpikeError, match="3 updates in a row were skipped"):
        trainer.train_step(*batch(42, odd=True))
    assert trainer.train_step(*batch(43, odd=False)).updated


def test_a_resumed_run_skips_what_the_whole_run_skips(tmp_path: Path) -> None:
    whole = trainer_of(model(), loss_spikes="skip")
    for i in range(STEPS):
        if i == 39:
            whole.save(tmp_path)
        whole.train_step(*batch(i, i in ODD))
    resumed = trainer_of(model(), loss_spikes="skip")
    resumed.resume(tmp_path)
    results = [resumed.train_step(*batch(i, i in ODD)) for i in range(39, STEPS)]
    assert sum(r.skipped for r in results) == len(ODD)
    for p, q in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(p, q)
    plain = trainer_of(model())  # without the option, and a state without losses
    plain.load_state_dict(resumed.state_dict())
    state = plain.state_dict()
    assert "loss_history" not in state
    resumed.load_state_dict(state)
    assert not resumed.train_step(*batch(1, odd=True)).skipped, "no losses are known"


def test_no_loss_is_a_spike_before_enough_are_known() -> None:
    trainer = trainer_of(model(), loss_spikes="skip")
    for i in range(31):
        assert not trainer.train_step(*batch(i, odd=i == 20)).skipped


def test_loss_spikes_and_nonfinite_gradients_are_told_apart() -> None:
    trainer = trainer_of(model(), loss_spikes="raise")
    for i in range(40):
        trainer.train_step(*batch(i, odd=False))
    x, y = batch(40, odd=False)
    x[0, 0] = torch.nan
    assert trainer.train_step(x, y).skipped, "not an error of a spike"
    assert trainer.train_step(*batch(41, odd=False)).updated


def test_an_interrupt_after_a_refusal_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(model(), loss_spikes="raise")
    for i in range(40):
        trainer.train_step(*batch(i, odd=False))

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(trainer._window), "advance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainer.train_step(*batch(40, odd=True))
    x, y = batch(41, odd=False)
    x[0, 0] = torch.nan
    assert trainer.train_step(x, y).skipped, "of a gradient that is not finite, and no error"
    assert trainer.train_step(*batch(42, odd=False)).updated


def test_an_update_that_is_interrupted_and_made_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal waits until the update is made: its loss is one of those before the next."""
    trainer, other = (trainer_of(model(), loss_spikes="skip") for _ in range(2))
    advance = type(trainer._window).advance

    def signalled(*given: Any) -> None:
        advance(*given)
        signal.raise_signal(signal.SIGINT)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for i in range(4):
            other.train_step(*batch(i, odd=False))
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(type(trainer._window), "advance", signalled)
                trainer.train_step(*batch(i, odd=False))
    finally:
        signal.signal(signal.SIGINT, handler)
    found, want = (each.state_dict()["loss_history"] for each in (trainer, other))
    assert len(want) == 4 and torch.equal(found, want)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_losses_of_any_size_and_losses_that_do_not_move(scale: float) -> None:
    from onward.train.loss_spikes import LossSpikes
    from onward.train.way_back import WayBack

    spikes = LossSpikes("skip", 8.0, None, WayBack())
    for i in range(64):
        assert spikes.accepts(scale)
        spikes.applied(torch.tensor(scale * (1 + 1e-7 * (i % 3))))
    assert spikes.accepts(1.05 * scale) and not spikes.accepts(1.2 * scale)
    assert spikes.accepts(float("nan")) and spikes.accepts(float("inf")), "of another check"
