"""The table ATen -> ONNX. One function an op, in the builder's language, composites kept whole.

Each function takes a `Call` (the builder, the FX node's own result type) and the ATen arguments
already translated: Values, Sizes, Python numbers, lists of them, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onward.config import CaptureError
from onward.graph.build import Builder
from onward.graph.graph import Role, Value, array_of, type_of
from onward.graph.ops.random import offset_type, seed_type
from onward.graph.types import DType, Size, Type, broadcast, divide, dtype_name, product

TABLE: dict[str, Callable[..., Any]] = {}
END = 2**31  # torch writes INT64_MAX for "to the end"


def aten(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        TABLE.update(dict.fromkeys(names, function))
        return function

    return register


class Call:
    """One ATen call under translation."""

    def __init__(self, translator: Any, node: Any, builder: Builder) -> None:
        self.t = translator
        self.node = node
        self.b = builder

    @property
    def type(self) -> Type:
        """The result's type as PyTorch says it."""
        return self.t.type_of_fx(self.node)

    def value(self, x: Any, dtype: DType) -> Value:
        """A Value of `dtype`; numbers become constants, sizes are read at run time."""
        if isinstance(x, Value):
            return self.b.cast(x, dtype)
        if isinstance(x, (bool, int, float)):
            return self.b.scalar(x, dtype)
        return self.b.cast(self.b.squeeze(self.b.size(x), [0]), dtype)

    def random(self, x: Value) -> dict[str, Any]:
        """The next dropout site's attributes and inputs, for a tensor of `x`'s logical shape."""
        graph, batch, shape = self.t.graph, self.t.batch_size, type_of(x).shape
        seed, offset = seed_inputs(graph)
        site, self.t.sites = self.t.sites, self.t.sites + 1
        sample_dim = next(
            (i for i, s in enumerate(shape[:-1]) if s == batch and (i == 0 or s != 1)), -1
        )
        if sample_dim < 0 and shape and batch is not None:  # rows of samples: [B*T, ...]
            rows = divide(shape[0], batch)
            if rows is not None and len(shape) > 1:
                sample_dim = 0
                offset = self.b.Mul(offset, self.b.squeeze(self.b.size(rows), [0]))
        return {"seed": seed, "offset": offset, "site": site, "sample_dim": sample_dim}


def seed_inputs(graph: Any) -> tuple[Value, Value]:
    """The graph's random inputs, made at the first dropout."""
    said = graph.signature
    if said.seed is None:
        seed = graph.input("seed", seed_type(), Role.RANDOM)
        offset = graph.input("sample_offset", offset_type(), Role.RANDOM)
        graph.signature = said.but(seed=seed.name, sample_offset=offset.name)
        return seed, offset
    return graph.find_input(said.seed), graph.find_input(said.sample_offset)


def _list(x: Any) -> list[int]:
    return [x] if isinstance(x, int) else list(x)


# ---- elementwise


def _binary(op_type: str) -> Callable[..., Any]:
    def translate(c: Call, a: Any, b: Any, *, alpha: float = 1) -> Value:
        dtype = c.type.dtype
        right = c.value(b, dtype)
        if alpha != 1:
            right = c.b.Mul(right, alpha)
        return c.b.one(op_type, [c.value(a, dtype), right], {})

    return translate


for _name, _op in {"add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div"}.items():
    aten(f"{_name}.Tensor", f"{_name}.Scalar")(_binary(_op))
aten("maximum.default", "max.other")(_binary("Max"))
aten("minimum.default", "min.other")(_binary("Min"))


@aten("rsub.Scalar", "rsub.Tensor")
def _rsub(c: Call, a: Any, b: Any, alpha: float = 1) -> Value:
    return _binary("Sub")(c, b, a if alpha == 1 else c.b.Mul(a, alpha))


@aten("pow.Tensor_Scalar", "pow.Tensor_Tensor")
def _pow(c: Call, a: Value, b: Any) -> Value:
    dtype = c.type.dtype
    if b == 2:
        x = c.value(a, dtype)
        return c.b.Mul(x, x)
    return c.b.Pow(c.value(a, dtype), c.value(b, dtype))


@aten("square.default")
def _square(c: Call, x: Value) -> Value:
    return c.b.Mul(x, x)


