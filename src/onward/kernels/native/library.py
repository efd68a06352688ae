"""The compiled library: found, chosen by what the processor can do, loaded beside PyTorch's OpenMP.

It is a plain C ABI called through ctypes: every argument is a pointer, an int64_t or a float, and
every call is checked by the function's definition in the sources (signatures.py).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from onward.environment import environment
from onward.errors import OnwardError
from onward.graph.types import LOW, DType, Type
from onward.kernels.kernel import KernelSpec, Launch
from onward.kernels.native.signatures import KernelSignature, signatures
from onward.kernels.target import Target

log = logging.getLogger("onward")
FOLDER = Path(__file__).parent
# Best first, each with what `torch.backends.cpu` calls processors that have it.
_LEVELS: dict[str, set[str] | None] = {
    "avx512": {"AVX512"},
    "avx2": {"AVX2", "AVX512"},
    "plain": None,
}
Argument: TypeAlias = (
    "torch.Tensor | Sequence[int] | Sequence[float] | ctypes.Array[ctypes.c_int64] | float | None"
)
_RUNTIMES = re.compile(r"\S*/lib(?:gomp|iomp5|omp)\b\S*")


class Library:
    """The loaded kernels. `level` is the instruction level, `path` the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.level = path.name.partition(".")[0]
        self._c = ctypes.CDLL(str(path))
        self._functions: dict[str, Callable[..., Any]] = {}

    @property
    def is_current(self) -> bool:
        """Whether the library was built from the sources that lie beside it."""
        try:
            stamp = self._c["onward_sources"]
        except AttributeError:
            return False
        stamp.restype = ctypes.c_char_p
        return stamp() == sources_digest().encode()

    def launch(self, function: str, /, **arguments: Argument) -> Launch:
        """Makes a call of a C function, its arguments given by the names of its definition, checked
        and converted once.

        A tensor or a ctypes array gives its address, a sequence of numbers that of a copy, None a
        null pointer. The codes of element types follow from the tensors. Raises TypeError or
        ValueError where they are not what the definition says.
        """
        signature = declared()[function]
        call = self._functions.get(function)
        if call is None:
            call = self._functions[function] = self._c[function]
            call.restype = None  # type: ignore[attr-defined]
        return partial(call, *signature.converted(arguments))


@functools.cache
def declared() -> dict[str, KernelSignature]:
    """The signature of each C function, by its name."""
    return signatures(sorted(FOLDER.glob("src/*.cpp")))


@functools.cache
def library() -> Library | None:
    """The native kernels for this machine, or None, whose reason is logged once.

    Raises OnwardError where the environment asks for a build that is not available.
    """
    wanted = environment().native
    if wanted == "0":
        return None
    found, reason = _load(wanted)
    if found is None and wanted:
        raise OnwardError(
            f"ONWARD_NATIVE={wanted} is not available ({reason}); fix: one of "
            f"{', '.join(['0', *usable()])}, or unset it"
        )
    if found is None and environment().native_folder:
        raise OnwardError(
            f"the kernels in ONWARD_NATIVE_FOLDER={environment().native_folder} cannot be "
            f"loaded ({reason}); fix: build them from this version's sources, or unset it"
        )
    if found is None:
        log.warning(
            "native CPU kernels are not available (%s), so that steps run on "
            "PyTorch's slower operators",
            reason,
        )
    return found


def about() -> str:
    """The build that serves this machine, or why none does, in words."""
    if environment().native == "0":
        return "off (ONWARD_NATIVE=0)"
    found = library()
    if found is not None:
        return f"{found.level} ({found.path.name})"
    return f"none: {_load('')[1]}"


def files() -> dict[str, Path]:
    """The compiled library of each instruction level, best first."""
    folder = environment().native_folder or FOLDER
    found = ((level, sorted(folder.glob(f"{level}.*.so"))) for level in _LEVELS)
    return {level: paths[0] for level, paths in found if paths}


def built() -> list[str]:
    """The instruction levels that the installation compiled, best first."""
    return list(files())


