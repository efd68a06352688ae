"""Steps of Keras models on the torch backend, whose variables are the parameters of a torch module.

torch.export writes the forward as a program without Python, which Onward captures as it does any
module. Graphs read the memory of Keras's variables themselves, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from onward.errors import OnwardError
from onward.integrations.keras_package import keras, set_mask, tree, unpack
from onward.integrations.keras_refusals import refusing
from onward.integrations.keras_steps import KerasProgram, KerasSteps, KerasUpdate, quietly
from onward.integrations.keras_tracing import KerasForward, packed
from onward.train import Trainer


class TorchSteps(KerasSteps):
    """Steps whose parameters are the variables of Keras themselves."""

    def function(self, *args: Any) -> Any:
        """Runs the one batch of a list."""
        [data] = args
        model = self.model
        x, y, weight = unpack(next(iter(data)))
        x, y, weight = tree.map_structure(_tensor, (x, y, weight))
        kinds = (model.trainable_variables, model.non_trainable_variables, model.metrics_variables)
        program, leaves, _ = self.program((x, y, weight), kinds)
        forward, names = program.forward, self.wanted(program, self.has_metrics)
        variables = model.trainable_variables

        def update(grads: list[torch.Tensor | None]) -> None:
            with torch.no_grad():
                model.optimizer.apply(grads, variables)

        program.update.update = update
        loss, found = self.run(program, leaves, names)
        with torch.no_grad():
            for i in forward.updated:
                model.non_trainable_variables[i].assign(found[f"state_{i}"])
            size = next(leaf for leaf in tree.flatten(x) if leaf is not None).shape[0]
            model._loss_tracker.update_state(loss, sample_weight=size)
            if not self.has_metrics:
                return model.get_metrics_result()
            flat = [found[f"output_{i}"] for i in range(len(tree.flatten(forward.predictions)))]
            for i in forward.masked:
                set_mask(flat[i], found[f"mask_{i}"])
            outputs = packed(forward.predictions, flat)
            if model._compile_loss is not None and model._compile_loss.metrics:
                model._compile_loss(y, outputs, weight)
            return model.compute_metrics(x, y, outputs, sample_weight=weight)

    def make(self, forward: KerasForward, leaves: list[Any], values: Any) -> KerasProgram:
        trainable, others, metrics = [[v.value.detach() for v in kind] for kind in values]
        with refusing("the model cannot be traced for training"), torch.no_grad():
            forward(trainable, others, metrics, leaves, None)
        given = (trainable, others, metrics, leaves, [torch.ones(()) for _ in forward.rates])
        with refusing("torch.export has no program of the model"), torch.no_grad():
            program, forward.is_open = _exported(_Call(forward), given)
        graph = _put_dropout(program.module(check_guards=False), forward.rates)
        _put_numbers(graph)
        names = [f"leaf_{i}" for i in range(len(leaves))]
        held = [v.value for kind in values[:2] for v in kind]
        module = TracedForward(graph, held, metrics, names, forward)
        trained = [v.value for v in values[0]]
        if not any(p.requires_grad for p in trained):
            raise OnwardError("the model has no weights to train; fix: trainable=True")
        update = KerasUpdate(trained)
        with quietly():
            trainer = Trainer(module, update, options=self.options)
        made = KerasProgram(forward, trainer, update)
        made.inputs = {
            name: (i, leaf.dtype) for i, (name, leaf) in enumerate(zip(names, leaves, strict=True))
        }
        return made


class TracedForward(torch.nn.Module):
    """A traced training forward: its weights are Keras's, its arguments the leaves of a batch."""

    def __init__(
        self,
        graph: Any,
        held: Sequence[torch.Tensor],
        metrics: Sequence[torch.Tensor],
        names: Sequence[str],
        forward: KerasForward,
    ) -> None:
        super().__init__()
        self.graph, self.names, self.outputs = graph, tuple(names), tuple(forward.names())
        self.counts = tuple(map(len, (forward.model.trainable_variables,)))
        self.factors = len(forward.rates)
        for i, tensor in enumerate(held):
            if isinstance(tensor, torch.nn.Parameter):
                self.register_parameter(f"weight_{i}", tensor)
            else:
                self.register_buffer(f"weight_{i}", tensor)
        self.held = len(held)
        self.metrics = len(metrics)
        for i, tensor in enumerate(metrics):
            self.register_buffer(f"metric_{i}", torch.zeros_like(tensor))

    def forward(self, **leaves: torch.Tensor) -> dict[str, torch.Tensor]:
        weights = [getattr(self, f"weight_{i}") for i in range(self.held)]
        [count] = self.counts
        metrics = [getattr(self, f"metric_{i}") for i in range(self.metrics)]
        factors = [torch.ones(()) for _ in range(self.factors)]
        given = [leaves[name] for name in self.names]
        found = self.graph(weights[:count], weights[count:], metrics, given, factors)
        return dict(zip(self.outputs, found, strict=True))


