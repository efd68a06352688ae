"""Sample numbers of update ops' operands, by their names in the optimizers' records."""

from __future__ import annotations

from typing import Any

from onward.graph.ops.optimizers import OPTIMIZERS

# ranges of the optimizers' state tensors that hold squares, sizes or products of shares
_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(
        ("exp_avg_sq", "max_exp_avg_sq", "sum", "exp_inf", "row_var", "col_var", "variance"),
        (0.1, 2.0),
    ),
    "exp_avg_sq_absmax": (0.1, 2.0),
    "square_avg": (1.0, 2.0), "grad_avg": (-0.9, 0.9), "mu_product": (0.2, 0.8),
}  # fmt: skip
_SETTINGS = {
    "lr": 0.05, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.02, "beta1": 0.9,
    "beta2": 0.999, "eps": 1e-8, "alpha": 0.9, "lr_decay": 0.1, "momentum_decay": 0.04,
    "ratio_min": 0.1, "ratio_max": 1.5, "beta2_decay": -0.8, "eps1": 1e-3, "eps2": 1e-3, "d": 1.0,
    "linear": 3.4445, "cubic": -4.775, "quintic": 2.0315,
}  # fmt: skip


def sample(op: str, i: int, attrs: dict[str, Any]) -> tuple[float, float] | float | int | None:
    """A hyperparameter, the range of a state tensor, or the update's number; None for operands of
    other ops, and for those whose numbers may be any."""
    name = _operand(op, i)
    if name == "dampening" and attrs["nesterov"]:
        return 0.0  # torch takes no other
    if name == "step":  # RAdam adapts from the sixth update on
        return 8 if op == "RAdamUpdate" and not attrs["decoupled"] else 3
    return _RANGES.get(name) or _SETTINGS.get(name)


def _operand(op: str, i: int) -> str:
    """The name of an update op's input; "" for the parameter, its gradient, and other ops."""
    for record in OPTIMIZERS.values():
        layouts = {record.update.name: list(record.slots)}
        layouts |= {form.update.name: list(form.tensors) for form in record.forms.values()}
        if record.part is None and op in layouts:
            return ["", "", *layouts[op], *record.hyperparameters, "step", "", ""][i]
    return ""
