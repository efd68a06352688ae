"""Replaces TRL's chunked log-probabilities by plain operators during a trace.

TRL's trainers compute a language model's head and loss in one function, whose forward and backward
process the vocabulary in chunks (`trl.kernels.ChunkedLogProbFunction`) so as not to keep all
logits. A graph has a fusion of its own for that, which starts from the plain form.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F

from onward.model_state.patches import patched

_MODULE, _CLASS = "trl.kernels.chunked_logprob", "ChunkedLogProbFunction"


@contextmanager
def log_probs_kept_whole() -> Iterator[None]:
    """A context in which TRL's function is `log_probs`, if TRL is imported and its function has the
    same parameters."""
    found = getattr(sys.modules.get(_MODULE), _CLASS, None)
    takes = inspect.signature(found.forward).parameters if found is not None else {}
    known = ["ctx", *inspect.signature(log_probs).parameters]
    with patched([(found, "apply", staticmethod(log_probs))] if list(takes) == known else []):
        yield


def log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
    chunk_size: int,
    final_logit_softcapping: float | None = None,
    logit_scale: float = 1.0,
    outputs: tuple[str, ...] = (),
) -> tuple[torch.Tensor | None, ...]:
    """hidden f32[N,H], weight f32[V,H], bias f32[V], targets i64[N] -> for each row the target's
    log-probability, the entropy, log(sum p^2), the mean of the logits (f32[N]), and whether the
    argmax is the target (bool[N]). All but the first are None unless in `outputs`."""
    z = F.linear(hidden, weight, bias).float()
    if logit_scale != 1.0:
        z = z * logit_scale
    if final_logit_softcapping is not None:
        z = final_logit_softcapping * torch.tanh(z / final_logit_softcapping)
    if temperature != 1.0:
        z = z / temperature
    told: dict[str, Any] = {}
    if "entropy" in outputs:
        told["entropy"] = torch.logsumexp(z, -1) - (torch.softmax(z, -1) * z).sum(-1)
    fixed = z.detach()  # TRL gives the following outputs no gradient
    if "log_sum_sq_probs" in outputs:
        told["log_sum_sq_probs"] = torch.logsumexp(2 * fixed, -1) - 2 * torch.logsumexp(fixed, -1)
    if "mean_logits" in outputs:
        told["mean_logits"] = fixed.mean(-1)
    if "is_top1" in outputs:
        told["is_top1"] = fixed.argmax(-1) == targets
    names = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    return -F.cross_entropy(z, targets, reduction="none"), *map(told.get, names)


__all__ = ["log_probs", "log_probs_kept_whole"]
