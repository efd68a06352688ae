"""Several threads, each with a Trainer or an accelerated model: as alone, to the bit."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import onward
from onward.execute import Executable, Memory
from onward.graph.build import Builder
from onward.graph.graph import Graph, Role
from onward.graph.types import parse_type
from onward.kernels import host
from onward.plan import make_plan

pytestmark = pytest.mark.usefixtures("captures_kept")
STEPS = 12


class Net(nn.Module):
    """A classifier, wide enough for native kernels to share its work among threads."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(
            nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Dropout(0.1), nn.Linear(256, 600)
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layers(x), labels)


def data(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(96, 64, generator=generator)
    return x, torch.randint(0, 600, (96,), generator=generator)


def trainer_of(model: nn.Module) -> onward.Trainer:
    return onward.Trainer(model, torch.optim.AdamW(model.parameters()), options={"seed": 1})


def trained(model: nn.Module, seed: int) -> list[torch.Tensor]:
    """Losses and weights of a Trainer."""
    trainer = trainer_of(model)
    losses = [trainer.train_step(*data(seed + i)).loss for i in range(STEPS)]
    return [*losses, *(p.detach().clone() for p in model.parameters())]


def looped(model: nn.Module, seed: int) -> list[torch.Tensor]:
    """Losses and weights of a loop around an accelerated model. Its dropout is off: it would draw
    from the generator that all threads share."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    onward.accelerate(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[torch.Tensor] = []
    for i in range(STEPS):
        optimizer.zero_grad()
        loss = model(*data(seed + i))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach().clone() for p in model.parameters())]


WAYS: dict[str, tuple[Callable[..., list[torch.Tensor]], ...]] = {
    "two Trainers": (trained, trained),
    "a Trainer and an accelerated model": (trained, looped),
    "two accelerated models": (looped, looped),
    "two of each": (trained, looped, trained, looped),
}


@pytest.fixture(params=[1, 2], ids="threads {}".format)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("way", WAYS)
def test_each_thread_computes_as_alone(way: str, threads: int) -> None:
    acts = WAYS[way]
    models = [[Net(i) for i in range(len(acts))] for _ in range(2)]
    alone = [act(models[0][i], 100 * i) for i, act in enumerate(acts)]
    with ThreadPoolExecutor(len(acts)) as pool:
        runs = [pool.submit(act, models[1][i], 100 * i) for i, act in enumerate(acts)]
        found = [run.result(timeout=120) for run in runs]
    for got, want in zip(found, alone, strict=True):
        assert all(map(torch.equal, got, want))


def test_a_trainer_serves_other_threads_than_its_makers(threads: int) -> None:
    """A new thread has OpenMP's own number of threads until PyTorch has told it."""
    want, model = trained(Net(3), 0), Net(3)
    trainer = trainer_of(model)
    got: list[torch.Tensor] = []
    for i in range(STEPS):
        run = lambda i=i: got.append(trainer.train_step(*data(i)).loss)  # noqa: E731
        thread = threading.Thread(target=run)
        thread.start()
        thread.join(120)
    got += [p.detach() for p in model.parameters()]
    assert all(map(torch.equal, got, want))


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_native_kernels_of_a_new_thread_have_pytorchs_number(threads: int) -> None:
    """A step of native kernels alone, since PyTorch's operators would tell the thread as well."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = {x.split()[-1] for x in lines if "libgomp" in x}
    if not found or not host().instructions:
        pytest.skip("PyTorch is built with another OpenMP")
    openmp = [ctypes.CDLL(path) for path in found]
    graph = Graph()
    x, w = (
        graph.input(n, parse_type(t), Role.BATCH) for n, t in (("x", "f32[8,16]"), ("w", "f32[16]"))
    )
    graph.output("y", Builder(graph).LayerNormalization(x, w, w)[0])
    plan = make_plan(graph, {})
    assert {launch.kernel.name.partition(".")[0] for launch in plan.launches} == {"native"}
    executable = Executable(plan, Memory(torch.device("cpu")), {})
    feeds = {"x": torch.ones(8, 16), "w": torch.ones(16)}
    numbers: list[int] = []

    def run() -> None:
        executable.run(feeds)
        numbers.extend(each.omp_get_max_threads() for each in openmp)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(120)
    assert threads in numbers


def test_trainers_of_the_same_parameters_take_turns() -> None:
    """Two that update at once would mix their writes. Here the updates are alike, whoever makes
    them, so that any order gives the same weights."""

    def trainers(model: nn.Module) -> list[onward.Trainer]:
        return [onward.Trainer(model, onward.optim.SGD(lr=0.1)) for _ in range(2)]

    model, alone = Net(5).eval(), Net(5).eval()
    for held in (model, alone):
        held.layers[3] = nn.Identity()
    pair = trainers(model)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda i: pair[i % 2].train_step(*data(0)), range(2 * STEPS)))
    one = trainers(alone)
    for i in range(2 * STEPS):
        one[i % 2].train_step(*data(0))
    assert all(map(torch.equal, model.parameters(), alone.parameters()))
    part = onward.Trainer(model.layers, onward.optim.SGD(), lambda y: y.sum())
    assert part._lock is pair[0]._lock is pair[1]._lock is not one[0]._lock


def test_the_number_of_threads_may_change_between_steps() -> None:
    """Sums over threads differ in their last bits, as in PyTorch; the plan stays."""
    model, twin = Net(6), Net(6)
    for held in (model, twin):
        held.layers[3] = nn.Identity()
    trainer, other = trainer_of(model), trainer_of(twin)
    before = torch.get_num_threads()
    try:
        for number in (2, 1, 3, 2, 1):
            torch.set_num_threads(1)
            want = other.train_step(*data(number)).loss
            torch.set_num_threads(number)
            got = trainer.train_step(*data(number)).loss
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    finally:
        torch.set_num_threads(before)


class Boom(Exception):
    """Raised by a user's code."""


def boom(*_: Any) -> Any:
    raise Boom


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "before the forward": lambda m: m.register_forward_pre_hook(boom),
    "after the forward": lambda m: m.register_forward_hook(boom),
    "of a layer": lambda m: m.get_submodule("layers.2").register_forward_hook(boom),
    "of the backward": lambda m: m.register_full_backward_hook(boom),
    "of a gradient": lambda m: next(m.parameters()).register_hook(boom),
    "of an accumulated gradient": lambda m: next(m.parameters()).register_post_accumulate_grad_hook(
        boom
    ),
}


