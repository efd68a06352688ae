"""TrainingArguments of transformers that a whole-step graph cannot honour, each with a fix, and
those that it ignores.

Arguments that are not listed either concern the loop around the step, which is transformers' own,
or are read where the step is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onward.errors import OnwardError
from onward.integrations.trainer_ranks import LOOP
from onward.options import TrainerOptions

_SEVERAL = f"fix: {LOOP}, started in the same way"

# argument -> fix; an argument is refused if it is set to a true value
REFUSED: dict[str, str] = {
    "deepspeed": _SEVERAL,
    "fsdp": (
        "a sharded model cannot be captured; fix: transformers.Trainer without Onward, "
        f"or DDP or ZeRO-2 with {LOOP}"
    ),
    "parallelism_config": _SEVERAL,
    "use_liger_kernel": "Onward fuses these kernels itself; fix: leave it out",
}

# options of onward.Trainer for its update or for a whole step
LOST = (
    "mixed_precision", "keep_in_fp32", "loss_scale", "optimizer_state",
    "gradient_accumulation_dtype", "loss_spikes", "seed", "verify", "zero", "compare_ranks_every",
    "offload_optimizer", "offload_dir",
)  # fmt: skip


def refuse_arguments(args: Any) -> None:
    """Raises OnwardError listing every argument of `args` (transformers.TrainingArguments) that a
    whole-step graph cannot honour."""
    reasons = [
        f"{name}={_shown(value)}: {way}"
        for name, way in REFUSED.items()
        if (value := getattr(args, name, None))
    ]
    if reasons:
        raise OnwardError(
            "these TrainingArguments are not supported by onward's Trainer: " + "; ".join(reasons)
        )


def refuse_accelerator(accelerator: Any, gpus: int) -> None:
    """Raises OnwardError if accelerate is configured (by `accelerate launch`, torchrun or
    environment variables) for something that a whole-step graph cannot do. gpus: those that
    one process would use."""
    precision = str(getattr(accelerator, "mixed_precision", "no"))
    if precision not in ("no", "bf16", "fp16"):
        raise OnwardError(
            f"accelerate's mixed_precision={precision} is not supported; fix: bf16=True or "
            f"fp16=True, or {LOOP}"
        )
    kind = accelerator.distributed_type.value
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise OnwardError(
            f"accelerate's distributed_type={kind} is not supported: processes share the batches "
            f"of a whole-step graph, and nothing else; {_SEVERAL}"
        )
    if gpus > 1:
        raise OnwardError(
            f"{gpus} GPUs in one process (DataParallel) are not supported; fix: "
            f"CUDA_VISIBLE_DEVICES=0, or {LOOP} under torchrun"
        )


def leave_uncompiled(accelerator: Any, say: Callable[[str], None]) -> None:
    """Makes the Accelerator prepare models without `torch.compile`, whatever asks for it
    (`torch_compile` and related arguments, accelerate's own settings). say: called with a message
    if something did."""
    from accelerate.utils import DynamoBackend, TorchDynamoPlugin

    def prepare_model(*args: Any, **kwargs: Any) -> Any:
        state = accelerator.state  # all Accelerators of a process share it
        asked = state.dynamo_plugin
        if asked.backend == DynamoBackend.NO:
            return type(accelerator).prepare_model(accelerator, *args, **kwargs)
        say(
            f"torch_compile (backend {asked.backend.value.lower()}) is ignored, since the "
            "step is one compiled graph already"
        )
        state.dynamo_plugin = TorchDynamoPlugin(backend=DynamoBackend.NO)
        try:
            return type(accelerator).prepare_model(accelerator, *args, **kwargs)
        finally:
            state.dynamo_plugin = asked

    accelerator.prepare_model = prepare_model


def refuse_two_precisions(accelerator: Any, args: Any, said: str | None) -> None:
    """Raises OnwardError if accelerate computes in bf16 and the options name another precision.
    said: the precision that the options name, or None."""
    if accelerator.mixed_precision == "bf16" and said not in (None, "bf16"):
        where = "TrainingArguments(bf16=True)" if args.bf16 else "accelerate's mixed_precision=bf16"
        raise OnwardError(
            f'{where} and options={{"mixed_precision": "{said}"}} contradict each other; fix: '
            "leave one of them out"
        )


def refuse_lost_options(options: TrainerOptions, precision: str, why: str) -> None:
    """Raises OnwardError for options that have no effect in a run whose gradients are visible,
    since there transformers makes the update. precision: accelerate's. why: the gradients are
    visible."""
    plain = TrainerOptions()
    lost = [n for n in LOST if getattr(options, n) != getattr(plain, n)]
    if "mixed_precision" in lost and options.mixed_precision == precision:
        lost.remove("mixed_precision")
    if options.strict or lost:
        raise OnwardError(
            f"{why}, so that transformers makes the update itself and "
            f"options={', '.join(lost) or 'strict'} would have no effect; fix: remove the "
            "option, or what reads gradients"
        )


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else f"{type(value).__name__}(...)"


__all__ = [
    "LOOP", "LOST", "REFUSED", "leave_uncompiled", "refuse_accelerator", "refuse_arguments",
    "refuse_lost_options", "refuse_two_precisions",
]  # fmt: skip
