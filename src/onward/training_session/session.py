"""TrainingSession: trains a model that is ONNX already, with arrays in and out.

The engine is the Trainer's, so that a session has its options, its checkpoints and its
explanations. Arrays are numpy's, or anything with `__dlpack__`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

from onward.capture import CaptureRequest
from onward.checkpoint import StagedFiles
from onward.compile import Compiler
from onward.errors import OnwardError
from onward.execute import Memory
from onward.explanation import StepExplanation
from onward.graph.graph import OPSET
from onward.graph.types import Type
from onward.kernels import host
from onward.loss import Loss
from onward.module.explain import explain
from onward.onnx_models import (
    LARGEST,
    OnnxModule,
    OnnxSource,
    lies_beside,
    with_weights,
    write_beside,
)
from onward.options import TrainerOptions
from onward.prepare.batch import Batch, bind_batch
from onward.prepare.graphs import Graphs
from onward.prepare.prepared_batch import OutputRequest, scalars
from onward.prepare.prepared_step import PreparedStep
from onward.prepare.session import Session
from onward.train import StepResult, Trainer
from onward.train.exclusive import exclusive, lock_of
from onward.train.verify import Verification
from onward.training_session.arrays import Array, array_of, as_dtype, tensor_of
from onward.training_session.verification import verify_session

KEPT = 8  # prepared predictions, the most recently used last


@dataclass(frozen=True)
class SessionResult:
    """The result of one step.

    loss: of this batch. grad_norm: before clipping; None where gradients are not clipped or no
    update was due. lr: of the first group. skipped: whether the update was left out because a
    gradient was not finite. updated: whether the weights changed. outputs: those asked for, by
    name.
    """

    loss: float
    grad_norm: float | None
    lr: float
    skipped: bool
    updated: bool
    outputs: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(cls, result: StepResult) -> SessionResult:
        """Makes one of a Trainer's result: numbers and arrays in place of tensors."""
        norm = result.grad_norm
        return cls(
            float(result.loss), None if norm is None else float(norm), result.lr, result.skipped,
            result.updated, {name: array_of(x) for name, x in result.outputs.items()},
        )  # fmt: skip


