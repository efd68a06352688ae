"""Onward from scratch: a training step as one graph, planned to the byte, in numpy alone.

    capture -> rewrite -> differentiate -> plan -> execute

Each part has the name of the folder of src/onward where the real one is; docs/from_scratch.md walks
through this file. Every tensor is f32; B rows of a batch, D features, H hidden units, C classes.

python from_scratch.py
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial, partialmethod
from typing import Any

import numpy as np

Shape = tuple[int, ...]
Arrays = Mapping[str, np.ndarray]

# ---- graph: a program of values and nodes, and a table of what is known of each op


@dataclass(frozen=True, eq=False)
class Value:
    """One tensor of a graph."""

    name: str
    shape: Shape

    def __str__(self) -> str:  # %relu_2: f32[64,32]
        return f"%{self.name}: f32[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, eq=False)
class Node:
    """One application of an op; a plain number among its inputs is a constant."""

    op: str
    inputs: tuple[Any, ...]
    output: Value
    attrs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        read = [f"%{x.name}" if isinstance(x, Value) else f"{x:.4g}" for x in self.inputs]
        read += [f"{name}={value}" for name, value in self.attrs.items()]
        return f"{self.output} = {self.op}({', '.join(read)})"


class Graph:
    """Nodes in order. updates: a tensor that outlives the step -> the value that replaces it."""

    def __init__(self) -> None:
        self.inputs: list[Value] = []
        self.nodes: list[Node] = []
        self.updates: dict[Value, Value] = {}
        self.numbers = itertools.count()

    def input(self, name: str, shape: Shape) -> Value:
        self.inputs.append(Value(name, shape))
        return self.inputs[-1]

    def add(self, op: str, *inputs: Any, **attrs: Any) -> Value:
        """Appends a node; the op's shape rule says what comes out."""
        shape = OPS[op].shape(*[getattr(x, "shape", ()) for x in inputs], **attrs)
        y = Value(f"{op.lower()}_{next(self.numbers)}", shape)
        self.nodes.append(Node(op, inputs, y, attrs))
        return y

    def __getattr__(self, op: str) -> Callable[..., Value]:  # graph.Mul(x, y) adds a node Mul
        if op not in OPS:
            raise AttributeError(op)
        return partial(self.add, op)


@dataclass(frozen=True)
class Op:
    """What is true of an op on every machine: its shape rule, and its body, the meaning."""

    shape: Callable[..., Shape]  # shapes of the inputs -> shape of the result
    body: Callable[..., Any]  # arrays -> array


def wide(*shapes: Shape) -> Shape:
    return np.broadcast_shapes(*shapes)


def product(x: Shape, w: Shape, *bias: Shape, ta: bool = False, tb: bool = False) -> Shape:
    (rows, inner), (same, columns) = x[::-1] if ta else x, w[::-1] if tb else w
    assert inner == same, f"a product of {x} and {w}"
    return wide((rows, columns), *bias)


def log_softmax(z: np.ndarray) -> np.ndarray:  # f32[B,C] -> f32[B,C]
    z = z - z.max(1, keepdims=True)
    return z - np.log(np.exp(z).sum(1, keepdims=True))


OPS = {
    "Add": Op(wide, lambda x, y: x + y),
    "Sub": Op(wide, lambda x, y: x - y),
    "Mul": Op(wide, lambda x, y: x * y),
    "Div": Op(wide, lambda x, y: x / y),
    "Sqrt": Op(wide, np.sqrt),
    "Relu": Op(wide, lambda x: np.maximum(x, 0)),
    "ReluGrad": Op(wide, lambda dy, y: dy * (y > 0)),
    "ReduceSum": Op(lambda x: x[1:], lambda x: x.sum(0)),  # over the first dim
    "MatMul": Op(product, lambda x, w, ta=False, tb=False: (x.T if ta else x) @ (w.T if tb else w)),
    "LinearRelu": Op(product, lambda x, w, b: np.maximum(x @ w + b, 0)),
    "CrossEntropy": Op(  # z f32[B,C], one-hot t f32[B,C] -> f32[], the mean over B
        lambda z, t: (), lambda z, t: -(t * log_softmax(z)).sum() / len(z)
    ),
    "CrossEntropyGrad": Op(  # -> f32[B,C]
        lambda dy, z, t: z, lambda dy, z, t: (np.exp(log_softmax(z)) - t) * (dy / len(z))
    ),
}  # fmt: skip

