"""Row functions: the rules for functions that treat each masked row by itself.

A rule takes (function, args, kwargs), and raises CaptureError for a call that would mix rows.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import torch

from onward.capture.masked_rows.rows import (
    OPERATORS,
    ROWS_OF,
    RULES,
    MaskedRows,
    choose,
    found_in,
    is_mask,
    is_tensor,
    one_of,
    plain,
    product_of,
    refusal,
    rule,
    tensors_in,
    wide,
)

Tensor = torch.Tensor

_ELEMENTWISE = (
    "add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "true_divide",
    "floor_divide", "remainder", "fmod", "pow", "float_power", "maximum", "minimum", "fmax",
    "fmin", "eq", "ne", "lt", "le", "gt", "ge", "less", "greater", "where", "masked_fill", "lerp",
    "logical_and", "logical_or", "logical_not", "logical_xor", "bitwise_and", "bitwise_or",
    "bitwise_not", "isnan", "isinf", "isfinite", "isclose", "neg", "negative", "abs", "absolute",
    "sign", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "square",
    "reciprocal", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh",
    "acosh", "atanh", "atan2", "erf", "erfc", "sigmoid", "logit", "logsigmoid", "relu", "relu6",
    "gelu", "silu", "mish", "elu", "selu", "celu", "leaky_relu", "prelu", "softplus", "hardtanh",
    "hardswish", "hardsigmoid", "tanhshrink", "softsign", "threshold", "clamp", "clip",
    "clamp_min", "clamp_max", "round", "floor", "ceil", "trunc", "frac", "nan_to_num", "xlogy",
    "addcmul", "addcdiv", "dropout", "float", "double", "half", "bfloat16", "long", "int", "bool",
    "to", "type", "type_as", "detach", "clone", "contiguous", "zeros_like", "ones_like",
    "full_like", "alpha_dropout",
)  # fmt: skip


_OTHERS = ("__getitem__", "__matmul__", "__rmatmul__")


@rule(*_ELEMENTWISE, *(n for n in OPERATORS if n not in _OTHERS))
def elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Applies an elementwise function; other tensors have to broadcast over the rows."""
    name, chosen = func.__name__.strip("_"), found_in((args, kwargs))
    if name in ("to", "type_as", "type"):  # an argument after the first only gives its dtype
        args = tuple(a.dtype if i and isinstance(a, Tensor) else a
                     for i, a in enumerate(args))  # fmt: skip
        func, chosen = (Tensor.to if name == "type_as" else func), found_in(args)
    own = one_of(name, chosen)
    rank = max(c.dim() for c in chosen)
    if any(c.dim() != rank for c in chosen):
        raise refusal(f"{name}, which broadcasts,")
    for other in (a for a in (*args, *kwargs.values()) if is_tensor(a)):
        if other.dim() > rank or (other.dim() == rank and other.shape[0] != 1):
            raise refusal(f"{name} with a tensor of shape {tuple(other.shape)}")
    same = own.numbers and name in ("long", "to", "detach", "clone", "contiguous")
    return own.with_rows(func(*plain(args), **plain(kwargs)), same)


def _along(*names: str, at: int = 1, default: int | None = None) -> None:
    """Registers functions along a dim, which must not be the dim of rows. at: the position of the
    argument `dim`. default: its default."""

    def along(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, chosen = func.__name__, found_in((args, kwargs))
        own = one_of(name, chosen)
        given = kwargs.get("dim", args[at] if len(args) > at else default)
        rank = own.dim() + (name == "stack")
        dims = None if given is None else [d % rank for d in list_of(given)]
        if dims is None or 0 in dims or any(c.dim() != own.dim() for c in chosen):
            raise refusal(f"{name} along all")
        if tensors_in((args, kwargs)) or {"axis", "out"} & {*kwargs}:
            raise refusal(f"{name} with another tensor")
        return own.with_rows(func(*plain(args), **plain(kwargs)))

    RULES.update(dict.fromkeys(names, along))


def list_of(x: Any) -> list[Any]:
    return list(x) if isinstance(x, (tuple, list)) else [x]


_along("softmax", "softmin", "log_softmax", "cumsum", "cumprod", "unbind", "gather", "flip")
_along("glu", "sort", "argsort", default=-1)
_along("topk", at=2, default=-1)
_along("normalize", "cosine_similarity", at=2, default=1)
_along("chunk", "split", at=2, default=0)
_along("cat", "concat", "stack", default=0)
_along("select", "narrow")


@rule("layer_norm", "rms_norm")
def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    own = one_of(func.__name__, found_in(args[:1]))
    shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())
    if found_in((args[1:], kwargs)) or len(tuple(shape)) >= own.dim():
        raise refusal(f"{func.__name__} along all")
    return own.with_rows(func(*plain(args), **kwargs))


