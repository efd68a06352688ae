"""Verification of a session: predictions and gradients beside stock onnxruntime.

Nothing of the reference is Onward's: the model as it was given runs in onnxruntime, and gradients
are compared with central differences of its loss along directions of each weight:

    along      the gradient g itself
    half       a random half of g's numbers: a part of g that is wrong shows
    beside     numbers of which g is zero: a part of the gradient that is missing shows

The loss of four steps along a direction gives two differences, of a step and of half of it; their
distance says how far rounding and curvature reach, and Richardson's rule is taken for the value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from onward.capture import CaptureRequest
from onward.compile import Compiler
from onward.errors import OnwardError
from onward.graph.names import named_by, some
from onward.journal import Journal
from onward.kernels import host
from onward.onnx_models import OnnxModule
from onward.prepare.batch import bind_batch
from onward.prepare.graphs import Graphs
from onward.train.verify import ComparedTensor, Verification, without_dropout
from onward.train.verify.comparison import against_onnxruntime
from onward.train.verify.engines import Engines
from onward.train.verify.graphs import LOSS, gradient
from onward.training_session.stock_model import StockModel, Weights

PREDICTED = "stock onnxruntime (the model's outputs)"
SLOPE = "central differences of onnxruntime's loss"
CLOSE = 1e-5  # of an output's norm: both engines sum in orders of their own
ROUNDED = 1e-6  # the relative change of weights that shows what rounding does to an output
CHANGED = 3e-3  # the relative change of the loss by a step of a difference
NOISE = 4e-7  # of the loss: the rounding of two of them
SURE = 0.01  # of a gradient's norm: a difference that is known so well is good enough
LOOSE = 0.1  # of a gradient's norm: a difference that is not even known so well says nothing
WITHIN = 1e-3  # of a gradient's norm, beside what the difference itself is not sure of


def verify_session(
    module: OnnxModule,
    tensors: Mapping[str, torch.Tensor | int],
    predicted: Mapping[str, np.ndarray],
    patterns: Sequence[str] | None = None,
    disable: tuple[str, ...] = (),
) -> Verification:
    """Compares a session on one batch with stock onnxruntime. tensors: the batch, by name.
    predicted: the session's own outputs. patterns: of the weights whose gradients are compared with
    differences; None: all that are trained. Raises OnwardError for a pattern that names none."""
    types = module.program.source.inputs
    feeds = {
        name: x.detach().cpu().numpy()
        if isinstance(x, torch.Tensor)
        else np.full(types[name].shape, x, types[name].dtype.numpy())  # type: ignore[arg-type]
        for name, x in tensors.items()
    }
    stock, result = StockModel(module, feeds), Verification()
    result.rows += _predictions(stock, predicted)
    if module.program.loss is None:
        return result
    batch = bind_batch((dict(tensors),), {}, has_loss=False)
    compiler = Compiler(host("cpu"), disable, Journal(quiet=True))
    captured = compiler.capture(CaptureRequest(module, batch.args, batch.kwargs, regions=False))
    paths = {id(p): path for path, p in module.named_parameters()}
    wrt = {
        name: paths[id(p)]
        for name, p in captured.parameters.items()
        if p.requires_grad and name in captured.reached
    }
    chosen, idle = _chosen(wrt, [path for path, _ in module.named_parameters()], patterns)
    engines = Engines(compiler, captured, batch, module, None, list(wrt))
    graphs = Graphs(compiler, captured)
    padded = compiler.gradients(graphs.forward, wrt=list(wrt), zeros=captured.reached)
    forms = [padded]
    packed = graphs.packed(graphs.forward.signature.requested((), None))
    if packed is not None:
        forms.append(compiler.gradients(packed, wrt=list(wrt), zeros=captured.reached))
    found = [engines.onward(without_dropout(graph)) for graph in forms]
    weights = stock.weights
    loss = stock.loss(weights)
    result.rows += [_number(LOSS, float(run[LOSS]), loss) for run in found]
    unsure: list[str] = []
    for name in chosen:
        gradients = [run[gradient(name)].double().numpy() for run in found]
        row = _Slopes(stock, weights, wrt[name], loss).row(gradients)
        if row is None:
            unsure.append(wrt[name])
        else:
            result.rows.append(row)
    if idle:
        result.notes.append(f"not trained, or not what the loss depends on: {some(idle)}")
    if unsure:
        result.notes.append(f"differences are too uncertain to judge {some(unsure)}")
    result.rows += against_onnxruntime(engines, padded)
    return result


def _chosen(
    wrt: Mapping[str, str], paths: Sequence[str], patterns: Sequence[str] | None
) -> tuple[list[str], list[str]]:
    """The graph inputs whose gradients are compared with differences, of those differentiated; and
    the paths of weights that patterns name, but that the loss does not depend on or that are not
    trained."""
    if patterns is None:
        return list(wrt), []
    found: list[str] = []
    idle: list[str] = []
    for pattern in patterns:
        named = set(named_by(pattern, paths))
        if not named:
            raise OnwardError(
                f"no weight is named {pattern!r}; fix: names or patterns such as "
                f"{', '.join(list(wrt.values())[:3])}"
            )
        found += [n for n, path in wrt.items() if path in named and n not in found]
        others = set(paths) - set(wrt.values())
        idle += [path for path in paths if path in others & named]
    return found, idle


# ---- outputs


def _predictions(
    stock: StockModel, predicted: Mapping[str, np.ndarray]
) -> Iterator[ComparedTensor]:
    """Compares each output. What rounding may do to one is seen from weights that are changed by
    less than a rounding's size."""
    theirs, generator = stock.outputs(stock.weights), np.random.default_rng(0)
    moved = {
        path: (w * (1 + ROUNDED * generator.standard_normal(w.shape))).astype(w.dtype)
        for path, w in stock.weights.items()
    }
    close = stock.outputs(moved)
    for name, ours in predicted.items():
        exact = theirs[name]
        allowed = 2 * _distance(close[name], exact)
        if np.issubdtype(exact.dtype, np.floating):
            size = float(np.linalg.norm(np.nan_to_num(exact, posinf=0.0, neginf=0.0)))
            allowed = max(allowed, CLOSE * size)
        yield ComparedTensor(PREDICTED, name, _distance(ours, exact), allowed)


