"""Steps of tiny models whose weights or sequences ranks share, in lockstep: the graph of each rank,
its inputs cut as it says, and what all ranks have made, joined."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tiny
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from onward import rewrite
from onward.compile import Compiler
from onward.differentiate import Recipe, UpdateGroup, add_updates, summed, vjp
from onward.distribute import (
    Mesh,
    context_parallel,
    data_parallel,
    lockstep,
    number_in_order,
)
from onward.distribute.tensor import DeviceRates, Sharding, TensorCut, tensor_parallel
from onward.extend import OPTIMIZERS
from onward.graph.graph import Graph, Role, role_of, type_of
from onward.graph.types import DType, Type
from onward.kernels import host
from onward.rewrite import prune

# a slow device with fast links, for which tiny weights are worth cutting
RATES = DeviceRates(
    flops_per_second=1e8, bytes_per_second=1e9, launch_seconds=1e-7,
    link_bytes_per_second=1e8, hop_seconds=1e-6,
)  # fmt: skip
SIZES = {"B": 8, "T": 64}
LENGTH = 6
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Made:
    """A compiled call of a tiny model, and its kind."""

    kind: str
    call: tiny.Compiled
    vocabulary: int


@functools.cache
def made(
    kind: str, layers: int = 1, heads: int = 4, width: int = 32, vocabulary: int = 96,
    dropout: float = 0.2,
) -> Made:  # fmt: skip
    """A model with dropout, where its family has it. Llama has half as many heads of keys."""
    torch.manual_seed(0)
    if kind == "gpt2":
        model: Any = tiny.gpt2(dropout, layers, width, n_head=heads, vocab_size=vocabulary)
    elif kind == "bert":
        more = {"num_attention_heads": heads, "vocab_size": vocabulary}
        model = tiny.bert(dropout, layers, width, **more)
    elif kind == "llama":
        llama = LlamaConfig(
            vocab_size=vocabulary, hidden_size=width, intermediate_size=2 * width,
            num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads // 2,
            max_position_embeddings=64,
        )  # fmt: skip
        model = tiny.ready(LlamaForCausalLM(llama))
    elif kind in ("mixtral", "qwen2_moe"):
        model = tiny.ready(_of_experts(kind, layers, heads, width, vocabulary))
    else:
        settings: dict[str, Any] = {
            "vocab_size": vocabulary, "d_model": width, "d_kv": width // heads, "d_ff": 2 * width,
            "num_layers": layers, "num_heads": heads, "dropout_rate": dropout,
            "decoder_start_token_id": 0,
        }  # fmt: skip
        t5 = T5Config(**settings)
        model = tiny.ready(T5ForConditionalGeneration(t5))
    return Made(kind, tiny.compiled(model, batch(kind, vocabulary, 4)), vocabulary)


def _of_experts(kind: str, layers: int, heads: int, width: int, vocabulary: int) -> Any:
    """A mixture of eight experts, of which each token has two."""
    settings: dict[str, Any] = {
        "vocab_size": vocabulary, "hidden_size": width, "intermediate_size": 2 * width,
        "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": heads // 2, "max_position_embeddings": 64,
        "num_experts_per_tok": 2, "use_cache": False,
    }  # fmt: skip
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(num_local_experts=8, **settings))
    inner: dict[str, Any] = {
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": width,
    }
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(num_experts=8, **settings, **inner))


def batch(
    kind: str, vocabulary: int, size: int, seed: int = 1, length: int = LENGTH
) -> tiny.Tensors:
    """Rows of which some have fewer labels, with padding where the family has masks."""
    data = tiny.batch(size, length, "right" if kind in ("bert", "t5") else None, seed=seed)
    data = {n: x if n == "attention_mask" else x % vocabulary for n, x in data.items()}
    data["labels"][::3, 2:] = -100
    return data


def recipe_of(model: Made, optimizer: str = "AdamW", **more: Any) -> Recipe:
    """A recipe for all parameters."""
    groups: list[UpdateGroup] = []
    for name in sorted(model.call.captured.reached):
        shape = tuple(model.call.captured.parameters[name].shape)
        record = OPTIMIZERS["SGD" if optimizer == "Muon" and len(shape) != 2 else optimizer]
        group = {**vars(record.description()), "lr": 0.1, "momentum": 0.9, "dampening": 0.0}
        types = record.tensors("", Type(DType.FLOAT, shape))
        slots = tuple(s for s in record.slots if types[s] and record.kept(group, s))
        index = int(record.name != optimizer)
        groups.append(UpdateGroup(index, (name,), record, record.attributes(group), slots))
    settings = {"max_grad_norm": 0.5, "skip_nonfinite": True, "average": "labels", **more}
    return Recipe(tuple(groups), **settings)


def step_of(model: Made, recipe: Recipe) -> Graph:
    """The whole step, before it is distributed."""
    graph = summed(model.call.forward) if recipe.average == "labels" else model.call.forward
    names = recipe.parameters
    graph = vjp(graph, graph.signature.differentiated_outputs, names, names)
    return add_updates(graph, recipe)


def ranks_graphs(
    graph: Graph, meshes: Sequence[Mesh], sizes: Mapping[str, int] | None = None,
    cuts: Mapping[str, Sharding] | None = None, rewritten: bool = True, average: str = "labels",
    sequence: bool = False, method: str = "auto",
) -> tuple[list[Graph], list[dict[str, TensorCut]]]:  # fmt: skip
    """The graph of each rank, as the compiler would go on to rewrite it, and its cuts. sequence:
    whether ranks along `tp` have parts of the positions. method: of attention along `cp`."""
    graphs, found = [], []
    for mesh in meshes:
        own, here = tensor_parallel(graph, mesh, RATES, sizes or SIZES, cuts)
        if sequence:  # with the cuts that are chosen without it
            chosen = {name: cut.sharding for name, cut in here.items()}
            own, here = tensor_parallel(graph, mesh, cuts=chosen, sequence=True)
        if mesh.size("cp") > 1:
            own = context_parallel(own, mesh, method=method)
        if mesh.size("dp_replicate") > 1 or (mesh.size("cp") > 1 and graph.signature.updated):
            own = data_parallel(own, mesh, average)
            number_in_order(own)
        if rewritten:
            own = Compiler(host(), mesh=mesh)._rewrite(own, rewrite.STEP, "step")
        graphs.append(own)
        found.append(here)
    return graphs, found


def feeds(graph: Graph, model: Made, data: tiny.Tensors, offset: int = 0) -> Arrays:
    """Every input of a whole step's graph, its state drawn at random."""
    captured, signature = model.call.captured, graph.signature
    owned = {**captured.parameters, **captured.buffers}
    given: Arrays = {n: t.detach().numpy() for n, t in owned.items()}
    given |= {captured.leaves[i]: x.numpy() for i, x in enumerate(data.values())}
    given |= {name: np.array(0.1) for name in signature.hyperparameters.values()}
    given |= {name: np.array(1) for name in signature.clocks.values()}
    given |= {name: np.array(0.0) for name in signature.window.values()}
    given |= {
        signature.seed or "": np.array([3, 5]),
        signature.sample_offset or "": np.array(offset),
    }
    for value in graph.inputs:
        type, name = type_of(value), value.name or ""
        if role_of(value) is Role.COTANGENT:
            given[name] = np.ones((), type.dtype.numpy())
        if role_of(value) is Role.PARAM and type.shape != given[name].shape:  # rows of padding
            room = int(type.shape[0]) - len(given[name])  # type: ignore[arg-type]
            given[name] = np.pad(given[name], [(0, room)] + [(0, 0)] * (type.rank - 1))
        if role_of(value) is Role.STATE:
            shape = tuple(int(n) for n in type.shape)  # type: ignore[arg-type]
            drawn = np.random.default_rng(zlib.crc32(name.encode())).random(shape) * 0.01
            held = name not in signature.accumulators.values()
            given[name] = np.asarray(drawn * held).astype(type.dtype.numpy())
    return given


