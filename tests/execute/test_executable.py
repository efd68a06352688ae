"""Executables: what making one does, and what a run reads on the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from onward.execute import Executable, Memory
from onward.graph.build import Builder
from onward.graph.graph import Graph, Role
from onward.graph.signature import Signature
from onward.graph.types import parse_type
from onward.kernels import KERNELS
from onward.plan import Plan, Region, bind, make_plan


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
    return make_plan(bind(graph, {}), {})


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
    assert memory.arena_bytes(Region.SCRATCH) == 0
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


def test_every_operand_can_be_looked_at() -> None:
    plan = step()
    executable = Executable(plan, Memory(torch.device("cpu")), {"w": torch.zeros(3, 4)})
    executable.run({"x": torch.full((3, 4), 2.0)})
    [tanh] = [launch for launch in plan.launches if launch.op == "Tanh"]
    np.testing.assert_allclose(executable.tensor(tanh.outputs[0]).numpy(), np.tanh(4.0), rtol=1e-6)
