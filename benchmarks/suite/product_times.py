"""Ways to compute a matrix product, each timed in a process of its own.

Pools of threads that wait by spinning disturb each other. torch is imported where it is used: two
of the three ways of fp32 are measured in processes without it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from suite.products import Product
from suite.question import answer

Run = Callable[[], object]


def _torch_way(product: Product, threads: int) -> Run:
    import torch

    torch.set_num_threads(threads)
    a, b = (torch.from_numpy(x) for x in _operands(product))
    c = torch.empty(product.m, product.n)
    return lambda: torch.mm(a, b, out=c)


def _bf16_way(product: Product, threads: int) -> Run:
    import torch

    torch.set_num_threads(threads)
    a, b = (torch.from_numpy(x).to(torch.bfloat16) for x in _operands(product))
    c = torch.empty(product.m, product.n, dtype=torch.bfloat16)
    return lambda: torch.mm(a, b, out=c)


def _openblas_way(product: Product, threads: int) -> Run:
    import numpy as np

    del threads  # OPENBLAS_NUM_THREADS, read when numpy is imported
    a, b = _operands(product)
    c = np.empty((product.m, product.n), dtype=np.float32)
    return lambda: np.matmul(a, b, out=c)


def _split_way(product: Product, threads: int) -> Run:
    import numpy as np

    a, b = _operands(product)
    c = np.empty((product.m, product.n), dtype=np.float32)
    pool = ThreadPoolExecutor(threads)
    # Split along the longer side: a tall product has few columns, and the head's forward few rows.
    length = max(product.m, product.n)
    ends = [length * i // threads for i in range(threads + 1)]
    parts = [slice(*pair) for pair in itertools.pairwise(ends)]

    def part(rows: slice) -> None:
        if product.m >= product.n:
            np.matmul(a[rows], b, out=c[rows])
        else:
            np.matmul(a, b[:, rows], out=c[:, rows])

    return lambda: list(pool.map(part, parts))


def _operands(product: Product) -> tuple[Any, Any]:
    import numpy as np

    rng = np.random.default_rng(0)

    def draw(rows: int, columns: int, transposed: bool) -> Any:
        shape = (columns, rows) if transposed else (rows, columns)
        x = rng.random(shape, dtype=np.float32)
        return x.T if transposed else x

    return (
        draw(product.m, product.k, product.transposed_a),
        draw(product.k, product.n, product.transposed_b),
    )


WAYS: dict[str, Callable[[Product, int], Run]] = {
    "torch.mm": _torch_way,
    "openblas": _openblas_way,
    "openblas, rows split": _split_way,
    "torch.mm, bf16": _bf16_way,
}
OF_BF16 = ("torch.mm, bf16",)


def ways(precision: str) -> tuple[str, ...]:
    """The names of the ways to multiply in bf16, or of those in fp32 for any other precision."""
    return OF_BF16 if precision == "bf16" else tuple(w for w in WAYS if w not in OF_BF16)


def shortest(way: str, products: Sequence[Product], threads: int, seconds: float) -> list[float]:
    """Seconds of each product: its shortest repetition within `seconds` for all of them."""
    times: list[float] = []
    for product in products:
        run, best, end = WAYS[way](product, threads), float("inf"), time.perf_counter()
        run()
        end += seconds / len(products)
        done = 0
        while done < 3 or time.perf_counter() < end:
            begin = time.perf_counter()
            run()
            best, done = min(best, time.perf_counter() - begin), done + 1
        times.append(best)
    return times


def _answer(request: dict[str, Any]) -> list[float]:
    products = [Product(**p) for p in request["products"]]
    return shortest(request["way"], products, request["threads"], request["seconds"])


if __name__ == "__main__":
    answer(_answer)