class TrainingSession:
    """Trains an ONNX model.

    model: a path to an .onnx file, an `onnx.ModelProto`, or an `onnx_ir.Model`. optimizer: one of
    `onward.optim`. loss: the name of an output that is the loss, or a loss of `onward.loss`; None:
    the session only predicts. trainable: initializers to train, by name or pattern; None: every one
    of f32 that the loss depends on, but for single numbers and masks. options: TrainerOptions, or a
    dict of them. dropout: probabilities by the name of a value, or a pattern of names; `step`
    applies dropout to these values, since exporters leave it out. batch_norm: whether `step`
    normalizes by the batch and has the running statistics move; None: where the model's
    BatchNormalization nodes are in training form. Raises OnwardError for a model that cannot be
    read, and for names that it lacks.

    Threads may share a session: it does one thing at a time.
    """

    def __init__(
        self,
        model: str | Path | onnx.ModelProto | Any,
        optimizer: Any = None,
        loss: Loss | str | None = None,
        trainable: Sequence[str] | None = None,
        options: TrainerOptions | Mapping[str, Any] | None = None,
        dropout: Mapping[str, float] | None = None,
        batch_norm: bool | None = None,
    ) -> None:
        self.source = OnnxSource.of(model, dropout=dropout)
        self.module = OnnxModule(self.source, loss, trainable, batch_norm)
        if loss is not None and optimizer is None:
            raise OnwardError(
                "a session with a loss needs an optimizer; fix: optimizer=onward.optim.AdamW(...)"
            )
        self._lock = lock_of(self.module)  # which its Trainer takes too
        self._trainer: Trainer | None = None
        if loss is not None:
            self._trainer = Trainer(self.module, optimizer, options=options)
        self._memory = Memory(torch.device("cpu"))  # of predictions
        self._predictions: list[PreparedStep[Any]] = []
        self._stepped = False

    @property
    def trainer(self) -> Trainer:
        """The Trainer that runs the steps. Raises OnwardError where the session only predicts."""
        if self._trainer is None:
            raise OnwardError(
                "this session has no loss, and only predicts; fix: TrainingSession(..., loss=, "
                "optimizer=)"
            )
        return self._trainer

    @property
    @exclusive
    def inputs(self) -> dict[str, str]:
        """The types of what `step` takes, such as `i64[B,T]`, by name: the model's inputs, then the
        loss's labels, where these do not depend on a batch's sizes."""
        found = dict(self.source.inputs)
        if self.source.is_open:
            found |= self.module.labels({})
        return {name: str(type) for name, type in found.items()}

    # ---- running

    @exclusive
    def step(self, feeds: Mapping[str, Array], fetch: Sequence[str] = ()) -> SessionResult:
        """Runs one batch: forward, backward and, at the end of an accumulation window, the update.
        feeds: arrays by name, as `inputs` lists them. fetch: outputs to return. Raises OnwardError
        for feeds that the model does not take."""
        result = self.trainer.train_step(self._tensors(feeds), fetch=fetch)
        self._stepped = True
        return SessionResult.of(result)

    @exclusive
    def evaluate(self, feeds: Mapping[str, Array], fetch: Sequence[str] = ()) -> SessionResult:
        """Computes the loss, and the outputs named by `fetch`, without an update."""
        return SessionResult.of(self.trainer.eval_step(self._tensors(feeds), fetch=fetch))

    @exclusive
    def predict(
        self, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None
    ) -> dict[str, np.ndarray]:
        """Computes outputs of the model by name, without labels. outputs: None for all."""
        batch = bind_batch((self._tensors(feeds, labels=False),), {}, has_loss=False)
        step = self._prediction(batch)
        known = step.captured.graph.signature.results
        names = tuple(known if outputs is None else outputs)
        for name in names:
            if name not in known:
                raise OnwardError(
                    f"the model has no output {name!r}; fix: one of {', '.join(known)}"
                )
        prepared = step.prepare(batch, OutputRequest(names))
        given = scalars(prepared.signature, torch.zeros(2, dtype=torch.int64), 0, 1.0)
        prepared.executable.run({**prepared.inputs, **given}, prepared.dims)
        return {name: array_of(prepared.output(name)) for name in names}

    @exclusive
    def update(self) -> SessionResult | None:
        """Ends an open accumulation window early; None where none is open."""
        found = self.trainer.update()
        return None if found is None else SessionResult.of(found)

    # ---- state

    @exclusive
    def state_dict(self) -> dict[str, np.ndarray]:
        """The weights, and statistics that move, by the names of their initializers, as copies."""
        return {n: array_of(x).copy() for n, x in self.module.initializers.items()}

    @exclusive
    def load_state_dict(self, weights: Mapping[str, Array]) -> None:
        """Replaces weights by name. Raises OnwardError, and changes nothing, for a name that the
        model lacks, for another shape, and for a tied weight that is given two values."""
        own = self.module.initializers
        made: dict[str, torch.Tensor] = {}
        for name, array in weights.items():
            tensor = tensor_of(array, name)
            if name not in own or tensor.shape != own[name].shape:
                have = f"f32{list(own[name].shape)}" if name in own else "no such weight"
                fix = "give that shape" if name in own else f"name one of {', '.join(own)}"
                is_ = f"{name} is {list(tensor.shape)}"
                raise OnwardError(f"{is_}, and the model has {have}; fix: {fix}")
            made[name] = tensor
        self._check_tied(made)
        with torch.no_grad():
            for name, tensor in made.items():
                own[name].copy_(tensor)

    def save(self, folder: str | Path) -> None:
        """Writes a checkpoint: weights, optimizer state, counters (`Trainer.save`)."""
        self.trainer.save(folder)

    def resume(self, folder: str | Path) -> None:
        """Goes on from the newest valid checkpoint in the folder (`Trainer.resume`)."""
        self.trainer.resume(folder)

    @exclusive
    def export_onnx(self, path: str | Path | None = None) -> onnx.ModelProto:
        """Returns the given model with its current weights; names, opsets and metadata are kept.
        path: also writes it there, as one file where it fits. Weights that lie in files beside the
        model do so again, by the same names, and the model that is returned only names them.
        The file appears whole or not at all. Raises OnwardError for a file that exists, and for one
        that cannot be written."""
        weights = _Arrays(self.module.initializers)
        if path is not None and not Path(path).parent.is_dir():
            raise OnwardError(
                f"cannot write {str(path)!r}: its folder is not there; fix: create it first"
            )
        if path is not None and lies_beside(self.source):
            return write_beside(self.source, weights, Path(path))
        model = with_weights(self.source, weights)
        if path is not None:
            _write(model, Path(path))
        return model

    @exclusive
    def export_training(
        self,
        folder: str | Path,
        feeds: Mapping[str, Array] | None = None,
        opset: int = OPSET,
        overwrite: bool = False,
    ) -> Path:
        """Writes the training step as ONNX with its state: stock onnxruntime goes on training from
        here without Onward (`Trainer.export_training`). feeds: show which inputs there are; None:
        those of the last step. Returns the folder."""
        example = None if feeds is None else self._tensors(feeds)
        if example is None and not self._stepped and self._trainer is not None:
            raise OnwardError(
                "export_training needs an example batch; fix: run a step first, or give feeds"
            )
        return self.trainer.export_training(folder, example, opset, overwrite)

    # ---- looking

    @exclusive
    def explain(self, feeds: Mapping[str, Array], **options: Any) -> StepExplanation:
        """Explains the step of these arrays (`onward.explain`)."""
        return explain(self.trainer, self._tensors(feeds), **options)

    @exclusive
    def verify(
        self, feeds: Mapping[str, Array], weights: Sequence[str] | None = None
    ) -> Verification:
        """Compares outputs with stock onnxruntime, which runs the model as it was given, and
        gradients with central differences of the loss that it computes; changes nothing. Dropout is
        off. weights: those whose gradients are compared, by name or pattern; None: all that are
        trained. Print the result, or ask whether it is `ok`. Raises OnwardError where onnxruntime
        is not installed or does not load the model."""
        tensors = self._tensors(feeds, labels=self.module.program.loss is not None)
        given = {name: feeds[name] for name in self.source.inputs}
        disable = () if self._trainer is None else tuple(self._trainer.options.disable)
        return verify_session(self.module, tensors, self.predict(given), weights, disable)

    # ---- parts

    def _check_tied(self, given: Mapping[str, torch.Tensor]) -> None:
        """Raises OnwardError where a weight that has two names is given two values."""
        program, first = self.module.program, dict[str, str]()
        turned, paths = program.source.turned, {**program.paths, **program.buffers}
        for name in given:
            other = first.setdefault(paths[name], name)
            one, two = (given[n].t() if n in turned else given[n] for n in (other, name))
            if name != other and not np.array_equal(array_of(one), array_of(two), equal_nan=True):
                raise OnwardError(
                    f"{other} and {name} are one weight, which is given two values; fix: give one "
                    "of them, or equal values"
                )

    def _prediction(self, batch: Batch) -> PreparedStep[Any]:
        """The prepared forward for batches like this one."""
        for i, step in enumerate(self._predictions):
            if step.fits(batch):
                self._predictions.append(self._predictions.pop(i))
                return step
        disable = () if self._trainer is None else self._trainer.options.disable
        compiler = Compiler(host(self._memory.device), disable)
        request = CaptureRequest(
            self.module, batch.args, batch.kwargs, want_loss=False, gradients=False
        )
        captured = compiler.capture(request)
        graphs, session = Graphs(compiler, captured), Session(self._memory)
        bind = partial(session.bind, compiler, graphs)
        found: PreparedStep[Any] = PreparedStep(batch.kind, graphs, session, bind)
        self._predictions.append(found)
        del self._predictions[:-KEPT]
        return found

    def _tensors(self, feeds: Mapping[str, Array], labels: bool = True) -> dict[str, Any]:
        """Arrays as tensors of the inputs' dtypes, and as Python numbers where a graph is read for
        them. Raises OnwardError where that would change what an array says."""
        if not isinstance(feeds, Mapping):
            raise OnwardError(
                f"feeds is a {type(feeds).__name__}; fix: a mapping of arrays by name"
            )
        own = self.source.inputs
        found: dict[str, Any] = _read(feeds, own)
        lacking = [name for name in own if name not in feeds]
        numbers = {n: _number(found.pop(n), n) for n in [*self.source.numbers] if n in found}
        sizes = {name: tuple(x.shape) for name, x in found.items()}
        more = {} if lacking else self.module.labels(sizes, numbers)
        if labels:
            lacking += [name for name in more if name not in feeds]
            found |= _read(feeds, more)
        if lacking:
            wanted = ", ".join([*own, *more])
            raise OnwardError(f"feeds lacks {', '.join(lacking)}; fix: give {wanted}")
        for name in feeds:
            if name not in own and name not in more:
                raise OnwardError(
                    f"the model takes no {name!r}; fix: name one of {', '.join([*own, *more])}"
                )
        # in one order, so that one graph serves
        return {
            **{n: numbers.get(n, found.get(n)) for n in own},
            **{n: found[n] for n in more if n in found},
        }


