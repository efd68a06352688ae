"""Steps of Keras models on the JAX backend; their graphs are written by jax2onnx."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import onnx
import torch
from onnx import helper

from onward.integrations.keras_graph import GraphSteps, Names
from onward.integrations.keras_onnx import BATCH
from onward.integrations.keras_package import keras, package, set_mask, tree, unpack
from onward.integrations.keras_tracing import KerasForward, packed

jax: Any = package("jax")

OPSET = 21


class JaxSteps(GraphSteps):
    """Steps whose optimizer and metrics are jitted functions of Keras. Keras hands the state of all
    variables to a step and takes the new state; between steps its variables are empty."""

    def function(self, *args: Any) -> Any:
        """Runs `steps_per_execution` batches of an iterator. Raises StopIteration at its end."""
        state, iterator = args
        logs, state = self._step(state, next(iterator))
        for _ in range(self.model.steps_per_execution - 1):
            try:
                data = next(iterator)
            except StopIteration:
                break
            logs, state = self._step(state, data)
        return logs, state

    def _step(self, state: Any, data: Any) -> Any:
        x, y, weight = unpack(data)
        x, y, weight = tree.map_structure(_array, (x, y, weight))
        trainable, others, optimizer, metrics = state
        values = (trainable, others, metrics)
        self.renew()
        program, leaves, _ = self.program((x, y, weight), values)
        self.load(program, values)
        forward, names = program.forward, self.wanted(program, self.has_metrics)
        after: list[Any] = []

        def update(grads: list[torch.Tensor | None]) -> None:
            given = [
                jax.numpy.zeros_like(v) if g is None else from_torch(g)
                for g, v in zip(self.gradients(program, grads), trainable, strict=True)
            ]
            after[:] = jax.block_until_ready(self._apply(optimizer, given, trainable))
            for array in given:  # else JAX would hold the memory of the step beyond it
                array.delete()

        program.update.update = update
        loss, found = self.run(program, leaves, names)
        if after:
            trainable, optimizer = after
        others = list(others)
        for i in forward.updated:
            others[i] = from_torch(found[f"state_{i}"])
        outputs, masks = None, dict[str, Any]()
        if self.has_metrics:
            count = len(tree.flatten(forward.predictions))
            outputs = packed(forward.predictions, [
                from_torch(found[f"output_{i}"]) for i in range(count)
            ])  # fmt: skip
            masks = {str(i): from_torch(found[f"mask_{i}"]) for i in forward.masked}
        given = (metrics, from_torch(loss), x, y, outputs, weight, masks)
        logs, metrics = self._update_metrics(*given)
        return logs, (trainable, others, optimizer, metrics)

    def make_functions(self) -> None:
        model, reference = self.model, self._model
        optimizer = model.optimizer

        def update_metrics(
            metrics: Any, loss: Any, x: Any, y: Any, outputs: Any, weight: Any, masks: Any
        ) -> Any:
            owner = reference()
            assert owner is not None
            variables = owner.metrics_variables
            with keras.StatelessScope(
                state_mapping=list(zip(variables, metrics, strict=True))
            ) as s:
                size = next(leaf for leaf in tree.flatten(x) if leaf is not None).shape[0]
                owner._loss_tracker.update_state(loss, sample_weight=size)
                if outputs is None:
                    logs = owner.get_metrics_result()
                else:
                    flat = tree.flatten(outputs)
                    for i, mask in masks.items():
                        set_mask(flat[int(i)], mask)
                    if owner._compile_loss is not None and owner._compile_loss.metrics:
                        owner._compile_loss(y, outputs, weight)
                    logs = owner.compute_metrics(x, y, outputs, weight)
            return logs, [s.get_current_value(v) for v in variables]

        self._apply = jax.jit(optimizer.stateless_apply)
        self._update_metrics = jax.jit(update_metrics)

    # ---- tracing

    def factors_of(self, forward: KerasForward, leaves: list[Any], values: Any) -> int:
        jax.eval_shape(
            lambda *given: _arrays(forward(*given, factors=None)), *map(list, values), leaves
        )
        return len(forward.rates)

    def exported(
        self, forward: KerasForward, leaves: list[Any], values: Any, names: Names, is_open: bool
    ) -> onnx.ModelProto:
        kinds = (*values, leaves)
        counts = [len(kind) for kind in kinds]
        specs = [
            *(_spec(x) for kind in values for x in kind),
            *(_spec(x, is_open) for x in leaves),
            *(jax.ShapeDtypeStruct((), "float32") for _ in names[4]),
        ]

        def traced(*given: Any) -> Any:
            parts, start = [], 0
            for size in counts:
                parts.append(list(given[start : start + size]))
                start += size
            return tuple(_arrays(forward(*parts, factors=given[start:])))

        with _as_jax2onnx_reads():
            return to_onnx(traced, specs, [n for kind in names for n in kind], forward)


def to_onnx(
    function: Any, specs: Sequence[Any], inputs: Sequence[str], forward: KerasForward
) -> onnx.ModelProto:
    """A JAX function as an ONNX file, by jax2onnx, with the names of what `forward` returns."""
    jax2onnx = package("jax2onnx")
    log = logging.getLogger("onnx_ir.serde")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        proto = jax2onnx.to_onnx(
            function, inputs=list(specs), input_names=list(inputs), output_names=forward.names(),
            opset=OPSET,
        )  # fmt: skip
    finally:
        log.setLevel(level)
    _select_in_abs(proto)
    return proto


@contextmanager
def _as_jax2onnx_reads() -> Iterator[None]:
    """A context in which Keras's functions call JAX's as jax2onnx reads these: `arange` with all
    arguments, minima and maxima of one dtype."""
    numpy: Any = import_module("keras.src.backend.jax.numpy")
    before = {name: getattr(numpy, name) for name in ("arange", "minimum", "maximum")}

    def arange(start: Any, stop: Any = None, step: Any = None, dtype: Any = None) -> Any:
        ends = (0, start) if stop is None else (start, stop)
        return before["arange"](*ends, 1 if step is None else step, dtype)

    def of_one_dtype(name: str) -> Any:
        def call(x1: Any, x2: Any) -> Any:
            if hasattr(x1, "dtype") and hasattr(x2, "dtype") and x1.dtype != x2.dtype:
                dtype = jax.numpy.promote_types(x1.dtype, x2.dtype)
                x1, x2 = x1.astype(dtype), x2.astype(dtype)
            return before[name](x1, x2)

        return call

    numpy.arange = arange
    numpy.minimum, numpy.maximum = of_one_dtype("minimum"), of_one_dtype("maximum")
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(numpy, name, function)


def _select_in_abs(model: onnx.ModelProto) -> None:
    """Writes |x| as a choice between x and -x, whose slope at 0 is 1 as JAX's is; that of Abs is 0
    there, as in PyTorch and TensorFlow. A regularizer of weights that begin at 0 shows it."""
    graph = model.graph
    for place, node in reversed(list(enumerate(graph.node))):
        if node.op_type == "ReduceL1":
            inner = f"{node.output[0]}_abs"
            graph.node.insert(place, helper.make_node("Abs", [node.input[0]], [inner]))
            node.op_type, node.input[0] = "ReduceSum", inner
    for place, node in reversed(list(enumerate(graph.node))):
        if node.op_type != "Abs":
            continue
        [x], [y] = node.input, node.output
        above, below = f"{y}_above", f"{y}_below"
        made = [
            helper.make_node("Neg", [x], [below]),
            helper.make_node("GreaterOrEqual", [x, below], [above]),
            helper.make_node("Where", [above, x, below], [y]),
        ]
        del graph.node[place]
        for new in reversed(made):
            graph.node.insert(place, new)


def from_torch(x: torch.Tensor) -> Any:
    """A tensor as an array of JAX's; its memory is shared where JAX can."""
    x = x.detach()
    if x.dtype == torch.bool or not x.numel() or not x.dim():
        return jax.numpy.asarray(x.numpy())
    return jax.dlpack.from_dlpack(x.contiguous())


def _arrays(results: Sequence[Any]) -> list[Any]:
    return [jax.numpy.asarray(x) for x in results]


def _array(x: Any) -> Any:
    return None if x is None else jax.numpy.asarray(x)


def _spec(x: Any, is_open: bool = False) -> Any:
    shape = tuple(x.shape)
    return jax.ShapeDtypeStruct((BATCH, *shape[1:]) if is_open and shape else shape, x.dtype)


__all__ = ["JaxSteps", "from_torch", "to_onnx"]
