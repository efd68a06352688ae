"""Updates of every optimizer with every combination of settings, over fifty steps.

The body of its op is torch's rule in fp64, or the paper's; the kernels are as near to that as
torch's own kernels in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from test_native_pointwise import bound
from update_cases import CASES, UpdateCase

from onward.graph.build import Builder, inline
from onward.graph.file import to_proto
from onward.graph.graph import Graph, Role
from onward.graph.ops.optimizers import OPTIMIZERS, Optimizer
from onward.graph.types import DType, Type
from onward.kernels import NATIVE
from onward.kernels.native.library import library

STEPS = 50


class Held:
    """The operands of one parameter's updates, by the record of its optimizer."""

    def __init__(self, case: UpdateCase, shape: tuple[int, ...], dtype: DType) -> None:
        record = self.record = OPTIMIZERS[case.name]
        self.group: dict[str, Any] = case.made([torch.zeros(2, 2)]).param_groups[0]
        self.attributes = record.attributes(self.group)
        types = record.tensors("", Type(dtype, shape))
        self.slots: dict[str, Type] = {
            s: t for s, t in types.items() if t is not None and record.kept(self.group, s)
        }
        self.starts = {s: record.start(self.group, s) for s in self.slots}


def batches(shape: tuple[int, ...]) -> list[torch.Tensor]:
    dice = torch.Generator().manual_seed(len(shape) + 1)
    found = torch.randn(STEPS, *shape, generator=dice, dtype=torch.float64)
    if shape:
        found[:, 0] = 0.0  # a row without gradient, as of an embedding
    # fp32 holds them all, so that only updates round
    return list(found.float().double() + 0.25 * (found.float().double() > 0))


def start_of(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(9)).double()


def reference(case: UpdateCase, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The parameter after all steps in eager PyTorch."""
    p = torch.nn.Parameter(start_of(shape).to(dtype))
    optimizer = case.reference([p])
    for i, g in enumerate(batches(shape)):
        p.grad = (0.5 * g).to(dtype)
        rate(optimizer.param_groups[0], case, i)
        optimizer.step()
    return p.detach()


def rate(group: dict[str, Any], case: UpdateCase, i: int) -> None:
    group["lr"] = case.settings["lr"] * (1.0 if i < 20 else 0.4)


def numbers(record: Optimizer, group: dict[str, Any]) -> list[np.ndarray]:
    return [np.array(value) for value in record.values(group).values()]


def by_body(case: UpdateCase, shape: tuple[int, ...]) -> np.ndarray:
    """The parameter after all steps by the op's body, in fp64, by onnx's reference evaluator."""
    held = Held(case, shape, DType.DOUBLE)
    graph = Graph("update")
    own = Type(DType.DOUBLE, shape)
    names = ["p", "g", *held.slots]
    types = dict(zip(names, [own, own, *held.slots.values()], strict=True))
    given = {name: graph.input(name, type, Role.BATCH) for name, type in types.items()}
    record = held.record
    slots = [given.get(slot) for slot in record.slots]
    scalars = [graph.input(n, Type(DType.DOUBLE, ()), Role.HYPER) for n in record.hyperparameters]
    step = graph.input("step", Type(DType.INT64, ()), Role.HYPER)
    scale = graph.input("scale", Type(DType.FLOAT, ()), Role.HYPER)
    operands = [given["p"], given["g"], *slots, *scalars, step, scale]
    made = Builder(graph).node(record.update.name, operands, held.attributes)
    made = made if isinstance(made, tuple) else (made,)
    moved = ["p", *held.slots]
    graph.outputs = {f"next.{name}": y for name, y in zip(moved, made, strict=True)}
    for node in [n for n in graph if n.op_type == record.update.name]:
        inline(graph, node)
    session = ReferenceEvaluator(to_proto(graph))
    feeds: dict[str, np.ndarray] = {
        name: np.full(
            [int(n) for n in held.slots[name].shape],  # type: ignore[arg-type]
            held.starts[name], held.slots[name].dtype.numpy(),
        )
        for name in held.slots
    }  # fmt: skip
    feeds["p"] = start_of(shape).numpy()
    sign = -0.5 if held.group.get("maximize") else 0.5
    for i, g in enumerate(batches(shape)):
        rate(held.group, case, i)
        values = dict(zip(record.hyperparameters, numbers(record, held.group), strict=True))
        rest = {"g": g.numpy(), "step": np.array(i + 1), "scale": np.array(sign, np.float32)}
        wanted = {v.name or "": {**feeds, **rest, **values}[v.name or ""] for v in graph.inputs}
        with np.errstate(all="ignore"):
            results: Any = session.run(None, wanted)
        feeds = dict(zip(moved, [np.asarray(y) for y in results], strict=True))
    return feeds["p"]


@pytest.mark.sample(5)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_body_is_the_rule_in_fp64(case: UpdateCase) -> None:
    for shape in case.shapes:
        want = reference(case, shape, torch.float64).numpy()
        # NAdam's product is kept in fp32, by torch too
        near = 1e-6 if case.name == "NAdam" else 1e-9
        np.testing.assert_allclose(by_body(case, shape), want, rtol=near, atol=near)
        assert np.abs(want - start_of(shape).numpy()).max() > 1e-4, "it has moved"


def by_kernel(case: UpdateCase, shape: tuple[int, ...]) -> torch.Tensor:
    """The parameter after all steps by the native kernel, in place."""
    held = Held(case, shape, DType.FLOAT)
    record = held.record
    p = start_of(shape).float()
    state = {
        name: torch.full([int(n) for n in type.shape], held.starts[name])  # type: ignore[arg-type]
        for name, type in held.slots.items()
    }
    hyper = [torch.tensor(0.0, dtype=torch.float64) for _ in record.hyperparameters]
    g, step = torch.empty(shape), torch.tensor(0)
    scale = torch.tensor(-0.5 if held.group.get("maximize") else 0.5)
    slots = [state.get(slot) for slot in record.slots]
    operands: list[Any] = [p, g, *slots, *hyper, step, scale]
    launch: Callable[[], Any] = bound(
        record.update.name, operands, [p, *state.values()], **held.attributes
    )
    for i, given in enumerate(batches(shape)):
        rate(held.group, case, i)
        for tensor, value in zip(hyper, numbers(record, held.group), strict=True):
            tensor.fill_(float(value))
        g.copy_(given)
        step.add_(1)
        launch()
    return p


@pytest.mark.skipif(library() is None, reason="no native library here")
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "case", [c for c in CASES if OPTIMIZERS[c.name].update.name in NATIVE], ids=str
)
def test_a_kernel_is_as_near_to_fp64_as_torch(case: UpdateCase) -> None:
    for shape in (*case.shapes, (2_503,)):
        exact = reference(case, shape, torch.float64)
        eager = reference(case, shape, torch.float32)
        have, own = (x.double() - exact for x in (by_kernel(case, shape), eager))
        assert have.norm() <= 2 * own.norm() + 1e-5 * exact.norm()
