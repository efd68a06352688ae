"""Evaluation over many batches: the mean loss, and metrics of outputs and labels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from onward.errors import OnwardError
from onward.prepare.batch import Batch, bind_batch
from onward.train import Trainer

PADDING = -100  # in predictions and labels of batches that have other lengths


class Predictions(NamedTuple):
    """The outputs and labels of all batches, as a metrics function of transformers takes them.

    predictions: an array `[N, ...]`, or a tuple of them where the model has several outputs.
    label_ids: an array `[N, ...]`; None where batches have no labels. Shorter ones of a batch are
    padded with -100 to the longest.
    """

    predictions: Any
    label_ids: Any


class Metric(Protocol):
    """A metric that sums up batch by batch, as those of torchmetrics and torcheval."""

    def update(self, predictions: Any, labels: Any, /) -> Any: ...

    def compute(self) -> Any: ...

    def reset(self) -> Any: ...


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    loss: the mean over all samples of the loss of their batch. losses: the same of each loss of
    `WeightedLosses`. metrics: by name. samples, batches: their numbers. seconds: of the whole.
    """

    loss: float
    losses: dict[str, float]
    metrics: dict[str, float]
    samples: int
    batches: int
    seconds: float

    def named(self, prefix: str = "eval_") -> dict[str, float]:
        """All numbers under the names that transformers' Trainer gives them."""
        speed = {
            "runtime": self.seconds,
            "samples_per_second": self.samples / self.seconds,
            "steps_per_second": self.batches / self.seconds,
        }
        found = {"loss": self.loss, **self.losses, **self.metrics, **speed}
        return {name if name.startswith(prefix) else prefix + name: v for name, v in found.items()}


def evaluate(
    trainer: Trainer,
    batches: Iterable[Any],
    *,
    compute_metrics: Callable[[Any], Mapping[str, float]] | None = None,
    metrics: Mapping[str, Metric] | None = None,
    fetch: str | Sequence[str] | None = None,
    after_batch: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Evaluates a model over batches, in evaluation mode, without updates.

    batches: each as `train_step` takes it, such as a DataLoader. The loss is the mean over samples,
    as transformers' Trainer computes it: batches of different sizes count by their size.
    compute_metrics: a function of `Predictions`, of all batches at once, which returns numbers by
    name; the outputs of all batches are kept in memory for it. metrics: objects that take each
    batch as `update(predictions, labels)`, and that are reset first. fetch: outputs that metrics
    get; by default all but the loss and the model's `keys_to_ignore_at_inference`. after_batch: is
    called behind each batch.

    Raises OnwardError where there is no batch, and for metrics that return no numbers.
    """
    started = time.perf_counter()
    collected, streamed = _Collected(), dict(metrics or {})
    for metric in streamed.values():
        metric.reset()
    means, count = _Means(), 0
    wants = compute_metrics is not None or bool(streamed)
    names: tuple[str, ...] | None = None
    for given in batches:
        count += 1
        batch = bind_batch((given,), {}, trainer.loss_fn is not None)
        if wants and names is None:
            names = _names(trainer, given, fetch)
        result = trainer.eval_step(given, fetch=names or ())
        means.add({"loss": result.loss, **result.losses}, batch.batch_size)
        if wants:
            outputs = tuple(result.outputs[name] for name in names or ())
            found = outputs[0] if len(outputs) == 1 else outputs
            labels = _labels(batch)
            for metric in streamed.values():
                metric.update(found, labels)
            if compute_metrics is not None:
                collected.add(outputs, labels)
        after_batch()
    if not count:
        raise OnwardError("there is no batch to evaluate; fix: give an iterable of batches")
    numbers = {name: metric.compute() for name, metric in streamed.items()}
    if compute_metrics is not None:
        numbers |= compute_metrics(collected.joined())
    losses = means.found()
    return Evaluation(
        loss=losses.pop("loss"),
        losses=losses,
        metrics={name: _number(name, value) for name, value in numbers.items()},
        samples=means.samples,
        batches=count,
        seconds=time.perf_counter() - started,
    )


@dataclass
class _Means:
    """Means over samples of what batches have as a mean. samples: so far."""

    samples: int = 0
    _sums: dict[str, float] = field(default_factory=dict)

    def add(self, losses: Mapping[str, torch.Tensor], samples: int) -> None:
        for name, loss in losses.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(loss) * samples
        self.samples += samples

    def found(self) -> dict[str, float]:
        return {name: total / max(self.samples, 1) for name, total in self._sums.items()}


class _Collected:
    """The outputs and labels of batches, in CPU memory."""

    def __init__(self) -> None:
        self._outputs: list[tuple[np.ndarray, ...]] = []
        self._labels: list[np.ndarray] = []

    def add(self, outputs: Sequence[torch.Tensor], labels: Any) -> None:
        self._outputs.append(tuple(map(_array, outputs)))
        if isinstance(labels, torch.Tensor):
            self._labels.append(_array(labels))

    def joined(self) -> Predictions:
        outputs = [_joined(arrays) for arrays in zip(*self._outputs, strict=True)]
        labels = _joined(self._labels) if self._labels else None
        return Predictions(outputs[0] if len(outputs) == 1 else tuple(outputs), labels)


def _array(tensor: torch.Tensor) -> np.ndarray:
    low = tensor.dtype == torch.bfloat16  # which NumPy does not have
    return (tensor.float() if low else tensor).detach().cpu().numpy()


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays `[n_i, ...]` one below the other, padded to the largest in the other dims."""
    if arrays[0].ndim == 0:
        return np.stack(arrays)
    if len({a.shape[1:] for a in arrays}) == 1:
        return np.concatenate(arrays)
    most = [max(sizes) for sizes in zip(*(a.shape[1:] for a in arrays), strict=True)]
    padded = np.full((sum(map(len, arrays)), *most), PADDING, arrays[0].dtype)
    start = 0
    for a in arrays:
        padded[(slice(start, start + len(a)), *map(slice, a.shape[1:]))] = a
        start += len(a)
    return padded


def _labels(batch: Batch) -> Any:
    """The labels of a batch: the loss function's target, or the first input that is named so."""
    named = batch.named()
    return next((named[n] for n in ("labels", "label", "targets", "target") if n in named), None)


def _names(trainer: Trainer, given: Any, fetch: str | Sequence[str] | None) -> tuple[str, ...]:
    """The outputs that metrics get."""
    if fetch is not None:
        return (fetch,) if isinstance(fetch, str) else tuple(fetch)
    config = getattr(trainer.model, "config", None)
    left = ["loss", *(getattr(config, "keys_to_ignore_at_inference", None) or ())]
    nested = tuple(f"{name}_" for name in left)  # past_key_values_0, ...
    names = trainer.output_names(given)
    return tuple(n for n in names if n not in left and not n.startswith(nested))


def _number(name: str, value: Any) -> float:
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)) and value.ndim == 0:
        value = value.item()
    if not isinstance(value, Real):
        raise OnwardError(f"the metric {name!r} is {value!r}; fix: return a number")
    return float(value)


__all__ = ["Evaluation", "Metric", "Predictions", "evaluate"]
