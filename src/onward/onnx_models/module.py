"""OnnxModule: an ONNX model as a torch module, whose parameters are the model's weights.

A Trainer takes it as any module, so that optimizers, schedules, precision, checkpoints and
explanations are the Trainer's. Its capture is its own graph: nothing is traced, and it has no
forward in eager PyTorch.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from onward.capture import CapturedModule, CaptureRequest, GraphModule
from onward.capture.evaluation import remove_dropout
from onward.errors import CaptureError, OnwardError
from onward.graph.build import Builder
from onward.graph.graph import Graph, Role, Value, type_of
from onward.graph.importer.nested_nodes import nodes_within
from onward.graph.importer.size_conditions import broken, conditions
from onward.graph.names import buffer_name, named_by, output_name, parameter_name, some
from onward.graph.types import Dim, Type
from onward.loss import Loss
from onward.onnx_models.batch_norm import keep_statistics, statistics, train_by_batch
from onward.onnx_models.source import OnnxSource

KEPT = 8  # graphs of other sizes
ROWS = 1 << 20  # numbers that are compared at once


@dataclass(frozen=True, eq=False)
class _Program:
    """What a module is made of, kept apart from its attributes, which guards would walk through.
    paths: of the parameters, by initializer. buffers: the paths of running statistics, by
    initializer. batch_norm: which nodes normalize by the batch in training and move these: all, or
    none, or None for those in training form. graphs: read so far, by the sizes that are numbers,
    each with its conditions on the others (`size_conditions`)."""

    source: OnnxSource
    loss: Loss | str | None
    paths: Mapping[str, str]
    buffers: Mapping[str, str]
    batch_norm: bool | None
    graphs: dict[tuple[tuple[tuple[str, int], ...], ...], tuple[Graph, list[Dim]]] = field(
        default_factory=dict
    )


_PROGRAMS: weakref.WeakKeyDictionary[torch.nn.Module, _Program] = weakref.WeakKeyDictionary()


class OnnxModule(GraphModule):
    """An ONNX model with a loss.

    loss: the name of an output that is the loss, or a loss of `onward.loss`; None: the model has
    none, and is evaluated only. trainable: names of initializers, or patterns such as
    "encoder.*"; None: all. Single numbers and masks are never trained unless named. batch_norm:
    whether batch normalization is by the batch in training, its statistics running on; None: where
    the model's nodes are in training form. Raises OnwardError for a model that no graph can hold,
    and for names that it lacks.
    """

    def __init__(
        self,
        source: OnnxSource,
        loss: Loss | str | None = None,
        trainable: Sequence[str] | None = None,
        batch_norm: bool | None = None,
    ) -> None:
        super().__init__()
        weights = source.arrays(source.names)
        running = statistics(source.model, batch_norm) - source.names
        if loss is not None and not weights:
            raise OnwardError(
                "the model has no weights of f32 to train: none of its initializers is an array of "
                "them, outside of the bodies of If, Loop and Scan"
            )
        chosen = _chosen(trainable, weights)
        paths: dict[str, str] = {}
        taken = source.inputs.keys()
        tied = _tied(weights, source.turned)
        chosen |= {twin for name, twin in tied.items() if name in chosen}
        _warn_of_shared({name: weights[name] for name in chosen}, source)
        for name in [*(n for n in weights if n not in tied), *tied]:
            twin = tied.get(name)
            if twin is None:
                paths[name] = self._place(name, weights[name], name in chosen, taken)
            else:
                paths[name] = paths[twin]
        buffers = {
            name: self._place(name, array, None, taken)
            for name, array in source.arrays(running).items()
        }
        _PROGRAMS[self] = _Program(source, loss, paths, buffers, batch_norm)
        if source.is_open:
            _check_loss(loss, self.graph({}, {}))

    @property
    def program(self) -> _Program:
        return _PROGRAMS[self]

    @property
    def initializers(self) -> dict[str, torch.Tensor]:
        """The weights and running statistics by the names of their initializers, as these have
        them: views of the parameters and buffers."""
        turned, found = self.program.source.turned, dict[str, torch.Tensor]()
        for name, path in self.program.paths.items():
            weight = self.get_parameter(path).detach()
            found[name] = weight.t() if name in turned else weight
        return found | {n: self.get_buffer(path) for n, path in self.program.buffers.items()}

    def labels(
        self, sizes: Mapping[str, Sequence[int]], numbers: Mapping[str, int] | None = None
    ) -> dict[str, Type]:
        """The inputs of the loss that are not the model's, with their types, for a batch of these
        sizes by input. numbers: the contents of inputs that a graph is read for. Raises OnwardError
        for a loss that the model's outputs do not have."""
        fixed = self._fixed(sizes, numbers or {})
        loss, graph = self.program.loss, self.graph(fixed, numbers or {})
        if loss is None or isinstance(loss, str):
            _check_loss(loss, graph)
            return {}
        own = self.program.source.inputs
        return {name: t for name, t in loss.labels(graph.outputs).items() if name not in own}

    def graph(self, dims: Mapping[str, int], numbers: Mapping[str, int]) -> Graph:
        """The model's graph, with its weights as inputs and without a loss; not to be edited. dims:
        sizes that are numbers, by name. numbers: the contents of inputs that it is read for. Raises
        OnwardError where it cannot be read with these."""
        return self._read(dims, numbers)[0]

    def _read(self, dims: Mapping[str, int], numbers: Mapping[str, int]) -> tuple[Graph, list[Dim]]:
        """The graph, and its conditions on the sizes that are not numbers."""
        program = self.program
        key = tuple(sorted(dims.items())), tuple(sorted(numbers.items()))
        found = program.graphs.get(key)
        if found is None:
            names = {name: parameter_name(path) for name, path in program.paths.items()}
            kept = {name: buffer_name(path) for name, path in program.buffers.items()}
            graph = program.source.graph(names, dims, numbers, kept)
            found = program.graphs[key] = graph, conditions(graph)
            while len(program.graphs) > KEPT:
                del program.graphs[next(iter(program.graphs))]
        return found

    def _fixed(
        self, sizes: Mapping[str, Sequence[int]], numbers: Mapping[str, int]
    ) -> dict[str, int]:
        """The named sizes that are numbers in the graph for such a batch: those below 2, those that
        break a condition of the graph with open sizes, and all where no graph serves open sizes.
        Raises OnwardError for sizes that one name has twice, or that the model does not take."""
        found, is_open = self._named(sizes), self.program.source.is_open
        fixed = {name: size for name, size in found.items() if size < 2 or not is_open}
        try:
            while more := broken(self._read(fixed, numbers)[1], found):
                fixed |= {name: found[name] for name in more}
        except OnwardError:
            return found  # a graph for these sizes alone may be read where one with others is not
        return fixed

    def _named(self, sizes: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """The sizes of a batch by their names. Raises OnwardError as `_fixed` does."""
        found: dict[str, int] = {}
        for name, type in self.program.source.inputs.items():
            given = sizes.get(name)
            if given is None:
                continue
            if len(given) != type.rank:
                raise OnwardError(f"the input {name} is {type}, and the batch has {list(given)}")
            for size, want in zip(given, type.shape, strict=True):
                if (isinstance(want, int) and want != size) or (
                    not isinstance(want, int) and found.setdefault(str(want), size) != size
                ):
                    raise OnwardError(
                        f"the input {name} is {type}, and the batch has {list(given)}"
                    )
        return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raises OnwardError: an ONNX model has no forward in PyTorch."""
        raise OnwardError(
            "an ONNX model has no forward in PyTorch; fix: TrainingSession's step, evaluate or "
            "predict, or a Trainer's train_step and eval_step"
        )

    def captured(self, request: CaptureRequest) -> CapturedModule:
        """Returns the graph of this call, with the loss where it is asked for."""
        try:
            leaves, numbers = self._leaves(request)
            sizes = {name: tuple(x.shape) for name, x in leaves.items()}
            graph = self.graph(self._fixed(sizes, numbers), numbers).clone()
            moved: dict[Value, Value] = {}
            batch_norm = self.program.batch_norm
            if request.differentiated and batch_norm is not False:
                moved = train_by_batch(graph, everywhere=batch_norm is True)
            else:
                keep_statistics(graph)
            if not request.differentiated:
                remove_dropout(graph)
        except CaptureError:
            raise
        except OnwardError as error:
            raise CaptureError(str(error)) from error
        outputs = dict(graph.outputs)
        inputs = {v.name or "": v for v in graph.inputs_with(Role.BATCH)}
        if request.want_loss:
            inputs |= self._write_loss(graph, outputs, inputs)
            if broken(conditions(graph), self._named(sizes)):
                given = ", ".join(f"{name} {list(shape)}" for name, shape in sizes.items())
                raise CaptureError(
                    f"the loss cuts more than a batch of these sizes has ({given}); fix: longer "
                    "samples, or a loss that cuts less"
                )
        graph.outputs = {output_name(name): value for name, value in outputs.items()}
        results = {name: output_name(name) for name in outputs}
        written = {
            source.name or "": graph.output(f"next.{source.name}", value, source)
            for source, value in moved.items()
        }
        graph.signature = graph.signature.but(results=results, written=written)
        if request.want_loss:
            graph.outputs["loss"] = inputs.pop("\0loss")
            graph.signature = graph.signature.but(loss="loss")
        return self._bound(graph, inputs, leaves)

    # ---- parts

    def _write_loss(
        self, graph: Graph, outputs: Mapping[str, Value], inputs: Mapping[str, Value]
    ) -> dict[str, Value]:
        """Adds the loss to the graph. Returns the inputs of its labels, and the loss under a name
        that no input has."""
        loss = self.program.loss
        if loss is None:
            raise CaptureError("the ONNX model has no loss; fix: TrainingSession(..., loss=)")
        if isinstance(loss, str):
            return {"\0loss": outputs[loss]}
        found = dict[str, Value]()
        wanted = loss.labels(outputs)
        _check_shared(wanted, {name: type_of(value) for name, value in inputs.items()})
        for name, type in wanted.items():
            found[name] = inputs[name] if name in inputs else graph.input(name, type, Role.BATCH)
        return {**found, "\0loss": loss.write(Builder(graph), outputs, found)}

    def _leaves(self, request: CaptureRequest) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        """The tensors of a call by the input that each is for, in the order of the batch's leaves,
        and the numbers that a graph is read for. Raises CaptureError for a call that the model does
        not take."""
        own = self.program.source.inputs
        given = dict(zip(own, request.args, strict=False)) | dict(request.kwargs)
        surplus = len(request.args) - len(own)
        asked, numbers = [*own], self.program.source.numbers
        more = dict[str, Type]()
        wrong = [n for n, x in given.items() if isinstance(x, torch.Tensor) == (n in numbers)]
        if wrong:
            want = "a Python number" if wrong[0] in numbers else "a tensor"
            raise CaptureError(f"{wrong[0]} has to be {want}, since the model asks for it")
        said = {name: int(x) for name, x in given.items() if name in numbers}
        given = {name: x for name, x in given.items() if name not in numbers}
        if request.want_loss and all(name in given or name in said for name in own):
            more = self.labels(
                {name: tuple(given[name].shape) for name in own if name in given}, said
            )
            asked += more
        strange = [name for name in given if name not in asked]
        whole = all(name in given or name in said for name in own)
        if surplus > 0 or request.target or (strange and whole):
            what = strange[0] if strange else "a further input"
            raise CaptureError(
                f"the model takes no {what}; fix: give {', '.join(asked) or 'nothing'}"
            )
        missing = [name for name in asked if name not in given and name not in said]
        if missing:
            raise CaptureError(
                f"the batch lacks {', '.join(missing)}; fix: give {', '.join(asked)} by name"
            )
        _check_labels(more, own, {name: tuple(x.shape) for name, x in given.items()})
        return given, said

    def _bound(
        self, graph: Graph, inputs: Mapping[str, Value], leaves: Mapping[str, torch.Tensor]
    ) -> CapturedModule:
        """The capture of a graph: its tensors, its leaves, and the sizes that it serves."""
        parameters = {
            parameter_name(path): self.get_parameter(path)
            for path in dict.fromkeys(self.program.paths.values())
        }
        present = {v.name for v in graph.inputs}
        parameters = {name: p for name, p in parameters.items() if name in present}
        names = list(leaves)
        places: dict[str, str] = {}
        buffers = {buffer_name(path): path for path in self.program.buffers.values()}
        held = {name: self.get_buffer(p) for name, p in buffers.items() if name in present}
        result = CapturedModule(graph, parameters, held, {})
        for i, name in enumerate(names):
            value = inputs[name]
            result.leaves[i] = value.name or ""
            for dim, size in enumerate(type_of(value).shape):
                result._sizes.append((i, dim, size))
                places.setdefault(str(size), f"L['leaves'][{i}].size()[{dim}]")
        result.guard(_said(size, places) for size in conditions(graph))
        ends = [graph.outputs[n] for n in ("loss",) if n in graph.outputs]
        result.reached = _sources(ends) & parameters.keys()
        result.frozen = {name for name, p in parameters.items() if not p.requires_grad}
        result.asks = "it normalizes by the batch" if graph.signature.written else ""
        return result

    def _place(
        self, name: str, array: np.ndarray, trained: bool | None, taken: Collection[str]
    ) -> str:
        """Registers a weight, in the array's own memory, under its name where PyTorch takes it as a
        path, and where no input of the model has the name of the weight's own input. trained: None
        for a buffer. taken: the inputs' names. Returns the path."""
        parts = name.split(".")
        module: torch.nn.Module = self
        if all(parts) and not _inputs_of(name) & set(taken):
            for part in parts[:-1]:
                inner = module._modules.get(part)
                if inner is None:
                    if hasattr(module, part):
                        break
                    inner = torch.nn.Module()
                    module.add_module(part, inner)
                module = inner
            else:
                if not hasattr(module, parts[-1]):
                    _register(module, parts[-1], array, trained)
                    return name
        plain = name.replace(".", "_") or "unnamed"
        while hasattr(self, plain) or _inputs_of(plain) & set(taken):
            plain += "_"
        _register(self, plain, array, trained)
        return plain


def _register(module: torch.nn.Module, name: str, array: np.ndarray, trained: bool | None) -> None:
    tensor = torch.from_numpy(array)
    if trained is None:
        module.register_buffer(name, tensor)
    else:
        module.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=trained))


