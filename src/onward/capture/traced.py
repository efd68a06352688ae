"""Traced: one try at a capture, as it goes from stage to stage."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.export import ExportedProgram

from onward.capture.batch_guards.attention_forms import Shown
from onward.capture.batch_leaves import BatchLeaves
from onward.capture.captured_module import CapturedModule
from onward.capture.held_sizes import Held
from onward.capture.huggingface import forward_defaults
from onward.capture.regions import RegionSearch
from onward.capture.request import CaptureRequest
from onward.capture.trace.flat_call import FlatCall
from onward.capture.trace.output_tree import OutputTree
from onward.capture.translate.translator import Translator
from onward.graph.graph import Graph


@dataclass
class Traced:
    """What the stages of a capture share (`onward.capture.stages`); each fills a part of it.

    Known from the start: request; leaves, the batch's tensors and names; flat, the call that is
    exported; held, the sizes that are numbers or multiples of one; result, the capture, with an
    empty graph.
    By `export_call`: program, the exported program. batch, its nodes for the batch's tensors, in
    the order of `leaves.tensors`. tree, how the results are put together.
    By `take_presumptions`: shown, the masks whose form is presumed.
    By `fill_graph`: translator, with the graph's value of each node.
    By `compare_layouts`: layouts_matter, whether the graph is for batches that lie in memory as
    this one does.
    """

    request: CaptureRequest
    leaves: BatchLeaves
    flat: FlatCall
    held: Held
    result: CapturedModule
    program: ExportedProgram = field(init=False)
    batch: list[torch.fx.Node] = field(init=False)
    shown: list[Shown] = field(init=False)
    tree: OutputTree | None = field(init=False)
    translator: Translator = field(init=False)
    layouts_matter: bool = field(init=False)

    @classmethod
    def of(
        cls, request: CaptureRequest, held: Held, values: bool, parts: RegionSearch | None
    ) -> Traced:
        """The beginning of a try. values: whether numbers that the forward reads into Python are
        those of this batch. parts: the submodules that are one op each."""
        leaves = BatchLeaves.of(request, keeps_flags=request.whole)
        flat = FlatCall(request, leaves.spec, leaves.fixed, values, parts)
        flat.training = request.model.training  # its own flag alone: submodules keep theirs
        flat.extra = forward_defaults(request.model, request.kwargs)
        result = CapturedModule(Graph("forward"), {}, {}, {}, autocast=request.autocast)
        return cls(request, leaves, flat, held, result)


class SizesToHold(Exception):
    """Ends a try: the next one is to hold these sizes."""

    def __init__(self, held: Held) -> None:
        super().__init__(held)
        self.held = held


__all__ = ["SizesToHold", "Traced"]
