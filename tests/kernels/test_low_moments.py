"""Adam's moments in bf16 and in codes of 8 bits: rounding, codes, and one update of each kernel.

The oracles: every draw that there is, torch's neighbours in bf16, distances by brute force, the map
as the paper and bitsandbytes build it, and the update in fp64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from onward.graph.build import Builder
from onward.graph.evaluate import evaluate
from onward.graph.graph import Graph, Role
from onward.graph.ops.optimizers.quantization import BLOCK, SIGNED, UNSIGNED
from onward.graph.types import DType, Type
from onward.kernels import ATEN, NATIVE, Kernel, KernelArguments, KernelSpec, moments
from onward.kernels.native import update
from onward.kernels.native.library import Library, files, usable

Tensors = list[torch.Tensor]
LR, BETAS, EPS, DECAY = 0.01, (0.9, 0.999), 1e-8, 0.1
_DTYPES = {
    torch.float32: DType.FLOAT, torch.float64: DType.DOUBLE, torch.bfloat16: DType.BFLOAT16,
    torch.float16: DType.FLOAT16, torch.int64: DType.INT64, torch.uint8: DType.UINT8,
}  # fmt: skip
ENGINES = [*usable(), "aten"]


def type_of(x: torch.Tensor) -> Type:
    return Type(_DTYPES[x.dtype], tuple(x.shape))


def spec_of(op: str, inputs: list[Any], outputs: Tensors, attrs: dict[str, Any]) -> KernelSpec:
    given = tuple(None if x is None else type_of(x) for x in inputs)
    return KernelSpec(op, attrs, given, tuple(map(type_of, outputs)))


Launch = Callable[..., None]


@pytest.fixture(params=ENGINES)
def launch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Runs an op on a build of the native kernels, or on torch's operators."""
    return launcher(request.param, monkeypatch)


def launcher(engine: str, patch: pytest.MonkeyPatch) -> Launch:
    if engine != "aten":
        made = Library(files()[engine])
        patch.setattr(update, "library", lambda: made)

    def run(op: str, inputs: list[Any], outputs: Tensors, **attrs: Any) -> None:
        kernel: Kernel = ATEN[op][0] if engine == "aten" else NATIVE[op][0]
        assert kernel.unsupported(spec_of(op, inputs, outputs, attrs)) is None
        kernel.bind(KernelArguments(attrs, inputs, outputs, []))()

    return run


def scalars(
    lr: float = LR, betas: tuple[float, float] = BETAS, decay: float = DECAY, step: int = 3
) -> Tensors:
    doubles = (lr, *betas, EPS, decay)
    return [*(torch.tensor(x, dtype=torch.float64) for x in doubles), torch.tensor(step)]


def kept_by_chance(
    launch: Launch,
    x: torch.Tensor,
    seed: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    site: int = 9,
) -> Tensors:
    """x as a first moment and x squared as a second, as one update with betas of 0 stores them in
    bf16."""
    p, zeros = torch.zeros_like(x), torch.zeros(x.shape, dtype=dtype)
    outputs = [torch.empty_like(x), *(torch.empty(x.shape, dtype=dtype) for _ in range(2))]
    inputs = [p, x, zeros, zeros.clone(), *scalars(0.0, (0.0, 0.0), 0.0), seed]
    launch("AdamUpdateBf16", inputs, outputs, decoupled=1, site=site)
    assert torch.equal(outputs[0], p)
    return outputs[1:]


def seeds(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, 2**32, (count, 2), generator=generator)


# ---- rounding by chance

NUMBERS = torch.tensor(
    [1.0, 1.00390625, 1.001, -1.9999, 3.14159, 1e-3, -2.5e-7, 1e-30, 65504.3, 3e38, 1.2e-38, 9e-41,
     -1.4e-45, 0.0]
)  # fmt: skip


