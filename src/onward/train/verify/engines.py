"""The engines that are compared: Onward's executor, stock onnxruntime, eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from onward.capture import CapturedModule, LossFunction
from onward.capture.trace.flat_call import name_outputs
from onward.compile import Compiler
from onward.environment import switch_off_telemetry
from onward.errors import OnwardError
from onward.execute import Memory
from onward.graph.file import to_proto
from onward.graph.graph import Graph, type_of
from onward.kernels import EagerPart
from onward.model_state.device import device_of
from onward.model_state.effects import keeping_buffers
from onward.prepare.batch import Batch
from onward.prepare.prepared_batch import scalars
from onward.rewrite import split_counting
from onward.train.verify.eager_modes import InDouble, NoDropout
from onward.train.verify.graphs import LOSS, compared_outputs, gradient, next_value
from onward.train.verify.law import FP32, Law, mixed

Tensors = dict[str, torch.Tensor]
_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class _Weighed:
    """An EagerPart with other tensors in place of its parameters."""

    part: EagerPart
    others: Mapping[int, torch.Tensor]

    @property
    def path(self) -> str:
        return self.part.path

    def parameters(self) -> Sequence[torch.Tensor]:
        return [self.others.get(id(p), p) for p in self.part.parameters()]

    def buffers(self) -> Sequence[torch.Tensor]:
        return self.part.buffers()

    def way_back(self) -> Callable[[], None]:
        return self.part.way_back()

    def run(
        self, xs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        return self.part.run(xs, parameters)


class Engines:
    """Onward's executor, onnxruntime and eager PyTorch on one batch of one model. names: the graph
    inputs to differentiate with respect to.

    low: the dtype of eager PyTorch's products under autocast; None: no autocast.
    """

    def __init__(
        self,
        compiler: Compiler,
        captured: CapturedModule,
        batch: Batch,
        model: torch.nn.Module,
        loss_fn: LossFunction | None,
        names: list[str],
    ) -> None:
        self.compiler, self.captured, self.names = compiler, captured, names
        self._batch, self._model, self._loss_fn = batch, model, loss_fn
        paths = {id(p): path for path, p in model.named_parameters(remove_duplicate=False)}
        parameters = captured.parameters.items()
        self._paths = {n: paths[id(p)] for n, p in parameters if id(p) in paths}
        dims = captured.dims(batch.tensors)
        assert dims is not None
        self._dims = dims
        self._device = device_of(model).type
        self.low: torch.dtype | None = None
        self._staged = {captured.leaves[i]: t for i, t in enumerate(batch.tensors)}

    def under_autocast(self, compiler: Compiler, low: torch.dtype) -> Engines:
        """A copy of these engines for mixed precision, which shares the fp64 run."""
        twin = copy.copy(self)
        vars(twin).pop("own", None)
        twin.compiler, twin.low = compiler, low
        return twin

    @property
    def law(self) -> Law:
        """The law that comparisons with eager PyTorch apply."""
        return FP32 if self.low is None else mixed(self.low)

    @property
    def eager_name(self) -> str:
        """The name of eager PyTorch in rows."""
        return "eager PyTorch" + ("" if self.low is None else f" under autocast {_SHORT[self.low]}")

    def _inputs(self, graph: Graph) -> dict[str, Any]:
        """The inputs of a run, with a fixed seed."""
        seed = torch.tensor([12345, 67890])
        return {**self._staged, **scalars(graph.signature, seed, offset=0, weight=1.0)}

    # ---- Onward

    def onward(self, graph: Graph, weights: Mapping[str, torch.Tensor] | None = None) -> Tensors:
        """Computes loss, gradients and written buffers with Onward's executor. weights: replace the
        model's."""
        return self.values(graph, compared_outputs(graph), weights)

    def values(
        self,
        graph: Graph,
        outputs: Mapping[str, str],
        weights: Mapping[str, torch.Tensor] | None = None,
    ) -> Tensors:
        """Runs a graph with Onward's executor and returns these outputs. A packed graph is given
        the row indices of the batch."""
        dims, inputs = dict(self._dims), self._inputs(graph)
        if graph.counts:
            conditions, graph = split_counting(graph)
            counted = self.values(conditions, {size: size for size in conditions.outputs}, weights)
            for size, rows in counted.items():
                numbers = rows.nonzero().view(-1)
                dims[size], inputs[graph.signature.rows[size]] = len(numbers), numbers
        plan = self.compiler.plan(graph, list(outputs.values()), dims)
        owned = {**self.captured.owned, **(weights or {})}
        owned |= {name: owned[name].clone() for name in graph.signature.written}
        device = next(iter(owned.values())).device
        parts = [_Weighed(part, self._others(weights)) for part in self.captured.regions]
        executable = self.compiler.bind(plan, Memory(device), owned, parts)
        backs = [part.way_back() for part in parts]
        with keeping_buffers(self._model, self._loss_fn):
            executable.run(inputs)
        for back in backs:
            back()
        stored = {made: owned[name] for name, made in graph.signature.written.items()}
        return {
            name: (stored[made] if made in stored else executable.output(made)).cpu()
            for name, made in outputs.items()
        }

    def _others(self, weights: Mapping[str, torch.Tensor] | None) -> dict[int, torch.Tensor]:
        """The tensors that replace the model's parameters, by id of the parameter."""
        held = self.captured.parameters
        return {
            id(held[n]): w.detach().requires_grad_(held[n].requires_grad)
            for n, w in (weights or {}).items()
        }

    # ---- onnxruntime

    @staticmethod
    def has_onnxruntime() -> bool:
        """Whether onnxruntime is installed."""
        switch_off_telemetry()
        try:
            import onnxruntime  # noqa: F401  # pyright: ignore[reportUnusedImport]
        except ImportError:
            return False
        return True

    def onnxruntime(
        self, graph: Graph, weights: Sequence[Mapping[str, torch.Tensor]] = ({},)
    ) -> Iterator[Tensors]:
        """Runs a graph with stock onnxruntime, unoptimized; yields all outputs by their names in
        the graph, for each set of weights, which replace the model's. It runs on one thread, since
        several overwrite each other's sums where they add to one row of a table."""
        switch_off_telemetry()
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        # onnxruntime's memory planning takes quadratic time: 2.5 s for 2,500 nodes
        options.enable_mem_reuse = False
        options.log_severity_level = 3
        session = ort.InferenceSession(
            to_proto(graph).SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        for replaced in weights:
            given = {**self._inputs(graph), **self.captured.owned, **replaced}
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
            yield {
                name: torch.from_numpy(np.array(result))
                for name, result in zip(graph.outputs, results, strict=True)
            }

    # ---- eager PyTorch

    @cached_property
    def exact(self) -> Tensors:
        """The results of eager PyTorch in fp64."""
        return self.eager(exact=True)

    @cached_property
    def own(self) -> Tensors:
        """The results of eager PyTorch in the precision of the step, converted to fp64."""
        return self.eager(exact=False)

    def eager(self, exact: bool, weights: Mapping[str, torch.Tensor] | None = None) -> Tensors:
        """Runs eager PyTorch on a copy of the model with dropout off; `exact`: in fp64. Returns
        loss, gradients and written buffers."""

        def cast(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            return x.double() if exact and x.is_floating_point() else x.clone()

        model, loss_fn = copy.deepcopy((self._model, self._loss_fn))
        if exact:
            for module in (model, loss_fn):
                if isinstance(module, torch.nn.Module):
                    module.double()
        copies = dict(model.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, value in (weights or {}).items():
                copies[self._paths[name]].copy_(value)
        with NoDropout(), self._precision(exact):
            args, kwargs, target = pytree.tree_map(cast, self._batch.given)
            outputs = model(*args, **kwargs)
            if loss_fn is not None:
                loss = loss_fn(outputs, *target)
            else:
                named = name_outputs(outputs)
                loss = named.get("loss", next(iter(named.values())))
        wanted = {n: copies[self._paths[n]] for n in self.names}
        wanted = {n: p for n, p in wanted.items() if p.requires_grad}
        grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        found = {LOSS: loss.detach(), **self._written(model)}
        found |= {
            gradient(n): g.detach()
            for n, g in zip(wanted, grads, strict=True)
            if isinstance(g, torch.Tensor)  # None where the loss does not depend on the parameter
        }
        return {n: t.double().cpu() for n, t in found.items()}

    @contextmanager
    def _precision(self, exact: bool) -> Generator[None]:
        """A context in which eager PyTorch runs in fp64, or in the precision of the step. Raises
        OnwardError where autocast cannot run the model."""
        if exact:
            with InDouble():
                yield
        elif self.low is None:
            yield
        else:
            try:
                with torch.autocast(self._device, self.low):
                    yield
            except (RuntimeError, TypeError, ValueError) as error:
                said = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise OnwardError(
                    f"{self.eager_name} cannot run the model ({said}), so that there is no "
                    "reference for mixed precision; fix: verify with mixed_precision='no'"
                ) from error

    def _written(self, model: torch.nn.Module) -> Tensors:
        """The buffers of a model that has run which the step writes too."""
        buffers = dict(model.named_buffers(remove_duplicate=False))
        paths = {id(b): path for path, b in self._model.named_buffers(remove_duplicate=False)}
        names = self.captured.graph.signature.written
        mine = {n: paths[id(b)] for n, b in self.captured.buffers.items() if n in names}
        found = {n: buffers[path].detach() for n, path in mine.items()}
        return {next_value(n): b for n, b in found.items() if b.is_floating_point()}
