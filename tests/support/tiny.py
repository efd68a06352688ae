"""Tiny random models and batches for tests, eager PyTorch in any precision, stock onnxruntime."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from ml_dtypes import bfloat16
from onnx.reference import ReferenceEvaluator
from onnx.reference.ops.op_gemm import Gemm_7
from onnx.reference.ops.op_reduce_sum import ReduceSum_13
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
)

from onward.capture import CaptureRequest
from onward.compile import Compiler
from onward.execute import Memory
from onward.graph.evaluate import GatherElements
from onward.graph.file import to_proto
from onward.graph.graph import Graph, Node, attributes, type_of
from onward.graph.names import BATCH, user_name
from onward.journal import Journal
from onward.kernels import host
from onward.prepare.graphs import Graphs
from onward.rewrite import Policy, split_counting

VOCABULARY = 97
Tensors = dict[str, torch.Tensor]


def ready(model: Any) -> Any:
    """The model in training mode, with noise added, so that no parameter stays at zeros or ones."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.02)
    return model.train()


def gpt2(dropout: float = 0.1, layers: int = 2, width: int = 32, **more: Any) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    settings = {
        "n_layer": layers, "n_embd": width, "n_head": 2, "n_positions": 64,
        "vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0,
        "attn_pdrop": dropout, "embd_pdrop": dropout, "resid_pdrop": dropout,
    }  # fmt: skip
    return ready(GPT2LMHeadModel(GPT2Config(**{**settings, **more})))


def bert(
    dropout: float = 0.1, layers: int = 2, width: int = 32, classes: int = 0, **more: Any
) -> BertForMaskedLM | BertForSequenceClassification:
    """A tiny BERT: a masked language model, or a classifier if `classes` is given."""
    torch.manual_seed(0)
    settings = {
        "num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": 2,
        "intermediate_size": 2 * width, "max_position_embeddings": 64,
        "vocab_size": VOCABULARY, "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
    }  # fmt: skip
    config = BertConfig(**{**settings, **more})
    if classes:
        config.num_labels = classes
        return ready(BertForSequenceClassification(config))
    return ready(BertForMaskedLM(config))


class Mlp(nn.Module):
    """A plain module that returns logits; its loss is a function."""

    def __init__(self, dropout: float = 0.0, width: int = 8, classes: int = 5) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 16)
        self.drop = nn.Dropout(dropout)
        self.outer = nn.Linear(16, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.drop(torch.tanh(self.inner(x))))


def mlp(dropout: float = 0.0) -> Mlp:
    torch.manual_seed(0)
    return Mlp(dropout).train()


def tokens(size: int, length: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (size, length), generator=generator)


PADDINGS = ("right", "left", "middle")


