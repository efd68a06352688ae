"""Traced: the state of one try at a capture, which goes from stage to stage."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.export import ExportedProgram

from onward.capture.batch_guards.attention_forms import Shown
from onward.capture.batch_leaves import BatchLeaves
from onward.capture.captured_module import CapturedModule
from onward.capture.held_sizes import Held
from onward.capture.huggingface import forward_defaults
from onward.capture.output_tree import OutputTree
from onward.capture.regions import RegionSearch
from onward.capture.request import CaptureRequest
from onward.capture.trace.flat_call import FlatCall
from onward.capture.translate.translator import Translator
from onward.graph.graph import Graph


@dataclass
class Traced:
    """What the stages of a capture share (`onward.capture.stages`); each fills a part of it.

    Set from the start: request; leaves, the batch's tensors and names; flat, the call to export;
    held, the sizes that are numbers or multiples of one; result, the capture, with an empty graph.
    Set by `export_call`: program, the exported program; batch, its placeholders of the batch's
    tensors, in the order of `leaves.tensors`; tree, how the results form the model's outputs.
    Set by `take_presumptions`: shown, the presumptions about attention masks.
    Set by `fill_graph`: translator, with the graph's value of each node.
    Set by `compare_layouts`: layouts_matter, whether the graph holds only for batches with this
    one's memory layouts.
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
        """Starts a try. values: whether to bake in the numbers that the forward reads into Python.
        parts: the submodules that run in PyTorch, each as one op."""
        leaves = BatchLeaves.of(request, keeps_flags=request.whole)
        flat = FlatCall(request, leaves.spec, leaves.fixed, values, parts)
        flat.training = request.model.training  # not `train()`: submodules keep their own flags
        flat.extra = forward_defaults(request.model, request.kwargs)
        result = CapturedModule(Graph("forward"), {}, {}, {}, autocast=request.autocast)
        return cls(request, leaves, flat, held, result)


class SizesToHold(Exception):
    """Raised to end a try. held: the sizes that the next try has to hold."""

    def __init__(self, held: Held) -> None:
        super().__init__(held)
        self.held = held


__all__ = ["SizesToHold", "Traced"]
