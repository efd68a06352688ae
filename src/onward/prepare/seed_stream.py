"""Seed stream: one seed per accumulation window, drawn from no generator that other code reads.

A window's seed is a function of torch's seed and of the window's number. torch's seed is the number
given to `torch.manual_seed`; draws do not change it, and a saved random state contains it. So a
step moves no generator, and other draws do not change its dropout masks.
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
    """Splits 8 bytes into a seed, i64[2]: two words of 32 bits, on the CPU whatever the default
    device."""
    return torch.from_numpy(np.array(struct.unpack("<2I", digest), np.int64))


class SeedStream:
    """Seeds by window number. seed: of a generator of the stream's own, used instead of torch's
    seed; None: torch's seed counts."""

    def __init__(self, seed: int | None) -> None:
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)
        self._key = 0 if seed is None else seed
        self._known: tuple[int, ...] = ()  # values of torch's seed for which `_key` holds

    def save_point(self) -> torch.Tensor | None:
        """The state of the stream's own generator, for `go_back`; None where it has none."""
        return None if self._generator is None else self._generator.get_state()

    def go_back(self, point: torch.Tensor | None) -> None:
        """Puts the stream's own generator back to a `save_point`."""
        if self._generator is not None and point is not None:
            self._generator.set_state(point)

    def seed(self, number: tuple[int, int]) -> torch.Tensor:
        """The seed of the window with this number, i64[2]: two words of 32 bits."""
        if self._generator is not None:
            return torch.randint(
                0, 2**32, (2,), generator=self._generator, dtype=torch.int64, device="cpu"
            )
        return self.aside(number, 0)

    def aside(self, number: tuple[int, int], place: int) -> torch.Tensor:
        """A further seed of the window with this number, i64[2], such as an evaluation's, told
        apart by `place`. It moves no generator."""
        packed = struct.pack("<4Q", self._now(), *number, place)
        return seed_words(blake2b(packed, digest_size=8).digest())

    def _now(self) -> int:
        """The key of seeds: torch's seed, or the restored key as long as torch's seed is as it was
        at the restore."""
        seed = torch.initial_seed() & WORD
        if self._generator is None and seed not in self._known:
            self._key, self._known = seed, (seed,)
        return self._key

    def state(self) -> dict[str, Any]:
        """The stream's entries of `Trainer.state_dict`."""
        generator = None if self._generator is None else self._generator.get_state()
        key = self._now()
        return {"generator": generator, "stream": [key, torch.initial_seed() & WORD]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores a checked state. States of older versions have no `stream`."""
        if state["generator"] is not None:
            self._generator = torch.Generator()
            self._generator.set_state(state["generator"])
        if "stream" in state:
            self._key, before = state["stream"]
            self._known = (before, torch.initial_seed() & WORD)


__all__ = ["WORD", "SeedStream", "seed_words"]
