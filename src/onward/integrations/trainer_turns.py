"""Turns: whether a transformers Trainer is called by its own loop or by the user, and which
messages were logged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Turns:
    """Follows the callback handler of one trainer.

    shown: why the gradients of the open window must be visible; None where they need not be.
    """

    def __init__(self) -> None:
        self.shown: str | None = None
        self._said: set[str] = set()
        self._loops = self._events = 0  # numbers of those running
        # whether callbacks were told of the coming update before the loop tells them
        self._told = False
        self._handler: Any = None

    @property
    def loop_calls(self) -> bool:
        """Whether the caller is the training loop, not a callback or the user's code."""
        return self._loops > 0 and self._events == 0

    @contextmanager
    def loop(self) -> Iterator[None]:
        """A context in which the training loop runs."""
        self._loops += 1
        try:
            yield
        finally:
            self._loops -= 1
            self.shown, self._told = None, False

    def say(self, why: str) -> bool:
        """Whether a message is new and should be logged."""
        new = why not in self._said
        self._said.add(why)
        return new

    def follow(self, handler: Any) -> None:
        """Starts to watch the events of the callback handler."""
        self._handler = handler
        handler.call_event = _Seen(self, handler)

    def before_update(self, args: Any, state: Any, control: Any) -> Any:
        """Tells callbacks of the coming update before anything changes; the loop, which would tell
        them after it, then does not. Returns the control that they return."""
        control = self._handler.on_pre_optimizer_step(args, state, control)
        self._told = True
        return control


class _Seen:
    """A replacement of a handler's `call_event`, which counts running events and skips an
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
