"""The two ways to compute a training step, behind one interface."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from onward.recipes.options import FinetuneConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class StepEngine(Protocol):
    """Trains a model in place."""

    def update(self, micro_batches: Sequence[torch.Tensor]) -> tuple[float, float | None]:
        """One optimizer update from micro-batches `i64[B,T]`.

        Gives the mean of their losses (nats per token) and the gradient's global 2-norm before
        clipping, None where it was not computed.
        """
        ...

    def evaluate(self, input_ids: torch.Tensor, labels: torch.Tensor) -> float:
        """Mean loss over the labels `i64[B,T]` that are not -100, dropout off."""
        ...


class TorchEngine:
    """Eager PyTorch, written as its users write it."""

    def __init__(
        self, model: PreTrainedModel, optimizer: torch.optim.Optimizer, config: FinetuneConfig
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.max_grad_norm, self.bf16 = config.max_grad_norm, config.bf16
        self.parameters = [p for p in model.parameters() if p.requires_grad]

    def update(self, micro_batches: Sequence[torch.Tensor]) -> tuple[float, float | None]:
        self.model.train()
        total = 0.0
        for input_ids in micro_batches:
            with self._precision():
                loss = self.model(input_ids=input_ids, labels=input_ids).loss / len(micro_batches)
            loss.backward()
            total += float(loss.detach())
        norm = None
        if self.max_grad_norm is not None:
            norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total, norm

    @torch.no_grad()
    def evaluate(self, input_ids: torch.Tensor, labels: torch.Tensor) -> float:
        self.model.eval()
        with self._precision():
            return float(self.model(input_ids=input_ids, labels=labels).loss)

    def _precision(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.bf16)


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
                mixed_precision="bf16" if config.bf16 else "no",
            ),
        )

    def update(self, micro_batches: Sequence[torch.Tensor]) -> tuple[float, float | None]:
        total = 0.0
        norm = None
        for input_ids in micro_batches:
            step = self.trainer.train_step(input_ids=input_ids, labels=input_ids)
            total += float(step.loss)
            norm = step.grad_norm
        return total / len(micro_batches), None if norm is None else float(norm)

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
    """AdamW that decays matrices only: not biases, not the weights of norms (both are vectors)."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.learning_rate or 0.0
    )
