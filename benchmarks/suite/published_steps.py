"""Published times and memory of training steps, which the simulator is held against.

The split was written down before anything was fitted, and no row moves:

* FIT: of A's table 1 the rows 1, 3, 5, 7, 9; all of D.
* HELD: of A's table 1 the rows 2, 4, 6, 8, 10; the pipeline rows of A's table 2; all of B, C and E.
* SHAPE: A's ZeRO-3 rows (table 2) and F: curves that have to come out of the model. In no mean.

Sources: A, Narayanan et al. 2021 (arXiv 2104.04473, tables 1 and 2). B, Korthikanti et al. 2022
(arXiv 2205.05198, table 5; memory: figure 1, as digitized by calculon). C, torchtitan's pages
benchmarks/llama3_h100_202412 and asyncTP_llama3_h100_2025-06; the rows of fp8 are Float8 on that
page. D, the tables of llm-foundry's scripts/train/benchmarking. E, Llama Team 2024 (SC'24 slide).
F, the README of Megatron-LM.

`exact` is False where a shape or a figure is from memory, not read in the source. What a source
does not say (`free`) is chosen as its authors did, by speed: the fastest of these values that fits.
"""

from __future__ import annotations

from suite.published_megatron import megatron_memory, megatron_steps
from suite.published_others import other_memory, other_steps
from suite.published_row import PublishedMemory, PublishedStep

STEPS: tuple[PublishedStep, ...] = (*megatron_steps(), *other_steps())
MEMORY: tuple[PublishedMemory, ...] = (*megatron_memory(), *other_memory())

__all__ = ["MEMORY", "STEPS"]