def _unary(op_type: str) -> Callable[..., Any]:
    return lambda c, x: c.b.node(op_type, [c.value(x, c.type.dtype)], {})


for _name, _op in {
    "neg": "Neg", "abs": "Abs", "sqrt": "Sqrt", "exp": "Exp", "log": "Log", "tanh": "Tanh",
    "erf": "Erf", "sigmoid": "Sigmoid", "sin": "Sin", "cos": "Cos",
    "reciprocal": "Reciprocal", "logical_not": "Not",
}.items():  # fmt: skip
    aten(f"{_name}.default")(_unary(_op))


@aten("relu.default")
def _relu(c: Call, x: Value) -> Value:
    dtype = type_of(x).dtype
    return c.b.Relu(x) if type_of(x).is_floating else c.b.Max(x, c.value(0, dtype))


@aten("bitwise_not.default")
def _bitwise_not(c: Call, x: Value) -> Value:
    dtype = type_of(x).dtype
    if dtype not in (DType.BOOL, DType.INT32, DType.INT64):
        raise CaptureError(f"the bits of {dtype_name(dtype)} have no translation")
    return c.b.Not(x) if dtype == DType.BOOL else c.b.Sub(c.value(-1, dtype), x)


@aten("rsqrt.default")
def _rsqrt(c: Call, x: Value) -> Value:
    return c.b.Reciprocal(c.b.Sqrt(c.value(x, c.type.dtype)))


@aten("silu.default")
def _silu(c: Call, x: Value) -> Value:
    return c.b.Mul(x, c.b.Sigmoid(x))


@aten("gelu.default")
def _gelu(c: Call, x: Value, approximate: str = "none") -> Value:
    return c.b.Gelu(x, approximate=approximate)


def _comparison(op_type: str) -> Callable[..., Any]:
    def translate(c: Call, a: Value, b: Any) -> Value:
        dtype = type_of(a).dtype
        if isinstance(b, Value) and type_of(b).dtype != dtype:
            other = type_of(b).dtype
            dtype = other if type_of(b).is_floating or dtype == DType.BOOL else dtype
        elif isinstance(b, float) and not type_of(a).is_floating:
            dtype = DType.FLOAT
        result = c.b.one(op_type.removeprefix("!"), [c.value(a, dtype), c.value(b, dtype)], {})
        return c.b.Not(result) if op_type.startswith("!") else result

    return translate


for _name, _op in {
    "eq": "Equal", "ne": "!Equal", "lt": "Less", "le": "LessOrEqual", "gt": "Greater",
    "ge": "GreaterOrEqual",
}.items():  # fmt: skip
    aten(f"{_name}.Tensor", f"{_name}.Scalar")(_comparison(_op))


def _logical(op_type: str) -> Callable[..., Any]:
    def translate(c: Call, a: Value, b: Any) -> Value:
        if c.type.dtype != DType.BOOL:
            raise CaptureError(f"{op_type} of integers has no translation")
        return c.b.one(op_type, [c.value(a, DType.BOOL), c.value(b, DType.BOOL)], {})

    return translate


aten("logical_and.default", "__and__.Tensor", "bitwise_and.Tensor")(_logical("And"))
aten("logical_or.default", "__or__.Tensor", "bitwise_or.Tensor")(_logical("Or"))