class _Call(torch.nn.Module):
    """A forward as the module that torch.export asks for."""

    def __init__(self, forward: KerasForward) -> None:
        super().__init__()
        self._of = [forward]

    def forward(self, trainable: Any, others: Any, metrics: Any, leaves: Any, factors: Any) -> Any:
        return tuple(self._of[0](trainable, others, metrics, leaves, factors))


def _exported(call: torch.nn.Module, given: tuple[Any, ...]) -> tuple[Any, bool]:
    """The program of a call, and whether the size of the batch is open in it."""
    leaves = given[3]
    dims: Any = (*([None] * len(part) for part in given[:3]), None, [None] * len(given[4]))
    if leaves[0].shape[0] > 1:
        batch = [{0: torch.export.Dim("batch", min=2)} for _ in leaves]
        try:
            open_dims = (*dims[:3], batch, dims[4])
            return torch.export.export(call, given, dynamic_shapes=open_dims, strict=False), True
        except Exception:  # whatever the forward asks of a size that is not known
            pass
    return torch.export.export(call, given, strict=False), False


def _put_dropout(program: fx.GraphModule, rates: Sequence[float]) -> fx.GraphModule:
    """The program with dropout in place of the product with each factor, and without the hooks by
    which torch.export checks arguments."""
    graph = fx.GraphModule(program, program.graph)
    places = [n for n in graph.graph.nodes if n.op == "placeholder"]
    factors = places[len(places) - len(rates) :]
    for number, (factor, rate) in enumerate(zip(factors, rates, strict=True), 1):
        users = list(factor.users)
        if not users:
            continue
        [node, *more] = users
        if more or node.target is not torch.ops.aten.mul.Tensor:
            raise OnwardError(f"torch.export has changed dropout {number}; fix: a rate of 0")
        [x] = [a for a in node.args if a is not factor]
        with graph.graph.inserting_before(node):
            made = graph.graph.call_function(torch.nn.functional.dropout, (x, rate, True))
        node.replace_all_uses_with(made)
        graph.graph.erase_node(node)
    graph.recompile()
    return graph


def _put_numbers(graph: fx.GraphModule) -> None:
    """Puts numbers in the place of the buffers that torch.export keeps them in, such as what masks
    fill with, which passes read. Those of masks that torch's sdpa adds stay: a mask that the batch
    alone decides may be refused, for a query that sees no key."""
    stay = _sources(
        mask
        for node in graph.graph.nodes
        if node.target is torch.ops.aten.scaled_dot_product_attention.default
        for mask in [node.kwargs.get("attn_mask"), *node.args[3:4]]
        if isinstance(mask, fx.Node)
    )
    for node in list(graph.graph.nodes):
        lifted = node.op == "get_attr" and str(node.target).startswith("lifted_tensor")
        held = getattr(graph, str(node.target)) if lifted and node not in stay else None
        if held is None or held.dim():
            continue
        with graph.graph.inserting_before(node):
            made = graph.graph.call_function(
                torch.ops.aten.full.default, ([], held.item()), {"dtype": held.dtype}
            )
        node.replace_all_uses_with(made)
        graph.graph.erase_node(node)
    graph.recompile()


def _sources(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that these depend on, and themselves."""
    found, left = set[fx.Node](), list(nodes)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.all_input_nodes
    return found


def _tensor(x: Any) -> Any:
    return None if x is None else keras.ops.convert_to_tensor(x)


__all__ = ["TorchSteps", "TracedForward"]
