"""Device code casts what it loads to f32 in the same expression: sums are f32 on a device, and
Triton's interpreter computes wrong numbers with bf16 that is not cast, without an error."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from answers import SUPPORT
from triton_budgets import DEVICE_MODULES

# Pointers to integers and flags, by name.
WHOLE_NUMBERS = {
    "blocks", "coordinates", "ends", "ignored", "index", "labels", "norms", "offset", "order",
    "ordered", "q_at", "ranges", "seed", "table",
}  # fmt: skip
# By function and pointer: loads that are of something else.
OTHERS = {
    ("places", "at"): "sequences and places",
    ("filtered", "mask"): "flags; the other load of a mask, which is added, is cast",
    ("rows", "at"): "operands of products, whose type chooses the device's instruction",
    ("_numbers", "at"): "bits of bf16, and codes",
    ("read_rows", "x"): "bits, which are copied as whole numbers",
    ("set_rows", "source"): "bits, which are copied as whole numbers",
}


def _parents(tree: ast.AST) -> dict[ast.AST, ast.AST]:
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def _pointer(load: ast.Call) -> str:
    """The name that a pointer's sum begins with."""
    node = load.args[0]
    while isinstance(node, ast.BinOp):
        node = node.left
    return node.id if isinstance(node, ast.Name) else ast.unparse(node)


def loads(source: str) -> Iterator[tuple[int, str, str, bool]]:
    """Line, function and pointer of each load, and whether it is cast to f32."""
    tree = ast.parse(source)
    parents = _parents(tree)
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Attribute) and ast.unparse(node) == "tl.load"):
            continue
        call = parents[node]
        own = call
        while not isinstance(own, ast.FunctionDef):
            own = parents[own]
        if not isinstance(call, ast.Call) or call.func is not node:
            yield node.lineno, own.name, "tl.load under another name", False
            continue
        attribute = parents[call]
        cast = parents.get(attribute)
        yield call.lineno, own.name, _pointer(call), (
            isinstance(attribute, ast.Attribute)
            and isinstance(cast, ast.Call)
            and cast.func is attribute
            and ast.unparse(cast).endswith(").to(tl.float32)")
        )  # fmt: skip


def uncast(source: str) -> list[str]:
    return [
        f"line {line}: tl.load({pointer} ...) in {function}"
        for line, function, pointer, cast in sorted(loads(source))
        if not cast and pointer not in WHOLE_NUMBERS and (function, pointer) not in OTHERS
    ]


@pytest.mark.parametrize("module", DEVICE_MODULES, ids=[path.stem for path in DEVICE_MODULES])
def test_loads_are_cast_to_f32(module: Path) -> None:
    found = uncast(module.read_text(encoding="utf-8"))
    assert not found, "\n".join(found)


def test_what_is_excepted_is_there() -> None:
    found = {
        (function, pointer)
        for path in DEVICE_MODULES
        for _, function, pointer, cast in loads(path.read_text(encoding="utf-8"))
        if not cast
    }
    assert {p for f, p in found if (f, p) not in OTHERS} == WHOLE_NUMBERS
    assert set(OTHERS) <= found


_PLANTED = """
def kernel(x, y, bias, labels, n, HAS: tl.constexpr):
    i = tl.arange(0, 16)
    good = tl.load(x + i, mask=i < n, other=0.0).to(tl.float32)[None, :]
    label = tl.load(labels + i)
    bad = tl.load(x + i * 2, mask=i < n) * 2.0
    narrow = tl.load(bias).to(tl.bfloat16)
    if HAS:
        bad += tl.load(bias + i)
    later = tl.load(y)
    load = tl.load
    return later.to(tl.float32)
"""


def test_a_load_that_is_not_cast_is_found() -> None:
    assert uncast(_PLANTED) == [
        "line 6: tl.load(x ...) in kernel",
        "line 7: tl.load(bias ...) in kernel",
        "line 9: tl.load(bias ...) in kernel",
        "line 10: tl.load(y ...) in kernel",
        "line 11: tl.load(tl.load under another name ...) in kernel",
    ]


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_the_interpreter_still_computes_bf16_wrongly() -> None:
    """Fails once Triton has mended its interpreter, and says what to do then."""
    done = subprocess.run(
        [sys.executable, SUPPORT / "bfloat16_sum.py"], capture_output=True, text=True, timeout=120,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    plain, cast = map(float, done.stdout.split())
    assert cast == 36.0
    assert plain != 36.0, (
        "the interpreter computes with bf16 now: put DType.BFLOAT16 into DTYPES of "
        "support/triton_calls.py, ask pyproject.toml for this Triton, and take this test away"
    )
    assert plain == pytest.approx(7.523164e-37), "it is wrong in another way than it was"
