"""Steps of tiny models on ranks in lockstep, each with its share of a batch."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tiny
import torch

from onward.compile import Compiler
from onward.differentiate import Recipe, UpdateGroup
from onward.distribute import Mesh, lockstep
from onward.extend import OPTIMIZERS
from onward.graph.graph import Graph, Role, role_of, type_of
from onward.graph.signature import Signature
from onward.graph.types import DType, Type
from onward.kernels import host
from onward.rewrite import prune
from onward.shards import Shard

SEED = np.array([3, 5], np.int64)
RATE = 0.25
Arrays = dict[str, np.ndarray]


@functools.cache
def made(kind: str) -> tiny.Compiled:
    small = {"layers": 1, "width": 32 if kind == "wide" else 8}
    model = tiny.bert(0.2, **small) if kind == "bert" else tiny.gpt2(0.2, **small)
    return tiny.compiled(model, rows_of(kind, 4))


def rows_of(kind: str, size: int, seed: int = 1) -> dict[str, torch.Tensor]:
    """A batch with padding for BERT, and rows of which some have no label."""
    data = tiny.batch(size, 6, "right" if kind == "bert" else None, seed=seed)
    data["labels"][::3] = -100
    data["labels"][1, :4] = -100
    return data


def shards_of(kind: str, mesh: Mesh, block: int = 1) -> dict[str, Shard]:
    """A part of every parameter that has an element for each rank along dp_shard, however small."""
    ranks, place = mesh.size("dp_shard"), mesh.coordinate("dp_shard")
    found = {
        name: Shard("dp_shard", ranks, place, made(kind).captured.parameters[name].numel(), block)
        for name in sorted(made(kind).captured.reached)
    }
    return {n: s for n, s in found.items() if ranks > 1 and s.length * (ranks - 1) < s.elements}


def recipe_of(
    kind: str,
    mesh: Mesh | None = None,
    *,
    optimizer: str = "SGD",
    form: str = "",
    stage: int = 0,
    **more: Any,
) -> Recipe:
    """A recipe for all parameters. stage: of ZeRO. form: of the optimizer's state."""
    record = OPTIMIZERS[optimizer]
    group = {**vars(record.description()), "lr": RATE, "momentum": 0.0, "dampening": 0.0}
    if optimizer == "SGD":
        group |= torch.optim.SGD([torch.ones(1)], lr=RATE).param_groups[0]
    names = tuple(sorted(made(kind).captured.reached))
    kept = record.forms[form].tensors if form else record.slots
    slots = tuple(s for s in kept if s not in record.slots or record.kept(group, s))
    attributes = record.attributes(group)
    block = {"bf16": 1024, "8bit": 256}.get(form, 1)
    shards = {} if mesh is None or not stage else shards_of(kind, mesh, block)
    if not record.elementwise:  # the ranks take turns
        shards = {n: replace(s, owner=i % s.ranks) for i, (n, s) in enumerate(shards.items())}
    settings: dict[str, Any] = {"max_grad_norm": 0.5, "skip_nonfinite": True, "average": "labels"}
    settings |= {"shards": shards, "summed_parts": tuple(shards) if stage > 1 else (), **more}
    rows = {name: replace(shard, owner=None) for name, shard in shards.items()}
    settings |= {"held": rows if stage == 3 else {}}
    return Recipe((UpdateGroup(0, names, record, attributes, slots, form=form),), **settings)


def step_of(kind: str, mesh: Mesh, **more: Any) -> Graph:
    return Compiler(host(), mesh=mesh).step(made(kind).forward, recipe_of(kind, mesh, **more))


def feeds(graph: Graph, kind: str, data: Arrays, offset: int, window: Arrays) -> Arrays:
    """Every input of a step's graph but its optimizer's state. offset: the number of the first
    sample, over all ranks."""
    captured, signature = made(kind).captured, graph.signature
    owned = {**captured.parameters, **captured.buffers}
    given: Arrays = {n: t.detach().numpy() for n, t in owned.items()}
    given |= {captured.leaves[i]: x for i, x in enumerate(data.values())}
    given |= {name: np.array(RATE) for name in signature.hyperparameters.values()}
    given |= {name: np.array(1) for name in signature.clocks.values()}
    given |= {name: np.array(0.0) for name in signature.window.values()}
    given |= {signature.seed or "": SEED, signature.sample_offset or "": np.array(offset)}
    for value in graph.inputs:
        type, name = type_of(value), value.name or ""
        if role_of(value) is Role.COTANGENT:
            given[name] = np.ones((), type.dtype.numpy())
        if role_of(value) is Role.STATE:
            given[name] = np.zeros(shape_of(type), type.dtype.numpy())
    return given | {n: x for n, x in window.items() if n in given}


def shape_of(type: Type) -> tuple[int, ...]:
    """A shape without open sizes."""
    assert all(isinstance(n, int) for n in type.shape)
    return tuple(n for n in type.shape if isinstance(n, int))