def neighbours(x: torch.Tensor) -> Tensors:
    """The numbers of bf16 towards zero and away from it; the same where x is one."""
    nearest = x.to(torch.bfloat16)
    outward = torch.full_like(nearest, torch.inf).copysign(x.to(torch.bfloat16))
    zero = torch.zeros_like(nearest)
    inner = torch.where(nearest.float().abs() > x.abs(), torch.nextafter(nearest, zero), nearest)
    outer = torch.where(inner.float() == x, inner, torch.nextafter(inner, outward))
    return [inner.float(), outer.float()]


def test_the_mean_over_all_draws_is_the_number_itself() -> None:
    """65536 draws, each as likely as another: their mean in fp64 is exact."""
    draws = torch.arange(1 << 16)
    for x in NUMBERS:
        found = moments.rounded(x.expand(1 << 16), draws).double()
        inner, outer = (n[0].double() for n in neighbours(x[None]))
        assert set(found.unique().tolist()) <= {float(inner), float(outer)}, x
        assert float(found.mean()) == float(x), x


def test_what_is_not_finite_stays() -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan])
    for draw in (0, 1, 0xFFFF):
        found = moments.rounded(x, torch.full((3,), draw))
        assert torch.equal(found[:2].float(), x[:2]) and bool(found[2].isnan())


def test_an_update_keeps_a_nan(launch: Launch) -> None:
    """A NaN stays one whatever its bits are; added noise would carry those of the last one over to
    0."""
    words = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FC00000, -1], dtype=torch.int32)
    x = words.view(torch.float32).repeat(1000)
    state = torch.zeros(4000).bfloat16()
    outputs = [torch.empty(4000), torch.empty_like(state), torch.empty_like(state)]
    inputs = [torch.zeros(4000), x, state, state, *scalars(), seeds(1)[0]]
    launch("AdamUpdateBf16", inputs, outputs, decoupled=1, site=1)
    assert all(bool(y.isnan().all()) for y in outputs)


def test_an_update_keeps_moments_without_bias(launch: Launch) -> None:
    """The mean over 400 seeds is within five of its standard deviations, number by number, and each
    number kept is a neighbour."""
    x = torch.rand(3000, generator=torch.Generator().manual_seed(1)) * 4 - 2
    exact = [x, x * x]
    bounds = [neighbours(e) for e in exact]
    sums = [torch.zeros(3000, dtype=torch.float64) for _ in exact]
    given = seeds(400)
    for seed in given:
        for total, (inner, outer), kept in zip(
            sums, bounds, kept_by_chance(launch, x, seed), strict=True
        ):
            total += kept.double()
            assert bool(((kept == inner) | (kept == outer)).all())
    for total, e, (inner, outer) in zip(sums, exact, bounds, strict=True):
        share = ((e - inner) / (outer - inner).where(outer != inner, torch.tensor(1.0))).double()
        step = (outer - inner).double().abs()
        deviation = step * (share * (1 - share) / len(given)).sqrt()
        off = (total / len(given) - e.double()).abs()
        assert bool((off <= 5 * deviation + step / 400).all())
        assert float(((total / len(given) - e) / step.clamp(min=1e-30)).mean().abs()) < 3e-3


def test_draws_of_seeds_parameters_and_slots_are_apart(launch: Launch) -> None:
    x = torch.full((4096,), 1.00390625)  # half way: each of the two is as likely
    first, second = seeds(2)
    one = kept_by_chance(launch, x, first)[0]
    assert torch.equal(one, kept_by_chance(launch, x, first)[0])
    for other in (
        kept_by_chance(launch, x, second)[0],
        kept_by_chance(launch, x, first, site=10)[0],
        one.flip(0), one.roll(1), one.roll(1024), one.roll(2048),
    ):  # fmt: skip
        assert 0.45 < float((one == other).float().mean()) < 0.55
    m, v = kept_by_chance(launch, torch.full((4096,), 1.001953125), first)
    up = [x > x.min() for x in (m, v)]  # moments of an element share a word of the generator
    assert 0.2 < float(up[0].float().mean()) < 0.3 and 0.45 < float(up[1].float().mean()) < 0.55
    assert float((up[0] & up[1]).float().mean()) == pytest.approx(
        float(up[0].float().mean()) * float(up[1].float().mean()), abs=0.03
    )


