"""Time every kernel on the calls that the two CPU workloads make, beside the machine's ceilings.

    python benchmarks/kernels.py                  # some minutes; --ops Dropout,Gemm for a few ops
    python benchmarks/kernels.py --quick --out DIR

The calls are read off plans: each workload's step and evaluation as they are compiled, and the step
without the passes that fuse, and with gradient clipping, so that an op which is replaced by a fused
one is timed too. Operands have the layout that the plan gives them; an output that lies in an
input's memory there does so here. Integers and small tensors keep the contents they have in the
step, all else is drawn evenly from 0..1. An op with a kernel of our own that no plan calls is
listed as "no case".

Every kernel that takes a call is timed, and so is the op's body as the planner would run it. Caches
are warm: the same operands over and over, the shortest repetition counts. GB/s counts each operand
once, read or written (of a table that is gathered from or scattered into: only the rows touched);
GFLOP/s counts the matrix products in the op's body, of causal attention the part below the
diagonal. The ceilings, measured in the same run: torch's copy of as many bytes, all threads, and
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import onward
from cpu import FULL, QUICK
from harness import LEARNING_RATE, say
from limit import arithmetic_limit
from onward.execute import Executable, Memory
from onward.graph.build import Builder, inline
from onward.graph.graph import ONWARD, Graph, Role, Value, type_of
from onward.graph.ops import OPS, OWN
from onward.graph.types import Shape, Type, parse_type, value
from onward.kernels import ATEN, KERNELS, Kernel, Need, Use, torch_dtype
from onward.plan import Layout, make_plan
from onward.rewrite import FORWARD, STEP
from report import command, heading, machine, markdown, one_line, write
from workloads import Case, make_batches, make_model

# Ops with a kernel of our own; the others run on PyTorch's operators.
_OWN = {op for op, kernels in KERNELS.items() if op not in ATEN or len(kernels) > len(ATEN[op])}
_KEPT = 4096  # elements: tensors up to this size keep the contents they have in the step
_RESTORED = 8  # repetitions after which what a kernel overwrites in place is written anew
_VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("step", {}),
    ("step, nothing fused", {"disable": tuple(p.name for p in (*FORWARD, *STEP) if p.needs)}),
    ("step, clipped", {"max_grad_norm": 1.0}),
)
# Calls that neither workload makes, of ops whose operands are all real numbers.
_EXTRA: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    ("Gelu", {"approximate": "none"}, ("f32[1024,2048]",)),
    ("GeluGrad", {"approximate": "none"}, ("f32[1024,2048]", "f32[1024,2048]")),
)


@dataclass
class Call:
    """One distinct call of an op. `contents[i]`: what input i holds, None where it is drawn.

    kernel: the one that the plan chose. layouts, written: where inputs and outputs lie. shares:
    pairs (output, input) in one memory. constants: inputs that the graph itself holds. count:
    launches in the workload's own step; 0 for calls of the variants only.
    """

    need: Need
    kernel: str
    layouts: tuple[Layout | None, ...]
    written: tuple[Layout, ...]
    shares: tuple[tuple[int, int], ...]
    constants: frozenset[int]
    contents: list[torch.Tensor | None]
    origin: str
    count: int = 0
    results: list[dict[str, Any]] = field(default_factory=list)

    def __str__(self) -> str:
        """Types of the inputs; `'` marks one that is not contiguous."""
        inputs = [
            "-" if t is None or x is None else f"{t}{'' if x.is_contiguous else chr(39)}"
            for t, x in zip(self.need.inputs, self.layouts, strict=True)
        ]
        if len(inputs) > 8:
            inputs[4:-1] = ["..."]
        return f"({', '.join(inputs)}){' in place' if self.shares else ''}"

    def tensors(self) -> list[torch.Tensor | None]:
        """Inputs, made anew, with the strides of the plan."""
        generator = torch.Generator().manual_seed(0)
        made: list[torch.Tensor | None] = []
        for layout, content in zip(self.layouts, self.contents, strict=True):
            if layout is None:
                made.append(None)
                continue
            shape, strides = _numbers(layout.shape), _numbers(layout.strides)
            x = torch.empty_strided(shape, strides, dtype=torch_dtype(layout.dtype))
            if content is not None:
                x = content.clone() if 0 in layout.strides else x.copy_(content)
            elif 0 in layout.strides:  # expanded: one number for many places
                x = x.fill_(0.5)
            else:
                x = x.uniform_(generator=generator)
            made.append(x)
        return made


# ---- where the calls come from


def harvested(case: Case) -> list[Call]:
    """The distinct calls of a case's step and of its variants, in the order they are made."""
    found: dict[Any, Call] = {}
    for origin, options in _VARIANTS:
        say(f"{case.name}: {origin}")
        model = make_model(case)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        trainer = onward.Trainer(model, optimizer, options=onward.TrainerOptions(seed=0, **options))
        (batch,) = make_batches(case, 1)
        trainer.train_step(batch)
        for key, call in _calls(trainer._last, origin):
            known = found.setdefault(key, call)
            known.count += origin == "step"
        if origin == "step":
            trainer.eval_step(batch)
            (evaluation,) = trainer._eval[-1].executables.values()
            for key, call in _calls(evaluation, "evaluation"):
                found.setdefault(key, call)
    return list(found.values())


