"""Accumulation window: its progress, and the seeds that its micro-batches draw from."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from onward.errors import OnwardError
from onward.execute import Executable
from onward.graph.signature import REPLICA, WINDOW, Signature
from onward.prepare.seed_stream import WORD, SeedStream
from onward.train.state_part import State, StatePart, check_count, check_like, require, unfit

REPLICA_SUMS = "window_replica_sums"  # the entry of a state with the sums of `REPLICA`


class AccumulationWindow:
    """The micro-batches of one update. They share a seed; samples are numbered across them.

    size: micro-batches of a window. micro_steps: those done in the open window. samples: seen in
    it. steps: all micro-batches of the session. left_out: windows without an update since the last
    update. evaluations: since the last micro-batch. seed: i64[2], two words of 32 bits. sums: what
    the open window has added up, by the names of `WINDOW` and, where replicas have means of their
    own, of `REPLICA`, f64[]. by_labels: whether it counts
    labels; otherwise each micro-batch counts as one. loss: f64[], of the window that ended last.
    parts: those of the next micro-batch that are done, where it is split to fit into memory.
    """

    def __init__(self, size: int, seed: int | None) -> None:
        self.size = size
        self.micro_steps = 0
        self.parts = 0
        self.samples = 0
        self.steps = 0
        self.left_out = 0
        self.evaluations = 0
        self.seed = torch.zeros(2, dtype=torch.int64)
        self.sums: dict[str, torch.Tensor] = _zeros()
        self.by_labels = False
        self.loss: torch.Tensor | None = None
        self._kind = torch.float32  # of a loss
        self._stream = SeedStream(seed)

    @property
    def is_first(self) -> bool:
        """Whether the next micro-batch, or the next part of one, opens a window."""
        return self.micro_steps == 0 and self.parts == 0

    @property
    def is_last(self) -> bool:
        """Whether the next micro-batch ends the window with an update."""
        return self.micro_steps >= self.size - 1

    @property
    def weight(self) -> float:
        """The weight of a micro-batch's loss in the window's loss, which is the mean."""
        return 1.0 / self.size

    @property
    def offset(self) -> int:
        """The number, within the window, of the next micro-batch's first sample."""
        return 0 if self.is_first else self.samples

    def number(self, updates: int) -> tuple[int, int]:
        """The number of the present window, unique for its seed: updates done, windows without one
        since."""
        return updates, self.left_out

    def inputs(self, signature: Signature) -> dict[str, torch.Tensor]:
        """What the window has added up, by graph input. Raises OnwardError where the micro-batches
        before counted labels and this one does not, or the other way round."""
        by_labels = bool(signature.windowed)
        if not self.is_first and by_labels != self.by_labels:
            ways = ["over its labels", "of the micro-batches' losses"]
            before, now = ways if self.by_labels else reversed(ways)
            raise OnwardError(
                f"the loss of the open accumulation window is the mean {before}, but this "
                f"micro-batch's graph takes the mean {now}; fix: "
                'gradient_accumulation_average="micro_batches", or one kind of loss in a window'
            )
        return {name: self.sums.get(key, _zero()) for key, name in signature.window.items()}

    def add(self, executable: Executable, loss: torch.Tensor) -> None:
        """Adds up a micro-batch that has run, with this loss f[]."""
        self._kind = loss.dtype
        self.by_labels = bool(executable.plan.signature.windowed)
        self.sums = self._with(executable, loss)

    def loss_with(self, executable: Executable, loss: torch.Tensor) -> float:
        """The loss of the window if a micro-batch that has run, with this loss f[], ends it."""
        sums = self._with(executable, loss)
        is_mean = self.size > 1 or executable.plan.signature.windowed
        return float(sums["loss"] / sums["divisor"]) if is_mean else float(loss)

    def _with(self, executable: Executable, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        """The sums with another micro-batch."""
        named = executable.plan.signature.windowed
        if named:
            return {key: executable.output(name) for key, name in named.items()}
        if self.size == 1:
            return self.sums | {"loss": loss}
        count, total = self.sums["labels"] + 1, self.sums["loss"] + loss.double()
        made = (torch.ones_like(count), count, count, total)
        return dict(zip(WINDOW, made, strict=True))

    def scale(self) -> float:
        """The factor of the sums of gradients in an update without another micro-batch, so that the
        window's loss is the mean over what there was; the replica's, where each has its own."""
        weight = float(torch.tensor(self.weight, dtype=torch.float32))  # as the graphs had it
        own = "replica_divisor" if "replica_divisor" in self.sums else "divisor"
        unit, divisor = (float(self.sums[key]) or 1.0 for key in ("unit", own))
        return unit / (weight * divisor)

    def seed_key(self) -> tuple[int, bool]:
        """The number that seeds of windows follow from (`SeedStream.aside`), and whether the
        Trainer's own do; a window with a seed of its own draws them from a generator."""
        state = self._stream.state()
        return state["stream"][0], state["generator"] is None

    def advance_part(self, batch_size: int) -> None:
        """Counts a part of a micro-batch, with more to come."""
        self.samples = self.offset + batch_size
        self.parts += 1

    def undo_point(self) -> Callable[[], None]:
        """A function that takes the window back to where it is now."""
        before, stream = dict(vars(self)), self._stream.save_point()

        def undo() -> None:
            vars(self).update(before)
            self._stream.go_back(stream)

        return undo

    def advance(self, batch_size: int, updated: bool) -> None:
        """Counts one micro-batch; `updated`: it ended with an update."""
        self.samples = self.offset + batch_size
        self.steps += 1
        self.parts = 0
        if self.is_last:
            self.end(updated)
        else:
            self.micro_steps += 1
            self.evaluations = 0

    def end(self, updated: bool) -> None:
        """Ends the window, by an update or, where it was left out, without."""
        self.evaluations = self.micro_steps = self.parts = 0
        self.left_out = 0 if updated else self.left_out + 1
        self.loss = self.mean_loss()
        self.sums = _zeros()

    def leave(self) -> None:
        """Forgets the micro-batches of an open window."""
        self.micro_steps = self.parts = 0
        self.sums = _zeros()

    def mean_loss(self) -> torch.Tensor:
        """The loss of the micro-batches of the window, f[]."""
        total = self.sums["loss"]
        is_mean = self.size > 1 or self.by_labels
        return (total / self.sums["divisor"]).to(self._kind) if is_mean else total

    def seed_undo(self) -> Callable[[], None]:
        """A function that takes back a seed drawn after this call, unless a step has run with it.
        Made before the draw, it also serves where an interrupt comes right after that."""
        before, seed, steps = self._stream.save_point(), self.seed, self.steps

        def undo() -> None:
            if self.steps == steps:
                self._stream.go_back(before)
                self.seed = seed

        return undo

    def draw_seed(
        self, updates: int, agree: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """The window's seed, which its first step draws. updates: done before the window. agree:
        makes it the seed of all ranks."""
        if self.is_first:
            self.seed = agree(self._stream.seed(self.number(updates)))
        return self.seed

    def evaluation_seed(self, updates: int) -> torch.Tensor:
        """The seed of the next evaluation, for a forward that draws random numbers in evaluation
        mode too."""
        place = 1 + self.micro_steps + (self.evaluations << 32)
        return self._stream.aside(self.number(updates), place)

    def part(self) -> StatePart:
        """The window's entries of `Trainer.state_dict`."""
        return StatePart(self._save, self._check, self._restore)

    def _save(self) -> dict[str, Any]:
        return {
            "gradient_accumulation_steps": self.size,
            "micro_steps": self.micro_steps,
            "samples": self.samples,
            "left_out": self.left_out,
            "evaluations": self.evaluations,
            "seed": self.seed,
            "window_sums": torch.stack([self.sums[key].double().cpu() for key in WINDOW]),
            "window_by_labels": self.by_labels,
            **self._replica_sums(),
            **self._stream.state(),
        }

    def _replica_sums(self) -> dict[str, torch.Tensor]:
        """What only the ranks of this replica have counted, f64[2]; nothing where all have."""
        if not all(key in self.sums for key in REPLICA):
            return {}
        return {REPLICA_SUMS: torch.stack([self.sums[key].double().cpu() for key in REPLICA])}

    def _check(self, state: State) -> None:
        counters = ("gradient_accumulation_steps", "micro_steps", "samples")
        require(state, *counters, "seed", "generator")
        for name in counters:
            check_count(name, state[name])
        if state["micro_steps"] and state["gradient_accumulation_steps"] != self.size:
            raise unfit(
                "it was saved in the middle of an accumulation over "
                f"{state['gradient_accumulation_steps']} micro-batches, but "
                f"gradient_accumulation_steps is {self.size} here; fix: save between updates"
            )
        if state["micro_steps"] >= self.size:
            raise unfit(f"micro_steps is {state['micro_steps']} in a window of {self.size}")
        sums = state.get("window_sums", torch.zeros(len(WINDOW), dtype=torch.float64))
        check_like("window_sums", sums, torch.zeros(len(WINDOW), dtype=torch.float64))
        if REPLICA_SUMS in state:
            like = torch.zeros(len(REPLICA), dtype=torch.float64)
            check_like(REPLICA_SUMS, state[REPLICA_SUMS], like)
        if not isinstance(state.get("window_by_labels", False), bool):
            raise unfit(f"window_by_labels is {state['window_by_labels']!r}, not a bool")
        _check_random(state)

    def _restore(self, state: State) -> Callable[[], None]:
        before, stream = dict(vars(self)), copy.copy(self._stream)
        stream.restore(state)
        after = {
            "micro_steps": state["micro_steps"],
            "parts": 0,
            "samples": state["samples"],
            "left_out": state.get("left_out", 0),
            "evaluations": state.get("evaluations", 0),
            "seed": state["seed"].clone(),
            "sums": _restored(state),
            "by_labels": bool(state.get("window_by_labels", False)),
            "_stream": stream,
        }
        vars(self).update(after)
        return lambda: vars(self).update(before)


def _zero() -> torch.Tensor:
    return torch.zeros((), dtype=torch.float64)


def _zeros() -> dict[str, torch.Tensor]:
    return {key: _zero() for key in WINDOW}


def _restored(state: State) -> dict[str, torch.Tensor]:
    """The sums of a saved window. Older versions saved none: each micro-batch counted as one, and
    the sum of their losses is unknown."""
    held = state.get("window_sums")
    if held is None:
        n = float(state["micro_steps"])
        held = torch.tensor([1.0, n, n, torch.nan if n else 0.0], dtype=torch.float64)
    found = dict(zip(WINDOW, held.clone(), strict=True))
    own = state.get(REPLICA_SUMS)
    return found if own is None else found | dict(zip(REPLICA, own.clone(), strict=True))


def _check_random(state: State) -> None:
    check_like("seed", state["seed"], torch.zeros(2, dtype=torch.int64))
    for name in ("left_out", "evaluations"):  # states of older versions have none
        check_count(name, state.get(name, 0))
    stream = state.get("stream", [0, 0])
    if not isinstance(stream, Sequence) or len(stream) != 2:
        raise unfit(f"stream is {stream!r}, not two seeds")
    for seed in stream:
        check_count("stream", seed, WORD)
    if state["generator"] is None:
        return
    try:
        torch.Generator().set_state(state["generator"])
    except (RuntimeError, TypeError) as error:
        raise unfit(f"generator: {str(error).splitlines()[0]}") from None