def _warn_of_shared(weights: Mapping[str, np.ndarray], source: OnnxSource) -> None:
    """Warns of weights of one number throughout that several nodes read: what exporters make of
    the equal biases of a new model."""
    read: Counter[str] = Counter()
    for node in nodes_within(source.model.graph.node):
        read.update(weights.keys() & {*node.input})
    several = [name for name, count in read.items() if count > 1 and weights[name].size]
    shared = [name for name in several if (weights[name] == weights[name].flat[0]).all()]
    if shared:
        warnings.warn(
            f"several nodes read a weight of one number throughout: {some(shared)}; each trains as "
            "one weight, and exporters store equal tensors once, such as the zero biases of a "
            "new model; fix: export a model whose weights differ, as they do after a step",
            stacklevel=4,
        )


def _tied(held: Mapping[str, np.ndarray], turned: Set[str]) -> dict[str, str]:
    """The turned weights that equal another one, by name, each with that other's name: a table of
    words that is also the head, of which exporters write both forms."""
    found: dict[str, str] = {}
    for name in turned & held.keys():
        array = held[name]
        if _equal(array, np.broadcast_to(array[:1], array.shape)):
            continue  # all rows are alike, so that equality says nothing
        for other, candidate in held.items():
            alike = other not in turned and candidate.shape == array.shape
            if alike and _equal(candidate, array):
                found[name] = other
                break
    return found


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays of one shape are equal, compared a few rows at a time."""
    rows = max(1, ROWS // max(a[:1].size, 1))
    return all(np.array_equal(a[i : i + rows], b[i : i + rows]) for i in range(0, len(a), rows))


def _chosen(trainable: Sequence[str] | None, weights: Mapping[str, np.ndarray]) -> set[str]:
    """The names of the weights to train. Raises OnwardError for a pattern without a weight."""
    if trainable is None:
        return set(weights)
    if isinstance(trainable, str):
        raise OnwardError(f"trainable={trainable!r} is one string; fix: a list of names")
    found: set[str] = set()
    for pattern in trainable:
        names = set(named_by(pattern, weights))
        if not names:
            raise OnwardError(
                f"no weight of the model is named {pattern!r}; fix: names or patterns such as "
                f"{', '.join(list(weights)[:3])}"
            )
        found |= names
    return found


def _check_loss(loss: Loss | str | None, graph: Graph) -> None:
    """Raises OnwardError for a loss that the model's outputs do not have."""
    if loss is None:
        return
    if not isinstance(loss, str):
        wanted = loss.labels(graph.outputs)
        _check_shared(wanted, {v.name or "": type_of(v) for v in graph.inputs_with(Role.BATCH)})
        return
    if loss not in graph.outputs:
        raise OnwardError(
            f"loss names the output {loss!r}, which the model does not have; fix: one of "
            f"{', '.join(graph.outputs)}, or a loss of onward.loss"
        )
    found = type_of(graph.outputs[loss])
    if found.rank or not found.is_floating:
        raise OnwardError(
            f"the output {loss!r} is {found}, and a loss is one number; fix: a loss of onward.loss"
        )


