"""Draws of rounding noise: the law applied to several runs, where a single run is inconclusive.

Each run has slightly different weights, by a thousandth in fp32. Root mean squares of the distances
are compared, and eager's is taken to be at least the model's typical one. A wrong graph is wrong on
every draw, by far more than rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from onward.train.verify.law import FP32, Law, distance
from onward.train.verify.report import ComparedTensor

GROSS = 30.0  # times the allowed distance: more than rounding can explain


class RepeatedDraws:
    """Several runs of the same tensors, summarized as root mean squares of the norm, of eager's
    distance and of Onward's."""

    def __init__(self, law: Law = FP32) -> None:
        self.law = law
        self.runs = 0
        # tensors that are only rounding noise in the first run, with the norm allowed
        self.zero: dict[str, float] = {}
        # sums of squares of norm, eager's distance, Onward's distance
        self._squares: dict[str, np.ndarray] = {}
        self._floors: dict[str, float] = {}

    def add(
        self,
        ours: Mapping[str, torch.Tensor],
        eager: Mapping[str, torch.Tensor],
        exact: Mapping[str, torch.Tensor],
    ) -> None:
        """Adds one run. A gradient that is zero in exact arithmetic, such as that of a key's bias
        before softmax, is pure noise in every engine, so that eager's noise is no bound for
        Onward's: it gets a bound of its own. One that is exactly zero in eager PyTorch gets none:
        AdamW would turn noise in it into full steps."""
        norms = {n: float(t.norm()) for n, t in exact.items()}
        if not self.runs:
            whole = math.hypot(*norms.values())
            least = FP32.tensor * FP32.roundoff * whole
            noise = [
                n for n, norm in norms.items() if norm <= least and not _zeros(n, exact, eager)
            ]
            self.zero = dict.fromkeys(noise, self.law.roundoff * whole)
        self.runs += 1
        for name in exact.keys() & ours.keys() & eager.keys():
            truth = exact[name]
            found = norms[name], distance(eager[name], truth), distance(ours[name], truth)
            self._floors[name] = self.law.floor(truth)
            self._squares[name] = self._squares.get(name, 0.0) + np.square(found)

    @property
    def typical(self) -> float:
        """The median, over the tensors, of eager's distance relative to the tensor's norm."""
        shares = [math.sqrt(e / n) for n, e, _ in self._squares.values() if n > 0.0]
        return float(np.median(shares)) if shares else 0.0

    def row(self, engine: str, name: str) -> ComparedTensor:
        """Applies the law with eager's distance taken to be at least typical, so that Onward need
        not match a result of eager's that is exact by chance."""
        norm, eager, ours = (float(x) for x in np.sqrt(self._squares[name] / self.runs))
        allowed = self.law.times * max(eager, self.typical * norm) + self._floors[name] * norm
        allowed = max(allowed, self.zero.get(name, 0.0))
        return ComparedTensor(engine, name, ours, float(allowed), self.runs, eager, norm)

    def is_doubtful(self, name: str) -> bool:
        """Whether a tensor over its bound is close enough that more runs could pass it."""
        row = self.row("", name)
        return row.difference <= GROSS * row.allowed  # False where it is NaN


def _zeros(name: str, *engines: Mapping[str, torch.Tensor]) -> bool:
    """Whether a tensor is exactly zero in every engine."""
    return all(name in found and not found[name].any() for found in engines)


def close_weights(
    parameters: Mapping[str, torch.Tensor], seed: int, close: float = FP32.close
) -> dict[str, torch.Tensor]:
    """Perturbs the model's weights by a relative step of about `close`; zeros stay zero."""
    made: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(seed)
    for name, p in parameters.items():
        if p.is_floating_point():
            step = max(close, 2.0 * torch.finfo(p.dtype).eps)
            noise = torch.randn(p.shape, generator=generator).to(p.device, torch.float64)
            made[name] = (p.detach() * (1.0 + step * noise)).to(p.dtype)
    return made
