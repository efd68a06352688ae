"""BLAS libraries in this process that kernels can call from their own threads.

They are found by a list of probes; each is tested on a small product before use. A library with a
pool of threads is set to one thread during a launch.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from onward.kernels.kernel import Launch
from onward.kernels.native.library import library

CBLAS64, FORTRAN32 = 0, 1  # calling conventions, numbered as in native/src/blas.h


@dataclass(frozen=True)
class Engine:
    """A product routine by its addresses. layout: the struct `Blas` of native/src/blas.h."""

    name: str
    path: str
    layout: tuple[int, int, int, int]


@functools.cache
def engines() -> dict[str, Engine]:
    """The engines that passed their test, by name; empty without the native library."""
    if library() is None:
        return {}
    found: dict[str, Engine] = {}
    for engine in (*_openblas(), *_mkl()):
        if engine.name not in found and _right(engine):
            found[engine.name] = engine
    return found


def _address(library: ctypes.CDLL, name: str) -> int:
    """The address of a symbol; 0 where it is absent."""
    function = getattr(library, name, None)
    return 0 if function is None else ctypes.cast(function, ctypes.c_void_p).value or 0


def _openblas() -> Iterator[Engine]:
    """The OpenBLAS that numpy's and scipy's wheels contain, with 64-bit integers."""
    for package in ("numpy", "scipy"):
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            continue
        folder = Path(spec.origin).parent.parent / f"{package}.libs"
        for path in sorted(folder.glob("libscipy_openblas64_*.so*")):
            c = ctypes.CDLL(str(path))
            symbols = (
                _address(c, "scipy_cblas_sgemm64_"),
                _address(c, "scipy_openblas_set_num_threads64_"),
                _address(c, "scipy_openblas_get_num_threads64_"),
            )
            if all(symbols):
                yield Engine("openblas", str(path), (symbols[0], CBLAS64, *symbols[1:]))


def _mkl() -> Iterator[Engine]:
    """The MKL inside libtorch; in a parallel region it runs on the calling thread alone."""
    if not torch.backends.mkl.is_available():
        return
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if path.exists():
        address = _address(ctypes.CDLL(str(path)), "sgemm_")
        if address:
            yield Engine("mkl", str(path), (address, FORTRAN32, 0, 0))


def plain_product(
    engine: Engine, left: torch.Tensor, right: torch.Tensor, ta: bool, tb: bool, y: torch.Tensor
) -> Launch:
    """Returns the launch of `y f32[m,n]` from contiguous operands, each stored transposed or
    not."""
    c = library()
    assert c is not None
    (m, n), k = y.shape, left.shape[0 if ta else 1]
    return c.launch(
        "onward_gemm", blas=engine.layout, ta=int(ta), tb=int(tb), m=m, n=n, k=k, a=left,
        lda=left.shape[1], b=right, ldb=right.shape[1], c=None, c_stride=0, y=y, ldy=n,
    )  # fmt: skip


def _right(engine: Engine) -> bool:
    """Whether the engine computes a product of small integers exactly."""
    a = torch.arange(35, dtype=torch.float32).reshape(5, 7)
    b = torch.arange(21, dtype=torch.float32).reshape(7, 3) - 9
    for ta, tb in ((False, False), (True, False), (False, True), (True, True)):
        left, right = (a.t().contiguous() if ta else a), (b.t().contiguous() if tb else b)
        y = torch.full((5, 3), torch.nan)
        plain_product(engine, left, right, ta, tb, y)()
        if not torch.equal(y, a @ b):
            return False
    return True
