"""What is captured need not be a torch module: whatever keeps the protocol is trained."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import onward.captured
from onward.capture import Captured
from onward.compile import Compiler
from onward.differentiate import Recipe, UpdateGroup
from onward.execute import Memory
from onward.graph.build import Builder
from onward.graph.graph import Graph, Role
from onward.graph.ops.optimizers import OPTIMIZERS
from onward.graph.types import parse_type
from onward.kernels import host
from onward.prepare.prepared_batch import scalars

RATE = 0.1


class Written:
    """Two layers and a squared error, written by hand over arrays, as a file's reader might."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.owned = {name: torch.from_numpy(a) for name, a in arrays.items()}
        self.leaves = {0: "x", 1: "y"}
        self.reached: Collection[str] = ("w", "v")
        self.frozen: Collection[str] = ()
        self.constants: Sequence[Any] = ()
        self.regions: Sequence[Any] = ()
        self.notes: Sequence[str] = ()
        self.reads: Any = None  # of which guards of a module ask
        self.graph = Graph("written")
        b = Builder(self.graph)
        x = self.graph.input("x", parse_type("f32[B,3]"), Role.BATCH)
        y = self.graph.input("y", parse_type("f32[B,2]"), Role.BATCH)
        w = self.graph.input("w", parse_type("f32[3,5]"), Role.PARAM)
        v = self.graph.input("v", parse_type("f32[5,2]"), Role.PARAM)
        error = b.Sub(b.MatMul(b.Tanh(b.MatMul(x, w)), v), y)
        self.graph.outputs["loss"] = b.ReduceMean(b.Mul(error, error), keepdims=0)
        self.graph.signature = self.graph.signature.but(loss="loss")

    def dims(self, leaves: list[Any], /) -> dict[str, int] | None:
        return {"B": leaves[0].shape[0]}

    def suits(self, leaves: list[Any], /) -> bool:
        return True


def test_the_protocol_knows_no_torch() -> None:
    source = Path(onward.captured.__file__).read_text()
    modules = {
        alias.name if isinstance(node, ast.Import) else node.module or ""
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    assert not [name for name in modules if name.split(".")[0] == "torch"]


def test_what_is_no_module_trains_down_the_same_road() -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "w": rng.standard_normal((3, 5)).astype(np.float32),
        "v": rng.standard_normal((5, 2)).astype(np.float32),
    }
    twins = {name: nn.Parameter(torch.from_numpy(a.copy())) for name, a in arrays.items()}
    captured: Captured = Written(arrays)
    sgd = OPTIMIZERS["SGD"]
    group = {"lr": RATE, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}
    recipe = Recipe((UpdateGroup(0, ("w", "v"), sgd, sgd.attributes(group)),))
    compiler = Compiler(host())
    step = compiler.step(compiler.forward(captured), recipe)
    optimizer = torch.optim.SGD(twins.values(), lr=RATE)
    for size in (4, 7):
        x, y = torch.randn(size, 3), torch.randn(size, 2)
        dims = captured.dims([x, y])
        assert dims is not None
        plan = compiler.plan(step, step.signature.requested((), update=True), dims)
        executable = compiler.bind(plan, Memory(torch.device("cpu")), captured.owned)
        signature = plan.signature
        rates = {n: group[h.name] for h, n in signature.hyperparameters.items()}
        counts = dict.fromkeys(signature.clocks.values(), 1)
        given = scalars(signature, torch.zeros(2, dtype=torch.int64), offset=0, weight=1.0)
        executable.run({"x": x, "y": y, **given, **rates, **counts})
        loss = (torch.tanh(x @ twins["w"]) @ twins["v"] - y).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(executable.output("loss"), loss.detach())
        for name, twin in twins.items():
            torch.testing.assert_close(torch.from_numpy(arrays[name]), twin.detach())
