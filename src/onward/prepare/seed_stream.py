"""Seed stream: the seeds of a Trainer's windows, drawn from no generator that others read.

A window's seed is a function of torch's seed and of the window's number. torch's seed is what
`torch.manual_seed` was given; draws leave it alone, and a random state that is saved and restored
has it within. So a step moves no generator, and what else draws does not change its masks.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

WORD = 2**64 - 1  # seeds of torch are below 2^64


def seed_words(digest: bytes) -> torch.Tensor:
    """The seed that 8 bytes are: two words of 32 bits, i64[2], on the CPU whatever the default."""
    return torch.from_numpy(np.array(struct.unpack("<2I", digest), np.int64))


class SeedStream:
    """Seeds by number. seed: of a generator of its own, in the place of torch's seed, which is
    then the one that counts."""

    def __init__(self, seed: int | None) -> None:
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)
        self._key = 0 if seed is None else seed
        self._known: tuple[int, ...] = ()  # torch's seeds for which the key is the right one

    def save_point(self) -> torch.Tensor | None:
        """What `go_back` takes."""
        return None if self._generator is None else self._generator.get_state()

    def go_back(self, point: torch.Tensor | None) -> None:
        """Forgets what was drawn since."""
        if self._generator is not None and point is not None:
            self._generator.set_state(point)

    def seed(self, number: tuple[int, int]) -> torch.Tensor:
        """Two words of 32 bits, i64[2], of the window with this number."""
        if self._generator is not None:
            return torch.randint(
                0, 2**32, (2,), generator=self._generator, dtype=torch.int64, device="cpu"
            )
        return self.aside(number, 0)

    def aside(self, number: tuple[int, int], place: int) -> torch.Tensor:
        """A seed in that place beside the window's, as the one of an evaluation: i64[2]. Nothing is
        drawn for it."""
        packed = struct.pack("<4Q", self._now(), *number, place)
        return seed_words(blake2b(packed, digest_size=8).digest())

    def _now(self) -> int:
        """The key: torch's seed, or the one that was restored while torch had the seed that it
        has."""
        seed = torch.initial_seed() & WORD
        if self._generator is None and seed not in self._known:
            self._key, self._known = seed, (seed,)
        return self._key

    def state(self) -> dict[str, Any]:
        """For `Trainer.state_dict`."""
        generator = None if self._generator is None else self._generator.get_state()
        key = self._now()
        return {"generator": generator, "stream": [key, torch.initial_seed() & WORD]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state that was checked; one of an older version has no stream."""
        if state["generator"] is not None:
            self._generator = torch.Generator()
            self._generator.set_state(state["generator"])
        if "stream" in state:
            self._key, before = state["stream"]
            self._known = (before, torch.initial_seed() & WORD)


__all__ = ["WORD", "SeedStream", "seed_words"]
