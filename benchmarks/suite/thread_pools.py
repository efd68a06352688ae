"""One matrix product alone and between PyTorch operators, by who calls it with which threads."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from suite.arithmetic import product_flops
from suite.kernel_table import products
from suite.products import Product
from suite.progress import say
from suite.report import Writer, heading, markdown, started

PRODUCT = Product(1, 1024, 512, 2048, transposed_a=False, transposed_b=False)
"""GPT-2's first feed-forward product at 4 x 256 tokens, 512 wide."""

_WARM = 20  # untimed calls, at most


def run(product: Product, repeats: int, write: Writer) -> tuple[dict[str, Any], Path]:
    """The report; seconds of the product alone, and of what it adds to an elementwise operator."""
    report = started("Pools of threads") | {"rows": []}
    m, k, n = product.m, product.k, product.n
    a, b, y = torch.randn(m, k), torch.randn(k, n), torch.empty(m, n)
    x, z = torch.randn(m, n), torch.empty(m, n)
    rate = product_flops(product) / 1e9

    def operator() -> None:
        torch.mul(x, 2.0, out=z)

    with torch.no_grad():
        for name, call in _callers(a, b, y).items():

            def both(call: Callable[[], Any] = call) -> None:
                operator()
                call()

            for warm in (call, both):
                _seconds(warm, min(_WARM, repeats))
            alone = _seconds(call, repeats)
            between = _seconds(both, repeats) - _seconds(operator, repeats)
            error = float((y - a @ b).abs().max() / (a @ b).abs().max())
            report["rows"].append(
                {"caller": name, "alone_s": alone, "between_s": between, "difference": error}
            )
            say(
                f"{name:32} alone {alone * 1e3:7.2f} ms {rate / alone:6.0f} GFLOP/s   between "
                f"operators {between * 1e3:7.2f} ms {_rate(rate, between):6.0f} GFLOP/s"
            )
    return report, write(report, table(report))


def table(report: Mapping[str, Any]) -> str:
    """The report as Markdown."""
    rows = [
        [r["caller"], f"{r['alone_s'] * 1e3:.2f}", f"{r['between_s'] * 1e3:.2f}"]
        for r in report["rows"]
    ]
    head = ["caller", "alone, ms", "between operators, ms"]
    return "\n".join([*heading(report), "", *markdown(head, rows)]) + "\n"


def _callers(a: torch.Tensor, b: torch.Tensor, y: torch.Tensor) -> dict[str, Callable[[], Any]]:
    left, right, out = a.numpy(), b.numpy(), y.numpy()
    return {
        "torch.mm": lambda: torch.mm(a, b, out=y),
        "numpy's own threads": lambda: np.matmul(left, right, out=out),
        **{f"{name} from our threads": launch for name, launch in products(a, b, y).items()},
    }


def _rate(work: float, seconds: float) -> float:
    """NaN where the difference of two medians is not above 0."""
    return work / seconds if seconds > 0 else float("nan")


def _seconds(call: Callable[[], Any], repeats: int) -> float:
    """The median of single calls."""
    found: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return statistics.median(found)
