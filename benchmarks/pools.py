"""Do two pools of threads quarrel? One product, alone and between PyTorch operators, by caller.

    python benchmarks/pools.py            # a minute

Three ways to multiply: PyTorch's own product; numpy's, whose OpenBLAS has a pool of its own; and
Onward's, which calls the same OpenBLAS with one thread from each of PyTorch's. Each is timed alone
and then in turn with an elementwise PyTorch operator, as in a training step, where every pool's
threads wait by spinning while the other works. What the operator itself takes is subtracted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from onward.kernels import KERNELS, Use
from onward.kernels.blas.engines import engines
from report import machine, markdown, write

M, N, K = 1024, 2048, 512  # GPT-2's first feed-forward product at 4 x 256 tokens, 512 wide


def seconds(call: Callable[[], Any], repeats: int) -> float:
    """The median of single calls."""
    found: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def ways(a: torch.Tensor, b: torch.Tensor, y: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """The callers, by name."""
    import numpy as np

    left, right, out = a.numpy(), b.numpy(), y.numpy()
    found: dict[str, Callable[[], Any]] = {
        "torch.mm": lambda: torch.mm(a, b, out=y),
        "numpy's own threads": lambda: np.matmul(left, right, out=out),
    }
    for kernel in KERNELS["Gemm"]:
        if kernel.name.partition(".")[0] in engines():
            found[f"{kernel.name} from our threads"] = kernel.bind(Use({}, [a, b], [y], []))
    return found


def main() -> int:
    """Run the benchmark; see the module's text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    a, b, y = torch.randn(M, K), torch.randn(K, N), torch.empty(M, N)
    x = torch.randn(M, N)
    z = torch.empty(M, N)

    def operator() -> None:
        torch.mul(x, 2.0, out=z)

    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for name, call in ways(a, b, y).items():

            def both(call: Callable[[], Any] = call) -> None:
                operator()
                call()

            for warm in (call, both):
                seconds(warm, 20)
            alone = seconds(call, options.repeats)
            between = seconds(both, options.repeats) - seconds(operator, options.repeats)
            rows.append({"caller": name, "alone_s": alone, "between_s": between})
            rate = 2 * M * N * K / 1e9
            print(
                f"{name:32} alone {alone * 1e3:7.2f} ms {rate / alone:6.0f} GFLOP/s   between "
                f"operators {between * 1e3:7.2f} ms {rate / between:6.0f} GFLOP/s", flush=True,
            )  # fmt: skip
    report = {"title": "Pools of threads", "machine": machine("cpu"), "rows": rows}
    lines = [
        [r["caller"], f"{r['alone_s'] * 1e3:.2f}", f"{r['between_s'] * 1e3:.2f}"] for r in rows
    ]
    text = markdown(["caller", "alone, ms", "between operators, ms"], lines)
    print(f"written: {write(report, options.out, 'pools', chr(10).join(text))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
