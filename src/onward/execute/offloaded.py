"""Launches whose operands lie outside of the device's memory: brought in, updated, taken out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from onward.execute.state_store import StateStore
from onward.kernels import KernelArguments
from onward.kernels.kernel import Launch
from onward.plan import Buffer, MemoryRegion, PlannedLaunch, part_ranges
from onward.plan.arena import aligned


@dataclass(frozen=True)
class OffloadedPart:
    """A part of a launch. launch: runs it. read, written: the tensors outside of the device's
    memory that it reads and writes, each with the one in its place there; the same where the store
    has none."""

    launch: Launch
    read: list[tuple[torch.Tensor, torch.Tensor]]
    written: list[tuple[torch.Tensor, torch.Tensor]]


def bound_away(
    planned: PlannedLaunch,
    arguments: KernelArguments,
    buffers: Sequence[Buffer],
    store: StateStore,
) -> Launch:
    """Binds a launch that reads or writes tensors of a store, in parts where it can be made so."""
    ranges = part_ranges(planned)
    given = [_part(arguments, r) for r in ranges] if ranges else [arguments]
    away = [x is not None and _is_away(x.buffer, buffers) for x in planned.inputs]
    made = [_is_away(y.buffer, buffers) for y in planned.outputs]
    return _in_turn(
        [_brought(planned.kernel.bind, part, away, made, store) for part in given], store
    )


def _is_away(buffer: int, buffers: Sequence[Buffer]) -> bool:
    return buffers[buffer].region is MemoryRegion.OFFLOADED


def _in_turn(parts: Sequence[OffloadedPart], store: StateStore) -> Launch:
    """Runs parts one after another. While one runs, the next is read from a disk."""

    def launch() -> None:
        store.ahead([home for home, _ in parts[0].read])
        for number, part in enumerate(parts, 1):
            if number < len(parts):
                store.ahead([home for home, _ in parts[number].read])
            store.bring_in(part.read)
            part.launch()
            store.take_out(part.written)
            store.release([home for home, _ in (*part.read, *part.written)])

    return launch


def _part(arguments: KernelArguments, elements: range) -> KernelArguments:
    """The arguments for some elements of the parameter; single numbers and seeds are of all."""
    whole = arguments.y.numel()

    def cut(x: torch.Tensor) -> torch.Tensor:
        return x.view(-1)[elements.start : elements.stop] if x.numel() == whole else x

    attrs = arguments.attrs
    if "site" in attrs:  # numbers drawn follow from the number of an element in the parameter
        attrs = {**attrs, "first": int(attrs.get("first", 0)) + elements.start}
    return replace(
        arguments,
        attrs=attrs,
        inputs=[None if x is None else cut(x) for x in arguments.inputs],
        outputs=[cut(y) for y in arguments.outputs],
        scratch=[cut(t) for t in arguments.scratch],
    )


def _brought(
    bind: Callable[[KernelArguments], Launch],
    arguments: KernelArguments,
    away: Sequence[bool],
    made: Sequence[bool],
    store: StateStore,
) -> OffloadedPart:
    """Binds a launch to what stands for its offloaded operands on the device. away, made: which
    inputs and outputs are offloaded."""
    read = [
        x for x, is_away in zip(arguments.inputs, away, strict=True) if is_away and x is not None
    ]
    written = [y for y, is_away in zip(arguments.outputs, made, strict=True) if is_away]
    if not store.is_staged:
        here = [(x, x) for x in read], [(y, y) for y in written]
        return OffloadedPart(bind(arguments), *here)
    places = _places([*read, *written], store)

    def placed(x: torch.Tensor, is_away: bool) -> torch.Tensor:
        return places[x.data_ptr()].view(x.shape) if is_away and x.numel() else x

    launch = bind(
        replace(
            arguments,
            inputs=[
                None if x is None else placed(x, is_away)
                for x, is_away in zip(arguments.inputs, away, strict=True)
            ],
            outputs=[
                placed(y, is_away) for y, is_away in zip(arguments.outputs, made, strict=True)
            ],
        )
    )
    return OffloadedPart(
        launch, [(x, placed(x, True)) for x in read], [(y, placed(y, True)) for y in written]
    )


def _places(tensors: Sequence[torch.Tensor], store: StateStore) -> dict[int, torch.Tensor]:
    """The tensor on the device that stands for each of these, by its address."""
    homes = {x.data_ptr(): x for x in tensors if x.numel()}
    stage = store.stage(sum(aligned(x.nbytes) for x in homes.values()))
    places: dict[int, torch.Tensor] = {}
    start = 0
    for address, x in homes.items():
        places[address] = stage[start : start + x.nbytes].view(x.dtype).view(x.shape)
        start += aligned(x.nbytes)
    return places


__all__ = ["OffloadedPart", "bound_away"]
