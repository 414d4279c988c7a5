"""Keep copies of a training's state in a node's memory, beyond the end of the workers.

The launcher makes the memory before it forks its workers, and hands it on to those that it forks after a loss. Each
worker has two slots. It overwrites the older copy, so that one copy is whole at any time, whenever it is killed. A slot
is a file of memfd_create(2): no other process can open it, and the kernel frees it when the launcher and its workers
have ended, however they end.

A slot begins with a header, which is written last. The content is `pollux.checkpoint.memory_tier`'s.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import struct
import zlib
from contextlib import suppress
from dataclasses import dataclass

logger = logging.getLogger("pollux")

NO_COPIES = "POLLUX_NO_COPIES"
"""Set by the launcher after a rank was killed: what was copied may be restored, and is then freed."""
MAGIC = b"POLLUXM1"
HEADER = 4096
"""Bytes before the content, so that tensors begin at a page."""
MAX_TEXT = 1 << 28
_HEAD = struct.Struct("<8sQQQI")


@dataclass(frozen=True, slots=True)
class Copy:
    """A whole copy: its optimizer step, and the text that says what it holds."""

    step: int
    slot: Slot
    text: bytes


class Slot:
    """A worker's memory for one copy."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("pollux-state", os.MFD_CLOEXEC)
        self.memory: mmap.mmap | None = None
        """This process's mapping; None before `room` or `mapped`."""
        self._pinned: int | None = None
        """The mapping's address, if CUDA has registered it; 0: CUDA refused."""

    def room(self, size: int) -> mmap.mmap:
        """Invalidate the copy, and return memory for a new one of `size` bytes with its header. Raises OSError."""
        held = os.fstat(self.descriptor).st_size
        if held:
            os.pwrite(self.descriptor, bytes(_HEAD.size), 0)
        if held < size:
            self._unmap()
            # Not sparse: where the memory is not there, this call fails, and no later access is killed for it.
            os.posix_fallocate(self.descriptor, 0, size)
        return self.mapped()

    def mapped(self) -> mmap.mmap:
        """The whole file, as this process's memory. Raises OSError and ValueError (an empty file)."""
        if self.memory is None or len(self.memory) != os.fstat(self.descriptor).st_size:
            self._unmap()
            self.memory = mmap.mmap(self.descriptor, 0)
        return self.memory

    def _unmap(self) -> None:
        if self._pinned:
            import torch  # noqa: PLC0415 - the launcher needs none

            # Otherwise CUDA holds the address, where the next mapping may be.
            torch.cuda.cudart().cudaHostUnregister(self._pinned)  # type: ignore[no-untyped-call]
        self.memory = self._pinned = None

    def pin(self) -> None:
        """Let GPUs write into the mapping directly; a copy would take twice as long, and wait."""
        if self._pinned is not None:
            return
        import torch  # noqa: PLC0415 - the launcher needs none

        content = torch.frombuffer(self.mapped(), dtype=torch.uint8)
        status = int(torch.cuda.cudart().cudaHostRegister(content.data_ptr(), content.numel(), 0))  # type: ignore[no-untyped-call]
        self._pinned = 0 if status else content.data_ptr()
        if status:
            logger.info("the memory for copies of the state is not pinned (CUDA error %d)", status)
            with suppress(RuntimeError):
                # CUDA reports the error again at the next launch of a kernel. Here nobody needs the kernel.
                torch.ones(1, device="cuda")

    def complete(self, step: int, start: int, text: bytes) -> None:
        """Write what the copy holds at `start`, then the header: the copy is whole. Raises OSError."""
        os.pwrite(self.descriptor, text, start)
        os.pwrite(self.descriptor, _HEAD.pack(MAGIC, step, start, len(text), zlib.crc32(text)), 0)

    def copy(self) -> Copy | None:
        """The copy, if there is a whole one."""
        try:
            head = os.pread(self.descriptor, _HEAD.size, 0)
            if len(head) < _HEAD.size:
                return None
            magic, step, start, length, crc = _HEAD.unpack(head)
            if magic != MAGIC or length > MAX_TEXT:
                return None
            text = os.pread(self.descriptor, length, start)
        except (OSError, OverflowError):  # the script has closed it, or written into it
            return None
        return Copy(step, self, text) if zlib.crc32(text) == crc else None

    def free(self) -> None:
        """Give the memory back; a copy in it is lost."""
        self._unmap()
        os.ftruncate(self.descriptor, 0)


class Shared(ctypes.Structure):
    """What new ranks would find: the workers tell the launcher, and the next ranks."""

    _fields_ = (
        ("restores", ctypes.c_bool),
        ("copied", ctypes.c_uint64),
        ("saved", ctypes.c_uint64),
        ("training", ctypes.c_uint32),
    )
    restores: bool
    """Whether new ranks would restore the training's state."""
    copied: int
    """The optimizer step of this node's newest copy; 0 without one."""
    saved: int
    """The optimizer step of the newest checkpoint's file that these starts have written; 0 without one."""
    training: int
    """A checksum of the key of the training that the others are about."""


class NodeMemory:
    """The slots of a node's workers. The launcher's object, which the workers inherit."""

    def __init__(self, workers: int) -> None:
        self.slots = [(Slot(), Slot()) for _ in range(workers)]
        """By local rank."""
        self.local_rank = 0
        """Of the worker that this process is: its rank on this node."""
        self.shared = Shared.from_buffer(mmap.mmap(-1, ctypes.sizeof(Shared)))

    def tells_of(self, key: str) -> bool:
        """Whether `shared` tells of the training with that key."""
        return int(self.shared.training) == zlib.crc32(key.encode())

    def tell_of(self, key: str) -> None:
        """Begin to tell of a training: what was told of another one is no more."""
        if not self.tells_of(key):
            self.shared.restores, self.shared.copied, self.shared.saved = False, 0, 0
            self.shared.training = zlib.crc32(key.encode())

    def copies(self, local_rank: int) -> list[Copy]:
        """The whole copies of a local rank, newest first."""
        found = [slot.copy() for slot in self.slots[local_rank]]
        return sorted((copy for copy in found if copy is not None), key=lambda copy: -copy.step)

    def older(self) -> Slot:
        """This worker's slot whose copy is older, or not whole."""
        return min(self.slots[self.local_rank], key=lambda slot: -1 if (c := slot.copy()) is None else c.step)


_here: NodeMemory | None = None


def hand_on(memory: NodeMemory | None) -> None:
    """In the launcher: the memory of the workers that are forked from now on."""
    global _here  # noqa: PLW0603 - a fork inherits nothing else, and a program that a worker starts must not
    _here = memory


def node_memory() -> NodeMemory | None:
    """This worker's memory; None unless `pollux run` has forked this process."""
    return _here