def usable() -> list[str]:
    """The instruction levels of `built` that this processor runs."""
    processor = torch.backends.cpu.get_cpu_capability()
    return [x for x in built() if (needed := _LEVELS[x]) is None or processor in needed]


def _load(wanted: str) -> tuple[Library | None, str]:
    if wanted and wanted in built() and wanted not in usable():
        return None, f"this processor has {torch.backends.cpu.get_cpu_capability()}"
    level = next((level for level in usable() if wanted in ("", level)), None)
    if level is None:
        if wanted and built():
            return None, f"built are: {', '.join(built())}"
        return None, "not built: the package was installed without a C++ compiler"
    path = files()[level]
    try:
        # No OpenMP of its own: its symbols come from the runtime that torch has loaded.
        loaded = Library(path)
    except OSError as error:
        return None, str(error)
    if not loaded.is_current:
        return None, f"{path.name} was built from other sources; fix: reinstall the package"
    runtimes = openmp_runtimes()
    if len(runtimes) != 1 and not shares_threads():
        return None, f"{len(runtimes)} OpenMP runtimes loaded: {', '.join(runtimes)}"
    return loaded, ""


def shares_threads() -> bool:
    """Whether the OpenMP runtime that a library without one of its own finds is the one that
    `torch.set_num_threads` sets: another package, such as scikit-learn, may have brought another
    into the process."""
    try:
        most = ctypes.CDLL(None).omp_get_max_threads
    except AttributeError:
        return False
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        return bool(most() == before + 1)
    finally:
        torch.set_num_threads(before)


def sources_digest() -> str:
    """The digest of the C++ sources, as `setup.py` writes it into what it builds."""
    digest = hashlib.sha256()
    for path in sorted(FOLDER.glob("src/*")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def openmp_runtimes() -> list[str]:
    """The OpenMP libraries in this process; kernels on two would quarrel over the cores."""
    text = Path("/proc/self/maps").read_text(encoding="utf-8")
    return sorted(set(_RUNTIMES.findall(text)))


def where(target: Target) -> str | None:
    """`Kernel.where` of every native kernel."""
    if target.device != "cpu":
        return f"not on {target.device}"
    return None if target.has_library else "no native library"


def only_f32(spec: KernelSpec) -> str | None:
    """`Kernel.unsupported`: the first operand, the result and every floating operand are f32.
    Further ones may be numbers of rows, masks, seeds."""
    return _not_floating(spec) or floats_are_f32(spec)


def one_element_type(spec: KernelSpec) -> str | None:
    """`Kernel.unsupported`: as `only_f32`, but all of them may be bf16 or fp16 as well."""
    return _not_floating(spec) or not_one_element((*spec.inputs, *spec.outputs))


def _not_floating(spec: KernelSpec) -> str | None:
    for t in (*spec.inputs[:1], *spec.outputs[:1]):
        if t is not None and not t.is_floating:
            return f"{t.dtype.name.lower()} tensors"
    return None


def floats_are_f32(spec: KernelSpec) -> str | None:
    """`Kernel.unsupported`: every floating operand is f32."""
    return not_f32((*spec.inputs, *spec.outputs))


def not_f32(types: Iterable[Type | None]) -> str | None:
    """Why not all floating types are f32, if so."""
    strange = next((d for d in _floating(types) if d != DType.FLOAT), None)
    return None if strange is None else f"{strange.name.lower()} tensors"


def not_one_element(types: Iterable[Type | None], beside: tuple[DType, ...] = ()) -> str | None:
    """Why the floating types are not all f32, all bf16 or all fp16: what a C function calls T.
    Those of a dtype in `beside` do not count."""
    found = [d for d in _floating(types) if d not in beside]
    strange = next((d for d in found if d != DType.FLOAT and d not in LOW), None)
    if strange is not None:
        return f"{strange.name.lower()} tensors"
    return None if len(found) < 2 else f"{' and '.join(d.name.lower() for d in found)} tensors"


def _floating(types: Iterable[Type | None]) -> list[DType]:
    """The floating dtypes of types, each once, in their order."""
    return list(dict.fromkeys(t.dtype for t in types if t is not None and t.is_floating))