def parameter_of(graph: Graph) -> dict[str, str]:
    """By the names of inputs and outputs, the parameter that they belong to."""
    signature = graph.signature
    found = {name: slot.parameter for slot, name in signature.slots.items()}
    found |= {name: parameter for parameter, name in signature.accumulators.items()}
    found |= {v.name or "": v.name or "" for v in graph.inputs_with(Role.PARAM)}
    pairs = [*signature.updated.items(), *signature.accumulated.items()]
    found |= {out: found.get(held, held) for held, out in pairs}
    return found | {out: name for name, out in signature.gradients.items()}


def parts(given: Arrays, graph: Graph, own: Graph, cuts: Mapping[str, TensorCut]) -> Arrays:
    """The inputs of one rank, of those of the whole step's graph."""
    of, found = parameter_of(graph), {}
    for value in own.inputs:
        name = value.name or ""
        x, cut = given[name], cuts.get(of.get(name, ""))
        like = given.get(of.get(name, ""), x)  # state of another shape is whole
        found[name] = x if cut is None or x.shape != like.shape else cut.part(x)
    return found


def joined(
    graph: Graph,
    meshes: Sequence[Mesh],
    found: Sequence[Arrays],
    cuts: Sequence[dict[str, TensorCut]],
) -> list[Arrays]:
    """What the ranks have made, of those along `tp` together: all that is cut is joined."""
    of, ranks, whole = parameter_of(graph), meshes[0].size("tp"), []
    for first in range(0, len(found), ranks):
        group = found[first : first + ranks]
        made: Arrays = {}
        for name, y in group[0].items():
            cut = cuts[first].get(of.get(name, ""))
            owner = of.get(name, "")
            like = type_of(graph.find_input(owner)).shape if cut is not None else ()
            if cut is not None and type_of(graph.outputs[name]).shape == like:
                made[name] = cut.joined([outputs[name] for outputs in group])
                continue
            made[name] = y
            for outputs in group[1:]:
                np.testing.assert_array_equal(outputs[name], y, err_msg=f"{name} of two ranks")
        whole.append(made)
    return whole


