"""TrainingArguments of transformers that a step in one graph cannot honour, each with a way on.

What is not listed here either concerns the loop around the step, which is transformers' own, or is
read where the step is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onward.config import OnwardError

LOOP = "transformers.Trainer with onward.accelerate(model)"
_FP16 = (
    "its scaler steps an optimizer that the graph has stepped; fix: bf16=True, or "
    f'options={{"mixed_precision": "fp16"}}, or {LOOP}'
)
_WEIGHTS = "fix: leave it out, a graph's weights are fp32"
_SEVERAL = f"fix: {LOOP}, started in the same way"

# argument -> what to do; refused where it is set to anything that counts as true
REFUSED: dict[str, str] = {
    "fp16": _FP16,
    "fp16_full_eval": _WEIGHTS,
    "bf16_full_eval": _WEIGHTS,
    "deepspeed": _SEVERAL,
    "fsdp": "a model in shards has no graph; fix: transformers.Trainer without Onward, or DDP or "
    f"ZeRO-2 of {LOOP}",
    "parallelism_config": _SEVERAL,
    "torch_compile": "fix: leave it out, the graph is compiled by Onward",
    "use_liger_kernel": "fix: leave it out, the graph has fused kernels of its own",
}


def refuse_arguments(args: Any) -> None:
    """Raises OnwardError with every argument of `args` (transformers.TrainingArguments) that the
    graph of a step cannot honour."""
    reasons = [
        f"{name}={_shown(value)}: {way}"
        for name, way in REFUSED.items()
        if (value := getattr(args, name, None))
    ]
    if reasons:
        raise OnwardError("TrainingArguments that one graph cannot honour: " + "; ".join(reasons))


def refuse_accelerator(accelerator: Any, gpus: int) -> None:
    """Raises OnwardError where accelerate (`accelerate launch`, torchrun, its environment
    variables) is to do what the graph of one process does not. gpus: that one process would use."""
    precision = str(getattr(accelerator, "mixed_precision", "no"))
    if precision not in ("no", "bf16"):
        raise OnwardError(f"accelerate's mixed_precision={precision}: {_FP16}")
    if accelerator.num_processes > 1:
        raise OnwardError(f"{accelerator.num_processes} processes: one graph is one's; {_SEVERAL}")
    kind = accelerator.distributed_type.value
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise OnwardError(f"accelerate's distributed_type={kind}: one graph is one's; {_SEVERAL}")
    if gpus > 1:
        raise OnwardError(
            f"{gpus} GPUs in one process (DataParallel); fix: CUDA_VISIBLE_DEVICES=0, or "
            f"{LOOP} under torchrun"
        )


def refuse_two_precisions(accelerator: Any, args: Any, said: str | None) -> None:
    """Raises OnwardError where accelerate computes in bf16 and the options say another precision.
    said: what they name, None where they name none."""
    if accelerator.mixed_precision == "bf16" and said not in (None, "bf16"):
        where = "TrainingArguments(bf16=True)" if args.bf16 else "accelerate's mixed_precision=bf16"
        raise OnwardError(
            f'{where} and options={{"mixed_precision": "{said}"}}: a step has one precision; '
            "fix: leave one of them out"
        )


def refuse_callback(callback: Any) -> None:
    """Raises OnwardError for a callback that is called between the backward and the update."""
    from transformers import TrainerCallback

    kind = callback if isinstance(callback, type) else type(callback)
    own: Callable[..., Any] | None = getattr(kind, "on_pre_optimizer_step", None)
    if own not in (None, TrainerCallback.on_pre_optimizer_step):
        raise OnwardError(
            f"{kind.__name__}.on_pre_optimizer_step: between backward and update, which are one "
            f"graph, there is nothing to see; fix: on_optimizer_step, or {LOOP}"
        )


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else f"{type(value).__name__}(...)"


__all__ = [
    "LOOP", "REFUSED", "refuse_accelerator", "refuse_arguments", "refuse_callback",
    "refuse_two_precisions",
]  # fmt: skip
