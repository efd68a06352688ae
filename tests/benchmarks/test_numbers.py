"""What the suite computes of measured numbers, on numbers that are known."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from onward.graph.ops import OWN

arithmetic: Any = import_module("suite.arithmetic")
cases: Any = import_module("suite.cases")
kernel_calls: Any = import_module("suite.kernel_calls")
kernel_table: Any = import_module("suite.kernel_table")
kernel_timing: Any = import_module("suite.kernel_timing")
largest: Any = import_module("suite.largest")
losses: Any = import_module("suite.losses")
products: Any = import_module("suite.products")
question: Any = import_module("suite.question")
workloads: Any = import_module("suite.workloads")

EVERY_CASE = [*cases.CPU, *cases.PADDED, *cases.GPU]


def entry(*values: float) -> dict[str, Any]:
    return {"losses": list(values), "first_loss": 3.0, "step_s": 2.0}


def checked(eager: list[float], other: list[float], exact: list[float]) -> dict[str, Any]:
    results = {"eager": entry(*eager), "onward": entry(*other)}
    tolerance = losses.Tolerance(level=0.02, exact=1e-3)
    return losses.checked(results, {"eager": [1.0, 2.0], "onward": exact}, tolerance)


def test_losses_within_the_tolerances_pass() -> None:
    found = checked([1.0, 3.0], [1.01, 3.01], [1.0005, 2.0])
    assert found["passed"]
    assert found["level_difference"] == {"eager": 0.0, "onward": pytest.approx(0.005)}
    assert found["exact_difference"]["onward"] == pytest.approx(5e-4)


@pytest.mark.parametrize(
    ("other", "exact"),
    [
        ([1.05, 3.05], [1.0, 2.0]),
        ([1.0, 3.0], [1.0, 2.002]),
        ([1.0, math.nan], [1.0, 2.0]),
        ([1.0, 3.0], [math.nan, 2.0]),
        ([1.0, 3.0], [1.0, math.nan]),
    ],
)
def test_other_losses_do_not(other: list[float], exact: list[float]) -> None:
    assert not checked([1.0, 3.0], other, exact)["passed"]


@pytest.mark.parametrize(
    ("loss", "differs"), [(1.0, False), (1.00005, False), (1.001, True), (math.nan, True)]
)
def test_a_variants_losses_are_compared_one_by_one(loss: float, differs: bool) -> None:
    variant, base = entry(2.0, loss), entry(2.0, 1.0)
    losses.compare(variant, base)
    assert losses.wrong(variant) is differs
    assert variant["step_s_ratio"] == 1.0


def test_a_failed_engine_fails_the_run() -> None:
    case = {"checks": {"passed": True}, "engines": {"eager": entry(1.0)}}
    assert not losses.failed([case])
    case["engines"]["onward"] = {**entry(1.0), "error": "out of memory"}
    assert losses.failed([case])


@pytest.mark.parametrize("shape", [(1, 8, 16, 4), (3, 5, 7, 11)])
def test_flops_are_those_that_pytorch_counts(shape: tuple[int, int, int, int]) -> None:
    batch, m, k, n = shape
    with FlopCounterMode(display=False) as counter:
        torch.matmul(torch.randn(batch, m, k), torch.randn(batch, k, n))
    product = products.Product(batch, m, k, n, transposed_a=False, transposed_b=False)
    assert arithmetic.product_flops(product) == counter.get_total_flops()


@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_the_causal_share_is_that_of_the_mask(tokens: int) -> None:
    mask = torch.ones(tokens, tokens).tril()
    assert arithmetic.causal_share(tokens) == pytest.approx(float(mask.mean()))


@pytest.mark.parametrize("limit", [0, 1, 5, 16, 37, 1000])
@pytest.mark.parametrize("start", [4, 20])
def test_the_largest_batch_is_found_within_two_percent(limit: int, start: int) -> None:
    tried: dict[int, bool] = {}

    def fits(batch: int) -> bool:
        assert batch not in tried, "each trial costs a process"
        tried[batch] = batch <= limit
        return tried[batch]

    largest.bisect(fits, start)
    best = max((batch for batch, good in tried.items() if good), default=0)
    assert best <= limit <= best + max(0, best // 50)


@pytest.mark.parametrize("case", EVERY_CASE, ids=lambda case: case.name)
def test_a_tiny_case_trains(case: Any) -> None:
    tiny = case.tiny()
    model, batches = workloads.make_model(tiny), workloads.make_batches(tiny, 2)
    assert sum(p.numel() for p in model.parameters()) < 1e6
    output = model(**batches[0])
    loss = output if isinstance(output, torch.Tensor) else output["loss"]
    loss.backward()
    assert math.isfinite(float(loss.detach()))


def test_a_question_is_answered_in_a_process_of_its_own() -> None:
    product = {"batch": 1, "m": 8, "k": 8, "n": 8, "transposed_a": True, "transposed_b": False}
    request = {"way": "openblas", "products": [product], "threads": 1, "seconds": 0.0}
    (seconds,) = question.ask("suite.product_times", request)
    assert 0.0 < seconds < 1.0
    with pytest.raises(question.QuestionError, match=r"suite\.product_times, exit 1: KeyError"):
        question.ask("suite.product_times", request | {"way": "abacus"})


def test_kernels_are_timed_on_calls_of_their_own() -> None:
    """GELU and its gradient are timed on calls made up for them: all kernels agree, and so does
    PyTorch's own gradient of the body."""
    calls = kernel_calls.extra()
    assert [call.spec.op for call in calls] == ["Gelu", "GeluGrad"]
    for call in calls:
        kernel_timing.measure_call(call, 0.0)
        assert call.results[0]["kernel"] == call.kernel
        assert (call.results[-1]["kernel"] == "body") == (call.spec.op in OWN)
        for result in call.results:
            assert "error" not in result
            assert result["difference"] < 1e-5
            assert 0 < result["best"] <= result["median"]
            assert result["bytes"] == sum(x.type.nbytes for x in (*call.inputs, *call.outputs))
    dy, x = (t.requires_grad_() for t in calls[1].tensors())
    _, (dx,) = kernel_timing.run_body(calls[1], 0.0)
    (want,) = torch.autograd.grad(torch.nn.functional.gelu(x), x, dy)
    torch.testing.assert_close(dx, want)


def test_watching_leaves_the_table_as_it_was() -> None:
    before = dict(kernel_table.KERNELS)
    with pytest.raises(RuntimeError, match="stop"), kernel_table.watched():
        assert before != kernel_table.KERNELS
        raise RuntimeError("stop")
    assert before == kernel_table.KERNELS


def test_a_watched_launch_is_told_before_it_writes() -> None:
    x, y, seen = torch.ones(4), torch.zeros(4), []
    with kernel_table.watched(lambda item: seen.append(item.args.y.clone())) as bound:
        spec = kernel_table.KernelSpec(
            "Neg", {}, (kernel_table.type_of(x),), (kernel_table.type_of(y),)
        )
        kernel = kernel_table.applicable(spec)[0]
        launch = kernel.bind(kernel_table.KernelArguments({}, [x], [y], []))
    assert [(item.op, item.kernel) for item in bound] == [("Neg", kernel.name)]
    assert bound[0].spec == spec
    launch()
    assert torch.equal(seen[0], torch.zeros(4)) and torch.equal(y, -x)
