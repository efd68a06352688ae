"""torch's own table of optimizers (`optim_db`) beside Onward's Trainer.

Each of the settings that torch tests an optimizer with trains a small model for a few steps, in
eager PyTorch in two precisions and as a graph.
"""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import torch
from torch import nn
from torch.testing._internal.common_optimizers import optim_db

import onward
from onward.errors import OnwardError

STEPS = 4
PART = 2e-4  # of the change so far


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.down(torch.tanh(self.norm(self.up(x)))), y)


def _called(info: Any) -> str:
    return info.optim_cls.__name__


def names() -> list[str]:
    """A name for each setting of each optimizer: the class, and the number of the setting."""
    return [f"{_called(o)}[{i}]" for o in optim_db for i in range(len(_inputs(o)))]


def _inputs(info: Any) -> list[Any]:
    return list(info.optim_inputs_func("cpu"))


def _made(name: str, model: nn.Module) -> torch.optim.Optimizer:
    kind, _, number = name.rstrip("]").partition("[")
    info: Any = next(o for o in optim_db if _called(o) == kind)
    settings = copy.deepcopy(_inputs(info)[int(number)].kwargs)
    settings.pop("fused", None)
    if isinstance(settings.get("lr"), torch.Tensor):
        settings["lr"] = settings["lr"].detach().clone()
    return info.optim_cls(model.parameters(), **settings)


def _batches(dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    dice = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(5, 4, generator=dice).to(dtype),
            "y": torch.randint(3, (5,), generator=dice),
        }
        for _ in range(STEPS)
    ]


def _trained(name: str, dtype: torch.dtype, ours: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Small().to(dtype)
    optimizer = _made(name, model)
    trainer = onward.Trainer(model, optimizer) if ours else None
    for batch in _batches(dtype):
        if trainer is not None:
            trainer.train_step(batch)
        else:
            optimizer.zero_grad()
            model(**batch).backward()
            optimizer.step()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def outcome(name: str) -> str:
    """`equal`, `refused: why`, `WRONG: where`, or `eager: why` it says nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            one, two = (_trained(name, d, False) for d in (torch.float32, torch.float64))
        except Exception as error:
            return f"eager: {type(error).__name__}"
        try:
            ours = _trained(name, torch.float32, True)
        except OnwardError as error:
            return f"refused: {re.split(r'[:;]', str(error))[0]}"
    torch.manual_seed(0)
    start = dict(Small().double().named_parameters())
    for n, exact in two.items():
        far, own = (ours[n].double() - exact).norm(), (one[n].double() - exact).norm()
        if not far <= 10 * own + PART * (exact - start[n]).norm() + 1e-9:
            return f"WRONG: {n} is {float(far):.1e} from fp64, eager {float(own):.1e}"
    return "equal"


def differences(only: str = "") -> tuple[dict[str, str], list[str]]:
    """What is not as eager, and what ran. An optimizer that is refused whole is one line."""
    found: dict[str, str] = {}
    ran: list[str] = []
    for kind in dict.fromkeys(name.partition("[")[0] for name in names()):
        own = [name for name in names() if name.startswith(f"{kind}[")]
        if not any(only in name for name in own):
            continue
        said = {name: outcome(name) for name in own}
        if len(set(said.values())) == 1:
            said = {kind: next(iter(said.values()))}
        ran += [name for name, text in said.items() if not text.startswith("eager")]
        found |= {n: text for n, text in said.items() if text.startswith(("refused", "WRONG"))}
    return found, ran
