"""Evaluation over many batches: the mean loss, and metrics of outputs and labels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from onward.errors import OnwardError
from onward.fitting.rank_evaluation import LossSums, RankEvaluation
from onward.prepare.batch import Batch, bind_batch
from onward.train import Trainer

PADDING = -100  # in predictions and labels of batches that have other lengths
_SECONDS = " seconds"  # the run time among the metrics, whose names begin with no space


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

    loss: the mean over all samples of the loss of their batch. losses: such a mean of each named
    loss where loss_fn is a `WeightedLosses`; else empty. metrics: by name. samples, batches: how
    many. seconds: that the evaluation took.
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
    get; by default all but the loss and the model's `keys_to_ignore_at_inference`. after_batch:
    called after each batch.

    All ranks of a mesh call it, each with its own batches, such as those of a DistributedSampler,
    and get one result: loss and samples are those of all ranks, and compute_metrics is called on
    rank 0, with the outputs and labels of all. Where all ranks give the same batches, these count
    once, and so does a sample that a DistributedSampler repeats. metrics are then those of
    torchmetrics, which join what all processes have.

    Raises OnwardError where there is no batch, for metrics that return no numbers, and for metrics
    that have seen the batches of one rank alone.
    """
    started = time.perf_counter()
    ranks, streamed = RankEvaluation(trainer), dict(metrics or {})
    for metric in streamed.values():
        metric.reset()
    collected, own = list[_Outputs](), LossSums()
    wants = compute_metrics is not None or bool(streamed)
    names: tuple[str, ...] | None = None
    with ranks.reporting_failures():
        last, repeated = ranks.last_samples(batches)
        for number, given in enumerate(batches, 1):
            batch = bind_batch((given,), {}, trainer.loss_fn is not None)
            ranks.seen(batch)
            if wants and names is None:
                names = _names(trainer, given, fetch)
            result = trainer.eval_step(given, fetch=names or ())
            whole = batch.batch_size
            size = whole - repeated if number == last else whole
            own.add({"loss": result.loss, **result.losses}, size)
            if wants and (size or not whole):
                outputs = [_first(result.outputs[n], whole, size) for n in names or ()]
                labels = _first(_labels(batch), whole, size)
                for metric in streamed.values():
                    metric.update(outputs[0] if len(outputs) == 1 else tuple(outputs), labels)
                if compute_metrics is not None:
                    collected.append(_Outputs.of(outputs, labels))
            after_batch()
    asked = [*streamed, *([] if compute_metrics is None else ["compute_metrics"])]
    sums = ranks.joined(own, asked)
    if not sums.batches:
        raise OnwardError("there is no batch to evaluate; fix: give an iterable of batches")
    numbers = ranks.computed(streamed)
    every = ranks.collected(collected) if compute_metrics is not None else []

    def made() -> dict[str, float]:
        computed = {} if compute_metrics is None else compute_metrics(_Outputs.joined(every))
        found = {name: _number(name, value) for name, value in {**numbers, **computed}.items()}
        return {_SECONDS: time.perf_counter() - started, **found}

    found, losses = ranks.of_first(made), sums.means()
    return Evaluation(
        loss=losses.pop("loss"),
        losses=losses,
        seconds=found.pop(_SECONDS),
        metrics=found,
        samples=sums.samples,
        batches=sums.batches,
    )


class _Outputs(NamedTuple):
    """The outputs of a batch, and its labels where it has a tensor of them, in CPU memory."""

    outputs: tuple[np.ndarray, ...]
    labels: np.ndarray | None

    @classmethod
    def of(cls, outputs: Sequence[torch.Tensor], labels: Any) -> _Outputs:
        has_labels = isinstance(labels, torch.Tensor)
        return cls(tuple(map(_array, outputs)), _array(labels) if has_labels else None)

    @staticmethod
    def joined(parts: Sequence[_Outputs]) -> Predictions:
        """The outputs and labels of all batches."""
        outputs = [_joined(arrays) for arrays in zip(*(p.outputs for p in parts), strict=True)]
        held = [p.labels for p in parts if p.labels is not None]
        labels = _joined(held) if held else None
        return Predictions(outputs[0] if len(outputs) == 1 else tuple(outputs), labels)


def _first(x: Any, whole: int, size: int) -> Any:
    """The first samples, so many, of a tensor that has them all; anything else as it is."""
    has_rows = size < whole and isinstance(x, torch.Tensor) and x.dim() and len(x) == whole
    return x[:size] if has_rows else x


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
