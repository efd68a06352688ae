"""Optimizers that torch lacks, with torch's interface: their `step()` updates in eager PyTorch.

A Trainer makes one of a description such as `onward.optim.Lion(lr=1e-4)` and makes its updates in
the step graph. Its `param_groups` and `state_dict` have torch's form, so that schedulers and
checkpoints work; `step()` goes on from the same state where no Trainer owns the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch

from onward.errors import OnwardError

Parameters: TypeAlias = "Iterable[torch.Tensor] | Iterable[dict[str, Any]]"


class _ByGroup(torch.optim.Optimizer):
    """An optimizer whose `step` calls `_update(held, group)` for the parameters of each group that
    have a gradient."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Updates each parameter that has a gradient. closure: computes the loss anew."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            held = [p for p in group["params"] if p.grad is not None]
            if held:
                self._update(held, group)
        return loss

    def _update(self, held: list[torch.Tensor], group: dict[str, Any]) -> None:
        raise NotImplementedError


class _ByParameter(_ByGroup):
    """An optimizer whose `step` calls `_move(p, g, state, group)` for each parameter that has a
    gradient."""

    def _update(self, held: list[torch.Tensor], group: dict[str, Any]) -> None:
        for p in held:
            assert p.grad is not None
            g = -p.grad if group["maximize"] else p.grad
            self._move(p, g, self.state[p], group)

    def _move(
        self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        raise NotImplementedError


def _check(least: float = 0.0, **settings: Any) -> None:
    """Raises OnwardError for a setting below `least`, or betas outside [0, 1)."""
    for name, value in settings.items():
        values, most = (value, 1.0) if name == "betas" else ((value,), float("inf"))
        if not all(least <= float(x) <= most and (name != "betas" or x < 1.0) for x in values):
            span = "0 or more, and below 1" if name == "betas" else f"{least:g} or more"
            raise OnwardError(f"{name}={value!r} is not a setting; fix: {span}")


class EagerLion(_ByParameter):
    """Lion (arXiv 2302.06675). Raises OnwardError for settings out of range."""

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        maximize: bool = False,
    ) -> None:
        _check(lr=lr, betas=betas, weight_decay=weight_decay)
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize},
        )

    def _move(
        self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        if not state:
            state["exp_avg"] = torch.zeros_like(p)
        m = state["exp_avg"]
        p.mul_(1 - lr * group["weight_decay"]).sub_(lr * m.lerp(g, 1 - beta1).sign())
        m.lerp_(g, 1 - beta2)


class EagerLAMB(_ByParameter):
    """LAMB (arXiv 1904.00962). Raises OnwardError for settings out of range."""

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        bias_correction: bool = True,
        adapt: bool = True,
        ratio_min: float = 0.0,
        ratio_max: float = float("inf"),
        maximize: bool = False,
    ) -> None:
        _check(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, ratio_min=ratio_min)
        _check(least=ratio_min, ratio_max=ratio_max)
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "bias_correction": bias_correction, "adapt": adapt, "ratio_min": ratio_min,
            "ratio_max": ratio_max, "maximize": maximize,
        }  # fmt: skip
        super().__init__(params, defaults)

    def _move(
        self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        (beta1, beta2), rate = group["betas"], float(group["lr"])
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] += 1
        m, v, t = state["exp_avg"].lerp_(g, 1 - beta1), state["exp_avg_sq"], state["step"].item()
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        left1, left2 = (1 - beta**t if group["bias_correction"] else 1.0 for beta in (beta1, beta2))
        u = (m / left1).div_((v / left2).sqrt_().add_(group["eps"]))
        u.add_(p, alpha=group["weight_decay"])
        whole, moved = p.norm().item(), u.norm().item()
        if group["adapt"] and whole > 0 and moved > 0:
            rate *= min(max(whole / moved, group["ratio_min"]), group["ratio_max"])
        p.sub_(u, alpha=rate)


class EagerMuonWithAdamW(_ByGroup):
    """Muon for groups with `use_muon`, AdamW for the others, each by torch's own update.

    A group has the settings of both; those of the other are not read. Raises OnwardError for a
    parameter of a `use_muon` group that is not a matrix.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        ns_eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        use_muon: bool = False,
    ) -> None:
        _check(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, momentum=momentum)
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise OnwardError(
                f"adjust_lr_fn={adjust_lr_fn!r} is unknown; fix: 'original' or 'match_rms_adamw'"
            )
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": ns_coefficients, "ns_eps": ns_eps, "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn, "betas": betas, "eps": eps, "use_muon": use_muon,
        }  # fmt: skip
        super().__init__(params, defaults)
        for group in self.param_groups:
            odd = next((p for p in group["params"] if group["use_muon"] and p.ndim != 2), None)
            if odd is not None:
                raise OnwardError(
                    f"Muon updates matrices, and a parameter of a use_muon group has shape "
                    f"{list(odd.shape)}; fix: put it into a group with use_muon=False"
                )

    def _update(self, held: list[torch.Tensor], group: dict[str, Any]) -> None:
        inner = _inner(held, group)
        for p in held:
            inner.state[p] = self.state[p]
        inner.step()
        self.state.update(inner.state)


def _inner(parameters: list[torch.Tensor], group: dict[str, Any]) -> torch.optim.Optimizer:
    """torch's own optimizer for the parameters of one group."""
    if group["use_muon"]:
        names = ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "ns_steps")
        given = {name: group[name] for name in names}
        adjust = group["adjust_lr_fn"]
        return torch.optim.Muon(parameters, eps=group["ns_eps"], adjust_lr_fn=adjust, **given)
    names = ("lr", "betas", "eps", "weight_decay")
    given = {name: group[name] for name in names}
    return torch.optim.AdamW(parameters, **given)


__all__ = ["EagerLAMB", "EagerLion", "EagerMuonWithAdamW"]
