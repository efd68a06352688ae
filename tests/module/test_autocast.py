"""Accelerated models under `torch.autocast`, and models that switch it on themselves, beside eager
PyTorch: results of the same types, as near to an fp64 run as eager's."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from near_autocast import assert_as_near
from tiny import PADDINGS, batch, bert, gpt2
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from twins import Twins

import onward
from onward.errors import CaptureError, EagerWarning, OnwardError
from onward.module import accelerated

LOW = (torch.bfloat16, torch.float16)
BATCHES = 4


@pytest.fixture(autouse=True)
def never_in_eager() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", EagerWarning)
        yield


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def flat(outputs: Any) -> dict[str, torch.Tensor]:
    leaves = pytree.tree_leaves(outputs)
    tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
    return {f"output {i}": t for i, t in enumerate(tensors)}


def run(
    model: nn.Module, inputs: Mapping[str, Any], to: torch.dtype | None
) -> tuple[dict[str, torch.Tensor], list[torch.dtype]]:
    """Outputs and gradients of one call under autocast, and the types of the outputs."""
    model.zero_grad()
    with torch.autocast("cpu", to or torch.bfloat16, enabled=to is not None):
        outputs = model(**inputs)
    found = flat(outputs)
    loss = getattr(outputs, "loss", None)
    if loss is None:
        loss = torch.stack([t.float().square().mean() for t in found.values()]).sum()
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert all(g.dtype == torch.float32 for g in gradients.values()) or to is None
    types = [t.dtype for t in found.values()]
    return {n: t.detach().clone() for n, t in (found | gradients).items()}, types


def compare(
    make: Callable[[], nn.Module],
    batches: list[dict[str, Any]],
    to: torch.dtype | None,
    exact: Callable[[], nn.Module] | None = None,
) -> Any:
    """Assert the law of mixed precision, and return the accelerated model. exact: makes the model
    without its own autocast."""
    torch.manual_seed(0)
    model = make().train()
    truth = model if exact is None else exact()
    truth.load_state_dict(model.state_dict())
    truth = copy.deepcopy(truth).train().double()
    eager, ours = copy.deepcopy(model), onward.accelerate(copy.deepcopy(model), strict=True)
    found: tuple[list[dict[str, torch.Tensor]], ...] = ([], [], [])
    for data in batches:
        wide = {n: t.double() if t.is_floating_point() else t for n, t in data.items()}
        found[0].append(run(truth, wide, None)[0])
        theirs, types = run(eager, data, to)
        own, types_of_ours = run(ours, data, to)
        assert types_of_ours == types
        assert own.keys() == theirs.keys()
        found[1].append(theirs)
        found[2].append(own)
    assert_as_near(found[0], found[1], found[2])
    return ours


@pytest.mark.sample(1)
@pytest.mark.parametrize("to", LOW, ids=str)
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("kind", [gpt2, bert])
def test_transformers(kind: Any, padding: str, to: torch.dtype, captures: list[int]) -> None:
    data = [batch(4, 12, padding=padding, seed=seed) for seed in range(1, 1 + BATCHES)]
    compare(lambda: kind(dropout=0.0, layers=2, width=64), data, to)
    assert len(captures) == 1


def single(x: torch.Tensor) -> torch.Tensor:
    """The tensor in fp32, or in fp64 in an fp64 run."""
    return x if x.dtype == torch.float64 else x.float()


class Vision(nn.Module):
    """A model of a convolution and BatchNorm, with outputs of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = F.relu(self.norm(self.conv(x)))
        logits = self.head(h.mean((2, 3)))
        return {"maps": h, "logits": logits, "wide": single(logits), "x": x * 2}


@pytest.mark.parametrize("to", LOW, ids=str)
def test_outputs_of_several_types_and_buffers(to: torch.dtype) -> None:
    data = [{"x": gaussian(4, 3, 6, 6, seed=seed)} for seed in range(BATCHES)]
    twins = Twins(Vision().train(), strict=True)
    for inputs in data:
        with torch.autocast("cpu", to):
            ours, eager = (m(**inputs) for m in twins.both)
        assert {n: t.dtype for n, t in ours.items()} == {n: t.dtype for n, t in eager.items()}
        for name, tensor in ours.items():
            torch.testing.assert_close(tensor, eager[name], rtol=0.03, atol=0.03)
    assert int(twins.ours.norm.num_batches_tracked) == BATCHES
    for mine, theirs in zip(twins.ours.buffers(), twins.eager.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.02)
    compare(Vision, data, to)


