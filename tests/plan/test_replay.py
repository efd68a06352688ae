"""A plan replayed on memory that knows what lies where.

Every element ever written has a number of its own. A launch must find, at each of its operands'
places, the numbers of the very elements that the graph says it reads: then nothing was overwritten
too early, no window is askew, and nothing runs before what it needs. The replay knows ops that move
elements by numpy; all others make new elements. It knows nothing of lifetimes.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from tiny import compiled, trained
from tiny_families import CASES
from torch import nn

import onward
import onward.compile
from onward.graph.build import Builder
from onward.graph.graph import (
    Graph,
    Node,
    Role,
    Value,
    attributes,
    content_of,
    role_of,
    type_of,
)
from onward.graph.types import DType, Type
from onward.plan import MemoryRegion, make_plan
from onward.plan.order import order
from onward.plan.plan import Plan, PlannedLaunch
from onward.plan.planner import Planner
from onward.plan.select import select
from onward.plan.storages import Access
from onward.plan.views import Layout
from onward.rewrite import specialize

Numbers = np.ndarray[Any, np.dtype[np.int64]]


class Recorded(Planner):
    """The planner, and which launches it made for which node."""

    def __init__(self, *arguments: Any) -> None:
        self.made: dict[Node, list[PlannedLaunch]] = {}
        super().__init__(*arguments)

    def launches(self, access: Access) -> list[PlannedLaunch]:
        found = self.made[access.node] = super().launches(access)
        return found


class Replay:
    """Memory of numbers, and the numbers that each value consists of."""

    def __init__(self, planner: Recorded, plan: Plan) -> None:
        self.planner, self.result = planner, plan
        self.memory: dict[Any, Numbers] = defaultdict(lambda: np.full(0, -1))
        self.values: dict[Value, Numbers] = {}
        self.fresh = count()

    def run(self) -> None:
        graph, storages = self.planner.graph, self.planner.storages
        given = [*graph.inputs, *graph.ir.initializers.values()]
        for value in given:
            self.values[value] = self.new(value)
            if role_of(value) is not Role.COTANGENT:
                self.write(self.planner.buffers.layout(value), self.values[value])
        known = {id(launch) for made in self.planner.made.values() for launch in made}
        place = [i for i, launch in enumerate(self.result.launches) if id(launch) in known]
        for launch in self.result.launches[: place[0]]:  # outputs that show state
            self.copy(launch)
        for i, node in enumerate(self.planner.nodes):
            if i == (self.planner.half or 0):
                self.between_halves()
            launches = self.planner.made.get(node, [])
            if node in storages.views or node in storages.assigned.placed:
                for launch in launches:
                    self.copy(launch)
                for value, numbers in zip(node.outputs, self.moved(node), strict=True):
                    self.values[value] = numbers
                continue
            *copies, launch = launches
            for copied in copies:
                self.copy(copied)
            self.launch(node, launch)
        for launch in self.result.launches[place[-1] + 1 :]:  # state is written back
            self.copy(launch)
        gradients = {*graph.signature.gradients.values()}
        for name, value in graph.outputs.items():
            if graph.signature.split_halves and name not in gradients:
                continue  # read when the forward was done
            source = graph.state.get(name)
            layout = (
                self.result.outputs[name] if source is None else self.planner.buffers.layout(source)
            )
            self.expect(layout, self.values[value], f"output {name}")

    def between_halves(self) -> None:
        """Cotangents come when the forward is done; then the outputs must be whole."""
        graph = self.planner.graph
        if self.planner.half is not None:
            gradients = {*graph.signature.gradients.values()}
            for name, value in graph.outputs.items():
                if name not in gradients:
                    self.expect(self.result.outputs[name], self.values[value], f"output {name}")
        for value in graph.inputs_with(Role.COTANGENT):
            self.write(self.planner.buffers.layout(value), self.values[value])

    # ---- numbers

    def new(self, value: Value) -> Numbers:
        shape = [int(n) for n in type_of(value).shape]  # type: ignore[arg-type]
        size = int(np.prod(shape))
        return np.array([next(self.fresh) for _ in range(size)], dtype=np.int64).reshape(shape)

    def moved(self, node: Node) -> list[Numbers]:
        """What ops that only move elements give."""
        attrs = attributes(node)
        x = self.values[node.inputs[0]]  # type: ignore[index]
        shapes = [tuple(type_of(y).shape) for y in node.outputs]
        match node.op_type:
            case "Identity":
                return [x]
            case "Reshape" | "Squeeze" | "Unsqueeze":
                return [x.reshape(shapes[0])]  # type: ignore[arg-type]
            case "Transpose":
                return [x.transpose(attrs.get("perm"))]
            case "Expand":
                return [np.broadcast_to(x, shapes[0])]  # type: ignore[arg-type]
            case "Concat":
                parts = [self.values[v] for v in node.inputs if v is not None]
                return [np.concatenate(parts, attrs["axis"])]
            case "Split":
                axis = attrs.get("axis", 0)
                ends = np.cumsum([shape[axis] for shape in shapes])[:-1]
                return list(np.split(x, [int(n) for n in ends], axis))
            case "Slice":
                starts, stops, axes = (content_of(v) or () for v in node.inputs[1:4])
                for a, b, axis in zip(starts, stops, axes, strict=True):
                    x = x.take(np.arange(x.shape[axis])[a:b], axis)  # type: ignore[misc]
                return [x]
        raise AssertionError(f"{node.op_type} moves nothing")

    # ---- memory

    def places(self, layout: Layout) -> tuple[Any, Numbers]:
        """The region, and the bytes of each element: i64[*shape, itemsize]."""
        buffer = self.result.buffers[layout.buffer]
        assert isinstance(layout.offset, int)
        at = np.full((), layout.offset, dtype=np.int64)
        for size, stride in zip(layout.shape, layout.strides, strict=True):
            at = at[..., None] + np.arange(size) * stride  # type: ignore[arg-type]
        assert at.size == 0 or (at.min() >= 0), "before its buffer"
        width = int(layout.dtype.itemsize)
        found = (at * width)[..., None] + np.arange(width)
        assert found.size == 0 or found.max() < buffer.nbytes, f"beyond {buffer.name}"
        arena = buffer.region in (MemoryRegion.SCRATCH, MemoryRegion.RESIDUAL)
        if buffer.region is MemoryRegion.USER:
            return layout.buffer, found
        return ("arena" if arena and self.result.joint else buffer.region), found + buffer.offset

    def cells(self, region: Any, places: Numbers) -> Numbers:
        """The region's memory, grown to hold the places."""
        most = int(places.max()) + 1 if places.size else 0
        held = self.memory[region]
        if most > len(held):
            self.memory[region] = held = np.concatenate([held, np.full(most - len(held), -1)])
        return held

    def write(self, layout: Layout, numbers: Numbers) -> None:
        region, places = self.places(layout)
        self.cells(region, places)[places] = numbers[..., None]

    def expect(self, layout: Layout, numbers: Numbers, what: str) -> None:
        region, places = self.places(layout)
        found = self.cells(region, places)[places]
        assert found.shape[:-1] == numbers.shape, f"{what}: {found.shape[:-1]}, {numbers.shape}"
        assert (found == numbers[..., None]).all(), f"{what} is not what lies there"

    def copy(self, launch: PlannedLaunch) -> None:
        """The numbers go where the launch writes."""
        (source,), (target,) = launch.inputs, launch.outputs
        assert source is not None
        region, places = self.places(source)
        self.write(target, self.cells(region, places)[places][..., 0])

    def launch(self, node: Node, launch: PlannedLaunch) -> None:
        for x, layout in zip(node.inputs, launch.inputs, strict=True):
            if x is not None:
                assert layout is not None
                self.expect(layout, self.values[x], f"{node.op_type} reads %{x.name}, which")
        self.keep_apart(node, launch)
        for y, layout in zip(node.outputs, launch.outputs, strict=True):
            self.values[y] = self.new(y)
            self.write(layout, self.values[y])
        for layout in launch.scratch:
            self.write(layout, np.full([int(n) for n in layout.shape], -1))  # type: ignore[arg-type]
        for y, layout in zip(node.outputs, launch.outputs, strict=True):
            self.expect(layout, self.values[y], f"{node.op_type} writes %{y.name}, which")

    def keep_apart(self, node: Node, launch: PlannedLaunch) -> None:
        """What a launch writes is none of what it reads, but where its kernel may."""
        written = [*launch.outputs, *launch.scratch]
        for i, target in enumerate(written):
            for j, source in enumerate(launch.inputs):
                if source is None or not self.meet(target, source):
                    continue
                may = (i, j) in launch.kernel.inplace and i < len(launch.outputs)
                same = (target.shape, target.strides, target.offset) == (
                    source.shape, source.strides, source.offset,
                )  # fmt: skip
                assert may and same, f"{node.op_type} writes over its input {j}"

    def meet(self, a: Layout, b: Layout) -> bool:
        (one, x), (other, y) = self.places(a), self.places(b)
        return one == other and bool(np.intersect1d(x, y).size)