def _calls(executable: Executable, origin: str) -> Iterator[tuple[Any, Call]]:
    """Runs the step's launches once more, looking at operands before each."""
    plan = executable.plan
    with torch.no_grad():
        for launch, described in zip(executable.launches, plan.launches, strict=True):
            shares = tuple(
                (o, i)
                for o, y in enumerate(described.outputs)
                for i, x in enumerate(described.inputs)
                if x is not None and x == y
            )
            need = Need(
                described.op, described.attrs,
                tuple(None if x is None else _type(x) for x in described.inputs),
                tuple(_type(y) for y in described.outputs),
            )  # fmt: skip
            attrs = {k: v for k, v in need.attrs.items() if k != "site"}  # one per dropout
            strides = tuple(None if x is None else x.strides for x in described.inputs)
            strides += tuple(y.strides for y in described.outputs)
            key = (need.op, repr(attrs), need.inputs, need.outputs, strides, shares)
            yield key, Call(
                need, described.kernel.name, described.inputs, described.outputs, shares,
                frozenset(
                    i for i, x in enumerate(described.inputs)
                    if x is not None and x.buffer in plan.constants
                ),
                [
                    None if x is None else _kept(executable.tensor(x))
                    for x in described.inputs
                ],
                origin,
            )  # fmt: skip
            launch()


def _type(layout: Layout) -> Type:
    return Type(layout.dtype, layout.shape)


def _kept(x: torch.Tensor) -> torch.Tensor | None:
    return x.clone() if x.numel() <= _KEPT or not x.is_floating_point() else None


def extra() -> list[Call]:
    """The calls of `_EXTRA`."""
    calls: list[Call] = []
    for op, attrs, texts in _EXTRA:
        graph = Graph(op)
        types = [parse_type(text) for text in texts]
        inputs = [graph.input(f"x{i}", t, Role.BATCH) for i, t in enumerate(types)]
        made = Builder(graph).node(op, inputs, attrs)
        outputs = made if isinstance(made, tuple) else (made,)
        graph.outputs = {f"y{i}": y for i, y in enumerate(outputs)}
        plan = make_plan(graph, {})
        (launch,) = plan.launches
        need = Need(op, attrs, tuple(types), tuple(type_of(y) for y in outputs))
        calls.append(
            Call(
                need, launch.kernel.name, launch.inputs, launch.outputs, (), frozenset(),
                [None] * len(types), "not in either step",
            )
        )  # fmt: skip
    return calls


# ---- what a call costs in bytes and in arithmetic


def bytes_moved(need: Need) -> int:
    """What the op's record says that it reads and writes."""
    return value(OPS[need.op].moved(need.inputs, need.outputs, need.attrs))


def flops(call: Call) -> float:
    """Of the op's matrix products; of causal attention the part that is needed."""
    need = call.need
    total = value(OPS[need.op].flops(need.inputs, need.outputs, need.attrs))
    scores = need.inputs[0]
    if need.attrs.get("is_causal") and scores is not None and scores.rank > 1:
        rows = int(scores.shape[-2])  # type: ignore[arg-type]
        return total * (rows + 1) / (2 * rows)
    return float(total)


