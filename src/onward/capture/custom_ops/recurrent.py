"""`onward::recurrent`: replaces PyTorch's recurrent layers in a trace. An export would unroll the
steps, and specialize the batch's sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import _VF

from onward.capture.custom_ops.autocast import as_product
from onward.errors import CaptureError
from onward.model_state.patches import Patch, patched

_KINDS = {"lstm": "lstm", "gru": "gru", "rnn_tanh": "tanh", "rnn_relu": "relu"}
_NAMES = (
    "input", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional",
    "batch_first",
)  # fmt: skip


@torch.library.custom_op("onward::recurrent", mutates_args=())
def recurrent(
    x: torch.Tensor,
    states: list[torch.Tensor],
    weights: list[torch.Tensor],
    kind: str,
    biases: bool,
    layers: int,
    dropout: float,
    bidirectional: bool,
    batch_first: bool,
) -> list[torch.Tensor]:
    """Placeholder op: x f[T,N,I] (f[N,T,I] if `batch_first`), states [f[D,N,P]] (for an LSTM also
    the cells f[D,N,H]) with D = layers * directions -> [the last layer's states at all steps
    f[T,N,P * directions], then the final states in the form of `states`]. weights: in PyTorch's
    order."""
    raise NotImplementedError("onward::recurrent exists during capture only")


@recurrent.register_fake
def _(
    x: Any, states: Any, weights: Any, kind: str, biases: bool, layers: int, dropout: float,
    bidirectional: bool, batch_first: bool,
) -> Any:  # fmt: skip
    samples = x.shape[0 if batch_first else 1]
    torch._check(x.shape[2] == weights[0].shape[1])  # so that the export records the equality
    for state in states:
        torch._check(state.shape[1] == samples)
    width = states[0].shape[2] * (2 if bidirectional else 1)
    y = states[0].new_empty((*x.shape[:2], width))  # not by x, whose dtype autocast may change
    return [y, *(torch.empty_like(s) for s in states)]


def _recorded(kind: str) -> Callable[..., Any]:
    """Returns the replacement for `torch.lstm`, `torch.gru`, ... It raises CaptureError for packed
    sequences."""

    def record(*args: Any, **more: Any) -> Any:
        if "batch_sizes" in more:
            _refuse_packed()
        args = (*args, *(more[name] for name in _NAMES[len(args) :]))
        if isinstance(args[1 if kind == "lstm" else 2], torch.Tensor):
            _refuse_packed()
        x, states, weights, biases, layers, dropout, train, bidirectional, batch_first = args
        held = list(states) if kind == "lstm" else [states]
        made = recurrent(
            x, held, list(weights), kind, biases, layers, dropout if train else 0.0, bidirectional,
            batch_first,
        )  # fmt: skip
        first = _states_dtype_from(kind, x, held)
        return (*map(as_product, made[:first]), *made[first:])

    return record


def _states_dtype_from(kind: str, x: torch.Tensor, states: list[torch.Tensor]) -> int:
    """Returns the index of the first result that keeps the states' dtype under autocast; those
    before it have the dtype of autocast's products.

    On a CPU a GRU, and an LSTM outside of oneDNN, compute in the states' dtype. In an LSTM with a
    projection, the projected states are products, the cells are not.
    """
    if x.device.type != "cpu" or kind not in ("gru", "lstm"):
        return 1 + len(states)
    if kind == "gru":
        return 0
    if states[0].shape[2] != states[1].shape[2]:
        return 2
    return 1 + len(states) if _is_for_onednn(x) else 0


def _is_for_onednn(x: torch.Tensor) -> bool:
    """Returns whether eager PyTorch uses oneDNN for an LSTM without projection on a CPU."""
    if not (torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()):
        return False
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return x.dtype == torch.float32 or (x.dtype in supported and supported[x.dtype]())


def _refuse_packed(*_: Any, **__: Any) -> Any:
    raise CaptureError(
        "a packed sequence (torch.nn.utils.rnn) has a number of rows that depends on the data; "
        "fix: give the layer the padded sequence, and mask what it returns"
    )


@contextmanager
def recurrent_layers_kept_whole() -> Iterator[None]:
    """A context in which a recurrent layer is one op, and packed sequences raise CaptureError."""
    places: list[Patch] = [
        (owner, name, _recorded(kind)) for name, kind in _KINDS.items() for owner in (_VF, torch)
    ]
    packing = ("_pack_padded_sequence", "_pad_packed_sequence")
    places += [(_VF, name, _refuse_packed) for name in packing]
    with patched(places):
        yield


__all__ = ["recurrent_layers_kept_whole"]
