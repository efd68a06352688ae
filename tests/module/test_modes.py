"""Modes and surroundings of a call, states of the module, and what runs in eager."""

from __future__ import annotations

import copy
import io
import pickle  # noqa: TID251
import threading
import warnings
from typing import Any

import pytest
import tiny
import torch
from models import Positional, W
from torch import nn
from twins import Twins, total

import onward
from onward.errors import CaptureError, EagerWarning, OnwardError
from onward.module import accelerated


def x(seed: int = 0, rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, W, generator=torch.Generator().manual_seed(seed))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner, self.norm, self.drop = nn.Linear(W, 4), nn.BatchNorm1d(4), nn.Dropout(0.0)
        self.out = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.drop(torch.relu(self.norm(self.inner(x)))))


# ---- gradients off, training and evaluation


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any) -> None:
    twins = Twins(Positional())
    twins.step(lambda m: m(x()))
    with mode():
        found = twins.same(lambda m: m(x(1)))
    assert not found.requires_grad
    twins.zero()
    twins.step(lambda m: m(x()))
    held = accelerated(twins.ours)
    assert held is not None
    assert len(next(iter(held._states)).calls) == 2


def test_within_a_cuda_graph_of_the_users_the_forward_itself_runs(
    captures: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There nothing may wait for the device, and nothing else may be recorded."""
    plain = Positional()
    model = onward.accelerate(copy.deepcopy(plain))
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert torch.equal(model(x()), plain(x()))
    assert not captures
    torch.testing.assert_close(model(x()), plain(x()))
    assert captures


def test_a_model_of_inference_mode() -> None:
    with torch.inference_mode():
        model = onward.accelerate(Positional())
        with pytest.warns(EagerWarning, match="inference tensor"):
            model(x())


def test_training_and_evaluation_in_turn() -> None:
    """Each mode has its graph; going back captures nothing. Buffers are updated as in eager."""
    twins = Twins(Normed())
    for step in range(9):
        for model in twins.both:
            model.train(step % 3 != 2)
            if step == 7:
                model.norm.eval()
        twins.zero()
        if step % 3 == 2:
            with torch.no_grad():
                twins.same(lambda m, s=step: m(x(s, 5)))
        else:
            twins.same(lambda m, s=step: m(x(s, 5)))
            twins.same_buffers()
            twins.step(lambda m, s=step: m(x(s, 5)))
        twins.same_buffers()
    held = accelerated(twins.ours)
    assert held is not None
    assert [len(state.calls) for state in held._states] == [3]


def test_buffers_are_updated_once_a_forward() -> None:
    """Not by the backward, nor without gradients twice, nor by a retained graph."""
    twins = Twins(Normed())
    for model in twins.both:
        loss = total(model(x(0, 5)))
        loss.backward(retain_graph=True)
        loss.backward()
        with torch.no_grad():
            model(x(1, 5))
    assert int(twins.ours.norm.num_batches_tracked) == 2
    twins.same_buffers()
    twins.same_gradients()


def test_evaluation_with_gradients() -> None:
    twins = Twins(Normed().eval())
    twins.step(lambda m: m(x(0, 5)))
    twins.same_buffers()


def test_autocast_of_another_device_casts_nothing() -> None:
    twins = Twins(Positional(), strict=True)
    torch.set_autocast_enabled("cuda", True)  # torch.autocast would ask for a GPU
    try:
        twins.step(lambda m: m(x()))
    finally:
        torch.set_autocast_enabled("cuda", False)
    twins.zero()
    twins.step(lambda m: m(x()))
    held = accelerated(twins.ours)
    assert held is not None
    assert len(next(iter(held._states)).calls) == 1


# ---- random numbers


def test_dropout_follows_torch_s_generator() -> None:
    model = onward.accelerate(nn.Sequential(nn.Linear(W, 64), nn.Dropout(0.5)))
    torch.manual_seed(5)
    first, second = model(x()), model(x())
    torch.manual_seed(5)
    again = model(x())
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    state = torch.get_rng_state()
    third = model(x())
    torch.set_rng_state(state)
    assert torch.equal(third, model(x()))
    assert 0.3 < float((first == 0).float().mean()) < 0.7


def test_without_dropout_no_random_number_is_drawn() -> None:
    model = onward.accelerate(Positional())
    before = torch.get_rng_state()
    total(model(x())).backward()
    assert torch.equal(before, torch.get_rng_state())


# ---- what runs in eager, and says so


def test_a_submodule_with_a_hook_runs_in_pytorch_and_is_named() -> None:
    twins = Twins(Positional())
    seen: list[int] = []
    twins.step(lambda m: m(x()))
    handles = [m.a.register_forward_hook(lambda *_: seen.append(1)) for m in twins.both]
    twins.zero()
    with pytest.warns(EagerWarning, match=r"within the graph (?s:.*)a has the forward hook"):
        twins.step(lambda m: m(x()))
    assert len(seen) == 4
    for handle in handles:
        handle.remove()
    twins.zero()
    twins.step(lambda m: m(x()))
    assert len(seen) == 4


def test_strict_raises_where_a_call_would_run_in_eager() -> None:
    model = onward.accelerate(Positional(), strict=True)
    model.a.register_forward_hook(lambda *_: None)
    for _ in range(2):
        with pytest.raises(CaptureError, match="a has the forward hook"):
            model(x())
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t)
    with hooks, pytest.raises(CaptureError, match="saved_tensors_hooks"):
        model(x())


def test_eager_for_a_while() -> None:
    twins = Twins(Positional())
    with onward.eager():
        twins.step(lambda m: m(x()))
        with onward.eager():
            pass
        twins.ours(x())
    assert not twins.ran()
    twins.zero()
    twins.step(lambda m: m(x()))
    assert twins.ran()


def test_whoever_watches_operators_sees_them() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    twins = Twins(Positional())
    counts = []
    for model in twins.both:
        with FlopCounterMode(display=False) as counter:
            model(x())
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_transforms_and_traces_see_the_operators() -> None:
    model = onward.accelerate(Positional())
    plain = Twins(Positional()).eager
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.testing.assert_close(torch.func.vmap(model)(x()), plain(x()))
        tangent: Any = torch.func.jvp(model, (x(),), (x(1),))[1]
        assert tangent.shape == (3, W)
        program = torch.export.export(model, (x(),))
        torch.testing.assert_close(program.module()(x()), plain(x()))
        traced: Any = torch.jit.trace(model, (x(),))
        torch.testing.assert_close(traced(x()), plain(x()))


# ---- copies


def test_copies_are_plain_models() -> None:
    model = onward.accelerate(tiny.mlp())
    data = torch.randn(4, 8)
    model(data)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [
        copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),  # noqa: TID251
    ]  # fmt: skip
    for twin in copies:
        assert accelerated(twin) is None
        torch.testing.assert_close(twin(data), model(data))
    assert accelerated(model) is not None


def test_the_model_stays_what_it_is() -> None:
    model = Positional()
    keys, names = list(model.state_dict()), [n for n, _ in model.named_modules()]
    assert onward.accelerate(model) is model
    total(model(x())).backward()
    assert type(model) is Positional
    assert list(model.state_dict()) == keys
    assert [n for n, _ in model.named_modules()] == names
    assert "a" in repr(model)


@pytest.mark.parametrize("thing", [None, 3, nn.Linear, [1], len], ids=str)
def test_what_is_no_module_is_refused(thing: Any) -> None:
    with pytest.raises(OnwardError, match=r"takes a torch.nn.Module, not a .*; fix:"):
        onward.accelerate(thing)


@pytest.mark.parametrize(
    "options", [{"outputs": "some"}, {"strict": 1}, {"memory_budget": -1}, {"disable": ("no",)}]
)
def test_bad_options_are_refused(options: Any) -> None:
    with pytest.raises(OnwardError, match="fix:"):
        onward.accelerate(Positional(), **options)(x())


def test_options_may_change() -> None:
    model = onward.accelerate(Positional())
    held = accelerated(onward.accelerate(model, strict=True))
    assert held is not None
    assert held.options.strict


def test_a_compiled_module_is_refused() -> None:
    model = Positional()
    model._compiled_call_impl = lambda *a: None
    with pytest.raises(OnwardError, match="compiled already"):
        onward.accelerate(model)


# ---- threads


def test_calls_from_several_threads() -> None:
    twins = Twins(Positional())
    twins.ours(x())
    want = [twins.eager(x(i)) for i in range(8)]
    found: list[Any] = [None] * 8

    def work(i: int) -> None:
        for _ in range(5):
            found[i] = twins.ours(x(i))
            total(found[i]).backward()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