@rule("linear", "matmul", "mm", "__matmul__")
def _product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Multiplies each row by a matrix."""
    own = args[0] if args else None
    if not isinstance(own, MaskedRows) or own.dim() < 2 or found_in((args[1:], kwargs)):
        raise refusal(f"{func.__name__.strip('_')}, a product that mixes rows,")
    if func.__name__ != "linear" and args[1].dim() != 2:
        raise refusal("a product with a tensor that is no matrix")
    return own.with_rows(func(own.full, *args[1:], **kwargs))


@rule("embedding", "one_hot")
def _looked_up(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    own = args[0] if args else None
    classes = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
    if not isinstance(own, MaskedRows) or found_in((args[1:], kwargs)):
        raise refusal(func.__name__)
    if func.__name__ == "one_hot" and not (isinstance(classes, int) and classes > 0):
        raise refusal("one_hot without num_classes")
    return own.with_rows(func(own.full, *args[1:], **kwargs))


# ---- shapes


@rule("view", "reshape")
def _viewed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Reshapes the features: to `(-1, ...)`, or `(n, ...)` where n is the count of these rows, with
    as many elements per row as before."""
    own, name = args[0], func.__name__
    if kwargs or not isinstance(own, MaskedRows):
        raise refusal(name)
    first, *rest = list_of(args[1]) if len(args) == 2 else args[1:]
    counted = getattr(first, ROWS_OF, None) == own.key
    if not (counted or (isinstance(first, int) and first == -1)):
        raise refusal(name)
    inner = tuple(own.full.shape[1:])
    if rest and own.rows is not None and tuple(rest) == tuple(own.rows.full.shape[1:]):
        return own.rows
    if not (counted and rest == [-1]) and (-1 in rest or product_of(rest) != product_of(inner)):
        raise refusal(f"{name} to other rows")
    return own.with_rows(own.full.reshape(own.full.shape[0], *rest), own.numbers)


