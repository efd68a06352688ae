"""Normalisations, attention, recurrent layers and losses in torch."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from nodes.torch_table import NoForm, T, row

# ---- normalisations


@row("BatchNormalization")
def _batch_norm(a: Any, x: T, scale: T, bias: T, mean: T, var: T) -> Any:
    if not a.training_mode:  # torch gives running statistics no gradient
        mean, var, scale, bias = (
            s.reshape(-1, *[1] * (x.dim() - 2)) for s in (mean, var, scale, bias)
        )
        return (x - mean) * (var + a.epsilon).rsqrt() * scale + bias
    y = F.batch_norm(x, None, None, scale, bias, True, 0.0, a.epsilon)
    dims, m = [d for d in range(x.dim()) if d != 1], a.momentum
    here, spread = x.mean(dims), x.var(dims, unbiased=False)
    return y, mean * m + here * (1 - m), var * m + spread * (1 - m)


@row("LayerNormalization")
def _layer_norm(a: Any, x: T, scale: T, bias: T | None = None) -> tuple[T, T, T]:
    dims = list(range(a.axis % x.dim(), x.dim()))
    y = F.layer_norm(x, x.shape[dims[0] :], eps=a.epsilon) * scale
    y = y if bias is None else y + bias  # both broadcast to x
    return y, x.mean(dims, True), (x.var(dims, False, keepdim=True) + a.epsilon).rsqrt()


@row("RMSNormalization")
def _rms_norm(a: Any, x: T, scale: T) -> T:
    return F.rms_norm(x, list(x.shape[a.axis % x.dim() :]), scale, a.epsilon)


@row("InstanceNormalization")
def _instance_norm(a: Any, x: T, scale: T, bias: T) -> T:
    return F.instance_norm(x, weight=scale, bias=bias, eps=a.epsilon)


@row("GroupNormalization")
def _group_norm(a: Any, x: T, scale: T, bias: T) -> T:
    each = x.shape[1] // len(scale)  # opset 18 has one scale for each group
    scale, bias = scale.repeat_interleave(each), bias.repeat_interleave(each)
    return F.group_norm(x, a.num_groups, scale, bias, a.epsilon)


@row("MeanVarianceNormalization")
def _mean_variance(a: Any, x: T) -> T:
    spread = x.var(a.axes, unbiased=False, keepdim=True)
    return (x - x.mean(a.axes, keepdim=True)) / (spread.sqrt() + 1e-9)


@row("LpNormalization", kinks="where all is 0 as if divided by 1: normalize divides by its eps")
def _lp_normalization(a: Any, x: T) -> T:
    norm = torch.linalg.vector_norm(x, a.p, a.axis, keepdim=True)
    return x / torch.where(norm == 0, 1.0, norm)


@row("LRN")
def _lrn(a: Any, x: T) -> T:
    if a.size % 2 == 0:
        raise NoForm("an even number of channels: torch sums one more before, ONNX behind")
    return F.local_response_norm(x, a.size, a.alpha, a.beta, a.bias)


# ---- attention


@row("Attention", kinks="a query with no key has no gradient")
def _attention(
    a: Any, q: T, k: T, v: T, mask: T | None = None, past_k: T | None = None,
    past_v: T | None = None, lengths: T | None = None,
) -> tuple[T, ...]:  # fmt: skip
    """Attention by scaled_dot_product_attention, or written out for a soft cap or scores as a
    result."""
    flat = q.dim() == 3
    if flat:
        q, k, v = (
            x.unflatten(2, (heads, -1)).transpose(1, 2)
            for x, heads in ((q, a.q_num_heads), (k, a.kv_num_heads), (v, a.kv_num_heads))
        )
    if past_k is not None and past_v is not None:
        k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
    allowed, added = _masks(a, q, k, mask, 0 if past_k is None else past_k.shape[2], lengths)
    scale = 1 / math.sqrt(q.shape[-1]) if a.scale is None else a.scale
    if a.softcap or a.outputs > 3:
        y, scores = _written_out(a, q, k, v, allowed, added, scale)
    else:
        bias = added.masked_fill(~allowed, -math.inf)
        bias = bias.expand(*torch.broadcast_shapes(bias.shape, (1, 1, 1, 1)))
        y = F.scaled_dot_product_attention(q, k, v, bias, scale=scale, enable_gqa=True)
        scores = y
    return y.transpose(1, 2).flatten(2) if flat else y, k, v, scores


def _masks(a: Any, q: T, k: T, mask: T | None, past: int, lengths: T | None) -> tuple[T, T]:
    """Masks: b[..,T,S] of the keys that a query may read, and f[..,T,S] to add to the scores."""
    steps, keys = q.shape[2], k.shape[2]
    allowed, added = torch.ones(1, 1, steps, keys, dtype=torch.bool), q.new_zeros(steps, keys)
    if mask is not None:
        bits = mask.dtype == torch.bool
        more = keys - mask.shape[-1]
        wide = F.pad(mask, (0, more), value=False if bits else -math.inf)
        if bits:
            allowed = allowed & wide
        else:
            added = added + wide
    offset = torch.tensor([past]) if lengths is None else lengths - steps
    here = torch.arange(steps).reshape(1, 1, -1, 1) + offset.reshape(-1, 1, 1, 1)
    ahead = torch.arange(keys) - here
    if a.is_causal:
        allowed = allowed & (ahead <= 0)
    if (a.left_window_size or 0) >= 0 and a.left_window_size is not None:
        allowed = allowed & (-ahead <= a.left_window_size)
    if (a.right_window_size or 0) >= 0 and a.right_window_size is not None:
        allowed = allowed & (ahead <= a.right_window_size)
    if lengths is not None:
        allowed = allowed & (torch.arange(keys) < lengths.reshape(-1, 1, 1, 1))
    return allowed, added


def _written_out(a: Any, q: T, k: T, v: T, allowed: T, added: T, scale: float) -> tuple[T, T]:
    each = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(each, 1), v.repeat_interleave(each, 1)
    plain = q @ k.transpose(2, 3) * scale
    capped = torch.tanh(plain / a.softcap) * a.softcap if a.softcap else plain
    masked = (capped + added).masked_fill(~allowed, -math.inf)
    alive = masked.amax(-1, keepdim=True) > -math.inf
    p = torch.where(alive, torch.where(alive, masked, 0.0).softmax(-1), 0.0)
    return p @ v, (plain, capped, masked, p)[a.qk_matmul_output_mode]


@row("RotaryEmbedding")
def _rotary(a: Any, x: T, cos: T, sin: T, at: T | None = None) -> T:
    """Rotary embedding as a product of complex numbers: each pair is turned by cos + i sin."""
    whole = x.unflatten(2, (a.num_heads, -1)) if x.dim() == 3 else x.transpose(1, 2)
    turned = a.rotary_embedding_dim or whole.shape[-1]
    pair = whole[..., :turned]
    pair = pair.unflatten(-1, (-1, 2)) if a.interleaved else pair.unflatten(-1, (2, -1)).mT
    if at is not None:
        cos, sin = cos[at], sin[at]
    z = torch.view_as_complex(pair.contiguous()) * torch.complex(cos, sin).unsqueeze(2)
    y = torch.view_as_real(z)
    y = torch.cat([(y if a.interleaved else y.mT).flatten(-2), whole[..., turned:]], -1)
    return y.flatten(2) if x.dim() == 3 else y.transpose(1, 2)


@row("LinearAttention")
def _linear_attention(
    a: Any, q: T, k: T, v: T, state: T | None = None, decay: T | None = None,
    beta: T | None = None,
) -> tuple[T, T]:  # fmt: skip
    """Linear attention step by step: the state f[B,H,K,V] decays, forgets what k held, and takes
    v."""
    q = q.unflatten(2, (a.q_num_heads, -1))
    k, v = (x.unflatten(2, (a.kv_num_heads, -1)) for x in (k, v))
    each = a.q_num_heads // a.kv_num_heads
    if state is None:
        state = q.new_zeros(len(q), a.kv_num_heads, k.shape[-1], v.shape[-1])
    made: list[T] = []
    for t in range(q.shape[1]):
        new = v[:, t]
        if "gated" in a.update_rule:
            assert decay is not None
            state = state * decay[:, t].unflatten(1, (a.kv_num_heads, -1)).exp().unsqueeze(-1)
        if "delta" in a.update_rule:
            assert beta is not None
            held = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
            new = beta[:, t].unsqueeze(-1) * (new - held)
        state = state + k[:, t].unsqueeze(-1) * new.unsqueeze(-2)
        wide = state.repeat_interleave(each, 1)
        made.append(torch.einsum("bhk,bhkv->bhv", q[:, t], wide))
    scale = a.scale or 1 / math.sqrt(k.shape[-1])
    return scale * torch.stack(made, 1).flatten(2), state


@row("CausalConvWithState")
def _causal_conv(a: Any, x: T, w: T, bias: T | None = None, past: T | None = None) -> tuple[T, T]:
    more = w.shape[-1] - 1
    wide = F.pad(x, (more, 0)) if past is None else torch.cat([past, x], 2)
    y = F.conv1d(wide, w, bias, groups=x.shape[1])
    y = y if a.activation == "none" else F.silu(y)
    return y, wide[:, :, wide.shape[2] - more :]


# ---- recurrent layers

# Order of the gates: torch's, one below the other, among those of ONNX.
_ORDER = {"RNN": [0], "GRU": [1, 0, 2], "LSTM": [0, 2, 3, 1]}
_USUAL = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}


def _reordered(op: str, w: T) -> T:
    parts = w.chunk(len(_ORDER[op]))
    return torch.cat([parts[i] for i in _ORDER[op]])


def _recurrent(op: str, a: Any, x: T, w: T, r: T, bias: T | None, lengths: T | None,
               *starts: T | None) -> Any:  # fmt: skip
    ways = len(w)
    usual = _USUAL[op] * ways
    names = [n.capitalize() for n in a.activations or usual][: len(usual)]
    relu = op == "RNN" and names == ["Relu"] * ways
    if names != usual and not relu:
        raise NoForm("other activations than torch's")
    if a.clip or a.input_forget:
        raise NoForm("clipped or coupled gates")
    short = lengths is not None and bool((lengths < x.shape[1 if a.layout else 0]).any())
    if short and a.direction == "reverse":
        raise NoForm("sequences of several lengths from behind")
    if a.layout:
        x, starts = x.transpose(0, 1), tuple(s if s is None else s.transpose(0, 1) for s in starts)
    steps, batch, hidden = x.shape[0], x.shape[1], r.shape[-1]
    if a.direction == "reverse":
        x = x.flip(0)
    flat: list[T] = []
    for way in range(ways):
        flat += [_reordered(op, w[way]), _reordered(op, r[way])]
        if bias is not None:
            flat += [_reordered(op, half) for half in bias[way].chunk(2)]
    states = [x.new_zeros(ways, batch, hidden) if s is None else s for s in starts]
    function = {"RNN": torch.rnn_relu if relu else torch.rnn_tanh, "GRU": torch.gru,
                "LSTM": torch.lstm}[op]  # fmt: skip
    first: Any = states if op == "LSTM" else states[0]
    both = ways == 2
    if lengths is None:
        y, *ends = function(x, first, flat, bias is not None, 1, 0.0, False, both, False)
    else:
        packed = torch.nn.utils.rnn.pack_padded_sequence(
            x, lengths.to(torch.int64), enforce_sorted=False
        )
        order, back = packed.sorted_indices, packed.unsorted_indices
        assert order is not None and back is not None
        states = [s[:, order] for s in states]
        first = states if op == "LSTM" else states[0]
        data, *ends = function(
            packed.data, packed.batch_sizes, first, flat, bias is not None, 1, 0.0, False, both
        )
        made = torch.nn.utils.rnn.PackedSequence(data, packed.batch_sizes, order, back)
        y, _ = torch.nn.utils.rnn.pad_packed_sequence(made, total_length=steps)
        ends = [e[:, back] for e in ends]
    y = y.flip(0) if a.direction == "reverse" else y
    y = y.unflatten(2, (ways, hidden)).transpose(1, 2)  # f[T,D,N,H]
    if a.layout:
        y, ends = y.permute(2, 0, 1, 3), [e.transpose(0, 1) for e in ends]
    return y, *ends


@row("RNN")
def _rnn(
    a: Any, x: T, w: T, r: T, bias: T | None = None, lengths: T | None = None,
    h: T | None = None,
) -> Any:  # fmt: skip
    return _recurrent("RNN", a, x, w, r, bias, lengths, h)


@row("GRU")
def _gru(
    a: Any, x: T, w: T, r: T, bias: T | None = None, lengths: T | None = None,
    h: T | None = None,
) -> Any:  # fmt: skip
    if not a.linear_before_reset:
        raise NoForm("a reset gate before the product")
    return _recurrent("GRU", a, x, w, r, bias, lengths, h)


@row("LSTM")
def _lstm(
    a: Any, x: T, w: T, r: T, bias: T | None = None, lengths: T | None = None,
    h: T | None = None, c: T | None = None, peepholes: T | None = None,
) -> Any:  # fmt: skip
    if peepholes is not None:
        raise NoForm("peepholes")
    return _recurrent("LSTM", a, x, w, r, bias, lengths, h, c)


# ---- losses


@row("SoftmaxCrossEntropyLoss")
def _cross_entropy(a: Any, x: T, labels: T, weight: T | None = None) -> tuple[T, T]:
    log_prob = F.log_softmax(x, 1)
    if weight is not None:
        return _weighted(a, log_prob, labels, weight), log_prob
    ignored = -(10**9) if a.ignore_index is None else a.ignore_index
    loss = F.cross_entropy(x, labels.to(torch.int64), None, ignore_index=ignored,
                           reduction=a.reduction)  # fmt: skip
    return loss, log_prob


@row("NegativeLogLikelihoodLoss")
def _nll(a: Any, x: T, labels: T, weight: T | None = None) -> T:
    if weight is not None:
        return _weighted(a, x, labels, weight)
    ignored = -(10**9) if a.ignore_index is None else a.ignore_index
    return F.nll_loss(x, labels.to(torch.int64), None, ignore_index=ignored, reduction=a.reduction)


def _weighted(a: Any, log_prob: T, labels: T, weight: T) -> T:
    """The loss with class weights, written out: torch's losses give the weights no gradient."""
    labels = labels.to(torch.int64)
    counted = torch.ones_like(labels, dtype=torch.bool)
    if a.ignore_index is not None:
        counted = labels != a.ignore_index
    safe = torch.where(counted, labels, 0)
    share = torch.where(counted, weight[safe], 0.0)
    loss = -log_prob.gather(1, safe.unsqueeze(1)).squeeze(1) * share
    if a.reduction == "none":
        return loss
    return loss.sum() if a.reduction == "sum" else loss.sum() / share.sum()
