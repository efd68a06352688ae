"""`onward doctor --gpu`: the GPUs that PyTorch sees, their rates, and how Onward trains there."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

import onward
from onward.errors import one_line
from onward.kernels.gpus import gpu_of, rates_of_gpu

Fact = tuple[str, str]

SIDE = 4096  # size of the matrices whose product is timed
COPIED = 1 << 28  # bytes that are copied to time memory
_STEPS, _VOCABULARY, _WIDTH = 3, 97, 64
_DRIVER = Path("/proc/driver/nvidia/version")


class _Tried(nn.Module):
    """A layer of a transformer with an embedding and a loss, as small as kernels take."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(_VOCABULARY, _WIDTH)
        self.layer = nn.TransformerEncoderLayer(
            _WIDTH, 2, 4 * _WIDTH, dropout=0.1, activation="gelu", batch_first=True
        )
        self.head = nn.Linear(_WIDTH, _VOCABULARY)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy of labels i64[B,T] after ids i64[B,T]."""
        logits = self.head(self.layer(self.table(ids)))  # f32[B,T,V]
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def gpu_facts() -> Iterator[Fact]:
    """All facts about GPUs, each with the word before it. Times the devices, and trains on each."""
    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not number:
        yield "GPU", f"none that PyTorch sees; {_why()}"
        return
    runtime = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    yield "driver", ", ".join(filter(None, (_driver(), f"PyTorch is built for {runtime}")))
    for index in range(number):
        yield from device_facts(torch.device("cuda", index))


def device_facts(device: torch.device) -> Iterator[Fact]:
    """The facts about one GPU."""
    found = torch.cuda.get_device_properties(device)
    yield (
        f"GPU {device.index}",
        f"{found.name}, {found.total_memory / 2**30:.1f} GiB, capability "
        f"{found.major}.{found.minor}, {found.multi_processor_count} multiprocessors",
    )
    yield "  rates", rates(device, found.name)
    yield "  training", tried(device)


def rates(device: torch.device, name: str) -> str:
    """Measured rates of a device, beside those that plans assume of one with its name."""
    assumed = rates_of_gpu(name)
    copied = 2 * COPIED / _seconds(device, _copy(device))
    low = _products(device, torch.bfloat16) if torch.cuda.is_bf16_supported(False) else 0.0
    half, full = (_products(device, dtype) for dtype in (torch.float16, torch.float32))
    said = [
        f"copies {copied / 1e9:.0f} GB/s",
        f"products of {SIDE}: fp32 {full / 1e12:.1f}, fp16 {half / 1e12:.0f}"
        + (f", bf16 {low / 1e12:.0f} TFLOP/s" if low else " TFLOP/s"),
        ("" if gpu_of(name) else "Onward does not know this GPU and takes it for a T4: ")
        + f"plans assume {assumed.bytes_per_second / 1e9:.0f} GB/s, fp32 "
        f"{assumed.flops_per_second / 1e12:.1f}, 16 bits {assumed.low_flops_per_second / 1e12:.0f}",
    ]
    return "; ".join(said)


def tried(device: torch.device) -> str:
    """The kernels that a small step launches on the device, and whether its losses are those of the
    CPU."""
    try:
        here, _ = _losses(torch.device("cpu"))
        there, trainer = _losses(device)
    except Exception as error:  # whatever drivers and compilers raise
        return f"fails: {type(error).__name__}: {one_line(str(error), 200)}"
    apart = max(abs(a - b) / abs(a) for a, b in zip(here, there, strict=True))
    names = {launch.kernel.name for launch in trainer.plan.launches}
    ours = sorted(n.removeprefix("triton.") for n in names if n.startswith("triton."))
    kernels = f"{len(ours)} Triton kernels ({', '.join(ours)})" if ours else "no Triton kernel"
    verdict = "as on the CPU" if apart < 1e-3 else "NOT those of the CPU"
    return f"{kernels}; losses of {_STEPS} steps with dropout {verdict} ({apart:.0e} apart)"


def _losses(device: torch.device) -> tuple[list[float], onward.Trainer]:
    """Losses of a few steps on a device, always of the same model and data."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = copy.deepcopy(_Tried()).to(device)
        ids = torch.randint(0, _VOCABULARY, (4, 32)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = onward.Trainer(model, optimizer, options={"seed": 0})
    losses = [float(trainer.train_step(ids, ids).loss) for _ in range(_STEPS)]
    return losses, trainer


def _copy(device: torch.device) -> Callable[[], object]:
    source = torch.zeros(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _products(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a product of two square matrices."""
    a = torch.ones(SIDE, SIDE, dtype=dtype, device=device)
    out = torch.empty_like(a)
    return 2 * SIDE**3 / _seconds(device, lambda: torch.mm(a, a, out=out))


def _seconds(device: torch.device, work: Callable[[], object], repetitions: int = 10) -> float:
    """Seconds of one run of what a function queues: the least of a few."""
    work()  # the first call sets up libraries
    best = math.inf
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device(device):
            start.record()
            for _ in range(repetitions):
                work()
            end.record()
            end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3 / repetitions)
    return best


def _why() -> str:
    """Why PyTorch may see no GPU."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built for CPUs; fix: install its CUDA or ROCm build"
    return f"torch {torch.__version__} is built for one; fix: see whether nvidia-smi finds it"


def _driver() -> str:
    """The driver's version; "" where the system does not tell."""
    if not _DRIVER.is_file():
        return ""
    words: Sequence[str] = _DRIVER.read_text().partition("\n")[0].split()
    found = next((w for w in words if w[:1].isdigit() and "." in w), "")
    return f"NVIDIA {found}" if found else ""
