"""Window: how far the accumulation window that is open has come, and what it draws from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


class Window:
    """Micro-batches of one update. They share a seed; samples are numbered across them.

    micro_steps: done in the present window, of `size`. samples: seen in it. steps: micro-batches
    of the session, whatever became of them. seed: i64[2], two words of 32 bits.
    """

    def __init__(self, size: int, seed: int | None) -> None:
        self.size = size
        self.micro_steps = 0
        self.samples = 0
        self.steps = 0
        self.seed = torch.zeros(2, dtype=torch.int64)
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)

    @property
    def is_first(self) -> bool:
        """Whether the next micro-batch opens a window."""
        return self.micro_steps == 0

    @property
    def is_last(self) -> bool:
        """Whether the next micro-batch ends the window with an update."""
        return self.micro_steps >= self.size - 1

    @property
    def weight(self) -> float:
        """Of a micro-batch's loss in the window's: that is their mean."""
        return 1.0 / self.size

    @property
    def offset(self) -> int:
        """The number of the next micro-batch's first sample."""
        return 0 if self.is_first else self.samples

    def advance(self, batch_size: int) -> None:
        """One micro-batch more."""
        self.samples = self.offset + batch_size
        self.micro_steps = 0 if self.is_last else self.micro_steps + 1
        self.steps += 1

    @contextmanager
    def seed_drawn(self) -> Iterator[torch.Tensor]:
        """The seed; a window's first step draws one, which a step that fails gives back."""
        if not self.is_first:
            yield self.seed
            return
        generator = self._generator or torch.default_generator
        before, seed, steps = generator.get_state(), self.seed, self.steps
        try:
            self.seed = torch.randint(0, 2**32, (2,), generator=generator, dtype=torch.int64)
            yield self.seed
        except BaseException:
            if self.steps == steps:
                generator.set_state(before)
                self.seed = seed
            raise

    def state(self) -> dict[str, Any]:
        """For `Trainer.state_dict`."""
        generator = None if self._generator is None else self._generator.get_state()
        return {
            "gradient_accumulation_steps": self.size,
            "micro_steps": self.micro_steps,
            "samples": self.samples,
            "seed": self.seed.clone(),
            "generator": generator,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state that was checked."""
        self.micro_steps, self.samples = state["micro_steps"], state["samples"]
        self.seed = state["seed"].clone()
        if state["generator"] is not None:
            self._generator = torch.Generator()
            self._generator.set_state(state["generator"])
