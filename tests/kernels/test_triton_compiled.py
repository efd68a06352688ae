"""Every Triton kernel compiled without a device for NVIDIA's sm_80, sm_90 and sm_100 and AMD's
gfx942, within the registers, spills and shared memory of `triton_budgets.json`.

Where a kernel has changed for the better, or a worse figure is meant, the table is written anew:

    python tests/support/triton_compiled.py --write NAME_OF_AN_OP
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import pytest
from answers import asked
from triton_budgets import TABLE, TARGETS, Figures, Table, device_modules, kernel_names
from triton_sizes import CALLS

from onward.kernels import TRITON

NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
HELD = Table.read()
WRITE = "python tests/support/triton_compiled.py --write"
CASES = [(call, dtype, target) for call in CALLS for dtype in call.dtypes for target in TARGETS]
# Shared memory that AMD's blocks do not have: these calls have no kernel there yet.
TOO_LARGE: set[tuple[str, str]] = set()


@pytest.fixture(scope="module")
def answer() -> Iterator[Callable[[str], Any]]:
    """Asks the process that compiles for the figures of one call."""
    with asked("triton_compiled.py", TRITON_INTERPRET="0") as ask:
        yield ask


@NEEDS_TRITON
@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("call", "dtype", "target"), CASES, ids=[f"{c}-{d}-{t}" for c, d, t in CASES]
)
def test_kernels_stay_within_their_budgets(
    call: Any, dtype: str, target: str, answer: Callable[[str], Any]
) -> None:
    found = answer(f"{call}|{dtype}|{target}")
    assert isinstance(found, dict), found
    if version("triton") != HELD.triton:
        pytest.skip(f"the figures are of Triton {HELD.triton}: {WRITE}")
    for kernel, numbers in found.items():
        budget = HELD.budgets.get(kernel, {}).get(f"{call} {dtype}", {}).get(target)
        assert budget is not None, f"{kernel} has no row for {call} {dtype}: {WRITE} {call.op}"
        worse = Figures(*numbers).worse(budget)
        assert not worse, f"{kernel}, {call} {dtype} on {target}: {'; '.join(worse)}"


def test_every_kernel_has_rows_for_every_target() -> None:
    """A kernel that nobody launches, or that no call of `triton_sizes.py` reaches, is named."""
    kernels = kernel_names(device_modules())
    assert len(kernels) >= 10
    assert sorted(HELD.budgets) == sorted(kernels), f"calls in triton_sizes.py, then: {WRITE}"
    for kernel, rows in HELD.budgets.items():
        for row, targets in rows.items():
            assert set(targets) == set(TARGETS), f"{kernel}, {row}"


def test_rows_are_those_of_the_calls() -> None:
    assert {call.op for call in CALLS} == set(TRITON), "calls in triton_sizes.py"
    assert HELD.calls() == {f"{call} {dtype}" for call in CALLS for dtype in call.dtypes}, WRITE
    assert all(call.dtypes for call in CALLS)


def test_kernels_fit_into_the_shared_memory_of_a_block() -> None:
    large = {
        (f"{kernel}, {row}", target)
        for kernel, rows in HELD.budgets.items()
        for row, targets in rows.items()
        for target, figures in targets.items()
        if figures.shared > TARGETS[target]
    }
    assert large == TOO_LARGE


def test_a_worse_figure_is_named() -> None:
    budget = Figures(40, 0, 1024, 128, 128, 30)
    assert budget.worse(budget) == []
    assert Figures(32, 0, 0, 128, 256, 20).worse(budget) == []
    assert Figures(41, 8, 2048, 64, 32, 31).worse(budget) == [
        "registers 41, in the table 40", "spilled 8, in the table 0",
        "shared 2048, in the table 1024", "load 64, in the table 128",
        "store 32, in the table 128", "scalars 31, in the table 30",
    ]  # fmt: skip
    assert Figures(32, 8, 0, 64, 256).or_worse(budget) == Figures(40, 8, 1024, 64, 128, 30)


def test_a_kernel_is_what_no_other_function_names() -> None:
    source = """
from onward.kernels.triton.shared_device import twice

@triton.jit
def helper(x): return x

@triton.jit(do_not_specialize=["n"])
def kernel(x, n): return twice(helper(x))

@triton.jit
def reduced(a, b): return a

@triton.jit
def other(x): return tl.reduce(x, 0, reduced)

def host(): return kernel
"""
    shared = "@triton.jit\ndef twice(x): return x + x\n\n@triton.jit\ndef kernel(x): return x"
    modules = {"own": ast.parse(source), "shared": ast.parse(shared)}
    assert kernel_names(modules) == {"own.kernel", "own.other", "shared.kernel"}


def test_the_table_is_as_it_is_written() -> None:
    assert TABLE.read_text(encoding="utf-8") == HELD.text()
