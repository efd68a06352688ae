"""One window of a case: by its ranks in lockstep, and by one rank alone, which has all shares as
micro-batches of one window.

Both begin with the same weights and state and give each sample the same number, so that dropout
masks are the same ones. What ranks have in parts is joined before it is compared.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from fuzz.meshes.draw import Case
from fuzz.meshes.models import Drawn, InvalidCase, Tensors

from onward.capture import CapturedModule, CaptureRequest
from onward.capture.dtypes import to_type
from onward.compile import Compiler
from onward.differentiate import Recipe, UpdateGroup, summed
from onward.differentiate.loss_sum import obstacle
from onward.distribute import Mesh, data_parallel, lockstep, ranks_of
from onward.distribute.pipeline import batch_names, chosen_stages
from onward.distribute.tensor import DeviceRates, Sharding, TensorCut, chosen_cuts
from onward.distribute.tensor.conversions import Costs
from onward.errors import OnwardError
from onward.extend import OPTIMIZERS
from onward.graph.graph import Graph, Role, role_of, type_of
from onward.graph.ops.collective import STARTS
from onward.graph.signature import Signature
from onward.graph.types import DType, Type
from onward.journal import Journal
from onward.kernels import host
from onward.rewrite import prune
from onward.shards import PipelineCut, Shard

Arrays = dict[str, np.ndarray]
RATE = 0.25
SEED = np.array([3, 5], np.int64)
# a slow device with fast links, for which tiny weights are worth cutting
RATES = DeviceRates(1e8, 1e9, 1e-7, 1e8, 1e-6)


@dataclass
class Outcome:
    """What a window makes. losses: of each micro-batch of all ranks. made: parameters, state and
    norms after the update, whole, by the names of outputs. gradients: sums before the update, by
    parameter. factor: of the sums, by which they are those of the mean."""

    losses: list[float]
    made: Arrays
    gradients: Arrays
    factor: float = 1.0


class World:
    """A case's model, captured, and its steps on a mesh."""

    def __init__(self, case: Case, drawn: Drawn) -> None:
        self.case, self.drawn = case, drawn
        sizes = case["sizes"]
        self.meshes = ranks_of(tuple(sizes), tuple(sizes.values()))
        self.compiler = Compiler(host(), journal=Journal(quiet=True))
        self.batches = [
            [drawn.batch(100 * k + r, n, case["lengths"][k][r]) for r, n in enumerate(rows)]
            for k, rows in enumerate(case["rows"])
        ]
        self.captures: list[tuple[CapturedModule, Graph]] = []
        first = self.capture_of(self.batches[0][0])[0]
        self.parameters = dict(first.parameters)
        self.reached = sorted(n for n in first.reached if self.parameters[n].requires_grad)
        if not self.reached:
            raise InvalidCase("nothing is trained")
        self.average = case["average"]
        self.cuts: dict[str, tuple[int, int]] = {}
        if any(obstacle(forward) for _, forward in self.captures):
            self.average = "micro_batches"
            if case["schedule"]:
                raise InvalidCase("a pipeline's loss is a mean over labels")
        self.pipeline: PipelineCut | None = None
        if case["schedule"]:
            self.pipeline = self._pipeline()
        if case["sizes"].get("tp", 1) > 1:
            self.cuts = self._cuts()

    # ---- graphs

    def capture_of(self, data: Tensors) -> tuple[CapturedModule, Graph]:
        """The capture that serves a batch, and its forward."""
        tensors = list(data.values())
        for captured, forward in self.captures:
            if captured.dims(tensors) is not None and captured.suits(tensors):
                return captured, forward
        if len(self.captures) == 3:
            raise InvalidCase("each batch needs a capture of its own")
        names = dict(data)
        target = (names.pop("labels"),) if self.drawn.loss_fn is not None else ()
        request = CaptureRequest(self.drawn.module, (), names, target, self.drawn.loss_fn)
        captured = self.compiler.capture(request)
        forward = self.compiler.forward(captured)
        if self.case["is_packed"]:
            packed = self.compiler.pack(forward, forward.signature.requested((), None))
            forward = forward if packed is None else packed.graph
        self.captures.append((captured, forward))
        return self.captures[-1]

    def recipe(self, mesh: Mesh, micro_batches: int) -> Recipe:
        """The recipe of a rank of a mesh."""
        case, shards = self.case, self.shards(mesh)
        held = shards if case["zero"] == 3 else {}
        updated = {n: s for n, s in shards.items() if n in self.reached}
        return Recipe(
            tuple(self._groups()), max_grad_norm=case["max_grad_norm"],
            max_grad_value=case["max_grad_value"], accumulate=micro_batches > 1,
            skip_nonfinite=case["skip_nonfinite"], average=self.average, shards=updated,
            summed_parts=tuple(updated) if case["zero"] >= 2 and micro_batches > 1 else (),
            held=held, cuts=self.cuts if mesh.size("tp") > 1 else {},
            adasum=case["adasum"] and mesh.ranks > 1, sequence=case["sequence"],
            pipeline=self.pipeline if mesh.size("pp") > 1 else None,
        )  # fmt: skip

    def _groups(self) -> list[UpdateGroup]:
        """Groups of parameters with other settings; state slots as each parameter's shape has
        them."""
        record, settings = OPTIMIZERS[self.case["optimizer"]], self.settings()
        found: dict[tuple[int, tuple[str, ...]], list[str]] = {}
        for i, name in enumerate(self.reached):
            at = i % self.case["groups"]
            shape = tuple(self.parameters[name].shape)
            types = record.tensors("", Type(DType.FLOAT, shape))
            slots = tuple(s for s in record.slots if types[s] and record.kept(settings[at], s))
            found.setdefault((at, slots), []).append(name)
        return [
            UpdateGroup(at, tuple(names), record, record.attributes(settings[at]), slots)
            for (at, slots), names in sorted(found.items())
        ]

    def settings(self) -> list[dict[str, Any]]:
        """The settings of each group."""
        record = OPTIMIZERS[self.case["optimizer"]]
        found: list[dict[str, Any]] = []
        for i in range(self.case["groups"]):
            group = {**vars(record.description()), "lr": RATE / (1 + i), "momentum": 0.9 * i}
            group |= {"dampening": 0.0, "nesterov": False, "maximize": False}
            if isinstance(group.get("eps"), float):
                group["eps"] = 1e-2  # a gradient of rounding alone is no full step
            found.append(group)
        return found

    def shards(self, mesh: Mesh) -> dict[str, Shard]:
        """A part of every parameter that has an element for each rank, however small, of half of
        the parameters, drawn by name; the others stay whole. Along `tp` it is a part of what a rank
        has of the parameter."""
        ranks = mesh.size("dp_shard")
        if not self.case["zero"] or ranks == 1:
            return {}
        place = mesh.coordinate("dp_shard")
        found: dict[str, Shard] = {}
        for name, p in self.parameters.items():
            dice = random.Random(f"{self.case['seed']} {name}")
            own = p.numel() // (mesh.size("tp") if name in self.cuts else 1)
            shard = Shard("dp_shard", ranks, place, own)
            if dice.random() < 0.8 and shard.length * (ranks - 1) < own:
                found[name] = shard
        return found

    def _cuts(self) -> dict[str, tuple[int, int]]:
        mesh, ranks = self.meshes[0], self.meshes[0].size("tp")
        captured, forward = self.captures[0]
        recipe = replace(self.recipe(Mesh(), 1), average="micro_batches")
        if self.case["cuts"] == "chosen":
            sizes = captured.dims(list(self.batches[0][0].values())) or {}
            sizes = dict(sizes) | {name: 40 for name in _symbols(forward) if name not in sizes}
            graph = self.compiler._updated(forward, recipe)
            return chosen_cuts(graph, mesh, RATES, {n: 8 * size for n, size in sizes.items()})
        found: dict[str, tuple[int, int]] = {}
        for name, p in self.parameters.items():
            dice = random.Random(f"{self.case['seed']} cut {name}")
            able = [
                (dim, groups)
                for dim in range(p.dim()) for groups in (1, 2, 3)
                if p.shape[dim] % (groups * ranks) == 0 and p.shape[dim]
            ]  # fmt: skip
            if able and dice.random() < 0.6:
                found[name] = dice.choice(able)
        return found

    def _pipeline(self) -> PipelineCut:
        """The schedule, and the stages that are chosen for the first batch."""
        name, number = self.case["schedule"], self.case["sizes"]["pp"]
        each = 2 if name.startswith("Interleaved") else 1
        captured, forward = self.captures[0]
        sizes = captured.dims(list(self.batches[0][0].values())) or {}
        costs = Costs(RATES, number * each, {n: 8 * size for n, size in sizes.items()})
        holders = chosen_stages(summed(forward), number * each, costs)
        return PipelineCut(name, self.case["micro_batches"], each, holders)

    def step(self, mesh: Mesh, forward: Graph, micro_batches: int) -> Graph:
        """The step's graph of a rank."""
        recipe = self.recipe(mesh, micro_batches)
        compiler = Compiler(host(), journal=Journal(quiet=True), mesh=mesh)
        before = data_parallel.__defaults__
        try:
            if self.case["bucket"] and before is not None:  # other buckets than one
                data_parallel.__defaults__ = (before[0], self.case["bucket"], *before[2:])
            return compiler.step(forward, recipe)
        finally:
            data_parallel.__defaults__ = before

    # ---- runs

    def by_ranks(self) -> Outcome:
        """The window by all ranks of the mesh in lockstep."""
        window = self.case["window"]
        states: list[Arrays] = [{} for _ in self.meshes]
        losses: list[float] = []
        found: list[Arrays] = []
        graphs: list[Graph] = []
        seen = 0
        for k in range(window):
            shares = self.batches[k]
            starts = np.cumsum([0, *(_rows(data) for data in shares)])
            graphs, given, whole = [], [], []
            for mesh, state in zip(self.meshes, states, strict=True):
                data = shares[mesh.share]
                captured, forward = self.capture_of(data)
                graph = self.step(mesh, forward, window)
                signature = graph.signature
                graph = prune(graph, signature.requested((), k == window - 1))
                start = seen + int(starts[mesh.share])
                feeds = self.feeds(graph, captured, data, start, window, forward)
                feeds = {n: self.part(mesh, signature, n, x) for n, x in feeds.items()}
                graphs.append(graph)
                given.append({**feeds, **{n: x for n, x in state.items() if n in feeds}})
                whole.append(signature)
            _same_sequence(self.meshes, graphs)
            found = lockstep(self.meshes, graphs, given)
            for state, outputs, signature in zip(states, found, whole, strict=True):
                state.update(carried(signature, outputs))
            losses.append(_one_loss(found, whole))
            seen += int(starts[-1])
        return Outcome(losses, self.joined(found, whole), {})

    def alone(self, shares: Sequence[int] | None = None, update: bool = True) -> Outcome:
        """The window by one rank, which runs these shares one after another as micro-batches; None:
        all of them."""
        own = range(len(self.batches[0])) if shares is None else shares
        window = self.case["window"]
        count = window * len(own)
        state: Arrays = {}
        losses: list[float] = []
        outputs: Arrays = {}
        seen, done = 0, 0
        labels = 0.0
        signature = Signature()
        for k in range(window):
            starts = np.cumsum([0, *(_rows(data) for data in self.batches[k])])
            total = weight = 0.0
            for r in own:
                done += 1
                data = self.batches[k][r]
                captured, forward = self.capture_of(data)
                graph = self.step(Mesh(), forward, count)
                signature = graph.signature
                last = done == count and update
                graph = prune(graph, signature.requested((), last))
                feeds = self.feeds(graph, captured, data, seen + int(starts[r]), count)
                feeds |= {n: x for n, x in state.items() if n in feeds}
                [outputs] = lockstep([Mesh()], [graph], [feeds])
                before = labels
                state.update(carried(signature, outputs))
                labels = float(state.get(signature.window.get("labels", ""), np.array(0.0)))
                part = labels - before if signature.windowed else 1.0
                loss = float(outputs[signature.loss or ""])
                total, weight = total + (loss * part if part else 0.0), weight + part
            losses.append(total / weight if weight else float("nan"))
            seen += int(starts[-1])
        told = [*signature.updated.values(), signature.grad_norm, signature.finite]
        made = {n: outputs[n] for n in told if n is not None and n in outputs}
        sums = {p: state[held] for p, held in signature.accumulators.items() if held in state}
        named = {key: float(outputs[name]) for key, name in signature.windowed.items()}
        factor = named["unit"] / (named["divisor"] or 1.0) if signature.windowed else 1.0
        return Outcome(losses, made, sums, factor)

    def update_by(self, gradients: Arrays) -> Arrays:
        """What one rank's update makes of these gradients, by parameter."""
        recipe = replace(self.recipe(Mesh(), 2), average="micro_batches")
        types = {n: to_type(self.parameters[n]) for n in recipe.parameters}
        graph = self.compiler.update(types, recipe)
        signature = graph.signature
        graph = prune(graph, signature.requested((), True))
        given = self.feeds(graph, self.captures[0][0], {}, 0, 2)
        assert signature.window_scale is not None, "an update alone has a scale"
        given[signature.window_scale] = np.array(1.0)
        held = {signature.accumulators[n]: g.astype(np.float32) for n, g in gradients.items()}
        [outputs] = lockstep([Mesh()], [graph], [given | held])
        told = [*signature.updated.values(), signature.grad_norm, signature.finite]
        return {n: outputs[n] for n in told if n is not None and n in outputs}

    def feeds(
        self, graph: Graph, captured: CapturedModule, data: Tensors, offset: int, window: int,
        forward: Graph | None = None,
    ) -> Arrays:  # fmt: skip
        """Every input of a whole step's graph, its state drawn by name. offset: the number of the
        first sample in the window. window: micro-batches. forward: of a rank, whose batch may be
        cut into the micro-batches of a pipeline."""
        signature = graph.signature
        given: Arrays = {n: t.detach().numpy() for n, t in captured.owned.items()}
        given |= {captured.leaves[i]: t.numpy() for i, t in enumerate(data.values())}
        if forward is not None and self.pipeline is not None:
            number = self.pipeline.micro_batches
            for name, own in batch_names(forward, number).items():
                given |= dict(zip(own, np.array_split(given.pop(name), number), strict=True))
        settings, record = self.settings(), OPTIMIZERS[self.case["optimizer"]]
        for h, name in signature.hyperparameters.items():
            given[name] = np.array(record.hyperparameters[h.name](settings[h.group]))
        given |= {name: np.array(3) for name in signature.clocks.values()}
        given |= {name: np.array(0.0) for name in signature.window.values()}
        given |= {signature.seed or "": SEED, signature.sample_offset or "": np.array(offset)}
        weight = 1.0 if self.average == "labels" else 1.0 / window
        slots = {name: slot for slot, name in signature.slots.items()}
        for value in graph.inputs:
            kind, name = type_of(value), value.name or ""
            if role_of(value) is Role.COTANGENT:
                given[name] = np.full((), weight, kind.dtype.numpy())
            if role_of(value) is Role.STATE and name not in given:
                slot = slots.get(name)
                shape = self._state_shape(slot, kind)
                drawn = np.random.default_rng(zlib.crc32(name.encode())).random(shape)
                used = 0.01 if slot is not None else 0.0
                given[name] = np.asarray(drawn * used).astype(kind.dtype.numpy())
        names = {v.name for v in graph.inputs}
        return {n: x for n, x in given.items() if n in names}

    def _state_shape(self, slot: Any, kind: Type) -> tuple[int, ...]:
        """The whole shape of a tensor of state, of which a rank's graph may have a part; of an
        accumulator as the graph has it, since it is 0."""
        if slot is None:
            return tuple(int(n) for n in kind.shape)  # type: ignore[arg-type]
        record = OPTIMIZERS[self.case["optimizer"]]
        shape = tuple(self.parameters[slot.parameter].shape)
        held = record.tensors("", Type(DType.FLOAT, shape))[slot.name]
        assert held is not None, f"{slot.parameter} has no {slot.name}"
        return tuple(int(n) for n in held.shape)  # type: ignore[arg-type]

    # ---- parts of tensors

    def part(self, mesh: Mesh, signature: Signature, name: str, whole: np.ndarray) -> np.ndarray:
        """What a rank has of an input that is given whole."""
        slots = {held: slot.parameter for slot, held in signature.slots.items()}
        owner = slots.get(name, name if name in self.parameters else "")
        if not owner or not whole.ndim:
            return whole
        cut = self._tensor_cut(mesh, owner, whole.shape)
        local = whole if cut is None else cut.part(whole)
        shards = self.shards(mesh)
        is_row = owner in shards and (name in slots or self.case["zero"] == 3)
        if is_row and (owner in self.reached or name == owner):
            start, stop = shards[owner].within(local.size)
            return local.reshape(-1)[start:stop]
        return local

    def _tensor_cut(self, mesh: Mesh, owner: str, shape: tuple[int, ...]) -> TensorCut | None:
        if owner not in self.cuts or shape != tuple(self.parameters[owner].shape):
            return None
        sharding = Sharding(*self.cuts[owner])
        return TensorCut("tp", mesh.size("tp"), mesh.coordinate("tp"), sharding)

    def joined(self, found: Sequence[Arrays], signatures: Sequence[Signature]) -> Arrays:
        """What all ranks have made, whole. Raises AssertionError where ranks that have the same
        thing have other numbers of it."""
        made: Arrays = {}
        for outputs, signature in zip(found, signatures, strict=True):
            inputs = {out: name for name, out in signature.updated.items()}
            slots = {held: slot.parameter for slot, held in signature.slots.items()}
            of_slots = {held: slot for slot, held in signature.slots.items()}
            for name in [*inputs, signature.grad_norm, signature.finite]:
                if name is None or name not in outputs or name in made:
                    continue
                owner = slots.get(inputs.get(name, ""), inputs.get(name, ""))
                slot = of_slots.get(inputs.get(name, ""))
                if slot is not None and self.cuts:  # Adafactor's state is of other shapes, whole
                    whole = self._state_shape(slot, Type(DType.FLOAT, ()))
                    owner = owner if whole == tuple(self.parameters[owner].shape) else ""
                is_weight = inputs.get(name) in self.parameters
                made[name] = self._whole(name, owner, found, is_weight)
        return made

    def _whole(self, name: str, owner: str, found: Sequence[Arrays], is_weight: bool) -> np.ndarray:
        arrays = {rank: outputs[name] for rank, outputs in enumerate(found) if name in outputs}
        first, *_ = arrays.values()
        if owner and first.ndim:
            mesh, shape = self.meshes[0], tuple(self.parameters[owner].shape)
            cut = self._tensor_cut(mesh, owner, shape)
            local = shape if cut is None else cut.part(np.empty(shape, bool)).shape
            if owner in self.shards(mesh) and (self.case["zero"] == 3 or not is_weight):
                arrays = self._joined_along("dp_shard", arrays, partial(_of_rows, shape=local))
            if cut is not None and next(iter(arrays.values())).shape == local:
                arrays = self._joined_along("tp", arrays, cut.joined)
        first, *others = arrays.values()
        for other in others:
            np.testing.assert_array_equal(other, first, err_msg=f"{name} of two ranks")
        return first

    def _joined_along(
        self, axis: str, arrays: Mapping[int, np.ndarray], join: Callable[[list[np.ndarray]], Any]
    ) -> dict[int, np.ndarray]:
        """What each rank has together with the others along an axis. arrays: by rank; those of
        other stages may have none."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in arrays:
            mesh = self.meshes[rank]
            others = tuple(c for a, c in zip(mesh.axes, mesh.coordinates, strict=True) if a != axis)
            groups.setdefault(others, []).append(rank)
        made: dict[int, Any] = dict(arrays)
        for ranks in groups.values():
            whole = join([arrays[rank] for rank in ranks])
            made.update(dict.fromkeys(ranks, whole))
        return made


def _of_rows(parts: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """A tensor of this shape, whose elements ranks have as one row."""
    return np.concatenate([part.reshape(-1) for part in parts]).reshape(shape)


def carried(signature: Signature, outputs: Arrays) -> Arrays:
    """The inputs of the next micro-batch that this one has made."""
    found: Arrays = {}
    for key, name in signature.window.items():
        if key in signature.windowed and signature.windowed[key] in outputs:
            found[name] = outputs[signature.windowed[key]]
    for parameter, name in signature.accumulated.items():
        if name in outputs:
            found[signature.accumulators[parameter]] = outputs[name]
    return found


def _one_loss(found: Sequence[Arrays], signatures: Sequence[Signature]) -> float:
    """The loss of all ranks, on which they agree."""
    told = [outputs[s.loss or ""] for outputs, s in zip(found, signatures, strict=True)]
    for other in told[1:]:
        np.testing.assert_array_equal(other, told[0], err_msg="the loss of two ranks")
    return float(told[0])


def _same_sequence(meshes: Sequence[Mesh], graphs: Sequence[Graph]) -> None:
    """Raises InvalidCase where ranks, of one stage where they share the layers, would be refused,
    since their graphs, of other captures, exchange other things."""
    said: dict[int, list[tuple[Any, ...]]] = {}
    for mesh, graph in zip(meshes, graphs, strict=True):
        own = [
            (n.op_type, n.attributes["axis"].value, n.attributes["record"].value)
            for n in graph if n.op_type in STARTS
        ]  # fmt: skip
        if said.setdefault(mesh.coordinate("pp"), own) != own:
            raise InvalidCase("ranks whose captures exchange other things")


def _symbols(graph: Graph) -> set[str]:
    return {s for v in graph.inputs for n in type_of(v).shape if not isinstance(n, int)
            for s in n.symbols}  # fmt: skip


def _rows(data: Tensors) -> int:
    return next(int(x.shape[0]) for x in data.values() if x.dim())


def reason(error: OnwardError) -> str:
    """The reason of a refusal, without its numbers."""
    return "".join("#" if c.isdigit() else c for c in str(error).splitlines()[0][:120])


__all__ = ["Arrays", "Outcome", "World", "carried", "reason"]
