"""AdaSum on ranks in lockstep, against the formula of the paper (arXiv 2006.02924) in numpy: its
properties, shapes that ranks do not divide, precisions, and whole steps of tiny models, whose
gradients are those of each replica's own mean loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from shared_steps import RATE, Arrays, feeds, made, rows_of, run, step_of

from onward.distribute import Mesh, adasum, lockstep, ranks_of
from onward.errors import OnwardError
from onward.graph.build import Builder
from onward.graph.graph import Graph, Role, attributes
from onward.graph.ops.collective import STARTS
from onward.graph.types import DType, Type
from onward.options import TrainerOptions
from onward.plan import make_plan, sequence_hash
from onward.rewrite import prune, specialize

pytestmark = pytest.mark.usefixtures("captures_kept")

RNG = np.random.default_rng(0)
SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (3,), (5, 7), (16,), (2, 3, 4))
AXIS = "dp_replicate"


def formula(gradients: Sequence[np.ndarray]) -> np.ndarray:
    """The adaptive sum of neighbours, then of neighbouring sums, in fp64."""
    found = [np.asarray(g, np.float64) for g in gradients]
    while len(found) > 1:
        found = [two(a, b) for a, b in zip(found[::2], found[1::2], strict=True)]
    return found[0]


def two(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    product, first, second = (a * b).sum(), (a * a).sum(), (b * b).sum()
    left = 1 - product / (2 * first) if first else 1.0
    right = 1 - product / (2 * second) if second else 1.0
    return left * a + right * b


def graph_of(
    mesh: Mesh, shapes: Sequence[tuple[int, ...]], dtype: DType = DType.FLOAT, **more: Any
) -> Graph:
    """A step whose gradients are its inputs, one for each shape."""
    graph = Graph()
    b = Builder(graph, backward=True)
    names: dict[str, str] = {}
    for i, shape in enumerate(shapes):
        g = graph.input(f"g{i}", Type(dtype, shape), Role.BATCH)
        p = graph.input(f"param.p{i}", Type(dtype, shape), Role.PARAM)
        names[p.name or ""] = graph.output(f"local.{i}", b.Identity(b.Neg(g)))
    for i, output in enumerate(list(names.values())):
        graph.output(f"y{i}", b.Neg(graph.outputs[output]))
    graph.signature = replace(graph.signature, local_gradients=names)
    return adasum(graph, mesh, **more)


def combined(
    gradients: Sequence[Sequence[np.ndarray]],
    axes: tuple[str, ...] = (AXIS,),
    sizes: tuple[int, ...] = (),
    **more: Any,
) -> list[np.ndarray]:
    """What every rank gets for each gradient, bit for bit alike. gradients: by rank."""
    meshes = ranks_of(axes, sizes or (len(gradients),))
    shapes = [g.shape for g in gradients[0]]
    dtype = more.pop("dtype", DType.FLOAT)
    graphs = [graph_of(mesh, shapes, dtype, **more) for mesh in meshes]
    given = [
        {f"g{i}": g for i, g in enumerate(own)}
        | {f"param.p{i}": np.zeros_like(g) for i, g in enumerate(own)}
        for own in gradients
    ]
    found = lockstep(meshes, graphs, given)
    for outputs in found[1:]:
        for name, y in outputs.items():
            np.testing.assert_array_equal(y, found[0][name])
    return [found[0][f"y{i}"] for i in range(len(shapes))]


def drawn(shapes: Sequence[tuple[int, ...]] = SHAPES, ranks: int = 2) -> list[list[np.ndarray]]:
    return [
        [np.asarray(RNG.standard_normal(s), np.float32) + 0.5 for s in shapes] for _ in range(ranks)
    ]


@pytest.mark.parametrize("most_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_gradients_of_any_size_are_those_of_the_formula(ranks: int, most_bytes: int) -> None:
    """One element, odd numbers of them, and fewer than ranks; in buckets and alone."""
    given = [[np.asarray(g, np.float32) for g in own] for own in drawn(ranks=ranks)]
    for i, y in enumerate(combined(given, most_bytes=most_bytes)):
        want = formula([own[i] for own in given])
        assert y.shape == want.shape
        np.testing.assert_allclose(y, want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_orthogonal_gradients_are_added_and_equal_ones_averaged(ranks: int) -> None:
    apart = [[np.where(np.arange(48) % ranks == r, r + 1.0, 0.0).astype(np.float32)]
             for r in range(ranks)]  # fmt: skip
    np.testing.assert_array_equal(combined(apart)[0], sum(own[0] for own in apart))
    [same] = drawn(((5, 7),), 1)
    np.testing.assert_array_equal(combined([same] * ranks)[0], same[0])


def test_parallel_gradients_become_the_mean_of_their_sizes() -> None:
    [[g]] = drawn(((9,),), 1)
    np.testing.assert_allclose(combined([[g], [3 * g]])[0], 2 * g, rtol=1e-6)


@pytest.mark.parametrize("order", [(1, 0, 2, 3), (0, 1, 3, 2), (2, 3, 0, 1), (3, 2, 1, 0)], ids=str)
def test_partners_may_change_places(order: tuple[int, ...]) -> None:
    given = drawn(ranks=4)
    want = combined([[np.asarray(g, np.float32) for g in own] for own in given])
    found = combined([[np.asarray(g, np.float32) for g in given[r]] for r in order])
    for y, same in zip(found, want, strict=True):
        np.testing.assert_allclose(y, same, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("silent", [(0,), (1,), (0, 1)], ids=str)
def test_a_rank_whose_gradient_is_zero(ranks: int, silent: tuple[int, ...]) -> None:
    given = drawn(((5, 7), (3,)), ranks)
    for rank in silent:
        given[rank] = [np.zeros_like(g) for g in given[rank]]
    for i, y in enumerate(combined(given)):
        np.testing.assert_allclose(y, formula([g[i] for g in given]), rtol=2e-6, atol=2e-6)
        if ranks == 2:
            np.testing.assert_array_equal(y, sum(g[i] for g in given))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("ranks", [2, 8])
def test_a_number_that_is_not_finite_reaches_every_rank(ranks: int, bad: float) -> None:
    """The other parameters of the bucket stay what they are."""
    given = drawn(((5, 7), (6,)), ranks)
    given[1][0][2, 3] = bad
    first, second = combined(given)
    assert not np.isfinite(first).all()
    np.testing.assert_allclose(second, formula([g[1] for g in given]), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("size", [1e-20, 1e-30, 1e15])
def test_products_beyond_the_range_of_f32(size: float) -> None:
    given = [[(size * g).astype(np.float32) for g in own] for own in drawn(((40,),), 2)]
    want = formula([own[0] for own in given])
    np.testing.assert_allclose(combined(given)[0] / size, want / size, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "numbers", "near"),
    [
        (DType.FLOAT16, np.dtype(np.float16), 4e-3),
        (DType.BFLOAT16, np.dtype(ml_dtypes.bfloat16), 3e-2),
        (DType.DOUBLE, np.dtype(np.float64), 1e-13),
    ],
    ids=["f16", "bf16", "f64"],
)
def test_gradients_of_other_precisions(dtype: DType, numbers: Any, near: float) -> None:
    given = [[np.asarray(g).astype(numbers) for g in own] for own in drawn(((5, 7), (3,)), 4)]
    for i, y in enumerate(combined(given, dtype=dtype)):
        assert y.dtype == numbers
        want = formula([own[i].astype(np.float64) for own in given])
        np.testing.assert_allclose(y.astype(np.float64), want, rtol=near, atol=near)


def test_ranks_of_one_replica_take_their_mean_first() -> None:
    given = drawn(((5, 7), (3,)), 8)
    found = combined(given, (AXIS, "dp_shard"), (4, 2), average="micro_batches")
    for i, y in enumerate(found):
        means = [(given[r][i] + given[r + 1][i]) / 2 for r in range(0, 8, 2)]
        np.testing.assert_allclose(y, formula(means), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("ranks", [3, 6, 12])
def test_other_numbers_of_replicas_are_refused(ranks: int) -> None:
    with pytest.raises(OnwardError, match=rf"two by two, which {ranks} ranks .*; fix: 2, 4, 8 or"):
        graph_of(ranks_of((AXIS,), (ranks,))[0], SHAPES)
    with pytest.raises(OnwardError, match=rf"adasum=True .* mesh has {ranks} there; fix: 2, 4, 8"):
        TrainerOptions(adasum=True, mesh={AXIS: ranks})
    with pytest.raises(OnwardError, match=r"adasum=True .* mesh has 1 there; fix: 2, 4, 8"):
        TrainerOptions(adasum=True, mesh={"dp_shard": ranks})


@pytest.mark.parametrize("stage", [1, 2])
def test_parts_of_gradients_are_refused(stage: int) -> None:
    with pytest.raises(OnwardError, match=rf"adasum=True .* zero={stage} gives each rank a part"):
        TrainerOptions(adasum=True, zero=stage, mesh={AXIS: 2, "dp_shard": 2})
    mesh = ranks_of((AXIS, "dp_shard"), (2, 2))[0]
    with pytest.raises(OnwardError, match=r"zero gives each rank a part; fix: zero=0"):
        step_of("gpt2", mesh, adasum=True, stage=stage)


def test_a_rank_sends_what_halving_and_gathering_need() -> None:
    """Halves, quarters, eighths: less than one gradient in all (arXiv 2006.02924, section 4.2)."""
    graph = graph_of(ranks_of((AXIS,), (8,))[5], [(64,), (8, 8)])
    starts = [node for node in graph if node.op_type in STARTS]
    rows = [
        int(node.inputs[0].meta["type"].shape[0])  # type: ignore[union-attr]
        for node in starts
        if "gradients" in str(attributes(node)["record"])
    ]
    assert rows == [4, 2, 1, 1]
    assert [node.op_type for node in starts].count("ExchangeStart") == 3 + (1 + 2 + 3)


# ---- whole steps


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
@pytest.mark.parametrize("average", ["labels", "micro_batches"])
@pytest.mark.parametrize(
    ("sizes", "shares"),
    [
        ((2, 1), [(3, 1)]),
        ((4, 1), [(1, 2, 1, 2)]),
        ((2, 2), [(1, 2, 1, 2)]),
        ((2, 1), [(3, 2), (1, 3)]),
        ((2, 2), [(1, 2, 1, 1), (2, 1, 1, 3)]),
    ],
    ids=str,
)
def test_each_replica_has_the_gradient_of_its_own_mean(
    kind: str, average: str, sizes: tuple[int, int], shares: list[tuple[int, ...]]
) -> None:
    """Tied weights (GPT-2's), dropout, unequal shares and labels, windows; the gradients of a
    replica are those of a mesh of its ranks alone, read from the update of SGD."""
    more: dict[str, Any] = {"max_grad_norm": None, "average": average}
    axes = (AXIS, "dp_shard")
    found = run(kind, ranks_of(axes, sizes), shares, adasum=True, **more)
    plain = run(kind, ranks_of(axes, sizes), shares, **more)
    single = gradients_apart(kind, sizes, shares, more)
    for outputs in found:
        assert outputs.keys() >= plain[0].keys() and outputs["finite"]
        np.testing.assert_allclose(outputs["loss"], plain[0]["loss"], rtol=1e-6)
        for name, have in applied(kind, outputs).items():
            want = formula([g[name] for g in single])
            np.testing.assert_allclose(have, want, rtol=1e-4, atol=3e-6, err_msg=name)


def applied(kind: str, outputs: Arrays) -> Arrays:
    """The gradients f64 that an update by SGD has applied, whose weight decay is its rate; zeros
    where rounding of the weights is all that is left."""
    found: Arrays = {}
    for name, p in made(kind).captured.parameters.items():
        if f"next.{name}" in outputs:
            start = p.detach().double().numpy()
            g = (start - outputs[f"next.{name}"]) / RATE - RATE * start
            found[name] = g if np.abs(g).max() > 2e-6 else np.zeros_like(g)
    return found


def gradients_apart(
    kind: str, sizes: tuple[int, int], shares: list[tuple[int, ...]], more: dict[str, Any]
) -> list[Arrays]:
    """The gradients of each replica: minus the change that its ranks alone make by SGD, with
    samples numbered as within all ranks, so that masks are the same."""
    replicas, width = sizes
    accumulate = len(shares) > 1
    found: list[Arrays] = []
    for replica in range(replicas):
        meshes = [Mesh()] if width == 1 else ranks_of(("dp_shard",), (width,))
        graphs = [step_of(kind, mesh, accumulate=accumulate, **more) for mesh in meshes]
        windows: list[Arrays] = [{} for _ in meshes]
        outputs: list[Arrays] = []
        seen = 0
        for number, counts in enumerate(shares, 1):
            data = {n: t.numpy() for n, t in rows_of(kind, sum(counts), number).items()}
            starts = np.cumsum([0, *counts])
            cut = [prune(g, g.signature.requested((), number == len(shares))) for g in graphs]
            given = []
            for place, graph in enumerate(cut):
                r = replica * width + place
                part = {n: x[starts[r] : starts[r + 1]] for n, x in data.items()}
                own = feeds(graph, kind, part, seen + int(starts[r]), windows[place])
                given.append(own)
            outputs = lockstep(meshes, cut, given)
            for window, made_, graph in zip(windows, outputs, graphs, strict=True):
                signature = graph.signature
                for key, name in signature.window.items():
                    window[name] = made_[signature.windowed[key]]
                for parameter, name in signature.accumulated.items():
                    if name in made_:
                        window[signature.accumulators[parameter]] = made_[name]
            seen += int(starts[-1])
        found.append(applied(kind, outputs[0]))
    return found


def test_clipping_is_by_the_norm_of_what_was_combined() -> None:
    shares = [(3, 1)]
    free, bound = (
        run("gpt2", ranks_of((AXIS,), (2,)), shares, adasum=True, max_grad_norm=norm)[0]
        for norm in (1e9, 0.5)
    )
    moved, clipped = applied("gpt2", free), applied("gpt2", bound)
    norm = float(np.sqrt(sum((g * g).sum() for g in moved.values())))
    assert norm > 0.5
    np.testing.assert_allclose([free["grad_norm"], bound["grad_norm"]], norm, rtol=1e-4)
    for name, g in clipped.items():
        np.testing.assert_allclose(g, moved[name] * 0.5 / norm, rtol=1e-3, atol=3e-6)


@pytest.mark.parametrize("average", ["labels", "micro_batches"])
def test_a_loss_scale_changes_nothing(average: str) -> None:
    meshes, more = ranks_of((AXIS,), (2,)), {"adasum": True, "average": average}
    want, found = (
        run("gpt2", meshes, [(2, 1), (1, 2)], loss_scale=scale, **more)[0]
        for scale in (None, 1024.0)
    )
    assert found.keys() == want.keys()
    for name, y in found.items():
        if name.startswith("next.param."):
            np.testing.assert_allclose(y, want[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_one_rank_has_nothing_to_combine() -> None:
    graphs = [step_of("gpt2", Mesh(), adasum=value) for value in (False, True)]
    assert [n.op_type for n in graphs[0]] == [n.op_type for n in graphs[1]]


def test_all_ranks_run_one_sequence() -> None:
    hashes: set[str] = set()
    for mesh in ranks_of((AXIS, "dp_shard"), (4, 2)):
        graph = step_of("gpt2", mesh, adasum=True)
        outputs = graph.signature.requested((), True)
        dims = {name: 2 if name == "B" else 6 for name in graph.symbols}
        hashes.add(sequence_hash(make_plan(specialize(graph, dims, (), outputs), dims)))
    assert len(hashes) == 1


def test_a_rate_at_which_sums_diverge() -> None:
    """Least squares with one feature of thrice the size, 8 replicas with 32 rows each, a rate at
    which each alone converges: by sums the loss grows without bound, by AdaSum it falls to a
    hundredth in fewer steps than by means (docs/log.md has the figures)."""
    rows, width, ranks, rate = 2048, 32, 8, 0.08
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, width))
    x[:, 0] *= 3
    y = x @ rng.standard_normal(width)
    meshes = ranks_of((AXIS,), (ranks,))
    graphs = [graph_of(mesh, [(width,)], DType.DOUBLE) for mesh in meshes]

    def adaptive(gradients: list[np.ndarray]) -> np.ndarray:
        given = [{"g0": g, "param.p0": g} for g in gradients]
        return lockstep(meshes, graphs, given)[0]["y0"]

    ways: dict[str, Any] = {
        "sum": lambda gradients: sum(gradients),
        "mean": lambda gradients: sum(gradients) / ranks,
        "adasum": adaptive,
    }
    losses: dict[str, list[float]] = {}
    for way, combine in ways.items():
        w, draw = np.zeros(width), np.random.default_rng(1)
        losses[way] = [float(np.mean(y**2) / 2)]
        for _ in range(12 if way == "adasum" else 40):
            parts = draw.permutation(rows)[: ranks * 32].reshape(ranks, 32)
            w = w - rate * combine([x[i].T @ (x[i] @ w - y[i]) / 32 for i in parts])
            losses[way].append(float(np.mean((x @ w - y) ** 2) / 2))
    assert losses["sum"][40] > 1e6 * losses["sum"][0]
    steps = {
        way: next(i for i, loss in enumerate(losses[way]) if loss < losses[way][0] / 100)
        for way in ("mean", "adasum")
    }
    assert steps == {"mean": 31, "adasum": 11}
