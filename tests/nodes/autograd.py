"""Our results and gradients of one node test in fp64 beside PyTorch's.

At inputs that are moved off kinks, where a gradient is unique, and at the test's own, which are
round numbers with ties among them: there both must have the same convention (`AT_KINKS`).
"""

from __future__ import annotations

import re
import warnings
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import torch
from nodes.cases import NodeCase, cases, is_floating
from nodes.doubled import doubled
from nodes.engine import EQUAL, execute, imported, line, moved
from nodes.more_cases import Call
from nodes.torch_forms import FORMS, WITHOUT_TORCH, Attributes, NoForm

from onward.differentiate import vjp
from onward.graph.graph import Graph, type_of
from onward.graph.types import DType

NO_ROW = "torch has none"
TOLERANCE, IN_FP32 = 1e-9, 2e-6
FP32_CONSTANTS = "gelu_tanh.*_expanded|hardswish_expanded"  # function bodies that have such
Feeds = Mapping[str, np.ndarray]


def by_torch(case: NodeCase) -> str:
    """`EQUAL`, or why there is nothing to compare with, or how it differs."""
    base = case.name.split("_expanded")[0]
    one = cases().get(base, case)
    node = one.model.graph.node[0]
    if node.op_type in WITHOUT_TORCH:
        return NO_ROW
    if node.op_type not in FORMS:
        return f"no row of {node.op_type}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _beside(case, node, doubled(one.model))
        except NoForm as why:
            return f"torch has not: {why}"
        except Exception as error:
            return f"differs: {line(error)}"


def _beside(case: NodeCase, node: onnx.NodeProto, model: onnx.ModelProto) -> str:
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    free = {v.name for v in imported(case.model, case.feeds).inputs}
    given = {n: x.astype(np.float64) if is_floating(x) else x for n, x in case.feeds.items()}
    away = {n: moved(x, rng) if is_floating(x) and n in free else given[n] for n, x in
            case.feeds.items()}  # fmt: skip
    node = next(n for n in model.graph.node if n.op_type == node.op_type)
    opset = max(o.version for o in model.opset_import if o.domain == node.domain)
    form, attributes = FORMS[node.op_type], Attributes(node, opset)
    constants = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    ends = list(node.output)

    def in_torch(feeds: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        held = {**{n: torch.from_numpy(np.array(x)) for n, x in constants.items()}, **feeds}
        found = form(attributes, *(held[n] if n else None for n in node.input))
        found = found if isinstance(found, tuple | list) else [found]
        return dict(zip((n for n in ends), found, strict=False))

    tolerance = IN_FP32 if re.search(FP32_CONSTANTS, case.name) else TOLERANCE
    for feeds in (away, given):
        compared(imported(doubled(case.model), feeds), feeds, in_torch, rng, tolerance)
    return EQUAL


def compared(
    graph: Graph,
    feeds: Feeds,
    in_torch: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    rng: np.random.Generator,
    tolerance: float = TOLERANCE,
) -> None:
    """Assert a graph's results, and the gradients of their randomly weighted sum, against
    torch's."""
    wrt = [v.name or "" for v in graph.inputs if type_of(v).is_floating]
    ends = [n for n, y in graph.outputs.items() if type_of(y).is_floating]
    narrow = any(n.op_type == "Cast" and type_of(n.outputs[0]).dtype == DType.FLOAT for n in graph)
    tolerance = IN_FP32 if narrow else tolerance
    leaves = {n: torch.from_numpy(np.array(x)) for n, x in feeds.items()}
    for n in wrt:
        leaves[n].requires_grad_()
    want = in_torch(leaves)
    have = execute(graph, feeds)
    for n in ends:
        _same(f"{n}", have[n], want[n].detach().numpy(), tolerance)
    weights: dict[str, Any] = {}
    total = torch.zeros((), dtype=torch.float64)
    for n in ends:
        finite = want[n].isfinite()
        w = torch.from_numpy(np.asarray(rng.uniform(0.5, 2.0, tuple(want[n].shape))))
        weights[n] = torch.where(finite, w, 0.0).to(want[n].dtype)
        total = total + torch.where(finite, want[n] * weights[n], 0.0).sum()
    found: list[torch.Tensor | None] = [None] * len(wrt)
    if total.requires_grad and wrt:
        found = list(torch.autograd.grad(total, [leaves[n] for n in wrt], allow_unused=True))
    step = vjp(graph, ends, wrt, wrt)
    kept = set(step.signature.gradients.values())
    for n in set(step.outputs) - kept:
        step.outputs.pop(n)
    cotangents = {at: weights[n].numpy() for n, at in step.signature.cotangents.items()}
    made = execute(step, {**feeds, **cotangents})
    for n, g in zip(wrt, found, strict=True):
        expected = np.zeros(feeds[n].shape) if g is None else g.numpy()
        _same(f"the gradient of {n}", made[step.signature.gradients[n]], expected, tolerance)


def _same(what: str, have: np.ndarray, want: np.ndarray, tolerance: float) -> None:
    if have.shape != want.shape:
        raise AssertionError(f"{what}: {have.shape} for {want.shape}")
    scale = max(1.0, float(np.abs(want[np.isfinite(want)]).max(initial=0.0)))
    np.testing.assert_allclose(have, want, tolerance, tolerance * scale, err_msg=what)


def call_by_torch(call: Call) -> str:
    """How a call of our own compares with PyTorch: `EQUAL`, or the difference in words."""
    attributes = Attributes(call.model.graph.node[0], call.opset)
    ends = list(call.model.graph.node[0].output)

    def in_torch(feeds: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = FORMS[call.op](attributes, *(feeds[n] if n else None for n in call.names))
        found = found if isinstance(found, tuple | list) else [found]
        return dict(zip(ends, found, strict=False))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            graph = imported(call.model, call.feeds)
            compared(graph, call.feeds, in_torch, np.random.default_rng(7))
        except Exception as error:
            return f"differs: {line(error)}"
    return EQUAL
