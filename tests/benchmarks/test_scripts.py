"""Each script as it is run by hand, with `--quick`, into a folder of the test's."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from onward.cli import main

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CASES_OF_FAMILIES = re.findall(
    r'Case\("([^"]+)"', (BENCHMARKS / "suite/cases.py").read_text().partition("FAMILIES = (")[2]
    .partition("\n)")[0],
)  # fmt: skip
SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob("*.py"))

HEAD = {"title": str, "command": str, "machine": dict}
MACHINE = {
    "date": str, "cpu": str, "capability": str, "cores": int, "threads": int, "memory_bytes": int,
    "load_before": float, "system": str, "python": str, "versions": dict, "commit": str,
}  # fmt: skip
MEASURED = {
    "about": str, "seconds": list, "losses": list, "first_step_s": float, "first_loss": float,
    "first_step_peak_bytes": int, "step_s": float, "round_s_min": float, "round_s_max": float,
    "tokens_per_s": float, "peak_step_bytes": int,
}  # fmt: skip
OF_ONWARD = {
    "compile_seconds": dict, "predicted_peak_bytes": int, "launches": int, "pass_edits": dict,
    "native": str, "arena_bytes": int,
}  # fmt: skip
CASE = {"name": str, "model": str, "batch": int, "tokens": int, "about": str, "size": str}


class Done(NamedTuple):
    code: int
    out: str
    err: str
    folder: Path

    def report(self, stem: str) -> dict[str, Any]:
        """The JSON of this name, its head checked, with the text beside it."""
        assert self.code == 0, self.out[-2000:] + self.err[-2000:]
        (path,) = self.folder.glob(f"{stem}-quick-????-??-??.json")
        found = json.loads(path.read_text(encoding="utf-8"))
        check(found, HEAD)
        check(found["machine"], MACHINE)
        assert found["command"].startswith("python benchmarks/")
        assert str(self.folder.parent) not in json.dumps(found), "a path of this machine"
        assert path.with_suffix(".md").read_text(encoding="utf-8") in self.out + "\n"
        return found


def check(found: dict[str, Any], schema: dict[str, type]) -> None:
    """Each key is there, of its type; numbers are finite."""
    for key, kind in schema.items():
        assert isinstance(found[key], (kind, int) if kind is float else kind), key
        if kind in (int, float):
            assert math.isfinite(found[key]) and found[key] >= 0, key


def run(folder: Path, script: str, *arguments: str) -> Done:
    found = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{script}.py"), *arguments, "--out", str(folder)],
        # A thread of each pool is enough here, and what is measured per machine is kept apart.
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=900.0, check=False,
    )  # fmt: skip
    return Done(found.returncode, found.stdout, found.stderr, folder)


@pytest.fixture(autouse=True)
def committed_results() -> Iterator[None]:
    """No script of these tests touches what is committed."""
    before = {path: path.stat().st_mtime_ns for path in (BENCHMARKS / "results").iterdir()}
    yield
    assert before == {path: path.stat().st_mtime_ns for path in (BENCHMARKS / "results").iterdir()}


def check_case(found: dict[str, Any], engines: set[str], steps: int) -> None:
    """Every engine ran all its steps, and the losses agree with eager's."""
    check(found["case"], CASE)
    assert set(found["engines"]) == engines
    for name, entry in found["engines"].items():
        assert "error" not in entry, f"{name}: {entry.get('error')}"
        check(entry, MEASURED)
        assert len(entry["losses"]) == steps == sum(map(len, entry["seconds"]))
        assert min(entry["losses"]) > 0
        assert entry["round_s_min"] <= entry["step_s"] <= entry["round_s_max"]
        if name.startswith("onward"):
            check(entry, OF_ONWARD)
            assert entry["launches"] > 50 < entry["predicted_peak_bytes"]
            assert entry["arena_bytes"] > 0
    assert found["checks"]["passed"]


def check_levels(found: dict[str, Any], engines: set[str]) -> None:
    assert set(found["checks"]["level_difference"]) == engines
    assert set(found["checks"]["exact_difference"]) == engines
    assert found["checks"]["exact_difference"]["onward"] <= found["checks"]["exact_tolerance"]


# ---- whole steps


