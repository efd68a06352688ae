"""The step of an `onward.Trainer` as a subject."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from onward.compile import Compiler
from onward.config import CaptureError, OnwardError
from onward.differentiate import Recipe
from onward.explanation.build import explained, refused
from onward.explanation.facts import StepExplanation
from onward.explanation.subject import Subject
from onward.prepare.batch import Batch, batch_of
from onward.prepare.graphs import Graphs
from onward.prepare.prepared_batch import OutputRequest
from onward.prepare.without_gradient import WithoutGradient
from onward.train import Trainer
from onward.train.arguments import names_to_fetch


def explain_trainer(
    trainer: Trainer,
    given: tuple[tuple[Any, ...], dict[str, Any]] | None,
    memory: int | None = None,
    batch_sizes: Sequence[int] = (),
    profile: bool = False,
) -> StepExplanation:
    """Explains a Trainer's step on a batch, given as arguments; where it is None, the last step.
    Raises OnwardError where nothing has run."""
    with trainer._lock:
        if given is None:
            last = trainer._last
            if last is None:
                raise OnwardError(
                    "no step has run yet; fix: call train_step first, or pass a batch"
                )
            step, batch, request = last.step, last.batch, last.request
        else:
            last, batch = None, trainer._bind(*given)
            request = OutputRequest(names_to_fetch(trainer.options, ()), update=True)
            try:
                step = trainer._steps.training(trainer.model, trainer.loss_fn, batch)
            except CaptureError as error:
                return refused(trainer.model, "trainer", error)
        graphs = step.graphs
        subject = _subject(trainer, graphs.compiler, graphs.captured, graphs.recipe, batch, request)
        if last is not None:
            subject = replace(subject, ran=last.prepared)
        return explained(subject, memory, batch_sizes, profile)


def _subject(
    trainer: Trainer,
    compiler: Compiler,
    captured: Any,
    recipe: Recipe | None,
    batch: Batch,
    request: OutputRequest,
) -> Subject:
    def again(*given: Any) -> Subject:
        """The subject of a batch that another capture serves; the Trainer's own steps stay as they
        are."""
        quiet, batch, steps = compiler.quiet(), batch_of(*given), trainer._steps
        other = steps.capture(quiet, trainer.model, trainer.loss_fn, batch, training=True)
        return _subject(trainer, quiet, other, steps.recipe(other), batch, request)

    return Subject(
        model=trainer.model,
        loop="trainer",
        batch=batch,
        captured=captured,
        target=compiler.target,
        disable=frozenset(compiler.disable),
        policy=compiler.policy,
        memory_budget=trainer.options.memory_budget,
        graphs=lambda other: Graphs(other, captured, recipe),
        request=request,
        halves=False,
        still=WithoutGradient.of(captured, captured.reached),
        again=again,
        seconds=dict(compiler.journal.seconds),
    )


__all__ = ["explain_trainer"]
