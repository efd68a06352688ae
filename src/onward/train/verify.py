"""Three engines on one batch: Onward, eager PyTorch, and stock onnxruntime where installed.

With dropout off, each tensor's distance to an fp64 eager run may be at most twice eager's own
(the project's law of same numbers). With dropout on, Onward's executor and onnxruntime run the
same graph, masks and all. `bisect` names the first stage, and in it the first node, that departs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from onward.compile import Compiled
from onward.config import MissingExtraError
from onward.differentiate import gradient_name
from onward.execute import Memory
from onward.graph.file import to_proto
from onward.graph.graph import Graph, make_attributes, type_of
from onward.graph.names import user_name
from onward.graph.text import node_text
from onward.rewrite import cut, rows_name
from onward.train.call import Call

LossFunction = Callable[..., torch.Tensor]
FLOOR = 1e-7  # of the tensor's own norm: what fp32 cannot hold anyway
SCALAR = 2.4e-7  # two units in the last place: on one number eager may be exact by luck
ORACLE = 1e-5  # of the tensor's own norm: two engines on one graph, sums in other orders


@dataclass(frozen=True)
class Row:
    """One tensor compared: norm of the difference and what is allowed."""

    engine: str
    name: str
    difference: float
    allowed: float

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
                lines.append(
                    f"    {'' if row.ok else 'DIFFERS '}{row.name}: {row.difference:.3e} "
                    f"(allowed {row.allowed:.3e})"
                )
        return "\n".join(lines + [f"  {note}" for note in self.notes])


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
        if func in (F.dropout, torch.dropout):
            return args[0]
        if func is F.scaled_dot_product_attention:
            kwargs["dropout_p"] = 0.0
            args = args[:4] + args[5:] if len(args) > 4 else args
        return func(*args, **kwargs)


def verify_step(
    model: torch.nn.Module,
    call: Call,
    loss_fn: LossFunction | None,
    trained: set[int],
    bisect: bool,
    disable: tuple[str, ...] = (),
) -> Verification:
    """Compares the call's loss and every gradient; the model stays as it is."""
    state = torch.get_rng_state()
    try:
        compiled = Compiled(
            model, call.args, call.kwargs, call.target, loss_fn, disable, keep_stages=bisect
        )
        names = [n for n, p in compiled.captured.parameters.items() if id(p) in trained]
        graph = compiled.differentiated(names)
        check = _Check(compiled, call, model, loss_fn, names)
        result = Verification()
        quiet = without_dropout(graph)
        ours = check.run(quiet)
        result.rows += check.against_eager(ours)
        forward = compiled.narrow(["loss"])
        if forward is not None:
            narrow = compiled.differentiated(names, forward)
            ours = check.run(without_dropout(narrow))
            result.rows += check.against_eager(ours, "eager PyTorch (rows that are read)")
        if _has_onnxruntime():
            result.rows += check.against_onnxruntime(graph)
        else:
            result.notes.append(str(MissingExtraError("onnxruntime", "ort")))
        if bisect:
            result.notes.append(check.first_departure(graph))
        return result
    finally:
        torch.set_rng_state(state)


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
    floor = SCALAR if exact.dim() == 0 else FLOOR
    return 2.0 * float((eager.double() - exact).norm()) + floor * float(exact.norm())


def _has_onnxruntime() -> bool:
    try:
        import onnxruntime  # noqa: F401
    except ImportError:
        return False
    return True


