"""Collectives by torch.distributed, on the process group of a mesh's axis.

A start queues the exchange and returns; the wait of the same number ends it. torch's calls between
the two may read and write the operands at any time, so that the plan keeps them in place.

Gloo sums a list of tensors through a copy of all of them, gathers through a copy of the whole, and
scatters a sum by a whole all-reduce of a copy. So on CPUs tensors of 1 MiB and more are summed one
by one, in place; two ranks gather by a broadcast of each part, in place; the copy of a scattered
sum is a buffer that is kept from one exchange to the next, rather than freed memory that malloc
does not give back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from onward.errors import OnwardError
from onward.graph.ops.collective import MOST, WAIT, is_summed_alone
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch
from onward.kernels.target import Target


@dataclass(frozen=True)
class PendingExchange:
    """An exchange between its start and its wait. works: to wait for. results: the tensors that it
    writes. divisor: of the results, for a mean; 1 for other reductions. operands: tensors that it
    reads, kept alive. whole: a borrowed buffer with a whole sum, of which the result is the part
    with this number; None where the exchange writes the result itself."""

    works: tuple[Any, ...]
    results: tuple[torch.Tensor, ...]
    divisor: int = 1
    operands: tuple[torch.Tensor, ...] = ()
    whole: torch.Tensor | None = None
    part: int = 0


class ExchangeWatch(Protocol):
    """Names the rank that does not come to an exchange."""

    def waiting(self, where: str) -> AbstractContextManager[None]:
        """A context in which this rank exchanges something. where: what it does, behind "rank 0 ".
        Raises an error that names the rank that has not come."""
        ...

    def finish(self, works: Sequence[Any]) -> None:
        """Waits for torch's works on the host. Raises RuntimeError where one fails."""
        ...


@dataclass
class RankGroups:
    """The process groups that a plan's collectives run on, by mesh axis, and the exchanges that
    have started in this run and have not been waited for, by number. watch: names a rank that does
    not come; None without a mesh. exchanges: of the plan. spare: buffers for copies of what is
    exchanged, by type and number of elements. started: exchanges of this run so far."""

    groups: Mapping[str, Any] = field(default_factory=dict)
    watch: ExchangeWatch | None = None
    exchanges: int = 0
    pending: dict[int, PendingExchange] = field(default_factory=dict)
    spare: dict[tuple[torch.dtype, int], list[torch.Tensor]] = field(default_factory=dict)
    started: int = 0

    @property
    def are_over(self) -> bool:
        """Whether the run has made all exchanges of its plan."""
        return self.started == self.exchanges and not self.pending

    def borrowed(self, x: torch.Tensor) -> torch.Tensor:
        """A flat copy of x in a buffer of this session, to be given back."""
        kept = self.spare.get((x.dtype, x.numel()))
        buffer = kept.pop() if kept else torch.empty(x.numel(), dtype=x.dtype, device="cpu")
        return buffer.copy_(x.reshape(-1))

    def give_back(self, buffer: torch.Tensor) -> None:
        """Keeps a borrowed buffer for the next exchange of so many elements."""
        self.spare.setdefault((buffer.dtype, buffer.numel()), []).append(buffer)

    def group(self, axis: str) -> Any:
        """The process group of an axis. Raises OnwardError where the mesh has none."""
        found = self.groups.get(axis)
        if found is None:
            raise OnwardError(
                f"no process group runs along the axis {axis}; fix: a mesh with process groups "
                f"(onward.execute.ProcessMesh) of which {axis} is an axis"
            )
        return found

    def settle(self) -> None:
        """Waits for what a run that failed has left started."""
        while self.pending:
            _, exchange = self.pending.popitem()
            with suppress(RuntimeError):  # the run that started it has raised its error
                for work in exchange.works:
                    work.wait()

    def waiting(self, attrs: Mapping[str, Any]) -> AbstractContextManager[None]:
        """A context in which this rank waits in an exchange, which names the rank that does not
        come."""
        if self.watch is None:
            return nullcontext()
        what, number, axis = (attrs[name] for name in ("record", "sequence", "axis"))
        is_own = number <= self.exchanges  # those of pipelines have numbers of the mesh
        of = f"{number} of {self.exchanges}" if is_own else str(number)
        return self.watch.waiting(f"is in exchange {of} along {axis}, of {what},")


