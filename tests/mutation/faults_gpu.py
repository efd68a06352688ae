"""Faults of CUDA graphs, streams, predicted times, failing steps on a GPU, and dropped graphs."""

from __future__ import annotations

from fault import Fault

RECORDED = ("execute/test_cuda_runtime.py", "execute/test_recording.py")

GPU_FAULTS: tuple[Fault, ...] = (
    Fault(
        "recordings: a run that was interrupted counts", "execute/recording.py",
        """        for launch in binding.launches[part.start : part.stop]:
            launch()
        if self._possible:
            binding.runs.setdefault(part, set()).add(threading.get_ident())
""",
        """        if self._possible:
            binding.runs.setdefault(part, set()).add(threading.get_ident())
        for launch in binding.launches[part.start : part.stop]:
            launch()
""", RECORDED,
    ),
    Fault(
        "recordings: a thread records what another has run", "execute/recording.py",
        "return threading.get_ident() in binding.runs.get(part, ())",
        "return bool(binding.runs.get(part))", RECORDED,
    ),
    Fault(
        "recordings: one that fails is the last", "execute/recording.py",
        "TRIES = 3 ", "TRIES = 1 ", RECORDED,
    ),
    Fault(
        "recordings: the allocator goes on where one has failed", "execute/runtime.py",
        "                _end_allocations(pool)\n", "", RECORDED,
    ),
    Fault(
        "recordings: generators draw for one that has failed", "execute/runtime.py",
        "generators draw outside again\n                    self._free_workspaces(stream)\n",
        "generators draw outside again\n                    pass\n", RECORDED,
    ),
    Fault(
        "recordings: signals and Python's collector come in between", "execute/runtime.py",
        "with _ONE_AT_A_TIME, signals_wait(), uncollected(), torch", "with _ONE_AT_A_TIME, torch",
        RECORDED,
    ),
    Fault(
        "recordings: two threads at once", "execute/runtime.py",
        "with _ONE_AT_A_TIME, signals_wait(), uncollected(), torch",
        "with signals_wait(), uncollected(), torch", RECORDED,
    ),
    Fault(
        "streams do not wait for the run before", "execute/runtime.py",
        "stream.wait_stream(self._last)", "pass", RECORDED,
    ),
    Fault(
        "a parameter on another GPU is taken", "execute/owned.py",
        'tensor.device.type != "cpu" and tensor.device != device', "False",
        ("execute/test_executable.py",),
    ),
    Fault(
        "offloaded state is not waited for where an update fails", "execute/executable.py",
        """        finally:
            if self.memory.store is not None:
                self.memory.store.settle()
""",
        """        finally:
            pass
        if self.memory.store is not None:
            self.memory.store.settle()
""", ("execute/test_executable.py",),
    ),
    Fault(
        "predicted times: the number of rows of a product counts", "explanation/gpu_time.py",
        "value(t.shape[-1]) for t in matrices", "value(t.shape[-2]) for t in matrices",
        ("explanation/test_gpu_time.py",),
    ),
    Fault(
        "predicted times: bf16 is fast on every GPU", "explanation/gpu_time.py",
        "bool(found) and (bf16 or DType.BFLOAT16 not in found)", "bool(found)",
        ("explanation/test_gpu_time.py",),
    ),
    Fault(
        "a Trainer keeps a graph for each shape", "train/prepared_steps.py",
        "            del kept[STEPS:]\n", "", ("train/test_trainer_guards.py",),
    ),
    Fault(
        "a Trainer drops the newest graph", "train/prepared_steps.py",
        "                kept.insert(0, kept.pop(i))\n", "                pass\n",
        ("train/test_trainer_guards.py",),
    ),
    Fault(
        "transformers' Trainer goes on numbering windows in the next run",
        "integrations/led_trainer.py",
        "        self._counted = None\n\n\nclass", "        pass\n\n\nclass",
        ("integrations/test_transformers_trainer.py",),
    ),
)  # fmt: skip