def state_of(graph: Graph, recipe: Recipe, kind: str) -> Arrays:
    """The optimizer's state before a step: numbers by the slot's name, of which a rank that updates
    a part of a parameter has that part, and the owner of one has all."""
    found: Arrays = {}
    [group] = recipe.groups
    for slot, name in graph.signature.slots.items():
        parameter = made(kind).captured.parameters[slot.parameter]
        whole = group.optimizer.tensors(group.form, Type(DType.FLOAT, tuple(parameter.shape)))
        held = whole[slot.name]
        assert held is not None, f"{slot.parameter} has no {slot.name}"
        drawn = np.random.default_rng(zlib.crc32(name.encode())).random(shape_of(held))
        drawn *= 255 if held.dtype == DType.UINT8 else 0.01
        shard = recipe.shards.get(slot.parameter)
        shard = None if shard is not None and shard.is_owner else shard
        found[name] = part_of(np.asarray(drawn).astype(held.dtype.numpy()), shard)
    return found


def part_of(whole: np.ndarray, shard: Shard | None) -> np.ndarray:
    """A rank's part of a tensor of state, or all of it."""
    if shard is None or not whole.ndim:
        return whole
    start, stop = shard.within(whole.size)
    return whole.reshape(-1)[start:stop]


def run(
    kind: str, meshes: Sequence[Mesh], shares: Sequence[Sequence[int]], **more: Any
) -> list[Arrays]:
    """The outputs of each rank after a window. shares: the rows of each rank, by micro-batch."""
    more["accumulate"] = len(shares) > 1
    graphs = [step_of(kind, mesh, **more) for mesh in meshes]
    windows: list[Arrays] = [
        state_of(graph, recipe_of(kind, mesh, **more), kind)
        for graph, mesh in zip(graphs, meshes, strict=True)
    ]
    for mesh, window in zip(meshes, windows, strict=True):
        for name, shard in recipe_of(kind, mesh, **more).held.items():
            whole = made(kind).captured.parameters[name].detach().numpy()
            window[name] = part_of(whole, shard)
    found: list[Arrays] = []
    seen = 0
    for number, sizes in enumerate(shares, 1):
        data = {n: t.numpy() for n, t in rows_of(kind, sum(sizes), number).items()}
        starts = np.cumsum([0, *sizes])
        last = number == len(shares)
        cut = [prune(g, g.signature.requested((), last)) for g in graphs]
        given = [
            feeds(
                graph, kind, {n: x[starts[r] : starts[r + 1]] for n, x in data.items()},
                seen + int(starts[r]), windows[r],
            )
            for r, graph in enumerate(cut)
        ]  # fmt: skip
        found = lockstep(meshes, cut, given)
        for window, outputs, graph in zip(windows, found, graphs, strict=True):
            signature: Signature = graph.signature
            for key, name in signature.window.items():
                if key in signature.windowed:
                    window[name] = outputs[signature.windowed[key]]
            for parameter, name in signature.accumulated.items():
                if name in outputs:
                    window[signature.accumulators[parameter]] = outputs[name]
        seen += int(starts[-1])
    return found


def close(y: np.ndarray, want: np.ndarray, name: str) -> None:
    """Numbers of fp32 whose sums may have another order."""
    np.testing.assert_allclose(y, want, rtol=2e-5, atol=2e-6, err_msg=name)


def compare_parts(
    kind: str, meshes: Sequence[Mesh], found: Sequence[Arrays], want: Arrays, **more: Any
) -> None:
    """Compares what ranks with parts of state, or of weights too, have made with one rank's."""
    for mesh, outputs in zip(meshes, found, strict=True):
        recipe, signature = recipe_of(kind, mesh, **more), step_of(kind, mesh, **more).signature
        owners = {name: shard for name, shard in recipe.shards.items() if shard.owner is not None}
        of = {out: name for name, out in signature.updated.items() if name in recipe.held}
        slots = {f"next.{n}": slot.parameter for slot, n in signature.slots.items()}
        of |= {out: name for out, name in slots.items() if name not in owners}
        assert all(owners[name].is_owner for name in slots.values() if name in owners)
        lacking = sum(not shard.is_owner for shard in owners.values())
        group = recipe.groups[0]
        assert len(outputs) == len(want) - lacking * len(group.slots)
        for name, y in outputs.items():
            if not name.startswith("output."):
                close(y, part_of(want[name], recipe.shards.get(of.get(name, ""))), name)
            if name.startswith("next.param.") and name not in of:
                np.testing.assert_array_equal(y, found[0][name], err_msg=f"{name} of two ranks")


def compare(found: Sequence[Arrays], want: Arrays) -> None:
    """Compares what every rank has made with what one rank with the whole batch makes."""
    for outputs in found:
        assert outputs.keys() == want.keys()
        for name, y in outputs.items():
            if name.startswith("output."):
                continue  # the model's own, of this rank's samples
            close(y, want[name], name)
            np.testing.assert_array_equal(y, found[0][name], err_msg=f"{name} of two ranks")
