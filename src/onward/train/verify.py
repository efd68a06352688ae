"""Three engines on one batch: Onward, eager PyTorch, and stock onnxruntime where installed.

With dropout off, each tensor's distance to an fp64 eager run may be at most twice eager's own
(the project's law of same numbers). One distance is one draw of rounding noise, and eager's is
now and then small by luck. So a tensor that departs on the batch is looked at again with weights
that differ by a thousandth, `REPLICAS` times, on all engines: what counts is the root mean square
of its distances, and eager's is taken to be at least the model's typical one. A wrong graph is
wrong on every such draw, far above rounding.

With dropout on, Onward's executor and onnxruntime run the same graph, masks and all. `bisect`
names the first stage, and in it the first node, that departs.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from onward.capture import CapturedModule
from onward.compile import Compiler
from onward.config import MissingExtraError
from onward.execute import Memory
from onward.graph.file import to_proto
from onward.graph.graph import Graph, Node, make_attributes, type_of
from onward.graph.names import user_name
from onward.graph.printer import node_text
from onward.journal import Journal
from onward.kernels import host
from onward.rewrite import split_counting
from onward.train.batch import Batch
from onward.train.graphs import Graphs
from onward.train.prepared_batch import scalars

LossFunction = Callable[..., torch.Tensor]
Tensors = dict[str, torch.Tensor]

FLOOR = 1e-7  # of the tensor's own norm: what fp32 cannot hold anyway
SCALAR = 2.4e-7  # two units in the last place: on one number eager may be exact by luck
ORACLE = 1e-5  # of the tensor's own norm: two engines on one graph, sums in other orders
ROUNDOFF = 2.0**-24  # of fp32: what is zero is noise of this size on the terms that cancel
REPLICAS = 8  # further draws of rounding noise, where one draw says too little
GROSS = 30.0  # times what is allowed: no chance of rounding
CLOSE = 1e-3  # how far their weights are from the model's, relatively
NODE = (1e-4, 1e-5)  # of a value's norm: what is looked for first, and then, on single nodes


@dataclass(frozen=True)
class Row:
    """One tensor compared: norm of the difference and what is allowed; root mean squares where
    there were several runs."""

    engine: str
    name: str
    difference: float
    allowed: float
    runs: int = 1

    @property
    def ok(self) -> bool:
        return bool(self.difference <= self.allowed)  # NaN is not ok


@dataclass
class Verification:
    """The comparison; prints as a table of the worst rows."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return bool(self.rows) and all(row.ok for row in self.rows)

    def __str__(self) -> str:
        lines = [f"{'ok' if self.ok else 'FAILED'}: {len(self.rows)} tensors compared"]
        for engine in dict.fromkeys(row.engine for row in self.rows):
            rows = [r for r in self.rows if r.engine == engine]
            bad = [r for r in rows if not r.ok]
            lines.append(f"  against {engine}: {len(rows) - len(bad)} of {len(rows)} agree")
            shown = bad or sorted(rows, key=lambda r: -r.difference / (r.allowed or 1.0))[:1]
            for row in shown[:12]:
                runs = f", over {row.runs} runs" if row.runs > 1 else ""
                lines.append(
                    f"    {'' if row.ok else 'DIFFERS '}{row.name}: {row.difference:.3e} "
                    f"(allowed {row.allowed:.3e}{runs})"
                )
        return "\n".join(lines + [f"  {note}" for note in self.notes])


_DROPOUTS = (
    F.dropout, torch.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout,
    F.feature_alpha_dropout,
)  # fmt: skip
_PLACES = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}  # of dropout_p


