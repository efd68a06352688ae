"""Steps of Keras models on the TensorFlow backend; their graphs are written by tf2onnx.

tf2onnx has no form of some ops, and forms of others that lose numbers: a selection as products,
which is NaN beside infinity, and cross-entropy as the logarithm of a quotient, which is infinite
for a label of small probability. `HANDLERS` writes these.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper

from onward.errors import OnwardError
from onward.integrations.keras_graph import GraphSteps, Names
from onward.integrations.keras_package import package, set_mask, tree, unpack
from onward.integrations.keras_tracing import KerasForward, packed

tf: Any = package("tensorflow")

OPSET = 18  # the newest that tf2onnx writes


class TensorFlowSteps(GraphSteps):
    """Steps whose optimizer and metrics are TensorFlow functions of Keras."""

    def function(self, *args: Any) -> Any:
        """Runs `steps_per_execution` batches of an iterator. Raises StopIteration at its end."""
        [iterator] = args
        logs: Any = None
        for _ in range(self.model.steps_per_execution):
            data = next(iterator, None)
            if data is None:
                break
            logs = self._step(_without_optionals(data))
        if logs is None:
            raise StopIteration
        return logs

    def _step(self, data: Any) -> Any:
        model = self.model
        x, y, weight = unpack(data)
        if not (model.built and model.optimizer.built and _is_built(model)):
            model._symbolic_build(data_batch=(x, y, weight))
        self.renew()
        values = self._values()
        program, leaves, _ = self.program((x, y, weight), values)
        self.load(program, values)
        forward, names = program.forward, self.wanted(program, self.has_metrics)

        def update(grads: list[torch.Tensor | None]) -> None:
            given = self.gradients(program, grads)
            pairs = zip(given, model.trainable_variables, strict=True)
            kept = [(from_torch(g), v) for g, v in pairs if g is not None]
            self._apply([g for g, _ in kept], tuple(id(v) for _, v in kept))

        program.update.update = update
        loss, found = self.run(program, leaves, names)
        others = model.non_trainable_variables
        for i in forward.updated:
            others[i].assign(from_torch(found[f"state_{i}"]))
        outputs, masks = None, {}
        if self.has_metrics:
            count = len(tree.flatten(forward.predictions))
            outputs = packed(forward.predictions, [
                from_torch(found[f"output_{i}"]) for i in range(count)
            ])  # fmt: skip
            masks = {str(i): from_torch(found[f"mask_{i}"]) for i in forward.masked}
        size = next(leaf for leaf in tree.flatten(x) if leaf is not None).shape[0]
        given = (from_torch(loss), tf.constant(size), x, y, outputs, weight, masks)
        return self._update_metrics(*given)

    def _values(self) -> tuple[list[Any], list[Any], list[Any]]:
        model = self.model
        kinds = (model.trainable_variables, model.non_trainable_variables, model.metrics_variables)
        return tuple([tf.convert_to_tensor(v.value) for v in kind] for kind in kinds)  # type: ignore[return-value]

    def make_functions(self) -> None:
        model, reference = self.model, self._model
        optimizer = model.optimizer
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        by_id = {id(v): v for v in model.trainable_variables}
        functions = dict[tuple[int, ...], Any]()

        def apply(grads: list[Any], ids: tuple[int, ...]) -> None:
            if ids not in functions:
                variables = [by_id[i] for i in ids]
                functions[ids] = tf.function(
                    lambda given: optimizer.apply(given, variables), autograph=False
                )
            functions[ids](grads)

        def update_metrics(
            loss: Any, size: Any, x: Any, y: Any, outputs: Any, weight: Any, masks: Any
        ) -> Any:
            owner: Any = reference()
            owner._loss_tracker.update_state(loss, sample_weight=size)
            x, y, outputs, weight, masks = tree.map_structure(
                _opened, (x, y, outputs, weight, masks)
            )
            if outputs is None:
                return owner.get_metrics_result()
            flat = tree.flatten(outputs)
            for i, mask in masks.items():
                set_mask(flat[int(i)], mask)
            if owner._compile_loss is not None and owner._compile_loss.metrics:
                owner._compile_loss(y, outputs, weight)
            return owner.compute_metrics(x, y, outputs, sample_weight=weight)

        self._apply = apply
        self._update_metrics = tf.function(update_metrics, autograph=False, reduce_retracing=True)

    # ---- tracing

    def factors_of(self, forward: KerasForward, leaves: list[Any], values: Any) -> int:
        trainable, others, metrics = values
        specs = [_spec(x, None) for x in (*trainable, *others, *metrics, *leaves)]
        split = _split(len(trainable), len(others), len(metrics), len(leaves))

        @tf.function(autograph=False)
        def counted(*given: Any) -> Any:
            forward(*split(given), factors=None)
            return tf.constant(0)

        counted.get_concrete_function(*specs)
        return len(forward.rates)

    def exported(
        self, forward: KerasForward, leaves: list[Any], values: Any, names: Names, is_open: bool
    ) -> onnx.ModelProto:
        trainable, others, metrics = values
        split = _split(len(trainable), len(others), len(metrics), len(leaves))
        specs = [
            *(_spec(x, n) for x, n in zip(trainable, names[0], strict=True)),
            *(_spec(x, n) for x, n in zip(others, names[1], strict=True)),
            *(_spec(x, n) for x, n in zip(metrics, names[2], strict=True)),
            *(_spec(x, n, is_open) for x, n in zip(leaves, names[3], strict=True)),
            *(tf.TensorSpec((), tf.float32, name=n) for n in names[4]),
        ]
        count = len(specs) - len(names[4])

        @tf.function(input_signature=specs, autograph=False)
        def traced(*given: Any) -> dict[str, Any]:
            results = forward(*split(given[:count]), factors=given[count:])
            return dict(zip(forward.names(), map(tf.identity, results), strict=True))

        return to_onnx(traced, specs)


def to_onnx(function: Any, specs: Sequence[Any]) -> onnx.ModelProto:
    """A TensorFlow function as an ONNX file, by tf2onnx with the handlers above it."""
    tf2onnx = package("tf2onnx")
    concrete = function.get_concrete_function(*specs)
    held = list(concrete.captured_inputs)
    inputs = concrete.inputs[len(concrete.inputs) - len(held) :]
    captured = dict(zip([x.name for x in inputs], held, strict=True))
    if any(x.dtype == tf.resource for x in held):
        raise OnwardError(
            "the forward reads a variable that no layer of the model tracks; fix: add_weight"
        )
    package("keras.src.export.tf2onnx_lib").patch_tf2onnx()
    logger = logging.getLogger("tf2onnx")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        proto, _ = tf2onnx.convert.from_function(
            function, input_signature=list(specs), opset=OPSET,
            custom_op_handlers={name: (handler, []) for name, handler in HANDLERS.items()},
        )  # fmt: skip
    finally:
        logger.setLevel(level)
    for info in list(proto.graph.input):
        if info.name in captured:  # a constant of the program, which tf2onnx takes for an input
            array = captured[info.name].numpy()
            proto.graph.initializer.append(numpy_helper.from_array(array, info.name))
            proto.graph.input.remove(info)
    return proto


# ---- ops that tf2onnx lacks, or writes so that numbers are lost


def _select(ctx: Any, node: Any, *_: Any, **__: Any) -> None:
    """Select and SelectV2 as Where."""
    if node.type == "Select" and len(ctx.get_shape(node.input[0]) or ()) == 1:
        rank = len(ctx.get_shape(node.output[0]) or (0,))
        if rank > 1:
            raise OnwardError("a Select by rows is not supported; fix: tf.where")
    node.type = "Where"


def _erfc(ctx: Any, node: Any, *_: Any, **__: Any) -> None:
    """Erfc(x) as 1 - Erf(x), and Erfc(-x) as 1 + Erf(x), which is the form that GELU has."""
    output, dtype, shape = node.output[0], node.output_dtypes[0], node.output_shapes[0]
    given, op, maker = node.input[0], "Sub", node.inputs[0]
    negated = [i for i, x in enumerate(maker.inputs) if x.type == "Neg"]
    if maker.type == "Neg":
        given, op = maker.input[0], "Add"
    elif maker.type == "Mul" and negated:
        parts = [maker.inputs[negated[0]].input[0], maker.input[1 - negated[0]]]
        given, op = ctx.make_node("Mul", parts, dtypes=[dtype], shapes=[shape]).output[0], "Add"
    ctx.remove_node(node.name)
    erf = ctx.make_node("Erf", [given], dtypes=[dtype], shapes=[shape])
    one = ctx.make_const(f"{node.name}_one", np.float32(1.0))
    ctx.make_node(
        op, [one.output[0], erf.output[0]], outputs=[output], dtypes=[dtype], shapes=[shape]
    )


def _sparse_cross_entropy(ctx: Any, node: Any, *_: Any, **__: Any) -> None:
    """SparseSoftmaxCrossEntropyWithLogits as SoftmaxCrossEntropyLoss."""
    outputs, dtypes, shapes = node.output, node.output_dtypes, node.output_shapes
    inputs = list(node.input)
    ctx.remove_node(node.name)
    ctx.make_node(
        "SoftmaxCrossEntropyLoss", inputs, attr={"reduction": "none"}, outputs=[outputs[0]],
        dtypes=[dtypes[0]], shapes=[shapes[0]], name=node.name,
    )  # fmt: skip


def _log1p(ctx: Any, node: Any, *_: Any, **__: Any) -> None:
    """Log1p(x) as Log(x + 1)."""
    _shifted(ctx, node, ("Add", "Log"))


def _expm1(ctx: Any, node: Any, *_: Any, **__: Any) -> None:
    """Expm1(x) as Exp(x) - 1."""
    _shifted(ctx, node, ("Exp", "Sub"))


def _shifted(ctx: Any, node: Any, ops: tuple[str, str]) -> None:
    given, output = node.input[0], node.output[0]
    dtype, shape = node.output_dtypes[0], node.output_shapes[0]
    ctx.remove_node(node.name)
    one = ctx.make_const(f"{node.name}_one", np.float32(1.0)).output[0]
    for number, op in enumerate(ops):
        inputs = [given, one] if op in ("Add", "Sub") else [given]
        named = {"outputs": [output]} if number else {}
        given = ctx.make_node(op, inputs, dtypes=[dtype], shapes=[shape], **named).output[0]


HANDLERS = {
    "Erfc": _erfc,
    "Expm1": _expm1,
    "Log1p": _log1p,
    "Select": _select,
    "SelectV2": _select,
    "SparseSoftmaxCrossEntropyWithLogits": _sparse_cross_entropy,
}


# ---- arrays


def from_torch(x: torch.Tensor) -> Any:
    """A tensor as one of TensorFlow's; its memory is shared where TensorFlow can."""
    x = x.detach()
    if x.dtype == torch.bool or not x.numel() or not x.dim():
        return tf.convert_to_tensor(x.numpy())
    return tf.experimental.dlpack.from_dlpack(torch.to_dlpack(x.contiguous()))


