"""The ranks that train one model with a Trainer each: what they compare, and what they agree upon.

Each rank has its own share of every micro-batch, and the same weights. Before each step the ranks
exchange a few numbers, so that samples are numbered over all of them and nobody waits for a rank
that does something else. On one rank nothing is exchanged.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, fields
from hashlib import blake2b
from importlib.metadata import version
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import distributed

from onward.checkpoint.tensor_file import tensor_chunks
from onward.distribute import MeetingKind, Mesh, RanksApartError, ranks_of
from onward.errors import CheckpointError, OnwardError
from onward.execute import Executable, ProcessMesh
from onward.explanation.nonfinite import NonfiniteOrigin
from onward.mesh_sizes import auto_sizes
from onward.options import TrainerOptions
from onward.plan import sequence_hash
from onward.train.skipped_updates import FindOrigin

# what has to be equal on all ranks before a step, in the order in which ranks tell it
_ALIKE = (
    "the number of updates done", "the number of updates left out",
    "the number of the micro-batch in its window", "the number of samples before it",
    "the exchanges of the step", "the learning rate or another setting of the optimizer",
    "the exchanges among the ranks of a stage",
)  # fmt: skip


@dataclass(frozen=True)
class Share:
    """The place of this rank's batch within the micro-batch of all ranks. before: samples of the
    ranks in front of it. total: samples of all ranks."""

    before: int
    total: int


class Position(NamedTuple):
    """Where a Trainer stands in its run: updates done, windows left out since, micro-batches and
    samples of the open window."""

    updates: int
    left_out: int
    micro_steps: int
    samples: int


class Ranks:
    """The ranks of a Trainer with the option `mesh`; one rank without it.

    Raises OnwardError for options that ranks cannot train with together, and where the processes of
    torch.distributed are not those of the mesh.
    """

    def __init__(self, options: TrainerOptions) -> None:
        sizes = mesh_sizes(options)
        self.mesh = Mesh()
        if any(size > 1 for size in sizes.values()):
            require_own_batch(options)
            self.mesh = ProcessMesh(sizes, options.ranks_timeout)
        self._every = options.compare_ranks_every
        layers = self.mesh.size("pp")  # ranks that share them
        # the parts in which a batch runs through the layers
        self.micro_batches = (options.pipeline_microbatches or layers) if layers > 1 else 1
        self._compared: int | None = None  # updates done when the weights were compared last
        self._lost = False
        self._hashes: MutableMapping[Executable, list[int]] = WeakKeyDictionary()
        every = ranks_of(self.mesh.axes, self.mesh.sizes)
        places = [mesh.coordinate("pp") for mesh in every]
        self._first_of_stage = [places.index(place) for place in places]  # by rank

    @property
    def is_one(self) -> bool:
        """Says whether this process trains alone."""
        return self.mesh.ranks == 1

    @property
    def is_first(self) -> bool:
        """Says whether this rank has the number 0, which writes files for all."""
        return self.mesh.rank == 0

    # ---- state

    def require_between_windows(self, is_first: bool) -> None:
        """Raises OnwardError within an accumulation window of several ranks. is_first: whether none
        is open."""
        if not is_first and not self.is_one:
            raise OnwardError(
                "state_dict within an accumulation window would hold the gradients of one rank "
                "alone; fix: call it between updates, or use save, which keeps those of all ranks"
            )

    def meet_for_state(self, is_cut: bool) -> None:
        """Waits for the ranks that have other parts of weights or of the optimizer's state, where
        they are cut. Raises OnwardError where this rank is no longer with them."""
        if is_cut:
            self.require_together()
            self.mesh.gathered(MeetingKind.STATE)

    @contextmanager
    def saving(self, position: Position) -> Generator[None]:
        """A context in which this rank takes what it has to save for itself; the ranks meet at its
        end. Raises CheckpointError where another one has failed in it, and OnwardError where one
        stands elsewhere."""
        try:
            yield
        except Exception:
            with suppress(RanksApartError):  # this error is the one to tell
                self.mesh.gathered(MeetingKind.SAVE, [0, *position])
            raise
        rows = self.mesh.gathered(MeetingKind.SAVE, [1, *position])
        _require_of_all([row[0] for row in rows], "take its part of the checkpoint")
        for rank, row in enumerate(rows):
            for what, value, other in zip(_ALIKE, row[1:], rows[0][1:], strict=False):
                if value != other:
                    raise _elsewhere(what, rank, 0)

    @contextmanager
    def writing_files(self, meeting: MeetingKind = MeetingKind.SAVE) -> Generator[None]:
        """A context in which rank 0 writes files, while the others `wait_for_files`."""
        try:
            yield
        except BaseException:
            self.mesh.gathered(meeting, [0])
            raise
        self.mesh.gathered(meeting, [1])

    def wait_for_files(self, meeting: MeetingKind = MeetingKind.SAVE) -> None:
        """Waits until rank 0 has written. Raises CheckpointError where it could not."""
        [written], *_ = self.mesh.gathered(meeting, [1])
        _require_of_all([written], "write the checkpoint")

    def checkpoint_of_first(self, name: str, failed: Exception | None) -> str:
        """The name of the checkpoint that rank 0 has read. failed: why it could not. Raises that,
        and on the others a CheckpointError of the same text."""
        said = {"name": name} if failed is None else {"failed": str(failed)}
        first = self.mesh.gathered_facts(said, MeetingKind.RESUME)[0]
        if self.is_first and failed is not None:
            raise failed
        if "failed" in first:
            raise CheckpointError(first["failed"])
        return first["name"]

    def require_same_files(
        self, name: str, facts: Mapping[str, Any], failed: Exception | None = None
    ) -> None:
        """Raises CheckpointError where the ranks have read other checkpoints. failed: why this one
        could read none, which it raises."""
        said = _number(repr((name, sorted(facts.items(), key=str))).encode())
        rows = self.mesh.gathered(MeetingKind.RESUME, [int(failed is None), said])
        if failed is not None:
            raise failed
        _require_of_all([row[0] for row in rows], f"read the checkpoint {name}")
        other = next((rank for rank, row in enumerate(rows) if row != rows[0]), None)
        if other is not None:
            raise CheckpointError(
                f"rank {other} has read another checkpoint than rank 0 (here: {name}); fix: name "
                "the checkpoint's own folder, on a file system that all ranks see"
            )

    # ---- before a step

    @property
    def are_together(self) -> bool:
        """Whether nothing has interrupted what this rank does together with the others."""
        return not (self._lost or self.mesh.has_given_up)

    def require_together(self) -> None:
        """Raises OnwardError where an exception has interrupted a run of this rank, in which the
        others may still wait, or this one has waited for another one in vain."""
        if not self.are_together:
            raise OnwardError(
                "an exception interrupted a step that the ranks make together, so that this rank "
                "is no longer where the others are; fix: start the program again, and resume from "
                "a checkpoint"
            )

    def compare(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        options: TrainerOptions,
        updates: int,
        is_whole: Callable[[torch.Tensor], bool],
    ) -> None:
        """Compares model, options and optimizer with those of the other ranks: before the first
        step, after a state was loaded, and where the option `compare_ranks_every` says so.
        is_whole: whether this rank has all of a parameter. Raises OnwardError where they differ."""
        if self.is_one:
            return
        done, every = self._compared, self._every
        if done is not None and (every is None or updates < done + every):
            return
        told = self.mesh.gathered_facts(_facts(model, optimizer, options, is_whole))
        for rank, facts in enumerate(told):
            different = next((k for k, v in told[0].items() if facts.get(k) != v), None)
            more = next((k for k in facts if k not in told[0]), None)
            if different is not None or more is not None:
                raise OnwardError(_differ(rank, str(different or more), facts, told[0]))
        self._compared = updates

    def forget(self) -> None:
        """Has the weights compared again before the next step, since a state was loaded. Ranks of a
        pipeline that have left a step do not go on: messages of it may still come."""
        stays = not self.are_together and self.mesh.size("pp") > 1
        if not self.are_together and not stays:
            self.mesh.begin_again()
        self._compared, self._lost = None, stays

    def preparing(self) -> AbstractContextManager[None]:
        """A context that tells the other ranks where this one fails to prepare its batch."""
        return self.mesh.telling()

    def share(
        self,
        position: Position,
        batch_size: int,
        executable: Executable,
        settings: Mapping[str, Any],
        inputs: Mapping[str, Any],
    ) -> Share:
        """Tells the other ranks where this one stands and how many samples it has, and returns its
        share. executable: what it is about to run. settings: of the update. inputs: of the batch.
        Raises OnwardError where a rank stands elsewhere, where ranks along `tp`, `cp` or `pp` have
        other batches, and where no rank has a row."""
        if self.is_one:
            return Share(0, batch_size)
        alike = self._alike(position, executable, settings)
        own = [batch_size, self.mesh.share, self._batch_digest(inputs)]
        rows = self.mesh.gathered(MeetingKind.MICRO_BATCH, [*own, *alike])
        self._require_alike([row[3:] for row in rows])
        self._require_one_batch([row[1:3] for row in rows])
        sizes = {row[1]: row[0] for row in rows}  # by share
        if not any(sizes.values()):
            raise OnwardError(
                "every rank has a batch of 0 rows, which is no step; fix: end the epoch when the "
                "last rank has no rows"
            )
        before = sum(size for share, size in sizes.items() if share < self.mesh.share)
        return Share(before, sum(sizes.values()))

    def end_window(
        self, position: Position, executable: Executable, inputs: Mapping[str, Any]
    ) -> None:
        """Tells the other ranks that this one ends its window early. Raises OnwardError where a
        rank stands elsewhere."""
        if not self.is_one:
            alike = self._alike(position, executable, inputs)
            self._require_alike(self.mesh.gathered(MeetingKind.WINDOW_END, alike))

    def meet_to_evaluate(
        self, executable: Executable, inputs: Mapping[str, Any], seed: torch.Tensor
    ) -> torch.Tensor:
        """Waits until all ranks evaluate a batch. inputs: of it. seed: i64[2], what this rank would
        draw from. Returns the seed of rank 0, from which all draw. Raises OnwardError where the
        exchanges of a rank are others, and where ranks along `tp` have other batches."""
        own = [self.mesh.share, self._batch_digest(inputs), *self._exchanges(executable)]
        rows = self.mesh.gathered(MeetingKind.EVALUATION, [*own, *seed.tolist()])
        for rank, (_, _, other, among, *_) in enumerate(rows):
            first = self._first_of_stage[rank]
            if other != rows[0][2] or among != rows[first][3]:
                raise OnwardError(
                    f"the evaluation of rank {rank} exchanges other tensors than that of rank "
                    f"{first}; fix: batches of one kind on every rank"
                )
        self._require_one_batch([row[:2] for row in rows])
        return torch.tensor(rows[0][4:], dtype=torch.int64)

    def cuts_of_first(self, cuts: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """How rank 0 has chosen to cut parameters: by path, the dim and its groups, or the stages.
        Other ranks have chosen by other batches."""
        said = {name: " ".join(map(str, numbers)) for name, numbers in cuts.items()}
        told = self.mesh.gathered_facts(said)[0]
        return {name: tuple(map(int, text.split())) for name, text in told.items()}

    def seed(self, seed: torch.Tensor) -> torch.Tensor:
        """The seed i64[2] of a window, which is that of rank 0, whatever seeds the others drew."""
        if self.is_one:
            return seed
        return torch.tensor(
            self.mesh.gathered(MeetingKind.SEED, seed.tolist())[0], dtype=torch.int64
        )

    def origin_of_all(self, find: FindOrigin) -> FindOrigin:
        """A function that finds the origin of infinite and NaN gradients on all ranks, which call
        it together, and names the ranks that have it. find: what finds it on this one."""
        if self.is_one:
            return find

        def find_all() -> NonfiniteOrigin | str | None:
            with self.running():
                origin = find()
            is_here = isinstance(origin, NonfiniteOrigin) and not origin.is_of_others
            told = self.mesh.gathered_facts(
                {"origin": str(origin)} if is_here else {}, MeetingKind.ORIGIN
            )
            named = [f"on rank {r} {f['origin']}" for r, f in enumerate(told) if f]
            return "; ".join(named[:3]) if named else origin

        return find_all

    @contextmanager
    def running(self, writes_nothing: Executable | None = None) -> Generator[None]:
        """A context after whose failure no other step is made together. writes_nothing: the plan
        that runs in it and changes no state; the ranks go on where it fails behind its last
        exchange."""
        try:
            yield
        except BaseException as error:
            if writes_nothing is not None and writes_nothing.has_exchanged:
                raise
            self._lost = not self.is_one
            if not isinstance(error, RanksApartError):
                self.mesh.leave(error)
            raise

    @contextmanager
    def repeating(self, meeting: MeetingKind) -> Generator[None]:
        """A context in which all ranks run their last step once more. meeting: what for. Raises
        OnwardError where this rank is no longer with the others."""
        self.require_together()
        self.mesh.gathered(meeting)
        with self.running():
            yield

    def _batch_digest(self, inputs: Mapping[str, Any]) -> int:
        """The number that tells batches apart, where several ranks have to take the same one."""
        if self.mesh.batches == self.mesh.ranks:
            return 0
        tensors = {n: x for n, x in inputs.items() if isinstance(x, torch.Tensor)}
        return _number("".join(f"{n} {digest(tensors[n])}" for n in sorted(tensors)).encode())

    def _require_one_batch(self, rows: Sequence[Sequence[int]]) -> None:
        """Raises OnwardError where ranks with one share have other batches. rows: share and digest
        of each rank."""
        found: dict[int, tuple[int, int]] = {}
        for rank, (share, batch) in enumerate(rows):
            first, other = found.setdefault(share, (rank, batch))
            if batch != other:
                raise OnwardError(
                    f"rank {rank} has another batch than rank {first}, with which it shares the "
                    "weights (tp), the positions (cp) or the layers (pp); fix: give ranks along "
                    "tp, cp and pp the same batch, such as by a sampler of num_replicas=the ranks "
                    "along dp_replicate and dp_shard"
                )

    def _alike(
        self, position: Position, executable: Executable, inputs: Mapping[str, Any]
    ) -> list[int]:
        settings = _number(repr(sorted(inputs.items())).encode())
        shared, among = self._exchanges(executable)
        return [*position, shared, settings, among]

    def _exchanges(self, executable: Executable) -> list[int]:
        """The numbers that tell apart what a plan exchanges: on all ranks, and among the ranks of
        one stage, which is all of it too where ranks do not share the layers."""
        found = self._hashes.get(executable)
        if found is None:
            axes = {"pp"} if self.mesh.size("pp") > 1 else None
            texts = [sequence_hash(executable.plan, each) for each in (axes, None)]
            found = self._hashes[executable] = [_number(text.encode()) for text in texts]
        return found

    def _require_alike(self, rows: Sequence[list[int]]) -> None:
        for rank, row in enumerate(rows):
            stage = rows[self._first_of_stage[rank]]
            others = [*rows[0][:-1], stage[-1]]
            for what, value, other in zip(_ALIKE, row, others, strict=True):
                if value != other:
                    peer = 0 if what != _ALIKE[-1] else self._first_of_stage[rank]
                    raise _elsewhere(what, rank, peer)


def require_own_batch(options: TrainerOptions) -> None:
    """Raises OnwardError where the options split the batch of one rank by what that rank has
    free."""
    if options.auto_micro_batch:
        raise OnwardError(
            "auto_micro_batch splits the batch of one rank, whose steps would not be those of the "
            "others; fix: leave it out, or mesh=None"
        )


def mesh_sizes(options: TrainerOptions) -> dict[str, int]:
    """The number of ranks along each axis of the option `mesh`; none for one process."""
    if isinstance(options.mesh, str):
        is_joined = distributed.is_available() and distributed.is_initialized()
        return auto_sizes(distributed.get_world_size() if is_joined else 1, options.zero)
    return dict(options.mesh or {})


def _facts(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    options: TrainerOptions,
    is_whole: Callable[[torch.Tensor], bool],
) -> dict[str, str]:
    """What has to be equal on all ranks, by words for it; not parameters that ranks have parts
    of."""
    facts = {
        "the version of onward": version("onward"),
        "the version of torch": torch.__version__,
        "the class of the model": type(model).__qualname__,
        "the class of the optimizer": type(optimizer).__qualname__,
        "the number of the optimizer's groups": str(len(optimizer.param_groups)),
    }
    for field in fields(options):
        facts[f"the option {field.name}"] = repr(getattr(options, field.name))
    held = {name: p for name, p in model.named_parameters() if is_whole(p)}
    held |= dict(model.named_buffers())
    for name, tensor in held.items():
        kind = "trained" if tensor.requires_grad else "not trained"
        shape = ",".join(map(str, tensor.shape))
        facts[f"the type of {name}"] = f"{str(tensor.dtype)[6:]}[{shape}], {kind}"
    names = {p: name for name, p in model.named_parameters()}
    for i, group in enumerate(optimizer.param_groups):
        for key, setting in group.items():
            said = len(setting) if key == "params" else setting
            what = "the number of parameters" if key == "params" else key
            facts[f"{what} of the optimizer's group {i}"] = repr(said)
        named = [names.get(p, "?") for p in group["params"]]
        facts[f"which parameters are in the optimizer's group {i}"] = str(
            _number("\n".join(named).encode())
        )
    for name, tensor in held.items():
        facts[f"the value of {name}"] = digest(tensor)
    for name, tensor in held.items() if not options.zero else ():
        for key, part in optimizer.state.get(tensor, {}).items():
            if isinstance(part, torch.Tensor) and part.shape in (tensor.shape, ()):
                facts[f"the value of {key} of {name}"] = digest(part)
    return facts


def _elsewhere(what: str, rank: int, peer: int) -> OnwardError:
    """The error about ranks that stand at other places of their runs."""
    return OnwardError(
        f"{what} of rank {rank} is not that of rank {peer}, so that the ranks cannot go on "
        "together; fix: call the same methods on every rank, with the same schedule and batches of "
        "one kind"
    )


def _require_of_all(could: Sequence[int], what: str) -> None:
    """Raises CheckpointError where a rank has failed. could: whether each could do what it had to
    do. what: that is."""
    failed = next((rank for rank, each in enumerate(could) if not each), None)
    if failed is not None:
        raise CheckpointError(f"rank {failed} could not {what}; fix: see what it says")


def _differ(rank: int, what: str, facts: Mapping[str, str], first: Mapping[str, str]) -> str:
    """The message about a fact that two ranks disagree upon."""
    if what.startswith("the value of "):
        fix = "load the same weights on every rank, or call torch.manual_seed with one number first"
        return f"{what} on rank {rank} is not that of rank 0; fix: {fix}"
    return (
        f"{what} on rank {rank} ({_short(facts.get(what))}) is not that of rank 0 "
        f"({_short(first.get(what))}); fix: start every rank with the same program and arguments"
    )


def _short(text: str | None) -> str:
    said = text or "none"
    return said if len(said) <= 80 else f"{said[:76]} ..."


def digest(*tensors: torch.Tensor) -> str:
    """A digest of the types, shapes and elements of tensors, whatever their layout in memory."""
    found = blake2b(digest_size=8)
    for chunk in tensor_chunks({str(i): x.detach() for i, x in enumerate(tensors)}):
        found.update(chunk)
    return found.hexdigest()


def _number(data: bytes) -> int:
    """A digest as an i64."""
    return struct.unpack("<q", blake2b(data, digest_size=8).digest())[0]


__all__ = ["Position", "Ranks", "Share", "digest", "mesh_sizes", "require_own_batch"]
