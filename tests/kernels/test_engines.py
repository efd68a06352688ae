"""Matrix products of other libraries, from several threads at once."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import pytest
import torch

from onward.kernels.blas.engines import CBLAS64, Engine, plain_product
from onward.kernels.native.library import library

pytestmark = pytest.mark.skipif(library() is None, reason="needs the native library")

WAIT = 20.0  # seconds, after which a test has failed

Set = ctypes.CFUNCTYPE(None, ctypes.c_int)
Get = ctypes.CFUNCTYPE(ctypes.c_int)
INTS, SIZES = (ctypes.c_int,) * 3, (ctypes.c_int64,) * 3
MATRIX = (ctypes.c_void_p, ctypes.c_int64)
Sgemm = ctypes.CFUNCTYPE(
    None, *INTS, *SIZES, ctypes.c_float, *MATRIX, *MATRIX, ctypes.c_float, *MATRIX
)


class Pool:
    """A BLAS whose products say how many threads it was set to, and end when they are let go.
    A product is known by its k."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.inside = {k: threading.Event() for k in (1, 2)}
        self.let_go = {k: threading.Event() for k in (1, 2)}
        self.seen: dict[int, list[int]] = {}
        self._held = (Sgemm(self._sgemm), Set(self._set), Get(lambda: self.threads))
        sgemm, put, get = (ctypes.cast(f, ctypes.c_void_p).value or 0 for f in self._held)
        self.engine = Engine("pool", "", (sgemm, CBLAS64, put, get))

    def product(self, k: int) -> Callable[[], object]:
        return plain_product(
            self.engine, torch.ones(1, k), torch.ones(k, 1), False, False, torch.zeros(1, 1)
        )

    def _set(self, threads: int) -> None:
        self.threads = threads

    def _sgemm(self, *arguments: int) -> None:
        k = arguments[5]
        self.seen[k] = [self.threads]
        self.inside[k].set()
        self.let_go[k].wait(WAIT)
        self.seen[k].append(self.threads)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_a_library_has_one_thread_until_the_last_launch_has_left(
    order: tuple[int, int], threads: int
) -> None:
    pool = Pool(threads)
    running = {k: threading.Thread(target=pool.product(k)) for k in (1, 2)}
    for k, thread in running.items():
        thread.start()
        assert pool.inside[k].wait(WAIT)
    for k in order:
        pool.let_go[k].set()
        running[k].join(WAIT)
    assert pool.seen == {1: [1, 1], 2: [1, 1]}
    assert pool.threads == threads


def test_a_library_keeps_its_threads_while_another_is_used() -> None:
    used, other = Pool(3), Pool(4)
    thread = threading.Thread(target=used.product(1))
    thread.start()
    assert used.inside[1].wait(WAIT)
    assert (used.threads, other.threads) == (1, 4)
    other.let_go[2].set()
    other.product(2)()
    assert other.seen == {2: [1, 1]} and other.threads == 4
    used.let_go[1].set()
    thread.join(WAIT)
    assert used.threads == 3