def single(call: Call) -> Graph:
    """A graph of this one call, inputs `x0`, `x1`, ...; constants where the step has them."""
    graph = Graph(call.need.op)
    values: list[Value | None] = []
    for i, type in enumerate(call.need.inputs):
        content = call.contents[i]
        if type is None:
            values.append(None)
        elif i in call.constants and content is not None:
            values.append(graph.constant(content.numpy()))
        else:
            values.append(graph.input(f"x{i}", type, Role.BATCH))
    made = Builder(graph).node(call.need.op, values, call.need.attrs)
    outputs = list(made) if isinstance(made, tuple) else [made]
    graph.outputs = {f"y{i}": y for i, y in enumerate(outputs)}
    return graph


# ---- timing


@dataclass(frozen=True)
class Timed:
    """Seconds of a launch: the shortest and the median repetition."""

    best: float
    median: float


def timed(launch: Callable[[], Any], restore: Callable[[], Any] | None, seconds: float) -> Timed:
    """Repeats a launch for about `seconds`; short ones are timed several at a time."""
    begin = time.perf_counter()
    launch()
    launch()
    once = (time.perf_counter() - begin) / 2
    group = max(1, min(_RESTORED, int(100e-6 / max(once, 1e-7))))
    times: list[float] = []
    end, done = time.perf_counter() + seconds, 0
    while len(times) < 3 or time.perf_counter() < end:
        if restore is not None and done % _RESTORED == 0:
            restore()
            done = 0
        begin = time.perf_counter()
        for _ in range(group):
            launch()
        times.append((time.perf_counter() - begin) / group)
        done += group
        done = done if done % _RESTORED < group else _RESTORED
    return Timed(min(times), statistics.median(times))


def run_kernel(call: Call, kernel: Kernel, seconds: float) -> tuple[Timed, list[torch.Tensor]]:
    """A kernel's time, and its outputs on fresh inputs."""
    inputs = [
        x if x is None or not (kernel.contiguous is None or i in kernel.contiguous)
        else x.contiguous()  # the plan copies it before the launch
        for i, x in enumerate(call.tensors())
    ]  # fmt: skip
    rights = {o: i for o, i in call.shares if (o, i) in kernel.inplace}
    outputs: list[torch.Tensor] = []
    for o, type in enumerate(call.need.outputs):
        shared = inputs[rights[o]] if o in rights else None
        layout = call.written[o] if o in kernel.strided else None
        outputs.append(_empty(type, layout) if shared is None else shared)
    saved = [(x, x.clone()) for i in rights.values() if (x := inputs[i]) is not None]

    def restore() -> None:
        for x, kept in saved:
            x.copy_(kept)

    scratch = [_empty(t) for t in kernel.scratch(call.need)]
    with torch.no_grad():
        launch = kernel.bind(Use(call.need.attrs, inputs, outputs, scratch))
        launch()
        results = [y.clone() for y in outputs]
        return timed(launch, restore if saved else None, seconds), results


def run_body(call: Call, seconds: float) -> tuple[Timed, list[torch.Tensor]]:
    """The op's body, planned and run as it would be inside a step; nothing is rewritten."""
    graph = single(call)
    inline(graph, next(n for n in graph if n.domain == ONWARD))
    plan = make_plan(graph, {})
    memory = Memory(torch.device("cpu"))
    owned = {f"x{i}": x.contiguous() for i, x in enumerate(call.tensors()) if x is not None}
    executable = Executable(plan, memory, {n: x for n, x in owned.items() if n in plan.inputs})
    executable.bind()

    def launch() -> None:
        for item in executable.launches:
            item()

    with torch.no_grad():
        launch()
        results = [executable.output(name) for name in graph.outputs]
        return timed(launch, None, seconds), results


def _empty(type: Type, layout: Layout | None = None) -> torch.Tensor:
    """Memory for a result; with a layout, of its strides."""
    shape = [int(n) for n in type.shape]  # type: ignore[arg-type]
    if layout is None:
        return torch.zeros(shape, dtype=torch_dtype(type.dtype))
    strides = _numbers(layout.strides)
    return torch.empty_strided(shape, strides, dtype=torch_dtype(type.dtype)).zero_()


def _numbers(sizes: Shape) -> list[int]:
    return [value(n) for n in sizes]