@functools.cache
def drawn_by_the_body(n: int) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
    """Numbers, a seed, and what the op's body, on onnx's engine, keeps of them."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    seed = seeds(1)[0]
    graph = Graph("g")
    hyper = scalars(0.0, (0.0, 0.0), 0.0)
    inputs = [torch.zeros(n), x, torch.zeros(n), torch.zeros(n), *hyper, seed]
    values = [graph.input(f"x{i}", type_of(t), Role.BATCH) for i, t in enumerate(inputs)]
    made = Builder(graph).node("AdamUpdateBf16", values, {"decoupled": 1, "site": 9})
    assert isinstance(made, tuple)
    graph.outputs = {f"y{i}": y for i, y in enumerate(made)}
    found = evaluate(graph, {f"x{i}": t.numpy() for i, t in enumerate(inputs)})
    return x, seed, [torch.tensor(np.asarray(y)) for y in list(found.values())[1:]]


@pytest.mark.sample(1)
@pytest.mark.parametrize("n", [1, 1023, 1025, 70_001])
@pytest.mark.parametrize("threads", [1, 2])
def test_every_engine_and_number_of_threads_draws_the_bodys_bits(
    launch: Launch, n: int, threads: int
) -> None:
    """70001 elements are more than a chunk, 1024 a row of the generator."""
    x, seed, want = drawn_by_the_body(n)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        low = kept_by_chance(launch, x, seed)
        wide = kept_by_chance(launch, x, seed, torch.float32)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a.float(), b) for a, b in zip(low, want, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(wide, want, strict=True))


def test_to_the_nearest_a_second_moment_stands_still_and_by_chance_it_does_not() -> None:
    """1000 updates move a second moment from 1 towards 0.5; exact arithmetic gives 0.684."""
    (kernel,) = NATIVE["AdamUpdateBf16"]
    n = 2048
    g = torch.full((n,), 0.5**0.5)
    p, m, v = torch.zeros(n), torch.zeros(n, dtype=torch.bfloat16), torch.ones(n).bfloat16()
    seed, hyper = torch.zeros(2, dtype=torch.int64), scalars(0.0)
    attrs, inputs = {"decoupled": 1, "site": 3}, [p, g, m, v, *hyper, seed]
    run = kernel.bind(KernelArguments(attrs, [*inputs], [p, m, v], []))
    nearest = torch.ones(n).bfloat16()
    for given in seeds(1000):
        seed.copy_(given)
        run()
        nearest = (nearest.float() * 0.999 + g * g * 0.001).bfloat16()
    exact = 0.5 + 0.5 * 0.999**1000
    assert bool((nearest == 1.0).all())
    assert float(v.float().mean()) == pytest.approx(exact, abs=2e-3)
    assert float((v.float() - exact).abs().max()) < 0.25


# ---- codes of 8 bits


def papers_map(signed: bool) -> np.ndarray:
    """The code book of bitsandbytes' `create_dynamic_map`, sorted: in each decade the middles
    between evenly spaced boundaries, and zero and one."""
    data: list[float] = []
    for i in range(7):
        edges = np.linspace(0.1, 1.0, 2 ** (i + (0 if signed else 1)) + 1)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (-6 + i)
        data += [*middles, *(-middles if signed else ())]
    return np.sort([*data, 0.0, 1.0])


@pytest.mark.parametrize("codes", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])
def test_the_values_are_the_papers(codes: Any) -> None:
    want, have = papers_map(codes.signed), np.unique(codes.values)
    if codes.signed:  # 1 of either sign in the place of the highest step, and but one 0
        top = np.sort(want)[-2]
        want = np.sort([x for x in want if abs(x) != top] + [-1.0])
        assert have.size == 255
    else:
        assert have.size == 256
    np.testing.assert_allclose(have, want, rtol=1e-6)


def sample(signed: bool, n: int = 40_000) -> torch.Tensor:
    """Numbers of all sizes within a block, one block of zeros, one of a single number."""
    generator = torch.Generator().manual_seed(n)
    x = 10.0 ** (torch.rand(n, generator=generator) * 9 - 9)
    x[: n // 2] = torch.rand(n // 2, generator=generator)
    x = x * 10.0 ** (torch.arange(n) // BLOCK % 40 - 20).float()
    x[BLOCK : 2 * BLOCK] = 0.0
    x[2 * BLOCK : 3 * BLOCK] = 0.0
    x[2 * BLOCK + 7 : 2 * BLOCK + 8] = 3e-12
    sign = torch.where(torch.rand(n, generator=generator) < 0.5, -1.0, 1.0)
    return x * sign if signed else x


def kept_as_codes(launch: Launch, x: torch.Tensor, signed: bool) -> Tensors:
    """Codes and absmax of x after an update with betas of 0; for a second moment x is the
    gradient's square."""
    n, rows = x.numel(), -(-x.numel() // BLOCK)
    codes = [torch.zeros(n, dtype=torch.uint8) for _ in range(2)]
    largest = [torch.zeros(rows) for _ in range(2)]
    outputs = [torch.empty(n), *(torch.full((n,), 77, dtype=torch.uint8) for _ in range(2))]
    outputs.insert(2, torch.full((rows,), torch.nan))
    outputs.append(torch.full((rows,), torch.nan))
    inputs = [torch.zeros(n), x, codes[0], largest[0], codes[1], largest[1]]
    launch("AdamUpdate8Bit", [*inputs, *scalars(0.0, (0.0, 0.0), 0.0)], outputs, decoupled=1)
    return outputs[1:3] if signed else outputs[3:5]


@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
@pytest.mark.parametrize("n", [1, 255, 40_000, 40_001])
def test_each_number_has_the_nearest_code(launch: Launch, signed: bool, n: int) -> None:
    """Within a rounding of half way, by brute force over all values in fp64; but what is above 0 as
    a second moment has no code 0."""
    given = sample(True, n)
    x = given if signed else given * given  # in f32, as the kernel squares it
    codes, absmax = kept_as_codes(launch, given, signed)
    rows = torch.nn.functional.pad(x, (0, -n % BLOCK)).view(-1, BLOCK)
    assert torch.equal(absmax, rows.abs().amax(1))
    largest = absmax.repeat_interleave(BLOCK)[:n].double()
    share = torch.where(
        largest > 0, x.double() / largest.where(largest > 0, torch.tensor(1.0)), 0.0
    )
    values = torch.from_numpy((SIGNED if signed else UNSIGNED).values).double()
    kept, above = values[codes.long()], share > 1.2e-38
    allowed = values if signed else values[1:]
    gaps = np.searchsorted(np.sort(allowed.numpy()), share.numpy())
    order = allowed.sort().values
    around = torch.stack(
        [order[np.clip(gaps - 1, 0, None)], order[np.clip(gaps, None, len(order) - 1)]]
    )
    best = (around - share).abs().amin(0)
    off = (kept - share).abs()
    assert bool((off <= best * (1 + 1e-5) + 1e-7 * share.abs())[above | signed].all())
    if not signed:
        assert bool((codes[above] > 0).all()) and bool((codes[~above] == 0).all())
    assert bool(((codes == 0) | (kept != 0)).all()), "128 is nobody's code"


@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
def test_numbers_that_were_read_from_codes_have_the_same_codes(signed: bool) -> None:
    """Numbers read from codes get the same codes, in blocks of very different sizes, whatever the
    sign of the largest."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (400, BLOCK), generator=generator)
    codes[codes == 128] = 0 if signed else 128
    top = [127, 255] if signed else [255, 255]
    codes[torch.arange(400), torch.randint(0, BLOCK, (400,), generator=generator)] = torch.tensor(
        top
    ).repeat(200)
    codes = codes.to(torch.uint8)
    absmax = 10.0 ** (torch.rand(400, generator=generator) * 54 - 30)
    x = moments.dequantized(codes, absmax, signed)
    again, largest = moments.quantized(x, signed)
    assert torch.equal(again, codes) and torch.equal(largest, absmax)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_block_with_a_number_that_is_not_finite_is_nan(launch: Launch, bad: float) -> None:
    x = torch.randn(3 * BLOCK)
    x[BLOCK + 3] = bad
    for signed in (True, False):
        codes, absmax = kept_as_codes(launch, x, signed)
        found = moments.dequantized(codes, absmax, signed)
        assert bool(found[BLOCK : 2 * BLOCK].isnan().all())
        assert bool(found[:BLOCK].isfinite().all()) and bool(found[2 * BLOCK :].isfinite().all())


# ---- one update


def exact_update(given: Tensors, scale: float, decoupled: bool, decay: float, step: int) -> Tensors:
    """p, m, v behind one step of the formula in torch.optim's documentation, in fp64."""
    p, g, m, v = (x.double() for x in given)
    g = g * scale
    if decoupled:
        p = p - LR * decay * p
    else:
        g = g + decay * p
    m = BETAS[0] * m + (1 - BETAS[0]) * g
    v = BETAS[1] * v + (1 - BETAS[1]) * g * g
    top = m / (1 - BETAS[0] ** step)
    return [p - LR * top / ((v / (1 - BETAS[1] ** step)).sqrt() + EPS), m, v]


CALLS = [
    (decoupled, decay, scale, step)
    for decoupled in (1, 0)
    for decay in (0.0, 0.1)
    for scale, step in ((None, 1), (0.3, 40))
]


@pytest.mark.parametrize("low", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("decoupled", "decay", "scale", "step"), CALLS)
def test_one_update_follows_fp64_within_the_rounding(
    launch: Launch, low: torch.dtype, decoupled: int, decay: float, scale: float | None, step: int
) -> None:
    n = 2000
    generator = torch.Generator().manual_seed(step)
    p, g, m, v = (torch.randn(n, generator=generator) for _ in range(4))
    g = g.to(low)
    rest = [*scalars(decay=decay, step=step)]
    last = [] if scale is None else [torch.tensor(scale)]
    for form in ("bf16", "8bit"):
        if form == "bf16":
            dtype = torch.float32 if low == torch.float16 else torch.bfloat16
            held = [m.bfloat16(), (v * v).bfloat16()]
            outputs = [torch.empty(n), *(torch.empty(n, dtype=dtype) for _ in range(2))]
            inputs = [p, g, *(x.to(dtype) for x in held), *rest, seeds(1)[0], *last]
            launch("AdamUpdateBf16", inputs, outputs, decoupled=decoupled, site=1)
            start, made = [x.float() for x in held], [y.float() for y in outputs[1:]]
        else:
            kept = [moments.quantized(m, True), moments.quantized(v * v, False)]
            outputs = [torch.empty(n)]
            for codes, largest in kept:
                outputs += [torch.empty_like(codes), torch.empty_like(largest)]
            inputs = [p, g, *kept[0], *kept[1], *rest, *last]
            launch("AdamUpdate8Bit", inputs, outputs, decoupled=decoupled)
            signs = (True, False)
            start = [moments.dequantized(*k, s) for k, s in zip(kept, signs, strict=True)]
            made = [
                moments.dequantized(outputs[i], outputs[i + 1], s)
                for i, s in zip((1, 3), signs, strict=True)
            ]
        exact = exact_update([p, g, *start], scale or 1.0, bool(decoupled), decay, step)
        torch.testing.assert_close(outputs[0].double(), exact[0], rtol=2e-6, atol=2e-6)
        for x, e in zip(made, exact[1:], strict=True):
            if form == "bf16":  # one of the two neighbours
                bound = e.abs() * 2.0**-7 + 1e-12
            else:  # half of the widest step of the map, 0.9 / 64 or 0.9 / 128, and at 1 a whole one
                largest = e.abs().view(-1)
                blocks = torch.nn.functional.pad(largest, (0, -n % BLOCK)).view(-1, BLOCK).amax(1)
                bound = blocks.repeat_interleave(BLOCK)[:n] * (0.9 / 64)
            assert bool(((x.double() - e).abs() <= bound).all())


@pytest.mark.parametrize("op", ["AdamUpdateBf16", "AdamUpdate8Bit"])
@pytest.mark.parametrize("n", [5, 3000, 70_001])
def test_an_update_in_place_has_the_bits_of_one_apart(launch: Launch, op: str, n: int) -> None:
    """An update in place gives the bits of one out of place, and a bf16 gradient those of the same
    gradient in f32."""
    generator = torch.Generator().manual_seed(n)
    p, g, m, v = (torch.randn(n, generator=generator) for _ in range(4))
    g = g.bfloat16()
    state: Tensors
    if op == "AdamUpdateBf16":
        state, more = [m.bfloat16(), (v * v).bfloat16()], [seeds(1)[0]]
        attrs = {"decoupled": 1, "site": 4}
    else:
        state, more = [*moments.quantized(m, True), *moments.quantized(v * v, False)], []
        attrs = {"decoupled": 1}
    found: list[Tensors] = []
    for gradient, inside in ((g, False), (g, True), (g.float(), False)):
        held = [x.clone() for x in (p, *state)]
        outputs = held if inside else [torch.empty_like(x) for x in held]
        launch(op, [held[0], gradient, *held[1:], *scalars(), *more], outputs, **attrs)
        found.append(outputs)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    assert not torch.equal(found[0][0], p)


REFUSED: dict[str, tuple[str, dict[int, torch.dtype], str]] = {
    "moments of two types": ("AdamUpdateBf16", {2: torch.float32}, "moments of float and bfloat16"),
    "fp16 beside bf16": ("AdamUpdateBf16", {1: torch.float16}, "by a gradient of float16"),
    "f64": ("AdamUpdateBf16", {0: torch.float64}, "double tensors"),
    "f32 rates": ("AdamUpdateBf16", {4: torch.float32}, "not doubles"),
    "8 bits of f64": ("AdamUpdate8Bit", {0: torch.float64}, "double tensors"),
    "f64 absmax": ("AdamUpdate8Bit", {3: torch.float64}, "double tensors"),
    "f32 rates, 8 bits": ("AdamUpdate8Bit", {7: torch.float32}, "not doubles"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_native_kernels_leave_other_types_to_torch(name: str) -> None:
    op, changes, words = REFUSED[name]
    low, codes, largest = torch.bfloat16, torch.zeros(9, dtype=torch.uint8), torch.zeros(1)
    p = torch.zeros(9)
    if op == "AdamUpdateBf16":
        inputs = [p, p, p.to(low), p.to(low), *scalars(), seeds(1)[0]]
        places = (0, 2, 3)
    else:
        inputs = [p, p, codes, largest, codes, largest, *scalars()]
        places = (0, 2, 3, 4, 5)
    for i, dtype in changes.items():
        inputs[i] = inputs[i].to(dtype)
    reason = NATIVE[op][0].unsupported(spec_of(op, inputs, [inputs[i] for i in places], {}))
    assert reason is not None and words in reason
    assert ATEN[op][0].unsupported(spec_of(op, inputs, [inputs[i] for i in places], {})) is None


def test_types_that_do_not_fit_are_refused() -> None:
    graph = Graph("g")
    p = graph.input("p", Type(DType.FLOAT, (300,)), Role.BATCH)
    codes = graph.input("c", Type(DType.UINT8, (300,)), Role.BATCH)
    short = graph.input("s", Type(DType.FLOAT, (1,)), Role.BATCH)
    number = graph.input("n", Type(DType.DOUBLE, ()), Role.BATCH)
    step = graph.input("t", Type(DType.INT64, ()), Role.BATCH)
    b, rest = Builder(graph), [number] * 5
    with pytest.raises(ValueError, match="are not the codes of"):
        b.node("AdamUpdate8Bit", [p, p, codes, short, codes, short, *rest, step], {"decoupled": 1})
    with pytest.raises(ValueError, match="a seed that are not those of"):
        b.node("AdamUpdateBf16", [p, p, p, p, *rest, step, step], {"decoupled": 1, "site": 1})
