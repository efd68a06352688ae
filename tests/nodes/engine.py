"""Graphs of node tests, read and run by the executor."""

from __future__ import annotations

import re
from collections.abc import Mapping

import ml_dtypes
import numpy as np
import onnx
import torch
from nodes.cases import is_floating

from onward.errors import OnwardError
from onward.execute import Executable, Memory
from onward.graph.graph import Graph
from onward.graph.importer import from_onnx
from onward.plan import make_plan
from onward.rewrite import specialize

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
EQUAL = "equal"
Feeds = Mapping[str, np.ndarray]


def execute(graph: Graph, feeds: Feeds) -> dict[str, np.ndarray]:
    """Outputs by name, through bind, plan and execute."""
    plan = make_plan(specialize(graph, {}), {})
    executable = Executable(plan, Memory(torch.device("cpu")), {})
    executable.run({v.name or "": _tensor(feeds[v.name or ""]) for v in graph.inputs})
    return {name: _array(executable.output(name)) for name in graph.outputs}


def _tensor(x: np.ndarray) -> torch.Tensor:
    x = np.array(x)
    if x.dtype == BFLOAT16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def _array(x: torch.Tensor) -> np.ndarray:
    if x.dtype == torch.bfloat16:
        return x.contiguous().view(torch.int16).numpy().view(BFLOAT16)
    return x.numpy()


def imported(model: onnx.ModelProto, feeds: Feeds) -> Graph:
    """The graph with as few inputs known beforehand as it can be planned with: none; then integers
    and booleans (shapes, axes, counts); then short lists of numbers, of the first
    input last."""
    whole = {n: x for n, x in feeds.items() if not is_floating(x)}
    short = {n: x for n, x in feeds.items() if x.ndim <= 1 and x.size <= 16}
    later = {n: x for n, x in short.items() if n != next(iter(feeds))}
    # files of tools write 0 where they mean any size; here it is meant
    dims = {f"{n}_{i}": 0 for n, x in feeds.items() for i, size in enumerate(x.shape) if not size}
    tried: list[set[str]] = []
    failed: Exception | None = None
    for known in ({}, whole, whole | later, whole | short):
        if set(known) in tried:
            continue
        tried.append(set(known))
        try:
            graph = from_onnx(model, dims, known)
            make_plan(specialize(graph, {}), {})
            return graph
        except (ValueError, OnwardError, AssertionError) as error:
            failed = error
    assert failed is not None
    raise failed


def moved(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """In fp64, off the kinks that round numbers lie on."""
    x = x.astype(np.float64)
    return x + 1e-3 * rng.uniform(0.1, 1.0, x.shape)


def line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    text = re.sub(r"^Not equal to tolerance .*?(?=Mismatched|Max|x and y|\(shapes)", "", text)
    return f"{type(error).__name__ if not isinstance(error, ValueError) else ''} {text}".strip()[
        :160
    ]
