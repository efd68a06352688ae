"""What Onward predicts of a rank of a mesh, in a process that has no ranks: bytes by kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import onward
from suite.question import answer
from suite.rank_engines import MODELS, MODES, RATE


def run(request: Mapping[str, Any]) -> dict[str, Any]:
    """The predicted bytes of rank 0, by kind and in all, and what it sends in a step."""
    torch.set_num_threads(request["threads"])
    axis, zero = MODES[request["engine"]]
    options = {"mesh": "auto", "zero": zero} if zero else {}
    make, batch_of, _ = MODELS[request["model"]]
    trainer = onward.Trainer(make(request["size"]), onward.optim.AdamW(lr=RATE), options=options)
    sizes = (request["size"], request["rows"], request["length"])
    batch = batch_of(*sizes, torch.Generator().manual_seed(1))
    found = trainer.explain_mesh(batch, mesh=f"{axis}={request['ranks']}").chosen
    return {"memory": dict(found.memory), "bytes": found.nbytes, "sent": found.sent()}


if __name__ == "__main__":
    answer(run)
