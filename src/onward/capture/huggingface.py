"""What Hugging Face models need while they are captured: attention whole, masks in compact form.

Transformers builds a dense `b[B,1,T,T]` mask from ~30 nodes. While a capture runs, its mask
functions still return that mask, and remember what it was made of: (padding, causal). Where the
same mask reaches torch's sdpa or a plain `eager_attention_forward`, the graph gets one Attention
node with the compact form, and nobody reads the dense nodes. Whoever reads the mask himself finds
what eager PyTorch gives him. An attention function of another kind is traced as it is written.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from onward.config import CaptureError

Function = Callable[..., Any]


@torch.library.custom_op("onward::attention", mutates_args=())
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    padding: torch.Tensor | None,
    bias: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    ratio: float,
    compact_only: bool,
) -> torch.Tensor:
    """Placeholder op that an export records whole: q f[B,H,Q,K], k f[B,H,S,K], v f[B,H,S,E].

    The mask is said by `mask` (bool: true may attend; float: added to the scores), or in compact
    form: padding b[B,1,1,S], a bias that is added and may be trained, causality. Where both are
    said they mean the same but for rows of queries that see no key at all; there `mask` is right,
    and `attention_forms.choose` takes one of the two, or refuses where `compact_only`.
    """
    raise NotImplementedError("onward::attention exists during capture only")


@attention.register_fake
def _(
    q: Any, k: Any, v: Any, mask: Any, padding: Any, bias: Any, is_causal: bool, scale: float,
    ratio: float, compact_only: bool,
) -> Any:  # fmt: skip
    for added in (mask, padding, bias):
        if added is not None:  # its dims and those of the scores are then known to be equal
            added.expand(*q.shape[:-1], k.shape[-2])
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


@dataclass(frozen=True)
class _Made:
    """A dense mask and what it was made of. padding: b[B,1,1,S].

    optional: torch's sdpa is given no mask at all where the batch hides no token.
    """

    dense: torch.Tensor
    version: int
    padding: torch.Tensor | None
    causal: bool
    optional: bool


def _dense(
    keys: torch.Tensor | None,
    causal: bool,
    added: bool,
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    **_: Any,
) -> torch.Tensor:
    """What transformers' mask function makes of the same, `b[B,1,Q,K]` or floats, in fewer nodes:
    tracing its own takes as long as one to two layers."""
    if causal:
        q, k = (torch.arange(n, device=device) for n in (q_length, kv_length))
        mask = k <= q[:, None]
        mask = mask if keys is None else mask & keys
    else:
        mask = torch.ones((), dtype=torch.bool, device=device) if keys is None else keys
    mask = mask.expand(batch_size, 1, q_length, kv_length)
    if not added:
        return mask
    return torch.where(mask, torch.zeros((), dtype=dtype, device=device), torch.finfo(dtype).min)


class _Hooks:
    """The functions that stand in for transformers' own while a capture runs."""

    def __init__(self, plain: dict[Function, set[str]]) -> None:
        self._masks: dict[int, _Made] = {}
        self._plain = plain

    # ---- masks

    def mask(self, original: Function, added: bool) -> Function:
        """The mask function `original`, whose masks are remembered. added: they are floats."""
        from transformers import masking_utils

        bidirectional = getattr(masking_utils, "bidirectional_mask_function", None)

        def make(**kwargs: Any) -> torch.Tensor | None:
            function, padding = kwargs["mask_function"], kwargs.get("attention_mask")
            if padding is not None and padding.dim() != 2:
                _require_kind(padding)
            causal = function is masking_utils.causal_mask_function
            offset = kwargs.get("q_offset", 0) != 0 or kwargs.get("kv_offset", 0) != 0
            known = (causal or function is bidirectional) and not offset
            if causal:
                optional = not added and kwargs.get("allow_is_causal_skip", True)
            else:
                optional = kwargs.get("allow_is_bidirectional_skip", False)
            if known and optional and padding is None:
                return None  # as in eager; a trace would be given a dense mask
            # whether a batch hides anything is data, so a mask is always made
            if not known or (padding is not None and padding.shape[-1] != kwargs["kv_length"]):
                never = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
                return original(**{**kwargs, **never})
            keys = None if padding is None else padding.to(torch.bool)[:, None, None, :]
            dense = _dense(keys, causal, added, **kwargs)
            self._masks[id(dense)] = _Made(dense, dense._version, keys, causal, bool(optional))
            return dense

        return make

    def _find(self, mask: torch.Tensor | None) -> _Made | None:
        """What a mask was made of, where it is one of ours and as we made it."""
        made = self._masks.get(id(mask))
        return made if made is not None and made.dense._version == made.version else None

    # ---- attention

    def sdpa(self, original: Function) -> Function:
        """In place of transformers' `sdpa_attention_forward`."""

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
            strange = sorted(k for k in ("softcap", "cache", "s_aux") if kwargs.get(k) is not None)
            if strange:
                raise CaptureError(
                    f"attention with {', '.join(strange)} at {type(module).__name__} has no "
                    "translation"
                )
            made = self._find(attention_mask)
            if attention_mask is not None and made is None:
                _require_kind(attention_mask)
                return original(
                    module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
                    is_causal=is_causal, position_bias=position_bias, **kwargs,
                )  # fmt: skip
            own = bool(is_causal if is_causal is not None else getattr(module, "is_causal", True))
            single = isinstance(query.shape[2], int) and query.shape[2] == 1  # else it is a symbol
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
            out = _call(
                module, query, key, value, exact, made.padding if made else None, position_bias,
                made.causal if made else own, scaling, dropout, compact_only=True,
            )  # fmt: skip
            return out, None

        return forward

    def eager(self, original: Function) -> Function:
        """In place of an `eager_attention_forward`; itself where it is not a plain one."""
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
            # some modules ask for the probabilities
            asked = kwargs.get("output_attentions") or getattr(
                getattr(module, "config", None), "output_attentions", False
            )
            made = self._find(attention_mask)
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
            out = _call(module, query, key, value, exact, padding, bias, causal, scaling, ratio)
            return out, None

        return forward


