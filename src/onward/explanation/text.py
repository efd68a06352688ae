"""Shows an explanation as text, for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from onward.explanation.facts import (
    KINDS,
    LEAST_PREDICTED,
    Change,
    GpuTime,
    LargestBatch,
    SizedMemory,
    StepFacts,
    StepMemory,
)
from onward.prepare.without_gradient import WithoutGradient

LOOPS = {"trainer": "onward.Trainer", "module": "your own loop (onward.accelerate)"}
ALIKE = "equally long, with an equal share of padding"
# what bounds a launch on a GPU
BOUNDS = {
    "products": "launches bound by matrix products",
    "attention": "attention",
    "memory": "launches bound by the bytes that they read and write",
}
_SHOWN = 6  # most ops of a pass, reasons or modules on a line


def text(found: StepFacts) -> str:
    """The whole explanation as text, section by section."""
    parts = [headline(found), *map("\n".join, filter(None, map(list, _parts(found))))]
    return "\n\n".join(parts)


def headline(found: StepFacts) -> str:
    sizes = ", ".join(f"{name}={size}" for name, size in found.dims.items())
    planned = f", planned for one {found.gpu}" if found.gpu else ""
    return f"{found.model} in {LOOPS[found.loop]}{planned}" + (f": {sizes}" if sizes else "")


def _parts(found: StepFacts) -> Iterator[Iterable[str]]:
    yield capture_lines(found)
    if not found.captured:
        return
    yield memory_lines(found.memory)
    yield time_lines(found.time)
    yield size_lines(found.sizes, found.largest)
    yield row_lines(found)
    yield change_lines(found.changes)
    yield miss_lines(found)
    yield launch_lines(found)


def capture_lines(found: StepFacts) -> Iterator[str]:
    """Lines about the capture: whether a graph runs, and which parts do not."""
    if not found.captured:
        yield "captured: no, it runs in eager PyTorch"
        yield from (f"  because {reason}" for reason in found.reasons)
        return
    parts = len(found.regions)
    yield "captured: as a whole" if not parts else f"captured: but for {parts} eager region(s)"
    for region in found.regions:
        share = "" if region.share is None else f", {region.share:.1%} of the step's time"
        name = ", ".join(filter(None, (region.path or "(top)", region.operator)))
        yield f"  {name} runs in eager PyTorch{share}: {region.reason}"
    yield from (f"  note: {note}" for note in found.notes)
    yield f"  computes {', '.join(found.results)}"
    still = WithoutGradient(found.no_gradient, found.frozen)
    yield from (f"  {what}: {names}" for what, names in still.lines())


def memory_lines(memory: StepMemory | None) -> Iterator[str]:
    """The table of bytes by kind."""
    if memory is None:
        return
    unit = Unit.of(memory.total)
    yield f"{f'memory, {unit.name}':<16}{'at the peak':>12}{'at most':>11}"
    for kind, meaning in KINDS.items():
        if memory.most(kind):
            here, most = unit.text(memory.kinds[kind]), unit.text(memory.most(kind))
            yield f"  {kind:<14}{here:>12}{most:>11}  {meaning}"
    total = unit.text(memory.total)
    yield f"  {'total':<14}{total:>12}{'':>11}  predicted, at launch {memory.fullest}"
    yield from (f"  not counted: {what}" for what in memory.not_counted)


def time_lines(time: GpuTime | None) -> Iterator[str]:
    """The table of predicted seconds on a GPU, by what bounds the launches, and what they mean."""
    if time is None:
        return
    if time.reason:
        yield f"time: not predicted, since {time.reason}"
        return
    onward, eager = time.onward, time.eager
    assert onward is not None, "there is a prediction"
    yield f"{'time, ms':<16}{'Onward':>12}" + (f"{'eager':>11}" if eager else "")
    for kind, meaning in BOUNDS.items():
        of_eager = f"{1e3 * getattr(eager, kind):>11.2f}" if eager else ""
        yield f"  {kind:<14}{1e3 * getattr(onward, kind):>12.2f}{of_eager}  {meaning}"
    if eager:
        host = f"{time.operators} operators of eager PyTorch, at 30 us, views and casts at 10"
        yield f"  {'host':<14}{'CUDA graph':>12}{1e3 * time.eager_host:>11.2f}  {host}"
    step = f"under {1e3 * LEAST_PREDICTED:.0f}"
    step = step if time.step is None else f"{1e3 * time.step:.2f}"
    of_eager = f"{1e3 * time.eager_step:>11.2f}" if time.eager_step else ""
    yield f"  {'step':<14}{step:>12}{of_eager}  predicted: the larger of device and host"
    yield f"  {verdict(time)}"


def verdict(time: GpuTime) -> str:
    """What the predicted times say of Onward beside eager PyTorch."""
    if time.eager_reason:
        return f"eager PyTorch's time is unknown: {time.eager_reason}"
    if time.speedup is None:
        least = 1e3 * LEAST_PREDICTED
        return f"not predicted: the host limits steps under {least:.0f} ms"
    if time.speedup < 1:
        return f"predicted slower than eager PyTorch: {time.speedup:.2f}x its speed"
    host_bound = time.eager is not None and time.eager.total < time.eager_host
    why = ", which its host limits" if host_bound else ""
    return f"predicted {time.speedup:.2f}x as fast as eager PyTorch{why}"


def size_lines(sizes: Sequence[SizedMemory], largest: LargestBatch | None) -> Iterator[str]:
    """A table of memory by batch size, and the largest batch that fits."""
    if sizes:
        unit = Unit.of(max(item.nbytes or 0 for item in sizes))
        yield f"{'batch size':<16}{unit.name:>12}"
        for item in sizes:
            known = "" if item.nbytes is None else unit.text(item.nbytes)
            yield f"  {item.batch_size:<14}{known:>12}  {item.reason}".rstrip()
    if largest is not None:
        yield largest_line(largest)
    if sizes or largest is not None:
        yield f"  of samples like this batch's: {ALIKE}"


def largest_line(largest: LargestBatch) -> str:
    unit = Unit.of(largest.memory)
    within = f"largest batch within {unit.named(largest.memory)}"
    if largest.nbytes is None and largest.reason:
        return f"{within}: unknown, {largest.reason}"
    if largest.nbytes is None:
        least = "" if largest.beyond is None else f": one takes {unit.named(largest.beyond)}"
        return f"{within}: none{least}"
    beyond = "" if largest.beyond is None else f"; the next takes {unit.named(largest.beyond)}"
    more = f" ({largest.reason})" if largest.reason else ""
    return f"{within}: {largest.batch_size}, with {unit.named(largest.nbytes)}{beyond}{more}"


def row_lines(found: StepFacts) -> Iterator[str]:
    if found.rows is not None:
        yield from str(found.rows).splitlines()


def change_lines(changes: Sequence[Change]) -> Iterator[str]:
    """A table of what each pass did; passes that changed nothing are only named."""
    shown = [c for c in changes if c.ops or c.edits]
    if not shown:
        return
    yield f"{'pass':<42}{'edits':>7}{'nodes':>14}  ops"
    for change in shown:
        edits = "" if change.edits is None else str(change.edits)
        nodes = f"{change.before} -> {change.after}"
        name = f"{change.stage} {change.name}".strip()
        yield f"  {name:<40}{edits:>7}{nodes:>14}  {ops_text(change)}".rstrip()
    fused = [(op, n, c.name) for c in changes for op, n in c.fused.items()]
    if fused:
        yield "  fused: " + ", ".join(f"{n} {op.partition('::')[2]}" for op, n, _ in fused)
    idle = [c.name for c in changes if c not in shown]
    if idle:
        yield f"  changed nothing: {', '.join(dict.fromkeys(idle))}"


def ops_text(change: Change) -> str:
    """A change of ops as text: `+2 onward::FlashAttention, -2 Softmax`."""
    items = [f"{n:+d} {op}" for op, n in change.ops.items()]
    more = [f"{len(items) - _SHOWN} more"] if len(items) > _SHOWN else []
    return ", ".join([*items[:_SHOWN], *more])


def miss_lines(found: StepFacts) -> Iterator[str]:
    for miss in found.near_misses:
        first, *more = miss["modules"]
        places = f"{first} and {len(more)} more" if more else first
        yield f"not fused by {miss['pass']}: {miss['op']} at {places}: {miss['reason']}"


def launch_lines(found: StepFacts) -> Iterator[str]:
    """The table of launches by op."""
    whole = sum(item.seconds or 0.0 for item in found.launches)
    yield f"{f'launches: {found.launch_count}':<34}{'forward':>9}{'backward':>10}" + (
        f"{'ms':>10}{'share':>8}" if whole else ""
    )
    for item in found.launches:
        timed = ""
        if whole and item.seconds is not None:
            timed = f"{1e3 * item.seconds:>10.3f}{item.seconds / whole:>8.1%}"
        yield f"  {item.op:<32}{item.forward:>9}{item.backward:>10}{timed}"


@dataclass(frozen=True)
class Unit:
    """The unit of bytes in a table."""

    name: str
    nbytes: int

    @classmethod
    def of(cls, largest: int) -> Unit:
        """The unit for a table with this largest number: MiB, or KiB if it is small."""
        return cls("MiB", 2**20) if largest >= 4 * 2**20 else cls("KiB", 2**10)

    def text(self, nbytes: int) -> str:
        return f"{nbytes / self.nbytes:.2f}"

    def named(self, nbytes: int) -> str:
        return f"{self.text(nbytes)} {self.name}"


__all__ = ["Unit", "capture_lines", "headline", "largest_line", "ops_text", "text"]
