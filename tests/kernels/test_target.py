"""The one question about kernels, and what passes make of its answer."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import tiny
import torch
from op_cases import ONWARD_CASES, OpCase

from onward.differentiate import vjp
from onward.graph.build import Builder
from onward.graph.check import check
from onward.graph.evaluate import evaluate
from onward.graph.graph import ONWARD, Graph, Node, Role, Value, array_of, type_of
from onward.graph.types import DType, Type, parse_type, symbol
from onward.kernels import (
    KERNELS,
    TRITON,
    Kernel,
    KernelSpec,
    Rates,
    Refusal,
    Target,
    host,
    kernel_for,
)
from onward.kernels.fingerprint import fingerprint
from onward.kernels.gpus import rates_of_gpu
from onward.plan import Fusible, make_plan
from onward.plan.cost import seconds
from onward.plan.select import open_spec, select, spec_of
from onward.rewrite import FORWARD, STEP, Fusion, FusionPass, NearMiss, run, summary

pytestmark = pytest.mark.usefixtures("captures_kept")

NATIVE = Target(instructions="plain")
BARE = Target()
# fold_casts lets ops that are there read and write other types: tests/rewrite/test_precision.py
FUSIONS = {
    p.name: p for p in (*FORWARD, *STEP) if isinstance(p, FusionPass) and p.name != "fold_casts"
}


CASES = [case for case in ONWARD_CASES if case.op != "Rows"]  # whose result only a batch sizes


def called(target: Target) -> str:
    return f"{target.device}-{target.instructions}"


def node_of(case: OpCase, dtype: DType = DType.FLOAT) -> Node:
    return next(iter(case.graph(dtype)))


# ---- kernel_for


@pytest.mark.parametrize("target", [NATIVE, BARE, Target("cuda")], ids=called)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_first_kernel_that_applies_or_every_reason(case: OpCase, target: Target) -> None:
    spec = spec_of(node_of(case))
    found = kernel_for(spec, target)
    kernels = KERNELS.get(case.op, ())
    fitting = [k for k in kernels if not (k.where(target) or k.unsupported(spec) or k.faster(spec))]
    if fitting:
        assert found is fitting[0]
    else:
        assert isinstance(found, Refusal)
        named = [reason.partition(":")[0] for reason in found.reasons]
        assert named == [k.name for k in kernels] if kernels else len(found.reasons) == 1
        assert all(str(reason) in str(found) for reason in found.reasons)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sizes_that_are_names_change_no_answer(case: OpCase) -> None:
    """A kernel that fits at one size fits at all sizes above 0, since passes ask before sizes are
    known."""
    spec = spec_of(node_of(case))
    if any(0 in t.shape for t in (*spec.inputs, *spec.outputs) if t is not None):
        pytest.skip("a size of 0 is a case of its own")

    def named(t: Type) -> Type:
        return t.with_shape(symbol(f"N{n}") if isinstance(n, int) and n > 1 else n for n in t.shape)

    for kernel in KERNELS.get(case.op, ()):
        open_sizes = kernel.unsupported(spec.mapped(named))
        if kernel in TRITON.get(case.op, ()) and (open_sizes or "").startswith("an open "):
            continue  # numbers and widths of heads, which no batch changes, are compiled in
        assert open_sizes == kernel.unsupported(spec), kernel.name
    assert isinstance(kernel_for(spec.mapped(named), NATIVE), Kernel) == isinstance(
        kernel_for(spec, NATIVE), Kernel
    )


def test_what_was_measured_is_asked_only_where_sizes_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, *rest = KERNELS["Gelu"]
    slow = replace(first, faster=lambda spec: "another")
    monkeypatch.setitem(KERNELS, "Gelu", (slow, *rest))

    def gelu(text: str) -> KernelSpec:
        return KernelSpec("Gelu", {}, (parse_type(text),), (parse_type(text),))

    assert kernel_for(gelu("f32[B,4]"), NATIVE) is slow
    assert kernel_for(gelu("f32[2,4]"), NATIVE) is not slow
    monkeypatch.setitem(KERNELS, "Gelu", (slow,))
    refusal = kernel_for(gelu("f32[2,4]"), NATIVE)
    assert str(refusal) == f"{slow.name}: another was measured faster"


def test_an_op_that_no_kernel_has() -> None:
    assert kernel_for(KernelSpec("Never", {}, (), ()), NATIVE) == Refusal(
        ("not in the kernel table",)
    )


@pytest.mark.parametrize("level", ["0", "plain"])
def test_the_host_is_what_the_environment_says(level: str, build: Any) -> None:
    build(level)
    able, found = host().multiplies_bf16, host().capability  # the processor's own
    assert found == torch.backends.cpu.get_cpu_capability()
    level_of = "none" if level == "0" else level
    halves = host().multiplies_fp16
    assert host() == Target(
        "cpu", level_of, multiplies_bf16=able, multiplies_fp16=halves, capability=found
    )
    there = find_spec("triton") is not None
    found = host("cuda")
    held = {"rates": found.rates, "capability": found.capability}
    assert found == Target(
        "cuda", "none", triton=there, multiplies_bf16=found.multiplies_bf16,
        multiplies_fp16=True, **held,
    )  # fmt: skip
    assert (found.capability == "") == (not torch.cuda.is_available())
    assert host().has_library == (level != "0")


def test_a_target_decides_what_is_planned() -> None:
    """Whatever this machine has: no native kernel runs on a target without the library."""
    graph = Graph()
    x = graph.input("x", parse_type("f32[2,4]"), Role.BATCH)
    graph.outputs = {"y": Builder(graph).Gelu(x)}
    assert all(not k.name.startswith("native.") for k in select(graph, BARE).values())
    assert any(k.name.startswith("native.") for k in select(graph, NATIVE).values())
    assert [x.kernel.name for x in make_plan(graph, {}, target=BARE).launches] == ["aten.gelu"]


def test_a_launch_takes_its_arithmetic_its_bytes_and_its_start() -> None:
    graph = Graph()
    x, w = (graph.input(n, parse_type("f32[8,8]"), Role.BATCH) for n in "xw")
    gemm = Builder(graph).Gemm(x, w).producer()
    rates = Rates(flops_per_second=1024.0, bytes_per_second=768.0, launch_seconds=0.25)
    assert seconds(gemm, Target(rates=rates)) == 0.25 + 2 * 8**3 / 1024 + 3 * 4 * 64 / 768


def test_products_of_16_bits_have_a_rate_of_their_own() -> None:
    graph = Graph()
    x, w = (graph.input(n, parse_type("bf16[8,8]"), Role.BATCH) for n in "xw")
    gemm = Builder(graph).Gemm(x, w).producer()
    rates = Rates(bytes_per_second=768.0, launch_seconds=0.25, low_flops_per_second=4096.0)
    assert seconds(gemm, Target(rates=rates)) == 0.25 + 2 * 8**3 / 4096 + 3 * 2 * 64 / 768


def test_a_gpu_has_the_rates_of_its_name() -> None:
    names = {
        "NVIDIA H200": (67e12, 989e12, 4.8e12),
        "NVIDIA H100 80GB HBM3": (67e12, 989e12, 3.35e12),
        "NVIDIA H100 PCIe": (51e12, 756e12, 2.0e12),
        "NVIDIA A100-SXM4-80GB": (19.5e12, 312e12, 2.0e12),
        "NVIDIA GH200 480GB": (67e12, 989e12, 4.0e12),
        "NVIDIA B200": (75e12, 2250e12, 7.7e12),
        "NVIDIA L4": (30.3e12, 121e12, 0.3e12),
        "NVIDIA L40S": (91.6e12, 362e12, 0.864e12),
        "NVIDIA A10": (31.2e12, 125e12, 0.6e12),
        "NVIDIA GeForce RTX 4090": (82.6e12, 165e12, 1.008e12),
        "AMD Instinct MI300X": (163.4e12, 1307e12, 5.3e12),
        "Tesla V100-SXM2-32GB": (15.7e12, 125e12, 0.9e12),
        "NVIDIA L40": (8.1e12, 65e12, 0.32e12),
        "a GPU of next year": (8.1e12, 65e12, 0.32e12),
    }
    for name, (fp32, low, moved) in names.items():
        found = rates_of_gpu(name)
        assert (found.flops_per_second, found.low_flops_per_second) == (fp32, low), name
        assert found.bytes_per_second == moved, name


def test_all_that_a_target_holds_is_in_the_fingerprint() -> None:
    """Each field of a target is in the fingerprint, so that the cache gives no graph made for
    another."""
    found = host()
    others = {
        "capability": "another", "rates": Rates(1.0), "multiplies_bf16": not found.multiplies_bf16
    }  # fmt: skip
    for field, other in others.items():
        assert fingerprint(replace(found, **{field: other})) != fingerprint(found), field


# ---- what passes make of it


def attention(b: Builder, v: dict[str, Value]) -> Value:
    return b.Attention(v["q"], v["q"], v["q"], scale=0.5, is_causal=1)


def norm_of_a_sum(b: Builder, v: dict[str, Value]) -> Value:
    return b.LayerNormalization(b.Add(v["x"], v["y"]), v["row"], v["row"], axis=-1)[0]


def biased_activation(b: Builder, v: dict[str, Value]) -> Value:
    return b.Gelu(b.Gemm(v["x"], v["w"], v["row"]))


def gated(b: Builder, v: dict[str, Value]) -> Value:
    return b.Mul(b.Gelu(v["x"]), v["y"])


def norm_by_root(b: Builder, v: dict[str, Value]) -> Value:
    x = v["x"]
    mean = b.ReduceMean(b.Mul(x, x), b.ints([1]), keepdims=1)
    return b.Mul(b.Mul(x, b.Reciprocal(b.Sqrt(b.Add(mean, 1e-5)))), v["row"])


def turned(b: Builder, v: dict[str, Value]) -> Value:
    x = v["x"]
    halves = b.Concat(b.Neg(b.slice(x, 1, 2, 4)), b.slice(x, 1, 0, 2), axis=1)
    return b.Add(b.Mul(x, v["row"]), b.Mul(halves, v["row"]))


def head(b: Builder, v: dict[str, Value]) -> Value:
    return b.SoftmaxCrossEntropyLoss(b.Gemm(v["x"], v["w"], transB=1), v["labels"])[0]


def head_with_gradient(b: Builder, v: dict[str, Value]) -> Value:
    call = [v["x"], v["w"], None, v["labels"], None]
    attrs = {"ignore_index": -100, "reduction": "mean"}
    b.node("LinearCrossEntropyGrad", [v["dloss"], *call], attrs)
    return b.one("LinearCrossEntropy", call, attrs)


def arriving_gradients(b: Builder, v: dict[str, Value]) -> Value:
    low = b.cast(v["x"], DType.BFLOAT16)
    return b.Add(b.cast(low, DType.FLOAT), v["y"])


# by pass: what it would write, and where
PLACES: dict[str, tuple[str, Any]] = {
    "flash_attention": ("FlashAttention", attention),
    "add_layer_norm": ("AddLayerNormalization", norm_of_a_sum),
    "bias_activation": ("BiasActivation", biased_activation),
    "gated_activation": ("GatedActivation", gated),
    "rms_norm": ("RMSNorm", norm_by_root),
    "rotary": ("Rotary", turned),
    "linear_cross_entropy": ("LinearCrossEntropy", head),
    "linear_cross_entropy_step": ("LinearCrossEntropyStep", head_with_gradient),
    "wide_sum": ("WideSum", arriving_gradients),
}
TYPES = {
    "x": "[B,4]", "y": "[B,4]", "w": "[4,4]", "row": "[4]", "q": "[B,2,T,4]", "dloss": "[]",
}  # fmt: skip


def program(write: Any, real: str = "f32") -> Graph:
    graph = Graph("f")
    v = {n: graph.input(n, parse_type(real + t), Role.BATCH) for n, t in TYPES.items()}
    v["labels"] = graph.input("labels", parse_type("i64[B]"), Role.BATCH)
    graph.outputs = {"y": write(Builder(graph, module="layers.0.mlp"), v)}
    return graph


def test_every_fusion_is_in_the_table() -> None:
    assert set(PLACES) == set(FUSIONS)


def left(name: str, refuse: Any) -> list[NearMiss]:
    """The near misses of a pass that must leave its place as it is."""
    op, write = PLACES[name]
    graph = program(write)
    before = [n.op_type for n in graph]
    after, [report] = run(graph, [FUSIONS[name]], refuse=refuse, verify=True)
    assert [n.op_type for n in after] == before
    assert report.edits == 0 and op not in before
    return list(report.misses)


@pytest.mark.parametrize("name", PLACES)
def test_a_place_that_no_kernel_takes_is_left_and_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    op, write = PLACES[name]
    taken, [report] = run(program(write), [FUSIONS[name]], refuse=Fusible(NATIVE))
    assert report.edits == 1 and not report.misses
    assert op in [n.op_type for n in taken]
    monkeypatch.setitem(KERNELS, op, ())
    reason = f"{op}: not in the kernel table"
    assert left(name, Fusible(NATIVE)) == [NearMiss(name, op, "layers.0.mlp", reason)]


# places whose op has a gradient op of its own; the gradient of Rotary is Rotary again, and WideSum
# is written after gradients
GRADIENTS = {
    name: f"{op}Grad"
    for name, (op, _) in PLACES.items()
    if not op.endswith("Step") and op not in ("Rotary", "WideSum")
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_place_whose_gradient_no_kernel_takes_is_left(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KERNELS, GRADIENTS[name], ())
    [miss] = left(name, Fusible(NATIVE))
    assert (miss.op, miss.reason) == (
        PLACES[name][0], f"{GRADIENTS[name]}: not in the kernel table"
    )  # fmt: skip


@pytest.mark.parametrize("target", [BARE, Target("cuda")], ids=called)
def test_without_the_library_only_what_aten_has_is_fused(target: Target) -> None:
    reasons = {"cpu": "no native library", "cuda": "not on cuda"}
    for name, (op, write) in PLACES.items():
        _, [report] = run(program(write), [FUSIONS[name]], refuse=Fusible(target))
        assert report.edits == op.startswith("LinearCrossEntropy")  # which aten has as well
        for miss in report.misses:
            assert reasons[target.device] in miss.reason
        assert len(report.misses) == 1 - report.edits


def test_packed_rows_that_no_kernel_takes_are_put_back() -> None:
    """Row demand asks for the very call that it would write: rows with their coordinates."""
    asked: list[Fusion] = []
    made = tiny.compiled(tiny.bert(), tiny.batch(4, 12, "right", ignored=True))

    def refuse(fusion: Fusion) -> str | None:
        asked.append(fusion)
        return "no packed rows"

    from onward.rewrite import row_demand

    packed, report = row_demand(made.forward, ["loss"], refuse)
    graph = packed.graph
    assert report.edits > 0 and not packed.reads
    assert {f.op for f in asked} == {"FlashAttention"} == {m.op for m in report.misses}
    assert all(len(f.inputs) == 8 and f.inputs[3] is None for f in asked)
    assert all(n.inputs[6:] == () for n in graph if n.op_type == "FlashAttention")
    packed, _ = row_demand(made.forward, ["loss"], Fusible(NATIVE))
    [first, *_] = [n for n in packed.graph if n.op_type == "FlashAttention"]
    assert [type_of(v).dtype for v in first.inputs[6:]] == [DType.INT64, DType.INT64]


def test_layers_that_are_alike_are_asked_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Counter[str] = Counter()
    import onward.plan.fusible as module

    def counted(spec: KernelSpec, target: Target) -> Any:
        asked[spec.op] += 1
        return kernel_for(spec, target)

    monkeypatch.setattr(module, "kernel_for", counted)
    fusible = Fusible(NATIVE)
    x = parse_type("f32[B,T,4]")
    inputs = (x, x, parse_type("f32[4]"), None, parse_type("i64[2]"), parse_type("i64[]"))
    for site in range(5):
        attrs = {"epsilon": 1e-5, "ratio": 0.5, "site": site, "sample_dim": 0}
        assert fusible(Fusion("AddLayerNormalization", inputs, attrs)) is None
    assert asked == {"AddLayerNormalization": 1, "AddLayerNormalizationGrad": 1}
    everything = {"epsilon": 1e-5, "ratio": 1.0, "site": 0, "sample_dim": 0}
    assert "ratio 1" in (fusible(Fusion("AddLayerNormalization", inputs, everything)) or "")


# ---- a whole model in fp64


def in_fp64(graph: Graph) -> Graph:
    """A copy of the graph with every f32 value as f64."""
    graph = graph.clone()
    for value in [*graph.inputs, *(v for n in graph for v in n.outputs)]:
        if type_of(value).dtype == DType.FLOAT:
            value.meta["type"] = Type(DType.DOUBLE, type_of(value).shape)
    for value in list(graph.ir.initializers.values()):
        array = array_of(value)
        if array is not None and array.dtype == np.float32:
            graph.replace(value, graph.constant(array.astype(np.float64)))
    for node in graph:
        if node.op_type == "Cast" and node.attributes["to"].as_int() == DType.FLOAT:
            node.attributes["to"] = ir.AttrInt64("to", int(DType.DOUBLE))
    check(graph)
    return graph


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_an_fp64_model_keeps_its_ops_and_is_told_why(kind: str) -> None:
    model = {"gpt2": tiny.gpt2, "bert": tiny.bert}[kind](dropout=0.1)
    data = tiny.batch(2, 6, "right")
    made = tiny.compiled(model, data)
    wide = in_fp64(made.captured.graph)
    forward, reports = run(wide, FORWARD, refuse=Fusible(NATIVE), verify=True)
    fused = {"FlashAttention", "AddLayerNormalization", "BiasActivation"}
    assert fused <= {n.op_type for n in made.forward}
    assert not fused & {n.op_type for n in forward}
    told = summary(m for r in reports for m in r.misses)
    assert {t["op"] for t in told} == fused
    assert all("double tensors" in t["reason"] and len(t["modules"]) >= 2 for t in told)
    # what has a kernel for it is fused still: aten's head takes any floating dtype
    assert "LinearCrossEntropy" in {n.op_type for n in forward}
    # every own op that is left has a kernel, so that no op is expanded at plan time
    step, _ = run(vjp(forward, ["loss"], tiny.trained(made)), STEP, refuse=Fusible(NATIVE))
    for node in step:
        if node.domain == ONWARD:
            found = kernel_for(open_spec(node), NATIVE)
            assert isinstance(found, Kernel), f"{node.op_type}: {found}"


def test_a_summary_names_each_module_once() -> None:
    misses = [NearMiss("p", "Op", m, r) for m, r in (("a", "x"), ("b", "x"), ("a", "x"), ("", "y"))]
    assert summary(misses) == [
        {"pass": "p", "op": "Op", "reason": "x", "modules": ["a", "b"]},
        {"pass": "p", "op": "Op", "reason": "y", "modules": ["(top)"]},
    ]
    assert summary([]) == []


def test_the_reference_engine_runs_what_passes_write_where_nobody_is_asked() -> None:
    for op, write in PLACES.values():
        graph = program(write)
        rng = np.random.default_rng(0)
        sizes = {"B": 3, "T": 5}
        feeds: dict[str, Any] = {"labels": np.array([1, 0, 3])}
        for name in TYPES:
            shape = type_of(graph.find_input(name)).specialized(sizes).concrete.shape
            feeds[name] = rng.standard_normal([int(str(n)) for n in shape]).astype(np.float32)
        fused, _ = run(graph, list(FUSIONS.values()))
        assert op in [n.op_type for n in fused]
        want, have = evaluate(graph, feeds)["y"], evaluate(fused, feeds)["y"]
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)


def test_unlike_gpus_of_one_machine_have_targets_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host_module = sys.modules["onward.kernels.host"]
    names = {0: "NVIDIA H100 80GB HBM3", 1: "NVIDIA L4"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda d: names[d.index])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: (9 - d.index, d.index))
    monkeypatch.setattr(torch.cuda, "device", lambda d: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    found = [host(torch.device("cuda", i)) for i in (0, 1)]
    for cached in ("_multiplies_bf16", "capability_of", "_rates"):
        getattr(host_module, cached).cache_clear()
    assert [t.capability for t in found] == [(9, 0), (8, 1)]
    assert found[0].rates.bytes_per_second > 5 * found[1].rates.bytes_per_second
    assert all(t.multiplies_bf16 and t.device == "cuda" for t in found)