def batch(
    size: int = 4,
    length: int = 12,
    padding: str | None = None,
    ignored: bool = False,
    seed: int = 1,
) -> Tensors:
    """A batch of `input_ids` and `labels`; `padding`: where a mask has holes; `ignored`: some
    labels are -100."""
    ids = tokens(size, length, seed)
    labels = ids.clone()
    out = {"input_ids": ids, "labels": labels}
    if padding is not None:
        mask = torch.ones_like(ids)
        for row in range(1, size):
            n = 1 + row % max(1, length // 3)
            start = {"right": length - n, "left": 0, "middle": length // 3}[padding]
            mask[row, start : start + n] = 0
        out["attention_mask"] = mask
        labels[mask == 0] = -100
    if ignored:
        labels[:, ::3] = -100
    return out


def halves(data: Mapping[str, torch.Tensor]) -> list[Tensors]:
    half = next(iter(data.values())).shape[0] // 2
    return [{k: v[:half] for k, v in data.items()}, {k: v[half:] for k, v in data.items()}]


def eager(model: nn.Module, data: Mapping[str, Any], dtype: torch.dtype) -> Tensors:
    """Loss and gradients (`grad.<parameter>`) of a copy of the model in this precision.

    The model returns its loss, alone or as `.loss`.
    """
    twin = copy.deepcopy(model).to(dtype)
    cast = {k: v.to(dtype) if v.is_floating_point() else v for k, v in data.items()}
    outputs = twin(**cast)
    loss = outputs if isinstance(outputs, torch.Tensor) else outputs.loss
    loss.backward()
    found = {f"grad.{n}": p.grad for n, p in twin.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


def differing_most(ours: Tensors, want: Tensors, exact: Tensors) -> str:
    """The tensor that is off by most of what eager in fp32 (`want`) and in fp64 allow; "" where
    none is off by more."""
    if not all(t.isfinite().all() for t in exact.values()):
        exact = want  # the least fp64 number plus a score overflows where fp32's does not
    whole = sum(float(t.norm()) ** 2 for t in want.values()) ** 0.5
    worst, where = 1.0, ""
    for name, truth in exact.items():
        if name not in ours:
            if float(truth.norm()) > 1e-7 * whole:
                return f"{name} is missing"
            continue
        off = float((ours[name].double() - truth).norm())
        noise = 2 * float((want[name].double() - truth).norm())
        bound = noise + 1e-5 * float(truth.norm()) + 1e-6 * whole
        if not off / bound <= worst:
            worst, where = off / bound, f"{name} off by {off:.2e} of {float(truth.norm()):.2e}"
    return where


class Compiled:
    """A captured call, and the compiler's verbs that take it further, one after the other."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: tuple[Any, ...] = (),
        loss_fn: Any = None,
        disable: Iterable[str] = (),
        keep_stages: bool = False,
        want_loss: bool = True,
        policy: Policy | None = None,
    ) -> None:
        self.journal = Journal(keep_stages)
        self.compiler = Compiler(host("cpu"), disable, self.journal, policy)
        request = CaptureRequest(model, args, kwargs, target, loss_fn, want_loss)
        self.captured = self.compiler.capture(request)
        self.graphs = Graphs(self.compiler, self.captured)
        self.forward, self.packed = self.graphs.forward, self.graphs.packed
        self.plan, self.executable = self.compiler.plan, self.compiler.bind

    def differentiated(self, wrt: Sequence[str], forward: Graph | None = None) -> Graph:
        return self.compiler.gradients(forward or self.forward, wrt, self.captured.reached)


def compiled(model: nn.Module, data: Mapping[str, Any], **more: Any) -> Compiled:
    return Compiled(model, (), dict(data), **more)


def plain(found: Tensors) -> Tensors:
    """Tensors with `grad.param.w` and `output.logits` renamed as a user calls them: `grad.w`,
    `logits`."""
    return {user_name(n.replace("grad.param.", "grad.", 1)): x for n, x in found.items()}


def trained(made: Compiled) -> list[str]:
    return [n for n, p in made.captured.parameters.items() if p.requires_grad]


def execute(
    made: Compiled,
    graph: Graph,
    data: Mapping[str, torch.Tensor],
    outputs: Iterable[str] | None = None,
    **feeds: Any,
) -> Tensors:
    """The graph's outputs from Onward's plan and executor."""
    wanted = list(outputs or graph.outputs)
    tensors = list(data.values())
    dims = made.captured.dims(tensors)
    assert dims is not None, "the capture does not fit the batch"
    owned = {**made.captured.parameters, **made.captured.buffers}
    executable = made.executable(made.plan(graph, wanted, dims), Memory(torch.device("cpu")), owned)
    leaves = {made.captured.leaves[i]: t for i, t in enumerate(tensors)}
    executable.run({**FEEDS, **leaves, **feeds})
    return {name: executable.output(name) for name in wanted}


def execute_packed(
    made: Compiled,
    graph: Graph,
    data: Mapping[str, torch.Tensor],
    outputs: Iterable[str],
    room: float = 1.5,
) -> tuple[Tensors, dict[str, int]]:
    """Outputs of a graph that counts rows, and its counts. The plan has room for more than the
    batch, as it has for a batch smaller than an earlier one."""
    conditions, step = split_counting(graph)
    dims = made.captured.dims(list(data.values()))
    assert dims is not None, "the capture does not fit the batch"
    found = execute(made, conditions, data)
    numbers = {size: x.nonzero().view(-1) for size, x in found.items()}
    rows = {step.signature.rows[size]: x for size, x in numbers.items()}
    dims |= {size: len(x) for size, x in numbers.items()}
    wanted, owned = list(outputs), {**made.captured.parameters, **made.captured.buffers}
    most = {name: int(size * room) for name, size in dims.items()}
    plan = made.plan(step, wanted, most, open=[name for name, size in dims.items() if size])
    assert plan.serves(dims)
    executable = made.executable(plan, Memory(torch.device("cpu")), owned)
    leaves = {made.captured.leaves[i]: t for i, t in enumerate(data.values())}
    executable.run({**FEEDS, **leaves, **rows}, dims)
    results = {name: executable.output(name) for name in wanted}
    return results, {size: dims[size] for size in found}


def packed_gradients(
    model: nn.Module, data: Mapping[str, torch.Tensor], **more: Any
) -> tuple[Tensors, dict[str, int]]:
    """Loss and gradients on the rows that are read, and how many there are of each set."""
    made = compiled(model, data, **more)
    forward = made.packed(["loss"])
    assert forward is not None
    graph = made.differentiated(trained(made), forward)
    names = [n for n in graph.outputs if n == "loss" or n.startswith("grad.")]
    found, counts = execute_packed(made, graph, data, names)
    return plain(found), counts


FEEDS: dict[str, Any] = {
    "seed": torch.tensor([12345, 67890]), "sample_offset": 0, "cotangent.loss": 1.0,
}  # fmt: skip


def gradients(model: nn.Module, data: Mapping[str, torch.Tensor], **more: Any) -> Tensors:
    """Loss and gradients from Onward."""
    return gradients_of(model, [data], **more)[0]


def gradients_of(
    model: nn.Module, batches: Sequence[Mapping[str, torch.Tensor]], **more: Any
) -> list[Tensors]:
    """Loss and gradients from Onward for several batches of one shape."""
    made = compiled(model, batches[0], **more)
    graph = made.differentiated(trained(made))
    names = [n for n in graph.outputs if n == "loss" or n.startswith("grad.")]
    return [plain(execute(made, graph, data, names)) for data in batches]


def onnxruntime(made: Compiled, graph: Graph, data: Mapping[str, torch.Tensor]) -> Tensors:
    """The graph's outputs from the stock engine, its own optimiser off."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    options.enable_mem_reuse = False  # the time to plan it grows with the square of the nodes
    session = ort.InferenceSession(to_proto(graph).SerializeToString(), options)
    feeds = _feeds(made, graph, data)
    results = session.run(None, {item.name: feeds[item.name] for item in session.get_inputs()})
    return {n: torch.from_numpy(np.array(r)) for n, r in zip(graph.outputs, results, strict=True)}


class Gemm(Gemm_7):
    def _run(self, a: Any, b: Any, c: Any = None, **attrs: Any) -> tuple[np.ndarray]:
        wide = [None if x is None else x.astype(np.float32) for x in (a, b, c)]
        return (super()._run(*wide, **attrs)[0].astype(a.dtype),)


class ReduceSum(ReduceSum_13):
    def _run(self, x: Any, axes: Any = None, **attrs: Any) -> tuple[np.ndarray]:
        low = x.dtype in (bfloat16, np.float16)
        y = super()._run(x.astype(np.float32) if low else x, axes, **attrs)[0]
        return (np.asarray(y).astype(x.dtype),)


def reference(made: Compiled, graph: Graph, data: Mapping[str, torch.Tensor]) -> Tensors:
    """A graph's outputs from onnx's own evaluator, which has every type; what is bf16 comes as f32.
    Products and sums of low types are computed in fp32 and rounded once, as an engine does."""
    session = ReferenceEvaluator(to_proto(graph), new_ops=[GatherElements, Gemm, ReduceSum])
    with np.errstate(all="ignore"):
        results: Any = session.run(None, _feeds(made, graph, data))
    arrays = {n: np.asarray(y) for n, y in zip(graph.outputs, results, strict=True)}
    wide = {n: y.astype(np.float32) if y.dtype == bfloat16 else y for n, y in arrays.items()}
    return {n: torch.from_numpy(y) for n, y in wide.items()}


def _feeds(made: Compiled, graph: Graph, data: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """The inputs of a graph, each in its own type."""
    own = {**made.captured.owned, **{BATCH + n: x for n, x in data.items()}}
    feeds: dict[str, np.ndarray] = {}
    for item in graph.inputs:
        name = item.name or ""
        value = own.get(name, FEEDS.get(name))
        feeds[name] = (
            value.detach().numpy()
            if isinstance(value, torch.Tensor)
            else np.array(value, dtype=type_of(item).dtype.numpy())
        )
    return feeds


def dropout_nodes(graph: Graph) -> list[Node]:
    """Nodes that draw a mask: Dropout, and ops with dropout inside."""
    return [n for n in graph if attributes(n).get("ratio", 0.0) > 0]