def _said(size: Dim, places: Mapping[str, str]) -> str:
    """The condition that a size is 0 or more, as a Python expression. places: of each symbol."""
    terms: list[str] = []
    for names, factor in size.terms:
        number = [str(factor)] if factor != 1 or not names else []
        terms.append("*".join([*number, *(places[name] for name in names)]))
    return f"{' + '.join(terms)} >= 0".replace("+ -", "- ")


def _inputs_of(path: str) -> set[str]:
    """The graph inputs that a weight of this path may have."""
    return {parameter_name(path), buffer_name(path)}


def _check_shared(wanted: Mapping[str, Type], inputs: Mapping[str, Type]) -> None:
    """Raises OnwardError where a label that is an input of the model too has another type there:
    ops would broadcast one of them, or read numbers of another width."""
    for name, type in wanted.items():
        have = inputs.get(name, type)
        if have != type:
            raise OnwardError(
                f"the loss takes {name!r} as {type}, and the model's input of that name is {have}; "
                "fix: another name for the labels (target=), or an input of that type"
            )


def _check_labels(
    wanted: Mapping[str, Type],
    inputs: Mapping[str, Type],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Raises OnwardError for labels of another shape than the loss takes. inputs: the types of the
    model's own. shapes: of the batch, by name."""
    sizes = dict[str, int]()
    for name, type in inputs.items():
        sizes |= dict(zip(map(str, type.shape), shapes.get(name, ()), strict=False))
    for name, type in wanted.items():
        known = [s if isinstance(s, int) or s.symbols <= sizes.keys() else None for s in type.shape]
        want = [s.number(sizes) if isinstance(s, Dim) else s for s in known]
        have = shapes[name]
        fits = len(have) == len(want)
        if not fits or any(w not in (None, n) for w, n in zip(want, have, strict=True)):
            said = "?" if None in want else list(want)
            raise OnwardError(
                f"{name} is {list(have)}, and the loss takes {type}, which is {said} for this "
                f"batch; fix: give {name} that shape"
            )


def _sources(ends: Sequence[Value]) -> set[str]:
    """The names of the inputs that values depend on."""
    found: set[str] = set()
    seen, left = set[Value](), list(ends)
    while left:
        value = left.pop()
        if value in seen:
            continue
        seen.add(value)
        node = value.producer()
        if node is None:
            found.add(value.name or "")
        else:
            left += [x for x in node.inputs if x is not None]
    return found


__all__ = ["OnnxModule"]
