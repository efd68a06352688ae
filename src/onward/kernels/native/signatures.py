"""The C functions as `src/*.cpp` define them, and checks of their arguments.

A definition is the only place that says what a function takes: the compiler compiles it, and calls
are checked against it. `src/annotations.h` defines the macros by which it says more than C can.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import CodeType
from typing import Any

import torch

Convert = Callable[[Any], Any]

# C type -> torch dtype and ctypes type
_NUMBERS: dict[str, tuple[torch.dtype, Any]] = {
    "float": (torch.float32, ctypes.c_float),
    "double": (torch.float64, ctypes.c_double),
    "int64_t": (torch.int64, ctypes.c_int64),
    "int32_t": (torch.int32, ctypes.c_int32),
    "uint8_t": (torch.bool, ctypes.c_uint8),
    "code_t": (torch.uint8, ctypes.c_uint8),
}
# C types that depend on the call, as in src/element.h. All tensors of one of them have the same
# dtype, whose code is passed as the parameter `element_T` or `element_U`; callers do not pass it.
_CHOSEN = ("T", "U")
ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_STRUCTS = {"Blas": 4}  # structs, as numbers of int64_t
_NULL = ctypes.c_void_p(None)

_COMMENT = re.compile(r"//[^\n]*")
_INNER = r"(?:[^()]|\((?:[^()]|\([^()]*\))*\))*"  # parentheses nested at most twice
_EXPORTED = re.compile(r'\bextern\s+"C"')  # anything that Python could call
_FUNCTION = re.compile(rf'extern "C" void (onward_\w+)\(({_INNER})\)\s*\{{')
# functions without arguments to check
_WITHOUT_ARGUMENTS = re.compile(r'extern "C" [\w* ]+\(\)\s*\{')
_WORD = re.compile(r"[a-z]\w*")
_COMMA = re.compile(rf",(?={_INNER}$)")  # between parameters, not within parentheses
_PARAMETER = re.compile(
    r"(?P<const>const )?(?P<type>\w+)(?P<pointer>\*)? ?(?P<optional>OPTIONAL )?"
    rf"(?:OF\((?P<count>{_INNER})\) )?(?P<name>\w+)"
)


@dataclass(frozen=True)
class Parameter:
    """One parameter. type: in C. count: how many numbers a pointer refers to, an expression of the
    function's integers; "" where it is not stated."""

    name: str
    type: str
    pointer: bool
    const: bool
    optional: bool
    count: str

    @property
    def derived(self) -> str:
        """The chosen type whose code this parameter is; "" for an argument that callers pass."""
        word = self.name.removeprefix("element_")
        return word if word in _CHOSEN and word != self.name else ""

    @property
    def text(self) -> str:
        """Describes what a caller has to pass."""
        if self.type in _STRUCTS:
            return f"{_STRUCTS[self.type]} ints"
        if self.type in _CHOSEN:
            kind = f"a tensor of {', '.join(map(str, ELEMENTS))} on cpu"
        else:
            kind = f"a {_NUMBERS[self.type][0]} tensor on cpu"
        return f"{kind} or None" if self.optional else kind


class KernelSignature:
    """A function's parameters; checks and converts arguments given by name."""

    def __init__(self, name: str, parameters: tuple[Parameter, ...]) -> None:
        self.name, self.parameters = name, parameters
        self._given = {p.name for p in parameters if not p.derived}
        self._converters = tuple((p, _converter(name, p)) for p in parameters)
        self._counts: tuple[tuple[Parameter, CodeType], ...] = tuple(
            (p, compile(p.count, name, "eval")) for p in parameters if p.count
        )
        numbers = [p.name for p in parameters if not p.pointer]
        named = {word for p in parameters for word in _WORD.findall(p.count)}
        self._sizes = tuple(n for n in numbers if n in named)

    def converted(self, given: Mapping[str, Any]) -> list[Any]:
        """The arguments for ctypes, in order. Raises TypeError for missing or unknown names, for
        arguments of another kind or dtype, and for tensors of one chosen type that differ in dtype;
        ValueError for pointers to too few numbers and for negative sizes."""
        if given.keys() != self._given:
            self._refuse_names(given)
        arguments = [
            ctypes.c_int64(self._element(p.derived, given)) if p.derived else convert(given[p.name])
            for p, convert in self._converters
        ]
        for name in self._sizes:  # the product of two negative sizes could look right
            if given[name] < 0:
                raise ValueError(f"{self.name}: {name} is {given[name]}, and counts numbers")
        for parameter, count in self._counts:
            argument, least = given[parameter.name], eval(count, _NO_NAMES, given)
            if argument is not None and _numbers_behind(argument) < least:
                raise ValueError(
                    f"{self.name}: {parameter.name} has {_numbers_behind(argument)} numbers in a "
                    f"row, and {least} are {'read' if parameter.const else 'written'}"
                )
        return arguments

    def _element(self, word: str, given: Mapping[str, Any]) -> int:
        """The code of the dtype of a chosen type's tensors; f32's if all are absent. Arguments that
        are not tensors of such a dtype are refused later, one by one."""
        tensors = {p.name: given[p.name] for p in self.parameters if p.type == word}
        tensors = {n: x for n, x in tensors.items() if getattr(x, "dtype", None) in ELEMENTS}
        for (first, x), (other, y) in pairwise(tensors.items()):
            if x.dtype != y.dtype:
                raise TypeError(
                    f"{self.name}: {other} is {_shown(y)}, and {first} is {_shown(x)}; they have "
                    "to be of one dtype"
                )
        return next((ELEMENTS[x.dtype] for x in tensors.values()), 0)

    def _refuse_names(self, given: Mapping[str, Any]) -> None:
        names = [p.name for p in self.parameters if not p.derived]
        missing = [n for n in names if n not in given]
        strange = [n for n in given if n not in names]
        raise TypeError(
            f"{self.name}: missing {', '.join(missing) or 'none'}; unknown "
            f"{', '.join(strange) or 'none'}"
        )


