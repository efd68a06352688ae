"""Blocks of `torch.autocast` within a trace: tensors have eager's types, nodes their block's type.

A block is entered as in eager PyTorch, so that code which asks for a tensor's dtype, or whether
autocast is on, takes eager's branch. The casts that autocast makes are no nodes: each node says
what its block casts to instead (f32 where the block is off), and a policy (rewrite/precision)
writes the casts after the capture.
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
    """Within it the blocks that this thread enters mark the nodes that are traced in them, and
    leave no nodes of their own. device: the model's, for whose type a block has to be."""
    open_blocks: list[tuple[Any, ExitStack]] = []
    entering: list[Any] = []  # the blocks whose own method runs, which tells the trace of itself
    plain_enter, plain_leave = _KIND.__enter__, _KIND.__exit__

    def enter(block: Any) -> Any:
        stack = ExitStack()
        if block.device == device:
            kind = LOW_TYPES.get(block.fast_dtype) if block._enabled else DType.FLOAT
            if kind is not None:
                stack.enter_context(traceback.annotate({_KEY: kind.name}))
        open_blocks.append((block, stack))
        entering.append(block)
        try:
            plain_enter(block)
        finally:
            entering.pop()
        return block

    def leave(block: Any, *_: Any) -> bool:
        last = max(i for i, (held, _) in enumerate(open_blocks) if held is block)
        open_blocks.pop(last)[1].close()
        entering.append(block)
        try:
            plain_leave(block, None, None, None)
        finally:
            entering.pop()
        return False

    plain = PreDispatchTorchFunctionMode.__torch_function__

    def called(mode: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Enters and leaves a block as graphs of dynamo's do."""
        if function in (_MODULE._enter_autocast, _MODULE._exit_autocast):
            if entering:
                return None
            return enter(_KIND(*args)) if function is _MODULE._enter_autocast else leave(*args)
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
