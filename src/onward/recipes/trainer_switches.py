"""The switches of `onward finetune` that are options of its Trainer, which itself says what goes
together."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from onward.errors import OnwardError
from onward.memory_amounts import memory_amount
from onward.mesh_sizes import AUTO, AXES, DATA_AXES, auto_sizes
from onward.options import TrainerOptions
from onward.recipes.options import FinetuneConfig, InputError


def precision(config: FinetuneConfig) -> str:
    """The precision of a run, as in `TrainerOptions.mixed_precision`."""
    return "bf16" if config.bf16 else "fp16" if config.fp16 else "no"


def trainer_options(config: FinetuneConfig) -> TrainerOptions:
    """The options of the Trainer of a run. Raises OnwardError for those that do not go together."""
    return TrainerOptions(
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        max_grad_norm=config.max_grad_norm,
        skip_nonfinite=config.skip_nonfinite,
        seed=config.seed,
        memory_budget=config.memory_budget,
        recompute="layers" if config.gradient_checkpointing else "auto",
        mixed_precision=precision(config),
        mesh=sizes_of(config.mesh),
        zero=config.zero,
        pipeline_schedule=config.pipeline_schedule,
        pipeline_microbatches=config.pipeline_microbatches,
        sequence_parallel=config.sequence_parallel,
        context_parallel_method=config.context_parallel_method,
        optimizer_state=config.optimizer_state,
        offload_optimizer=config.offload_optimizer,
        offload_dir=config.offload_dir,
    )


def sizes_of(mesh: str | None) -> dict[str, int] | None:
    """The number of ranks by axis in `dp_replicate=2,tp=2`; None where there is no mesh."""
    if mesh is None:
        return None
    found: dict[str, int] = {}
    for part in mesh.split(","):
        axis, equals, size = (word.strip() for word in part.partition("="))
        if axis not in AXES or not equals or not size.isdecimal() or int(size) < 1:
            raise _wrong_mesh(mesh)
        if axis in found:
            raise _wrong_mesh(mesh)
        found[axis] = int(size)
    return found


def _wrong_mesh(mesh: str) -> InputError:
    axes = ", ".join(AXES)
    fix = f"write ranks by axis, such as dp_replicate=2,tp=2 (axes: {axes}), or {AUTO}"
    return InputError(f"mesh is {mesh!r}", "in --mesh", fix)


def shares_of(mesh: str | None) -> int:
    """The number of processes that have rows of their own: those along axes of data."""
    return prod(size for axis, size in (sizes_of(mesh) or {}).items() if axis in DATA_AXES)


def least_rows(config: FinetuneConfig) -> int:
    """The fewest rows that a batch may have: one, or one for each micro-batch of a pipeline."""
    stages = (sizes_of(config.mesh) or {}).get("pp", 1)
    return 1 if stages == 1 else config.pipeline_microbatches or stages


def with_mesh(config: FinetuneConfig, ranks: int) -> FinetuneConfig:
    """The options with the mesh of this many processes written out: `dp_replicate=2` for `auto`,
    and None for one process. Raises InputError where the processes are not those of the mesh, for
    what its ranks cannot do together, and for what several processes cannot do."""
    asked = None if config.mesh == AUTO else sizes_of(config.mesh)
    needed = prod(asked.values()) if asked else max(ranks, 2 if config.zero else 1)
    sizes = asked or auto_sizes(needed, config.zero)
    text = ",".join(f"{axis}={size}" for axis, size in sizes.items())
    found = replace(config, mesh=text)
    _check_options(found)
    if needed != ranks:
        name = "mesh" if asked else "zero"
        value = config.mesh if asked else config.zero
        is_one = "one process is" if ranks == 1 else f"{ranks} processes are"
        raise InputError(
            f"{name} {value} needs {needed} processes, and {is_one} started",
            f"in --{name}",
            f"torchrun --nproc-per-node={needed} -m onward finetune ...",
        )
    if ranks == 1:
        return replace(config, mesh=None)
    for name, is_given in (("compare", config.compare), ("engine", config.engine == "torch")):
        if is_given:
            raise InputError(
                f"eager PyTorch trains in one process, and {ranks} are started",
                f"in --{name}",
                "leave it out, or start the command without torchrun",
            )
    _check_sizes(found, sizes)
    return found


def _check_options(config: FinetuneConfig) -> None:
    """Raises InputError for what the Trainer refuses beside the mesh; values that are wrong by
    themselves are left to `check_options`."""
    fits = memory_amount(config.memory_budget) is not None
    try:
        trainer_options(
            replace(
                config, gradient_accumulation_steps=1, max_grad_norm=None, seed=0,
                memory_budget=config.memory_budget if fits else None,
            )
        )  # fmt: skip
    except InputError:
        raise
    except OnwardError as error:
        what, _, fix = str(error).partition("; fix: ")
        alone = prod((sizes_of(config.mesh) or {}).values()) == 1
        place = f"with --mesh {config.mesh} --zero {config.zero}"
        raise InputError(what, "on the command line" if alone else place, fix) from error


def _check_sizes(config: FinetuneConfig, sizes: dict[str, int]) -> None:
    """Raises InputError for batches that the mesh cannot cut as it has to."""
    length, parts = config.block_size, sizes.get("cp", 1)
    if length % parts:
        raise InputError(
            f"blocks of {length} tokens have no {parts} parts of one size along cp",
            "in --block_size",
            f"give {-(-length // parts) * parts}",
        )
    rows, least = config.per_device_train_batch_size, least_rows(config)
    if rows < least:
        raise InputError(
            f"{rows} sequences of a process make no {least} micro-batches of a pipeline",
            "in --per_device_train_batch_size",
            f"give {least} or more, or fewer --pipeline_microbatches",
        )


__all__ = ["least_rows", "precision", "shares_of", "sizes_of", "trainer_options", "with_mesh"]
