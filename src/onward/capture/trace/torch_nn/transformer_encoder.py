"""torch.nn.TransformerEncoder in evaluation with a padding mask: zeros for hidden tokens.

Eager PyTorch then drops the hidden tokens (it converts to a nested tensor), and pads the result
with zeros before the final norm. It does so if the encoder's `use_nested_tensor` is set, there is
no attention mask, no gradient is needed, and all hidden tokens are at the end of their rows. An
export traces the other path, in which hidden tokens have arbitrary numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from onward.errors import CaptureError
from onward.model_state.patches import patched


@contextmanager
def padded_with_zeros(trains: bool) -> Iterator[None]:
    """A context in which an encoder returns the numbers of eager PyTorch for hidden tokens.

    trains: whether gradients are asked for. Raises CaptureError for mask_check=False.
    """
    encoder = torch.nn.TransformerEncoder
    plain = encoder.forward

    def forward(
        self: Any, src: Any, mask: Any = None, src_key_padding_mask: Any = None,
        is_causal: Any = None,
    ) -> Any:  # fmt: skip
        y = plain(self, src, mask, src_key_padding_mask, is_causal)
        hidden = src_key_padding_mask
        if hidden is None or mask is not None:
            return y
        if not _nests(self, src, trains):
            return y
        if not getattr(self, "mask_check", True):
            raise CaptureError(
                "torch.nn.TransformerEncoder with mask_check=False cannot be captured; fix: "
                "mask_check=True"
            )
        hidden = hidden if hidden.dtype == torch.bool else hidden != 0  # b[B,T]
        behind = hidden.long().cumsum(1) > 0  # b[B,T]: from the first hidden token on
        last = (behind != hidden).long().sum() == 0
        empty = src.new_zeros(src.shape[-1])
        empty = empty if self.norm is None else self.norm(empty)
        return torch.where((hidden & last)[..., None], empty, y)

    with patched([(encoder, "forward", forward)]):
        yield


def _nests(encoder: Any, src: torch.Tensor, trains: bool) -> bool:
    """Returns whether eager PyTorch would use a nested tensor if the mask allows it."""
    first = encoder.layers[0]
    if not getattr(encoder, "use_nested_tensor", False) or first.training or src.dim() != 3:
        return False
    if not torch.backends.mha.get_fastpath_enabled():
        return False
    attention = first.self_attn
    read = (
        src, attention.in_proj_weight, attention.in_proj_bias, attention.out_proj.weight,
        attention.out_proj.bias, first.norm1.weight, first.norm1.bias, first.norm2.weight,
        first.norm2.bias, first.linear1.weight, first.linear1.bias, first.linear2.weight,
        first.linear2.bias,
    )  # fmt: skip
    return not (trains and any(x.requires_grad for x in read))