def _number(x: torch.Tensor, name: str) -> int:
    """The content of a tensor of one number."""
    if x.numel() != 1:
        raise OnwardError(
            f"{name} is {list(x.shape)}, and the model takes one number; fix: give a scalar"
        )
    return int(x.reshape(()))


def _read(feeds: Mapping[str, Array], types: Mapping[str, Type]) -> dict[str, torch.Tensor]:
    """The arrays of these types that are given, as tensors of them."""
    return {
        name: as_dtype(tensor_of(feeds[name], name), type.dtype, name)
        for name, type in types.items()
        if name in feeds
    }


class _Arrays(Mapping[str, np.ndarray]):
    """Tensors as arrays, each made when it is asked for."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> np.ndarray:
        return array_of(self._tensors[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _write(model: onnx.ModelProto, path: Path) -> None:
    """Writes a model that appears whole or not at all. Raises OnwardError for a file that exists,
    and where the disk fails."""
    large = model.ByteSize() > LARGEST
    beside = path.with_name(f"{path.name}.data")
    for target in (path, beside) if large else (path,):
        if os.path.lexists(target):
            raise OnwardError(f"{str(target)!r} exists; fix: name a new file")
    where = {"save_as_external_data": True, "location": beside.name} if large else {}
    try:
        with StagedFiles(path.parent) as staged:
            onnx.save(model, staged.path / path.name, **where)
            staged.publish()
    except OSError as error:
        raise OnwardError(
            f"cannot write {str(path)!r}: {error.strerror or error}; fix: a folder that can be "
            "written, with free space"
        ) from error


__all__ = ["SessionResult", "TrainingSession"]
