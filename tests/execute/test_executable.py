"""Executables: what making one does, and what a run reads on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from onward.errors import OnwardError
from onward.execute import Executable, Memory, StateStore
from onward.execute.owned import check_owned
from onward.execute.runtime import Runtime
from onward.graph.build import Builder
from onward.graph.graph import Graph, Role
from onward.graph.signature import Signature
from onward.graph.types import parse_type
from onward.kernels import KERNELS, Target, host
from onward.plan import MemoryRegion, Plan, make_plan
from onward.rewrite import specialize


def step() -> Plan:
    """`w - x`, written in place where all is finite."""
    graph = Graph()
    b = Builder(graph, backward=True)
    w = graph.input("w", parse_type("f32[3,4]"), Role.PARAM)
    x = graph.input("x", parse_type("f32[3,4]"), Role.BATCH)
    g = b.Tanh(b.Mul(x, x))
    graph.outputs = {"finite": b.AllFinite(None, g), "next.w": b.Sub(w, g)}
    graph.signature = Signature(finite="finite")
    graph.state["next.w"] = w
    return make_plan(specialize(graph, {}), {})


def test_making_one_binds_and_allocates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[str] = []

    def counted(plain: Any) -> Any:
        def bind(use: Any) -> Any:
            bound.append(plain.name)
            return plain.bind(use)

        return replace(plain, bind=bind)

    for op in ("Mul", "Tanh", "Sub", "AllFinite"):
        monkeypatch.setitem(KERNELS, op, tuple(counted(k) for k in KERNELS[op]))
    plan, memory = step(), Memory(torch.device("cpu"))
    executable = Executable(plan, memory, {"w": torch.zeros(3, 4)})
    assert bound == []
    assert executable.launches == []
    assert memory.arena_bytes(MemoryRegion.SCRATCH) == 0
    executable.run({"x": torch.ones(3, 4)})
    assert len(bound) == len(executable.launches) == len(plan.launches) == 4
    executable.run({"x": torch.ones(3, 4)})
    assert len(bound) == 4, "bound once"


HOST_READS = ("__bool__", "__int__", "__float__", "__index__", "item", "tolist", "numpy", "cpu")


@pytest.mark.parametrize("finite", [True, False])
def test_the_host_reads_one_flag_a_run(finite: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device each read would wait for all that is queued."""
    w, x = torch.zeros(3, 4), torch.full((3, 4), 1.0 if finite else float("nan"))
    executable = Executable(step(), Memory(torch.device("cpu")), {"w": w})
    executable.bind()
    reads: list[str] = []

    def recorded(name: str) -> Any:
        plain = getattr(torch.Tensor, name)

        def read(self: torch.Tensor, *args: Any, **more: Any) -> Any:
            reads.append(name)
            return plain(self, *args, **more)

        return read

    with monkeypatch.context() as patch:
        for name in HOST_READS:
            patch.setattr(torch.Tensor, name, recorded(name))
        wrote = executable.run({"x": x})
    assert reads == ["__bool__"]
    assert wrote is finite
    want = -np.tanh(np.ones((3, 4), np.float32)) if finite else np.zeros((3, 4))
    np.testing.assert_allclose(w.numpy(), want, rtol=1e-6)


class Entered(Runtime):
    """A device that knows how often its context is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = 0

    @contextmanager
    def current(self) -> Iterator[None]:
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def put(self, content: torch.Tensor, place: torch.Tensor) -> None:
        assert self.depth
        super().put(content, place)


def test_launches_have_their_device_as_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever device the caller's thread is on: as they are bound, run, timed and watched."""
    device, seen = Entered(), []

    def counted(plain: Any) -> Any:
        def bind(use: Any) -> Any:
            seen.append(("bind", device.depth))
            launch = plain.bind(use)
            return lambda: (seen.append(("run", device.depth)), launch())[1]

        return replace(plain, bind=bind)

    for op in ("Mul", "Tanh", "Sub", "AllFinite"):
        monkeypatch.setitem(KERNELS, op, tuple(counted(k) for k in KERNELS[op]))
    memory, x = Memory(torch.device("cpu")), {"x": torch.ones(3, 4)}
    memory.runtime = device
    executable = Executable(step(), memory, {"w": torch.zeros(3, 4)})
    executable.run(x)
    assert seen == [("bind", 1)] * 4 + [("run", 1)] * 4
    executable.profile(x)
    executable.watch(x, None, lambda _: None, lambda _: None)
    assert seen[8:] == [("run", 1)] * (4 + executable.plan.commit)
    assert device.depth == 0


