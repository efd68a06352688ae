"""Cluster: devices, links, failures, and the four constants that say how much of them is reached.

A cluster is read from a YAML file (JSON is YAML too) or taken by name from `BUILT_IN`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from onward.errors import OnwardError, one_line

DTYPES = ("fp32", "bf16", "fp8")


@dataclass(frozen=True)
class Device:
    """One accelerator: peak rates in FLOP/s, memory bandwidth in bytes/s, memory in bytes.

    attention: FLOP/s that flash-attention kernels reach on it, as their authors publish. fp8: 0
    where the device has no such products.
    """

    bf16: float
    memory_bandwidth: float
    memory: float
    attention: float
    fp32: float = 0.0
    fp8: float = 0.0

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s of products of `dtype`. Raises OnwardError where the device has none."""
        found = getattr(self, dtype) if dtype in DTYPES else 0.0
        if not found:
            raise OnwardError(f"products of {dtype} on this device; fix: give it a rate, or bf16")
        return found


@dataclass(frozen=True)
class Link:
    """One kind of link of a device: bytes/s in one direction, seconds of latency for each hop.

    sm_share: share of a device's processors that a collective on this link takes from kernels which
    run beside it.
    """

    bandwidth: float
    latency: float
    sm_share: float = 0.0


@dataclass(frozen=True)
class Failures:
    """Failures: hours between two failures of one node, seconds from a failure to the next step,
    bytes/s at which a device writes its part of a checkpoint."""

    node_hours: float = math.inf
    restart_seconds: float = 300.0
    checkpoint_bandwidth: float = 1e9


@dataclass(frozen=True)
class Efficiency:
    """The four constants of a kind of machine, each a share of a peak that large work reaches:
    matrix products, memory, links within a node, links across nodes."""

    gemm: float = 0.8
    memory: float = 0.9
    in_node: float = 0.65
    across: float = 0.9


@dataclass(frozen=True)
class Cluster:
    """A described cluster. per_node: devices in a node; links within a node and across nodes.

    scatters: whether its library has a reduce-scatter; Gloo makes a whole all-reduce for one.
    """

    name: str
    device: Device
    in_node: Link
    across: Link
    per_node: int = 8
    failures: Failures = Failures()
    efficiency: Efficiency = field(default_factory=Efficiency)
    scatters: bool = True


# Latencies of a hop are those of NCCL's own tuning table for its Simple protocol; shares of
# processors are those with which calculon (Isaev et al., SC 2023) describes A100 systems.
_NVLINK = {"latency": 3.4e-6, "sm_share": 0.15}
_ADAPTER = {"latency": 14e-6, "sm_share": 0.02}
# One failure of a node in about 7 years of it: 419 in 54 days of 16,384 H100, 8 a node (Llama 3).
_FAILURES = Failures(node_hours=6300.0, restart_seconds=300.0, checkpoint_bandwidth=1e9)
# Efficiencies are what benchmarks/simulator.py found on its fit rows, and nothing else.
_A100 = Efficiency(0.812, 0.784, 0.524, 1.0)
_H100 = Efficiency(0.770, 0.712, 0.728, 0.900)

BUILT_IN: Mapping[str, Cluster] = {
    # data sheet; NVLink 3; 8 HDR InfiniBand adapters a node
    "a100-80": Cluster(
        "a100-80",
        Device(312e12, 2.039e12, 80 * 2**30, attention=180e12, fp32=19.5e12),
        Link(300e9, **_NVLINK),
        Link(25e9, **_ADAPTER),
        failures=_FAILURES,
        efficiency=_A100,
    ),
    "a100-40": Cluster(
        "a100-40",
        Device(312e12, 1.555e12, 40 * 2**30, attention=180e12, fp32=19.5e12),
        Link(300e9, **_NVLINK),
        Link(25e9, **_ADAPTER),
        failures=_FAILURES,
        efficiency=_A100,
    ),
    # data sheet, SXM; NVLink 4; 400 Gb/s a device
    "h100": Cluster(
        "h100",
        Device(989e12, 3.35e12, 80 * 2**30, attention=335e12, fp32=67e12, fp8=1979e12),
        Link(450e9, **_NVLINK),
        Link(50e9, **_ADAPTER),
        failures=_FAILURES,
        efficiency=_H100,
    ),
    # H100 with 96 GB of HBM2e, limited to 500 W instead of 700. The clock is taken to fall as the
    # square root of the power, 0.845 of the SXM's rates, which is the data sheet's NVL (835);
    # torchtitan's pages place their device between these two
    "h100-500w": Cluster(
        "h100-500w",
        Device(836e12, 2.4e12, 96e9, attention=283e12, fp32=57e12, fp8=1672e12),
        Link(450e9, **_NVLINK),
        Link(50e9, **_ADAPTER),
        failures=_FAILURES,
        efficiency=_H100,
    ),
}  # fmt: skip


