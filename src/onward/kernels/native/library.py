"""The compiled library: found, chosen for the processor's instructions, loaded with PyTorch's
OpenMP.

It has a plain C ABI and is called through ctypes: every argument is a pointer, an int64_t or a
float, and every call is checked against the function's definition in the sources (signatures.py).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import re
import sys
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
# Best first, each with the names that `torch.backends.cpu` gives to processors that have it.
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
    """The loaded kernels. level: the instruction level. path: the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.level = path.name.partition(".")[0]
        self._c = ctypes.CDLL(str(path))
        self._functions: dict[str, Callable[..., Any]] = {}

    @property
    def is_current(self) -> bool:
        """Whether the library was built from the sources beside it."""
        try:
            stamp = self._c["onward_sources"]
        except AttributeError:
            return False
        stamp.restype = ctypes.c_char_p
        return stamp() == sources_digest().encode()

    def launch(self, function: str, /, **arguments: Argument) -> Launch:
        """Makes a call of a C function. Its arguments are given by the names in its definition, and
        are checked and converted once.

        A tensor or a ctypes array passes its address, a sequence of numbers the address of a copy,
        None a null pointer. Codes of element types follow from the tensors. Raises TypeError or
        ValueError for arguments that do not match the definition.
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
    """The native kernels for this machine; None where there are none, with the reason logged once.

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
    """Describes the build that serves this machine, or why none does."""
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
    """The instruction levels that were compiled at installation, best first."""
    return list(files())


def usable() -> list[str]:
    """The levels of `built` that this processor supports."""
    processor = torch.backends.cpu.get_cpu_capability()
    return [x for x in built() if (needed := _LEVELS[x]) is None or processor in needed]


def _load(wanted: str) -> tuple[Library | None, str]:
    if wanted and wanted in built() and wanted not in usable():
        return None, f"this processor has {torch.backends.cpu.get_cpu_capability()}"
    level = next((level for level in usable() if wanted in ("", level)), None)
    if level is None:
        if wanted and built():
            return None, f"built are: {', '.join(built())}"
        return None, f"not built: {_why_not_built()}"
    path = files()[level]
    try:
        # The library has no OpenMP of its own: symbols come from the runtime that torch has loaded.
        loaded = Library(path)
    except OSError as error:
        return None, str(error)
    if not loaded.is_current:
        return None, f"{path.name} was built from other sources; fix: reinstall the package"
    runtimes = openmp_runtimes()
    if len(runtimes) != 1 and not shares_threads():
        return None, f"{len(runtimes)} OpenMP runtimes loaded: {', '.join(runtimes)}"
    return loaded, ""


def _why_not_built() -> str:
    if sys.platform in ("darwin", "win32"):
        return "there are none for this system yet"
    return "the wheel is one for every platform, or it was installed without a C++ compiler"


def shares_threads() -> bool:
    """Whether the library uses the OpenMP runtime that `torch.set_num_threads` controls. Another
    package, such as scikit-learn, may have loaded a second runtime."""
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
    """A digest of the C++ sources, which `setup.py` writes into the libraries that it builds."""
    digest = hashlib.sha256()
    for path in sorted(FOLDER.glob("src/*")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def openmp_runtimes() -> list[str]:
    """The OpenMP libraries in this process; kernels on two of them would compete for the cores.
    None are known where the system is not Linux."""
    maps = Path("/proc/self/maps")
    text = maps.read_text(encoding="utf-8") if maps.exists() else ""
    return sorted(set(_RUNTIMES.findall(text)))


def where(target: Target) -> str | None:
    """`Kernel.where` of every native kernel."""
    if target.device != "cpu":
        return f"not on {target.device}"
    return None if target.has_library else "no native library"


def only_f32(spec: KernelSpec) -> str | None:
    """`Kernel.unsupported`: not None unless the first operand, the result and all floating operands
    are f32. Other operands may be row numbers, masks or seeds."""
    return _not_floating(spec) or floats_are_f32(spec)


def one_element_type(spec: KernelSpec) -> str | None:
    """`Kernel.unsupported`: as `only_f32`, but all of these may also be bf16 or fp16."""
    return _not_floating(spec) or not_one_element((*spec.inputs, *spec.outputs))


def _not_floating(spec: KernelSpec) -> str | None:
    for t in (*spec.inputs[:1], *spec.outputs[:1]):
        if t is not None and not t.is_floating:
            return f"{t.dtype.name.lower()} tensors"
    return None


def floats_are_f32(spec: KernelSpec) -> str | None:
    """`Kernel.unsupported`: not None unless every floating operand is f32."""
    return not_f32((*spec.inputs, *spec.outputs))


def not_f32(types: Iterable[Type | None]) -> str | None:
    """The reason why some floating type is not f32; None where all are."""
    strange = next((d for d in _floating(types) if d != DType.FLOAT), None)
    return None if strange is None else f"{strange.name.lower()} tensors"


def not_one_element(types: Iterable[Type | None], beside: tuple[DType, ...] = ()) -> str | None:
    """The reason why floating types are not all f32, all bf16 or all fp16 (T in a C function); None
    where they are. beside: dtypes that are ignored."""
    found = [d for d in _floating(types) if d not in beside]
    strange = next((d for d in found if d != DType.FLOAT and d not in LOW), None)
    if strange is not None:
        return f"{strange.name.lower()} tensors"
    return None if len(found) < 2 else f"{' and '.join(d.name.lower() for d in found)} tensors"


def _floating(types: Iterable[Type | None]) -> list[DType]:
    """The floating dtypes among types, each once, in order."""
    return list(dict.fromkeys(t.dtype for t in types if t is not None and t.is_floating))
