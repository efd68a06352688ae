"""Every option, every Trainer argument and every variable, with values that cannot be meant: one
clear line for each, before anything is changed. And the odd spellings that can be meant."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import mlp
from torch import nn

import onward
from onward import LossScale, OnwardError, TrainerOptions
from onward.environment import VARIABLES, Environment, environment
from onward.kernels.blas.choice import forced
from onward.kernels.native import library as native
from onward.rewrite import FORWARD, PRECISION, STEP, halves, row_demand, switched_off, switches

loss_fn = nn.functional.cross_entropy
X, Y = torch.randn(6, 8), torch.arange(6) % 5

NO_NUMBERS = ("2", b"2", [2], {}, object(), torch.tensor(2), 1j, True, False, np.True_)
WRONG: dict[str, tuple[Any, ...]] = {
    "gradient_accumulation_steps": (
        *NO_NUMBERS, None, 0, -1, 1.5, 2.0, math.nan, math.inf, np.float64(2), np.int64(0),
    ),
    "max_grad_norm": (*NO_NUMBERS, 0, 0.0, -1.0, math.nan, math.inf, -math.inf, np.float32("inf")),
    "max_grad_value": (*NO_NUMBERS, 0, 0.0, -1.0, math.nan, math.inf, -math.inf),
    "seed": (*NO_NUMBERS, -1, 2**64, 1.0, math.nan, np.int64(-1)),
    "verify": (None, 0, 1, "yes", "false", [], torch.tensor(True)),
    "memory_budget": (
        True, 0, 1, -1, 0.0, -0.5, 1.5, 2e9, math.nan, math.inf, np.int64(1), np.float32(1.5),
        "", "1", "0.6", "60%", "half", "2 gigabytes", "GB", "-1GB", "1e3MB", "1B", "1.2.3GB",
        "nanGB", [1], {}, torch.tensor(0.5),
    ),
    "auto_micro_batch": (None, 0, 1, "auto", 1.0, [], np.int64(1)),
    "recompute": (None, True, 0, "", "Layers", "layer", "all", "full", ["layers"]),
    "skip_nonfinite": (None, 0, 1, "no", 1.0, [], np.int64(1)),
    "max_skipped_updates": (
        "8", [8], {}, object(), True, False, 0, -1, 1.5, math.nan, math.inf, np.int64(0),
    ),
    "loss_spikes": (True, False, 1, "", "Skip", "ignore", "rollback", ["skip"], object()),
    "loss_spike_threshold": (*NO_NUMBERS, None, 0, 0.0, -1.0, math.nan, math.inf),
    "strict": (None, 0, 1, "no", 1.0, [], np.int64(1)),
    "mixed_precision": (
        True, 16, "BF16", "bfloat16", "FP16", "float16", "fp32", torch.bfloat16, ["bf16"], "",
    ),
    "loss_scale": (
        None, True, False, np.True_, "", "static", "Dynamic", "1024", 0, 0.0, -1.0, 2.0**-127,
        2.0**127, math.nan, math.inf, 1j, [2.0], torch.tensor(2.0), LossScale, object(),
        {"scale": 2.0}, {"init_scale": 0}, {"init_scale": math.inf}, {"init_scale": "2"},
        {"init_scale": True}, {"init_scale": 2.0**127}, {"growth_factor": 1.0},
        {"growth_factor": 0.5}, {"growth_factor": math.nan}, {"backoff_factor": 1.0},
        {"backoff_factor": 0.0}, {"backoff_factor": -0.5}, {"growth_interval": 0},
        {"growth_interval": 2.0}, {"growth_interval": True}, {"growth_interval": None}, {1: 2},
        1024.0, LossScale(4.0), {"growth_interval": 3},  # of fp16, which it is not
    ),
    "mesh": (
        2, "2", "", "Auto", "dp_replicate=2", (), {}, [("dp_replicate", 2)], {"data": 2},
        {"dp_replicate": 0}, {"dp_replicate": True}, {"dp_replicate": 1.0}, {"tp": 2}, {2: 2},
    ),
    "zero": (*NO_NUMBERS, None, -1, 4, 1.0, 0.5, math.nan, 1, 2, 3),  # 1 to 3 need ranks
    "adasum": (None, 0, 1, "auto", 1.0, [], np.int64(1), True),  # True needs ranks
    "sequence_parallel": (None, 0, 1, "auto", 1.0, [], np.int64(1), True),  # True needs tp
    "context_parallel_method": (None, "", "Ring", "all_gather", "ulysses", 1, True, ["ring"]),
    "pipeline_schedule": (None, "", "gpipe", "1f1b", "ZBVZeroBubble", 1, True, ["GPipe"]),
    "pipeline_microbatches": (*NO_NUMBERS, 0, -1, 1.5, 2.0, math.nan),
    "compare_ranks_every": (*NO_NUMBERS, 0, -1, 1.5, 2.0, math.nan),
    "ranks_timeout": (*NO_NUMBERS, 0, 0.5, -1, 1e7, math.nan, math.inf),
    "optimizer_state": (
        None, False, 8, 32, "", "no", "BF16", "fp16", "bfloat16", "int8", "8 bit", "8-bit", "4bit",
        torch.bfloat16, ["bf16"],
    ),
    "offload_optimizer": (False, True, 1, "", "CPU", "nvme", "gpu", ["cpu"], "disk"),  # without one
    "offload_dir": (False, 1, "", b"state", ["state"], object(), "/tmp"),  # without "disk"
    "gradient_accumulation_dtype": (
        None, False, 16, "", "no", "BF16", "fp16", "bfloat16", torch.bfloat16, ["bf16"],
    ),
    "gradient_accumulation_average": (
        None, False, True, 1, "", "label", "mean", "tokens", "micro-batches", ["labels"],
    ),
    "ema_decay": (*NO_NUMBERS, 0, 1, 0.0, 1.0, -0.5, 1.5, math.nan, math.inf),
    "keep_in_fp32": (None, 3, True, {"a": 1}, [3], [None], [""], ""),
    "disable": (
        None, 3, True, b"noop", {"noop": 1}, [3], ["noop", None], [""], "noopp",
        ["gemm_add", "fused"], "noop,nope", "noop gemm_add",
    ),
    "fetch": (None, 3, True, b"logits", {"logits": 1}, [3], [None], [""], ""),
}  # fmt: skip
RIGHT: dict[str, tuple[tuple[Any, Any], ...]] = {
    "gradient_accumulation_steps": ((3, 3), (np.int64(2), 2), (np.uint8(2), 2)),
    "max_grad_norm": ((None, None), (1, 1.0), (np.float32(0.5), 0.5), (np.int32(2), 2.0)),
    "max_grad_value": ((None, None), (1, 1.0), (np.float32(0.5), 0.5)),
    "seed": ((None, None), (0, 0), (2**64 - 1, 2**64 - 1), (np.int32(5), 5)),
    "verify": ((True, True), (np.False_, False)),
    "memory_budget": (
        (None, None), (2, 2), (1.0, 1.0), (1e-9, 1e-9), (np.float32(0.5), 0.5), ("2GB", "2GB"),
    ),
    "auto_micro_batch": ((True, True), (False, False), (np.bool_(True), True)),
    "recompute": (("auto", "auto"), ("layers", "layers"), ("none", "none")),
    "skip_nonfinite": ((True, True), (False, False), (np.bool_(False), False)),
    "max_skipped_updates": ((None, None), (1, 1), (np.int64(8), 8)),
    "loss_spikes": ((None, None), ("warn", "warn"), ("skip", "skip"), ("raise", "raise")),
    "loss_spike_threshold": ((6, 6.0), (np.float32(0.5), 0.5), (np.int32(2), 2.0)),
    "strict": ((True, True), (False, False), (np.bool_(True), True)),
    "mixed_precision": (
        ("no", "no"), ("bf16", "bf16"), ("auto", "auto"), (None, "no"), (False, "no"),
        ("fp16", "fp16"),
    ),
    "loss_scale": (
        ("dynamic", LossScale()), (LossScale(), LossScale()), ({}, LossScale()),
        ({"init_scale": 2**16}, LossScale()),
    ),
    "mesh": (
        (None, None), ("auto", "auto"), ({"dp_replicate": 1}, {"dp_replicate": 1}),
        ({"dp_replicate": np.int64(1), "tp": 1}, {"dp_replicate": 1, "tp": 1}),
        ({"dp_replicate": 1, "dp_shard": 1}, {"dp_replicate": 1, "dp_shard": 1}),
        ({"cp": 1, "tp": 1}, {"cp": 1, "tp": 1}),
    ),
    "zero": ((0, 0), (np.int64(0), 0)),
    "adasum": ((False, False), (np.False_, False)),
    "sequence_parallel": ((False, False), (np.False_, False)),
    "context_parallel_method": tuple(
        (name, name) for name in ("auto", "allgather", "alltoall", "ring")
    ),
    "pipeline_schedule": tuple(
        (name, name) for name in ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble")
    ),
    "pipeline_microbatches": ((None, None), (1, 1), (np.int64(9), 9)),
    "compare_ranks_every": ((None, None), (1, 1), (np.int64(9), 9)),
    "ranks_timeout": ((None, None), (1, 1.0), (np.float32(2.5), 2.5), (1e6, 1e6)),
    "optimizer_state": (("fp32", "fp32"), ("bf16", "bf16"), ("8bit", "8bit")),
    "offload_optimizer": ((None, None), ("cpu", "cpu")),
    "offload_dir": ((None, None),),
    "gradient_accumulation_dtype": (("fp32", "fp32"), ("bf16", "bf16")),
    "gradient_accumulation_average": (("auto", "auto"), ("labels", "labels")),
    "ema_decay": ((None, None), (0.5, 0.5), (np.float64(0.25), 0.25)),
    "keep_in_fp32": (("lm_head", ("lm_head",)), (["a.*", "Gemm"], ("a.*", "Gemm")), ((), ())),
    "disable": (
        ("noop", ("noop",)), (" noop , gemm_add,", ("noop", "gemm_add")),
        (["noop", "noop"], ("noop",)),
        ({"noop"}, ("noop",)), ("", ()), ((), ()), ((x for x in ("noop",)), ("noop",)),
        ("row_demand", ("row_demand",)),
    ),
    "fetch": (("logits", ("logits",)), (["a", "b", "a"], ("a", "b")), ((), ())),
}  # fmt: skip

SWITCHES = switches()


def trainer_with(**options: Any) -> onward.Trainer:
    optimizer = onward.optim.AdamW() if "optimizer_state" in options else onward.optim.SGD()
    return onward.Trainer(mlp(), optimizer, loss_fn, options=TrainerOptions(**options))


def one_line(error: pytest.ExceptionInfo[BaseException]) -> str:
    text = str(error.value)
    assert type(error.value) is OnwardError
    assert "\n" not in text and "fix: " in text and len(text) < 640, text
    return text


def test_every_option_is_in_the_tables() -> None:
    names = [f.name for f in dataclasses.fields(TrainerOptions)]
    assert list(WRONG) == list(RIGHT) == names


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_of_an_option_are_refused_by_name(name: str) -> None:
    for value in WRONG[name]:
        try:
            trainer_with(**{name: value})
        except OnwardError as error:
            text = str(error)
            assert name in text and "fix: " in text and "\n" not in text, text
        else:
            pytest.fail(f"{name}={value!r} was accepted")


@pytest.mark.parametrize("name", RIGHT)
def test_values_that_can_be_meant_are_read_as_they_are_meant(name: str) -> None:
    for given, meant in RIGHT[name]:
        options = trainer_with(**{name: given}).options
        found = getattr(options, name)
        assert found == meant and type(found) in (type(meant), type(given)), given


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("dynamic", LossScale()), (1024, 1024.0), (np.float32(0.5), 0.5), (2.0**-126, 2.0**-126),
        (2.0**126, 2.0**126), (np.int64(8), 8.0), (LossScale(4), LossScale(4.0)),
        ({"init_scale": np.float64(2)}, LossScale(2.0)),
        ({"growth_interval": np.int32(7)}, LossScale(growth_interval=7)),
        ({"growth_factor": 1.5, "backoff_factor": 0.75}, LossScale(2.0**16, 1.5, 0.75)),
    ],
)  # fmt: skip
def test_loss_scales_of_fp16(given: Any, meant: Any) -> None:
    options = trainer_with(mixed_precision="fp16", loss_scale=given).options
    assert options.loss_scale == meant == options.scaling
    assert type(options.loss_scale) is type(meant)
    assert dataclasses.replace(options, seed=3).scaling == meant


@pytest.mark.parametrize("precision", ["no", "bf16", "auto"])
@pytest.mark.parametrize("scale", [1.0, 1024.0, LossScale(4.0), {"growth_interval": 7}])
def test_a_loss_scale_without_fp16_is_refused(precision: str, scale: Any) -> None:
    with pytest.raises(OnwardError) as error:
        trainer_with(mixed_precision=precision, loss_scale=scale)
    assert f"mixed_precision={precision!r}" in one_line(error)
    assert trainer_with(mixed_precision=precision).options.scaling is None


@pytest.mark.parametrize("scale", ["dynamic", LossScale(4.0)])
def test_a_scale_that_moves_needs_updates_that_may_be_left_out(scale: Any) -> None:
    with pytest.raises(OnwardError) as error:
        trainer_with(mixed_precision="fp16", loss_scale=scale, skip_nonfinite=False)
    assert "skip_nonfinite=False" in one_line(error)
    assert trainer_with(mixed_precision="fp16", loss_scale=8, skip_nonfinite=False).options.scaling


def test_options_from_a_dict() -> None:
    trainer = onward.Trainer(
        mlp(), onward.optim.SGD(), loss_fn, options={"seed": 3, "disable": "noop"}
    )
    assert trainer.options == TrainerOptions(seed=3, disable=("noop",))
    assert onward.Trainer(mlp(), onward.optim.SGD(), loss_fn, options={}).options == (
        TrainerOptions()
    )
    with pytest.raises(OnwardError) as error:
        onward.Trainer(mlp(), onward.optim.SGD(), loss_fn, options={"sed": 3, "max_norm": 1.0})
    text = one_line(error)
    assert "'sed' (did you mean seed?)" in text and "'max_norm' (did you mean max_grad_norm?)" in (
        text
    )


# ---- names of passes


def test_the_names_that_may_be_switched_off_are_all_passes_and_row_demand() -> None:
    passes = {p.name for p in (*FORWARD, *PRECISION, *STEP, *halves())} | {row_demand.__name__}
    assert set(SWITCHES) == passes and len(SWITCHES) == len(passes)
    assert switched_off(SWITCHES) == passes


@pytest.mark.parametrize("through", ["option", "environment"])
def test_unknown_passes_are_one_error_with_close_names(
    through: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = "flash_atention,noop,zzz,Row_demand"
    if through == "environment":
        monkeypatch.setenv("ONWARD_DISABLE", names)
    with pytest.raises(OnwardError) as error:
        trainer_with(disable=names if through == "option" else ())
    text = str(error.value)
    assert "\n" not in text
    where = "disable" if through == "option" else "ONWARD_DISABLE"
    assert text.startswith(f"unknown pass in {where}: ")
    assert "'flash_atention' (did you mean flash_attention" in text
    assert "'Row_demand' (did you mean row_demand" in text and "'zzz'," in text
    assert "'noop'" not in text
    assert all(name in text.partition("fix: ")[2] for name in SWITCHES)


def test_a_pass_named_in_a_string_does_not_run() -> None:
    trainer = trainer_with(disable="noop, gemm_add")
    trainer.train_step(X, Y)
    run = {p["name"] for p in trainer.report()["passes"]}
    # halves; precision
    elsewhere = {"linear_cross_entropy_ahead", "kept_biases", "low_attention", "move_casts"}
    assert run == set(SWITCHES) - {"noop", "gemm_add"} - elsewhere


# ---- arguments


def described(inputs: Any) -> dict[str, Any]:
    return {"model_desc": {"inputs": inputs}}


ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "model: a class": ({"model": nn.Linear}, "model is the class Linear"),
    "model: a function": ({"model": lambda x: x}, "model is function"),
    "model: None": ({"model": None}, "model is NoneType"),
    "optimizer: a name": ({"optimizer": "adamw"}, "optimizer"),
    "optimizer: a class": ({"optimizer": torch.optim.AdamW}, "optimizer"),
    "optimizer: our class": ({"optimizer": onward.optim.AdamW}, "optimizer"),
    "optimizer: None": ({"optimizer": None}, "optimizer"),
    "loss_fn: a name": ({"loss_fn": "mse"}, "loss_fn is 'mse'"),
    "loss_fn: a class": ({"loss_fn": nn.CrossEntropyLoss}, "loss_fn is <class"),
    "loss_fn: a tensor": ({"loss_fn": torch.ones(2)}, "loss_fn is tensor"),
    "options: text": ({"options": "seed=1"}, "options is 'seed=1'"),
    "options: a class": ({"options": TrainerOptions}, "options is <class"),
    "options: False": ({"options": False}, "options is False"),
    "verify: a number": ({"verify": 1}, "verify=1"),
    "verify: text": ({"verify": "no"}, "verify='no'"),
    "model_desc: text": ({"model_desc": "x"}, "model_desc"),
    "model_desc: empty": ({"model_desc": {}}, "model_desc"),
    "model_desc: typo": ({"model_desc": {"inputs": [], "output": []}}, "did you mean outputs"),
    "model_desc: a name": (described("x"), "model_desc['inputs'] is a str"),
    "model_desc: no shape": (described([("x",)]), "model_desc lists"),
    "model_desc: no name": (described([(1, ["b"])]), "model_desc lists"),
    "model_desc: a number": (described([("x", 3)]), "model_desc lists"),
    "model_desc: a half": (described([("x", [1.5])]), "model_desc lists"),
    "model_desc: four": (described([("x", ["b"], "f32", True)]), "model_desc lists"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_wrong_arguments_are_refused_by_name(case: str) -> None:
    changed, words = ARGUMENTS[case]
    given = {"model": mlp(), "optimizer": onward.optim.SGD(), "loss_fn": loss_fn, **changed}
    with pytest.raises(OnwardError) as error:
        onward.Trainer(**given)
    assert words in one_line(error)


@pytest.mark.parametrize("fetch", [3, None, b"x", [1], "", {"a": 1}])
@pytest.mark.parametrize("method", ["train_step", "eval_step", "explain"])
def test_what_to_fetch_is_checked_where_it_is_given(method: str, fetch: Any) -> None:
    trainer = trainer_with()
    with pytest.raises(OnwardError, match="fetch"):
        getattr(trainer, method)(X, Y, fetch=fetch)
    assert trainer.updates == trainer.micro_steps == 0


def test_a_string_names_one_output() -> None:
    model = mlp()
    options = TrainerOptions(fetch="output")
    trainer = onward.Trainer(model, onward.optim.SGD(lr=0.0), loss_fn, options=options)
    expected = model(X).detach()
    for found in (
        trainer.train_step(X, Y),
        trainer.train_step(X, Y, fetch="output"),
        trainer.train_step(X, Y, fetch=["output"]),
        trainer.eval_step(X, Y, fetch="output"),
    ):
        assert list(found.outputs) == ["output"]
        torch.testing.assert_close(found.outputs["output"], expected)
    with pytest.raises(OnwardError, match="the output 'logits'"):
        trainer.eval_step(X, Y, fetch="logits")


# ---- variables

VALUES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # refused, taken
    "ONWARD_DUMP": (("FILE",), ("", "FOLDER", "NEW")),
    "ONWARD_DISABLE": (
        ("noopp", "noop;gemm_add", "noop, nope"),
        ("", "noop", " noop , gemm_add ,"),
    ),
    "ONWARD_CHECK": (("yes", "true", "2", " "), ("", "0", "1")),
    "ONWARD_NATIVE": (("bogus", "1", "AVX2", "sse"), ("", "0", "plain")),
    "ONWARD_BLAS": (("bogus", "MKL", "accelerate", "1"), ("", "torch")),
    "ONWARD_CACHE": (("FILE",), ("", "FOLDER", "NEW")),
    "ONWARD_GRAPH_CACHE": (("off", "no", "2"), ("", "0", "1")),
    "ONWARD_NATIVE_FOLDER": (("FILE", "NEW"), ("",)),
}


@pytest.fixture
def set_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, str], None]:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()

    def choose(name: str, value: str) -> None:
        at = tmp_path / value.lower() if value in ("FILE", "FOLDER", "NEW") else value
        monkeypatch.setenv(name, str(at))
        native.library.cache_clear()

    return choose


def test_every_variable_is_in_the_table_and_described() -> None:
    assert set(VALUES) == set(VARIABLES)
    assert set(re.findall(r"ONWARD_\w+", Environment.__doc__ or "")) == set(VARIABLES)


@pytest.mark.parametrize("name", VALUES)
def test_wrong_values_of_a_variable_are_refused_by_name(
    name: str, set_variable: Callable[[str, str], None]
) -> None:
    refused, taken = VALUES[name]
    for value in refused:
        set_variable(name, value)
        with pytest.raises(OnwardError, match=name):
            trainer_with()
    for value in taken:
        set_variable(name, value)
        trainer_with()
    native.library.cache_clear()


@pytest.mark.parametrize("typo", ["ONWARD_DISABEL", "ONWARD_NATIV", "ONWARD_CHECKS"])
def test_a_misspelt_variable_is_told(typo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(typo, "1")
    with pytest.raises(OnwardError, match=f"variable {typo}; fix: did you mean ONWARD_"):
        trainer_with()


def test_a_user_without_a_home_names_a_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def unknown(uid: int) -> Any:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "ONWARD_CACHE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(OnwardError, match=r"no home folder; fix: set ONWARD_CACHE"):
        environment()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert environment().cache == tmp_path / "onward"
    monkeypatch.setenv("ONWARD_CACHE", str(tmp_path / "own"))
    assert environment().cache == tmp_path / "own"


def test_a_build_that_is_not_there_is_refused_not_called_uncompiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    native.library.cache_clear()
    monkeypatch.setenv("ONWARD_NATIVE", "avx2")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    with pytest.raises(OnwardError, match=r"ONWARD_NATIVE=avx2 .*has DEFAULT.*fix: one of 0, pla"):
        native.library()
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    with pytest.raises(OnwardError, match="installed without a C"):
        native.library()
    (tmp_path / "plain.abi3.so").touch()
    with pytest.raises(OnwardError, match="built are: plain"):
        native.library()
    native.library.cache_clear()


def test_an_engine_asked_for_by_name_is_had_or_refused(
    build: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no native kernel could call it."""
    build("0")
    monkeypatch.setenv("ONWARD_BLAS", "mkl")
    with pytest.raises(OnwardError, match="ONWARD_BLAS=mkl is not available; fix: one of torch"):
        forced()
    with pytest.raises(OnwardError, match="ONWARD_BLAS=mkl is not available"):
        trainer_with()