@pytest.mark.filterwarnings("ignore::onward.EagerWarning")  # where a hook takes a part out
@pytest.mark.filterwarnings("ignore:Full backward hook:UserWarning")
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_of_an_accelerated_model_that_raises_costs_one_step(hook: str) -> None:
    model, twin = Net(7), Net(7)
    for held in (model, twin):
        held.layers[3] = nn.Identity()
    onward.accelerate(model)

    def step(held: nn.Module) -> list[torch.Tensor]:
        held.zero_grad()
        held(*data(0)).backward()
        return [p.grad.clone() for p in held.parameters() if p.grad is not None]

    step(model)
    handle = HOOKS[hook](model)
    with pytest.raises(Boom):
        step(model)
    handle.remove()
    for got, want in zip(step(model), step(twin), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


class Part(torch.autograd.Function):
    """A function that runs in PyTorch and raises where it is told to."""

    where = ""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        if Part.where == "forward":
            raise Boom
        if Part.where == "memory":
            raise MemoryError
        return torch.from_numpy(x.detach().numpy() * 2)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        if Part.where == "backward":
            raise Boom
        return torch.from_numpy(grads[0].numpy() * 2)


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.detach().numpy().sum()) == -1.5:
            return x
        return Part.apply(x)


class WithPart(nn.Module):
    """A layer, a part that no graph has, another layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.first, self.part, self.last = nn.Linear(6, 6), Doubling(), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.last(self.part(self.first(x))), labels)


@pytest.mark.parametrize("where", ["forward", "backward", "memory"])
@pytest.mark.parametrize("way", ["Trainer", "accelerate"])
def test_a_part_in_pytorch_that_raises_costs_one_step(
    way: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, labels = torch.randn(8, 6), torch.arange(8) % 5

    def stepper() -> tuple[nn.Module, Callable[[], float]]:
        model = WithPart()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if way == "Trainer":
            trainer = onward.Trainer(model, optimizer)
            return model, lambda: float(trainer.train_step(x, labels).loss)
        onward.accelerate(model)

        def step() -> float:
            optimizer.zero_grad()
            loss = model(x, labels)
            loss.backward()
            optimizer.step()
            return loss.item()

        return model, step

    model, step = stepper()
    twin, other = stepper()
    with pytest.warns(onward.EagerWarning):
        step()
        other()
    monkeypatch.setattr(Part, "where", where)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises((Boom, MemoryError, onward.OnwardError)):
        step()
    assert all(map(torch.equal, before, model.parameters()))
    monkeypatch.setattr(Part, "where", "")
    assert [step() for _ in range(2)] == [other() for _ in range(2)]
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