def run(
    model: Made, graph: Graph, meshes: Sequence[Mesh], windows: Sequence[int] = (4,),
    results: Sequence[str] = (), length: int = LENGTH, **more: Any,
) -> list[Arrays]:  # fmt: skip
    """The outputs of each group of ranks after a window of micro-batches of these sizes, of which
    each group has an equal share; of one rank with the mesh of one. Ranks along `cp` are a group
    each. length: of the rows."""
    if meshes[0].ranks == 1:
        graphs, cuts = [graph], [{}]
    else:
        graphs, cuts = ranks_graphs(graph, meshes, **more)
    held: list[Arrays] = [{} for _ in meshes]
    found: list[Arrays] = []
    signature, seen = graph.signature, 0
    for number, size in enumerate(windows, 1):
        last = number == len(windows)
        outputs = signature.requested(results, last) if signature.updated else list(graph.outputs)
        cut = [prune(own, outputs) for own in graphs]
        data, given = batch(model.kind, model.vocabulary, size, number, length), []
        for mesh, own, here, window in zip(meshes, cut, cuts, held, strict=True):
            share = size // mesh.size("dp_replicate")
            start = share * mesh.coordinate("dp_replicate")
            rows = {n: x[start : start + share] for n, x in data.items()}
            whole = feeds(graph, model, rows, seen + start)
            given.append({**parts(whole, graph, own, here), **window})
            given[-1] = {v.name or "": given[-1][v.name or ""] for v in own.inputs}
        found = lockstep(meshes, cut, given)
        for window, made in zip(held, found, strict=True):
            window |= carried(graph, made)
        seen += size
    return joined(graph, meshes, found, cuts)


def carried(graph: Graph, made: Arrays) -> Arrays:
    """The inputs of the next micro-batch of a window, of what one has made."""
    signature = graph.signature
    found = {
        signature.window[key]: made[out]
        for key, out in signature.windowed.items()
        if key in signature.window
    }
    summed = {n: out for n, out in signature.accumulated.items() if out in made}
    return found | {signature.accumulators.get(n, n): made[out] for n, out in summed.items()}


def compare(found: Sequence[Arrays], want: Arrays, most: float = 1e-5) -> None:
    """Compares what each group of ranks has made with what one rank alone makes. most: by which
    numbers may differ, in terms of the largest of their tensor."""
    for outputs in found:
        assert outputs.keys() == want.keys()
        for name, y in outputs.items():
            size = float(np.max(np.abs(want[name].astype(np.float64)), initial=0.0))
            np.testing.assert_allclose(
                y.astype(np.float64), want[name].astype(np.float64), rtol=most,
                atol=most * size + 1e-9, err_msg=name,
            )  # fmt: skip


__all__ = [
    "RATES",
    "SIZES",
    "Made",
    "compare",
    "made",
    "ranks_graphs",
    "recipe_of",
    "run",
    "step_of",
]