class _Check:
    def __init__(
        self,
        compiled: Compiled,
        call: Call,
        model: torch.nn.Module,
        loss_fn: LossFunction | None,
        names: list[str],
    ) -> None:
        self.compiled, self.call, self.model, self.loss_fn = compiled, call, model, loss_fn
        self.names = names
        dims = compiled.captured.dims(call.tensors)
        assert dims is not None
        self.dims = dims
        self.inputs: dict[str, Any] = {
            compiled.captured.leaves[i]: t.detach() for i, t in enumerate(call.tensors)
        }
        self.inputs |= {
            "seed": torch.tensor([12345, 67890]),
            "sample_offset": 0,
            "loss_weight": 1.0,
        }

    # ---- the engines

    def run(self, graph: Graph, outputs: list[str] | None = None) -> dict[str, torch.Tensor]:
        """Onward's own executor; a graph that counts rows is given this batch's."""
        captured = self.compiled.captured
        wanted = outputs or [n for n in graph.outputs if n == "loss" or n.startswith("grad.")]
        dims, inputs = dict(self.dims), dict(self.inputs)
        if graph.counts:
            conditions, graph = cut(graph)
            for size, rows in self.run(conditions, list(conditions.outputs)).items():
                numbers = rows.nonzero().view(-1)
                dims[size], inputs[rows_name(size)] = len(numbers), numbers
        plan = self.compiled.plan(graph, wanted, dims)
        owned = captured.tensors
        device = next(iter(owned.values())).device
        executable = self.compiled.executable(plan, Memory(device), owned)
        executable.run(inputs)
        return {name: executable.output(name).cpu() for name in wanted}

    def onnxruntime(self, graph: Graph) -> dict[str, torch.Tensor]:
        """The stock engine, its own optimiser off."""
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 3
        session = ort.InferenceSession(
            to_proto(graph, self.compiled.captured.arrays()).SerializeToString(),
            options,
            providers=["CPUExecutionProvider"],
        )
        feeds: dict[str, np.ndarray] = {}
        for item in session.get_inputs():
            value = self.inputs[item.name]
            dtype = type_of(graph.find_input(item.name)).dtype.numpy()
            feeds[item.name] = (
                value.cpu().numpy()
                if isinstance(value, torch.Tensor)
                else np.array(value, dtype=dtype)
            )
        results = session.run(None, feeds)
        return {
            n: torch.from_numpy(np.array(r)) for n, r in zip(graph.outputs, results, strict=True)
        }

    @cached_property
    def exact(self) -> dict[str, torch.Tensor]:
        """Eager PyTorch in fp64."""
        return self.eager(torch.float64)

    @cached_property
    def fp32(self) -> dict[str, torch.Tensor]:
        """Eager PyTorch in fp32, the results widened to fp64."""
        return self.eager(torch.float32)

    def eager(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Eager PyTorch on a copy of the model, dropout off."""
        model = copy.deepcopy(self.model).to(dtype)
        model.train(self.model.training)
        copies = dict(model.named_parameters(remove_duplicate=False))

        def cast(x: Any) -> Any:
            return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

        with NoDropout():
            args, kwargs, target = pytree.tree_map(
                cast, (self.call.args, self.call.kwargs, self.call.target)
            )
            outputs = model(*args, **kwargs)
            if self.loss_fn is not None:
                loss = self.loss_fn(outputs, *target)
            else:
                from onward.capture.export import name_outputs

                named = name_outputs(outputs)
                loss = named.get("loss", next(iter(named.values())))
        wanted = [n for n in self.names if copies[user_name(n)].requires_grad]
        grads = torch.autograd.grad(loss, [copies[user_name(n)] for n in wanted], allow_unused=True)
        found = {"loss": loss.detach()}
        found |= {
            gradient_name(n): g.detach()
            for n, g in zip(wanted, grads, strict=True)
            if g is not None
        }
        return {n: t.double().cpu() for n, t in found.items()}

    # ---- comparisons

    def against_eager(
        self, ours: dict[str, torch.Tensor], engine: str = "eager PyTorch (dropout off)"
    ) -> list[Row]:
        exact, eager = self.exact, self.fp32
        rows = [
            Row(
                engine, name, float((ours[name].double() - g).norm()),
                allowed_difference(eager[name], g),
            )
            for name, g in exact.items()
            if name in ours
        ]  # fmt: skip
        missing = sorted(set(exact) - set(ours))
        rows += [Row(engine, name, float("nan"), 0.0) for name in missing]
        return rows

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

    def first_departure(self, last: Graph) -> str:
        """The first stage whose loss or gradients depart from eager, and the first such node."""
        exact, eager = self.exact, self.fp32
        before: Graph | None = None
        for stage, graph in self.compiled.stages or []:
            if stage in ("bind", "plan"):
                continue
            ours = self.run(without_dropout(graph))
            for name, value in ours.items():
                if name not in exact:
                    continue
                allowed = allowed_difference(eager[name], exact[name])
                if not float((value.double() - exact[name]).norm()) <= allowed:
                    kind = "first stage" if before is None else "pass"
                    return (
                        f"bisect: {name} departs after {kind} '{stage}'; {self._first_node(graph)}"
                    )
            before = graph
        return "bisect: no stage departs from eager"

    def _first_node(self, graph: Graph) -> str:
        """The first node on which Onward's executor and onnxruntime differ."""
        if not _has_onnxruntime():
            return "install onnxruntime to find the node"
        graph = graph.clone()
        graph.outputs = {}
        nodes = {}
        for node in graph:
            for value in node.outputs:
                if type_of(value).is_floating and value.uses():
                    graph.outputs[value.name or ""] = value
                    nodes[value.name] = node
        ours, theirs = self.run(graph, list(graph.outputs)), self.onnxruntime(graph)
        for name, value in ours.items():
            gap = float((value - theirs[name]).norm())
            if not gap <= 1e-4 * float(theirs[name].norm()) + 1e-6:
                return f"first node: {node_text(nodes[name])} (difference {gap:.3e})"
        return "every node agrees with onnxruntime: the graph itself says something else"


__all__ = ["NoDropout", "Verification", "verify_step", "without_dropout"]
