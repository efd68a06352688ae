"""Capture of Hugging Face models: attention as one op, compact masks, settings, TRL's loss.

In: a transformers model. Out: contexts that patch transformers' functions during a trace, keyword
arguments that a capture adds. Imports: `custom_ops`, `mode_reads`, `model_state`.
"""

from onward.capture.huggingface.attention import attention_kept_whole
from onward.capture.huggingface.chunked_log_probs import log_probs_kept_whole
from onward.capture.huggingface.settings import (
    CACHE,
    CacheSetting,
    cache_is_pointless,
    forward_defaults,
    is_cache,
    require_mask,
    without_flash_lengths,
)

__all__ = [
    "CACHE",
    "CacheSetting",
    "attention_kept_whole",
    "cache_is_pointless",
    "forward_defaults",
    "is_cache",
    "log_probs_kept_whole",
    "require_mask",
    "without_flash_lengths",
]