def _distance(found: np.ndarray, exact: np.ndarray) -> float:
    """The norm of the difference, or the count of other numbers where these are whole; NaN for
    another shape, and where only one is finite."""
    if found.shape != exact.shape:
        return math.nan
    if not np.issubdtype(exact.dtype, np.floating):
        return float(np.sum(found != exact))
    same = (found == exact) | (np.isnan(found) & np.isnan(exact))
    return float(np.linalg.norm(np.where(same, 0.0, found.astype(np.float64) - exact)))


def _number(name: str, found: float, exact: float) -> ComparedTensor:
    return ComparedTensor(PREDICTED, name, abs(found - exact), 2 * CLOSE * abs(exact) + 1e-7)


# ---- gradients


@dataclass(frozen=True)
class _Difference:
    """The slope of the loss along a direction, and how far it may be from the true one."""

    slope: float
    unsure: float


@dataclass(frozen=True)
class _Slopes:
    """Slopes of onnxruntime's loss by the weight at `path`. loss: at the weights of now."""

    stock: StockModel
    weights: Weights
    path: str
    loss: float

    def row(self, gradients: Sequence[np.ndarray]) -> ComparedTensor | None:
        """Compares gradients, the forms of one, along each direction; the worst of them. None where
        no direction says anything."""
        size = float(np.linalg.norm(gradients[0]))
        found: list[ComparedTensor] = []
        for direction in _directions(gradients[0]):
            slopes = [float(np.sum(g * direction)) for g in gradients]
            found += self._along(direction, slopes, size)
        return max(found, key=_share, default=None)

    def _along(
        self, direction: np.ndarray, slopes: Sequence[float], size: float
    ) -> list[ComparedTensor]:
        """A row for each slope along a direction; none where differences say nothing. A slope that
        differs is compared with differences of other steps too, since a step may cross kinks: one
        that is wrong differs from all. size: the norm of the gradient."""
        sharp: list[list[ComparedTensor]] = []
        blunt: list[tuple[float, list[ComparedTensor]]] = []
        for step in self._steps(slopes[0]):
            difference = self._at(direction, step)
            sure = 3 * difference.unsure
            rows = [
                ComparedTensor(
                    SLOPE, f"grad.{self.path}", abs(slope - difference.slope),
                    sure + WITHIN * size, norm=size,
                )
                for slope in slopes
            ]  # fmt: skip
            if difference.unsure <= SURE * size:
                sharp.append(rows)
                if all(row.ok for row in rows):
                    break
            elif sure <= LOOSE * size or not size:
                blunt.append((sure, rows))
        if sharp:
            return min(sharp, key=lambda rows: max(map(_share, rows)))
        return min(blunt, key=lambda each: each[0])[1] if blunt else []

    def _steps(self, slope: float) -> Iterator[float]:
        """The lengths of steps along a direction, that at which the loss changes by a known share
        first. slope: the expected one."""
        weight = self.weights[self.path]
        largest = 0.1 * max(float(np.linalg.norm(weight)), math.sqrt(weight.size))
        first = min(largest, CHANGED * max(abs(self.loss), 1e-3) / max(abs(slope), 1e-30))
        yield from (first, first / 4, min(largest, 4 * first), first / 16)

    def _at(self, direction: np.ndarray, step: float) -> _Difference:
        """The slope by Richardson's rule from steps of that length and of half of it."""
        whole, half = (self._central(direction, h) for h in (step, step / 2))
        noise = NOISE * max(abs(self.loss), 1e-7) / step
        return _Difference((4 * half - whole) / 3, abs(whole - half) + noise)

    def _central(self, direction: np.ndarray, step: float) -> float:
        weight = self.weights[self.path]
        ahead, behind = ((weight + s * direction).astype(weight.dtype) for s in (step, -step))
        there, back = (self.stock.loss({**self.weights, self.path: w}) for w in (ahead, behind))
        return (there - back) / (2 * step)


def _share(row: ComparedTensor) -> float:
    return row.difference / (row.allowed or 1e-30)


def _directions(g: np.ndarray) -> Iterator[np.ndarray]:
    """Directions of norm 1 along which a gradient is compared."""
    generator = np.random.default_rng(0)
    half = g * (generator.random(g.shape) < 0.5)
    beside = generator.standard_normal(g.shape) * (g == 0)
    for direction in (g, half, beside):
        size = float(np.linalg.norm(direction))
        if size:
            yield direction / size


__all__ = ["verify_session"]