def check_cpu(done: Done, engines: set[str]) -> None:
    report = done.report("cpu")
    assert report["skipped"] == []
    (found,) = report["cases"]
    assert found["case"]["model"] == "tutorial"
    check_case(found, engines, steps=2 * 12)
    check_levels(found, engines)
    limit = found["limit"]
    assert limit["flops"] > 0 and limit["limit_s"] == pytest.approx(
        limit["flops"] / limit["best_gflops"] / 1e9
    )
    assert set(limit["gflops"]) == {"torch.mm", "openblas", "openblas, rows split"}
    for entry in found["engines"].values():
        assert 0 < entry["limit_share"] == pytest.approx(limit["limit_s"] / entry["step_s"])


@pytest.mark.slow
def test_cpu(tmp_path: Path) -> None:
    arguments = ["--cases", "tutorial", "--engines", "eager,onward", "--no-largest-batch"]
    check_cpu(run(tmp_path, "cpu", "--quick", *arguments), {"eager", "onward"})


@pytest.mark.slow
def test_cpu_with_every_engine(tmp_path: Path) -> None:
    done = run(tmp_path, "cpu", "--quick", "--cases", "tutorial")
    check_cpu(done, {"eager", "eager-tuned", "compile", "compile-tuned", "onward"})
    (found,) = done.report("cpu")["cases"]
    assert set(found["largest_batch"]) == {"eager", "onward"}
    for searched in found["largest_batch"].values():
        check(searched, {"limit_bytes": int, "batch": int, "complete": bool, "peaks": dict})
        assert all(peak > 0 for peak in searched["peaks"].values())


@pytest.mark.slow
def test_families(tmp_path: Path) -> None:
    """A tiny Llama; what it does is seen in its losses."""
    done = run(tmp_path, "families", "--quick", "--engines", "eager,onward", "--cases", "Llama")
    report = done.report("families")
    (found,) = report["cases"]
    check_case(found, {"eager", "onward"}, steps=2 * 2)
    check_levels(found, {"eager", "onward"})


@pytest.mark.slow
def test_mixed_precision(tmp_path: Path) -> None:
    """Losses of Onward in bf16 are eager's under autocast."""
    engines = ("eager", "onward")
    arguments = ["--engines", ",".join(engines), "--cases", "tutorial"]
    done = run(tmp_path, "mixed_precision", "--quick", *arguments)
    (found,) = done.report("mixed_precision")["cases"]
    assert found["case"]["precision"] == "bf16"
    check_levels(found, set(engines))
    assert done.code == 0, done.out[-1000:]


@pytest.mark.slow
def test_families_of_every_kind(tmp_path: Path) -> None:
    """No engine fails on one: a tiny form of each is trained and its losses compared."""
    for name in CASES_OF_FAMILIES:
        done = run(tmp_path, "families", "--quick", "--engines", "eager,onward", "--cases", name)
        assert done.code == 0, (name, done.out[-1000:])


@pytest.mark.slow
def test_gpu_on_the_cpu(tmp_path: Path) -> None:
    """A second run measures no case again; one with other settings does."""
    arguments = ["--quick", "--device", "cpu", "--engines", "eager,onward", "--profile"]
    sizes = ["--rounds", "2", "--steps", "4"]
    report = run(tmp_path, "gpu", *arguments, *sizes).report("gpu-script-on-cpu")
    (found,) = report["cases"]
    slowest = found["engines"]["onward"].pop("slowest")
    check_case(found, {"eager", "onward"}, steps=2 * 4)
    assert set(found["checks"]["level_difference"]) == {"eager", "onward"}
    assert len(slowest) == 10 and slowest[0]["seconds"] >= slowest[-1]["seconds"] > 0
    assert sum(one["flops"] for one in slowest) > 0 < sum(one["bytes"] for one in slowest)
    again = run(tmp_path, "gpu", *arguments, *sizes).report("gpu-script-on-cpu")
    seconds = [r["cases"][0]["engines"]["eager"]["seconds"] for r in (report, again)]
    assert seconds[0] == seconds[1]
    other = run(tmp_path, "gpu", *arguments, "--rounds", "2", "--steps", "3")
    assert (
        other.report("gpu-script-on-cpu")["cases"][0]["engines"]["eager"]["seconds"] != seconds[0]
    )


@pytest.mark.slow
def test_ablation(tmp_path: Path) -> None:
    (found,) = run(tmp_path, "ablation", "--quick").report("ablation")["cases"]
    assert found["skipped"] == found["unknown"] == []
    parts = {"flash_attention", "native kernels", "own BLAS"} - set(found["no_edit"])
    assert set(found["variants"]) == {"everything on", *parts}
    for entry in found["variants"].values():
        check(entry, MEASURED | OF_ONWARD)
        assert entry["loss_difference"] <= 1e-4
    assert found["variants"]["native kernels"]["native"] == "none"