# ---- bad input


def lookups(device: str = "cpu", finite: bool = True) -> Plan:
    """`w - rows of two tables at ids`, written in place; each lookup may find a bad id."""
    graph = Graph()
    b = Builder(graph, backward=True)
    w = graph.input("w", parse_type("f32[2,3]"), Role.PARAM)
    tables = [graph.input(f"t{i}", parse_type("f32[5,3]"), Role.PARAM) for i in range(2)]
    ids = [graph.input(f"ids{i}", parse_type("i64[2]"), Role.BATCH) for i in range(2)]
    first, second = (b.Embedding(t, i) for t, i in zip(tables, ids, strict=True))
    g = b.Tanh(b.Add(first, second))
    graph.outputs = {"next.w": b.Sub(w, g)}
    if finite:
        graph.outputs = {"finite": b.AllFinite(None, g), **graph.outputs}
        graph.signature = Signature(finite="finite")
    graph.state["next.w"] = w
    return make_plan(specialize(graph, {}), {})


def owned() -> dict[str, torch.Tensor]:
    tables = {f"t{i}": torch.arange(15.0).reshape(5, 3) + i for i in range(2)}
    return {"w": torch.zeros(2, 3), **tables}


GOOD = torch.tensor([1, 4])
native_only = pytest.mark.skipif(
    not host().has_library, reason="torch's own operators refuse ids at once"
)


@native_only
def test_flags_are_read_once_a_run_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, reads = lookups(), []
    assert plan.flags is not None and plan.flags.shape == (2, 2)
    assert [x.flag is not None for x in plan.launches].count(True) == 2
    executable = Executable(plan, Memory(torch.device("cpu")), owned())
    executable.bind()
    assert executable.nbytes()[MemoryRegion.PERSISTENT] == plan.sizes[MemoryRegion.PERSISTENT]

    def recorded(name: str) -> Any:
        plain = getattr(torch.Tensor, name)
        return lambda self, *args, **more: (reads.append(name), plain(self, *args, **more))[1]

    with monkeypatch.context() as patch:
        for name in HOST_READS:
            patch.setattr(torch.Tensor, name, recorded(name))
        executable.run({"ids0": GOOD, "ids1": GOOD})
    assert reads == ["tolist", "__bool__"]


@native_only
@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize(
    ("first", "second", "bad"), [([1, 5], [0, 1], 5), ([0, 1], [-1, 1], -1), ([9, 0], [7, 8], 9)]
)
def test_the_first_bad_input_is_told_and_nothing_is_written(
    finite: bool, first: list[int], second: list[int], bad: int
) -> None:
    tensors = owned()
    executable = Executable(lookups(finite=finite), Memory(torch.device("cpu")), tensors)
    good = {"ids0": GOOD, "ids1": GOOD}
    executable.run(good)
    want = tensors["w"].clone()
    assert bool(want.any())
    told: list[bool] = []
    with pytest.raises(IndexError, match=f"index {bad} is out of range for a table .* of 5 rows"):
        executable.run(
            {"ids0": torch.tensor(first), "ids1": torch.tensor(second)}, done=told.append
        )
    assert not told and not executable.memory.torn
    assert torch.equal(tensors["w"], want)
    with pytest.raises(IndexError, match=f"index {bad} is out of range for a table"):
        executable.profile({"ids0": torch.tensor(first), "ids1": torch.tensor(second)})
    assert torch.equal(tensors["w"], want)
    executable.run(good)  # the flags of the run before are gone
    assert torch.equal(tensors["w"], 2 * want)


