"""`onward pretrain`: BERT's pre-training in two phases, as runs of finetune.

The recipe is that of LAMB's paper (arXiv 1904.00962) in the form in which NVIDIA's and ONNX
Runtime's examples have it: batches of 65,536 and 32,768 pairs, 7,038 and 1,563 updates.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from onward.recipes.options import FinetuneConfig, InputError, PretrainConfig
from onward.recipes.trainer_switches import shares_of


@dataclass(frozen=True)
class Phase:
    """A phase of the recipe. block_size: tokens of a pair. batch: pairs of an update.
    warmup: the share of updates over which the rate rises to `rate`."""

    block_size: int
    batch: int
    updates: int
    rate: float
    warmup: float


PHASES = {
    1: Phase(128, 65536, 7038, 6e-3, 0.2843),
    2: Phase(512, 32768, 1563, 4e-3, 0.128),
}


def as_finetune(config: PretrainConfig, ranks: int) -> FinetuneConfig:
    """The options of the run of finetune that these ask for. ranks: processes that are started.
    Raises InputError for a batch that its micro-batches do not fill."""
    phase = PHASES[config.phase]
    batch = config.global_batch_size or phase.batch
    accumulate: int | None = config.gradient_accumulation_steps
    shares = ranks if config.mesh in (None, "auto") else shares_of(config.mesh)
    rows = config.per_device_train_batch_size * max(shares, 1)
    if accumulate is None:
        if batch % rows:
            raise InputError(
                f"{batch} sequences of an update are not a multiple of {rows}, those of a "
                "micro-batch of all processes",
                "in --global_batch_size",
                f"give {max(batch // rows, 1) * rows}, or another --per_device_train_batch_size",
            )
        accumulate = batch // rows
    elif config.global_batch_size is not None and accumulate * rows != batch:
        raise InputError(
            f"{accumulate} micro-batches of {rows} sequences are not {batch}",
            "in --gradient_accumulation_steps",
            "leave it out, or leave --global_batch_size out",
        )
    size: int | None = config.block_size
    own = {field.name for field in dataclasses.fields(FinetuneConfig)}
    values = {name: value for name, value in vars(config).items() if name in own}
    values |= {
        "block_size": phase.block_size if size is None else size,
        "gradient_accumulation_steps": accumulate,
        "learning_rate": phase.rate if config.learning_rate is None else config.learning_rate,
        "max_steps": phase.updates if config.max_steps is None else config.max_steps,
    }
    if config.warmup_ratio is None and not config.warmup_steps:
        values["warmup_ratio"] = phase.warmup
    return FinetuneConfig(**values)


__all__ = ["PHASES", "Phase", "as_finetune"]
