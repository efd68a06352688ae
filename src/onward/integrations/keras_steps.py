"""KerasSteps: the training steps of one Keras model, whatever its backend.

A step is one batch: arrays of Keras become tensors, a graph of `onward.Trainer` computes loss,
outputs and gradients, and within the step the Keras optimizer updates Keras's own variables.
"""

from __future__ import annotations

import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from onward.errors import OnwardError
from onward.integrations.keras_package import keras, tree
from onward.integrations.keras_refusals import refuse_model
from onward.integrations.keras_tracing import KerasForward, numbered
from onward.options import TrainerOptions
from onward.train import Trainer

KEPT = 16  # programs: kinds of batches


class KerasUpdate(torch.optim.Optimizer):
    """Stands for the Keras optimizer in a Trainer. `update` is called with the gradients, in the
    order of the parameters; None for a parameter that the loss does not depend on."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        super().__init__(list(parameters), {"lr": 0.0})
        self.update: Any = None

    def step(self, closure: Any = None) -> None:
        """Hands on the gradients."""
        [group] = self.param_groups
        self.update([p.grad for p in group["params"]])


@dataclass
class KerasProgram:
    """What runs the batches of one kind.

    trainable, others: the tensors that stand for the model's variables, None for those that the
    graph does not have. inputs: the leaves of a batch that the graph reads, by name, with their
    dtypes.
    """

    forward: KerasForward
    trainer: Trainer
    update: KerasUpdate
    trainable: list[torch.Tensor | None] = field(default_factory=list)
    others: list[torch.Tensor | None] = field(default_factory=list)
    inputs: dict[str, tuple[int, torch.dtype]] = field(default_factory=dict)
    made_of: tuple[Any, ...] = ()  # what the key's ids are of


class KerasSteps(ABC):
    """The steps of one model. options: of the Trainer. last: the Trainer of the last step."""

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)
        self.options = TrainerOptions()
        self.programs: dict[Any, KerasProgram] = {}
        self.last: Trainer | None = None

    @property
    def model(self) -> Any:
        model = self._model()
        assert model is not None, "steps are called by their model"
        return model

    # ---- the hook

    def hook(self) -> None:
        """Replaces the train function of the model; `compile` does not put it back."""
        model = self.model
        reference, steps = self._model, self

        def make_train_function(force: bool = False) -> Any:
            owner = reference()
            assert owner is not None
            owner.train_function = steps.function
            return steps.function

        object.__setattr__(model, "make_train_function", make_train_function)
        object.__setattr__(model, "train_function", None)

    @abstractmethod
    def function(self, *args: Any) -> Any:
        """The backend's train function."""

    # ---- what backends do

    @abstractmethod
    def make(self, forward: KerasForward, leaves: list[Any], values: Any) -> KerasProgram:
        """Makes the program of batches like this one. values: of the variables, by kind."""

    # ---- parts of a step

    def program(self, data: Any, values: Any) -> tuple[KerasProgram, list[Any], Any]:
        """The program for a batch, its arrays, and their structure. values: of the variables."""
        structure = numbered(data)
        leaves = [leaf for leaf in tree.flatten(data) if leaf is not None]
        model = self.model
        made_of = (
            model.optimizer, model._compile_loss, model._compile_metrics,
            tuple(model.trainable_variables), tuple(model.non_trainable_variables),
        )  # fmt: skip
        ids = (*map(id, made_of[:3]), *(tuple(map(id, variables)) for variables in made_of[3:]))
        key = (str(structure), ids, *(self._kind(leaf) for leaf in leaves))
        found = self.programs.get(key)
        if found is None:
            found = self.programs.get((*key, _sizes(leaves)))
        if found is None:
            refuse_model(model)
            _refuse_leaves(leaves)
            found = self.make(KerasForward(model, structure), leaves, values)
            found.made_of = made_of
            is_open = found.forward.is_open
            self.programs[key if is_open else (*key, _sizes(leaves))] = found
            while len(self.programs) > KEPT:
                del self.programs[next(iter(self.programs))]
        self.last = found.trainer
        return found, leaves, structure

    def _kind(self, leaf: Any) -> Any:
        """What of an array a program depends on: all but the size of the batch."""
        return keras.backend.standardize_dtype(leaf.dtype), tuple(leaf.shape[1:]), len(leaf.shape)

    def run(
        self, program: KerasProgram, leaves: Sequence[Any], wanted: Sequence[str]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Runs a batch. Returns the loss and the outputs that are wanted."""
        feeds = {name: to_torch(leaves[i]).to(dtype) for name, (i, dtype) in program.inputs.items()}
        result = program.trainer.train_step(feeds, fetch=tuple(wanted))
        return result.loss, dict(result.outputs)

    def wanted(self, program: KerasProgram, has_metrics: bool) -> list[str]:
        """The outputs to return: the model's where metrics read them, and the new state."""
        names = program.forward.names()[1:]
        return names if has_metrics else [n for n in names if n.startswith("state_")]

    @property
    def has_metrics(self) -> bool:
        """Whether anything beside the loss's own mean is computed from the outputs."""
        model = self.model
        own = type(model).compute_metrics is not keras.Model.compute_metrics
        trackers = model._compile_loss is not None and model._compile_loss.metrics
        return bool(own or model._compile_metrics is not None or trackers)


def _sizes(leaves: Sequence[Any]) -> tuple[int, ...]:
    return tuple(leaf.shape[0] if leaf.shape else 0 for leaf in leaves)


def _refuse_leaves(leaves: Sequence[Any]) -> None:
    """Raises OnwardError for what a graph cannot take."""
    for leaf in leaves:
        kind = keras.backend.standardize_dtype(leaf.dtype)
        if kind == "string" or type(leaf).__name__ in ("RaggedTensor", "SparseTensor", "BCOO"):
            raise OnwardError(
                f"the batch has a {type(leaf).__name__} of {kind}, which no graph takes; fix: "
                "dense arrays of numbers"
            )
        if not len(leaf.shape):
            raise OnwardError("the batch has a number without a dim of samples; fix: arrays")


def to_torch(array: Any) -> torch.Tensor:
    """An array of a backend as a tensor, without a copy where that can be."""
    if isinstance(array, torch.Tensor):
        return array.detach()
    if isinstance(array, np.ndarray):
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    try:
        return torch.from_dlpack(array)
    except (TypeError, RuntimeError, ValueError, BufferError, AttributeError, NotImplementedError):
        return torch.from_numpy(np.array(array))


@contextmanager
def quietly() -> Iterator[None]:
    """A context without the log line that says who makes the updates, which is Keras here."""

    def other(record: logging.LogRecord) -> bool:
        return "makes the update" not in record.msg

    log = logging.getLogger("onward")
    log.addFilter(other)
    try:
        yield
    finally:
        log.removeFilter(other)


__all__ = ["KerasProgram", "KerasSteps", "KerasUpdate", "quietly", "to_torch"]