_USUAL = {
    "module", "query", "key", "value", "attention_mask", "scaling", "dropout", "position_bias",
    "kwargs",
}  # fmt: skip


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
    """The attention of a capture: `f[B,H,T,K]` in, `f[B,T,H,K]` out."""
    groups = getattr(module, "num_key_value_groups", 1)
    if groups != 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = torch.ops.onward.attention(
        query, key, value, mask, padding, bias, causal, float(scale), float(ratio), compact_only
    )
    return out.transpose(1, 2)


def _require_kind(mask: torch.Tensor) -> None:
    if mask.dim() != 4 or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise CaptureError(
            f"an attention mask of shape {tuple(mask.shape)} and {mask.dtype}; fix: give one of "
            "shape (batch, tokens), or (batch, 1, tokens, tokens) of bool (true may attend) or of "
            "the scores' float dtype (added to them)"
        )


# ---- which `eager_attention_forward` is plain


def _plain_functions(model: torch.nn.Module) -> dict[Function, set[str]]:
    """The functions of the modules' files that compute `softmax(scale q k^T + bias + mask) v`, and
    in which further forms. They are called with numbers: sinks, caps and the like show."""
    found: dict[Function, set[str]] = {}
    classes = {c for m in model.modules() for c in type(m).__mro__}
    for file in {c.__module__ for c in classes}:
        function = getattr(sys.modules.get(file), "eager_attention_forward", None)
        if inspect.isfunction(function) and function not in found:
            found[function] = _forms(function)
    return found


