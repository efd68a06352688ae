"""FlatCall: the call to export, model then loss, as `forward(*leaves)` over the batch's tensors."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from onward.capture.huggingface import cache_is_pointless
from onward.capture.masked_rows import MaskedRows, is_tensor
from onward.capture.mode_reads import ModeReads
from onward.capture.output_tree import OutputTree
from onward.capture.regions import RegionSearch
from onward.capture.request import CaptureRequest
from onward.capture.trace.as_eager import answering_as_eager
from onward.capture.trace.data_branches import Answer, Asked
from onward.capture.trace.row_choices import Choosing
from onward.capture.trace.sharing import Sharing
from onward.capture.weighted_losses import WeightedLosses
from onward.errors import CaptureError
from onward.graph.names import distinct
from onward.model_state import Walk, traces_names
from onward.model_state.device import keeping_generators
from onward.model_state.effects import Effects, keeping_buffers, keeping_parameters, undoing
from onward.model_state.refusals import without_hooks

TENSOR = object()  # placeholder for a tensor among the leaves of a call


class _Noted:
    """What a run of a `FlatCall` records; an object of its own, since an export restores the
    attributes of a module.

    names: names of the outputs. losses: name of a loss of `WeightedLosses` -> its output.
    chosen: names of results that are masked rows, which are no outputs. layouts: (method,
    answer) where the forward asks for a memory layout. sharing: its calls that return a view or
    a copy. answers, masks: what the first eager run has recorded (`Asked`); answers is None
    before it. asked: the answers that the traced run was given. outer: tensors from outside
    the trace whose numbers it has read into Python. read: how many questions read numbers. tree:
    how the results form the model's outputs, for a whole call. over_all: whether a function that
    may loop over all experts has run, other than `alone`. mode: the mode reads of the traced run,
    if gradients are on.
    """

    names: tuple[str, ...] | list[str] = ()
    losses: Mapping[str, str] = types.MappingProxyType({})
    chosen: tuple[str, ...] | list[str] = ()
    layouts: list[tuple[str, Any]]
    sharing: Sharing
    answers: list[Answer] | None = None
    masks: Sequence[Answer] = ()
    asked: Sequence[Any] = ()
    outer: Sequence[torch.Tensor] = ()
    read = 0
    over_all = False
    tree: OutputTree | None = None
    mode: ModeReads | None = None

    def layout(self, method: str, answer: Any) -> None:
        self.layouts.append((method, answer))


class FlatCall(torch.nn.Module):
    """The module to export: its forward takes the batch's tensors, rebuilds the arguments, runs the
    model and the loss, and returns (loss, *outputs, *questions about tensors)."""

    def __init__(
        self,
        request: CaptureRequest,
        spec: pytree.TreeSpec,
        fixed: list[Any],
        values: bool = False,
        regions: RegionSearch | None = None,
    ) -> None:
        """spec, fixed: the tree of the arguments, and its leaves with TENSOR for each tensor.
        values: whether to bake in the numbers that the forward reads into Python. regions: the
        submodules that are one op each. If the request is `whole`, `noted.tree` records the
        structure of the outputs."""
        super().__init__()
        self.model = request.model
        self.gradients, self.whole = request.differentiated, request.whole
        self.values, self.regions = values, regions
        self.alone = False  # whether each expert has a turn in a loop over all of them
        self.spec, self.fixed, self.loss_fn = spec, fixed, request.loss_fn
        self.want_loss, self.autocast = request.want_loss, request.autocast
        self.noted = _Noted()
        self.effects = Effects()
        self.extra: dict[str, Any] = {}
        self.attributes = {
            name: vars(tensor) for name, tensor in named_tensors(self) if vars(tensor)
        }

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.regions is not None:
            self.regions.begin()
        # the trace's tensors, which lack the attributes that the user has set on the real ones
        for name, tensor in named_tensors(self):
            _give(tensor, self.attributes.get(name, {}), name)
        trained = [t for _, t in named_tensors(self)] if self.gradients else []
        self.noted.layouts, self.noted.sharing = [], Sharing()
        with (
            undoing(self.effects, self.model, self.loss_fn) as seen,
            answering_as_eager(seen, trained, self.noted.layout),
            Asked(self.noted.answers or [], self.noted.masks, self.values) as asked,
            self._choosing(asked),
            self.noted.sharing,  # last: it sees the forward's calls, not those of the modes before
        ):
            results = self.run(*leaves)
        self.noted.asked = [answer for _, answer in asked.answers]
        self.noted.outer = list(asked.outer.values())
        return (*results, *asked.questions)

    def ask(self, *leaves: torch.Tensor) -> None:
        """Runs the call in eager mode, and keeps nothing but its answers about tensors."""
        with (
            self.aside(*leaves),
            Asked(values=self.values) as asked,
            self._choosing(asked),
        ):
            self.run(*leaves)
        self.noted.answers, self.noted.masks = asked.answers, asked.masks
        self.noted.read = asked.read

    @contextmanager
    def _choosing(self, asked: Asked) -> Iterator[None]:
        with Choosing(asked.whole if self.values else None, self.alone) as choosing:
            try:
                yield
            finally:
                self.noted.over_all = choosing.over_all

    def layouts(self, *leaves: torch.Tensor) -> tuple[list[tuple[str, Any]], Sharing]:
        """Runs the call in eager mode. Returns its answers about memory layouts as (method,
        answer), and its calls that return a view or a copy."""
        found: list[tuple[str, Any]] = []
        with (
            self.aside(*leaves) as seen,
            answering_as_eager(seen, [], lambda method, answer: found.append((method, answer))),
            Sharing() as sharing,
        ):
            self.run(*leaves)
        return found, sharing

    @contextmanager
    def aside(self, *leaves: torch.Tensor) -> Iterator[Walk]:
        """A context in which a run of these leaves in eager mode leaves no side effects, nor
        records outputs in `noted`. Yields a walk of the model."""
        noted = self.noted.tree, self.noted.names
        try:
            with (
                keeping_buffers(self.model, self.loss_fn),
                keeping_parameters(self.model, self.loss_fn, numbers=self.values),
                keeping_generators(leaves, (t for _, t in named_tensors(self))),
                torch.no_grad(),
                undoing(Effects(), self.model, self.loss_fn) as seen,
                without_hooks(self.model),  # only regions may have such hooks
            ):
                yield seen
        finally:
            self.noted.tree, self.noted.names = noted

    @property
    def device(self) -> str:
        """The type of the device that the model's first tensor is on; "cpu" where it has none."""
        return next((t.device.type for _, t in named_tensors(self)), "cpu")

    def run(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Runs model and loss, under the request's autocast. Returns (loss, *outputs). Raises
        CaptureError for outputs without a real scalar loss, or that no graph can return."""
        if self.autocast is None:
            return self._run(*leaves)
        with torch.autocast(self.device, self.autocast, cache_enabled=False):
            return self._run(*leaves)

    def _run(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rest = iter(leaves)
        full = [next(rest) if f is TENSOR else f for f in self.fixed]
        args, kwargs, target = pytree.tree_unflatten(full, self.spec)
        outputs = self.model(*args, **kwargs, **self.extra)
        if self.whole:
            owned = {model_path(name): t for name, t in named_tensors(self)}
            pointless = cache_is_pointless(args, kwargs, self.gradients)
            self.noted.tree = OutputTree(outputs, leaves, owned, left_out=pointless)
            self.noted.names = self.noted.tree.names
            return tuple(self.noted.tree.taken())
        named = name_outputs(outputs)
        chosen = [n for n, v in _pairs(outputs) if isinstance(v, MaskedRows)]
        if chosen and (not self.want_loss or chosen[0] == "loss" or not named):
            raise CaptureError(
                f"the model returns {chosen[0]}, rows chosen by a boolean mask, whose number "
                "depends on the data; fix: return all rows, or a loss reduced to a scalar"
            )
        self.noted.chosen = chosen
        if not self.want_loss:
            self.noted.names = list(named)
            return tuple(named.values())
        if isinstance(self.loss_fn, WeightedLosses):
            parts = self.loss_fn.parts(outputs, *target)
            loss = self.loss_fn.total(parts)
            self.noted.losses = _named_losses(parts, named)
        elif self.loss_fn is not None:
            loss = self.loss_fn(outputs, *target)
        elif "loss" in named:
            loss = named.pop("loss")
        elif len(named) == 1:
            loss = named.pop(next(iter(named)))  # a model that returns its loss alone
        else:
            raise CaptureError(
                f"the model returns {', '.join(named) or 'nothing'} but no loss; fix: pass labels, "
                "or a loss_fn"
            )
        if loss.dim() != 0:
            raise CaptureError(
                f"the loss has shape {tuple(loss.shape)}; fix: reduce it to a scalar"
            )
        if loss.is_complex():
            raise CaptureError(
                "the loss is complex; fix: return a real number, such as its .abs() or .real"
            )
        self.noted.names = ["loss", *named]
        return (loss, *named.values())


def _named_losses(
    parts: Mapping[str, torch.Tensor], named: dict[str, torch.Tensor]
) -> dict[str, str]:
    """Adds losses to the named outputs. Returns the output of each loss."""
    found: dict[str, str] = {}
    for name, loss in parts.items():
        found[name] = distinct(name, named)
        named[found[name]] = loss
    return found


def named_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields all parameters and buffers by path, tied ones under each path."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _give(tensor: torch.Tensor, attributes: dict[str, Any], name: str) -> None:
    """Sets the attributes of a user's tensor on the trace's tensor for it. Raises CaptureError for
    names that torch.export uses itself."""
    for key in attributes.keys() & traces_names():
        raise CaptureError(
            f"{model_path(name)} has the attribute {key}, a name that torch.export sets on "
            "tensors itself; fix: rename the attribute"
        )
    vars(tensor).update(attributes)


def name_outputs(outputs: Any) -> dict[str, torch.Tensor]:
    """Returns name -> tensor for a model's outputs: their keys, or `output`, or `output_0`, ..."""
    named: dict[str, torch.Tensor] = {}
    for name, value in _pairs(outputs):
        leaves = [v for v in pytree.tree_leaves(value) if is_tensor(v)]
        if is_tensor(value):
            named[distinct(str(name), named)] = value
        else:
            for i, leaf in enumerate(leaves):
                named[distinct(f"{name}_{i}", named)] = leaf
    return named


def _pairs(outputs: Any) -> list[tuple[str, Any]]:
    if isinstance(outputs, (torch.Tensor, MaskedRows)):
        return [("output", outputs)]
    if hasattr(outputs, "items"):
        return list(outputs.items())
    return [(f"output_{i}", v) for i, v in enumerate(outputs)]


def model_path(target: str | None) -> str:
    """Returns the path in the model for a path in a FlatCall; for a tensor of the loss function its
    path with a dot before it, which no path in the model begins with."""
    assert target is not None
    return target.removeprefix("model.") if target.startswith("model.") else f".{target}"


__all__ = ["TENSOR", "FlatCall", "model_path", "name_outputs", "named_tensors"]
