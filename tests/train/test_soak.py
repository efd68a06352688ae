"""A long run leaves the process as it was: memory, descriptors, threads, temporary files."""

from __future__ import annotations

import numpy as np
import pytest
from process_memory import measured, said_by

WARM = 200  # steps, in which every size has come
KEPT = 200  # steps that keep memory, at the end
SOAK = """
import gc, json, os, pathlib, random, sys, tempfile, threading
import torch
from transformers import GPT2Config, GPT2LMHeadModel
torch.set_num_threads(1)
from process_memory import malloced, resident
import onward

warm, steps, kept = map(int, sys.argv[1:])
folder = pathlib.Path(tempfile.mkdtemp())
os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "temporary")
os.mkdir(tempfile.tempdir)
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(
    vocab_size=97, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
))
trainer = onward.Trainer(
    model.train(), torch.optim.AdamW(model.parameters(), lr=1e-4),
    options={"gradient_accumulation_steps": 2},
)
draw, leaks, samples = random.Random(0), [], []

def data():
    ids = torch.randint(97, (draw.randint(1, 2), draw.randrange(4, 16, 2)))
    mask = torch.ones_like(ids)
    mask[0, ids.shape[1] - draw.randrange(3):] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

def turn(i):
    trainer.train_step(**data())
    if i % 5 == 0:
        trainer.eval_step(**data())
    if i % 50 == 0:
        trainer.save(folder / "run", background=i % 100 == 0, save_total_limit=2)
    if i % 200 == 0:
        trainer.finish_saves()
        trainer.resume(folder / "run")

for i in range(1, warm + steps + kept + 1):
    turn(i)
    if i > warm + steps:
        leaks.append(bytearray(4000))
    if i >= warm and i % 20 == 10:
        gc.collect()
        gc.freeze()  # what is there after a collection need not be looked at again
        for thread in threading.enumerate():
            if thread is not threading.main_thread():
                thread.join()
        handles, threads = (len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))
        samples.append([i, malloced(), resident(), handles, threads])
left = sorted(p.name for p in pathlib.Path(tempfile.tempdir).iterdir())
names = sorted(p.name for p in (folder / "run").iterdir())
print(json.dumps({"samples": samples, "left": left, "checkpoints": names}))
"""


def slopes(samples: np.ndarray) -> tuple[float, float]:
    """Bytes a step, by the C allocator and by the kernel: the slopes of straight lines."""
    malloced, resident = (float(np.polyfit(samples[:, 0], samples[:, i], 1)[0]) for i in (1, 2))
    return malloced, resident


@pytest.mark.slow
@measured
def test_a_long_run_leaves_nothing_behind(request: pytest.FixtureRequest) -> None:
    """Steps of 12 sizes, evaluations, saves in both ways, rotation and resumes: memory grows by
    less than 1 MB in 1,000 steps. 1,000 steps, with `--whole` 20,000. The steps after these keep
    4,000 bytes each, which the measure must see."""
    steps = 20_000 if request.config.getoption("--whole") else 1_000
    said = said_by(SOAK, str(WARM), str(steps), str(KEPT), timeout=3600)
    samples = np.array(said["samples"])
    kept = samples[:, 0] > WARM + steps
    malloced, resident = slopes(samples[~kept])
    print(f"{steps} steps: {malloced:.0f} B a step allocated, {resident:.0f} B a step resident")
    assert malloced < 1000
    assert resident < 1000
    assert slopes(samples[kept])[0] > 2000
    for column in (3, 4):  # descriptors and threads
        assert len(set(samples[:, column])) == 1, samples[:, column]
    assert said["left"] == []
    assert len(said["checkpoints"]) == 2
