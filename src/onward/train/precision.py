"""The cast policy of a step, from the option `mixed_precision`."""

from __future__ import annotations

import logging

from onward.graph.types import DType
from onward.kernels import Target
from onward.options import TrainerOptions
from onward.rewrite import Policy

log = logging.getLogger("onward")


def policy_of(options: TrainerOptions, target: Target) -> Policy | None:
    """The cast policy for these options on a target; None: fp32."""
    asked = options.mixed_precision
    if asked == "auto" and not target.multiplies_bf16:
        log.warning(
            "mixed_precision='auto' means fp32 here, since the processor has no bf16 instructions"
        )
        return None
    if asked == "no":
        return None
    low = DType.FLOAT16 if asked == "fp16" else DType.BFLOAT16
    return Policy(low, tuple(options.keep_in_fp32))


__all__ = ["policy_of"]
