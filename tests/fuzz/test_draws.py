"""Draws of stop-gradients, wrappers, collators and savings: each is there, and finds its fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuzz.counted import most_captures
from fuzz.engines import Eager, namespace
from fuzz.histories import case_of
from fuzz.judge import judge
from fuzz.maker import Case
from fuzz.source import definitions

import onward
from onward.capture.aten import TABLE
from onward.integrations import transformers as drop_in
from onward.train import prepared_steps

CASES = [case_of(seed) for seed in range(400)]


def test_each_is_drawn() -> None:
    text = Counter[str]()
    for case in CASES:
        source = definitions(case)
        for part in (
            ".detach()", "torch.complex(", "face(Outer(", "Parallel(", "adapted(",
            "class Model(transformers.PreTrainedModel)", "config.problem_type", "torch.rand",
        ):  # fmt: skip
            text[part] += part in source
        for variant in case["variants"]:
            text[f"loop {variant.get('loop', 'Trainer')}"] += 1
            text[f"precision {variant.get('mixed_precision', 'f32')}"] += 1
        text["stopped"] += case["stopped"]
        text["complex"] += "fft(" in source or "complex(" in source
        text["seed of torch's generator"] += not case["seeded"]
        for action in case["history"]:
            text[action["do"]] += 1
        lines = [a.get("code", "") for a in case["history"]]
        text["by turns"] += any(lines.count(x) > 1 for x in lines if "requires_grad_(" in x)
    assert not {part: n for part, n in text.items() if n < 3}
    assert {"loop module", "loop compiled", "loop drop-in", "precision fp16", "save"} <= set(text)


def plain(case: Case, **changes: Any) -> Case:
    """A case with this and nothing else that is rare."""
    found = {"variants": [{}], "wrap": "", "collator": {}, "seeded": True, "dropout": False}
    history = [{"do": "train", "batch": 0}, {"do": "train", "batch": 0}]
    return case | found | {"history": history, "base": ""} | changes


def sound(word: str, fits: Callable[[Case], bool] = lambda _: True, **changes: Any) -> Case:
    """The first small case with that word, and that fits, in which nothing is found."""
    for case in CASES:
        if word in str(case["body"]) and len(case["body"]) < 8 and not case["aliases"]:
            made = plain(case, **changes)
            if fits(made) and judge(made).kind == "ok":
                return made
    raise AssertionError(f"no case with {word}")


def stops_something(case: Case) -> bool:
    """Whether eager trains another way without `.detach()`: not where it is said of a constant."""
    unstopped = [s | {"code": s["code"].replace(".detach()", "")} for s in case["body"]]
    right, wrong = (
        Eager(made, namespace(made), torch.float32).play()[-1].state
        for made in (case, case | {"body": unstopped})
    )
    return any(not torch.allclose(right[name], wrong[name]) for name in right)


def test_a_gradient_that_does_not_stop_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = sound(".detach()", stops_something)
    monkeypatch.setitem(TABLE, "detach.default", lambda c, x: c.b.Identity(x))
    assert judge(case).kind == "difference"


def test_a_number_drawn_from_torchs_generator_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case, right = sound("F.linear"), onward.Trainer.train_step

    def drawing(self: Any, *args: Any, **kwargs: Any) -> Any:
        torch.rand(1)
        return right(self, *args, **kwargs)

    monkeypatch.setattr(onward.Trainer, "train_step", drawing)
    found = judge(case)
    assert (found.kind, found.signature) == ("difference", "difference: generator")


def test_a_capture_too_many_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = sound("F.linear")
    assert most_captures(case) == 1
    monkeypatch.setattr(prepared_steps, "_find", lambda *_: None)
    assert judge(case).kind == "captures"


def test_a_key_that_is_renamed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = sound(
        "F.linear", wrap="face(Outer(model))", face="Module", variants=[{"loop": "module"}]
    )
    right = onward.Module.state_dict

    def renamed(self: Any, *args: Any, **kwargs: Any) -> Any:
        return {f"module.{k}": x for k, x in right(self, *args, **kwargs).items()}

    monkeypatch.setattr(onward.Module, "state_dict", renamed)
    found = judge(case)
    assert found.kind == "difference" and "key inner" in found.detail


def test_a_number_drawn_in_the_drop_in_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collator that draws gives other batches then; without one the generator tells."""
    case = sound("F.linear", variants=[{}, {"disable": ["noop"]}])
    case["variants"] = [{"loop": "drop-in"}]
    right = drop_in.Trainer.training_step

    def drawing(self: Any, *args: Any, **kwargs: Any) -> Any:
        torch.rand(1)
        return right(self, *args, **kwargs)

    monkeypatch.setattr(drop_in.Trainer, "training_step", drawing)
    found = judge(case)
    assert found.signature == "drop-in difference: generator"


@pytest.mark.parametrize(
    ("code", "most"),
    [
        ("optimizer.param_groups[0]['lr'] *= 0.5", 1),
        ("model.get_parameter('w').requires_grad_(False)", 2),
        ("model.scale = 2.0", 2),
    ],
)
def test_states_are_counted(code: str, most: int) -> None:
    train = {"do": "train", "batch": 0}
    history = [train, {"do": "code", "code": code}, train]
    assert (
        most_captures({"batches": [{"size": 2, "length": 3}], "history": history, "body": []})
        == most
    )
