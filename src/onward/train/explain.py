"""Describes a Trainer's training step as a Subject of an explanation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from onward.compile import Compiler
from onward.differentiate import Recipe
from onward.errors import CaptureError
from onward.explanation import StepExplanation, Subject, refused
from onward.prepare.batch import Batch, batch_of
from onward.prepare.graphs import Graphs
from onward.prepare.planned_amount import planned_amount
from onward.prepare.prepared_batch import OutputRequest
from onward.prepare.without_gradient import WithoutGradient
from onward.train.prepared_steps import PreparedSteps
from onward.train.snapshot import TrainerSnapshot

LOOP = "trainer"  # how explanations name the loop of a Trainer


def last_subject(trainer: TrainerSnapshot, steps: PreparedSteps) -> Subject:
    """Describes the training step that ran last. Raises OnwardError before the first."""
    last = trainer.last_run
    graphs = last.step.graphs
    found = _subject(
        trainer, steps, graphs.compiler, graphs.captured, graphs.recipe, last.batch, last.request
    )
    return replace(found, ran=last.prepared)


def subject_of(
    trainer: TrainerSnapshot, steps: PreparedSteps, batch: Batch, fetch: tuple[str, ...]
) -> Subject | StepExplanation:
    """Describes the training step of a batch that returns the outputs named by `fetch`. Returns an
    explanation of the refusal where the model cannot be captured."""
    try:
        step = steps.training(trainer.model, trainer.loss_fn, batch)
    except CaptureError as error:
        return refused(trainer.model, LOOP, error)
    graphs, request = step.graphs, OutputRequest(fetch, update=True)
    return _subject(trainer, steps, graphs.compiler, graphs.captured, graphs.recipe, batch, request)


def _subject(
    trainer: TrainerSnapshot,
    steps: PreparedSteps,
    compiler: Compiler,
    captured: Any,
    recipe: Recipe | None,
    batch: Batch,
    request: OutputRequest,
) -> Subject:
    def again(*given: Any) -> Subject:
        """Describes the step of a batch that needs another capture; leaves the Trainer's own steps
        alone."""
        quiet, batch = compiler.quiet(), batch_of(*given)
        other = steps.capture(quiet, trainer.model, trainer.loss_fn, batch, training=True)
        return _subject(trainer, steps, quiet, other, steps.recipe(other), batch, request)

    return Subject(
        model=trainer.model,
        loop=LOOP,
        batch=batch,
        captured=captured,
        compiler=compiler,
        memory_budget=planned_amount(trainer.options, trainer.model),
        graphs=lambda other: Graphs(other, captured, recipe),
        request=request,
        halves=False,
        still=WithoutGradient.of(captured, captured.reached),
        again=again,
        optimizer=steps.own_state_bytes,
        loss_fn=trainer.loss_fn,
    )


__all__ = ["last_subject", "subject_of"]
