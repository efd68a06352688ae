"""Blocks of `torch.autocast` within a forward: the trace is fp32, and each node says its block's
type.

A graph is cast by a policy (rewrite/precision), after it is captured; so a block changes nothing
while the model is traced. What it says is written on the nodes: the type of its products where it
is on, f32 where it is off.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode

from onward.graph.types import DType
from onward.model_state.patches import Patch, patched

_KEY = "onward_precision"
# what autocast casts to
LOW_TYPES = {torch.bfloat16: DType.BFLOAT16, torch.float16: DType.FLOAT16}
_MODULE: Any = torch.amp.autocast_mode
_KIND = _MODULE.autocast


@contextmanager
def autocast_noted(device: str) -> Iterator[None]:
    """Within it the blocks that this thread enters do nothing but mark what is traced. device: the
    model's, of whose type a block has to be for it."""
    open_blocks: list[tuple[Any, ExitStack]] = []

    def enter(block: Any) -> Any:
        stack = ExitStack()
        if block.device == device:
            kind = LOW_TYPES.get(block.fast_dtype) if block._enabled else DType.FLOAT
            if kind is not None:
                stack.enter_context(traceback.annotate({_KEY: kind.name}))
        open_blocks.append((block, stack))
        return block

    def leave(block: Any, *_: Any) -> bool:
        last = max(i for i, (held, _) in enumerate(open_blocks) if held is block)
        open_blocks.pop(last)[1].close()
        return False

    plain = PreDispatchTorchFunctionMode.__torch_function__

    def called(mode: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Enters and leaves a block as graphs of dynamo's do."""
        if function is _MODULE._enter_autocast:
            return enter(_KIND(*args))
        if function is _MODULE._exit_autocast:
            return leave(*args)
        return plain(mode, function, types, args, kwargs)

    places: list[Patch] = [
        (_KIND, "__enter__", enter),
        (_KIND, "__exit__", leave),
        (PreDispatchTorchFunctionMode, "__torch_function__", called),
    ]
    with patched(places), traceback.preserve_node_meta():
        yield


def block_of(node: Any) -> str:
    """The type that the innermost block around a traced node says; empty where there is none."""
    return (node.meta.get("custom") or {}).get(_KEY, "")


__all__ = ["LOW_TYPES", "autocast_noted", "block_of"]
