"""Muon for the matrices of a model, AdamW for its other parameters, as one optimizer.

Its updates are the ops of both. Embeddings and output layers are AdamW's, as the authors of Muon
advise. By default Muon's steps have the size of AdamW's (arXiv 2502.16982), so that both share
their learning rate and weight decay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from onward.graph.ops.optimizers.adam import ADAMW
from onward.graph.ops.optimizers.muon import MUON
from onward.graph.ops.optimizers.record import Group, Groups, Optimizer


@dataclass
class MuonWithAdamW:
    """Muon for matrices, AdamW for vectors, scalars, embeddings, the output layer that a
    transformers model names, and matrices whose names match a pattern of `adamw`. A group with
    `use_muon` decides by itself."""

    lr: float = 1e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    ns_eps: float = 1e-7
    ns_steps: int = 5
    adjust_lr_fn: str | None = "match_rms_adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    use_muon: bool = False
    adamw: Sequence[str] = ()
    groups: Groups = ()

    def settings_of(self, name: str, shape: tuple[int, ...], is_table: bool) -> dict[str, Any]:
        """The settings of a parameter that depend on what it is."""
        patterns = (self.adamw,) if isinstance(self.adamw, str) else self.adamw
        routed = any(fnmatchcase(name, pattern) for pattern in patterns)
        return {"use_muon": len(shape) == 2 and not is_table and not routed}


def _part(group: Group) -> Optimizer:
    return MUON if group.get("use_muon") else ADAMW


def _kept(group: Group, slot: str) -> bool:
    part = _part(group)
    return slot in part.slots and part.kept(group, slot)


OPTIMIZERS = (
    Optimizer(
        description=MuonWithAdamW,
        torch="onward.train.eager_optimizers.EagerMuonWithAdamW",
        update=ADAMW.update,
        slots=(*MUON.slots, "exp_avg", "exp_avg_sq"),
        hyperparameters={},
        kept=_kept,
        part=_part,
        own_fields=("groups", "adamw"),
    ),
)
