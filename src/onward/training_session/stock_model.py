"""An ONNX model run by stock onnxruntime, with any weights: the reference of a session."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import onnx

from onward.environment import switch_off_telemetry
from onward.errors import MissingExtraError, OnwardError, one_line
from onward.graph.build import Builder
from onward.graph.file import to_proto
from onward.graph.graph import Graph, Role
from onward.graph.importer.local_functions import inlined
from onward.graph.types import DType, Type
from onward.loss import Loss
from onward.onnx_models import (
    OnnxModule,
    in_inference,
    in_training,
    named_constants,
    say_training,
    with_weights,
)

Weights = Mapping[str, np.ndarray]  # by path of the module's parameters


class StockModel:
    """The model of a session as it was given, run by onnxruntime on one batch.

    feeds: the arrays of the model and of its loss, by name. Raises MissingExtraError where
    onnxruntime is not installed, and OnwardError for a model that it does not load.
    """

    def __init__(self, module: OnnxModule, feeds: Mapping[str, np.ndarray]) -> None:
        self._module, self._feeds = module, feeds
        self._session = _session(self._model(trains=False))

    def _model(self, trains: bool) -> onnx.ModelProto:
        """The model with its weights as inputs too. trains: whether batch normalization is by the
        batch, as it is in a step."""
        program = self._module.program
        model = with_weights(program.source, {})
        named_constants(model.graph)
        own = {x.name for x in model.graph.input}
        held = {*program.paths, *program.buffers}
        for tensor in model.graph.initializer:  # one that is an input too can be given
            if tensor.name in held and tensor.name not in own:
                made = onnx.helper.make_tensor_value_info(
                    tensor.name, tensor.data_type, tensor.dims
                )
                model.graph.input.append(made)
        running = frozenset(program.buffers)
        if running:
            model = inlined(model)
            say_training(model)
        if trains:
            in_training(model, running, everywhere=program.batch_norm is True)
        else:
            in_inference(model, running)
        return model

    @property
    def weights(self) -> dict[str, np.ndarray]:
        """The weights of now, by path."""
        held = (*self._module.named_parameters(), *self._module.named_buffers())
        return {n: x.detach().numpy() for n, x in held}

    def outputs(self, weights: Weights) -> dict[str, np.ndarray]:
        """Computes all outputs by name, with these weights, as in inference."""
        return self._run(self._session, weights)

    def _run(self, session: Any, weights: Weights) -> dict[str, np.ndarray]:
        program = self._module.program
        given = {name: self._feeds[name] for name in program.source.inputs}
        for name, path in {**program.paths, **program.buffers}.items():
            array = weights[path]
            turned = name in program.source.turned
            given[name] = np.ascontiguousarray(array.T if turned else array)
        names = [x.name for x in session.get_outputs()]
        return {n: _array(x) for n, x in zip(names, session.run(names, given), strict=True)}

    def loss(self, weights: Weights) -> float:
        """Computes the session's loss as a step does, with these weights."""
        made, loss = self._run(self._training, weights), self._module.program.loss
        if isinstance(loss, str):
            return float(made[loss])
        given = {x.name: x for x in self._loss_session.get_inputs()}
        arrays = {name: made[name] if name in made else self._feeds[name] for name in given}
        return float(self._loss_session.run(None, arrays)[0])

    @cached_property
    def _training(self) -> Any:
        """The model as it is in a step."""
        program = self._module.program
        if program.buffers and program.batch_norm is not False:
            return _session(self._model(trains=True))
        return self._session

    @cached_property
    def _loss_session(self) -> Any:
        """The loss alone, by the outputs and labels of this batch."""
        loss: Loss | str | None = self._module.program.loss
        assert loss is not None and not isinstance(loss, str)
        graph, made = Graph(), self.outputs(self.weights)
        types = {name: Type(DType.from_numpy(x.dtype), x.shape) for name, x in made.items()}
        outputs = {name: graph.input(name, type, Role.BATCH) for name, type in types.items()}
        labels = {
            name: outputs.get(name) or graph.input(name, type, Role.BATCH)
            for name, type in loss.labels(outputs).items()
        }
        graph.outputs = {"loss": loss.write(Builder(graph), outputs, labels)}
        for value in list(graph.ir.inputs):
            if not value.uses():
                graph.ir.inputs.remove(value)
        return _session(to_proto(graph))


def _array(result: Any) -> np.ndarray:
    """An output as an array: a ZipMap returns a dict of probabilities for each row."""
    if isinstance(result, list) and result and isinstance(result[0], dict):
        return np.array([list(row.values()) for row in result], np.float32)
    return np.asarray(result)


def _session(model: onnx.ModelProto) -> Any:
    switch_off_telemetry()
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingExtraError("onnxruntime", "ort") from error
    options = onnxruntime.SessionOptions()
    # constant folding would take the weights for constants
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # whatever onnxruntime and protobuf raise
        said = one_line(str(error), 200)
        raise OnwardError(
            f"stock onnxruntime does not load the model, so that there is no reference: {said}"
        ) from error


__all__ = ["StockModel", "Weights"]