def difference(have: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    """The largest difference of any output, relative to that output's largest element."""
    worst = 0.0
    for y, z in zip(have, want, strict=True):
        if y.is_floating_point() and y.numel():
            size = float(z.abs().max()) or 1.0
            worst = max(worst, float((y - z).abs().max()) / size)
        elif not torch.equal(y, z):
            worst = math.inf
    return worst


def measure_call(call: Call, seconds: float) -> None:
    """Times every kernel that takes the call, the plan's first, and the body; fills `results`."""
    moved, arithmetic = bytes_moved(call.need), flops(call)
    first: list[torch.Tensor] | None = None
    ways: list[tuple[str, Callable[[], tuple[Timed, list[torch.Tensor]]]]] = [
        (kernel.name, lambda kernel=kernel: run_kernel(call, kernel, seconds))
        for kernel in sorted(
            KERNELS.get(call.need.op, ()), key=lambda kernel: kernel.name != call.kernel
        )
        if kernel.where("cpu") is None and kernel.why_not(call.need) is None
    ]
    if call.need.op in OWN:
        ways.append(("body", lambda: run_body(call, seconds)))
    for name, way in ways:
        try:
            took, outputs = way()
        except Exception as error:  # one failing kernel is a row of the table, not the end
            call.results.append({"kernel": name, "error": f"{type(error).__name__}: {error}"})
            continue
        first = outputs if first is None else first
        call.results.append(
            {
                "kernel": name, **asdict(took), "bytes": moved, "flops": arithmetic,
                "bytes_per_s": moved / took.best, "flops_per_s": arithmetic / took.best,
                "difference": difference(outputs, first),
            }
        )  # fmt: skip


# ---- the machine's ceilings


def copy_rates(largest: int) -> dict[int, float]:
    """Bytes read and written per second by torch's copy, by bytes of the two operands together."""
    rates: dict[int, float] = {}
    size = 1 << 16
    while size <= largest:
        x, y = torch.ones(size // 8), torch.zeros(size // 8)
        rates[size] = size / timed(lambda x=x, y=y: y.copy_(x), None, 0.3).best
        size *= 4
    return rates


def ceiling(rates: dict[int, float], nbytes: int) -> float:
    """The copy's rate at the measured size nearest to `nbytes`."""
    return rates[min(rates, key=lambda size: abs(math.log(size / max(nbytes, 1))))]


# ---- the report


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    copies = ", ".join(
        f"{int(size) / 2**20:.4g} MiB {rate / 1e9:.0f}"
        for size, rate in report["copy_bytes_per_s"].items()
    )
    lines = [
        *heading(report), "",
        f"Ceilings: copy, GB/s by bytes read and written: {copies}; "
        f"matrix products {report['product_gflops']:.0f} GFLOP/s.",
        f"Native ops without a case: {', '.join(report['no_case']) or 'none'}.",
    ]  # fmt: skip
    head = ["call", "kernel", "in a step", "ms", "median", "GB/s", "GFLOP/s", "of ceiling"]
    head += ["to first", "difference"]
    for found in report["cases"]:
        shown = _worth_a_line(found["calls"])
        lines += ["", f"## {found['name']}", "", *markdown(head, _rows(shown), left=2)]
        if len(shown) < len(found["calls"]):
            left = len(found["calls"]) - len(shown)
            lines += ["", f"{left} calls of less than 0.1 % of the sum are in the JSON only."]
    if report["skipped"]:
        lines += ["", f"Not run, out of time: {len(report['skipped'])} calls."]
    return "\n".join(lines) + "\n"


def _worth_a_line(calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls with a native kernel or an error, and those that take time."""
    total = sum(_seconds(call) for call in calls if call["count"])
    return [
        call
        for call in calls
        if call["op"] in _OWN
        or any("error" in r for r in call["results"])
        or _seconds(call) >= 1e-3 * total
    ]


def _seconds(call: dict[str, Any]) -> float:
    """Of all its launches in a step by the first kernel; of one where the step has none."""
    best = next((r["best"] for r in call["results"] if "best" in r), 0.0)
    return best * (call["count"] or 1)


def _rows(calls: Sequence[dict[str, Any]]) -> list[list[str]]:
    rows: list[list[str]] = []
    for call in calls:
        label = f"{call['op']} {call['operands']}"
        base = next((r["best"] for r in call["results"] if "best" in r), None)
        for result in call["results"]:
            start = [label, result["kernel"], str(call["count"] or f"({call['origin']})")]
            if "error" in result:
                rows.append([*start, one_line(result["error"])])
                continue
            arithmetic = result["flops_per_s"]
            rows.append(
                [
                    *start, f"{1e3 * result['best']:.4g}", f"{1e3 * result['median']:.4g}",
                    f"{result['bytes_per_s'] / 1e9:.1f}",
                    f"{arithmetic / 1e9:.0f}" if arithmetic else "",
                    f"{result['of_ceiling']:.0%}", f"{result['best'] / base:.2f}x",
                    f"{result['difference']:.0e}",
                ]
            )  # fmt: skip
            label = ""
    return rows


def main() -> int:
    """Run the benchmark; see the module's text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ops", default="", help="comma-separated; default: all")
    parser.add_argument("--native", action="store_true", help="only ops with a native kernel")
    parser.add_argument("--cases", default="", help="only workloads whose name contains this")
    parser.add_argument("--seconds", type=float, default=0.0, help="per kernel and call")
    parser.add_argument("--threads", type=int, default=0, help="torch threads; default: torch's")
    parser.add_argument("--budget", type=float, default=900.0, help="seconds; then nothing starts")
    parser.add_argument("--quick", action="store_true", help="tiny models, to try the script")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    chosen = set(options.ops.split(",")) if options.ops else set(_OWN if options.native else ())
    seconds = options.seconds or (0.01 if options.quick else 0.3)
    deadline = time.monotonic() + options.budget
    host = machine("cpu")
    workloads = [c for c in (QUICK if options.quick else FULL) if options.cases in c.name]

    say("ceilings")
    copies = copy_rates(1 << (20 if options.quick else 28))
    limits = [
        arithmetic_limit(c, host["threads"], 3.0 if options.quick else 20.0) for c in workloads
    ]
    product = max((limit["best_gflops"] for limit in limits), default=0.0)
    report: dict[str, Any] = {
        "title": "Kernels on the CPU",
        "command": command(),
        "machine": host, "copy_bytes_per_s": copies, "product_gflops": product,
        "no_case": [], "cases": [], "skipped": [],
    }  # fmt: skip
    stem = "kernels-quick" if options.quick else "kernels"
    seen: set[str] = set()
    path = options.out
    groups: list[tuple[str, Callable[[], list[Call]]]] = [
        *((c.name, lambda c=c: harvested(c)) for c in workloads), ("other calls", extra),
    ]  # fmt: skip
    for name, calls in groups:
        entries: list[dict[str, Any]] = []
        report["cases"].append({"name": name, "calls": entries})
        for call in calls():
            seen.add(call.need.op)
            if chosen and call.need.op not in chosen:
                continue
            if time.monotonic() > deadline:
                report["skipped"].append(f"{name}: {call.need.op} {call}")
                continue
            measure_call(call, seconds)
            for result in call.results:
                if "error" in result:
                    continue
                result["of_ceiling"] = (
                    result["flops_per_s"] / (1e9 * product)
                    if result["flops"]
                    else result["bytes_per_s"] / ceiling(copies, result["bytes"])
                )
            entries.append(
                {
                    "op": call.need.op, "operands": str(call), "attrs": repr(call.need.attrs),
                    "in_place": call.shares, "origin": call.origin, "count": call.count,
                    "results": call.results,
                }
            )  # fmt: skip
            said = ", ".join(
                f"{r['kernel']} " + ("failed" if "error" in r else f"{1e3 * r['best']:.3g} ms")
                for r in call.results
            )
            say(f"{name}: {call.need.op} {call}: {said}")
        entries.sort(key=_weight)
        report["no_case"] = sorted(_OWN - seen)
        path = write(report, options.out, stem, table(report))
    say(f"\n{table(report)}\nwritten: {path}, {options.budget + time.monotonic() - deadline:.0f} s")
    errors = [r for g in report["cases"] for c in g["calls"] for r in c["results"] if "error" in r]
    return int(bool(errors))


def _weight(entry: dict[str, Any]) -> tuple[bool, float]:
    """What the step spends most time on comes first; calls outside the step come last."""
    return not entry["count"], -_seconds(entry)


if __name__ == "__main__":
    sys.exit(main())
