"""Scaled dot-product attention with its dropout inside.

Source: "Attention Is All You Need" (arXiv 1706.03762), eq. 1; masks as in
`torch.nn.functional.scaled_dot_product_attention`, except that a query without visible keys gives
0, not NaN.

Packed rows: q f[1,H,N,K], k f[1,H,M,K] and v f[1,H,M,E] may hold rows of many sequences, each row
with its coordinates (sequence, position). A query attends only to keys of its own sequence; causal
masks and dropout use positions, so that packing changes no bit of a mask.

Sequences ascend along the rows, of queries and of keys, so that rows of a sequence are contiguous;
positions ascend within a sequence. Both count from 0 and have 31 bits. Keys of sequence -1, at any
row and with any position, are hidden: no query sees them. Kernels rely on this; for other
coordinates their results are undefined.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onward.graph.graph import type_of
from onward.graph.ops import random
from onward.graph.ops.call import Call
from onward.graph.ops.random import columns, kept, masked
from onward.graph.ops.record import Op, Types
from onward.graph.types import DType, Size, Type, divide, product

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value
LOWEST = -1e37  # a number beside which a score is nothing: their sum is the number


def repeated(b: Builder, x: Value, q: Value) -> Value:
    """Repeats keys or values x f[*,G,S,K] so that each of q's H heads has one: f[*,H,S,K], G
    divides H."""
    shape, rank = type_of(x).shape, type_of(x).rank
    if rank < 3 or shape[-3] == type_of(q).shape[-3]:
        return x
    times = divide(type_of(q).shape[-3], shape[-3])
    assert times is not None
    wide = b.expand(b.unsqueeze(x, [rank - 2]), (*shape[:-2], times, *shape[-2:]))
    return b.reshape(wide, (*shape[:-3], type_of(q).shape[-3], *shape[-2:]))


def products(b: Builder, q: Value, k: Value, attrs: dict[str, Any]) -> Value:
    """The scores before masks f[B,H,Q,S]: `scale q k^T`, or `cap * tanh(scale q k^T / cap)`."""
    rank = type_of(q).rank
    perm = [*range(rank - 2), rank - 1, rank - 2]
    s = b.MatMul(b.Mul(q, float(attrs["scale"])), b.transpose(repeated(b, k, q), perm))
    cap = float(attrs.get("softcap", 0.0))
    return b.Mul(b.Tanh(b.Div(s, cap)), cap) if cap else s


def scores(
    b: Builder, s: Value, inputs: list[Value | None], attrs: dict[str, Any]
) -> tuple[Value, Value | None]:
    """Adds masks to the scores s f[B,H,Q,S]. Returns them, and a mask of where a query may attend
    to a key; None: everywhere.

    inputs: of the node, starting with q.
    """
    _, _, _, mask, _, _, q_at, k_at, bias = [*inputs, *[None] * 6][:9]
    dtype, (queries, keys) = type_of(s).dtype, type_of(s).shape[-2:]
    allowed: Value | None = None
    if mask is not None and type_of(mask).dtype == DType.BOOL:
        allowed = mask
    elif mask is not None:
        s = b.Add(s, mask)
    if bias is not None:
        s = b.Add(s, _of_places(b, bias, q_at, k_at))
    q_place, k_place = b.arange(queries), b.arange(keys)
    if q_at is not None and k_at is not None:
        (q_sequence, q_place), (k_sequence, k_place) = columns(b, q_at), columns(b, k_at)
        allowed = b.Equal(b.unsqueeze(q_sequence, [1]), b.unsqueeze(k_sequence, [0]))  # b[N,M]
    if attrs.get("is_causal"):
        causal = b.GreaterOrEqual(b.unsqueeze(q_place, [1]), b.unsqueeze(k_place, [0]))  # b[Q,S]
        allowed = causal if allowed is None else b.And(allowed, causal)
    if allowed is not None:
        # a row of the lowest finite number has a softmax; what is added may be as low, and then
        # `live` takes care of rows of -inf
        lowest = -np.inf if adds(inputs) else np.finfo(dtype.numpy()).min
        fill = np.array(attrs.get("fill", lowest), dtype=dtype.numpy())
        if attrs.get("fill_is_added"):
            s = b.Add(s, b.Where(allowed, np.zeros((), dtype=dtype.numpy()), fill))
        else:
            s = b.Where(allowed, s, fill)
    return s, allowed


def _of_places(b: Builder, bias: Value, q_at: Value | None, k_at: Value | None) -> Value:
    """Gathers a bias by the positions of packed rows: f[1,H,N,M]."""
    if q_at is None or k_at is None:
        return bias
    return b.Gather(b.Gather(bias, places(b, q_at), axis=2), places(b, k_at), axis=3)


def as_bias(b: Builder, added: Value, q: Value, k: Value) -> Value:
    """Reshapes an addend of the scores, of up to four dims, to a bias f[1 or B,H,Q,S]."""
    added = b.unsqueeze(added, list(range(4 - type_of(added).rank)))
    heads, queries = type_of(q).shape[1:3]
    return b.expand(added, (type_of(added).shape[0], heads, queries, type_of(k).shape[2]))


def places(b: Builder, coordinates: Value) -> Value:
    """The positions i64[N] of packed rows; 0 for hidden rows, which may have any."""
    sequence, place = columns(b, coordinates)
    zero = np.array(0, dtype=np.int64)
    return b.Where(b.Less(sequence, zero), zero, place)


def adds(inputs: list[Value | None]) -> bool:
    """Whether a mask or bias is added to the scores. inputs: of the node, starting with q."""
    mask, bias = ([*inputs, *[None] * 6][i] for i in (3, 8))
    return bias is not None or (mask is not None and type_of(mask).is_floating)


def live(b: Builder, s: Value, inputs: list[Value | None]) -> Value | None:
    """A mask b[B,H,Q,1] of queries that an added mask or bias leaves a key to see (others give 0,
    as in torch); None without a mask that may be -inf throughout. A query with a score of NaN is
    one of them."""
    if not adds(inputs) or type_of(s).shape[-1] == 0:
        return None
    peak = b.ReduceMax(s, b.ints([type_of(s).rank - 1]), keepdims=1)
    return b.Not(b.Equal(peak, np.array(-np.inf, dtype=type_of(s).dtype.numpy())))


def attended(
    b: Builder,
    s: Value,
    allowed: Value | None,
    inputs: list[Value | None],
    attrs: dict[str, Any],
) -> Value:
    """Attention's result y f[B,H,Q,D], computed from its masked scores."""
    _, _, v, mask, *draw = [*inputs, *[None] * 5][:8]
    assert v is not None
    alive = live(b, s, inputs)
    if alive is not None:
        s = b.Where(alive, s, np.zeros((), dtype=type_of(s).dtype.numpy()))
    p = b.Softmax(s, axis=-1)
    if alive is not None:
        p = b.Where(alive, p, np.zeros((), dtype=type_of(p).dtype.numpy()))
    hides = allowed is not None and "fill" not in attrs
    if hides and (mask is not None or draw[-1] is not None):
        zero = np.zeros((), dtype=type_of(p).dtype.numpy())
        p = b.Where(allowed, p, zero)  # queries that may see nothing
    return b.MatMul(dropped(b, p, draw, attrs), repeated(b, v, s))


