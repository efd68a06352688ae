"""Verification of one training step; model, batch and random generators stay as they are."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from onward.capture import CaptureRequest, LossFunction, eager
from onward.compile import Compiler
from onward.errors import MissingExtraError, OnwardError
from onward.graph.graph import Graph, attributes, precision_said, precisions_said, where
from onward.journal import Journal
from onward.kernels import host, torch_dtype
from onward.model_state.device import computing_device, keeping_generators
from onward.prepare.batch import Batch
from onward.prepare.graphs import Graphs
from onward.prepare.region_warnings import table
from onward.rewrite import Policy
from onward.train.verify.bisection import first_departure
from onward.train.verify.comparison import (
    against_eager,
    against_onnxruntime,
    moved_as_in_eager,
    zero_as_in_eager,
)
from onward.train.verify.engines import Engines
from onward.train.verify.report import ComparedTensor, Verification


def verify_step(
    model: torch.nn.Module,
    batch: Batch,
    loss_fn: LossFunction | None,
    trained: set[int],
    bisect: bool,
    disable: tuple[str, ...] = (),
    regions: bool = True,
    policy: Policy | None = None,
) -> Verification:
    """Compares the batch's loss and every gradient. trained: ids of the parameters to differentiate
    with respect to. regions: whether parts of the model may run in PyTorch. policy: of mixed
    precision. Under a policy the step with its casts is compared with autocast; the step without
    casts is still compared with fp32 eager PyTorch and onnxruntime, where errors stand out more."""
    with _undisturbed(model, batch):
        batch = _owned(batch)
        target = host(computing_device(model))
        compiler = Compiler(target, disable, Journal(keep_stages=bisect))
        captured = compiler.capture(CaptureRequest(model, *batch.given, loss_fn, regions=regions))
        _refuse_drawn(captured.graph)
        _refuse_autocast(captured.graph)
        names = [n for n, p in captured.parameters.items() if id(p) in trained]
        engines = Engines(compiler, captured, batch, model, loss_fn, names)
        result, kinds = Verification(), [engines]
        padded, rows = _compared(engines)
        result.rows += rows
        lines, notes = moved_as_in_eager(engines, padded)
        result.mismatches += lines
        result.notes += notes
        result.mismatches += zero_as_in_eager(engines, rows)
        if policy is not None:
            low = Compiler(target, disable, Journal(keep_stages=bisect), policy)
            kinds.append(engines.under_autocast(low, torch_dtype(policy.low)))
            result.rows += _compared(kinds[-1])[1]
            result.notes.append("onnxruntime runs the step without casts, in fp32")
        if captured.regions:
            lines = "; ".join(table(captured.regions))
            result.notes.append(
                f"not compared with onnxruntime, since parts run in eager PyTorch: {lines}"
            )
        elif engines.has_onnxruntime():
            result.rows += against_onnxruntime(engines, padded)
        else:
            result.notes.append(str(MissingExtraError("onnxruntime", "ort")))
        if bisect:
            result.notes.append(first_departure(kinds))
        return result


def _compared(engines: Engines) -> tuple[Graph, list[ComparedTensor]]:
    """Returns the graph of loss and gradients on every row, and the rows that compare it and its
    packed form with eager PyTorch."""
    graphs = Graphs(engines.compiler, engines.captured)
    derived = partial(engines.compiler.gradients, wrt=engines.names, zeros=engines.captured.reached)
    padded = derived(graphs.forward)
    rows = against_eager(engines, padded)
    packed = graphs.packed(graphs.forward.signature.requested((), None))
    if packed is not None:
        rows += against_eager(engines, derived(packed), "rows that are read")
    return padded, rows


def _refuse_drawn(graph: Graph) -> None:
    drawing = [
        where(node)
        for node in graph
        if node.op_type == "RandomUniform"
        or (node.op_type == "Region" and attributes(node)["draws"])
    ]
    if drawing:
        raise OnwardError(
            f"the forward draws random numbers at {drawing[0]} (torch.rand and the like) that "
            "differ from eager PyTorch's, so that nothing can be compared; fix: switch it "
            "off to verify (drop_path_rate=0), or pass the numbers as an input of the batch"
        )


def _refuse_autocast(graph: Graph) -> None:
    """Raises OnwardError for a forward with an autocast block, where eager PyTorch has no fp32
    run."""
    said = precisions_said(graph)
    low = [where(node) for node in graph if precision_said(node) in said]
    if low:
        raise OnwardError(
            f"the forward enters torch.autocast at {low[0] or '(top)'}, so that there is no "
            "fp32 run to compare with; fix: remove it to verify, and set "
            "mixed_precision='bf16'"
        )


@contextmanager
def _undisturbed(model: torch.nn.Module, batch: Batch) -> Generator[None]:
    """A context with gradients on and inference mode off; restores all random generators that the
    model may draw from."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with (
            eager(),
            torch.inference_mode(False),
            torch.enable_grad(),
            keeping_generators(batch.tensors, model.parameters(), model.buffers()),
        ):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _owned(batch: Batch) -> Batch:
    """A copy of the batch: tensors of inference mode cannot be differentiated, and a model may
    write into its batch."""
    copies = {id(t): t.detach().clone() for t in batch.tensors}

    def own(x: Any) -> Any:
        return copies[id(x)] if isinstance(x, torch.Tensor) else x

    args, kwargs, target = pytree.tree_map(own, batch.given)
    tensors = [copies[id(t)] for t in batch.tensors]
    return replace(batch, args=args, kwargs=kwargs, target=target, tensors=tensors)
