"""StepResult: the loss and the outputs of one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

import torch

from onward.prepare.report import tensor_text


@dataclass(frozen=True)
class StepResult:
    """The result of one step: detached copies; no device is synchronised until `float()`.

    loss: f32[], of this micro-batch. grad_norm: f32[] before clipping; None where gradients are not
    clipped or no update was due. lr: of the first group; NaN if it has none. skipped: whether the
    update was left out because a gradient was infinite or NaN, or because its loss was a spike
    (`TrainerOptions.loss_spikes`). outputs: those named by `fetch=`. losses: f32[] each, those that
    `WeightedLosses` sums, without their weights.
    updated: whether the weights changed. window_loss: f32[], of the accumulation window that this
    step ended, a mean like that of its gradients; None where the window is open.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor | None = None
    lr: float = 0.0
    skipped: bool = False
    updated: bool = True
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    window_loss: torch.Tensor | None = None
    losses: dict[str, torch.Tensor] = field(default_factory=dict)

    def __repr__(self) -> str:
        outputs = ", ".join(f"{n}: {tensor_text(t)}" for n, t in self.outputs.items())
        return (
            f"StepResult(loss={tensor_text(self.loss)}, grad_norm={tensor_text(self.grad_norm)}, "
            f"lr={self.lr:g}, skipped={self.skipped}, updated={self.updated}, "
            f"outputs={{{outputs}}})"
        )

    def _repr_html_(self) -> str:
        return f"<code>{escape(repr(self))}</code>"
