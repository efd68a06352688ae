"""Turns: whether a transformers Trainer is called by its own loop or by the user, and which
messages were logged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Turns:
    """Follows the callback handler of one trainer.

    shown: why the gradients of the window that is open are in sight; None where they are not.
    """

    def __init__(self) -> None:
        self.shown: str | None = None
        self._said: set[str] = set()
        self._loops = self._events = 0  # that are running
        self._told = False  # of the update that comes, before the loop says so
        self._handler: Any = None

    @property
    def loop_calls(self) -> bool:
        """Whether the training loop is what calls now, and not a callback or the user's code."""
        return self._loops > 0 and self._events == 0

    @contextmanager
    def loop(self) -> Iterator[None]:
        """Within it the training loop runs."""
        self._loops += 1
        try:
            yield
        finally:
            self._loops -= 1
            self.shown, self._told = None, False

    def say(self, why: str) -> bool:
        """Whether the message is new, so that it is to be logged."""
        new = why not in self._said
        self._said.add(why)
        return new

    def follow(self, handler: Any) -> None:
        """Starts watching the events of the callback handler."""
        self._handler = handler
        handler.call_event = _Seen(self, handler)

    def before_update(self, args: Any, state: Any, control: Any) -> Any:
        """Tells callbacks of the update to come, while nothing has changed; the loop, which would
        do so after it, does not tell them again. Returns what they make of the control."""
        control = self._handler.on_pre_optimizer_step(args, state, control)
        self._told = True
        return control


class _Seen:
    """A replacement of a handler's `call_event` that counts running events, and skips an
    `on_pre_optimizer_step` that callbacks have received already."""

    def __init__(self, turns: Turns, handler: Any) -> None:
        self._turns, self._handler = turns, handler

    def __call__(self, event: str, args: Any, state: Any, control: Any, **named: Any) -> Any:
        turns, handler = self._turns, self._handler
        if event == "on_pre_optimizer_step" and turns._told:
            turns._told = False
            return control
        turns._events += 1
        try:
            return type(handler).call_event(handler, event, args, state, control, **named)
        finally:
            turns._events -= 1


__all__ = ["Turns"]
