"""Times of the updates that transformers' Trainer makes."""

from __future__ import annotations

import time
from typing import Any

import transformers


class Clock(transformers.TrainerCallback):
    """Seconds since the beginning of training, after each update."""

    def __init__(self) -> None:
        self.begun, self.steps = 0.0, list[float]()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.begun = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.append(time.perf_counter() - self.begun)
