"""Ring attention of whole steps: ranks that pass keys and values on make the update of one rank,
dropout on; by the lockstep evaluator. What is exchanged and held, by formulae."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import sharded_steps as steps

from onward.distribute import Mesh, ranks_of

pytestmark = pytest.mark.usefixtures("captures_kept")
LENGTH = 16


def cp(ranks: int) -> list[Mesh]:
    return ranks_of(("cp",), (ranks,))


def both(
    model: steps.Made, meshes: Sequence[Mesh], windows: Sequence[int] = (4,), length: int = LENGTH,
    **more: Any,
) -> None:  # fmt: skip
    """Compares what ranks make with what one makes."""
    said = {"accumulate": len(windows) > 1, **more}
    alone = steps.step_of(model, steps.recipe_of(model, **said))
    [want] = steps.run(model, alone, [Mesh()], windows, (), length)
    assert any(n.startswith("next.param.") for n in want) and want["finite"]
    graph = steps.step_of(model, steps.recipe_of(model, joint=True, **said))
    found = steps.run(model, graph, meshes, windows, (), length, method="ring")
    for outputs in found:
        for name in [n for n in outputs if n not in want]:
            del outputs[name]
    steps.compare(found, want, MOST)


MOST = 2e-6


@pytest.mark.sample(2)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "t5"])
def test_ranks_make_the_update_of_one(kind: str, ranks: int) -> None:
    both(steps.made(kind), cp(ranks))