def built_in(name: str) -> Cluster:
    """The described cluster of this name. Raises OnwardError for another name."""
    if name not in BUILT_IN:
        known = ", ".join(BUILT_IN)
        raise OnwardError(f"no cluster {name!r} is built in; fix: one of {known}, or a file")
    return BUILT_IN[name]


# The sections of a file: class, and the keys that must be there.
_SECTIONS: Mapping[str, tuple[type, tuple[str, ...]]] = {
    "device": (Device, ("bf16", "memory_bandwidth", "memory", "attention")),
    "in_node": (Link, ("bandwidth", "latency")),
    "across": (Link, ("bandwidth", "latency")),
    "failures": (Failures, ()),
    "efficiency": (Efficiency, ()),
}


def read_cluster(path: Path) -> Cluster:
    """The cluster that a YAML file describes. Raises OnwardError, in one line, for a file that
    cannot be read, unknown or missing keys, and values that are no numbers above 0."""
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError, ValueError) as error:
        raise _bad(path, f"cannot be read: {one_line(str(error), 200)}") from error
    if not isinstance(found, dict):
        raise _bad(path, "is no mapping of sections")
    known = {"name", "per_node", *_SECTIONS}
    strange = [key for key in found if key not in known]
    if strange:
        raise _bad(path, f"has an unknown section {_short(strange[0])}")
    parts = {
        section: _section(path, section, found.get(section, {}), kind, needed)
        for section, (kind, needed) in _SECTIONS.items()
    }
    per_node = found.get("per_node", 8)
    if not isinstance(per_node, int) or isinstance(per_node, bool) or not 0 < per_node <= 4096:
        raise _bad(path, f"has per_node {_short(per_node)}, which is no number of devices")
    return Cluster(str(found.get("name", path.stem)), per_node=per_node, **parts)


def _section(path: Path, name: str, given: Any, kind: type, needed: tuple[str, ...]) -> Any:
    if not isinstance(given, dict):
        raise _bad(path, f"has a section {name} that is no mapping")
    known = {f.name for f in fields(kind)}
    strange = [key for key in given if key not in known]
    if strange:
        raise _bad(path, f"has an unknown key {_short(strange[0])} in {name}")
    missing = [key for key in needed if key not in given]
    if missing:
        raise _bad(path, f"has no {missing[0]} in {name}")
    numbers = {key: _number(path, f"{name}.{key}", value) for key, value in given.items()}
    shares = numbers if kind is Efficiency else {k: v for k, v in numbers.items() if "share" in k}
    above = next((key for key, value in shares.items() if value > 1), None)
    if above is not None:
        raise _bad(path, f"has {name}.{above} {numbers[above]:g}, which is above 1")
    return kind(**numbers)


def _number(path: Path, name: str, value: Any) -> float:
    """A number above 0; YAML 1.1 reads `2e12`, without a point, as text."""
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(value)
        if not (number > 0 or (number == 0 and name.endswith("sm_share"))) or math.isnan(number):
            raise ValueError
        if math.isinf(number) and not name.endswith("node_hours"):
            raise ValueError
    except (TypeError, ValueError, OverflowError) as error:
        raise _bad(path, f"has {name} {_short(value)}, which is no number above 0") from error
    return number


def _short(value: Any) -> str:
    return one_line(repr(value), 60)


def _bad(path: Path, what: str) -> OnwardError:
    fix = "fix: see docs/simulate.md for the keys of a cluster"
    return OnwardError(f"{one_line(str(path), 200)} {what}; {fix}")


__all__ = [
    "BUILT_IN", "DTYPES", "Cluster", "Device", "Efficiency", "Failures", "Link", "built_in",
    "read_cluster",
]  # fmt: skip
