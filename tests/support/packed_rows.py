"""Calls of attention on packed rows: coordinates of queries and keys, and one call on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from attention_calls import Call


def packed(*sequences: tuple[Iterable[int], Iterable[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates of queries and keys from their positions, sequence by sequence; one number is
    left out after each sequence.
    """
    sides = [
        [(2 * i, place) for i, pair in enumerate(sequences) for place in pair[side]]
        for side in (0, 1)
    ]
    q_at, k_at = (np.array(side, np.int64).reshape(-1, 2) for side in sides)
    return q_at, k_at


def whole(*lengths: int) -> tuple[np.ndarray, np.ndarray]:
    return packed(*[(range(n), range(n)) for n in lengths])


def some(n: int, share: float, start: int = 0) -> list[int]:
    """Positions from `start` on with random holes among them."""
    rng = np.random.default_rng(n)
    return [start + int(i) for i in np.flatnonzero(rng.random(n) < share)]


def hidden(
    rows: tuple[np.ndarray, np.ndarray], hide: Callable[[np.ndarray], np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """The rows with the keys that `hide` selects marked as hidden; their positions mean nothing."""
    queries, keys = rows[0], rows[1].copy()
    off = hide(np.arange(len(keys)))
    keys[off, 0] = -1
    keys[off, 1] = np.random.default_rng(3).integers(-5, 99, len(keys))[off]
    return queries, keys


HOLES = [1, 2, 5, 6, 7, 11]
PACKED: dict[str, tuple[np.ndarray, np.ndarray]] = {
    "one token each": whole(*[1] * 7),
    "one sequence": whole(70),
    "whole": whole(3, 64, 1, 65, 130, 2),
    "begin anywhere": packed(*[(range(s, s + n), range(s, s + n)) for s, n in ((9, 5), (3, 70))]),
    "holes": packed((HOLES, HOLES), (some(90, 0.7), some(90, 0.7)), (some(40, 0.5), range(40))),
    "first tokens ask": packed(*[([0], range(n)) for n in (5, 1, 80)]),
    "last tokens ask": packed(*[([n - 1], range(n)) for n in (5, 1, 80)]),
    "some ask": packed(*[(some(n, 0.2), range(n)) for n in (20, 300, 33)]),
    "before all keys": packed(([0, 1, 4, 5], [4, 6, 7]), (range(70), range(66, 80))),
    "queries without keys": packed((range(3), ()), (range(4), range(4)), (range(2), ())),
    "keys without queries": packed(((), range(3)), (range(4), range(4)), ((), range(2)),
                                   (range(3), range(3)), ((), range(5))),
    "hidden within": hidden(whole(5, 40, 70), lambda i: i % 3 == 1),
    "hidden and holes": hidden(packed((HOLES, HOLES), (HOLES, range(12))), lambda i: i % 4 == 2),
    "hidden at ends": hidden(whole(6, 6, 6), lambda i: i % 6 % 5 == 0),
    "a hidden sequence": hidden(whole(6, 7, 6), lambda i: (i > 5) & (i < 13)),
    "all hidden": hidden(whole(3, 4), lambda i: i >= 0),
    "blocks": whole(300, 1, 521),
    "blocks with holes": packed((some(700, 0.8), some(700, 0.8)), (range(9), range(9))),
    "blocks with hidden": hidden(whole(700, 9), lambda i: (i % 5 == 1) | ((i > 250) & (i < 520))),
    "blocks of the forward": packed((some(1300, 0.1), range(1300)), (range(9), range(9))),
    "blocks of the forward with hidden": hidden(
        packed((some(2500, 0.04), range(2500))), lambda i: (i < 1100) | (i % 3 == 1)),
}  # fmt: skip


@dataclass(frozen=True)
class Rows:
    """One attention call on packed rows."""

    name: str
    causal: bool = False
    ratio: float = 0.0
    H: int = 2
    K: int = 4
    E: int = 4
    biased: bool = False

    def __str__(self) -> str:
        drop = f" drop{self.ratio}" * bool(self.ratio)
        bias = " bias" * self.biased
        return f"{self.name}{' causal' * self.causal}{drop}{bias} {self.H},{self.K},{self.E}"

    @property
    def attrs(self) -> dict[str, Any]:
        return Call(K=self.K, causal=self.causal, ratio=self.ratio, biases=self.biased).attrs

    @property
    def bias(self) -> list[torch.Tensor]:
        """The bias for every position of queries and keys, and some beyond; none unless
        `biased`."""
        q_at, k_at = (at[at[:, 0] >= 0, 1] for at in self.at)
        sizes = (2 + int(at.max(initial=0)) for at in (q_at, k_at))
        g = torch.Generator().manual_seed(5)
        return [torch.randn((1, self.H, *sizes), generator=g)] if self.biased else []

    @property
    def at(self) -> tuple[np.ndarray, np.ndarray]:
        return PACKED[self.name]

    def tensors(self) -> list[torch.Tensor]:
        """dy, q, k, v."""
        q_at, k_at = self.at
        call = Call(B=1, H=self.H, Q=len(q_at), S=len(k_at), K=self.K, E=self.E)
        return call.tensors()[0]
