"""Replaces transformers' attention functions by one `onward::attention` during a trace.

Where a mask built by transformers reaches sdpa or a plain `eager_attention_forward`, the graph gets
one Attention node with the mask in compact form, and the dense mask goes unread. Any other
attention function is traced as it is written.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from onward.capture.custom_ops.attention import attention
from onward.capture.custom_ops.autocast import as_product
from onward.capture.huggingface.cache_position import Counted, given_to_masks
from onward.capture.huggingface.masks import Masks, require_kind
from onward.capture.huggingface.plain_attention import plain_functions
from onward.capture.huggingface.settings import configs_with_sdpa
from onward.capture.mode_reads import noted_call
from onward.errors import CaptureError
from onward.model_state.patches import Patch, patched

Function = Callable[..., Any]
_USUAL = {
    "module", "query", "key", "value", "attention_mask", "scaling", "dropout", "position_bias",
    "kwargs",
}  # fmt: skip


class _Attentions:
    """Makes the replacements for transformers' attention functions.

    plain: plain `eager_attention_forward` -> the forms in which it is plain (`plain_functions`).
    masks: the masks that transformers' mask functions have built in this capture.
    """

    def __init__(self, plain: dict[Function, set[str]], masks: Masks) -> None:
        self._plain, self._masks = plain, masks

    def sdpa(self, original: Function) -> Function:
        """Returns the replacement for transformers' `sdpa_attention_forward`. It raises
        CaptureError for a mask of another shape or dtype, and for inconsistent causality."""

        def forward(
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
            strange = any(kwargs.get(k) is not None for k in ("softcap", "cache", "s_aux"))
            made = self._masks.find(attention_mask)
            if strange or (attention_mask is not None and made is None):
                if attention_mask is not None and made is None:
                    require_kind(attention_mask)
                return original(
                    module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
                    is_causal=is_causal, position_bias=position_bias, **kwargs,
                )  # fmt: skip
            if made is not None and made.causal and is_causal is False:
                is_causal = None if _says_so_without_mask(type(module)) else is_causal
            own = bool(is_causal if is_causal is not None else getattr(module, "is_causal", True))
            # a symbolic number of queries is above 1
            single = isinstance(query.shape[2], int) and query.shape[2] == 1
            own = own and not single
            if made is not None and made.optional and made.causal != own:
                raise CaptureError(
                    f"{type(module).__name__} is {'' if own else 'not '}causal on a batch that "
                    f"hides no token, and {'' if made.causal else 'not '}causal on any other; fix: "
                    "set its is_causal to what its mask says"
                )
            exact = None
            if made is not None and made.padding is not None and position_bias is not None:
                least = torch.finfo(key.dtype).min
                exact = torch.where(made.dense, position_bias, least)
            noted_call(dropout != 0)
            out = _call(
                module, query, key, value, exact, made.padding if made else None, position_bias,
                made.causal if made else own, scaling, dropout, compact_only=True,
            )  # fmt: skip
            return out, None

        return forward

    def eager(self, original: Function) -> Function:
        """Returns the replacement for an `eager_attention_forward`: itself if it is not plain."""
        forms = self._plain.get(original)
        if not forms:
            return original
        further = set(inspect.signature(original).parameters) - _USUAL

        def forward(
            module: torch.nn.Module,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None,
            scaling: float | None = None,
            dropout: float = 0.0,
            position_bias: torch.Tensor | None = None,
            **kwargs: Any,
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            # a caller may ask for the attention probabilities too
            asked = kwargs.get("output_attentions") or getattr(
                getattr(module, "config", None), "output_attentions", False
            )
            made = self._masks.find(attention_mask)
            mask = attention_mask
            if (
                asked
                or any(kwargs.get(name) is not None for name in further)
                or (scaling is None and "no scale" not in forms)
                or (position_bias is not None and "bias" not in forms)
                or (getattr(module, "num_key_value_groups", 1) != 1 and "groups" not in forms)
                or (mask is not None and not (mask.dim() == 4 and mask.is_floating_point()))
            ):
                if position_bias is not None:
                    kwargs["position_bias"] = position_bias
                return original(
                    module, query, key, value, mask, scaling=scaling, dropout=dropout, **kwargs
                )
            causal, padding, exact, bias = False, None, mask, position_bias
            if made is not None:
                causal, padding = made.causal, made.padding
                exact = None if padding is None else mask
            if bias is not None and exact is not None:
                exact = bias + exact
                bias = bias if made is not None else None
            ratio = dropout if module.training else 0.0
            noted_call(ratio != 0, asks=True)
            out = _call(module, query, key, value, exact, padding, bias, causal, scaling, ratio)
            return out, None

        return forward


@functools.cache
def _says_so_without_mask(module: type[torch.nn.Module]) -> bool:
    """Returns whether a module passes `is_causal=False` only because it has a mask, and is causal
    without one, as GPT-2 in transformers 4 does."""
    try:
        text = inspect.getsource(inspect.unwrap(module.forward))
    except (OSError, TypeError):  # no file has it
        return False
    return re.search(r"is_causal = attention_mask is None and", text) is not None


def _call(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    padding: torch.Tensor | None,
    bias: torch.Tensor | None,
    causal: bool,
    scaling: float | None,
    ratio: float,
    compact_only: bool = False,
) -> torch.Tensor:
    """Calls `onward::attention`: query f[B,H,T,K], key, value f[B,H/groups,S,K] -> f[B,T,H,K]."""
    groups = getattr(module, "num_key_value_groups", 1)
    if groups != 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = attention(
        query, key, value, mask, padding, bias, causal, float(scale), float(ratio), compact_only
    )
    out = as_product(out)
    return out.transpose(1, 2).contiguous()  # as in eager mode: some models call `view` on it


@contextmanager
def attention_kept_whole(model: torch.nn.Module, own_positions: bool) -> Iterator[None]:
    """A context in which the Hugging Face modules of `model` call `onward::attention`.

    own_positions: whether the batch has position ids, which may mark packed documents. If not, the
    model counts positions itself, and its search for packed documents is skipped.
    """
    if not configs_with_sdpa(model):
        yield
        return
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

    counted = Counted() if given_to_masks() else None
    masks = Masks(counted)
    attentions = _Attentions(plain_functions(model), masks)
    places: list[Patch] = []
    if hasattr(masking_utils, "find_packed_sequence_indices") and not own_positions:
        places.append((masking_utils, "find_packed_sequence_indices", lambda position_ids: None))
    functions = AttentionInterface._global_mapping
    if _is_own(functions.get("sdpa")):
        places.append((functions, "sdpa", attentions.sdpa(functions["sdpa"])))
    makers = AttentionMaskInterface._global_mapping
    for name in ("sdpa", "eager"):
        if _is_own(makers.get(name)):
            replacement = masks.remembering(makers[name], added=name == "eager")
            places.append((makers, name, replacement))
    interface = AttentionInterface.__dict__.get("get_interface")
    if interface is not None:

        def chosen(self: Any, attn_implementation: str, default: Function) -> Function:
            function = interface(self, attn_implementation, default)
            return attentions.eager(function) if function is default else function

        places.append((AttentionInterface, "get_interface", chosen))
    with patched(places), counted or nullcontext():
        yield


def _is_own(function: Any) -> bool:
    """Returns whether a function is transformers' own, not one that a user has registered."""
    return getattr(function, "__module__", "").startswith("transformers.")


__all__ = ["attention_kept_whole"]
