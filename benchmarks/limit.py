"""The arithmetic limit of a step: its matrix products at the best rate this machine reaches.

    python benchmarks/limit.py gpt2_small     # or tutorial: the limit of that step, in words

The products are those of one eager PyTorch step, recorded while it runs; each needs 2 m k n
floating point operations. The batched ones are attention's, and of them a causal mask needs the
share (T + 1) / 2T. Nothing else is counted, so that the limit is below what any engine can do
without computing fewer products.

The rate is the best of all large products of the step, laid out as the step has them, and of three
ways to compute them: torch.mm; numpy's OpenBLAS with threads of its own; and the same OpenBLAS on
one thread per part, rows split over as many Python threads. Each way has a process of its own
(pools of threads that wait by spinning disturb each other), and the shortest repetition counts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

# torch is imported where it is used: two of the three ways are measured in processes without it.
if TYPE_CHECKING:
    from workloads import Case

Run = Callable[[], object]
_SMALL = 0.01  # products with less than this share of all FLOPs are not timed


@dataclass(frozen=True)
class Product:
    """`f32[batch,m,k] @ f32[batch,k,n]`, `count` times in a step; how its operands lie in memory.

    transposed_a: the left operand is stored as `[k,m]`; transposed_b: the right one as `[n,k]`.
    """

    batch: int
    m: int
    k: int
    n: int
    transposed_a: bool
    transposed_b: bool
    count: int = 1

    @property
    def flops(self) -> int:
        """Of one of the `count`."""
        return 2 * self.batch * self.m * self.k * self.n

    def __str__(self) -> str:
        a = f"[{self.k},{self.m}]^T" if self.transposed_a else f"[{self.m},{self.k}]"
        b = f"[{self.n},{self.k}]^T" if self.transposed_b else f"[{self.k},{self.n}]"
        return f"{self.batch} x {a} @ {b}" if self.batch > 1 else f"{a} @ {b}"


def recorded_products(case: Case) -> list[Product]:
    """The products of one eager step of the case, most FLOPs first."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils._python_dispatch import TorchDispatchMode

    from workloads import make_batches, make_model

    aten = torch.ops.aten
    operands = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}  # place of the left one
    found: dict[Product, int] = {}

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            first = operands.get(func.overloadpacket)
            if first is not None:
                a, b = args[first], args[first + 1]
                product = Product(
                    a.shape[0] if a.dim() == 3 else 1, a.shape[-2], a.shape[-1], b.shape[-1],
                    a.stride(-1) != 1 and a.stride(-2) == 1,
                    b.stride(-1) != 1 and b.stride(-2) == 1,
                )  # fmt: skip
                found[product] = found.get(product, 0) + 1
            return func(*args, **(kwargs or {}))

    model, (batch,) = make_model(case), make_batches(case, 1)
    with Recorder(), sdpa_kernel(SDPBackend.MATH):  # a fused attention would hide its products
        output = model(**batch)
        loss = output if isinstance(output, torch.Tensor) else output["loss"]
        loss.backward()
    products = [Product(**{**asdict(p), "count": count}) for p, count in found.items()]
    return sorted(products, key=lambda p: -p.flops * p.count)


# ---- the three ways; each function gives the launches of one product


def _torch_way(product: Product, threads: int) -> Run:
    import torch

    torch.set_num_threads(threads)
    a, b = (torch.from_numpy(x) for x in _operands(product))
    c = torch.empty(product.m, product.n)
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
    # Along the longer side, as a tall product has few columns and the head's forward few rows.
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
}


def _rates(way: str, products: Sequence[Product], threads: int, seconds: float) -> list[float]:
    """GFLOP/s of each product: its shortest repetition within `seconds` for all of them."""
    rates: list[float] = []
    for product in products:
        run, best, end = WAYS[way](product, threads), float("inf"), time.perf_counter()
        run()
        end += seconds / len(products)
        done = 0
        while done < 3 or time.perf_counter() < end:
            begin = time.perf_counter()
            run()
            best, done = min(best, time.perf_counter() - begin), done + 1
        rates.append(product.flops / best / 1e9)
    return rates


# ---- the near side: each question to a process of its own


def _ask(request: Mapping[str, Any], env: Mapping[str, str] | None = None) -> Any:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), "--answer"],
        input=json.dumps(request), env={**os.environ, **(env or {})},
        capture_output=True, text=True, timeout=600.0, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{request['question']} failed: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _answer(request: Mapping[str, Any]) -> Any:
    if request["question"] == "products":
        from workloads import Case

        return [asdict(p) for p in recorded_products(Case(**request["case"]))]
    products = [Product(**p) for p in request["products"]]
    return _rates(request["way"], products, request["threads"], request["seconds"])


def measured_rates(
    products: Sequence[Product], threads: int, seconds: float
) -> dict[str, list[float]]:
    """GFLOP/s of each product by way; `seconds` is shared by the ways."""
    rates: dict[str, list[float]] = {}
    for way in WAYS:
        blas = "1" if "split" in way else str(threads)
        request = {
            "question": "rates", "way": way, "products": [asdict(p) for p in products],
            "threads": threads, "seconds": seconds / len(WAYS),
        }  # fmt: skip
        rates[way] = _ask(request, {"OPENBLAS_NUM_THREADS": blas})
    return rates


def arithmetic_limit(case: Case, threads: int, seconds: float) -> dict[str, Any]:
    """The limit of a causal case, in seconds, with all that it was computed from."""
    answer = _ask({"question": "products", "case": asdict(case)})
    products = [Product(**p) for p in answer]
    needed = (case.tokens + 1) / (2 * case.tokens)  # of attention's scores
    flops = sum(p.flops * p.count * (needed if p.batch > 1 else 1.0) for p in products)
    large = [p for p in products if p.batch == 1 and p.flops * p.count >= _SMALL * flops]
    rates = measured_rates(large, threads, seconds)
    best, way, place = max((r, way, i) for way in rates for i, r in enumerate(rates[way]))
    return {
        "flops": flops,
        "best_gflops": best,
        "way": way,
        "product": str(large[place]),
        "limit_s": flops / best / 1e9,
        "products": [{"product": str(p), "count": p.count, "flops": p.flops} for p in products],
        "gflops": {
            way: {str(p): r for p, r in zip(large, found, strict=True)}
            for way, found in rates.items()
        },
    }


def limit_line(limit: Mapping[str, Any]) -> str:
    """The limit in one sentence."""
    ways = ", ".join(f"{way} {max(found.values()):.0f}" for way, found in limit["gflops"].items())
    return (
        f"Arithmetic limit: {limit['flops'] / 1e9:.4g} GFLOP of needed matrix products at "
        f"{limit['best_gflops']:.0f} GFLOP/s take {1e3 * limit['limit_s']:.1f} ms "
        f"(best of each way: {ways}; highest for {limit['product']})."
    )


def main() -> int:
    """The limit of one of the CPU benchmark's cases, by hand."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default="gpt2_small", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=0, help="default: torch's")
    parser.add_argument("--seconds", type=float, default=30.0, help="for timing products")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        print(json.dumps(_answer(json.load(sys.stdin))))
        return 0
    import torch

    from cpu import FULL

    case = next((case for case in FULL if case.model == options.model), None)
    if case is None:
        parser.error(f"no such case; there are {', '.join(case.model for case in FULL)}")
    limit = arithmetic_limit(case, options.threads or torch.get_num_threads(), options.seconds)
    print(json.dumps(limit["gflops"], indent=1), limit_line(limit), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
