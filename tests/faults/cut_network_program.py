"""One of two processes on hosts of their own, which are namespaces of the network joined by one
link; `hosts` makes them. Each trains until the other does not answer, and writes what it says."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

SECONDS = 10.0  # ranks_timeout
STEPS = 6  # where nothing is cut


def refusal() -> str:
    """The reason why this user may not make hosts here; "" where they can be made."""
    try:
        with hosts():
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return f"no namespaces of the network can be made here: {said.strip()[:120]}"


class Hosts:
    """Two hosts with one link. names: of their namespaces."""

    def __init__(self) -> None:
        self.names = [f"onward-{os.getpid()}-{host}" for host in "ab"]
        self.links = [f"ow{os.getpid()}{host}" for host in "ab"]  # 15 letters at most

    def ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    def make(self) -> None:
        for name in self.names:
            self.ip("netns", "add", name)
        a, b = self.links
        self.ip("-n", self.names[0], "link", "add", a, "type", "veth", "peer", "name", b)
        self.ip("-n", self.names[0], "link", "set", b, "netns", self.names[1])
        for host, (name, link) in enumerate(zip(self.names, self.links, strict=True)):
            self.ip("-n", name, "addr", "add", f"10.203.7.{host + 1}/24", "dev", link)
            self.ip("-n", name, "link", "set", link, "up")
            self.ip("-n", name, "link", "set", "lo", "up")

    def delete(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def cut(self) -> None:
        """Takes the link down: packets are lost in silence."""
        self.ip("-n", self.names[0], "link", "set", self.links[0], "down")

    def delay(self, milliseconds: int) -> None:
        """Has each packet of each host wait. Raises CalledProcessError where the system cannot."""
        for name, link in zip(self.names, self.links, strict=True):
            words = ["tc", "-n", name, "qdisc", "add", "dev", link, "root", "netem", "delay"]
            subprocess.run(
                [*words, f"{milliseconds}ms"], check=True, capture_output=True, text=True
            )

    def start(self, folder: Path, rank: int, steps: int) -> subprocess.Popen[str]:
        """The process of a rank on its host."""
        path = os.pathsep.join(p for p in sys.path if p)
        given = {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": self.links[rank]}
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[rank], sys.executable, __file__, str(folder),
             str(rank), str(steps)],
            env=given, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip


@contextmanager
def hosts() -> Generator[Hosts]:
    """Two hosts; the namespaces are gone when the context ends."""
    made = Hosts()
    try:
        made.make()
        yield made
    finally:
        made.delete()


def main(folder: Path, rank: int, steps: int) -> None:
    import tiny
    import torch
    from torch import distributed

    import onward

    torch.set_num_threads(1)
    stores: Any = distributed
    store = stores.TCPStore(
        "10.203.7.1", 29511, world_size=2, is_master=rank == 0, wait_for_workers=False,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = tiny.gpt2(0.1, layers=1, width=16)
    options = {"mesh": {"dp_replicate": 2}, "ranks_timeout": SECONDS}
    trainer = onward.Trainer(model, onward.optim.AdamW(lr=1e-3), options=options)
    losses: list[float] = []
    begun = time.monotonic()
    try:
        for step in range(steps):
            losses.append(float(trainer.train_step(tiny.batch(2, 8, seed=10 * step + rank)).loss))
            (folder / f"step{rank}").write_text(str(step), encoding="ascii")
            begun = time.monotonic()
            if steps > STEPS:
                time.sleep(0.05)
    except onward.OnwardError as error:
        waited = time.monotonic() - begun
        (folder / f"said{rank}").write_text(f"{waited:.1f} {error}", encoding="utf-8")
        os._exit(3)  # torch's own threads may wait for the store
    (folder / f"losses{rank}").write_text(repr(losses), encoding="ascii")
    distributed.barrier()
    if rank:
        os._exit(0)
    time.sleep(1.0)  # the store goes last
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