def _without_optionals(data: Any) -> Any:
    return tree.map_structure(
        lambda x: None if isinstance(x, tf.experimental.Optional) else _tensor(x), data
    )


def _tensor(x: Any) -> Any:
    return x if x is None or tf.is_tensor(x) else tf.convert_to_tensor(x)


def _opened(x: Any) -> Any:
    """An array whose number of samples is unknown while a function is traced, as those are that
    Keras's own train function takes."""
    if x is None or not x.shape.rank:
        return x
    return tf.compat.v1.placeholder_with_default(x, [None, *x.shape[1:]])


def _is_built(model: Any) -> bool:
    parts = (model._compile_loss, model._compile_metrics)
    return all(part is None or part.built for part in parts)


def _spec(x: Any, name: str | None, is_open: bool = False) -> Any:
    shape = tuple(x.shape)
    return tf.TensorSpec((None, *shape[1:]) if is_open and shape else shape, x.dtype, name=name)


def _split(*counts: int) -> Any:
    """A function that cuts a row of arguments into lists of these lengths."""

    def split(given: Sequence[Any]) -> list[list[Any]]:
        rest, found = list(given), []
        for count in counts:
            found.append(rest[:count])
            rest = rest[count:]
        return found

    return split


__all__ = ["HANDLERS", "TensorFlowSteps", "from_torch", "to_onnx"]
