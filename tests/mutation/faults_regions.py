"""Faults of parts that run in PyTorch within a graph: how they are found, and how they run."""

from __future__ import annotations

from fault import Fault

REGIONS = ("module/test_regions.py", "module/test_region_effects.py")

REGION_FAULTS: tuple[Fault, ...] = (
    Fault(
        "regions: gradients of parameters are dropped", "kernels/region.py",
        "        leaves = [*tape.xs, *tape.parameters]\n",
        "        leaves = [*tape.xs, *(p.detach() for p in tape.parameters)]\n", REGIONS,
    ),
    Fault(
        "regions: a retained graph is freed", "kernels/region.py",
        "retain_graph=regions.keep", "retain_graph=False", REGIONS,
    ),
    Fault(
        "regions: the plan's versions count for the tape", "kernels/region.py",
        "x.clone() if copies else x.data", "x.clone() if copies else x.detach()", REGIONS,
    ),
    Fault(
        "regions: a tape of a block that is moved away has no copies", "module/run.py",
        "        packing = _packing() is not None\n", "        packing = False\n", REGIONS,
    ),
    Fault(
        "regions: hooks on parameters run twice", "kernels/region.py",
        "if p._backward_hooks else p", "if False else p", REGIONS,
    ),
    Fault(
        "regions: random numbers do not follow the seed", "kernels/region.py",
        "    if seed is None:\n        yield", "    if True:\n        yield", REGIONS,
    ),
    Fault(
        "regions: what a batch leaves out has a gradient of zeros", "module/run.py",
        "call.reached(given) - left.executable.unreached", "call.reached(given)", REGIONS,
    ),
    Fault(
        "regions: a Trainer moves what a batch leaves out", "execute/executable.py",
        "                self._require_reached()\n", "                pass\n", REGIONS,
    ),
    Fault(
        "regions: shapes are not checked", "kernels/region.py",
        "        _check(part, tape.ys, args.outputs)\n", "", REGIONS,
    ),
    Fault(
        "regions: code runs again for a cotangent that comes unexpected", "module/prepared_call.py",
        "any(part.module is not None for part in captured.regions)", "False", REGIONS,
    ),
    Fault(
        "regions: a profile leaves buffers changed", "kernels/region.py",
        "            self.tapes = {}\n            held.put_back()\n",
        "            self.tapes = {}\n", REGIONS,
    ),
    Fault(
        "regions: values that a part sets in itself are guarded", "prepare/guards.py",
        "        self._leave_apart(captured)\n", "", REGIONS,
    ),
    Fault(
        "regions: an evaluation runs in the model's mode", "capture/regions/region.py",
        "    if before == list(flags):\n", "    if True:\n", REGIONS,
    ),
    Fault(
        "regions: an accelerated part runs a plan within a plan", "module/around.py",
        "        or running()  # within a region of an outer graph\n", "", REGIONS,
    ),
    Fault(
        "regions: a part that the loss does not read is left out", "graph/signature.py",
        "[*self.written.values(), *self.parts.values(), ", "[*self.written.values(), ", REGIONS,
    ),
    Fault(
        "regions: a step that is refused has written buffers", "kernels/region.py",
        "            held.put_back()\n            raise", "            raise", REGIONS,
    ),
    Fault(
        "regions: a backward runs for cotangents that did not come", "module/run.py",
        "idle = self.call.idle(given)", "idle = call.idle(left.ends)", REGIONS,
    ),
    Fault(
        "regions: a smaller plan computes again what a tape shows", "plan/estimate.py",
        "found.shared | taped", "found.shared", REGIONS,
    ),
    Fault(
        "regions: a hook on what a part is given is no matter", "capture/regions/search.py",
        "for x in xs] != hooks:", "for x in xs] != hooks and False:", REGIONS,
    ),
    Fault(
        "regions: a look at another batch leaves its sizes alone", "capture/regions/shapes.py",
        "while want == n or want in new.values()", "while want in new.values()", REGIONS,
    ),
    Fault(
        "regions: hooks run in the runs that tell shapes", "capture/regions/search.py",
        "            without_hooks(self.model),\n", "", ("module/test_modes.py",),
    ),
    Fault(
        "reach: what a graph casts is not followed", "capture/stages.py",
        " | {of_batch[n] for n in nodes if n in of_batch}", "",
        ("module/test_autocast.py",),
    ),
    Fault(
        "module: a call that runs again meets buffers that it has written", "module/run.py",
        "            buffer.data.copy_(then)\n        try:", "            pass\n        try:",
        ("module/test_written.py",),
    ),
    Fault(
        "module: a call goes around while another thread traces", "module/around.py",
        "            and not traced_elsewhere()\n", "            and True\n",
        ("module/test_compositions.py",),
    ),
)  # fmt: skip