@pytest.mark.slow
def test_row_demand(tmp_path: Path) -> None:
    done = run(tmp_path, "row_demand", "--quick")
    report = done.report("row_demand")
    (headline,), (full,) = report["cases"], report["full"]
    engines = {"eager", "eager-tuned", "eager-labels", "eager-unpad", "onward", "onward-without"}
    check_case(headline, engines, steps=2 * 3)
    check_levels(headline, engines)
    assert headline["engines"]["onward"]["loss_difference"] <= 1e-4
    assert 0.3 < min(headline["rows"]["real"]) < max(headline["rows"]["real"]) < 0.7
    check_case(full, {"onward", "onward-without"}, steps=4 * 3)
    assert full["overhead"]["rounds"] == 4
    assert [found["steps"] for found in report["paired"]] == [2 * 4 * 5]
    (varying,) = report["varying"]
    for entry in varying["engines"].values():
        assert entry["summary"]["steps"] == len(entry["steps"]) == 10
        assert entry["summary"]["sizes"] > 1
    assert (done.folder / "row_demand-bert_padded.svg").read_text().startswith("<svg")


@pytest.mark.slow
def test_reliability(tmp_path: Path) -> None:
    found = run(tmp_path, "reliability", "--quick", "--only", "spikes").report("reliability")
    report = found["loss spikes"]
    assert [alarms["threshold"] for alarms in report["alarms"]] == [8.0]
    bits, labels = report["found"]
    assert bits["tried"] == labels["tried"] == labels["found"] + len(labels["missed"]) == 4
    assert labels["found"] > 0


@pytest.mark.slow
def test_faults(tmp_path: Path) -> None:
    """Rows that are measured one after the other stand in one report; Onward keeps each promise."""
    for name in ("R12", "R6", "R32", "R34"):
        arguments = ["--only", name, "--systems", "Onward", "--merge"]
        report = run(tmp_path, "reliability", "--quick", *arguments).report("reliability")
        for line in report["rows"][name]["lines"]:
            cell = line["cells"]["Onward"]
            assert cell["good"] == cell["tried"] and not cell["bad"], (name, line)
            assert cell["tried"] or cell["text"]
    assert list(report["rows"]) == ["R12", "R6", "R32", "R34"]


@pytest.mark.slow
def test_convergence(tmp_path: Path) -> None:
    report = run(tmp_path, "convergence", "--quick").report("convergence")
    assert set(report["runs"]) == {"eager", "onward", "eager, other masks"}
    for runs in report["runs"].values():
        (made,) = runs
        assert len(made["train_losses"]) == report["size"]["steps"]
        assert made["eval_loss"] < made["before"]
    assert abs(report["compared"]["onward"]["mean_difference"]) <= 0.005
    assert set(report["exact"]) == {"eager", "onward"}
    assert max(report["exact"]["onward"]) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_convergence_in_mixed_precision(tmp_path: Path, precision: str) -> None:
    found = run(tmp_path, "convergence", "--quick", "--precision", precision)
    report = found.report(f"convergence-{precision}")
    low = [f"{name}, {precision}" for name in ("eager", "onward", "accelerated")]
    assert list(report["runs"]) == ["eager", *low]
    for name in low:
        (made,) = report["runs"][name]
        assert made["eval_loss"] < made["before"]
        assert made["train_losses"] != report["runs"]["eager"][0]["train_losses"]


# ---- single questions


@pytest.mark.slow
def test_kernels(tmp_path: Path) -> None:
    report = run(tmp_path, "kernel_times", "--quick").report("kernels")
    assert [found["name"] for found in report["cases"]] == ["GPT-2, 4 layers", "other calls"]
    calls = report["cases"][0]["calls"]
    assert {"step", "evaluation", "step, nothing fused", "step, clipped"} == {
        call["origin"] for call in calls
    }
    assert {"Gemm", "FlashAttention", "LinearCrossEntropyStep"} <= {call["op"] for call in calls}
    for call in calls:
        assert call["results"], call["op"]
        for result in call["results"]:
            assert "error" not in result, (call["op"], result)
            assert 0 < result["best"] <= result["median"]
            assert result["difference"] < 1e-3, (call["op"], call["operands"], result)
            assert result["bytes"] > 0 < result["of_ceiling"]
    assert min(report["copy_bytes_per_s"].values()) > 0 < report["product_gflops"]


