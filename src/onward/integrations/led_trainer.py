"""LedTrainer: a Trainer whose accumulation windows are controlled by another training loop.

That loop states the weight of each micro-batch's loss and whether an update follows it, and calls
`optimizer.step()` after the update, as in eager PyTorch. It may also stop using this Trainer for a
while: `give_back` returns the optimizer to torch, as does an `optimizer.step()` without an update
before it. The next micro-batch takes the optimizer again.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from onward.errors import CaptureError, OnwardError
from onward.execute import Executable
from onward.prepare.batch import Batch, bind_batch
from onward.train.arguments import checked_options
from onward.train.exclusive import exclusive
from onward.train.loss_spikes import KEY
from onward.train.optimizer_owner import STAND_IN, is_stand_in, original_step
from onward.train.result import StepResult
from onward.train.state_part import restore
from onward.train.trainer import Trainer
from onward.train.window import AccumulationWindow

WAY_BACK = "trainer.train(resume_from_checkpoint='{}')"


class LedWindow(AccumulationWindow):
    """An accumulation window controlled by another loop, which sets the weights of micro-batches,
    says which is last, and numbers the windows by led_step (None: no loop does). Its loss is the
    sum of the micro-batches' losses by those weights, as the loop logs it."""

    def __init__(self, size: int, seed: int | None) -> None:
        super().__init__(size, seed)
        self.led_weight, self.led_last = 1.0, True
        self.led_step: int | None = None
        self._counted: int | None = None  # `led_step` of the last window
        self._since = 0  # windows with that `led_step`

    @property
    def weight(self) -> float:
        return self.led_weight

    @property
    def is_last(self) -> bool:
        return self.led_last

    def number(self, updates: int) -> tuple[int, int]:
        if self.led_step is None:
            return super().number(updates)
        return self.led_step, self._since if self.led_step == self._counted else 0

    def _with(self, executable: Executable, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        sums = super()._with(executable, loss)
        if self.size == 1 or executable.plan.signature.windowed:
            return sums
        total = self.sums["loss"] + self.led_weight * loss.double()
        return sums | {"divisor": torch.ones_like(sums["divisor"]), "loss": total}

    def advance(self, batch_size: int, updated: bool) -> None:
        super().advance(batch_size, updated)
        if self.led_last:
            self._since = self._since + 1 if self.led_step == self._counted else 1
            self._counted = self.led_step

    def loop_ended(self) -> None:
        """Numbers the windows of the next loop as if it were the first: one that is resumed before
        this loop's last window draws what that window drew."""
        self._counted = None


class NotRunError(CaptureError):
    """Raised for a micro-batch without a whole-step graph; nothing has run, and nothing has
    changed."""


class LedTrainer(Trainer):
    """A Trainer for the loop of another package; arguments as for `Trainer`.

    `options.gradient_accumulation_steps` only says whether windows have several micro-batches; the
    loop decides how many. takes_target: whether the loss function also gets a batch's labels; else
    it gets the outputs alone.
    """

    takes_target = True

    def __init__(self, *args: Any, options: Any = None, **kwargs: Any) -> None:
        # the loop says what each micro-batch weighs
        options = replace(checked_options(options), gradient_accumulation_average="micro_batches")
        super().__init__(*args, options=options, **kwargs)
        self._window = LedWindow(self.options.gradient_accumulation_steps, self.options.seed)
        self._way_back.call = WAY_BACK
        self._due = False  # whether there was an update whose `optimizer.step()` is still to come

    @exclusive
    def step_led(
        self,
        batch: dict[str, Any],
        weight: float,
        last: bool,
        fetch: tuple[str, ...] = (),
        step: int | None = None,
    ) -> StepResult:
        """Runs one micro-batch. Raises NotRunError where a graph cannot reproduce eager PyTorch.

        weight: factor of the micro-batch's loss in the window's loss. last: whether an update
        follows. step: the number of windows that the loop has done, including those before it was
        resumed; the random numbers depend on it. None: the Trainer's own count.
        """
        window = self._window
        assert isinstance(window, LedWindow)
        if not last and window.size == 1:
            raise OnwardError(
                "the loop accumulates gradients, but this Trainer was made for one "
                "micro-batch per update; fix: gradient_accumulation_steps=2 or more"
            )
        if self._optimizer.take_again():
            self._lead()
        window.led_weight, window.led_last, window.led_step = weight, last, step
        done = window.steps
        try:
            result = self.train_step(batch, fetch=fetch)
        except VerificationError:
            raise
        except OnwardError as error:
            # nothing but a graph exchanges gradients with other ranks, which know of this error
            if self.memory.torn or window.steps != done or not self._ranks.is_one:
                raise
            raise NotRunError(str(error)) from error
        self._due = last
        return result

    def update(self) -> None:
        """Raises OnwardError: the loop says which micro-batch is its window's last."""
        raise OnwardError("another loop ends the accumulation windows of this Trainer")

    @exclusive
    def give_back(self) -> None:
        """Returns the optimizer to torch. Gradients of an open window are added to `p.grad`."""
        self._optimizer.give_back()
        self._window.leave()
        self._due = False

    @exclusive
    def leave_open_window(self) -> None:
        """Does what `give_back` does where the loop has ended within a window, or between an update
        and its `optimizer.step()`, so that `zero_grad` clears what the window has summed. Several
        ranks, of which each has sums of its own share, drop them."""
        assert isinstance(self._window, LedWindow)
        self._window.loop_ended()
        if self._window.is_first and not self._due:
            return
        if not self._ranks.is_one:
            self._optimizer.updates.window = frozenset()
        self.give_back()

    @contextmanager
    def whole_optimizer(self) -> Generator[None]:
        """A context in which the optimizer's own `state_dict` is whole on rank 0, also where each
        rank has a part of its state. All ranks of a mesh enter it."""
        self._ranks.meet_for_state(self.options.zero > 0)
        with self._optimizer.gathered():
            yield

    @property
    def loss_history(self) -> list[float]:
        """The losses of the last updates, oldest first, by which `loss_spikes` judges the next."""
        return self._spikes.losses

    @exclusive
    def set_loss_history(self, losses: Sequence[float]) -> None:
        """Judges the next update by these losses of the updates before it, oldest first."""
        held = torch.tensor(list(losses), dtype=torch.float64)
        restore((self._spikes.part(),), {KEY: held})

    def name_checkpoint(self, folder: Path) -> None:
        """Makes errors name the folder as the last checkpoint of this run."""
        self._way_back.checkpoint = folder

    def _take_optimizer(self, why: str | None) -> None:
        super()._take_optimizer(why)
        self._lead()

    def _lead(self) -> None:
        """Puts a stand-in in the place of `optimizer.step`, around what the user has put there."""
        before = vars(self.optimizer).get("step")
        if is_stand_in(before):
            before = getattr(before, "__wrapped__", None)
        self.optimizer.step = types.MethodType(_taken(self, before), self.optimizer)

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
        return bind_batch(args, kwargs, self.takes_target and self.loss_fn is not None)

    def _verify_first(self, batch: Batch) -> None:
        try:
            super()._verify_first(batch)
        except CaptureError:
            raise
        except OnwardError as error:
            raise VerificationError(str(error)) from error


class VerificationError(OnwardError):
    """Raised if the first step's numbers differ from eager PyTorch's."""


def _taken(trainer: LedTrainer, before: Callable[..., Any] | None) -> Callable[..., Any]:
    """A replacement of `optimizer.step`: after an update that the Trainer has made it does nothing,
    since the step is done; otherwise it calls the optimizer's own. before: what the user or a
    scheduler had set as `step` of the optimizer; None: nothing."""
    held = weakref.ref(trainer)  # weak, since the trainer holds the optimizer

    def step(optimizer: torch.optim.Optimizer, closure: Any = None) -> Any:
        found = held()
        if found is not None and found._due:
            found._due = False
            return None
        if found is not None:
            found.give_back()
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers look at it
        return original_step(optimizer)(closure)

    # schedulers set this mark on a `step` that they have wrapped
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    setattr(step, STAND_IN, True)
    if before is not None:
        step.__wrapped__ = before  # type: ignore[attr-defined]
    return step


__all__ = ["LedTrainer", "LedWindow", "NotRunError", "VerificationError"]