@aten("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def _where(c: Call, mask: Value, a: Any, b: Any) -> Value:
    return c.b.Where(mask, c.value(a, c.type.dtype), c.value(b, c.type.dtype))


@aten("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(c: Call, x: Value, mask: Value, fill: Any) -> Value:
    return c.b.Where(mask, c.value(fill, type_of(x).dtype), x)


@aten("clamp.default", "clamp_min.default", "clamp_max.default")
def _clamp(c: Call, x: Value, low: Any = None, high: Any = None) -> Value:
    if "clamp_max" in str(c.node.target):
        low, high = None, low
    x = c.value(x, c.type.dtype)  # a float bound makes floats of whole numbers
    # Where, not Max and Min: at a bound the gradient is x's own, whole
    if low is not None:
        bound = c.value(low, type_of(x).dtype)
        x = c.b.Where(c.b.Less(x, bound), bound, x)
    if high is not None:
        bound = c.value(high, type_of(x).dtype)
        x = c.b.Where(c.b.Greater(x, bound), bound, x)
    return x


# ---- copies and casts


@aten(
    "contiguous.default", "clone.default", "alias.default", "lift_fresh_copy.default",
    "lift_fresh.default",
)  # fmt: skip
def _same(c: Call, x: Value, **_: Any) -> Value:
    return x


@aten("detach.default", "detach_.default")
def _detach(c: Call, x: Value) -> Value:
    return stop_gradient(c.b, x)


def stop_gradient(b: Builder, x: Value) -> Value:
    """The same numbers, through which no gradient passes."""
    y: Value = b.Identity(x)
    node = y.producer()
    assert node is not None
    node.meta["stop_gradient"] = True
    return y


@aten("to.dtype", "to.dtype_layout", "_to_copy.default", "type_as.default", "to.device")
def _to(c: Call, x: Value, *_: Any, **__: Any) -> Value:
    return c.b.cast(x, c.type.dtype)


# ---- making tensors


@aten("arange.default", "arange.start", "arange.start_step")
def _arange(c: Call, *ends: Any, **_: Any) -> Value:
    start, end, step = (0, *ends, 1) if len(ends) == 1 else (*ends, 1)[:3]
    if step != 1 or isinstance(end, float):
        if not all(isinstance(n, (int, float)) for n in (start, end, step)):
            raise CaptureError("arange with a step needs constant ends")
        return c.b.const(np.arange(start, end, step).astype(c.type.dtype.numpy()))
    index = c.b.arange(end - start)
    if start != 0:
        index = c.b.Add(index, c.value(start, DType.INT64))
    return c.b.cast(index, c.type.dtype)


@aten(
    "full.default", "zeros.default", "ones.default", "full_like.default", "zeros_like.default",
    "ones_like.default", "new_zeros.default", "new_ones.default", "new_full.default",
    "scalar_tensor.default",
)  # fmt: skip
def _full(c: Call, *args: Any, **_: Any) -> Value:
    name = c.node.target._schema.name.split("::")[1]
    number: Any = 1 if "ones" in name else 0 if "zeros" in name else args[-1]
    if isinstance(number, Value):
        raise CaptureError(f"{name} with a computed number")
    return c.b.full(number, c.type)


# ---- shapes


@aten("view.default", "reshape.default", "_unsafe_view.default", "flatten.using_ints",
      "unflatten.int", "expand_as.default", "view_as.default", "reshape_as.default")  # fmt: skip
def _view(c: Call, x: Value, *_: Any) -> Value:
    if "expand_as" in str(c.node.target):
        return c.b.expand(x, c.type.shape)
    return c.b.reshape(x, c.type.shape)


@aten("expand.default", "broadcast_to.default")
def _expand(c: Call, x: Value, *_: Any, **__: Any) -> Value:
    return c.b.expand(x, c.type.shape)


@aten("repeat.default")
def _repeat(c: Call, x: Value, times: list[Any]) -> Value:
    """Every dim `d` becomes `[times, d]`, expanded from `[1, d]`; new dims come first."""
    new = len(times) - type_of(x).rank
    apart: list[Size] = []
    wide: list[Size] = []
    for i, count in enumerate(times):
        size = type_of(x).shape[i - new] if i >= new else 1
        apart += [1, size]
        wide += [count, size]
    return c.b.reshape(c.b.expand(c.b.reshape(x, tuple(apart)), tuple(wide)), c.type.shape)


@aten("repeat_interleave.self_int")
def _repeat_interleave(c: Call, x: Value, times: Any, dim: int | None = None, **_: Any) -> Value:
    if dim is None:
        raise CaptureError("repeat_interleave without a dim")
    shape, dim = type_of(x).shape, dim % type_of(x).rank
    wide = (*shape[: dim + 1], times, *shape[dim + 1 :])
    return c.b.reshape(c.b.expand(c.b.unsqueeze(x, [dim + 1]), wide), c.type.shape)


@aten("broadcast_tensors.default")
def _broadcast_tensors(c: Call, xs: Sequence[Value]) -> list[Value]:
    shape = broadcast(*[type_of(x).shape for x in xs])
    return [c.b.expand(x, shape) for x in xs]


@aten("transpose.int", "permute.default", "t.default", "numpy_T.default")
def _transpose(c: Call, x: Value, *dims: Any) -> Value:
    rank = type_of(x).rank
    perm = list(range(rank))
    name = c.node.target._schema.name.split("::")[1]
    if name == "transpose":
        i, j = (d % rank for d in dims)
        perm[i], perm[j] = perm[j], perm[i]
    elif name == "permute":
        perm = [d % rank for d in dims[0]]
    else:
        perm.reverse()
    return c.b.transpose(x, perm)


@aten("unsqueeze.default", "squeeze.dim", "squeeze.dims", "squeeze.default")
def _resize(c: Call, x: Value, *_: Any) -> Value:
    return c.b.reshape(x, c.type.shape)


@aten("slice.Tensor")
def _slice(
    c: Call, x: Value, dim: int = 0, start: Any = 0, end: Any = None, step: int = 1
) -> Value:
    if step != 1:
        raise CaptureError("a slice with a step other than 1")
    size = type_of(x).shape[dim % type_of(x).rank]
    start = 0 if start is None else start
    if end is None or (isinstance(end, int) and end >= END) or end == size:
        end = END
    if start == 0 and end == END:
        return x
    return c.b.slice(x, dim % type_of(x).rank, start, end)


@aten("select.int")
def _select(c: Call, x: Value, dim: int, index: Any) -> Value:
    dim = dim % type_of(x).rank
    size = type_of(x).shape[dim]
    if isinstance(index, int) and index < 0:
        index = size + index
    return c.b.squeeze(c.b.slice(x, dim, index, index + 1), [dim])


@aten("split.Tensor", "split_with_sizes.default", "chunk.default", "unbind.int")
def _split(c: Call, x: Value, *args: Any) -> list[Value]:
    name = c.node.target._schema.name.split("::")[1]
    rest = args if name == "unbind" else args[1:]
    dim = (rest[0] if rest else 0) % type_of(x).rank
    parts = [
        Type(type_of(x).dtype, tuple(c.t.size_of(s) for s in v.shape)) for v in c.node.meta["val"]
    ]
    sizes: list[Size] = [1 if name == "unbind" else p.shape[dim] for p in parts]
    pieces = [x] if len(sizes) == 1 else list(c.b.Split(x, c.b.sizes(sizes), axis=dim))
    return [c.b.squeeze(p, [dim]) for p in pieces] if name == "unbind" else pieces


@aten("cat.default", "concat.default")
def _cat(c: Call, xs: Sequence[Value], dim: int = 0) -> Value:
    rank = c.type.rank
    parts = [x for x in xs if rank == 1 or type_of(x).shape != (0,)]  # as torch: f[0] is nothing
    return c.b.Concat(*[c.value(x, c.type.dtype) for x in parts], axis=dim % rank)


@aten("stack.default")
def _stack(c: Call, xs: Sequence[Value], dim: int = 0) -> Value:
    dim = dim % (type_of(xs[0]).rank + 1)
    return c.b.Concat(*[c.b.unsqueeze(x, [dim]) for x in xs], axis=dim)


@aten("pad.default", "constant_pad_nd.default")
def _pad(c: Call, x: Value, pads: list[int], *args: Any) -> Value:
    mode, fill = ("constant", None)
    for a in args:
        mode, fill = (a, fill) if isinstance(a, str) else (mode, a)
    if mode != "constant":
        raise CaptureError(f"padding mode {mode}")
    rank = type_of(x).rank
    begin, end = [0] * rank, [0] * rank
    for i in range(len(pads) // 2):  # torch lists the last dim first
        begin[rank - 1 - i], end[rank - 1 - i] = pads[2 * i], pads[2 * i + 1]
    for d, size in enumerate(type_of(x).shape):  # what is below 0 is cut off
        if min(begin[d], end[d]) < 0:
            x = c.b.slice(x, d, max(0, -begin[d]), size + min(0, end[d]))
    begin, end = [max(0, n) for n in begin], [max(0, n) for n in end]
    return c.b.Pad(x, c.b.ints(begin + end), c.value(fill or 0, type_of(x).dtype))


# ---- indexing


@aten("embedding.default")
def _embedding(
    c: Call, weight: Value, ids: Value, padding_idx: int = -1, by_freq: bool = False,
    sparse: bool = False,
) -> Value:  # fmt: skip
    if by_freq or sparse:
        raise CaptureError("embedding with scale_grad_by_freq or sparse gradients")
    ids = _index64(c, ids)
    if padding_idx >= 0:
        return c.b.Embedding(weight, ids, padding_idx=padding_idx)
    return c.b.Gather(weight, ids, axis=0)


def _index64(c: Call, index: Value) -> Value:
    """Numbers of rows as i64, which every kernel reads. An export asks for no dtype."""
    dtype = type_of(index).dtype
    if dtype not in (DType.INT64, DType.INT32):
        raise CaptureError(
            f"rows numbered by a tensor of {dtype}, which PyTorch refuses; fix: convert it to "
            "torch.int64"
        )
    return c.b.cast(index, DType.INT64)


@aten("index_select.default")
def _index_select(c: Call, x: Value, dim: int, index: Value) -> Value:
    return c.b.Gather(x, _index64(c, index), axis=dim % type_of(x).rank)


@aten("gather.default")
def _gather(c: Call, x: Value, dim: int, index: Value, sparse_grad: bool = False) -> Value:
    return c.b.GatherElements(x, _index64(c, index), axis=dim % type_of(x).rank)


def _from_the_start(c: Call, index: Value, rows: Size) -> Value:
    """A negative number is one from the end, unlike in an embedding; Gather's kernels take none.
    (GatherND's do.)"""
    source: Value | None = index
    while source is not None and (maker := source.producer()) is not None:
        if maker.op_type == "Range":
            start = array_of(maker.inputs[0])
            if start is not None and start >= 0:
                return index
        if maker.op_type not in ("Cast", "Reshape", "Unsqueeze", "Squeeze", "Expand", "Transpose"):
            break
        source = maker.inputs[0]
    numbers = array_of(index)
    if numbers is not None and (numbers >= 0).all():
        return index
    wrapped = c.b.Add(index, c.b.reshape(c.b.size(rows), ()))
    return c.b.Where(c.b.Less(index, c.b.scalar(0, DType.INT64)), wrapped, index)


@aten("index.Tensor")
def _index(c: Call, x: Value, indices: list[Value | None]) -> Value:
    """`x[i, j, ...]` with integer tensors on the leading dims."""
    used = [i for i in indices if i is not None]
    # bytes are a mask too, and not numbers of rows
    if any(type_of(i).dtype in (DType.BOOL, DType.UINT8) for i in used):
        raise CaptureError(
            "indexing with a boolean tensor: how many rows that gives, only data say; fix: keep "
            "all rows, and weigh them with 0 or ignore their labels"
        )
    if any(i is None for i in indices):
        raise CaptureError("indexing with gaps between the indices; fix: permute the dims first")
    used = [_index64(c, i) for i in used]
    if len(used) == 1:
        return c.b.Gather(x, _from_the_start(c, used[0], type_of(x).shape[0]), axis=0)
    shape = broadcast(*[type_of(i).shape for i in used])
    rows = [c.b.unsqueeze(c.b.expand(i, shape), [len(shape)]) for i in used]
    return c.b.GatherND(x, c.b.Concat(*rows, axis=len(shape)))


# ---- reductions


@aten("sum.default", "sum.dim_IntList", "mean.default", "mean.dim", "amax.default")
def _reduce(c: Call, x: Value, dims: Any = None, keepdim: bool = False, **_: Any) -> Value:
    name = c.node.target._schema.name.split("::")[1]
    op_type = {"sum": "ReduceSum", "mean": "ReduceMean", "amax": "ReduceMax"}[name]
    return _reduce_to(c, op_type, c.value(x, c.type.dtype), dims, keepdim)


def _reduce_to(c: Call, op_type: str, x: Value, dims: Any, keepdim: bool) -> Value:
    """torch's `dims`: one, several, or all where none is named."""
    rank = type_of(x).rank
    dims = list(range(rank)) if not dims and dims != 0 else [d % rank for d in _list(dims)]
    return c.b.one(op_type, [x, c.b.ints(dims)], {"keepdims": int(keepdim)})


@aten("cumsum.default")
def _cumsum(c: Call, x: Value, dim: int, **_: Any) -> Value:
    return c.b.CumSum(c.value(x, c.type.dtype), np.array(dim % type_of(x).rank, dtype=np.int64))


@aten("argmax.default")
def _argmax(c: Call, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    if dim is None:
        raise CaptureError("argmax over all dims")
    return c.b.ArgMax(x, axis=dim % type_of(x).rank, keepdims=int(keepdim))


@aten("linalg_vector_norm.default")
def _vector_norm(
    c: Call, x: Value, order: float = 2, dims: Any = None, keepdim: bool = False, **_: Any
) -> Value:
    if order != 2:
        raise CaptureError(f"the norm of order {order}; fix: write it with abs, pow and sum")
    x = c.value(x, c.type.dtype)
    squares = _reduce_to(c, "ReduceSum", c.b.Mul(x, x), dims, keepdim)
    # at zero the root's slope is infinite, and 0 by PyTorch's convention: there it is a constant
    zero = c.b.Equal(squares, 0.0)
    root = c.b.Sqrt(c.b.Where(zero, c.b.scalar(1.0, c.type.dtype), squares))
    return c.b.Where(zero, c.b.scalar(0.0, c.type.dtype), root)


@aten("diff.default")
def _diff(
    c: Call, x: Value, n: int = 1, dim: int = -1, before: Value | None = None,
    after: Value | None = None,
) -> Value:  # fmt: skip
    if n != 1 or type_of(x).dtype == DType.BOOL:
        raise CaptureError("diff of bools, or of another order than 1")
    dim = dim % type_of(x).rank
    parts = [v for v in (before, x, after) if v is not None]
    x = c.b.Concat(*parts, axis=dim) if len(parts) > 1 else x
    size = type_of(x).shape[dim]
    return c.b.Sub(c.b.slice(x, dim, 1, size), c.b.slice(x, dim, 0, size - 1))


@aten("tril.default", "triu.default")
def _trilu(c: Call, x: Value, diagonal: int = 0) -> Value:
    upper = "triu" in str(c.node.target)
    return c.b.Trilu(x, np.array(diagonal, dtype=np.int64), upper=int(upper))


# ---- products


def matrix_product(c: Call, x: Value, w: Value, bias: Value | None, transposed: bool) -> Value:
    """`x f[*,K] @ w f[K,N] + bias` as one Gemm over flattened rows."""
    type = type_of(x)
    k, n = (type_of(w).shape[::-1]) if transposed else type_of(w).shape
    rows = c.b.reshape(x, (product(type.shape[:-1]), k))
    attrs = {"transB": 1} if transposed else {}
    y = c.b.Gemm(rows, w, *([] if bias is None else [bias]), **attrs)
    return c.b.reshape(y, (*type.shape[:-1], n))


@aten("linear.default")
def _linear(c: Call, x: Value, w: Value, bias: Value | None = None) -> Value:
    return matrix_product(c, x, w, bias, transposed=True)


@aten("addmm.default")
def _addmm(c: Call, bias: Value, x: Value, w: Value, *, beta: float = 1, alpha: float = 1) -> Value:
    if beta != 1 or alpha != 1:
        raise CaptureError("addmm with alpha or beta")
    if type_of(bias).rank == 1:
        return c.b.Gemm(x, w, bias)
    return c.b.Add(c.b.Gemm(x, w), bias)


@aten("mm.default", "bmm.default", "matmul.default")
def _matmul(c: Call, a: Value, b: Value) -> Value:
    ra, rb = type_of(a).rank, type_of(b).rank
    if rb == 2 and ra >= 2:
        return matrix_product(c, a, b, None, transposed=False)
    a2 = c.b.unsqueeze(a, [0]) if ra == 1 else a
    b2 = c.b.unsqueeze(b, [1]) if rb == 1 else b
    return c.b.reshape(c.b.MatMul(a2, b2), c.type.shape)


@aten("baddbmm.default")
def _baddbmm(c: Call, x: Value, a: Value, b: Value, *, beta: float = 1, alpha: float = 1) -> Value:
    y = c.b.MatMul(a, b)
    y = y if alpha == 1 else c.b.Mul(y, alpha)
    return y if beta == 0 else c.b.Add(y, x if beta == 1 else c.b.Mul(x, beta))
