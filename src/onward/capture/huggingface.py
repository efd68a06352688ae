"""What Hugging Face models need while they are captured: attention whole, masks in compact form.

Transformers builds a dense `b[B,1,T,T]` mask from ~30 nodes. While a capture runs, an attention
interface of our own keeps (padding mask, causal, position bias) apart, so that the graph holds one
Attention node. Masks of another meaning (windows, packed documents) stay dense and correct.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from onward.config import CaptureError

NAME = "onward_capture"


@torch.library.custom_op("onward::attention", mutates_args=())
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    ratio: float,
) -> torch.Tensor:
    """Placeholder op that an export records whole: q f[B,H,Q,K], k f[B,H,S,K], v f[B,H,S,E].

    mask: bool (true may attend) or added to the scores; bias: added, and may be trained.
    """
    raise NotImplementedError("onward::attention exists during capture only")


@attention.register_fake
def _(
    q: Any, k: Any, v: Any, mask: Any, bias: Any, is_causal: bool, scale: float, ratio: float
) -> Any:
    for added in (mask, bias):
        if added is not None:  # its dims and those of the scores are then known to be equal
            added.expand(*q.shape[:-1], k.shape[-2])
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def _attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention interface of a capture: `f[B,H,T,K]` in, `f[B,T,H,K]` out."""
    strange = sorted(k for k in ("softcap", "cache", "s_aux") if kwargs.get(k) is not None)
    if strange:
        raise CaptureError(
            f"attention with {', '.join(strange)} at {type(module).__name__} has no translation"
        )
    groups = getattr(module, "num_key_value_groups", 1)
    if groups != 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if attention_mask is not None and attention_mask.dim() == 2:
        attention_mask = attention_mask[:, None, None, :]  # padding only; causality stays apart
    elif attention_mask is not None:
        _require_kind(attention_mask)
        causal = False
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = torch.ops.onward.attention(
        query, key, value, attention_mask, position_bias, bool(causal), float(scale),
        float(dropout),
    )  # fmt: skip
    return out.transpose(1, 2), None


def _require_kind(mask: torch.Tensor) -> None:
    if mask.dim() != 4 or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise CaptureError(
            f"an attention mask of shape {tuple(mask.shape)} and {mask.dtype}; fix: give one of "
            "shape (batch, tokens), or (batch, 1, tokens, tokens) of bool (true may attend) or of "
            "the scores' float dtype (added to them)"
        )


def _mask(**kwargs: Any) -> torch.Tensor | None:
    """The mask interface of a capture: None, a padding mask `b[B,S]`, or the dense mask."""
    from transformers import masking_utils

    function = kwargs["mask_function"]
    padding = kwargs.get("attention_mask")
    if padding is not None and padding.dim() != 2:
        _require_kind(padding)
    plain_offsets = kwargs.get("q_offset", 0) == 0 and kwargs.get("kv_offset", 0) == 0
    if function is masking_utils.causal_mask_function and plain_offsets:
        return None if padding is None else padding.to(torch.bool)
    bidirectional = getattr(masking_utils, "bidirectional_mask_function", None)
    if function is bidirectional and plain_offsets:
        if padding is not None:
            return padding.to(torch.bool)[:, None, None, :]
        return None
    kwargs.pop("allow_is_causal_skip", None)
    kwargs.pop("allow_is_bidirectional_skip", None)
    return masking_utils.sdpa_mask(
        **kwargs, allow_is_causal_skip=False, allow_is_bidirectional_skip=False
    )


@contextmanager
def attention_kept_whole(model: torch.nn.Module, own_positions: bool) -> Iterator[None]:
    """Within it, the Hugging Face modules of `model` attend through `onward::attention`.

    `own_positions`: the batch brings position ids, which may mark packed documents. Where it does
    not, the model counts positions itself and the search for packed documents is left out.
    """
    configs = _configs_with_sdpa(model)
    if not configs:
        yield
        return
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

    AttentionInterface.register(NAME, _attention_forward)
    AttentionMaskInterface.register(NAME, _mask)
    before = [(c, c._attn_implementation) for c in configs]
    find_packed = getattr(masking_utils, "find_packed_sequence_indices", None)
    if find_packed is not None and not own_positions:
        masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        for config in configs:
            config._attn_implementation_internal = NAME
        yield
    finally:
        if find_packed is not None:
            masking_utils.find_packed_sequence_indices = find_packed
        for config, name in before:
            config._attn_implementation_internal = name


def _configs_with_sdpa(model: torch.nn.Module) -> list[Any]:
    """The distinct configs in the model whose attention is torch's sdpa or written out (eager)."""
    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) in ("sdpa", "eager"):
            found[id(config)] = config
    return list(found.values())


def require_mask(model: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    """Raises CaptureError for a mask that eager attention would add as ones and zeros."""
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.dim() != 4 or mask.is_floating_point():
        return
    if any(c._attn_implementation == "eager" for c in _configs_with_sdpa(model)):
        raise CaptureError(
            f"an attention mask of {mask.dtype} with four dims is added to the scores by "
            'attn_implementation="eager"; fix: use "sdpa", or give the numbers to add as floats'
        )


def forward_defaults(model: torch.nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments a capture adds: `use_cache=False`, since a cache is not a tensor."""
    config = getattr(model, "config", None)
    if getattr(config, "use_cache", False) and "use_cache" not in kwargs:
        return {"use_cache": False}
    return {}
