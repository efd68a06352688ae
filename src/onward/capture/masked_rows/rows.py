"""MaskedRows: `x[mask]` as a value in a trace, and the table of rules for functions of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple, Protocol

import torch

from onward.errors import CaptureError

Tensor = torch.Tensor
ROWS_OF = "rows_of"  # attribute of a count tensor: the key of the rows that it counts
SAID = "said"  # attribute of counts and questions about them: the answer where there are rows
FIX = "fix: keep all rows, and weigh them with 0 or ignore their labels"


class MaskedRows:
    """The rows of `full` [N,*] where `member` b[N] is true.

    key: equal for equal masks. count: the number of rows, i64[]. numbers: whether the values are
    the rows' own indices in 0..N-1, as `nonzero` returns. rows: the masked rows that this is the
    flattened form of, if any. name: unique to this object, for keys of masks of its rows.
    """

    def __init__(self, full: Tensor, member: Tensor, key: Any, count: Tensor | None = None) -> None:
        self.full, self.member, self.key = full, member, key
        self.count = counted(member, key) if count is None else count
        self.numbers, self.name = False, object()
        self.rows: MaskedRows | None = None

    each_once = True  # whether the rows come from a mask, so that no row occurs twice

    def with_rows(self, full: Any, numbers: bool = False) -> Any:
        """Returns the rows of `full` under the same mask; for a tuple, of each of its tensors."""
        if isinstance(full, (tuple, list)):
            each = [self.with_rows(x) for x in full]
            return Pair(*each) if hasattr(full, "indices") else tuple(each)
        made = MaskedRows(full, self.member, self.key, self.count)
        made.numbers = numbers
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return applied(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(name)
        func = getattr(Tensor, name)
        if not callable(func):
            raise refusal(name)
        return lambda *args, **kwargs: applied(func, (self, *args), kwargs)

    def added(self) -> Tensor:
        """Returns b[N]: the rows that count where rows are written into or added to a tensor,
        within the running turns of loops."""
        return reduce(lambda member, turn: turn.limited(member), RUNNING, self.member)

    @property
    def shape(self) -> tuple[Any, ...]:
        return (self.count, *self.full.shape[1:])

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> Tensor:
        made = self.count * self.full[0].numel()
        setattr(made, SAID, True)  # `if rows.numel():` is true, as for counts
        return made

    def dim(self) -> int:
        return self.full.dim()

    def is_floating_point(self) -> bool:
        return self.full.is_floating_point()

    def __len__(self) -> int:
        raise refusal("len()")

    def __iter__(self) -> Any:
        return applied(Tensor.__iter__, (self, sys._getframe(1)), {})

    def __bool__(self) -> bool:
        raise refusal("bool()")

    __class__ = property(lambda self: Tensor)  # type: ignore[assignment]  # for isinstance
    ndim = property(dim)
    dtype = property(lambda self: self.full.dtype)
    device = property(lambda self: self.full.device)
    requires_grad = property(lambda self: self.full.requires_grad)


class Turn(Protocol):
    """A turn of a loop that is in the graph for every batch, though eager mode may skip it."""

    def limited(self, member: Tensor) -> Tensor:
        """Returns b[N]: the rows of `member` that count; none where eager mode skips the turn."""
        ...


RUNNING: list[Turn] = []  # the turns being traced; only one thread captures at a time


class Beside:
    """Base class of other stand-ins for tensors that may be arguments together with masked rows."""

    def joined(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the function's result for arguments with this object among them."""
        raise NotImplementedError


def counted(member: Tensor, key: Any) -> Tensor:
    """Returns the number of rows where `member` b[N] is true, i64[]."""
    count = member.sum()
    setattr(count, ROWS_OF, key)
    setattr(count, SAID, True)
    return count


def is_tensor(x: Any) -> bool:
    """Returns whether x is a real tensor, and no stand-in such as `MaskedRows`."""
    return issubclass(type(x), Tensor)  # `isinstance` is true for stand-ins too


class Pair(NamedTuple):
    """The result of `max(dim)` and the like: values and their indices."""

    values: Any
    indices: Any


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *others: applied(getattr(Tensor, name), (self, *others), {})


_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or")
OPERATORS = (
    *(f"__{side}{name}__" for name in _ARITHMETIC for side in ("", "r")),
    *(f"__{name}__" for name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "abs", "invert")),
    "__getitem__", "__xor__", "__rxor__",
)  # fmt: skip
for _name in OPERATORS:
    if hasattr(Tensor, _name):
        setattr(MaskedRows, _name, _operator(_name))
