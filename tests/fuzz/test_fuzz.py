"""The fuzzer itself: it finds what is planted, makes it small, and repeats itself from a seed."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuzz import judge as judging
from fuzz.engines import Eager, Ours, namespace
from fuzz.histories import PASSES, SPOILS, case_of
from fuzz.judge import FP32, TINY, Verdict, _distance, judge
from fuzz.maker import Case
from fuzz.program import GRAMMAR
from fuzz.shrink import shrink
from fuzz.source import definitions, script
from fuzz.workers import Worker

from onward.differentiate import rule_table
from onward.graph.signature import Signature
from onward.prepare.packed_step import PackedStep
from onward.prepare.row_numbers import RowNumbers
from onward.rewrite import FORWARD, STEP
from onward.train.torch_optimizer import TorchOptimizer

CASES = [case_of(seed) for seed in range(400)]


def test_a_seed_says_everything() -> None:
    for seed in (0, 7, 123456789):
        assert case_of(seed) == case_of(seed)
        assert json.loads(json.dumps(case_of(seed))) == case_of(seed)
    assert len({definitions(case) for case in CASES}) == len(CASES)


def test_every_pass_can_be_off() -> None:
    assert set(PASSES) == {p.name for p in (*FORWARD, *STEP)}
    off = {n for c in CASES for v in c["variants"] for n in v.get("disable", ())}
    assert off == {*PASSES, "row_demand"}


def test_the_grammar_is_covered() -> None:
    """Texts that stand for what a module, a history or a run may hold; each often enough."""
    text = Counter()
    for case in CASES:
        source = definitions(case) + json.dumps(case["history"])
        for part in (
            "scaled_dot_product_attention", "is_causal", "masked_fill", "torch.where", ".gather(",
            "torch.cat", ".chunk(", ".split(", "layer_norm", "embedding(", "finfo",
            "label_smoothing", "layout=", "requires_grad=False", "'tied.", "int32",
            ".transpose(0, 1).contiguous()",
            "torch.bool", "rebirth", "reload", "eval", "scheduler.step", "requires_grad_(", "shape",
            "betas", "momentum=0.9", "lambda out",
            ".mul_(2.0), y)", "class Part", "Odd.apply(self", "script(", "i1(", "numpy()",
            "self.norm",
        ):  # fmt: skip
            text[part] += part in source
        text["accumulation"] += case["options"]["gradient_accumulation_steps"] > 1
        text["clipping"] += case["options"]["max_grad_norm"] is not None
        text["dropout"] += case["dropout"]
        text["several outputs"] += len(case["outputs"]) > 1
        text["several shapes"] += len({(b["size"], b["length"]) for b in case["batches"]}) > 1
    rare = {part: n for part, n in text.items() if n < 3}
    assert not rare
    assert {a["spoil"] for c in CASES for a in c["history"] if "spoil" in a} == set(SPOILS)
    assert len(GRAMMAR) > 15


def test_what_is_printed_runs(capsys: pytest.CaptureFixture[str]) -> None:
    case = sound(lambda c: len(c["history"]) < 5 and not c["dropout"])
    source = script(case, case["variants"][0], "a title")
    exec(compile(source, "<printed>", "exec"), {"__name__": "__main__"})
    said = capsys.readouterr().out.splitlines()
    eager = [line.split()[1:] for line in said if line.startswith("eager ")]
    ours = [line.split()[1:] for line in said if line.startswith("onward ")]
    assert len(eager) == len(ours) > 0
    first = [float(line[0].strip("(,)")) for line in (eager[0], ours[0])]
    assert first[0] == pytest.approx(first[1], rel=1e-4)


def sound(fits: Callable[[Case], bool]) -> Case:
    """The first case of that form that has no finding."""
    return next(c for c in CASES if fits(c) and judge(c).kind == "ok")


@pytest.mark.parametrize("level", [1e-7, 1e-2])
def test_a_difference_is_what_fp64_does_not_excuse(level: float) -> None:
    torch.manual_seed(0)
    exact = torch.randn(50, dtype=torch.float64)
    eager = exact + 1e-7 * torch.randn(50)
    ours = exact + level * torch.randn(50)
    assert bool(_distance("x", ours, eager, exact, exact, TINY, FP32, {})) == (level > 1e-4)


def test_mixed_precision_is_drawn_and_compared_with_autocast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cast's gradient that is half of what it should be: fp32 has no such cast."""
    mixed = {"mixed_precision": "bf16"}
    drawn = [c for c in CASES if mixed in c["variants"]]
    assert 20 < len(drawn) < 150
    assert not any(c["dropout"] for c in drawn)
    case = mixed_case()
    assert judge(case).kind == "ok"
    right = rule_table.RULES["Cast"]

    def wrong(b: Any, *rest: Any) -> list[Any]:
        return [b.Mul(dx, 0.5) for dx in right(b, *rest)]

    monkeypatch.setitem(rule_table.RULES, "Cast", wrong)
    found = judge(case)
    assert found.kind == "difference"
    assert found.variant == mixed
    assert judge({**case, "variants": [{}]}).kind == "ok"