def _ranks(args: KernelArguments) -> RankGroups:
    assert isinstance(args.ranks, RankGroups), "a plan with collectives is bound with their groups"
    return args.ranks


def _operator(reduction: str) -> Any:
    """torch's reduction; a mean is a sum, divided by the wait, since Gloo has no mean."""
    return dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM


def _torch(new: str, old: str) -> Callable[..., Any]:
    """A function of torch.distributed, by its name since torch 2.13 or by that before."""
    found: Callable[..., Any] = getattr(dist, new, None) or getattr(dist, old)
    return found


def _start(begin: Callable[[KernelArguments, Any], PendingExchange]) -> Callable[..., Launch]:
    """The `Kernel.bind` of a start."""

    def bind(args: KernelArguments) -> Launch:
        ranks, number = _ranks(args), int(args.attrs["sequence"])
        group = ranks.group(args.attrs["axis"])

        def launch() -> None:
            assert number not in ranks.pending, "a collective starts twice in one run"
            with ranks.waiting(args.attrs):
                ranks.pending[number] = begin(args, group)
            ranks.started += 1

        return launch

    return bind


def _in_results(args: KernelArguments) -> tuple[torch.Tensor, ...]:
    """The results, after the inputs have been copied there."""
    for i, y in enumerate(args.outputs):
        if y.data_ptr() != args.x(i).data_ptr():
            y.copy_(args.x(i))
    return tuple(args.outputs)


def _divisor(args: KernelArguments) -> int:
    return int(args.attrs["size"]) if args.attrs["reduction"] == "mean" else 1


def _all_reduce(args: KernelArguments, group: Any) -> PendingExchange:
    ys, by = _in_results(args), _operator(args.attrs["reduction"])
    alone = [y for y in ys if is_summed_alone(len(ys), y.nbytes, y.device.type)]
    together = [y for y in ys if not any(y is other for other in alone)]
    works = [dist.all_reduce(y, by, group, async_op=True) for y in alone]
    if together:
        options = dist.AllreduceCoalescedOptions()
        options.reduceOp = by
        works.append(group.allreduce_coalesced(together, options))
    return PendingExchange(tuple(works), ys, _divisor(args))


def _broadcast(args: KernelArguments, group: Any) -> PendingExchange:
    ys, root = _in_results(args), int(args.attrs["root"])
    works = [dist.broadcast(y, group=group, group_src=root, async_op=True) for y in ys]
    return PendingExchange(tuple(works), ys)


def _reduce_scatter(args: KernelArguments, group: Any) -> PendingExchange:
    x, by = args.x().contiguous(), _operator(args.attrs["reduction"])
    if x.device.type == "cpu":
        whole = _ranks(args).borrowed(x)
        work = dist.all_reduce(whole, by, group, async_op=True)
        place = dist.get_rank(group)
        return PendingExchange((work,), (args.y,), _divisor(args), (x,), whole, place)
    work = _torch("reduce_scatter_single", "reduce_scatter_tensor")(
        args.y, x, by, group, async_op=True
    )
    return PendingExchange((work,), (args.y,), _divisor(args), (x,))


def _all_gather(args: KernelArguments, group: Any) -> PendingExchange:
    x, y = args.x().contiguous(), args.y
    flat = y if len(args.inputs) == 1 else y.view(-1)  # of another shape than x: `into`'s
    if x.device.type == "cpu" and dist.get_world_size(group) == 2:
        parts = flat.view(2, -1)
        own = parts[dist.get_rank(group)]
        if own.data_ptr() != x.data_ptr():
            own.copy_(x.reshape(-1))
        works = [dist.broadcast(parts[i], group=group, group_src=i, async_op=True) for i in (0, 1)]
        return PendingExchange(tuple(works), (y,), operands=(x,))
    work = _torch("all_gather_single", "all_gather_into_tensor")(flat, x, group, async_op=True)
    return PendingExchange((work,), (y,), operands=(x,))


