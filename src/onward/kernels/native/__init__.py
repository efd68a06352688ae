"""Kernels in C++ with OpenMP for the CPU; each has an aten kernel or the op's body as fallback.

A kernel is two files: `src/<name>.cpp`, which defines its C function, and `<name>.py` here, whose
`KERNELS` bind it to ops. Both are found automatically.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path

from onward.kernels.kernel import Kernel

Family = Mapping[str, "Kernel | tuple[Kernel, ...]"]  # several kernels of an op are tried in order


def joined(families: Iterable[tuple[str, Family]]) -> dict[str, tuple[Kernel, ...]]:
    """Joins the tables of all families, given with their files' names. Raises ValueError where two
    files have kernels of one op, since their order would depend on the files' names."""
    table: dict[str, tuple[Kernel, ...]] = {}
    owners: dict[str, str] = {}
    for file, kernels in families:
        for op, given in kernels.items():
            if op in table:
                raise ValueError(
                    f"{owners[op]} and {file} both have a native kernel of {op}; fix: put both "
                    "into one file, as a tuple in the order in which to try them"
                )
            owners[op], table[op] = file, given if isinstance(given, tuple) else (given,)
    return table


def _families() -> Iterable[tuple[str, Family]]:
    """The names of the kernels' files. pkgutil would list the compiled libraries as modules too."""
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path != Path(__file__):
            module = import_module(f"{__name__}.{path.stem}")
            yield path.name, getattr(module, "KERNELS", {})


TABLE: dict[str, tuple[Kernel, ...]] = joined(_families())

__all__ = ["TABLE", "joined"]