def mixed_case() -> Case:
    """A small program of which only the variant in mixed precision runs."""
    mixed = {"mixed_precision": "bf16"}
    drawn = (c for c in CASES if mixed in c["variants"] and plain(c, "F.linear("))
    return {**next(drawn), "variants": [mixed]}


@pytest.mark.parametrize(
    ("draws", "kind"), [((0,), "chance"), ((0, 3), "chance"), ((0, 2, 5), "difference")]
)
def test_a_difference_in_mixed_precision_has_to_persist(
    monkeypatch: pytest.MonkeyPatch, draws: tuple[int, ...], kind: str
) -> None:
    """A relu's sign, which rounding decides, differs with the case's own weights (draw 0) and with
    few that are close to them."""

    def kinked(case: Case, *_: Any) -> Verdict:
        return Verdict("difference" if case.get("close", 0) in draws else "ok")

    monkeypatch.setattr(judging, "_against", kinked)
    assert judge(mixed_case()).kind == kind
    assert judge({**mixed_case(), "variants": [{}]}).kind == "difference"  # fp32 is not run again


def test_sides_with_close_weights_begin_with_the_same() -> None:
    case = mixed_case()
    close = {**case, "close": 1}
    defined = namespace(case)
    own = Eager(case, defined, torch.float32).state()
    eager = Eager(close, defined, torch.float32).state()
    ours = Ours(close, defined, {}).state()
    assert own.keys() == eager.keys() == ours.keys()
    assert all(torch.equal(eager[name], ours[name]) for name in own)
    moved = {n: (eager[n] / x - 1.0).abs() for n, x in own.items() if n.startswith("parameter")}
    assert all(0.0 < x.max() < 0.1 for x in moved.values())


def plain(case: Case, word: str) -> bool:
    """Whether a case has the word, and little beside it that costs time."""
    return (
        any(word in s["code"] for s in case["body"]) and len(case["history"]) < 4
        and not case["dropout"] and {a["do"] for a in case["history"]} <= {"train", "eval"}
        and not any("spoil" in a for a in case["history"])
    )  # fmt: skip


def found(word: str, most: int = 4) -> tuple[Case, Verdict]:
    """The first finding among a few programs with that word."""
    for case in [c for c in CASES if plain(c, word)][:most]:
        verdict = judge(case)
        if verdict.finding:
            return case, verdict
    raise AssertionError(f"{most} programs with {word}, no finding")


def test_a_wrong_gradient_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    right = rule_table.RULES["Gemm"]

    def wrong(b: Any, *rest: Any) -> list[Any]:
        return [None if dx is None else b.Mul(dx, 1.1) for dx in right(b, *rest)]

    with monkeypatch.context() as planted:
        planted.setitem(rule_table.RULES, "Gemm", wrong)
        case, verdict = found("F.linear(h")
        assert verdict.kind == "difference"
        small = shrink(case, verdict, judge, seconds=60.0)
        assert judge(small).kind == "difference"
    assert judge(small).kind == "ok"
    assert len(small["body"]) <= 4 and len(small["history"]) == 1


def test_a_row_that_is_not_counted_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = RowNumbers.of

    def wrong(self: RowNumbers, *args: Any) -> dict[str, torch.Tensor]:
        return {k: x[:-1] if len(x) > 1 else x for k, x in right(self, *args).items()}

    monkeypatch.setattr(RowNumbers, "of", wrong)
    monkeypatch.setattr(PackedStep, "pays", lambda *_: True)
    assert found("F.cross_entropy", 6)[1].finding


def test_a_wrong_rate_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = TorchOptimizer.inputs

    def wrong(self: TorchOptimizer, signature: Signature) -> dict[str, Any]:
        rates = {name for h, name in signature.hyperparameters.items() if h.name == "lr"}
        return {k: v * 1.01 if k in rates else v for k, v in right(self, signature).items()}

    monkeypatch.setattr(TorchOptimizer, "inputs", wrong)
    assert found("F.linear")[1].kind == "difference"


def test_a_process_that_dies_is_a_finding_and_the_next_seed_has_another() -> None:
    command = [
        sys.executable, "-c",
        "import os, json\nwhile True:\n n = int(input())\n os.abort() if n == 1 else "
        "print(json.dumps({'seed': n, 'kind': 'ok', 'finding': False}), flush=True)",
    ]  # fmt: skip
    worker = Worker(command)
    kinds = [worker.judge(seed)["kind"] for seed in (0, 1, 2)]
    worker.close()
    assert kinds == ["ok", "crash", "ok"]