MaskedRows.__hash__ = object.__hash__  # type: ignore[method-assign]


def refusal(what: str) -> CaptureError:
    """Returns the error for a function that masked rows do not support."""
    return CaptureError(
        f"{what.strip('_')} of rows that a boolean mask chooses: they have no places; {FIX}"
    )


def choose(x: Tensor, mask: Tensor, key: Any) -> MaskedRows:
    """Returns `x[mask]` as masked rows. key: the mask's. Raises CaptureError for a mask whose shape
    is not that of x's leading dims."""
    k = mask.dim()
    if tuple(x.shape[:k]) != tuple(mask.shape):
        raise CaptureError(
            f"a boolean mask of shape {tuple(mask.shape)} does not match the leading dims of "
            f"a tensor of shape {tuple(x.shape)}; fix: give a mask of the leading dims"
        )
    rows = x.flatten(0, k - 1) if k > 1 else x
    member = mask.reshape(-1).bool()
    first = member.long().argmax(0, keepdim=True)
    copies = rows.index_select(0, first)
    return MaskedRows(torch.where(wide(member, rows), rows, copies), member, key)


def wide(member: Tensor, like: Tensor) -> Tensor:
    """Returns member b[N] as b[N,1,...], to broadcast over `like`."""
    return member.view(-1, *[1] * (like.dim() - 1))


def row_numbers(mask: Tensor, key: Any) -> list[MaskedRows]:
    """Returns `mask.nonzero(as_tuple=True)`, each index tensor as masked rows."""
    shape, found = mask.shape, []
    for d in range(mask.dim()):
        own = torch.arange(shape[d]).view(*[-1 if i == d else 1 for i in range(mask.dim())])
        made = choose(own.expand(shape), mask, key)
        made.numbers = mask.dim() == 1
        found.append(made)
    return found


# ---- functions of masked rows

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Returns a decorator that registers a rule for torch functions of these names."""

    def decorate(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return decorate


def applied(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Applies a torch function to arguments with masked rows among them, by its rule. Raises
    CaptureError where it has none, or the rule refuses the call."""
    for x in (*args, *kwargs.values()):
        if issubclass(type(x), Beside):
            return x.joined(func, args, kwargs)
    name = getattr(func, "__name__", str(func))
    if name not in RULES:
        raise refusal(name.strip("_"))
    func = getattr(func, "__wrapped__", func)  # the wrapper of mode_reads.py has recorded the call
    return RULES[name](func, args, kwargs)


def found_in(args: Any) -> list[MaskedRows]:
    """Returns the masked rows among arguments, also in containers."""
    if isinstance(args, MaskedRows):
        return [args]
    if isinstance(args, dict):
        return found_in(list(args.values()))
    return [c for a in args for c in found_in(a)] if isinstance(args, (tuple, list)) else []


def one_of(name: str, chosen: Sequence[MaskedRows]) -> MaskedRows:
    """Returns the first of several masked rows. Raises CaptureError if their masks may differ."""
    if any(c.key != chosen[0].key for c in chosen):
        raise CaptureError(
            f"{name} combines rows chosen by two boolean masks, which may choose different "
            "rows; fix: compute the mask once, and index with it everywhere"
        )
    return chosen[0]


def plain(args: Any) -> Any:
    """Returns arguments with `full`, all rows, in place of masked rows."""
    if isinstance(args, MaskedRows):
        return args.full
    if isinstance(args, dict):
        return {k: plain(v) for k, v in args.items()}
    if isinstance(args, (tuple, list)):
        return type(args)(map(plain, args))
    return args


def tensors_in(args: Any) -> list[Tensor]:
    """Returns the real tensors among arguments, also in containers."""
    if isinstance(args, dict):
        return tensors_in(list(args.values()))
    if isinstance(args, (tuple, list)):
        return [t for a in args for t in tensors_in(a)]
    return [args] if is_tensor(args) else []


def is_mask(index: Any) -> bool:
    """Returns whether an index is a boolean mask."""
    return is_tensor(index) and index.dim() > 0 and index.dtype == torch.bool


def product_of(sizes: Sequence[Any]) -> Any:
    """Returns the product of sizes, symbolic ones too."""
    total = 1
    for n in sizes:
        total = total * n
    return total
