"""Exports the trained model as an ONNX file for any engine."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable, Mapping
from itertools import chain, combinations, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from onward.capture import CapturedModule, CaptureRequest, GraphModule
from onward.compile import Compiler
from onward.errors import OnwardError
from onward.graph.file import save
from onward.graph.graph import OPSET, Graph, Role
from onward.graph.names import distinct, user_name
from onward.graph.types import DType
from onward.journal import Journal
from onward.kernels import host
from onward.model_state.device import computing_device
from onward.prepare.batch import Batch
from onward.prepare.region_warnings import table
from onward.rewrite import Policy
from onward.train.low_export import lowered
from onward.train.size_limits import beside_tables, limits

TRIED = 64  # sets of inputs tried, per dim, for whether a size of 1 may grow
CONDITIONS = "onward_conditions"  # the key of a file's metadata
_LABELS = ("labels", "next_sentence_label", "start_positions", "end_positions")


def export_onnx(
    model: torch.nn.Module,
    batch: Batch,
    path: Path,
    dtype: DType = DType.FLOAT,
    opset: int = OPSET,
) -> Path:
    """Writes the forward of `model`, which the caller has put in evaluation mode, with symbolic
    sizes. dtype: f32, or f16 or bf16 for lower precision (`low_export.py`). opset: one of
    `graph.opset.OPSETS`.

    Conditions on sizes, such as `T <= 64`, are in the file's metadata as a list in JSON. Warns of
    those at which the forward goes another way, since no engine checks them.

    The file appears whole or not at all. Raises OnwardError where the folder does not exist, for a
    model with parts that run in PyTorch, and for an op that the opset lacks.
    """
    if not path.parent.is_dir():
        raise OnwardError(f"{path.parent} is not a folder; fix: create it first")
    kwargs = {k: v for k, v in batch.kwargs.items() if k not in _LABELS}
    args, kwargs = without_ones(
        lambda given: called(model, *given, want_loss=False), (batch.args, kwargs)
    )
    policy = None if dtype == DType.FLOAT else Policy(dtype)
    compiler = Compiler(host(computing_device(model)), journal=Journal(quiet=True), policy=policy)
    captured = compiler.capture(CaptureRequest(model, args, kwargs, want_loss=False, regions=True))
    refuse_regions(captured)
    conditions = limits(captured.size_conditions, [captured.graph], strict=False)
    graph, arrays = compiler.portable(captured), captured.arrays()
    if dtype != DType.FLOAT:
        graph, arrays = lowered(graph, arrays, dtype)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        made = Path(folder) / path.name
        said = {CONDITIONS: json.dumps(conditions)} if conditions else {}
        save(graph, made, _plain_names(graph, arrays), opset, said)
        # the weights' file first, so that the model's file appears last
        for file in sorted(Path(folder).iterdir(), reverse=True):
            file.replace(path.parent / file.name)
    ways = beside_tables(conditions, captured.graph)
    if ways:
        warnings.warn(
            f"{path.name} is right for batches with {' and '.join(ways)} alone: the forward looks "
            "at these sizes, and the file goes the way of its example at all of them; fix: give "
            "it no others, or a forward that does not look at sizes",
            stacklevel=2,
        )
    return path


def _plain_names(graph: Graph, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Renames inputs, outputs and weights to the user's names; returns the weights by their new
    names.

    All names of a file share one namespace: where two are equal, an input keeps its name first,
    then an output.
    """
    taken = {v.name or "" for node in graph for v in node.outputs} | set(graph.ir.initializers)

    def plain(name: str) -> str:
        found = distinct(user_name(name), taken)
        taken.add(found)
        return found

    for value in graph.inputs_with(Role.BATCH):
        value.name = plain(value.name or "")
    graph.outputs = {plain(name): value for name, value in graph.outputs.items()}
    weights: dict[str, np.ndarray] = {}
    ends = graph.output_values()
    for value in graph.inputs_with(Role.PARAM, Role.BUFFER):
        if not value.uses() and value not in ends:
            graph.ir.inputs.remove(value)  # of a layer that the outputs do not need
            continue
        array = arrays[value.name or ""]
        value.name = plain(value.name or "")
        weights[value.name] = array
    return weights


def refuse_regions(captured: CapturedModule) -> None:
    """Raises OnwardError for a capture with parts that run in PyTorch."""
    if captured.regions:
        raise OnwardError(
            "the model cannot be exported, since parts of it run in eager PyTorch: "
            + "; ".join(table(captured.regions))
        )


def called(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    want_loss: bool,
) -> Any:
    """Returns a model's outputs; those of a graph are None. Raises what the model raises for
    arguments that it does not take."""
    if isinstance(model, GraphModule):
        model.captured(CaptureRequest(model, args, kwargs, want_loss=want_loss))
        return None
    return model(*args, **kwargs)


def without_ones(run: Callable[[Any], object], given: Any) -> Any:
    """Returns the arguments of a call with a size of 2 for each 1 that the model also takes in
    other sizes. run: makes the call with such arguments. given: a tree of them.

    A capture fixes sizes of 1: made of a batch with one row, or one token, the file would serve no
    other. A 1 that the model requires (a single feature, a mask for all heads) stays.
    """
    leaves, spec = pytree.tree_flatten(given)
    tensors = [v for v in leaves if isinstance(v, torch.Tensor)]
    for dim in range(max((t.dim() for t in tensors), default=0)):
        ones = [i for i, v in enumerate(leaves) if _is_one(v, dim)]
        # largest subsets first: a mask has its rows where the tokens have theirs
        subsets = chain.from_iterable(combinations(ones, n) for n in range(len(ones), 0, -1))
        for chosen in islice(subsets, TRIED):
            # try two sizes: a single one may be a size that 1 is broadcast to
            grown = [
                [torch.cat([v] * size, dim) if i in chosen else v for i, v in enumerate(leaves)]
                for size in (3, 2)
            ]
            if all(_runs(run, pytree.tree_unflatten(sizes, spec)) for sizes in grown):
                leaves = grown[-1]
                break
    return pytree.tree_unflatten(leaves, spec)


def _is_one(leaf: Any, dim: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > dim and leaf.shape[dim] == 1


def _runs(run: Callable[[Any], object], given: Any) -> bool:
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            run(given)
    except Exception:  # a user's forward may raise anything; it does not take these sizes
        return False
    return True