# ---- blocks of the model's own


class Blocks(nn.Module):
    """Three layers under autocast blocks. form: what the forward does with them; `plain` switches
    no autocast on."""

    def __init__(self, form: str, plain: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(16, 16) for _ in range(3))
        self.form, self.on = form, not plain

    def block(self, enabled: bool = True, to: torch.dtype = torch.bfloat16) -> Any:
        return torch.autocast("cpu", to, enabled=enabled and self.on)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, self.form)(x)

    def bare(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(F.gelu(self.b(self.a(x).tanh())))

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        with self.block():
            return self.c(F.gelu(self.b(self.a(x).tanh())))

    def first(self, x: torch.Tensor) -> torch.Tensor:
        with self.block():
            h = self.a(x)
        return self.c(self.b(single(h)).tanh())

    def off_within(self, x: torch.Tensor) -> torch.Tensor:
        with self.block():
            h = self.a(x)
            with self.block(False):
                h = self.b(single(h)).exp() * self.b(single(h))
            return self.c(h)

    def on_within(self, x: torch.Tensor) -> torch.Tensor:
        with self.block(False):
            h = self.a(x)
            with self.block():
                h = self.b(h).tanh()
            return self.c(single(h))

    def decorated(self, x: torch.Tensor) -> torch.Tensor:
        return self.block()(lambda y: self.c(self.b(self.a(y))))(x)

    def without_gradient(self, x: torch.Tensor) -> torch.Tensor:
        with self.block():
            with torch.no_grad():
                h = self.a(x)
            return self.b(h) * self.c(x)

    def entered_twice(self, x: torch.Tensor) -> torch.Tensor:
        block = self.block()
        with block:
            h = self.a(x)
        with block:
            return self.c(self.b(h))

    def left_by_an_error(self, x: torch.Tensor) -> torch.Tensor:
        try:
            with self.block():
                h = self.a(x)
                raise KeyError
        except KeyError:
            return self.c(self.b(single(h)))


FORMS = [n for n in vars(Blocks) if n not in ("block", "forward", "bare") and not n.startswith("_")]


def rows() -> list[dict[str, Any]]:
    return [{"x": gaussian(6, 16, seed=seed)} for seed in range(BATCHES)]


@pytest.mark.parametrize("around", [None, torch.bfloat16], ids=["alone", "within another"])
@pytest.mark.parametrize("form", FORMS)
def test_blocks_of_the_model_s_own(form: str, around: torch.dtype | None) -> None:
    compare(lambda: Blocks(form), rows(), around, lambda: Blocks(form, plain=True))


def test_products_are_low_within_the_blocks_alone() -> None:
    """A product outside of the blocks has fp32's bits."""

    class Halved(Blocks):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            with self.block():
                low = self.a(x)
                with self.block(False):
                    off = self.b(x)
            return low, off, self.c(x)

    twins = Twins(Halved(""), strict=True)
    ours, eager = twins.each(lambda m: m(gaussian(6, 16)))
    assert [t.dtype for t in ours] == [t.dtype for t in eager]
    assert ours[0].dtype == torch.bfloat16
    for mine, theirs in zip(ours[1:], eager[1:], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_a_trainer_takes_blocks_of_the_model_s_own(form: str) -> None:
    torch.manual_seed(0)
    models = [Blocks(form), Blocks(form)]
    models[1].load_state_dict(models[0].state_dict())
    data, target = gaussian(6, 16), gaussian(6, 16, seed=1)
    found: list[list[float]] = []
    trainer = onward.Trainer(
        models[0], torch.optim.SGD(models[0].parameters(), lr=0.1),
        loss_fn=lambda y, t: F.mse_loss(y.float(), t),
    )  # fmt: skip
    found.append([float(trainer.train_step(data, target=target).loss) for _ in range(6)])
    optimizer = torch.optim.SGD(models[1].parameters(), lr=0.1)
    found.append([])
    for _ in range(6):
        loss = F.mse_loss(models[1](data).float(), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found[1].append(float(loss.detach()))
    assert found[0] == pytest.approx(found[1], rel=0.01)


def test_a_verification_refuses_them() -> None:
    model = Blocks("first")
    trainer = onward.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=F.mse_loss, verify=True
    )
    with pytest.raises(OnwardError, match=r"enters torch.autocast at a, .* fix: remove it"):
        trainer.train_step(gaussian(6, 16), target=gaussian(6, 16))


def test_two_types_in_one_model_are_refused() -> None:
    class Both(Blocks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with self.block():
                h = self.a(x).float()
            with self.block(to=torch.float16):
                return self.b(h)

    model = onward.accelerate(Both(""), strict=True)
    with pytest.raises(
        CaptureError, match=r"cast to bfloat16 and float16, .* fix: use the same dtype"
    ):
        model(gaussian(2, 16))


# ---- guards


def test_each_state_of_autocast_has_its_graph(captures: list[int]) -> None:
    twins = Twins(Blocks("bare").train(), strict=True)
    x = gaussian(6, 16)
    for turn in range(3):
        for to in (None, torch.bfloat16, torch.float16):
            with torch.autocast("cpu", to or torch.bfloat16, enabled=to is not None):
                ours, eager = twins.each(lambda m: m(x))
            assert ours.dtype == eager.dtype
            torch.testing.assert_close(ours, eager, rtol=0.02, atol=0.02)
            assert turn == 0 or len(captures) == 3
    assert len(captures) == 3


def test_backward_within_and_without() -> None:
    twins = Twins(Blocks("bare"), strict=True)
    x = gaussian(6, 16)
    for inside in (True, False):
        twins.zero()
        for model in twins.both:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().square().sum()
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
        for p, q in zip(twins.ours.parameters(), twins.eager.parameters(), strict=True):
            torch.testing.assert_close(
                p.grad, q.grad, rtol=0.05, atol=0.02 * float(q.grad.abs().max())
            )
    twins.zero()
    twins.each(lambda m: m(x).square().sum().backward())
    exact = [p.grad.clone() for p in twins.eager.parameters()]
    twins.ours.zero_grad()
    loss = twins.ours(x).square().sum()
    with torch.autocast("cpu", torch.bfloat16):  # nothing is cast of a forward in fp32
        loss.backward()
    for p, g in zip(twins.ours.parameters(), exact, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=1e-5, atol=1e-5 * float(g.abs().max()))


def test_a_weight_that_changes_before_the_backward() -> None:
    """A weight may change before backward, since eager mode has kept its low copies by then."""
    twins = Twins(Blocks("bare"), strict=True)
    for model in twins.both:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(gaussian(6, 16)).float().square().sum()
        with torch.no_grad():
            model.b.weight.mul_(3.0)
        loss.backward()
    for p, q in zip(twins.ours.parameters(), twins.eager.parameters(), strict=True):
        room = 0.02 * float(q.grad.abs().max())
        torch.testing.assert_close(p.grad, q.grad, rtol=0.05, atol=room)


def test_outputs_that_wait_are_read_after_the_block() -> None:
    twins = Twins(gpt2(dropout=0.0), strict=True)
    data = batch(3, 8)
    for _ in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            ours, eager = twins.each(lambda m: m(**data))
        ours.loss.backward()
    assert "logits" in accelerated(twins.ours).last_call().fields  # type: ignore[union-attr]
    assert ours.logits.dtype == eager.logits.dtype == torch.bfloat16
    torch.testing.assert_close(ours.logits, eager.logits, rtol=0.02, atol=0.02)


def test_without_gradients() -> None:
    twins = Twins(gpt2(dropout=0.0).eval(), strict=True)
    for context in (torch.no_grad, torch.inference_mode):
        with context(), torch.autocast("cpu", torch.bfloat16):
            ours, eager = twins.each(
                lambda m: m(input_ids=batch(3, 8)["input_ids"], use_cache=False)
            )
        assert ours.logits.dtype == eager.logits.dtype == torch.bfloat16
        torch.testing.assert_close(ours.logits, eager.logits, rtol=0.02, atol=0.02)


def test_a_gradient_by_an_input_and_by_a_low_output() -> None:
    twins = Twins(Blocks("bare"), strict=True)
    given = [gaussian(6, 16).requires_grad_() for _ in range(2)]
    for model, x in zip(twins.both, given, strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        y.backward(torch.ones_like(y))
    assert given[0].grad is not None and given[1].grad is not None
    torch.testing.assert_close(given[0].grad, given[1].grad, rtol=0.03, atol=0.02)


def test_explained_as_it_runs() -> None:
    """A call is explained under autocast and outside of it, for the same batch and for another
    size."""
    model = onward.accelerate(gpt2(dropout=0.0), strict=True)
    with torch.autocast("cpu", torch.bfloat16):
        model(**batch(3, 8)).loss.backward()
        within = onward.explain(model, kwargs=batch(3, 8), batch_sizes=(1, 2))
    last = onward.explain(model, batch_sizes=(1,))  # a size that another capture serves
    outside = onward.explain(model, kwargs=batch(3, 8))
    passes = [{change.name for change in found.changes} for found in (within, last, outside)]
    assert ["write_casts" in names for names in passes] == [True, True, False]
    assert within.captured and last.captured and outside.captured
    assert within.memory is not None and outside.memory is not None
    assert within.memory.arena != outside.memory.arena


# ---- fp16 and its scaler


@pytest.mark.parametrize("kind", [gpt2, bert])
def test_a_scaler_keeps_small_gradients(kind: Any) -> None:
    """A scaler keeps the gradients of a loss of 1e-6, which fp16 alone cannot hold."""
    data = [batch(4, 12, seed=seed) for seed in range(1, 1 + BATCHES)]
    model = kind(dropout=0.0, layers=1, width=32)
    truth = copy.deepcopy(model).double()
    found: tuple[list[dict[str, torch.Tensor]], ...] = ([], [], [])
    eager, ours = copy.deepcopy(model), onward.accelerate(copy.deepcopy(model), strict=True)
    for inputs in data:
        for at, (m, scale) in enumerate(((truth, 1.0), (eager, 2.0**16), (ours, 2.0**16))):
            m.zero_grad()
            with torch.autocast("cpu", torch.float16, enabled=at > 0):
                loss = m(**inputs).loss * 1e-4
            (loss * scale).backward()
            found[at].append(
                {n: p.grad / scale for n, p in m.named_parameters() if p.grad is not None}
            )
    assert_as_near(found[0], found[1], found[2])


# ---- what does not fit in a graph


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.detach().float().numpy() * 2)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return g * 2


class Apart(Blocks):
    def __init__(self) -> None:
        super().__init__("")
        self.part = Part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.part(self.a(x)).float())


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(self.inner(x))


def test_parts_that_run_in_pytorch() -> None:
    """Parts that run in PyTorch are given fp32 and compute in it."""
    twins = Twins(Apart())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EagerWarning)
        for _ in range(2):
            twins.zero()
            for model in twins.both:
                with torch.autocast("cpu", torch.bfloat16):
                    y = model(gaussian(6, 16))
                y.float().square().sum().backward()
    held = accelerated(twins.ours)
    assert held is not None and held.last_call().captured.regions
    for p, q in zip(twins.ours.parameters(), twins.eager.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if q.grad is not None:
            room = 0.03 * float(q.grad.abs().max())
            torch.testing.assert_close(p.grad, q.grad, rtol=0.05, atol=room)


def test_torch_is_as_it_was() -> None:
    """A capture leaves autocast's own methods in their place, and its state."""
    kind = torch.amp.autocast_mode.autocast
    before = kind.__enter__, kind.__exit__
    with torch.autocast("cpu", torch.float16):
        model = onward.accelerate(Blocks("bare"), strict=True)
        model(gaussian(2, 16))
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.float16
        assert (gaussian(2, 2) @ gaussian(2, 2)).dtype == torch.float16
    assert (kind.__enter__, kind.__exit__) == before
    assert not torch.is_autocast_enabled("cpu")


def test_a_low_batch_as_another_model_gives_it() -> None:
    """Two accelerated models run one after the other; the tensor between them is bf16."""
    first, second = (Twins(Blocks("bare"), strict=True) for _ in range(2))
    for ours in (True, False):
        a, b = (t.ours if ours else t.eager for t in (first, second))
        with torch.autocast("cpu", torch.bfloat16):
            h = a(gaussian(6, 16))
            y = b(h)
        assert h.dtype == y.dtype == torch.bfloat16
        y.float().square().sum().backward()
    for twins in (first, second):
        for p, q in zip(twins.ours.parameters(), twins.eager.parameters(), strict=True):
            room = 0.03 * float(q.grad.abs().max())
            torch.testing.assert_close(p.grad, q.grad, rtol=0.05, atol=room)
