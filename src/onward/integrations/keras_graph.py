"""Programs of the backends whose exporters write ONNX: TensorFlow and JAX."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import torch

from onward.errors import OnwardError
from onward.integrations.keras_onnx import finished
from onward.integrations.keras_refusals import refusing
from onward.integrations.keras_steps import KerasProgram, KerasSteps, KerasUpdate, quietly, to_torch
from onward.integrations.keras_tracing import KerasForward
from onward.kernels import torch_dtype
from onward.onnx_models import OnnxModule, OnnxSource
from onward.train import Trainer

Names = tuple[list[str], list[str], list[str], list[str], list[str]]


class GraphSteps(KerasSteps):
    """Steps of a model that a backend's exporter turns into an ONNX file. The optimizer and the
    metrics are functions that the backend compiles, for what the model was compiled with."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._functions_of: tuple[Any, ...] | None = None
        self._apply: Any = None
        self._update_metrics: Any = None

    def renew(self) -> None:
        """Makes those functions, anew where the model has been compiled anew."""
        model = self.model
        made_of = (model.optimizer, model._compile_loss, model._compile_metrics)
        before = self._functions_of
        if before is None or any(a is not b for a, b in zip(made_of, before, strict=True)):
            self.make_functions()
            self._functions_of = made_of

    @abstractmethod
    def make_functions(self) -> None:
        """Makes `_apply` and `_update_metrics`."""

    @abstractmethod
    def factors_of(self, forward: KerasForward, leaves: list[Any], values: Any) -> int:
        """Counts the dropouts of a forward."""

    @abstractmethod
    def exported(
        self, forward: KerasForward, leaves: list[Any], values: Any, names: Names, is_open: bool
    ) -> onnx.ModelProto:
        """The forward as a file. is_open: whether the size of the batch is open."""

    def make(self, forward: KerasForward, leaves: list[Any], values: Any) -> KerasProgram:
        with refusing("the model cannot be traced for training"):
            self.factors_of(forward, leaves, values)
        try:
            return self._made(forward, leaves, values, True)
        except OnwardError:
            return self._made(forward, leaves, values, False)  # says what is wrong, or serves

    def _made(
        self, forward: KerasForward, leaves: list[Any], values: Any, is_open: bool
    ) -> KerasProgram:
        model, (trainable, others, metrics) = self.model, values
        count = len(forward.rates)
        parts = zip("wnmlf", (trainable, others, metrics, leaves, range(count)), strict=True)
        names: Any = tuple([f"{kind}_{i}" for i in range(len(x))] for kind, x in parts)
        forward.is_open = is_open
        with refusing("the model has no ONNX form"):
            proto = self.exported(forward, leaves, values, names, is_open)
        paths = _paths([*model.trainable_variables, *model.non_trainable_variables])
        weights = dict[str, np.ndarray]()
        for name, value in zip([*names[0], *names[1]], [*trainable, *others], strict=True):
            array = to_torch(value)
            if array.dtype == torch.float32:
                weights[name] = array.numpy()
        called = dict(zip([*names[0], *names[1]], paths, strict=True))
        factors = dict(zip(names[4], forward.rates, strict=True))
        proto = finished(proto, weights, called, factors, names[3] if is_open else [])
        _refuse_state(proto, [*names[1], *names[2]], called)
        held = {called[name] for name in weights}
        source = OnnxSource.of(proto, named=held)
        present = {t.name for t in source.model.graph.initializer} & held
        trained = [called[name] for name in names[0] if called[name] in present]
        if not trained:
            raise OnwardError("the loss depends on no weight that is trained; fix: trainable=True")
        module = OnnxModule(source, "loss", trained)
        paths_of = module.program.paths
        update = KerasUpdate([module.get_parameter(paths_of[name]) for name in trained])
        with quietly():
            trainer = Trainer(module, update, options=self.options)
        program = KerasProgram(forward, trainer, update)
        views = module.initializers
        program.trainable = [views.get(called[name]) for name in names[0]]
        program.others = [views.get(called[name]) for name in names[1]]
        leaf = {name: i for i, name in enumerate(names[3])}
        program.inputs = {
            name: (leaf[name], torch_dtype(type.dtype)) for name, type in source.inputs.items()
        }
        return program

    def load(self, program: KerasProgram, values: Any) -> None:
        """Writes the variables' values into the tensors that stand for them."""
        trainable, others, _ = values
        with torch.no_grad():
            for view, value in zip(
                [*program.trainable, *program.others], [*trainable, *others], strict=True
            ):
                if view is not None:
                    view.copy_(to_torch(value))

    def gradients(
        self, program: KerasProgram, grads: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """The gradients by variable; None for those that the graph does not have."""
        left = iter(grads)
        return [None if view is None else next(left) for view in program.trainable]


def _paths(variables: Sequence[Any]) -> list[str]:
    """A name for each variable: its path, with a number where another has the same."""
    found, seen = list[str](), dict[str, int]()
    for variable in variables:
        path = str(variable.path).replace(".", "_")
        seen[path] = seen.get(path, 0) + 1
        found.append(path if seen[path] == 1 else f"{path}_{seen[path]}")
    return found


def _refuse_state(proto: onnx.ModelProto, names: Sequence[str], called: dict[str, str]) -> None:
    """Raises OnwardError where a forward reads or changes a variable that is not of f32."""
    read = {x for node in proto.graph.node for x in node.input}
    read |= {info.name for info in proto.graph.output}
    for name in names:
        path = called.get(name, name)
        kept = {t.name for t in proto.graph.initializer}
        if path not in kept and (name in read or path in read):
            raise OnwardError(
                f"the forward reads the variable '{path}', which is not of float32; fix: a layer "
                "without such state"
            )
    left = [info for info in proto.graph.input if info.name in names]
    for info in left:
        proto.graph.input.remove(info)


__all__ = ["GraphSteps", "Names"]