def replay(graph: Graph, joint: bool = True) -> Recorded:
    """Plans the graph and replays the plan."""
    graph = graph.clone()
    kernels = select(graph)
    planner = Recorded(graph, {}, kernels, order(graph), joint)
    Replay(planner, planner.plan()).run()
    return planner


# ---- graphs


class Random:
    """Graphs of small matrices, drawn op by op; the second half belongs to the backward."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.graph = Graph(f"random{seed}")
        self.b = Builder(self.graph)
        self.pool = [self.graph.input(f"x{i}", f32(4, 6), Role.BATCH) for i in range(2)]
        self.weights = [self.graph.input(f"w{i}", f32(4, 6), Role.PARAM) for i in range(2)]
        self.pool += self.weights
        self.vector = self.graph.input("vector", f32(6), Role.PARAM)
        self.seed = self.graph.input("seed", Type(DType.INT64, (2,)), Role.HYPER)

    def pick(self, shape: tuple[int, ...] | None = None) -> Value:
        """One of the pool, a late one rather than an early one."""
        found = [v for v in self.pool if shape is None or type_of(v).shape == shape]
        late = len(found) - 1 - int(self.rng.exponential(3.0))
        return found[max(0, late)]

    def draw(self, nodes: int) -> Graph:
        for i in range(nodes):
            self.b.backward = i >= nodes // 2
            made = self.step(str(self.rng.choice(STEPS)))
            self.pool += [v for v in made if v.producer() is not None]
        for i, w in enumerate(self.weights):
            g = self.pick((4, 6))  # maybe the other's parameter
            velocity = self.graph.input(f"velocity{i}", f32(4, 6), Role.STATE)
            lr = self.b.scalar(0.1, DType.FLOAT)
            one = self.b.const(np.array(1, np.int64))
            made = self.b.node("SGDUpdate", [w, g, velocity, lr, one], SGD)
            for value, source in zip(made, (w, velocity), strict=True):  # type: ignore[arg-type]
                self.graph.outputs[f"next.{source.name}"] = value
                self.graph.state[f"next.{source.name}"] = source
        ends = [v for v in self.pool if v.producer() is not None]
        for i in range(3):
            self.graph.outputs[f"y{i}"] = ends[int(self.rng.integers(len(ends)))]
        return self.graph

    def step(self, kind: str) -> list[Value]:
        b, x = self.b, self.pick()
        shape = tuple(int(n) for n in type_of(x).shape)  # type: ignore[arg-type]
        last = len(shape) - 1
        match kind:
            case "unary":
                return [b.one(str(self.rng.choice(["Relu", "Tanh", "Neg", "Sigmoid"])), [x], {})]
            case "binary":
                op = str(self.rng.choice(["Add", "Mul", "Sub", "Div"]))
                return [b.one(op, [x, self.pick(shape)], {})]
            case "where":
                return [b.Where(b.Greater(x, self.pick(shape)), self.pick(shape), x)]
            case "transpose":
                return [b.transpose(x, self.rng.permutation(len(shape)).tolist())]
            case "reshape":
                choices = [(4, 6), (2, 2, 6), (8, 3), (24,), (4, 2, 3), (6, 4)]
                size = int(np.prod(shape))
                fitting = [s for s in choices if int(np.prod(s)) == size]
                fitting = fitting or [(size,)]
                return [b.reshape(x, fitting[int(self.rng.integers(len(fitting)))])]
            case "split":
                if shape[last] % 2:
                    return []
                half = shape[last] // 2
                return list(b.Split(x, b.ints([half, half]), axis=last))
            case "concat":
                other = self.pick(shape)
                return [b.Concat(x, other, axis=int(self.rng.integers(len(shape))))]
            case "slice":
                return [b.slice(x, 0, 1, shape[0])] if shape[0] > 1 else []
            case "expand":
                return [b.expand(b.reduce_sum(x, [0], keepdims=True), shape)]
            case "norm":  # two of its outputs may go over one input
                if shape[last] != 6:
                    return []
                y, _, _, r = b.AddLayerNormalization(x, self.pick(shape), self.vector, None)
                return [y, r]
            case "norm's gradient":  # two of its outputs may go over the same input
                if shape[last] != 6:
                    return []
                _, *statistics, r = b.AddLayerNormalization(x, self.pick(shape), self.vector, None)
                dy = b.Tanh(self.pick(shape))
                found = b.AddLayerNormalizationGrad(
                    dy, self.pick(shape), r, self.vector, *statistics, self.seed, **DROP
                )
                return [found[0], found[3]]
            case "softmax":
                return [b.Softmax(x, axis=-1)]
            case "product":
                if len(shape) != 2:
                    return []
                y = b.Gemm(x, self.pick(shape), transB=1)
                mixed = b.Gemm(y, x)
                return [mixed, b.Gemm(y, x, self.pick(shape))]
            case "heads":
                if shape != (4, 6):
                    return []
                parts = b.transpose(b.reshape(x, (2, 2, 2, 3)), [0, 2, 1, 3])
                product = b.MatMul(parts, b.transpose(parts, [0, 1, 3, 2]))
                y = b.transpose(b.MatMul(product, parts), [0, 2, 1, 3])
                return [b.reshape(y, (4, 6))]
        raise AssertionError(kind)


STEPS = ("unary", "binary", "where", "transpose", "reshape", "split", "concat", "slice", "expand",
         "softmax", "norm", "norm's gradient", "product", "heads")  # fmt: skip
DROP = {"ratio": 0.25, "site": 1, "sample_dim": 0}
SGD = {"momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": 0}


def f32(*shape: int) -> Type:
    return Type(DType.FLOAT, shape)


@pytest.mark.parametrize("joint", [True, False], ids=["one arena", "two arenas"])
def test_random_graphs(joint: bool) -> None:
    taken = 0
    for seed in range(60):
        planner = replay(specialize(Random(seed).draw(24), {}), joint)
        taken += sum(" > " in b.name for b in planner.buffers.all)
    assert taken > 60, "hardly anything was written in place"


class Net(nn.Module):
    """What models are made of: heads, a norm, a residual, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.norm = nn.LayerNorm(8)
        self.project, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        parts = self.project(self.norm(x)).chunk(3, -1)
        q, k, v = (p.unflatten(-1, (2, 4)).transpose(1, 2) for p in parts)
        scores = torch.softmax(q @ k.transpose(-1, -2), -1)
        x = x + self.out((scores @ v).transpose(1, 2).flatten(2))
        logits = torch.tanh(x) @ self.embed.weight.t()
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    "disable",
    [
        (),
        (
            "noop",
            "common_subexpression_elimination",
            "add_layer_norm",
            "bias_activation",
            "gemm_add",
        ),
    ],
)
def test_training_steps(disable: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps that a Trainer plans, with clipping and accumulation, on every plan it makes."""
    seen: list[Plan] = []

    def recorded(
        graph: Graph, dims: Any, joint: bool = True, target: Any = None, block: None = None
    ) -> Plan:
        graph = graph.clone()
        if graph.symbols:  # sizes that stay open have no numbers to replay at
            return make_plan(graph, dims, joint, target)
        kernels = select(graph, target)
        planner = Recorded(graph, dims, kernels, order(graph), joint)
        plan = planner.plan()
        Replay(planner, plan).run()
        seen.append(plan)
        return plan

    monkeypatch.setattr(onward.compile, "make_plan", recorded)
    torch.manual_seed(0)
    options = onward.TrainerOptions(
        max_grad_norm=1.0, gradient_accumulation_steps=2, disable=disable
    )
    trainer = onward.Trainer(Net(), onward.optim.AdamW(), options=options)
    ids = torch.randint(0, 7, (3, 5))
    for _ in range(2):
        trainer.train_step(ids=ids, labels=ids)
    assert len(seen) >= 2


@pytest.mark.parametrize("name", ["Net", *CASES])
@pytest.mark.sample(5)
def test_halves(name: str) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 7, (3, 5))
    model = Net() if name == "Net" else CASES[name][0]()
    data = {"ids": ids, "labels": ids} if name == "Net" else CASES[name][1]()
    made = compiled(model, data)
    dims = made.captured.dims(list(data.values()))
    assert dims is not None
    results = made.forward.signature.results.values()
    floating = [n for n in results if type_of(made.forward.outputs[n]).is_floating]
    for ends in (("loss",), tuple(dict.fromkeys(["loss", *floating]))):
        graph = made.compiler.halves(made.forward, ends, tuple(trained(made)))
        planner = replay(specialize(graph, dims))
        assert planner.half


def test_a_product_does_not_write_over_its_operand(execute: Any) -> None:
    """`x w + x`: the addend may be written over, but not while it is read as an operand."""
    rng = np.random.default_rng(0)
    feeds = {n: rng.standard_normal((64, 64), np.float32) for n in ("x", "w")}
    graph = Graph("residual")
    b = Builder(graph)
    x, w = (graph.input(n, f32(64, 64), Role.BATCH) for n in feeds)
    y = b.Tanh(x)
    graph.outputs = {"left": b.Gemm(y, w, y), "right": b.Gemm(w, z := b.Sigmoid(x), z)}
    found = execute(graph, feeds)
    tanh, sigmoid = np.tanh(feeds["x"]), 1 / (1 + np.exp(-feeds["x"]))
    np.testing.assert_allclose(found["left"], tanh @ feeds["w"] + tanh, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found["right"], feeds["w"] @ sigmoid + sigmoid, rtol=1e-4, atol=1e-4)


class Shown(nn.Module):
    """Returns a parameter, and a window on it, beside its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = self.inner(x).pow(2).mean()
        return {"loss": loss, "weight": self.inner.weight, "turned": self.inner.weight.t()[1:]}


def test_an_output_that_shows_a_parameter_is_its_value_before_the_update() -> None:
    torch.manual_seed(0)
    model = Shown()
    before = model.inner.weight.detach().clone()
    trainer = onward.Trainer(model, onward.optim.AdamW(lr=0.1))
    found = trainer.train_step(torch.randn(5, 3), fetch=("weight", "turned")).outputs
    assert not torch.equal(model.inner.weight, before)
    assert torch.equal(found["weight"], before)
    assert torch.equal(found["turned"], before.t()[1:])
