"""The arithmetic limit of a step: its matrix products at the best rate this machine reaches.

The products are those of one eager PyTorch step; each needs 2 m k n floating point operations. The
batched ones are attention's, and of them a causal mask needs the share (T + 1) / 2T. Convolutions
and grouped products are not seen, nor is anything else
counted, so that the limit is below what any engine can do without computing fewer products.

The rate is the best of all large products of the step, laid out as the step has them, and of the
ways of product_times.py in the case's precision; the shortest repetition counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from suite.cases import Case
from suite.product_times import ways
from suite.products import Product
from suite.question import ask

_SMALL = 0.01  # products with less than this share of all FLOPs are not timed


def measured_rates(
    products: Sequence[Product], threads: int, seconds: float, precision: str = "fp32"
) -> dict[str, list[float]]:
    """GFLOP/s of each product by way; `seconds` is shared by the ways."""
    from suite.arithmetic import product_flops

    rates: dict[str, list[float]] = {}
    among = ways(precision)
    for way in among:
        blas = "1" if "split" in way else str(threads)
        request = {
            "way": way, "products": [asdict(p) for p in products],
            "threads": threads, "seconds": seconds / len(among),
        }  # fmt: skip
        times = ask("suite.product_times", request, {"OPENBLAS_NUM_THREADS": blas})
        pairs = zip(products, times, strict=True)
        rates[way] = [product_flops(product) / best / 1e9 for product, best in pairs]
    return rates


def arithmetic_limit(case: Case, threads: int, seconds: float) -> dict[str, Any]:
    """The limit of a case, in seconds, with all that it was computed from."""
    # Later than the others: a worker that is measured imports this module, and none of Onward's.
    from suite.arithmetic import causal_share, product_flops

    found = ask("suite.recorded_products", {"case": asdict(case)})
    products = [Product(**p) for p in found]
    whole = {p: product_flops(p) for p in products}
    needed = causal_share(case.tokens) if case.causal else 1.0
    flops = sum(whole[p] * p.count * (needed if p.batch > 1 else 1.0) for p in products)
    large = [p for p in products if p.batch == 1 and whole[p] * p.count >= _SMALL * flops]
    rates = measured_rates(large, threads, seconds, case.precision)
    best, way, place = max((r, way, i) for way in rates for i, r in enumerate(rates[way]))
    return {
        "flops": flops,
        "best_gflops": best,
        "way": way,
        "product": str(large[place]),
        "limit_s": flops / best / 1e9,
        "products": [{"product": str(p), "count": p.count, "flops": whole[p]} for p in products],
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
