"""Trains a transformer of your own, with a loss function, clipping and a schedule; then resumes.

    python your_own_module.py

The task: sort eight digits. Every module made of torch's usual ops is captured as it stands.
"""

from __future__ import annotations

import torch
from torch import nn

import onward

DIGITS, LENGTH, WIDTH, STEPS = 10, 8, 64, 200


class Sorter(nn.Module):
    """i64[B,T] -> f32[B,T,V]: the logits of each digit of the sorted row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(DIGITS, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, DIGITS)

    def forward(self, digits: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(digits) + self.position))


def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """f32[B,T,V], i64[B,T] -> f32[]."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def trainer_of(model: nn.Module) -> tuple[onward.Trainer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    options = onward.TrainerOptions(max_grad_norm=1.0, seed=0)
    return onward.Trainer(model, optimizer, loss_fn=loss_fn, options=options), schedule


def main() -> tuple[float, float]:
    """The losses of the first and of the last step."""
    torch.manual_seed(0)
    trainer, schedule = trainer_of(Sorter())
    losses: list[float] = []
    for step in range(STEPS):
        digits = torch.randint(0, DIGITS, (64, LENGTH))
        result = trainer.train_step(digits, digits.sort(1).values)
        losses.append(float(result.loss))
        schedule.step()
        if step % 50 == 0:
            norm = 0.0 if result.grad_norm is None else float(result.grad_norm)
            print(f"step {step:4}  loss {losses[-1]:.3f}  gradient norm {norm:.2f}")
        if step == STEPS // 2:
            # A run goes on in another trainer, or another process: the state has everything.
            state, rates = trainer.state_dict(), schedule.state_dict()
            trainer, schedule = trainer_of(Sorter())
            trainer.load_state_dict(state)
            schedule.load_state_dict(rates)

    digits = torch.randint(0, DIGITS, (1, LENGTH))
    model = trainer.model.eval()
    print(digits.tolist(), "->", model(digits).argmax(-1).tolist())
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
