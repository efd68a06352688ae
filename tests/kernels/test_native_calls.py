"""Calls of the C functions are checked by the sources that define them, before they are made.

The calls are those that the kernels make for their op's sample calls; each is then made wrong in
every way in which one parameter of it can be.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import test_low_cross_entropy as low_head
import torch
from kernel_calls import bound, rubbish, spec_of
from op_cases import CASES, ONWARD_CASES
from test_kernels import REFUSED

from onward.graph.types import DType
from onward.kernels import KERNELS, KernelArguments, host
from onward.kernels.blas import low_product
from onward.kernels.native import library
from onward.kernels.native.library import FOLDER, Library, declared, files, usable
from onward.kernels.native.signatures import KernelSignature, Parameter, signatures

UNCALLED = {"onward_math"}  # of the tests alone
Arguments = dict[str, Any]


@functools.cache
def calls() -> dict[str, Arguments]:
    """A call of each function, in which every pointer that may be null is given where some call
    gives it."""
    found: dict[str, Arguments] = {}

    def record(self: Library, function: str, /, **arguments: Any) -> Any:
        held = found.setdefault(function, arguments)
        if sum(x is None for x in arguments.values()) < sum(x is None for x in held.values()):
            found[function] = arguments
        return lambda: None

    with pytest.MonkeyPatch.context() as patched:
        library.library()
        for case in CASES + ONWARD_CASES:
            for kernel in KERNELS.get(case.op, ()):
                if (
                    case.label in REFUSED
                    or kernel.where(host())
                    or kernel.unsupported(spec_of(case))
                ):
                    continue
                if not kernel.name.startswith("aten"):
                    call = bound(case)
                    outputs = [rubbish(t) for t in call.spec.outputs]
                    scratch = [rubbish(t) for t in kernel.scratch(call.spec)]
                    patched.setattr(Library, "launch", record)
                    kernel.bind(KernelArguments(call.spec.attrs, call.inputs, outputs, scratch))
                    patched.undo()
        patched.setattr(Library, "launch", record)  # of low operands, which no sample call has
        attrs, *given = low_head.sample((6, 4, 9), DType.BFLOAT16, low_head.FORMS["all"])
        low_head.launch("LinearCrossEntropyStep", attrs, [torch.tensor(1.0), *given])
        low = [torch.ones(3, 3, dtype=torch.bfloat16) for _ in range(4)]
        scratch = [rubbish(t) for t in low_product.low_scratch(3, 3, 3)]
        low_product.low_product(low[0], low[1], low[2], scratch, low[3])
        patched.undo()
    x = torch.ones(3)
    return found | {"onward_math": {"x": x, "y": x.clone(), "n": 3, "which": 0}}


def test_every_function_is_read_and_called() -> None:
    defined: set[str] = set()
    for path in FOLDER.glob("src/*.cpp"):
        defined |= set(re.findall(r'^extern "C" void (\w+)\(', path.read_text(), re.MULTILINE))
    assert set(declared()) == defined == set(calls())


@pytest.mark.skipif(not shutil.which("nm"), reason="no nm on this machine")
@pytest.mark.parametrize("level", usable())
def test_every_function_of_a_build_is_read(level: str) -> None:
    """Whatever a build exports by a C name: none can be called unchecked."""
    command = ["nm", "--dynamic", "--defined-only", "--format=just-symbols", str(files()[level])]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    exported = {name for name in listed if name.startswith("onward_")}
    assert exported == {*declared(), "onward_sources"}


@pytest.mark.parametrize("level", usable())
def test_every_declared_function_is_in_every_build(level: str) -> None:
    symbols = ctypes.CDLL(str(files()[level]))
    assert [name for name in declared() if not hasattr(symbols, name)] == []


def test_what_is_read_is_what_is_compiled() -> None:
    """No declaration beside a definition, which could say something else."""
    for path in FOLDER.glob("src/*"):
        names = re.findall(r"\b(onward_\w+)\(", path.read_text())
        assert len(names) == len(set(names)), path.name
        assert path.suffix == ".cpp" or not names, path.name


@pytest.mark.parametrize("function", declared())
def test_calls_that_kernels_make_are_taken(function: str) -> None:
    signature, arguments = declared()[function], calls()[function]
    assert len(signature.converted(arguments)) == len(signature.parameters)
    assert {p.name for p in signature.parameters if not p.derived} == set(arguments)


def asked(signature: KernelSignature) -> list[Parameter]:
    """What a caller gives: all but the codes of element types."""
    return [p for p in signature.parameters if not p.derived]


CHOSEN = [
    (name, word)
    for name, signature in declared().items()
    for word in sorted({p.derived for p in signature.parameters} - {""})
]


def of_dtype(function: str, word: str, dtype: torch.dtype) -> Arguments:
    """The call with all tensors of a chosen type in this dtype."""
    signature, arguments = declared()[function], calls()[function]
    chosen = [p.name for p in signature.parameters if p.type == word]
    return {n: x.to(dtype) if n in chosen and x is not None else x for n, x in arguments.items()}


@pytest.mark.parametrize(("function", "word"), CHOSEN)
def test_the_code_of_an_element_type_follows_from_the_tensors(function: str, word: str) -> None:
    signature = declared()[function]
    (at,) = (i for i, p in enumerate(signature.parameters) if p.derived == word)
    for dtype, code in ((torch.float32, 0), (torch.bfloat16, 1), (torch.float16, 2)):
        assert signature.converted(of_dtype(function, word, dtype))[at].value == code


@pytest.mark.parametrize(("function", "word"), CHOSEN)
def test_tensors_of_one_chosen_type_have_one_dtype(function: str, word: str) -> None:
    signature, arguments = declared()[function], of_dtype(function, word, torch.bfloat16)
    named = [p.name for p in signature.parameters if p.type == word]
    chosen = [name for name in named if arguments[name] is not None]
    for name in chosen if len(chosen) > 1 else ():
        words = rf"^{function}: .* is a torch\.\w+ tensor on cpu, and .* is a torch\.\w+ tensor"
        with pytest.raises(TypeError, match=words) as refused:
            signature.converted(arguments | {name: arguments[name].half()})
        assert name in str(refused.value)
        assert "bfloat16" in str(refused.value) and "torch.float16" in str(refused.value)


def mistakes(p: Parameter, given: Any) -> dict[str, Any]:
    """What may stand in the place of a right argument, and may not be taken."""
    if not p.pointer:
        wrong: dict[str, Any] = {"a tensor": torch.ones(1), "none": None, "a list": [1]}
        return wrong | {"the other kind": 1.5 if p.type == "int64_t" else 1, "a truth": True}
    wrong = {"a number": 3, "text": "x"}
    if not p.optional:
        wrong["none"] = None
    if isinstance(given, torch.Tensor):
        others = (torch.float64, torch.int64, torch.int32, torch.bool, torch.int8)
        chosen = (torch.float32, torch.bfloat16, torch.float16)
        taken = chosen if p.type in ("T", "U") else (given.dtype,)
        wrong |= {str(d): given.to(d) for d in (*others, *chosen) if d not in taken}
        wrong["elsewhere"] = given.to("meta")
    if not p.const:
        wrong["a copy of a list"] = [1, 2, 3]
    return wrong


@pytest.mark.parametrize("function", declared())
def test_argument_of_another_kind_is_refused_by_name(function: str) -> None:
    signature, arguments = declared()[function], calls()[function]
    for p in asked(signature):
        for name, wrong in mistakes(p, arguments[p.name]).items():
            with pytest.raises(TypeError, match=rf"^{function}: {p.name} is "):
                signature.converted(arguments | {p.name: wrong})
                pytest.fail(f"{p.name} took {name}")


@pytest.mark.parametrize("function", declared())
def test_missing_and_unknown_names_are_refused(function: str) -> None:
    signature, arguments = declared()[function], calls()[function]
    for p in asked(signature):
        rest = {n: x for n, x in arguments.items() if n != p.name}
        with pytest.raises(TypeError, match=rf"missing {p.name}; unknown none"):
            signature.converted(rest)
    for other in ("other", *(p.name for p in signature.parameters if p.derived)):
        with pytest.raises(TypeError, match=f"missing none; unknown {other}"):
            signature.converted(arguments | {other: 1})


@pytest.mark.parametrize("function", declared())
def test_too_few_numbers_are_refused(function: str) -> None:
    """One number less than the call reads or writes, behind each pointer that says how many."""
    signature, arguments = declared()[function], calls()[function]
    said = [p for p in signature.parameters if p.count and arguments[p.name] is not None]
    for p in said:
        given = arguments[p.name]
        least = eval(p.count, {}, arguments)
        short = given.flatten() if isinstance(given, torch.Tensor) else given
        with contextlib.suppress(TypeError):  # of ctypes' arrays there is no shorter one
            short = short[: least - 1]
        if least == 0 or isinstance(given, ctypes.Array):
            continue
        with pytest.raises(ValueError, match=rf"^{function}: {p.name} has {least - 1} numbers"):
            signature.converted(arguments | {p.name: short})
        if isinstance(given, torch.Tensor) and least > 1:
            gaps = torch.stack([given.flatten()] * 2, -1)[:, 0]
            with pytest.raises(ValueError, match=f"{p.name} has 1 numbers in a row"):
                signature.converted(arguments | {p.name: gaps})


@pytest.mark.parametrize("function", declared())
def test_negative_sizes_are_refused(function: str) -> None:
    """Each that counts numbers, alone and with another one, so that their product is right."""
    signature, arguments = declared()[function], calls()[function]
    counted = " ".join(p.count for p in signature.parameters)
    numbers = [p.name for p in asked(signature) if p.type == "int64_t" and not p.pointer]
    sizes = [name for name in numbers if re.search(rf"\b{name}\b", counted)]
    for name, other in itertools.product(sizes, repeat=2):
        wrong = {n: -abs(arguments[n]) or -1 for n in (name, other)}
        with pytest.raises(ValueError, match=rf"^{function}: ({name}|{other}) is -\d+, and count"):
            signature.converted(arguments | wrong)


def test_more_of_a_size_than_there_is_memory_is_refused() -> None:
    """A swapped pair of sizes does not get through either."""
    found = calls()["onward_layer_norm"]
    for change in ({"rows": found["rows"] + 1}, {"features": found["features"] + 1}):
        with pytest.raises(ValueError, match="numbers in a row"):
            declared()["onward_layer_norm"].converted(found | change)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('extern "C" void onward_f(const float** x) {}', r"a.cpp: 'const float\*\* x' is no param"),
        ('extern "C" void onward_f(const float* x);', r"a.cpp: '.*onward_f.*' defines no function"),
        ('extern "C" int64_t onward_f(int64_t n) { return n; }', "defines no function"),
        ('extern "C" {\nvoid onward_f(int64_t n) {}\n}', "defines no function"),
        ('extern "C" void f(int64_t n) {}', "defines no function"),
        ('extern "C" void onward_f(int64_t n) {}\nextern "C" void onward_f(int64_t m) {}',
         "onward_f is defined in another"),
        ('extern "C" void onward_f(const T* x) {}', "onward_f lacks pointers or a code of T; fix"),
        ('extern "C" void onward_f(const float* x, int64_t element_U) {}',
         "lacks pointers or a code of U"),
        ('extern "C" void onward_f(const T* x, float element_T) {}',
         "lacks pointers or a code of T"),
    ],
)  # fmt: skip
def test_source_that_is_not_understood_is_refused(source: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "a.cpp"
    path.write_text(source)
    with pytest.raises(ValueError, match=words):
        signatures([path])


def test_source_that_is_understood(tmp_path: Path) -> None:
    path = tmp_path / "a.cpp"
    path.write_text('// c\nextern "C" void onward_f(\n'
                    "    const float* OPTIONAL OF(n * (m + 1)) x, int64_t n,\n"
                    "    int64_t m, float* y)\n{\n    y[0] = g(n);\n}\n"
                    'extern "C" const char* onward_g() { return ""; }\n')  # fmt: skip
    (f,) = signatures([path]).values()
    assert [p.name for p in f.parameters] == ["x", "n", "m", "y"]
    assert f.parameters[0] == Parameter("x", "float", True, True, True, "n * (m + 1)")