def dropped(b: Builder, p: Value, draw: list[Value | None], attrs: dict[str, Any]) -> Value:
    """Applies dropout to p f[B,H,Q,S] as the attributes say. It is linear, and so is its own
    gradient.

    draw: seed, offset, and the coordinates of queries and keys.
    """
    seed, offset, q_at, k_at = draw
    ratio = float(attrs.get("ratio", 0.0))
    first = int(attrs.get("first_head", 0))
    packed = q_at is not None and k_at is not None
    if ratio in (0.0, 1.0) or not (packed or first):
        return random.dropped(b, p, [seed, offset], attrs)
    assert seed is not None
    head = b.unsqueeze(b.arange(type_of(p).shape[1]), [1, 2])  # i64[H,1,1]
    if first:
        head = b.Add(head, np.array(first, dtype=np.int64))
    if q_at is None or k_at is None:
        sample, _, query = random.row_indices(b, p, None)
        features = b.arange(type_of(p).shape[3])
        keep = kept(b, [sample, head, query], features, seed, offset, attrs)
        return masked(b, p, keep, ratio)
    sequence, place = (b.unsqueeze(column, [1]) for column in columns(b, q_at))  # i64[N,1]
    features = columns(b, k_at)[1]
    return masked(b, p, kept(b, [sequence, head, place], features, seed, offset, attrs), ratio)