@rule("flatten", "squeeze", "unsqueeze", "transpose", "permute")
def _shaped(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Reshapes or permutes the features, where the dim of rows stays the first."""
    own, name = args[0], func.__name__
    if kwargs or not isinstance(own, MaskedRows) or found_in(args[1:]):
        raise refusal(name)
    inner = own.full.shape[1:]
    if name == "squeeze" and len(args) == 1:
        shape = [n for n in inner if n != 1]
        return own.with_rows(own.full.reshape(own.full.shape[0], *shape), own.numbers)
    if name == "flatten" and len(args) == 1:
        if product_of(inner) != 1:
            raise refusal(name)
        return own.with_rows(own.full.reshape(-1), own.numbers)
    given = list_of(args[1]) if len(args) == 2 else args[1:]
    dims = [d % (own.dim() + (name == "unsqueeze")) for d in given]
    if name == "permute" and dims[0] == 0:
        dims = dims[1:]
    if 0 in dims:
        raise refusal(name)
    return own.with_rows(func(own.full, *args[1:]), own.numbers)


@rule("__getitem__")
def _indexed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, index = args
    if not isinstance(x, MaskedRows):
        return _looked_at(x, index if isinstance(index, tuple) else (index,))
    if isinstance(index, MaskedRows):
        if index.dtype != torch.bool or index.dim() != 1:
            raise refusal("a choice by numbers")
        one_of("a mask", [x, index])
        return choose_again(x, index)
    first, *rest = index if isinstance(index, tuple) else (index,)
    whole = isinstance(first, slice) and first == slice(None)
    if whole and not rest and type(x) is MaskedRows:
        return x.with_rows(x.full, x.numbers)
    dotted = first is Ellipsis and len(rest) < x.dim() and all(i is not None for i in rest)
    if not (whole or dotted) or len(tensors_in(rest)) > 1 or found_in(rest):
        raise refusal("a look at single ones")
    if any(is_mask(i) for i in rest):
        raise refusal("another mask")
    full = x.full[index]
    return x.with_rows(full, x.numbers and full.dim() == 1)


def choose_again(x: MaskedRows, mask: MaskedRows) -> MaskedRows:
    """Returns `x[mask]`, where the mask is over the masked rows of x."""
    member = x.member & mask.full
    return choose(x.full, member, (x.key, mask.name))


def _looked_at(x: Tensor, index: tuple[Any, ...]) -> Any:
    """Returns `x[numbers, ...]`, where the numbers are masked rows; other dims whole or new."""
    if len(index) > 1 and index[0] is None:
        return Behind(_looked_at(x, index[1:]))
    numbers = [*takewhile(lambda i: isinstance(i, MaskedRows), index)]
    rest = index[len(numbers) :]
    of_rows = all(i.dtype == torch.int64 and i.dim() == 1 for i in numbers)
    if not numbers or not of_rows or not all(map(_whole, rest)):
        raise refusal("indexing")
    own = one_of("indexing", numbers)
    if len(index) == 1 and own.numbers and x.shape[0] == own.member.shape[0]:
        return choose(x, own.member, own.key)  # x at its own row numbers is `x[mask]`
    return own.with_rows(x[(*(i.full for i in numbers), *rest)])


def _whole(index: Any) -> bool:
    """Returns whether an index takes a whole dim, or inserts a new one."""
    return index is None or index is Ellipsis or (isinstance(index, slice) and index == slice(None))


class Behind:
    """Masked rows after a new leading dim of 1, `x[None, numbers]`, which has to be removed again
    by reshape, squeeze or an index; any other function raises CaptureError."""

    def __init__(self, rows: MaskedRows) -> None:
        self._rows = rows

    def reshape(self, *shape: Any) -> Any:
        return self._rows.reshape(*shape)

    def squeeze(self, dim: int = 0) -> Any:
        if dim != 0:
            raise refusal("squeeze")
        return self._rows

    view, __getitem__ = reshape, squeeze

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise refusal(f"{getattr(func, '__name__', func)} behind a new dim")


@rule("index_select")
def _index_select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, dim, index = (*args, *kwargs.values())
    if isinstance(x, MaskedRows) or dim != 0:
        raise refusal("index_select")
    return _looked_at(x, (index,))


@rule("__setitem__")
def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Assigns `x[numbers] = rows`, with row numbers from the mask of `rows`."""
    x, index, rows = args
    if not is_tensor(x) or not isinstance(rows, MaskedRows):
        raise refusal("an assignment")
    if not isinstance(index, MaskedRows) or index.each_once is False:
        raise refusal("an assignment to places")
    if index.numbers and index.member.shape[0] == x.shape[0]:
        put_back(x, index.added(), index.key, rows)
        return
    one_of("an assignment", [index, rows])
    if index.dtype != torch.int64 or index.dim() != 1:
        raise refusal("an assignment to places")
    place = torch.where(index.added(), index.full, x.shape[0])  # other rows: after the last one
    room = torch.cat([x, x[:1]]).index_put((place,), rows.full.to(x.dtype))
    x.copy_(room[:-1])


@rule("index_add_", "index_add")
def _added(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Adds masked rows to rows of a plain tensor, at places that are masked rows too."""
    names = ("self", "dim", "index", "source")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    x, dim, index, rows = (given.pop(n, None) for n in names)
    if not (isinstance(index, MaskedRows) and isinstance(rows, MaskedRows)) or isinstance(
        x, MaskedRows
    ):
        raise refusal(func.__name__)
    own = one_of("index_add", [index, rows])
    if dim not in (0, -x.dim()):
        raise refusal("index_add along another dim")
    full = torch.where(wide(own.added(), rows.full), rows.full, 0)
    return func(x, 0, index.full, full, **given)


def put_back(x: Tensor, mask: Tensor, key: Any, rows: MaskedRows) -> None:
    """Assigns `x[mask] = rows` in place. key: the mask's key, which has to be that of the rows."""
    if key != rows.key or tuple(x.shape[mask.dim() :]) != tuple(rows.full.shape[1:]):
        raise refusal("an assignment to other places")
    full = rows.full.reshape(x.shape)
    where = mask.reshape(*mask.shape, *[1] * (x.dim() - mask.dim())).bool()
    x.copy_(torch.where(where, full.to(x.dtype), x))
