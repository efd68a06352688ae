"""The two engines that compute a training step, with one interface."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from onward.recipes.options import FinetuneConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def precision(config: FinetuneConfig) -> str:
    """The precision of a run, as in `TrainerOptions.mixed_precision`."""
    return "bf16" if config.bf16 else "fp16" if config.fp16 else "no"


def _finite(norm: float | None) -> float | None:
    return norm if norm is not None and math.isfinite(norm) else None


class StepEngine(Protocol):
    """Trains a model in place. skipped: whether the last update was skipped because a gradient was
    infinite or NaN."""

    skipped: bool

    def update(self, micro_batches: Sequence[torch.Tensor]) -> tuple[float, float | None]:
        """Makes one optimizer update from micro-batches `i64[B,T]`.

        Returns the mean of their losses (nats per token) and the gradient's global 2-norm before
        clipping, None where it is not computed or not finite.
        """
        ...

    def evaluate(self, input_ids: torch.Tensor, labels: torch.Tensor) -> float:
        """The mean loss, without dropout, over labels `i64[B,T]` that are not -100."""
        ...


class TorchEngine:
    """Eager PyTorch, in a typical training loop."""

    def __init__(
        self, model: PreTrainedModel, optimizer: torch.optim.Optimizer, config: FinetuneConfig
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.max_grad_norm, self.low = config.max_grad_norm, _LOW.get(precision(config))
        self.scaler = torch.amp.GradScaler("cpu", enabled=self.low == torch.float16)
        self.skipped = False
        self.parameters = [p for p in model.parameters() if p.requires_grad]

    def update(self, micro_batches: Sequence[torch.Tensor]) -> tuple[float, float | None]:
        self.model.train()
        total = 0.0
        for input_ids in micro_batches:
            with self._precision():
                loss = self.model(input_ids=input_ids, labels=input_ids).loss / len(micro_batches)
            self.scaler.scale(loss).backward()  # type: ignore[union-attr]
            total += float(loss.detach())
        norm = None
        if self.max_grad_norm is not None:
            self.scaler.unscale_(self.optimizer)
            norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm))
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.skipped = self.scaler.get_scale() < before
        self.optimizer.zero_grad(set_to_none=True)
        return total, _finite(norm)

    @torch.no_grad()
    def evaluate(self, input_ids: torch.Tensor, labels: torch.Tensor) -> float:
        self.model.eval()
        with self._precision():
            return float(self.model(input_ids=input_ids, labels=labels).loss)

    def _precision(self) -> torch.autocast:
        return torch.autocast("cpu", self.low or torch.bfloat16, enabled=self.low is not None)


class OnwardEngine:
    """Onward's Trainer: the whole step is one graph, captured at the first update."""

    def __init__(
        self, model: PreTrainedModel, optimizer: torch.optim.Optimizer, config: FinetuneConfig
    ) -> None:
        import onward

        model.train()
        self.trainer: Any = onward.Trainer(
            model,
            optimizer=optimizer,
            options=onward.TrainerOptions(
                gradient_accumulation_steps=config.gradient_accumulation_steps,
                max_grad_norm=config.max_grad_norm,
                seed=config.seed,
                memory_budget=config.memory_budget,
                mixed_precision=precision(config),
            ),
        )
        self.skipped = False

    def update(self, micro_batches: Sequence[torch.Tensor]) -> tuple[float, float | None]:
        total = 0.0
        norm = None
        for input_ids in micro_batches:
            step = self.trainer.train_step(input_ids=input_ids, labels=input_ids)
            total += float(step.loss)
            norm, self.skipped = step.grad_norm, step.skipped
        return total / len(micro_batches), _finite(None if norm is None else float(norm))

    def evaluate(self, input_ids: torch.Tensor, labels: torch.Tensor) -> float:
        return float(self.trainer.eval_step(input_ids=input_ids, labels=labels).loss)

    def export_onnx(self, path: Path, dtype: str) -> None:
        """Writes the trained model for ONNX runtimes."""
        self.trainer.export_onnx(path, dtype=dtype)


ENGINES: dict[str, type[OnwardEngine] | type[TorchEngine]] = {
    "onward": OnwardEngine,
    "torch": TorchEngine,
}


def adamw(model: PreTrainedModel, config: FinetuneConfig) -> torch.optim.AdamW:
    """AdamW that decays matrices only, not vectors (biases and weights of norms)."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.learning_rate or 0.0
    )