def _attention(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    q, k = inputs[:2]
    assert q is not None and k is not None
    s, allowed = scores(b, products(b, q, k, attrs), inputs, attrs)
    return [attended(b, s, allowed, inputs, attrs)]


def check_packed(call: Call, first: int = 0, at: int = 6) -> None:
    """Raises ValueError unless inputs `at` and `at + 1` are both absent, or both coordinates.

    first: the position of the input q.
    """
    if not call.present(at) and not call.present(at + 1):
        return
    q, k = call.type(first), call.type(first + 1)
    for rows, given in ((q, call.type(at)), (k, call.type(at + 1))):
        if given != Type(DType.INT64, (rows.shape[-2], 2)) or rows.rank != 4 or rows.shape[0] != 1:
            raise ValueError(f"{call.op_type}: {given} are not the coordinates of rows of {rows}")
    if call.present(first + 3):
        raise ValueError(f"{call.op_type}: packed rows with a mask")


def check_bias(call: Call, first: int = 0, at: int = 8) -> None:
    """Raises ValueError unless input `at` is absent or a bias for these queries and keys."""
    if not call.present(at):
        return
    q, k, bias = call.type(first), call.type(first + 1), call.type(at)
    packed, places = call.present(at - 1), (q.shape[-2], k.shape[-2])
    samples = (1,) if packed else (1, q.shape[0])
    fits = bias.rank == q.rank == 4 and bias.shape[0] in samples and bias.shape[1] == q.shape[1]
    typed = bias.dtype in (q.dtype, q.accumulated.dtype)  # scores are of the latter
    if not fits or not typed or not (packed or bias.shape[2:] == places):
        raise ValueError(f"{call.op_type}: {bias} is no bias of {q} and keys {k}")


def check_groups(call: Call) -> None:
    """Raises ValueError where the number of key heads is known not to divide that of query
    heads."""
    heads, groups = (t.shape[-3] if t.rank > 2 else 1 for t in (call.type(0), call.type(1)))
    if isinstance(heads, int) and isinstance(groups, int) and groups and heads % groups:
        raise ValueError(f"{call.op_type}: {heads} heads over {groups} of keys")


def check_fill(call: Call, first: int = 0) -> None:
    """Raises ValueError where `fill` is given and anything but a boolean mask hides keys, and where
    a number is to be added beside which a score counts."""
    if call.attrs.get("fill_is_added") and call.attrs.get("fill", 0.0) > LOWEST:
        raise ValueError(f"{call.op_type}: what is added to hidden scores is at most {LOWEST}")
    if "fill" not in call.attrs:
        return
    bits = call.present(first + 3) and call.type(first + 3).dtype == DType.BOOL
    if not bits or call.attrs.get("is_causal"):
        raise ValueError(f"{call.op_type}: scores are filled by a mask of bools alone")


def _infer(call: Call) -> list[Type]:
    check_groups(call)
    check_packed(call)
    check_fill(call)
    check_bias(call)
    q, v = call.type(0), call.type(2)
    return [q.with_shape((*q.shape[:-1], v.shape[-1]))]


_QKV = ("f32[2,3,5,4]", "f32[2,3,6,4]", "f32[2,3,6,8]")
_SELF = ("f32[2,3,5,4]", "f32[2,3,5,4]", "f32[2,3,5,4]")
_DROP = {"scale": 0.5, "ratio": 0.25, "site": 1, "sample_dim": 0}

_ADDED = {"fill": -3e38, "fill_is_added": 1}

_GROUPS = ("f32[2,4,5,4]", "f32[2,2,6,4]", "f32[2,2,6,8]")
GROUPED = (
    ({"scale": 0.5, "is_causal": 0}, _GROUPS),
    ({"scale": 0.5, "is_causal": 0}, ("f32[2,4,5,4]", "f32[2,1,6,4]", "f32[2,1,6,8]")),
    ({**_DROP, "is_causal": 0}, (*_GROUPS, "b[2,1,1,6]", "i64[2]", "i64[]")),
)

FORMS = (
    ({"scale": 0.5, "is_causal": 0, "softcap": 0.75}, _QKV),
    ({"scale": 0.5, "is_causal": 1, "softcap": 1.5}, (*_SELF, "b[2,1,1,5]")),
    ({**_DROP, "is_causal": 0, "softcap": 0.75}, (*_SELF, "b[2,1,1,5]", "i64[2]", "i64[]")),
    ({"scale": 0.5, "is_causal": 0, "softcap": 0.5}, (*_QKV, "f32[2,1,5,6]")),
    ({"scale": 0.5, "is_causal": 0, "fill": -1.25}, (*_QKV, "b[2,1,5,6]")),
    ({"scale": 0.5, "is_causal": 0, "fill": -2e4}, (*_QKV, "b[2,1,5,6]")),
    ({**_DROP, "is_causal": 0, "fill": -3e4, "softcap": 2.0},
     (*_SELF, "b[2,1,5,5]", "i64[2]", "i64[]")),
    ({"scale": 0.5, "is_causal": 0, "fill": -1e4}, (*_GROUPS, "b[2,1,1,6]")),
    ({"scale": 0.5, "is_causal": 0, **_ADDED}, (*_QKV, "b[2,1,5,6]")),
    ({**_DROP, "is_causal": 0, **_ADDED, "softcap": 2.0},
     (*_SELF, "b[2,1,5,5]", "i64[2]", "i64[]")),
)  # fmt: skip

_BIAS = {"is_causal": 0, "bias_gradient": 1}
BIASED = (
    ({"scale": 0.5, **_BIAS}, (*_QKV, *[None] * 5, "f32[1,3,5,6]")),
    ({"scale": 0.5, **_BIAS}, (*_QKV, "f32[2,1,1,6]", *[None] * 4, "f32[2,3,5,6]")),
    ({"scale": 0.5, "is_causal": 1}, (*_SELF, "b[2,1,1,5]", *[None] * 4, "f32[1,3,5,5]")),
    ({**_DROP, **_BIAS, "softcap": 0.75, "fill": -1.25},
     (*_SELF, "b[2,1,5,5]", "i64[2]", "i64[]", None, None, "f32[1,3,5,5]")),
    ({"scale": 0.5, **_BIAS}, (*_GROUPS, "b[2,1,1,6]", *[None] * 4, "f32[1,4,5,6]")),
)  # fmt: skip

AT_HEADS = (
    ({**_DROP, "is_causal": 1, "first_head": 3}, (*_SELF, None, "i64[2]", "i64[]")),
    ({**_DROP, "is_causal": 0, "first_head": 8, "sample_dim": 1},
     (*_SELF, "b[2,1,1,5]", "i64[2]", "i64[]")),
    ({**_DROP, "is_causal": 0, "first_head": 2},
     ("f32[1,3,5,4]", "f32[1,3,6,4]", "f32[1,3,6,8]", None, "i64[2]", "i64[]", "i64[5,2]",
      "i64[6,2]")),
)  # fmt: skip

_PACKED = ("f32[1,3,5,4]", "f32[1,3,6,4]", "f32[1,3,6,8]", None)
PACKED = (
    ({"scale": 0.5, "is_causal": 0}, (*_PACKED, None, None, "i64[5,2]", "i64[6,2]")),
    ({"scale": 0.5, "is_causal": 1}, (*_PACKED, None, None, "i64[5,2]", "i64[6,2]")),
    ({**_DROP, "is_causal": 0}, (*_PACKED, "i64[2]", "i64[]", "i64[5,2]", "i64[6,2]")),
    ({**_DROP, "is_causal": 1}, (*_PACKED, "i64[2]", None, "i64[5,2]", "i64[6,2]")),
    (
        {**_DROP, "is_causal": 1},
        ("f32[1,4,5,4]", "f32[1,2,6,4]", "f32[1,2,6,8]", None, "i64[2]", None, "i64[5,2]",
         "i64[6,2]"),
    ),
    ({"scale": 0.5, **_BIAS}, (*_PACKED, None, None, "i64[5,2]", "i64[6,2]", "f32[1,3,4,4]")),
    (
        {**_DROP, **_BIAS},
        (*_PACKED, "i64[2]", "i64[]", "i64[5,2]", "i64[6,2]", "f32[1,3,4,5]"),
    ),
)  # fmt: skip


def flops(inputs: Types, outputs: Types, attrs: Mapping[str, Any]) -> Size:
    """FLOPs of the scores and of their product with the values. Causal calls count all pairs;
    packed rows count as one sequence."""
    q, k, v = inputs[:3]
    assert q is not None and k is not None and v is not None
    return product(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1]) * 2