def test_portable_training(tmp_path: Path) -> None:
    """Measures Onward alone: onnxsim is not installed here."""
    report = run(tmp_path, "portable_training", "--quick").report("portable_training")
    assert [row["model"] for row in report["rows"]] == ["MLP", "GPT-2"]
    for row in report["rows"]:
        ours = row["onward"]["as it is"]
        assert ours["difference"] < 1e-5 and ours["steps_per_s"] > 0 and ours["built_s"] > 0


@pytest.mark.slow
def test_limit(tmp_path: Path) -> None:
    limit = run(tmp_path, "limit", "tutorial", "--quick").report("limit")["limit"]
    head = [p for p in limit["products"] if "1000" in p["product"]]
    # forward, and the gradients of both operands: 2 sequences of 32 tokens, 32 wide, 1000 words
    assert sum(p["count"] for p in head) == 3
    assert {p["flops"] for p in head} == {2 * 64 * 32 * 1000}


@pytest.mark.slow
def test_largest_batch(tmp_path: Path) -> None:
    arguments = ["--model", "tutorial", "--engine", "eager", "--limit", "1e12", "--seconds", "25"]
    report = run(tmp_path, "largest_batch", "--quick", *arguments).report("largest_batch")
    found = report["found"]
    assert not found["complete"], "no batch passes 1 TB"
    assert found["batch"] == max(map(int, found["peaks"])) >= 2
    peaks = [peak for _, peak in sorted((int(n), peak) for n, peak in found["peaks"].items())]
    assert all(2e7 < peak < 1e12 for peak in peaks)


@pytest.mark.slow
def test_large_model(tmp_path: Path) -> None:
    report = run(tmp_path, "large_model", "--quick", "--steps", "3").report("large_model")
    losses = [row["loss"] for row in report["steps"]]
    assert len(losses) == 3 and all(4 < loss < 8 for loss in losses)
    assert report["eager_state_bytes"] == 16 * report["parameters"]
    assert report["predicted_bytes"] >= sum(report["kinds"].values()) > 6 * report["parameters"]
    assert 0 < report["measured_bytes"] < report["process_peak_bytes"]


@pytest.mark.slow
def test_gpu_memory(tmp_path: Path) -> None:
    cases = run(tmp_path, "gpu_memory", "--quick").report("gpu_memory")["cases"]
    assert {case["precision"] for case in cases} == {"fp32", "bf16"}
    for case in cases:
        assert 0 < case["onward"] < case["eager"] and case["largest"]["eager"] > case["batch"]


@pytest.mark.slow
def test_gpu_time(tmp_path: Path) -> None:
    [case] = run(tmp_path, "gpu_time", "--quick").report("gpu_time")["cases"]
    predicted = case["predicted"]
    assert predicted["onward"]["launches"] < predicted["eager"]["launches"]
    assert predicted["eager_step"] > 0 and predicted["step"] is None


@pytest.mark.slow
def test_recompute(tmp_path: Path) -> None:
    report = run(tmp_path, "recompute", "0.8", "0.01", "--quick").report("recompute")
    whole, less, least = report["rows"]
    assert (whole["budget"], less["budget"], least["budget"]) == (1.0, 0.8, 0.01)
    assert less["peak_bytes"] <= 0.8 * whole["peak_bytes"]
    assert less["launches"] > whole["launches"]
    assert less["first_loss"] == pytest.approx(whole["first_loss"], rel=1e-6)
    assert "memory_budget" in least["error"] and "step_s" not in least


def test_simulator(tmp_path: Path) -> None:
    report = run(tmp_path, "simulator", "--quick").report("simulator")
    assert set(report["constants"]) == {"a100", "h100"}
    assert len(report["steps"]) >= 10 and len(report["memory"]) > 20
    for row in report["steps"]:
        assert row["error"] == pytest.approx(row["predicted_s"] / row["measured_s"] - 1)
        assert 0 < row["mfu"] < 1


