"""Faults of optimizer state, guards, a step's commit."""

from __future__ import annotations

from fault import GUARDS, STATE, STEPS, Fault

SCALE, OWN = ("train/test_loss_scale.py",), ("train/test_own_steps.py",)
OPTIMIZERS = ("train/test_optimizers.py",)
AVERAGE = ("train/test_window_average.py",)

TRAIN_FAULTS: tuple[Fault, ...] = (
    # optimizer
    Fault(
        "state: adopted counts take the least", "train/optimizer_state.py",
        "return max(self.counts.values(), default=default)",
        "return min(self.counts.values(), default=default)", STATE,
    ),
    Fault(
        "state: counts start with the session", "train/update_state.py",
        "name: self.state.counts.get(self._clocks.members(clock)[0], 0) + 1",
        "name: self.done + 1", STATE,
    ),
    Fault(
        "state: frozen parameters' steps move", "train/update_state.py",
        "p for clock in signature.clocks for p in self._clocks.members(clock)",
        "p for members in self._clocks.by_clock.values() for p in members", STATE,
    ),
    Fault(
        "state: sums of micro-batches are kept", "train/gradient_sums.py",
        "self.total(p).zero_()", "self.total(p)", STATE,
    ),
    Fault(
        "state: a velocity's first step", "train/torch_state.py",
        "uncounted = max(1, self._own.counts.get(p, 1))",
        "uncounted = self._own.counts.get(p, 0)", STATE,
    ),
    Fault(
        "state: slots begin with zeros", "train/optimizer_state.py",
        "        if first:\n            made.fill_(first)",
        "        if False:\n            made.fill_(first)", OPTIMIZERS,
    ),
    Fault(
        "update: a group that maximizes minimizes", "differentiate/update/apply.py",
        "scale = scales[group.maximize]", "scale = scales[False]", OPTIMIZERS,
    ),
    Fault(
        "groups: a parameter in two groups is in the later one", "train/parameter_groups.py",
        "            if p in owner:", "            if False:", ("train/test_parameter_groups.py",),
    ),
    Fault(
        "window: only the last micro-batch's labels count",
        "differentiate/update/average_labels.py",
        'labels = early.Add(held["labels"], counted)', "labels = counted", AVERAGE,
    ),
    Fault(
        "window: a mean over one row is one over its numbers", "differentiate/loss_sum.py",
        "(not _single(shape) or (is_one_row and _of_rows(node)))", "not _single(shape)", AVERAGE,
    ),
    Fault(
        "ranks: zeros stand in for a share without rows", "train/empty_shares.py",
        "    if taken is not None:", "    if False:", ("train/test_empty_shares.py",),
    ),
    Fault(
        "window: labels that are ignored count too", "differentiate/loss_sum.py",
        "shares = b.cast(counted, DType.INT64)",
        "shares = b.cast(b.Equal(labels, labels), DType.INT64)", AVERAGE,
    ),
    Fault(
        "window: sums reach into the next", "train/window.py",
        "self.loss = self.mean_loss()\n        self.sums = _zeros()",
        "self.loss = self.mean_loss()", AVERAGE,
    ),
    Fault(
        "window: an early update takes the mean over a whole window", "train/window.py",
        "return unit / (weight * divisor)", "return unit", AVERAGE,
    ),
    Fault(
        "update: elements are clipped before the loss scale is divided out",
        "differentiate/update/clip.py",
        "most = b.Div(most, gradients.scale)", "most = b.Mul(most, 1.0)",
        ("train/test_clipping.py",),
    ),
    Fault(
        "update: the averaged weights start at zero", "train/averaged_weights.py",
        "Average(self._own(parameter).clone(), ", "Average(self._own(parameter) * 0, ",
        ("train/test_averaged_weights.py",),
    ),
    Fault(
        "update: clipping without its epsilon", "differentiate/update/clip.py",
        "b.Add(norm, EPSILON)", "b.Add(norm, 0.0)", ("train/test_clipping.py",),
    ),
    Fault(
        "update: clipping makes small gradients large", "differentiate/update/clip.py",
        "factor = b.Min(b.Div(recipe.max_grad_norm, b.Add(norm, EPSILON)), 1.0)",
        "factor = b.Div(recipe.max_grad_norm, b.Add(norm, EPSILON))", ("train/test_clipping.py",),
    ),
    # the loss scale
    Fault(
        "loss scale: gradients are not divided by it", "differentiate/update/loss_scale.py",
        "divided = b.Reciprocal(scale)", "divided = b.scalar(1.0, DType.FLOAT)", SCALE,
    ),
    Fault(
        "loss scale: a fixed one is divided by twice", "differentiate/update/loss_scale.py",
        "1.0 / recipe.loss_scale", "1.0 / recipe.loss_scale**2", SCALE,
    ),
    Fault(
        "loss scale: it grows an update too late", "differentiate/update/loss_scale.py",
        "b.Less(count,", "b.LessOrEqual(count,", SCALE,
    ),
    Fault(
        "loss scale: an overflow leaves the tracker", "differentiate/update/loss_scale.py",
        "b.Where(b.And(finite, stays), count,", "b.Where(stays, count,", SCALE,
    ),
    Fault(
        "loss scale: it becomes infinite", "differentiate/update/loss_scale.py",
        "b.Where(b.IsInf(moved), scale, moved)", "moved", SCALE,
    ),
    Fault(
        "loss scale: it falls to 0", "differentiate/update/loss_scale.py",
        "moved = b.Max(moved, LEAST_SCALE)", "pass", SCALE,
    ),
    Fault(
        "loss scale: factors are f32", "differentiate/update/loss_scale.py",
        "np.array(number, dtype=np.float64)",
        "np.array(np.float32(number), dtype=np.float64)", SCALE,
    ),
    Fault(
        "loss scale: the norm is that of scaled gradients", "differentiate/update/clip.py",
        "norm = b.Mul(norm, before)", "pass", SCALE,
    ),
    Fault(
        "loss scale: clipping forgets it", "differentiate/update/clip.py",
        "else b.Mul(factor, before)", "else factor", SCALE,
    ),
    Fault(
        "loss scale: a norm that overflows clips to nothing",
        "differentiate/update/skip_nonfinite.py",
        "AllFinite(None, norm)", "AllFinite(norm, *gradients.of.values())", SCALE,
    ),
    Fault(
        "loss scale: it moves within a window", "train/trainer.py",
        "            if last:\n                self._end_window",
        "            self._scaling.advance(prepared.executable)\n"
        "            if last:\n                self._end_window", SCALE,
    ),
    Fault(
        "loss scale: it moves only where an update is written", "train/trainer.py",
        "if not self._spikes.refused:  #", "if wrote:  #", SCALE,
    ),
    Fault(
        "loss scale: what a spike leaves out makes it grow", "train/trainer.py",
        "if not self._spikes.refused:  #", "if True:  #", ("train/test_loss_spikes.py",),
    ),
    Fault(
        "loss scale: a state does not hold it", "train/loss_scale.py",
        "StatePart(self._save,", "StatePart(dict,", SCALE,
    ),
    Fault(
        "loss scale: a state's is not taken", "train/loss_scale.py",
        "self._check, self._restore)", "self._check, lambda state: lambda: None)", SCALE,
    ),
    Fault(
        "loss scale: gradients of another scale are gone on with", "train/loss_scale.py",
        "self._save, self._check,", "self._save, lambda state: None,", SCALE,
    ),
    Fault(
        "loss scale: a profile sees the next one", "train/loss_scale.py",
        "self._scale = executable.output(following[signature.loss_scale])",
        "self._scale = executable.view(following[signature.loss_scale])", SCALE,
    ),
    Fault(
        "fp16: squares are low", "rewrite/precision/policy.py",
        "if line.widens and self.low == DType.FLOAT16:", "if False:",
        ("models/test_fp16_gradients.py",),
    ),
    Fault(
        "fp16: constants count as exact that are not", "rewrite/precision/write_casts.py",
        "return bool((rounded(array, dtype).astype(array.dtype) == array).all())",
        "return True", ("models/test_fp16_gradients.py",),
    ),
    # guards
    Fault(
        "guard: module buffers", "model_state/walk.py",
        'for name in ("_parameters", "_buffers"):', 'for name in ("_parameters",):', GUARDS,
    ),
    Fault(
        "guard: what requires a gradient", "model_state/walk.py",
        "type(x), x.requires_grad, x.dtype", "type(x), x.dtype", GUARDS,
    ),
    Fault(
        "guard: training flags", "prepare/guards.py",
        "paths += self._read_flags(model)", "self._read_flags(model)", GUARDS,
    ),
    Fault(
        "guard: baked tensors", "prepare/guards.py",
        "        if not kept:\n", "        if False:\n", GUARDS,
    ),
    Fault(
        "guard: tensors that numbers were read off", "capture/stages.py",
        "        result.constants += flat.noted.outer", "        pass",
        ("capture/test_read_numbers.py",),
    ),
    # a step's commit
    Fault(
        "step: updates before all gradients", "plan/order.py",
        'last = any(n.op_type == "AllFinite" or "action" in n.meta for n in graph)', "last = False",
        STEPS,
    ),
    Fault(
        "step: signals do not wait", "execute/executable.py",
        "            with signals_wait(), self._writing()", "            with self._writing()",
        STEPS,
    ),
    Fault(
        "step: launches that an interrupt has left half bound are run", "execute/binder.py",
        "        kept = self._kept.take(self.dims)\n",
        "        self.binding, self._bound_at, self._bound_dims = made, pointers, self.dims\n"
        "        kept = self._kept.take(self.dims)\n", ("train/test_interrupts.py",),
    ),
    Fault(
        "step: counters are not of the update that is interrupted", "execute/executable.py",
        "self._writing() if wrote else nullcontext():\n", "nullcontext():\n",
        ("train/test_interrupts.py",),
    ),
    Fault(
        "load: an interrupt leaves it half done", "train/state_part.py",
        "    except BaseException:\n        for back", "    except Exception:\n        for back",
        ("train/test_interrupts.py",),
    ),
    Fault(
        "forks: OpenMP's threads are left to the child", "forks.py",
        "os.register_at_fork(before=_end_threads, ", "os.register_at_fork(", ("test_forks.py",),
    ),
    Fault(
        "forks: a lock of another thread's stays closed", "forks.py",
        "            lock.is_lost = True\n", "            pass\n", ("test_forks.py",),
    ),
    Fault(
        "threads: Trainers of one model update at once", "train/exclusive.py",
        "    for p in parameters:\n        _locks", "    for p in ():\n        _locks",
        ("train/test_threads.py",),
    ),
    Fault(
        "threads: a new thread has OpenMP's number", "execute/binder.py",
        "        torch.get_num_threads()  #", "        #", ("train/test_threads.py",),
    ),
    Fault(
        "step: a strided parameter without a place", "execute/tensors.py",
        "                if tensor.is_contiguous():\n                    return tensor\n",
        "                return tensor\n", ("train/test_storage.py",),
    ),
    Fault(
        "names: a batch's leaf without its word", "graph/names.py",
        'PARAM, BUFFER, BATCH, OUTPUT = "param.", "buffer.", "batch.", "output."',
        'PARAM, BUFFER, BATCH, OUTPUT = "param.", "buffer.", "", "output."',
        ("train/test_names.py",),
    ),
    Fault(
        "names: a result that is called loss is taken for the loss", "capture/stages.py",
        "zip(names[first:], outputs[first:], strict=True))\n"
        "    loss = outputs[0] if want_loss else None\n",
        "zip(names, outputs, strict=True))\n"
        "    loss = results.pop(names[0]) if want_loss else None\n",
        ("train/test_names.py",),
    ),
    Fault(
        "own step: gradients that are kept are overwritten", "train/own_step.py",
        "if list(map(executable.holders, left.values())) != before:", "if False:", OWN,
    ),
    Fault(
        "own step: the next run's gradients are kept in the same memory", "train/own_step.py",
        "            self._copies = True\n            self._memory.give_away()\n",
        "            self._copies = True\n", OWN,
    ),
    Fault(
        "own step: parameters of equal gradients share them", "plan/planner.py",
        "if given or not whole or here.buffer in taken:", "if given or not whole:", OWN,
    ),
    Fault(
        "own step: gradients are not clipped", "differentiate/update/leave.py",
        "scaled(b, gradients.of[name], gradients.scale)", "gradients.of[name]", OWN,
    ),
    Fault(
        "own step: a hook that comes later is not seen", "train/trainer.py",
        "if (why is None) == (before.why is None):", "if True:", OWN,
    ),
    Fault(
        "own step: a state holds the optimizer's own tensors", "train/own_state.py",
        'load_state_dict(copied(state["own_state"]))', 'load_state_dict(state["own_state"])', OWN,
    ),
)  # fmt: skip
