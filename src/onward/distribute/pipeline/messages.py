"""Messages: what the ranks of a pipeline send one another in a step, numbered over all ranks.

A message is numbered by the moment at which its value is made when the schedule is run on paper. So
each rank's own messages, sent and received, have rising numbers in the order of its actions, the
messages between two ranks come in one order at both ends, and no rank waits for one that waits for
it: whatever a message waits for has happened earlier on paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from onward.distribute.pipeline.partition import Partition
from onward.distribute.pipeline.schedules import Action, Part, Table, Timeline
from onward.graph.graph import Value, type_of, where


@dataclass(frozen=True)
class Message:
    """A value of one micro-batch that one rank sends to another. sent: the action that makes it.
    needed: the receiver's first action that reads it."""

    number: int
    value: Value
    source: int
    target: int
    sent: Action
    needed: Action

    @property
    def record(self) -> str:
        """What is sent, and why, alike at both ends and on all ranks of a stage, whose values may
        have other names."""
        of = "activation" if self.sent.part is Part.FORWARD else "gradient"
        maker = self.value.producer()
        assert maker is not None, "a message is the result of a node"
        what = f"{maker.op_type} of {where(maker) or 'the step'}"
        return f"{of} {what}, of {self.sent} for {self.needed}"


def messages_of(found: Partition, table: Table, timeline: Timeline) -> list[Message]:
    """All messages of a step, in the order of their numbers, which count from 1."""
    ranks = len(table)
    place = {action: i for actions in table for i, action in enumerate(actions)}
    order = {node: i for i, node in enumerate(found.stage)}
    needed: dict[tuple[Value, int, int], tuple[Action, Action]] = {}
    micros = sorted({action.micro for action in place})
    for crossing in found.crossings():
        maker = crossing.value.producer()
        assert maker is not None, "a message is the result of a node"
        target = crossing.target % ranks
        if target == crossing.source % ranks:
            continue
        for micro in micros:
            sent = action_of(found.part[maker], crossing.source, micro, place)
            reader = action_of(crossing.part, crossing.target, micro, place)
            key = crossing.value, target, micro
            _, other = needed.get(key, (sent, reader))
            needed[key] = sent, min(reader, other, key=place.__getitem__)

    def moment(item: tuple[tuple[Value, int, int], tuple[Action, Action]]) -> tuple[int, ...]:
        (value, target, _), (sent, _) = item
        maker = value.producer()
        assert maker is not None
        outputs = list(maker.outputs).index(value)
        return timeline.ends[sent], sent.stage % ranks, order[maker], outputs, target

    return [
        Message(number, value, sent.stage % ranks, target, sent, reader)
        for number, ((value, target, _), (sent, reader)) in enumerate(
            sorted(needed.items(), key=moment), 1
        )
    ]


def action_of(part: Part, stage: int, micro: int, table: object) -> Action:
    """The action of a table in which a part of a stage runs. table: a collection of its actions."""
    found = Action(part, stage, micro)
    whole = Action(Part.BACKWARD, stage, micro)
    return found if found in table else whole  # type: ignore[operator]


def digest_of(messages: list[Message]) -> str:
    """A digest of who sends what to whom, alike on ranks whose graphs go together."""
    lines = [f"{m.number} {m.source} {m.target} {m.record} {type_of(m.value)}" for m in messages]
    return blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


__all__ = ["Message", "action_of", "digest_of", "messages_of"]