# ---- capture: run the forward once, with tracers in the place of tensors


@dataclass(frozen=True)
class Tracer:
    """Stands for a tensor while a forward runs, and writes down what is done with it."""

    graph: Graph
    value: Value

    def then(self, *others: Tracer, op: str) -> Tracer:
        return Tracer(self.graph, self.graph.add(op, self.value, *[x.value for x in others]))

    __matmul__ = partialmethod(then, op="MatMul")
    __add__ = partialmethod(then, op="Add")
    relu = partialmethod(then, op="Relu")
    cross_entropy = partialmethod(then, op="CrossEntropy")


def mlp(x: Any, target: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
    """The model, which is plain code; x f32[B,D], target f32[B,C], w1 f32[D,H], w2 f32[H,C]."""
    h = (x @ w1 + b1).relu()  # f32[B,H]
    logits = h @ w2 + b2  # f32[B,C]
    return logits.cross_entropy(target)  # f32[]


def capture(forward: Callable[..., Tracer], arrays: Arrays) -> tuple[Graph, Value]:
    """The graph of a forward, and its loss."""
    graph = Graph()
    tracers = {name: Tracer(graph, graph.input(name, x.shape)) for name, x in arrays.items()}
    return graph, forward(**tracers).value


# ---- rewrite: passes, functions that edit a graph and leave its meaning as it is


def fuse_linear_relu(graph: Graph, loss: Value) -> None:
    """Relu(Add(MatMul(x, w), b)) => LinearRelu(x, w, b), where nothing else reads those inside."""
    makers = {node.output: node for node in graph.nodes}
    reads = [x for node in graph.nodes for x in node.inputs] + [loss]
    for i, relu in enumerate(graph.nodes):
        add = makers.get(relu.inputs[0])
        matmul = makers.get(add.inputs[0]) if add else None
        if not matmul or not add or (matmul.op, add.op, relu.op) != ("MatMul", "Add", "Relu"):
            continue
        if reads.count(add.output) == reads.count(matmul.output) == 1 and not matmul.attrs:
            graph.nodes[i] = Node("LinearRelu", (*matmul.inputs, add.inputs[1]), relu.output)


def dead_code_elimination(graph: Graph, loss: Value) -> None:
    """y = f(x), y unused => nothing."""
    needed, kept = {loss, *graph.updates.values()}, []
    for node in reversed(graph.nodes):
        if node.output in needed:
            needed.update(node.inputs)
            kept.append(node)
    graph.nodes = kept[::-1]


FORWARD = [fuse_linear_relu, dead_code_elimination]
STEP = [dead_code_elimination]  # removes the gradient of x, which nobody asks for

# ---- differentiate: gradient rules, one reverse walk, and the optimizer, all as nodes


def linear_relu_grad(b: Graph, dy: Value, y: Value, x: Value, w: Value, bias: Value) -> Any:
    du = b.ReluGrad(dy, y)  # f32[B,H]
    return b.MatMul(du, w, tb=True), b.MatMul(x, du, ta=True), du


# From the gradient of the output dy, the output y and the inputs: a gradient for each input.
GRADIENTS: dict[str, Callable[..., Any]] = {
    "Add": lambda b, dy, y, x, z: (dy, dy),
    "Relu": lambda b, dy, y, x: (b.ReluGrad(dy, y),),
    "MatMul": lambda b, dy, y, x, w: (b.MatMul(dy, w, tb=True), b.MatMul(x, dy, ta=True)),
    "LinearRelu": linear_relu_grad,
    "CrossEntropy": lambda b, dy, y, z, t: (b.CrossEntropyGrad(dy, z, t), None),
}


def differentiate(graph: Graph, loss: Value) -> dict[Value, Any]:
    """Adds the nodes of backward; the gradient of each value that the loss depends on."""
    gradients: dict[Value, Any] = {loss: 1.0}
    for node in reversed(list(graph.nodes)):
        dxs = GRADIENTS[node.op](graph, gradients[node.output], node.output, *node.inputs)
        for x, dx in zip(node.inputs, dxs, strict=True):
            if dx is None:
                continue
            while len(dx.shape) > len(x.shape):  # x was broadcast: the sum over its copies,
                dx = graph.ReduceSum(dx)  # f32[B,H] -> f32[H]
            gradients[x] = graph.Add(gradients[x], dx) if x in gradients else dx
    return gradients


LR, BETA1, BETA2, EPS, DECAY = 1e-2, 0.9, 0.999, 1e-8, 0.01


def adamw(b: Graph, gradients: Mapping[Value, Value]) -> None:
    """Adds AdamW (arXiv 1711.05101). rate: lr / (1 - beta1^t); root: sqrt(1 - beta2^t)."""
    rate, root = b.input("rate", ()), b.input("root", ())  # f32[], f32[]
    for p, g in gradients.items():
        m, v = b.input(f"{p.name}.exp_avg", p.shape), b.input(f"{p.name}.exp_avg_sq", p.shape)
        b.updates[m] = b.Add(b.Mul(m, BETA1), b.Mul(g, 1 - BETA1))
        b.updates[v] = b.Add(b.Mul(v, BETA2), b.Mul(b.Mul(g, g), 1 - BETA2))
        change = b.Div(b.updates[m], b.Add(b.Div(b.Sqrt(b.updates[v]), root), EPS))
        b.updates[p] = b.Sub(b.Mul(p, 1 - LR * DECAY), b.Mul(change, rate))


# ---- plan: a place in memory for every value, before anything runs


@dataclass(frozen=True)
class Plan:
    """offsets: in an arena of nbytes; apart: bytes if each node wrote to a place of its own."""

    graph: Graph
    offsets: dict[Value, int]
    nbytes: int
    apart: int


def size(value: Value) -> int:
    """Bytes, rounded up to whole cache lines."""
    return math.ceil(4 * math.prod(value.shape) / 64) * 64


def make_plan(graph: Graph, loss: Value) -> Plan:
    """Updates lie in the tensors that they replace. All else lies in one arena, each value in the
    lowest gap that is free from the launch that writes it to the last one that reads it."""
    last = {x: i for i, node in enumerate(graph.nodes) for x in node.inputs} | {loss: math.inf}
    homes = {new: old for old, new in graph.updates.items()}
    offsets: dict[Value, int] = {}
    for i, node in enumerate(graph.nodes):
        y, offset = node.output, 0
        if y in homes:
            assert last[homes[y]] <= i, f"{homes[y]} is read after it is overwritten"
            continue
        alive = [x for x in offsets if last[x] >= i]
        for x in sorted(alive, key=offsets.__getitem__):
            if offset + size(y) <= offsets[x]:
                break  # y fits below x
            offset = offsets[x] + size(x)
        offsets[y] = offset
    nbytes = max(offset + size(y) for y, offset in offsets.items())
    return Plan(graph, offsets, nbytes, apart=sum(size(node.output) for node in graph.nodes))


# ---- kernels: code that writes into a given buffer; an op without a kernel runs as its body


def matmul(x: Any, w: Any, out: np.ndarray, ta: bool = False, tb: bool = False) -> None:
    np.matmul(x.T if ta else x, w.T if tb else w, out=out)


def linear_relu(x: np.ndarray, w: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    np.matmul(x, w, out=out)  # f32[B,H]
    np.add(out, b, out=out)
    np.maximum(out, 0, out=out)


def run_body(op: str, *inputs: Any, out: np.ndarray, **attrs: Any) -> None:
    out[...] = OPS[op].body(*inputs, **attrs)


KERNELS: dict[str, Callable[..., Any]] = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "Sqrt": np.sqrt,
    "MatMul": matmul, "LinearRelu": linear_relu,
}  # fmt: skip

# ---- execute: bind the plan to memory once, then call its launches in order


class Executable:
    """A plan bound to its arena and to the tensors that outlive a step. It decides nothing."""

    def __init__(self, plan: Plan, tensors: Arrays) -> None:
        arena = np.empty(plan.nbytes, np.uint8)
        self.place: dict[Any, Any] = {x: tensors[x.name] for x in plan.graph.inputs}
        self.place |= {new: self.place[old] for old, new in plan.graph.updates.items()}
        for y, offset in plan.offsets.items():
            self.place[y] = np.ndarray(y.shape, np.float32, arena, offset)
        self.launches = [self.bind(node) for node in plan.graph.nodes]

    def bind(self, node: Node) -> Callable[[], Any]:
        kernel = KERNELS.get(node.op) or partial(run_body, node.op)
        inputs = [self.place.get(x, x) for x in node.inputs]  # a number is its own place
        return partial(kernel, *inputs, out=self.place[node.output], **node.attrs)

    def run(self) -> None:
        for launch in self.launches:
            launch()


# ---- train: the flow on one page, and a step


class Trainer:
    """Trains `parameters` in place, by batches of the sizes of `batch`."""

    def __init__(self, forward: Callable[..., Any], parameters: Arrays, batch: Arrays) -> None:
        graph, self.loss = capture(forward, {**batch, **parameters})
        self.captured = [str(node) for node in graph.nodes]
        for each in FORWARD:
            each(graph, self.loss)
        self.rewritten = [str(node) for node in graph.nodes]
        gradients = differentiate(graph, self.loss)
        self.differentiated = [str(node) for node in graph.nodes[len(self.rewritten) :]]
        adamw(graph, {p: gradients[p] for p in graph.inputs if p.name in parameters})
        for each in STEP:
            each(graph, self.loss)
        self.plan = make_plan(graph, self.loss)
        zeros = {x.name: np.zeros(x.shape, np.float32) for x in graph.inputs}
        self.tensors = {**zeros, **parameters}
        self.executable, self.steps = Executable(self.plan, self.tensors), 0

    def train_step(self, **batch: np.ndarray) -> float:
        self.steps += 1
        rate, root = LR / (1 - BETA1**self.steps), (1 - BETA2**self.steps) ** 0.5
        for name, array in {**batch, "rate": rate, "root": root}.items():
            self.tensors[name][...] = array
        self.executable.run()
        return float(self.executable.place[self.loss])


# ---- beside PyTorch


def main(steps: int = 20) -> tuple[float, float]:
    """The largest differences to PyTorch: of a loss, and of a weight after the last step."""
    import torch  # to compare with; nothing above knows of it

    torch.manual_seed(0)
    B, D, H, C = 64, 16, 32, 4
    random = np.random.default_rng(0)
    x = random.standard_normal((steps, B, D), np.float32)
    classes = (x @ random.standard_normal((D, C), np.float32)).argmax(-1)  # i64[steps,B]
    target = np.eye(C, dtype=np.float32)[classes]  # f32[steps,B,C]
    model = torch.nn.Sequential(torch.nn.Linear(D, H), torch.nn.ReLU(), torch.nn.Linear(H, C))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)
    weights = [p.detach().numpy().T for p in model.parameters()]  # torch's are f32[out,in]
    parameters = {n: w.copy() for n, w in zip(("w1", "b1", "w2", "b2"), weights, strict=True)}

    trainer = Trainer(mlp, parameters, {"x": x[0], "target": target[0]})
    print("captured", *trainer.captured, sep="\n  ")
    print("rewritten", *trainer.rewritten, sep="\n  ")
    print("differentiated", *trainer.differentiated, sep="\n  ")
    plan, graph = trainer.plan, trainer.plan.graph
    print(f"planned\n  {len(graph.nodes)} launches, {len(graph.updates)} write updates in place")
    print(f"  {plan.nbytes} bytes of scratch in one arena; {plan.apart} with a place for each")
    print("trained\n  step    loss  PyTorch  difference")
    furthest = 0.0
    for i in range(steps):
        loss = trainer.train_step(x=x[i], target=target[i])
        logits = model(torch.from_numpy(x[i]))  # f32[B,C]
        eager = torch.nn.functional.cross_entropy(logits, torch.from_numpy(classes[i]))
        optimizer.zero_grad()
        eager.backward()
        optimizer.step()
        furthest = max(furthest, abs(loss - eager.item()))
        if i == 0 or i % 5 == 4:
            print(f"{i + 1:6}{loss:8.4f}{eager.item():9.4f}{abs(loss - eager.item()):12.6f}")
    apart = max(
        float(abs(parameters[n] - w).max()) for n, w in zip(parameters, weights, strict=True)
    )
    print(f"  the weights of both differ by {apart:.6f} at most")
    return furthest, apart


if __name__ == "__main__":
    main()
