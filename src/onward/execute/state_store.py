"""StateStore: optimizer state outside of the device's memory, on a disk or in the host's memory.

On a disk a tensor is a file without a name, mapped into memory. Kernels read and write it in place,
and its pages leave the process behind each launch (ZeRO-Infinity, Rajbhandari et al., 2021, arXiv
2104.07857). The system removes the file with the last tensor on it, also where the process is
killed. Beside a GPU, state lies in memory of the host that the GPU copies from, and is on the GPU
while it is updated (ZeRO-Offload, Ren et al., 2021, arXiv 2101.06840).
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from onward.errors import OnwardError, one_line
from onward.execute.runtime import synchronize
from onward.memory_amounts import mib

log = logging.getLogger("onward")

SMALL = 1 << 16  # bytes; smaller tensors stay in memory, where they take less than a file each
_RELEASE, _AHEAD = 4, 3  # MADV_DONTNEED, MADV_WILLNEED of Linux
_LIBC = ctypes.CDLL(None)

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


class StateStore:
    """Tensors of optimizer state for updates on a device.

    folder: where files lie; None: state is in the host's memory. is_staged: whether kernels read
    copies on the device, rather than the tensors themselves. Raises OnwardError for a folder that
    takes no files.
    """

    def __init__(
        self, device: torch.device, folder: Path | None = None, is_staged: bool | None = None
    ) -> None:
        self.device, self.folder = device, folder
        self.is_staged = device.type != "cpu" if is_staged is None else is_staged
        self._mapped: dict[int, int] = {}  # bytes of each mapping, by its address
        self._stage = torch.empty(0, dtype=torch.uint8, device=device)
        if folder is not None:
            _check(folder)

    @property
    def nbytes(self) -> int:
        """Bytes of the files that there are."""
        return sum(self._mapped.values())

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros in the store. Raises OnwardError where the disk has no room for it."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if self.folder is None or nbytes < SMALL:
            pinned = self.device.type == "cuda"
            return torch.zeros(tuple(shape), dtype=dtype, device="cpu", pin_memory=pinned)
        with _file(self.folder) as file:
            try:
                # without room for all of it, a page that is written later would end the process
                os.posix_fallocate(file.fileno(), 0, nbytes)
            except OSError as error:
                raise _no_room(self.folder, nbytes, error) from error
            name = f"/proc/self/fd/{file.fileno()}"
            storage = torch.UntypedStorage.from_file(name, shared=True, nbytes=nbytes)
        empty: Any = torch.empty(0, dtype=dtype, device="cpu")
        made: torch.Tensor = empty.set_(storage, 0, tuple(shape))
        self._mapped[made.data_ptr()] = nbytes
        weakref.finalize(made, self._mapped.pop, made.data_ptr(), None)
        return made

    # ---- around a launch

    def ahead(self, tensors: Iterable[torch.Tensor]) -> None:
        """Has the system read files of these tensors, while other work goes on."""
        for x in tensors:
            self._advise(x, _AHEAD)

    def bring_in(self, pairs: Pairs) -> None:
        """Copies state to the device. pairs: each tensor with what stands for it there."""
        for home, place in pairs:
            if place is not home:
                place.copy_(home, non_blocking=True)

    def take_out(self, pairs: Pairs) -> None:
        """Copies state that was updated on the device back."""
        for home, place in pairs:
            if place is not home:
                home.copy_(place, non_blocking=True)

    def release(self, tensors: Iterable[torch.Tensor]) -> None:
        """Takes the pages of these tensors out of the process; their files keep what they hold.
        Tensors that are not files of this store stay as they are."""
        for x in tensors:
            self._advise(x, _RELEASE)

    def settle(self) -> None:
        """Waits until the host sees what the device has copied back."""
        if self.device.type == "cuda":
            synchronize(self.device)

    def stage(self, nbytes: int) -> torch.Tensor:
        """Bytes u8[n] on the device, at least so many, which all launches use in turn."""
        if self._stage.numel() < nbytes:
            self._stage = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return self._stage

    def _advise(self, x: torch.Tensor, what: int) -> None:
        if x.device.type != "cpu" or x.untyped_storage().data_ptr() not in self._mapped:
            return
        start, end = x.data_ptr(), x.data_ptr() + x.numel() * x.itemsize
        start -= start % mmap.PAGESIZE  # a page that the tensor shares is in the same file
        _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), what)


def _check(folder: Path) -> None:
    """Raises OnwardError for a folder that takes no files, and warns of one that is in memory."""
    if sys.platform != "linux":
        raise OnwardError(
            'offload_optimizer="disk" maps files as Linux does; fix: leave it out on this system'
        )
    with _file(folder):
        pass
    if _file_system(folder) in ("tmpfs", "ramfs"):
        log.warning(
            "offload_dir %s lies in memory itself (tmpfs), so that optimizer state there takes as "
            "much of it as before; fix: a folder on a disk",
            folder,
        )


def _file(folder: Path) -> tempfile._TemporaryFileWrapper[bytes]:  # pyright: ignore[reportPrivateUsage]
    """A new file without a name."""
    try:
        return tempfile.TemporaryFile(dir=folder)  # type: ignore[return-value]
    except OSError as error:
        said = one_line(error.strerror or str(error), 100)
        raise OnwardError(
            f"offload_dir {folder} takes no files ({said}); fix: a folder on a disk that is there "
            "and can be written to"
        ) from error


def _no_room(folder: Path, nbytes: int, error: OSError) -> OnwardError:
    found = os.statvfs(folder)
    return OnwardError(
        f"offload_dir {folder} has no room for {mib(nbytes, 0)} more of optimizer state "
        f"({error.strerror}, {mib(found.f_bavail * found.f_frsize, 0)} are free); fix: a folder on "
        'a larger disk, or optimizer_state="8bit"'
    )


def _file_system(folder: Path) -> str:
    """The kind of file system that a folder is on, as the system calls it; "" where it is not
    known."""
    try:
        number = folder.stat().st_dev
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    device = f"{os.major(number)}:{os.minor(number)}"
    kinds = [line.partition(" - ")[2].split()[0] for line in lines if line.split()[2] == device]
    return kinds[0] if kinds else ""


__all__ = ["SMALL", "StateStore"]