OPS = (
    Op(
        name="Attention",
        random=True,
        flops=flops,
        infer=_infer,
        body=_attention,
        doc="softmax(scale * q k^T + mask) v, with dropout on the probabilities. Inputs: "
        "q f[B,H,Q,K], k f[B,G,S,K], v f[B,G,S,E], of whose heads each serves H / G of q's one "
        "after the other, mask (bool: true may attend; float: added), "
        "seed, offset, and for packed rows the coordinates i64[N,2] of queries, i64[M,2] of keys: "
        "sequences ascend along the rows and positions within a sequence, but keys of sequence -1, "
        "which no query sees, may lie anywhere. softcap: scores become softcap tanh(s / softcap) "
        "(arXiv 2408.00118), before masks; 0: they stay. fill: what a mask of bools puts in the "
        "place of hidden scores, so that a query to which all is hidden sees all keys alike; "
        "without it such a query's result is 0. fill_is_added: 1 where that number, -1e37 or less, "
        "is added to hidden scores, beside which they are nothing, but whose gradient they have; "
        "0: it replaces them. Last, a bias f[1 or B,H,Q,S], added to scores "
        "before masks; of packed rows f[1,H,P,R], by the positions of queries and keys. "
        "bias_gradient: 1 where it is trained. first_head: the number in the model of q's first "
        "head, which dropout draws by, where a rank has some of the heads; 0 without it.",
        cases=(
            ({"scale": 0.5, "is_causal": 0}, _QKV),
            ({"scale": 0.3, "is_causal": 1}, _SELF),
            ({"scale": 0.5, "is_causal": 0}, (*_QKV, "b[2,1,1,6]")),
            ({"scale": 0.5, "is_causal": 1}, (*_SELF, "b[2,1,1,5]")),
            ({"scale": 0.5, "is_causal": 0}, (*_QKV, "f32[2,1,5,6]")),
            ({**_DROP, "is_causal": 1}, (*_SELF, None, "i64[2]", "i64[]")),
            ({**_DROP, "is_causal": 0}, (*_SELF, "b[2,1,1,5]", "i64[2]", "i64[]")),
            *AT_HEADS,
            *GROUPED,
            *FORMS,
            *BIASED,
            *PACKED,
        ),
    ),
)