def _all_to_all(args: KernelArguments, group: Any) -> PendingExchange:
    x = args.x().contiguous()
    work = dist.all_to_all_single(args.y, x, group=group, async_op=True)
    return PendingExchange((work,), (args.y,), operands=(x,))


def _exchange(args: KernelArguments, group: Any) -> PendingExchange:
    x, place, attrs = args.x().contiguous(), dist.get_rank(group), args.attrs
    if "shift" in attrs:
        shift, ranks = int(attrs["shift"]), int(attrs["size"])
        to, source = (place + shift) % ranks, (place - shift) % ranks
    else:
        own = attrs.get("partner")
        to = source = place ^ int(attrs["distance"]) if own is None else int(own)
    tag = int(attrs["sequence"])  # several exchanges of the same partners may be under way
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, x, dist.get_global_rank(group, to), group, tag),
            dist.P2POp(dist.irecv, args.y, dist.get_global_rank(group, source), group, tag),
        ]
    )
    return PendingExchange(tuple(works), (args.y,), operands=(x,))


def _send(args: KernelArguments, group: Any) -> PendingExchange:
    x, to = args.x().contiguous(), dist.get_global_rank(group, int(args.attrs["to"]))
    tag = int(args.attrs["sequence"])  # of one message at both ends
    work = dist.isend(x, to, group, tag)
    return PendingExchange((work,), (args.y,), operands=(x,))


def _receive(args: KernelArguments, group: Any) -> PendingExchange:
    source = dist.get_global_rank(group, int(args.attrs["source"]))
    work = dist.irecv(args.y, source, group, int(args.attrs["sequence"]))
    return PendingExchange((work,), (args.y,))


def _bind_wait(args: KernelArguments) -> Launch:
    ranks, number = _ranks(args), int(args.attrs["sequence"])

    def launch() -> None:
        exchange = ranks.pending.pop(number)
        with ranks.waiting(args.attrs):
            if ranks.watch is not None and exchange.results[0].device.type == "cpu":
                ranks.watch.finish(exchange.works)
            else:
                for work in exchange.works:
                    work.wait()
        if exchange.whole is not None:
            (y,) = exchange.results
            y.copy_(exchange.whole.view(-1, y.numel())[exchange.part].view(y.shape))
            ranks.give_back(exchange.whole)
        if exchange.divisor > 1:
            for y in exchange.results:
                y.div_(exchange.divisor)

    return launch


def _where(target: Target) -> str | None:
    return None if dist.is_available() else "this build of torch has no torch.distributed"


def _copied(spec: KernelSpec) -> int:
    """The bytes of a copy of the first input, made where it is not contiguous."""
    x = spec.inputs[0]
    return 0 if x is None else x.nbytes


_PAIRS = tuple((i, i) for i in range(MOST))
_IN_PLACE = {"AllReduceStart": _all_reduce, "BroadcastStart": _broadcast}
_APART = {
    "ReduceScatterStart": _reduce_scatter,
    "AllGatherStart": _all_gather,
    "AllToAllStart": _all_to_all,
    "ExchangeStart": _exchange,
    "SendStart": _send,
    "ReceiveStart": _receive,
}
_KERNELS = {
    **{
        op: Kernel(
            f"dist{begin.__name__}", _start(begin), where=_where, inplace=_PAIRS, recordable=False
        )
        for op, begin in _IN_PLACE.items()
    },
    **{
        op: Kernel(
            f"dist{begin.__name__}", _start(begin), where=_where, workspace=_copied,
            inplace=((0, 1),) if op == "AllGatherStart" else (), recordable=False,
        )
        for op, begin in _APART.items()
    },
    # A wait's results lie where the start has written them (`plan/storages.py`)
    WAIT: Kernel("dist_wait", _bind_wait, where=_where, recordable=False),
}  # fmt: skip
TABLE: dict[str, tuple[Kernel, ...]] = {op: (kernel,) for op, kernel in _KERNELS.items()}

__all__ = ["TABLE", "ExchangeWatch", "PendingExchange", "RankGroups"]