def test_scaling_on_paper(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows are what the command prints first."""
    rows = run(tmp_path, "scaling_on_paper", "--quick").report("scaling_on_paper")["scaling"]
    assert [(row["model"], row["ranks"]) for row in rows] == [("bert-large", 8), ("bert-large", 64)]
    for row in rows:
        words = ["--model", row["model"], "--ranks", str(row["ranks"]), "--batch", "8192"]
        assert main(["simulate", "h100", *words, "--top", "1", "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out)
        assert (found["seconds"], found["goodput"]) == (row["seconds"], row["goodput"])
        assert found["memory_bytes"]["total"] == row["memory_bytes"]


@pytest.mark.slow
def test_tasks(tmp_path: Path) -> None:
    report = run(tmp_path, "tasks", "--quick", "--cases", "text-classification").report("tasks")
    (found,) = report["tasks"].values()
    assert [each["engine"] for each in found["engines"]] == ["onward", "torch"]
    assert found["max_relative_loss_difference"] < 1e-4
    assert found["baseline"]["metric"] in found["engines"][0]["scores"]


@pytest.mark.slow
def test_onnx_session(tmp_path: Path) -> None:
    ran = run(tmp_path, "onnx_session", "--quick", "--pairs", "3", "--models", "bert")
    rows = ran.report("onnx_session")["rows"]
    assert {row["exporter"] for row in rows} >= {"torchscript"}
    for row in rows:
        assert row["losses"][0] == pytest.approx(row["losses"][1], rel=1e-5)
        assert all(seconds > 0 for seconds in (*row["first"], *row["seconds"], row["open"]))
        alike = {"FlashAttention", "AddLayerNormalization", "BiasActivation", "AdamUpdate"}
        assert not alike & row["ops"].keys(), "fused as the module's are"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("keras_hub") is None, reason="keras_hub is missing")
def test_keras_fit(tmp_path: Path) -> None:
    rows = run(tmp_path, "keras_fit", "--quick").report("keras_fit")["rows"]
    assert {row["model"] for row in rows} == {"gpt2", "bert", "layers"}
    for row in rows:
        assert row["losses"]["onward"] == pytest.approx(row["losses"]["keras"], rel=0.05)
        assert all(seconds > 0 for seconds in (*row["first"].values(), *row["seconds"].values()))


@pytest.mark.slow
def test_first_step(tmp_path: Path) -> None:
    report = run(tmp_path, "first_step", "--quick").report("first_step")
    cold, warm = report["first"]
    assert (cold["kind"], warm["kind"]) == ("cold", "warm")
    for found in (cold, warm):
        assert sum(found["parts"].values()) == pytest.approx(found["seconds"])
        assert found["parts"]["capture"] > 0
    assert cold["parts"]["rewrite and differentiate"] > 0
    assert warm["parts"]["rewrite and differentiate"] == 0
    assert [row["layers"] for row in report["depths"]] == [12, 24]
    assert all(row["stages"]["differentiate"] > 0 for row in report["depths"])
    assert report["memory"]["parameter_bytes"] == 4 * report["memory"]["parameters"] > 0


@pytest.mark.slow
def test_module_overhead(tmp_path: Path) -> None:
    sizes = run(tmp_path, "module_overhead", "--quick").report("module_overhead")["sizes"]
    assert [size["layers"] for size in sizes] == [4, 12]
    for size in sizes:
        assert size["parameters"] == 12 * size["layers"] + 4
        for kind in ("least", "median"):
            found = size[kind]
            assert found["beyond"] == pytest.approx(found["whole"] - found["launches"])
            assert all(found[name] > 0 for name in ("eager", "autograd", "guards", "within"))


def test_pools(tmp_path: Path) -> None:
    rows = run(tmp_path, "pools", "--quick").report("pools")["rows"]
    assert {"torch.mm", "numpy's own threads"} <= {row["caller"] for row in rows}
    for row in rows:
        assert row["alone_s"] > 0 and row["difference"] < 1e-5


@pytest.mark.slow
def test_busy(tmp_path: Path) -> None:
    rows = run(tmp_path, "busy", "--quick").report("busy")["rows"]
    assert [row["condition"].partition(",")[0].partition(" of the ")[0] for row in rows][:6] == [
        "idle", "beside one program that spins", "beside two programs that spin",
        "beside products on all cores", "idle again", "idle",
    ]  # fmt: skip
    assert len(rows) == 7 and ("quota" in rows[6]["condition"])
    for row in rows:
        assert len(row["eager_s"]) == len(row["onward_s"]) == 2
        assert min(*row["eager_s"], *row["onward_s"]) > 0


@pytest.mark.slow
def test_twin_bert(tmp_path: Path) -> None:
    words = ["--rounds", "1", "--steps", "2", "--engines", "ddp-zero,onward-zero"]
    report = run(tmp_path, "twin_bert", "--quick", *words).report("twin_bert")
    assert report["agree"] and report["model"] == "twin bert"
    plain, onward = (report["engines"][name]["rounds"][0] for name in ("ddp-zero", "onward-zero"))
    for ours, theirs in zip(onward[0]["losses"], plain[0]["losses"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert report["engines"]["onward-zero"]["predicted"]["bytes"] > 0


@pytest.mark.slow
def test_distributed(tmp_path: Path) -> None:
    done = run(tmp_path, "distributed", "--quick", "--rounds", "1", "--engines", "ddp,onward-zero")
    report = done.report("distributed-2")
    assert report["agree"] and list(report["engines"]) == ["ddp", "onward-zero"]
    for held in report["engines"].values():
        [answers] = held["rounds"]
        assert [len(one["seconds"]) for one in answers] == [2, 2]
        assert answers[0]["losses"] == answers[1]["losses"] and answers[0]["carried_bytes"] > 0


def test_by_hand(tmp_path: Path) -> None:
    rows = run(tmp_path, "by_hand", "--quick", "--cases", "padded").report("by_hand")["rows"]
    assert [(row["case"], row["peer"]) for row in rows] == [
        ("BERT MLM, padded", "eager-labels"), ("BERT MLM, padded", "eager-unpad"),
        ("two towers, padded", "eager-unpad"),
    ]  # fmt: skip
    assert all(row["loss"] <= 1e-5 and row["gradient"] <= 1e-4 for row in rows)


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_chart(tmp_path: Path) -> None:
    """The newest committed reports can be drawn: one label per engine and case."""
    done = run(tmp_path, "chart", "--quick")
    assert done.code == 0, done.err
    source = json.loads(max((BENCHMARKS / "results").glob("cpu-2*.json")).read_text())
    drawn = (tmp_path / "cpu.svg").read_text(encoding="utf-8")
    for found in source["cases"]:
        assert f"<!-- {found['case']['name']} -->" in drawn
        for name, entry in found["engines"].items():
            assert f"<!-- {name} -->" in drawn
            assert re.search(rf"<!-- {1e3 * entry['step_s']:.0f} \(", drawn)
    assert "speed to torch.compile" in (tmp_path / "row_demand.svg").read_text(encoding="utf-8")


# ---- what is refused


def test_gpu_without_one(tmp_path: Path) -> None:
    done = run(tmp_path, "gpu", "--quick")
    assert done.code == 2
    assert done.err.splitlines() == [
        "gpu.py: no CUDA device here; fix: run it on a GPU, or --device cpu --quick"
    ]
    assert not done.out and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("script", "arguments", "says"),
    [
        ("cpu", ["--engines", "eager,warp"], "no such engine: warp; there are eager, eager-tuned,"),
        ("families", ["--cases", "Gemma 9"], "no such case: Gemma 9; there are Llama, Qwen3, ViT"),
        ("row_demand", ["--cases", "nobody"], "no such case: nobody; there are "),
        ("gpu", ["--engines", "warp"], "no such engine: warp; there are eager, compile, onward, "),
        pytest.param(
            "ablation", ["--parts", "luck"], "no such part: luck; there are constant_folding,",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "row_demand", ["--parts", "luck"], "no such part: luck; there are picture,",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "limit", ["warp"], "no such model: warp; there are gpt2_small, tutorial",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "recompute", ["1.5"], "no fraction between 0 and 1: 1.5", marks=pytest.mark.slow
        ),
        pytest.param(
            "convergence", ["--text", "missing.txt"], "missing.txt", marks=pytest.mark.slow
        ),
        pytest.param("chart", ["one.json"], "a source and a target", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_what_cannot_be_meant(tmp_path: Path, script: str, arguments: list[str], says: str) -> None:
    done = run(tmp_path, script, *arguments)
    assert done.code == 2
    assert says in done.err.splitlines()[-1]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_has_quick_and_out(tmp_path: Path, script: str) -> None:
    done = run(tmp_path, script, "--help")
    assert done.code == 0
    assert "--quick" in done.out and "--out" in done.out


def test_every_script_is_run_here() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert sorted(set(re.findall(r'run\(\s*tmp_path, "(\w+)"', text))) == SCRIPTS