@native_only
def test_bad_input_is_told_where_a_later_launch_fails_on_it() -> None:
    tensors = owned()
    executable = Executable(lookups(), Memory(torch.device("cpu")), tensors)
    executable.bind()

    def fail() -> None:
        raise RuntimeError("of what the bad row left")

    executable.launches[executable.plan.commit - 1] = fail
    with pytest.raises(IndexError, match="index 5 is out of range"):
        executable.run({"ids0": torch.tensor([1, 5]), "ids1": GOOD})
    with pytest.raises(RuntimeError, match="of what the bad row left"):
        executable.run({"ids0": GOOD, "ids1": GOOD})
    assert not tensors["w"].any()


@native_only
def test_bad_input_of_the_commit_is_told() -> None:
    """Where launches behind the first write look rows up."""
    tensors = owned()
    plan = lookups(finite=False)
    executable = Executable(replace(plan, commit=1), Memory(torch.device("cpu")), tensors)
    with pytest.raises(IndexError, match="index 7 is out of range"):
        executable.run({"ids0": GOOD, "ids1": torch.tensor([0, 7])})
    assert executable.memory.torn


# ---- what the host reads at each launch


def test_hyperparameters_lie_where_the_host_reads_them() -> None:
    """A step on a device without memory of its own, of which nothing can be read."""
    graph = Graph()
    b = Builder(graph, backward=True)
    roles = {"p": Role.PARAM, "g": Role.BATCH, "m": Role.STATE, "v": Role.STATE}
    p, g, m, v = (graph.input(name, parse_type("f32[4]"), role) for name, role in roles.items())
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "decay": 0.0, "step": 1}
    hyper = [
        graph.input(name, parse_type("i64[]" if name == "step" else "f64[]"), Role.HYPER)
        for name in numbers
    ]
    made = b.AdamUpdate(p, g, m, v, None, *hyper, None, decoupled=0)
    graph.outputs = {f"next.{x.name}": y for x, y in zip((p, m, v), made, strict=True)}
    graph.state.update({f"next.{x.name}": x for x in (p, m, v)})
    plan = make_plan(specialize(graph, {}), {}, target=Target("cuda"))
    assert [x.kernel.name for x in plan.launches] == ["aten.fused_adam"]
    device = torch.device("meta")
    executable = Executable(plan, Memory(device), {"p": torch.zeros(4, device=device)})
    executable.run({"g": torch.ones(4, device=device), **numbers})
    for name, layout in plan.inputs.items():
        there = executable.tensor(layout).device.type
        assert there == ("cpu" if name in numbers else "meta"), name


def test_every_operand_can_be_looked_at() -> None:
    plan = step()
    executable = Executable(plan, Memory(torch.device("cpu")), {"w": torch.zeros(3, 4)})
    executable.run({"x": torch.full((3, 4), 2.0)})
    [tanh] = [launch for launch in plan.launches if launch.op == "Tanh"]
    np.testing.assert_allclose(executable.tensor(tanh.outputs[0]).numpy(), np.tanh(4.0), rtol=1e-6)


def test_a_parameter_that_has_moved_to_another_device_is_refused() -> None:
    """A GPU's kernels would read an address of the other one."""
    plan, w = step(), torch.empty(3, 4)
    check_owned(plan, {"w": w}, [w], torch.device("cpu"))
    there = {"w": w.to("meta")}
    with pytest.raises(OnwardError, match="'w' is on meta now, but was on cpu when training began"):
        check_owned(plan, there, [], torch.device("cpu"))


def test_state_outside_of_the_device_is_waited_for_where_an_update_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until then copies to it may be under way."""
    waited: list[int] = []
    memory = Memory(torch.device("cpu"))
    memory.store = StateStore(torch.device("cpu"), is_staged=True)
    monkeypatch.setattr(memory.store, "settle", lambda: waited.append(1))
    w = torch.zeros(3, 4)
    bound = Executable(step(), memory, {"w": w})
    inputs = {"x": torch.ones(3, 4)}
    bound.run(inputs)
    assert len(waited) == 1
    launches = bound._binder.launches

    def failing() -> None:
        raise RuntimeError("an update fails")

    launches[bound.plan.commit] = failing
    with pytest.raises(RuntimeError, match="an update fails"):
        bound.run(inputs)
    assert len(waited) == 2