_NO_NAMES: dict[str, Any] = {"__builtins__": {}}


def signatures(sources: Iterable[Path]) -> dict[str, KernelSignature]:
    """The signature of each function that the sources define for Python, by name.

    Raises ValueError for a definition that this module cannot read, and for two of one name.
    """
    found: dict[str, KernelSignature] = {}
    for path in sources:
        text = _COMMENT.sub("", path.read_text(encoding="utf-8"))
        for place in _EXPORTED.finditer(text):
            function = _FUNCTION.match(text, place.start())
            if function is None:
                if _WITHOUT_ARGUMENTS.match(text, place.start()):
                    continue
                line = text[place.start() :].partition("\n")[0]
                raise ValueError(
                    f"{path.name}: '{line}' defines no function that signatures.py reads; "
                    'fix: extern "C" void onward_<name>(...) {...}, without a declaration before'
                )
            name, listed = function.groups()
            if name in found:
                raise ValueError(f"{path.name}: {name} is defined in another file too")
            parts = [" ".join(part.split()) for part in _COMMA.split(listed)]
            parameters = tuple(_parameter(path.name, part) for part in parts)
            _check_chosen(f"{path.name}: {name}", parameters)
            found[name] = KernelSignature(name, parameters)
    return found


def _check_chosen(place: str, parameters: tuple[Parameter, ...]) -> None:
    """Raises ValueError unless each chosen type has exactly one code parameter, and no code lacks
    its type."""
    used = {p.type for p in parameters if p.type in _CHOSEN}
    codes = {p.derived for p in parameters if p.derived and p.type == "int64_t" and not p.pointer}
    if used != codes:
        words = ", ".join(sorted(used ^ codes))
        raise ValueError(
            f"{place} has not both, pointers and a code, of {words}; fix: as element.h"
        )


def _parameter(file: str, text: str) -> Parameter:
    match = _PARAMETER.fullmatch(text)
    if match is None:
        raise ValueError(f"{file}: '{text}' is no parameter that signatures.py reads")
    parts = match.groupdict(default="")
    count = parts["count"].replace("/", "//")
    return Parameter(
        parts["name"], parts["type"], bool(parts["pointer"]), bool(parts["const"]),
        bool(parts["optional"]), count,
    )  # fmt: skip


def _numbers_behind(argument: Any) -> int:
    """The number of contiguous elements at an argument's address."""
    if isinstance(argument, torch.Tensor):
        return argument.numel() if argument.is_contiguous() else 1
    return len(argument)


def _converter(function: str, p: Parameter) -> Convert:
    if not p.pointer:
        return partial(_number, function, p)
    if p.type in _STRUCTS:
        return partial(_struct, function, p)
    if p.type in _CHOSEN:
        return partial(_chosen, function, p)
    return partial(_pointer, function, p, *_NUMBERS[p.type])


def _number(function: str, p: Parameter, given: Any) -> Any:
    whole = p.type == "int64_t"
    if type(given) is not (int if whole else float):
        kind = "an int" if whole else "a float"
        raise TypeError(f"{function}: {p.name} is {_shown(given)}, not {kind}")
    return _NUMBERS[p.type][1](given)


def _struct(function: str, p: Parameter, given: Any) -> Any:
    size = _STRUCTS[p.type]
    if not isinstance(given, tuple) or len(given) != size:
        raise TypeError(f"{function}: {p.name} is {_shown(given)}, not {p.text}")
    return (ctypes.c_int64 * size)(*given)


def _pointer(function: str, p: Parameter, dtype: torch.dtype, number: Any, given: Any) -> Any:
    """The address of an argument: of a tensor, or of a copy of a sequence; ctypes arrays pass as
    they are."""
    if given is None and p.optional:
        return _NULL
    if isinstance(given, torch.Tensor):
        if given.dtype == dtype and given.device.type == "cpu":
            return ctypes.c_void_p(given.data_ptr())
    elif isinstance(given, ctypes.Array):
        if given._type_ is number:
            return given
    elif isinstance(given, (tuple, list)) and p.const:
        return (number * len(given))(*given)
    raise TypeError(f"{function}: {p.name} is {_shown(given)}, not {p.text}")


def _chosen(function: str, p: Parameter, given: Any) -> Any:
    """The address of a tensor whose dtype is one of those that may be chosen."""
    if given is None and p.optional:
        return _NULL
    if isinstance(given, torch.Tensor) and given.dtype in ELEMENTS and given.device.type == "cpu":
        return ctypes.c_void_p(given.data_ptr())
    raise TypeError(f"{function}: {p.name} is {_shown(given)}, not {p.text}")


def _shown(given: Any) -> str:
    if isinstance(given, torch.Tensor):
        return f"a {given.dtype} tensor on {given.device.type}"
    return f"{given!r}"


__all__ = ["ELEMENTS", "KernelSignature", "Parameter", "signatures"]
