"""Chooses the mesh of a step: which of those that a number of ranks can make is fastest and fits.

In: a `MeshQuestion`, which is a step of one rank alone (`Subject`), and a `Cluster`. Out: from
`chosen_mesh` and `predicted_one` a `MeshChoice`. Nothing runs: the step of one rank is compiled for
a mesh on paper, planned, and its plan replayed.
Imports: explanation and all that stands before it, nothing of train or module.
"""

from __future__ import annotations

from onward.meshes.candidates import MeshCandidate, MeshLimits, limits_of, read_candidate
from onward.meshes.choice import MeshChoice
from onward.meshes.machine import this_machine
from onward.meshes.on_paper import recipe_of
from onward.meshes.predict import MeshQuestion, chosen_mesh, predicted, predicted_one
from onward.meshes.prediction import StepPrediction

__all__ = [
    "MeshCandidate", "MeshChoice", "MeshLimits", "MeshQuestion", "StepPrediction", "chosen_mesh",
    "limits_of", "predicted", "predicted_one", "read_candidate", "recipe_of", "this_machine",
]  # fmt: skip
