"""What a forward reads, however long the way there is."""

from __future__ import annotations

import sys

import torch

import onward


def chained(length: int) -> dict[str, object]:
    """`f0` calls `f1`, and so on; the last one reads `FACTOR`."""
    lines = ["FACTOR = 1.0"]
    lines += [f"def f{i}(x):\n    return f{i + 1}(x)" for i in range(length)]
    lines += [f"def f{length}(x):\n    return x * FACTOR"]
    scope: dict[str, object] = {"__name__": "__main__"}
    exec("\n".join(lines), scope)
    return scope


class Chained(torch.nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.inner, self.function = torch.nn.Linear(3, 1), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.inner(x)).sum()  # type: ignore[operator]


def test_a_long_chain_of_functions_is_followed_to_its_end() -> None:
    scope = chained(sys.getrecursionlimit() // 5)
    model = Chained(scope["f0"])
    trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.0))
    x = torch.ones(2, 3)
    before = float(trainer.train_step(x).loss)
    scope["FACTOR"] = 3.0
    after = trainer.train_step(x).loss
    torch.testing.assert_close(after, torch.tensor(3 * before))
