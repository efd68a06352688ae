"""The best weights of a run by its evaluations, and when a run without better ones ends."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from onward.recipes.options import FinetuneConfig, InputError
from onward.recipes.score_numbers import score_number

LESS_IS_BETTER = ("loss", "perplexity", "mse")  # the ends of such names


class BestWeights:
    """What the evaluations of a run have found. Its state is in the run's checkpoints.

    step: the update after which the best score was found; None before any evaluation. value: that
    score. checkpoint: the name of the folder with its weights. waited: evaluations since. stopped:
    whether the run has ended early.
    """

    def __init__(self, config: FinetuneConfig) -> None:
        name = config.metric_for_best_model or "loss"
        self.metric = name if name.startswith("eval_") else f"eval_{name}"
        better = config.greater_is_better
        self.greater = not name.endswith(LESS_IS_BETTER) if better is None else better
        self.is_kept, self.patience = config.load_best_model_at_end, config.early_stopping_patience
        self.step: int | None = None
        self.value = 0.0
        self.checkpoint = ""
        self.waited = 0
        self.stopped = False

    @property
    def is_asked(self) -> bool:
        """Whether the options ask for the best evaluation."""
        return self.is_kept or self.patience is not None

    def judge(self, step: int, loss: float, scores: Mapping[str, float], checkpoint: str) -> bool:
        """Compares an evaluation after update `step` with the best so far. checkpoint: the name of
        its checkpoint. Returns whether its weights are to be saved; `stopped` says whether the run
        ends. Raises InputError for a metric that the evaluation does not compute."""
        if not self.is_asked:
            return False
        found = {"eval_loss": loss, **{f"eval_{name}": value for name, value in scores.items()}}
        if self.metric not in found:
            raise InputError(
                f"the evaluation computes no {self.metric}",
                "in --metric_for_best_model",
                f"name one of {', '.join(found)}",
            )
        value = found[self.metric]
        if self.step is None or (value > self.value if self.greater else value < self.value):
            self.step, self.value, self.waited = step, value, 0
            self.checkpoint = checkpoint
            return self.is_kept
        self.waited += 1
        self.stopped = self.patience is not None and self.waited >= self.patience
        return False

    def tell(self, engine: str, step: int) -> None:
        """Says on stderr why the run ends after update number `step`, and which weights it ends
        with."""
        best = f"{self.metric} {score_number(self.value)} after update {self.step}"
        if self.stopped:
            text = f"{self.waited} evaluations without a better one end the run after update {step}"
            print(f"{engine}: {text}; the best was {best}", file=sys.stderr, flush=True)
        if self.is_kept and self.step is not None:
            print(f"{engine}: takes the best weights: {best}", file=sys.stderr, flush=True)

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {
            "step": self.step, "value": self.value, "checkpoint": self.checkpoint,
            "waited": self.waited, "stopped": self.stopped,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a saved state."""
        self.step, self.value = state["step"], float(state["value"])
        self.checkpoint = str(state["checkpoint"])
        self.waited, self.stopped = int(state["waited"]), bool(state["stopped"])


__all__ = ["LESS_IS_BETTER", "BestWeights"]
