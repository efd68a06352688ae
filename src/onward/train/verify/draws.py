"""Draws of rounding noise: the law over several runs, where one says too little.

Each run has weights that differ a little, by a thousandth in fp32. The root mean square of the
distances counts, and eager's is taken to be at least the model's typical one. A wrong graph is
wrong on every such draw, far above rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from onward.train.verify.law import FP32, Law, distance
from onward.train.verify.report import ComparedTensor

GROSS = 30.0  # times what is allowed: no chance of rounding


class RepeatedDraws:
    """Runs of the same tensors: root mean squares of norms, of eager's distances, of Onward's."""

    def __init__(self, law: Law = FP32) -> None:
        self.law = law
        self.runs = 0
        self.zero: dict[str, float] = {}  # what is noise in the first run, and how large it may be
        self._squares: dict[str, np.ndarray] = {}  # of norm, eager's distance, Onward's distance
        self._floors: dict[str, float] = {}

    def add(
        self,
        ours: Mapping[str, torch.Tensor],
        eager: Mapping[str, torch.Tensor],
        exact: Mapping[str, torch.Tensor],
    ) -> None:
        """One run more. A gradient that is zero by construction, such as a key bias's, which
        softmax does not see, is noise in every engine, and one's noise bounds no other's; where it
        is exactly zero in eager PyTorch there is none, and AdamW would step by what is no zero."""
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
        """The median over the tensors of eager's distance as a share of the tensor's norm."""
        shares = [math.sqrt(e / n) for n, e, _ in self._squares.values() if n > 0.0]
        return float(np.median(shares)) if shares else 0.0

    def row(self, engine: str, name: str) -> ComparedTensor:
        """The law, eager's distance taken to be at least typical: who rounds in another order is
        not held to where eager happens to be exact."""
        norm, eager, ours = np.sqrt(self._squares[name] / self.runs)
        allowed = self.law.times * max(eager, self.typical * norm) + self._floors[name] * norm
        allowed = max(allowed, self.zero.get(name, 0.0))
        return ComparedTensor(engine, name, float(ours), float(allowed), self.runs)

    def is_doubtful(self, name: str) -> bool:
        """Whether more runs could find that a tensor over its bound is right."""
        row = self.row("", name)
        return row.difference <= GROSS * row.allowed  # never where it is NaN


def _zeros(name: str, *engines: Mapping[str, torch.Tensor]) -> bool:
    """Whether a tensor is exactly zero in each of them."""
    return all(name in found and not found[name].any() for found in engines)


def close_weights(
    parameters: Mapping[str, torch.Tensor], seed: int, close: float = FP32.close
) -> dict[str, torch.Tensor]:
    """Weights a little beside the model's; what is zero stays zero."""
    made: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(seed)
    for name, p in parameters.items():
        if p.is_floating_point():
            step = max(close, 2.0 * torch.finfo(p.dtype).eps)
            noise = torch.randn(p.shape, generator=generator).to(p.device, torch.float64)
            made[name] = (p.detach() * (1.0 + step * noise)).to(p.dtype)
    return made