class NoDropout(TorchFunctionMode):
    """Within it, eager PyTorch's dropout passes its input on, in training mode too."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        place = _PLACES.get(func)
        if place is not None and len(args) > place:
            args = (*args[:place], 0.0, *args[place + 1 :])
        elif place is not None:
            kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


class InDouble(TorchFunctionMode):
    """Within it, what asks for fp32 gets fp64: models that compute a norm "in fp32, whatever the
    precision", constants that no buffer holds."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        if func is torch.Tensor.float:
            return args[0].double()
        if name == "__get__" or (name.endswith("_") and not name.endswith("__")):
            return func(*args, **kwargs)  # what is written in place stays what it is
        args = pytree.tree_map(_doubled, args)
        kwargs = {name: pytree.tree_map(_doubled, x) for name, x in kwargs.items()}
        return pytree.tree_map_only(torch.Tensor, _doubled, func(*args, **kwargs))


def _doubled(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.double() if x.dtype == torch.float32 else x
    return torch.float64 if x is torch.float32 else x


def verify_step(
    model: torch.nn.Module,
    call: Batch,
    loss_fn: LossFunction | None,
    trained: set[int],
    bisect: bool,
    disable: tuple[str, ...] = (),
) -> Verification:
    """Compares the call's loss and every gradient; model, batch and generators stay as they are."""
    with _undisturbed():
        call = _owned(call)
        device = next((p.device.type for p in model.parameters()), "cpu")
        compiler = Compiler(host(device), disable, Journal(keep_stages=bisect))
        captured = compiler.capture(model, *call.given, loss_fn)
        graphs = Graphs(compiler, captured)
        names = [n for n, p in captured.parameters.items() if id(p) in trained]
        check = _Check(compiler, captured, call, model, loss_fn, names)
        result = Verification()
        graph = check.differentiated(graphs.forward)
        result.rows += check.against_eager(graph)
        packed = graphs.packed(graphs.forward.signature.requested((), None))
        if packed is not None:
            packed = check.differentiated(packed)
            result.rows += check.against_eager(packed, "eager PyTorch (rows that are read)")
        if _has_onnxruntime():
            result.rows += check.against_onnxruntime(graph)
        else:
            result.notes.append(str(MissingExtraError("onnxruntime", "ort")))
        result.rows = [replace(row, name=_shown(row.name)) for row in result.rows]
        if bisect:
            result.notes.append(check.first_departure())
        return result


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Gradients are on, whatever surrounds the call; every generator is put back."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _owned(call: Batch) -> Batch:
    """The call on copies: what was made in inference mode cannot be differentiated, and a model
    may write into its batch."""
    copies = {id(t): t.detach().clone() for t in call.tensors}

    def own(x: Any) -> Any:
        return copies[id(x)] if isinstance(x, torch.Tensor) else x

    args, kwargs, target = pytree.tree_map(own, (call.args, call.kwargs, call.target))
    tensors = [copies[id(t)] for t in call.tensors]
    return replace(call, args=args, kwargs=kwargs, target=target, tensors=tensors)


def _gradient(name: str) -> str:
    """What the gradient by a graph input is called here."""
    return f"grad.{name}"


def _shown(name: str) -> str:
    """`grad.param.w` as the user knows it: `grad.w`."""
    kind, _, rest = name.partition(".")
    return f"{kind}.{user_name(rest)}" if kind == "grad" else name


def _gradients(graph: Graph) -> dict[str, str]:
    """Outputs of the graph that are gradients, by what they are called here."""
    return {_gradient(name): made for name, made in graph.signature.gradients.items()}


def without_dropout(graph: Graph) -> Graph:
    """A copy in which every dropout passes its input on."""
    graph = graph.clone()
    for node in list(graph):
        if node.op_type == "Dropout":
            assert node.inputs[0] is not None
            graph.replace(node.outputs[0], node.inputs[0])
            graph.remove([node])
        elif "ratio" in node.attributes:  # a dropout inside the op
            node.attributes["ratio"] = make_attributes({"ratio": 0.0})[0]
    return graph


def allowed_difference(eager: torch.Tensor, exact: torch.Tensor) -> float:
    """`2 |eager - exact| + floor |exact|`, both in fp64."""
    return 2.0 * distance(eager, exact) + floor(exact) * float(exact.norm())


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    """`|found - exact|`; NaN where shapes differ."""
    if found.shape != exact.shape:
        return math.nan
    return float((found.double() - exact).norm())


def floor(exact: torch.Tensor) -> float:
    """What is allowed of a tensor's own norm beside eager's distance."""
    return SCALAR if exact.dim() == 0 else FLOOR


def _has_onnxruntime() -> bool:
    try:
        import onnxruntime  # noqa: F401
    except ImportError:
        return False
    return True


class _Draws:
    """Runs of the same tensors: root mean squares of norms, of eager's distances, of Onward's."""

    def __init__(self) -> None:
        self.runs = 0
        self.zero: dict[str, float] = {}  # what is noise in the first run, and how large it may be
        self._squares: dict[str, np.ndarray] = {}  # of norm, eager's distance, Onward's distance
        self._floors: dict[str, float] = {}

    def add(self, ours: Tensors, eager: Tensors, exact: Tensors) -> None:
        """One run more. A gradient that is zero by construction, such as a key bias's, which
        softmax does not see, is noise in every engine, and one's noise bounds no other's."""
        norms = {n: float(t.norm()) for n, t in exact.items()}
        if not self.runs:
            noise = ROUNDOFF * math.hypot(*norms.values())
            self.zero = {n: noise for n, norm in norms.items() if norm <= FLOOR * noise}
        self.runs += 1
        for name in exact.keys() & ours.keys() & eager.keys():
            truth = exact[name]
            found = norms[name], distance(eager[name], truth), distance(ours[name], truth)
            self._floors[name] = floor(truth)
            self._squares[name] = self._squares.get(name, 0.0) + np.square(found)

    @property
    def typical(self) -> float:
        """The median over the tensors of eager's distance as a share of the tensor's norm."""
        shares = [math.sqrt(e / n) for n, e, _ in self._squares.values() if n > 0.0]
        return float(np.median(shares)) if shares else 0.0

    def row(self, engine: str, name: str) -> Row:
        """The law, eager's distance taken to be at least typical: who rounds in another order is
        not held to where eager happens to be exact."""
        norm, eager, ours = np.sqrt(self._squares[name] / self.runs)
        allowed = 2.0 * max(eager, self.typical * norm) + self._floors[name] * norm
        allowed = max(allowed, self.zero.get(name, 0.0))
        return Row(engine, name, float(ours), float(allowed), self.runs)

    def is_doubtful(self, name: str) -> bool:
        """Whether more runs could find that a tensor over its bound is right."""
        row = self.row("", name)
        return row.difference <= GROSS * row.allowed  # never where it is NaN


class _Check:
    def __init__(
        self,
        compiler: Compiler,
        captured: CapturedModule,
        call: Batch,
        model: torch.nn.Module,
        loss_fn: LossFunction | None,
        names: list[str],
    ) -> None:
        self.compiler, self.captured, self.call = compiler, captured, call
        self.model, self.loss_fn = model, loss_fn
        paths = {id(p): path for path, p in model.named_parameters(remove_duplicate=False)}
        parameters = captured.parameters.items()
        self.paths = {n: paths[id(p)] for n, p in parameters if id(p) in paths}
        self.names = names
        dims = captured.dims(call.tensors)
        assert dims is not None
        self.dims = dims
        self.batch = {captured.leaves[i]: t for i, t in enumerate(call.tensors)}

    def differentiated(self, forward: Graph) -> Graph:
        return self.compiler.gradients(forward, self.names, self.captured.reached)

    def given(self, graph: Graph) -> dict[str, Any]:
        """The inputs of a run that is no one's but this comparison's."""
        seed = torch.tensor([12345, 67890])
        return {**self.batch, **scalars(graph.signature, seed, offset=0, weight=1.0)}

    # ---- the engines

    def run(
        self,
        graph: Graph,
        outputs: list[str] | None = None,
        weights: Mapping[str, torch.Tensor] | None = None,
    ) -> Tensors:
        """Onward's own executor, on other weights where they are given; a graph that counts rows
        is given this batch's."""
        signature = graph.signature
        compared = {"loss": signature.loss, **_gradients(graph)}
        found = dict(zip(outputs, outputs, strict=True)) if outputs else compared
        wanted = {n: made for n, made in found.items() if made is not None}
        dims, inputs = dict(self.dims), self.given(graph)
        if graph.counts:
            conditions, graph = split_counting(graph)
            counted = self.run(conditions, list(conditions.outputs), weights)
            for size, rows in counted.items():
                numbers = rows.nonzero().view(-1)
                dims[size], inputs[graph.signature.rows[size]] = len(numbers), numbers
        plan = self.compiler.plan(graph, list(wanted.values()), dims)
        owned = {**self.captured.owned, **(weights or {})}
        device = next(iter(owned.values())).device
        executable = self.compiler.bind(plan, Memory(device), owned)
        executable.run(inputs)
        return {name: executable.output(made).cpu() for name, made in wanted.items()}

    def onnxruntime(self, graph: Graph) -> Tensors:
        """The stock engine, its own optimiser off; on one thread: on several, those that add to
        one row of a table overwrite each other's sums."""
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.enable_mem_reuse = False  # its planning is quadratic: 2.5 s for 2,500 nodes
        options.log_severity_level = 3
        session = ort.InferenceSession(
            to_proto(graph).SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        given = {**self.given(graph), **self.captured.owned}
        feeds: dict[str, np.ndarray] = {}
        for item in session.get_inputs():
            value = given[item.name]
            dtype = type_of(graph.find_input(item.name)).dtype.numpy()
            feeds[item.name] = (
                value.detach().cpu().numpy()
                if isinstance(value, torch.Tensor)
                else np.array(value, dtype=dtype)
            )
        results = session.run(None, feeds)
        called = {made: name for name, made in _gradients(graph).items()}
        return {
            called.get(n, n): torch.from_numpy(np.array(r))
            for n, r in zip(graph.outputs, results, strict=True)
        }

    @cached_property
    def exact(self) -> Tensors:
        """Eager PyTorch in fp64."""
        return self.eager(exact=True)

    @cached_property
    def own(self) -> Tensors:
        """Eager PyTorch in the model's precision, the results widened to fp64."""
        return self.eager(exact=False)

    def eager(self, exact: bool, weights: Mapping[str, torch.Tensor] | None = None) -> Tensors:
        """Eager PyTorch on a copy of the model, dropout off; `exact`: in fp64."""

        def cast(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            return x.double() if exact and x.is_floating_point() else x.clone()

        model, loss_fn = copy.deepcopy((self.model, self.loss_fn))
        if exact:
            for module in (model, loss_fn):
                if isinstance(module, torch.nn.Module):
                    module.double()
        copies = dict(model.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, value in (weights or {}).items():
                copies[self.paths[name]].copy_(value)
        with NoDropout(), InDouble() if exact else nullcontext():
            args, kwargs, target = pytree.tree_map(
                cast, (self.call.args, self.call.kwargs, self.call.target)
            )
            outputs = model(*args, **kwargs)
            if loss_fn is not None:
                loss = loss_fn(outputs, *target)
            else:
                from onward.capture.flat_call import name_outputs

                named = name_outputs(outputs)
                loss = named.get("loss", next(iter(named.values())))
        wanted = {n: copies[self.paths[n]] for n in self.names}
        wanted = {n: p for n, p in wanted.items() if p.requires_grad}
        grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        found = {"loss": loss.detach()}
        found |= {
            _gradient(n): g.detach() for n, g in zip(wanted, grads, strict=True) if g is not None
        }
        return {n: t.double().cpu() for n, t in found.items()}

    # ---- comparisons

    def against_eager(self, graph: Graph, engine: str = "eager PyTorch (dropout off)") -> list[Row]:
        """The law for each tensor: on the batch, and where that says no, over several runs."""
        quiet = without_dropout(graph)
        ours, exact, own = self.run(quiet), self.exact, self.own
        common = [n for n in exact if n in ours]
        once = _Draws()
        once.add(ours, own, exact)
        rows = {
            name: Row(
                engine, name, distance(ours[name], exact[name]),
                max(allowed_difference(own[name], exact[name]), once.zero.get(name, 0.0)),
            )
            for name in common
        }  # fmt: skip
        doubtful = [n for n in common if not rows[n].ok and once.is_doubtful(n)]
        if doubtful:
            draws = self._several(quiet, once)
            rows |= {n: draws.row(engine, n) for n in doubtful}
        missing = sorted(set(exact) - set(ours))
        return [*rows.values(), *(Row(engine, name, math.nan, 0.0) for name in missing)]

    def _several(self, graph: Graph, draws: _Draws) -> _Draws:
        """The same with `REPLICAS` more runs, of weights close to the model's."""
        for seed in range(REPLICAS):
            weights = self._close(seed)
            draws.add(
                self.run(graph, None, weights),
                self.eager(False, weights),
                self.eager(True, weights),
            )
        return draws

    def _close(self, seed: int) -> Tensors:
        """Weights a little beside the model's; what is zero stays zero."""
        made: Tensors = {}
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.captured.parameters.items():
            if p.is_floating_point():
                step = max(CLOSE, 2.0 * torch.finfo(p.dtype).eps)
                noise = torch.randn(p.shape, generator=generator).to(p.device, torch.float64)
                made[name] = (p.detach() * (1.0 + step * noise)).to(p.dtype)
        return made

    def against_onnxruntime(self, graph: Graph) -> list[Row]:
        ours, theirs = self.run(graph), self.onnxruntime(graph)
        scale = max(float(t.norm()) for t in theirs.values())
        return [
            Row(
                "stock onnxruntime (dropout on)", name, float((ours[name] - theirs[name]).norm()),
                ORACLE * float(theirs[name].norm()) + FLOOR * scale,
            )
            for name in ours
        ]  # fmt: skip

    # ---- bisection

    def first_departure(self) -> str:
        """The first stage whose loss or gradients depart from eager, and the first such node."""
        first = True
        for stage, graph in self.compiler.journal.stages or []:
            if stage in ("bind", "plan"):
                continue
            expected = {"loss", *_gradients(graph)}
            rows = [r for r in self.against_eager(graph) if r.name in expected]
            missing = set(self.exact) - expected if stage == "differentiate" else set()
            bad = [*(r.name for r in rows if not r.ok), *sorted(missing)]
            if bad:
                kind = "first stage" if first else "pass"
                node = self._first_node(graph)
                return f"bisect: {_shown(bad[0])} departs after {kind} '{stage}'; {node}"
            first = False
        return "bisect: no stage departs from eager"

    def _first_node(self, graph: Graph) -> str:
        """The first node on which Onward's executor and onnxruntime differ."""
        if not _has_onnxruntime():
            return "install onnxruntime to find the node"
        kept = graph.clone()
        results = kept.output_values()
        kept.outputs = {}
        nodes: dict[str, Node] = {}
        for node in kept:
            for value in node.outputs:
                if type_of(value).is_floating and (value.uses() or value in results):
                    kept.outputs[value.name or ""] = value
                    nodes[value.name or ""] = node
        ours, theirs = self.run(kept, list(kept.outputs)), self.onnxruntime(kept)
        for share in NODE:
            for name, value in ours.items():
                gap, size = _gap(value, theirs[name])
                if not gap <= share * size + 1e-2 * share:
                    return f"first node: {node_text(nodes[name])} (difference {gap:.3e})"
        if all(row.ok for row in self.against_onnxruntime(graph)):
            return "every node agrees with onnxruntime: the graph itself says something else"
        return (
            "every node agrees with onnxruntime where each value is kept: the plan writes over one"
        )


def _gap(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[float, float]:
    """Norms of the difference and of `theirs`; what is infinite or no number in both agrees."""
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    difference = torch.where(same, torch.zeros_like(ours), ours - theirs)
    finite = torch.where(theirs.isfinite(), theirs, torch.zeros_like(theirs))
    return float(difference.double().norm()), float(finite.double().norm())


__all__ = ["NoDropout", "Verification", "verify_step", "without_dropout"]