def _forms(function: Function) -> set[str]:
    """Among "scale", "no scale", "bias", "groups": those in which the function is plain; none
    without the first. groups: several heads of queries share one of keys."""
    parameters = inspect.signature(function).parameters
    if _reads_its_keywords(function) or not _agrees(function, scaling=0.3):
        return set()
    forms = {"scale"}
    if _agrees(function, scaling=None):
        forms.add("no scale")
    if "position_bias" in parameters and _agrees(function, scaling=0.3, biased=True):
        forms.add("bias")
    if _agrees(function, scaling=0.3, groups=2):
        forms.add("groups")
    return forms


def _reads_its_keywords(function: Function) -> bool:
    """Whether the body reads the dict of what it has no parameter for."""
    rest = [
        p.name for p in inspect.signature(function).parameters.values() if p.kind == p.VAR_KEYWORD
    ]
    for step in dis.get_instructions(function):
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        if step.opname.startswith("LOAD") and any(name in names for name in rest):
            return True
    return False


def _agrees(
    function: Function, scaling: float | None, biased: bool = False, groups: int = 1
) -> bool:
    """Whether it gives the formula's numbers, also in rows that see few keys or none."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    q, k, v = numbers(2, 4, 3, 6), numbers(2, 4 // groups, 5, 6), numbers(2, 4 // groups, 5, 6)
    mask = torch.zeros(2, 1, 3, 5)
    mask[0, :, 1, 2:] = mask[1, :, 2, :] = torch.finfo(torch.float32).min
    wide_k, wide_v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scores = q @ wide_k.transpose(2, 3) * (6**-0.5 if scaling is None else scaling)
    more: dict[str, Any] = {}
    if biased:
        more["position_bias"] = numbers(1, 4, 3, 5)
        scores = scores + more["position_bias"]
    module = SimpleNamespace(num_key_value_groups=groups, training=False)
    for added in (None, mask):
        whole = scores if added is None else scores + added
        want = (whole.softmax(-1) @ wide_v).transpose(1, 2)
        try:
            have, _ = function(module, q, k, v, added, scaling=scaling, dropout=0.0, **more)
        except Exception:  # it needs what another module has
            return False
        if have.shape != want.shape or not torch.allclose(have, want, rtol=1e-5, atol=1e-5):
            return False
    return True


@contextmanager
def attention_kept_whole(model: torch.nn.Module, own_positions: bool) -> Iterator[None]:
    """Within it, the Hugging Face modules of `model` attend through `onward::attention`.

    `own_positions`: the batch brings position ids, which may mark packed documents. Where it does
    not, the model counts positions itself and the search for packed documents is left out.
    """
    if not _configs_with_sdpa(model):
        yield
        return
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

    hooks = _Hooks(_plain_functions(model))
    find_packed = getattr(masking_utils, "find_packed_sequence_indices", None)
    if find_packed is not None and not own_positions:
        masking_utils.find_packed_sequence_indices = lambda position_ids: None
    functions, masks = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    before = dict(functions), dict(masks)
    interface = AttentionInterface.__dict__.get("get_interface")
    if _is_own(functions.get("sdpa")):
        functions["sdpa"] = hooks.sdpa(functions["sdpa"])
    for name in ("sdpa", "eager"):
        if _is_own(masks.get(name)):
            masks[name] = hooks.mask(masks[name], added=name == "eager")
    if interface is not None:

        def chosen(self: Any, attn_implementation: str, default: Function) -> Function:
            function = interface(self, attn_implementation, default)
            return hooks.eager(function) if function is default else function

        AttentionInterface.get_interface = chosen
    try:
        yield
    finally:
        if find_packed is not None:
            masking_utils.find_packed_sequence_indices = find_packed
        if interface is not None:
            AttentionInterface.get_interface = interface
        for mapping, content in zip((functions, masks), before, strict=True):
            mapping.clear()
            mapping.update(content)


def _is_own(function: Any) -> bool:
    """Whether it is transformers' own, not one that a user registered under its name."""
    return getattr(function, "__module__", "").startswith("transformers.")


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
