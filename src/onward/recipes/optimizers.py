"""The optimizer of a run, by the names that transformers gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from onward.recipes.options import FinetuneConfig, InputError
from onward.train.eager_optimizers import EagerLAMB, EagerLion, EagerMuonWithAdamW

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Groups = list[dict[str, Any]]
_OTHER_NAMES = {"adamw_torch_fused": "adamw_torch", "adamw_hf": "adamw_torch"}


def optimizer_of(model: PreTrainedModel, config: FinetuneConfig) -> torch.optim.Optimizer:
    """The optimizer of the options, which decays matrices only, not vectors (biases and weights of
    norms). Of those vectors LAMB does not adapt the rate, as in BERT's pre-training."""
    groups = _groups(model, config)
    name = _OTHER_NAMES.get(config.optim, config.optim)
    return _MAKERS[name](groups, config)


def _groups(model: PreTrainedModel, config: FinetuneConfig) -> Groups:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _rate(config: FinetuneConfig) -> float:
    return config.learning_rate or 0.0


def _betas(config: FinetuneConfig) -> tuple[float, float]:
    return config.adam_beta1, config.adam_beta2


def _lamb(groups: Groups, config: FinetuneConfig) -> torch.optim.Optimizer:
    for group in groups:
        group["adapt"] = group["params"][0].ndim >= 2
    return EagerLAMB(groups, lr=_rate(config), betas=_betas(config), eps=config.adam_epsilon)


def _muon(groups: Groups, config: FinetuneConfig) -> torch.optim.Optimizer:
    """Muon for the matrices of layers; embeddings, which are tables of rows, keep AdamW."""
    parts: Groups = []
    for group in groups:
        inner = [p for p in group["params"] if p.ndim == 2 and min(p.shape) * 8 > max(p.shape)]
        taken = {id(p) for p in inner}
        rest = [p for p in group["params"] if id(p) not in taken]
        parts += [
            {**group, "params": held, "use_muon": held is inner} for held in (inner, rest) if held
        ]
    return EagerMuonWithAdamW(
        parts, lr=_rate(config), betas=_betas(config), eps=config.adam_epsilon
    )


def _adafactor(groups: Groups, config: FinetuneConfig) -> torch.optim.Optimizer:
    """The rule of transformers, whose step is the learning rate alone. That of torch is another
    one: it steps by the size of a weight, at most by 1 / sqrt(t) of it. Raises InputError beside a
    mesh: no graph makes its updates."""
    from transformers.optimization import Adafactor

    if config.mesh is not None:
        raise InputError(
            "adafactor makes its own step, which processes cannot share",
            "in --optim",
            "name another, such as adamw_torch, or leave --mesh and --zero out",
        )
    return Adafactor(groups, lr=_rate(config), scale_parameter=False, relative_step=False)


_MAKERS: dict[str, Callable[[Groups, FinetuneConfig], torch.optim.Optimizer]] = {
    "adamw_torch": lambda groups, config: torch.optim.AdamW(
        groups, lr=_rate(config), betas=_betas(config), eps=config.adam_epsilon
    ),
    "sgd": lambda groups, config: torch.optim.SGD(groups, lr=_rate(config)),
    "adagrad": lambda groups, config: torch.optim.Adagrad(groups, lr=_rate(config)),
    "rmsprop": lambda groups, config: torch.optim.RMSprop(groups, lr=_rate(config)),
    "adafactor": _adafactor,
    "lion": lambda groups, config: EagerLion(groups, lr=_rate(config), betas=_betas(config)),
    "lamb": _lamb,
    "muon": _muon,
}


__all__ = ["optimizer_of"]
