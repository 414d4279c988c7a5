"""Save a checkpoint while the training goes on.

`BackgroundSaver.save` copies every tensor of the state into buffers that it keeps, and returns. A thread then writes,
hashes and syncs. A step waits only for one copy in memory, and not for the disk. (From a GPU, the copy is a transfer
into pinned memory, and the thread waits for it.) The buffers cost host memory of the state's size. `prepare` makes them
before the first save, because fresh memory is an order of magnitude slower to write than memory in use.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pollux.checkpoint.checkpoint_store import CheckpointStore, SavedCheckpoint
from pollux.errors import CheckpointError

logger = logging.getLogger("pollux")

Path = tuple[Any, ...]


class HostCopy:
    """Copies of nested states in buffers on the host.

    The buffers are used again from save to save.
    """

    def __init__(self) -> None:
        self._buffers: dict[Path, torch.Tensor] = {}
        self._copied: dict[tuple[Any, ...], torch.Tensor] = {}
        self._events: list[torch.cuda.Event] = []

    def prepare(self, state: Any) -> None:
        """Make the buffers that `state` will need and touch their memory.

        Reads shapes only, no values.
        """
        self._walk(state, (), self._make)

    def take(self, state: Any) -> Any:
        """A copy of `state` that further training does not change.

        Valid until the next call.

        Copies from a GPU may still be under way: call `await_transfers` before reading.
        """
        self._copied.clear()
        copied = self._walk(state, (), self._copy)
        if any(device == "cuda" for device, *_ in self._copied):
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._events = [event]
        return copied

    def await_transfers(self) -> None:
        """Wait until the copies of the last `take` have arrived.

        Any thread may call it.
        """
        for event in self._events:
            event.synchronize()
        self._events = []

    def _walk(self, value: Any, path: Path, leaf: Callable[[torch.Tensor, Path], torch.Tensor]) -> Any:
        match value:
            case torch.Tensor():
                return leaf(value, path)
            case Mapping():
                pairs = {key: self._walk(item, (*path, key), leaf) for key, item in value.items()}
                return pairs if type(value) is dict else _like(value, pairs)
            case list():
                return [self._walk(item, (*path, index), leaf) for index, item in enumerate(value)]
            case tuple():
                items = [self._walk(item, (*path, index), leaf) for index, item in enumerate(value)]
                return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
            case None | bool() | int() | float() | complex() | str() | bytes():
                return value
            case _:
                return copy.deepcopy(value)

    def _make(self, tensor: torch.Tensor, path: Path) -> torch.Tensor:
        if _plain(tensor):
            self._buffer(tensor, path, touch=True)
        return tensor

    def _buffer(self, tensor: torch.Tensor, path: Path, *, touch: bool = False) -> torch.Tensor:
        buffer = self._buffers.get(path)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            pinned = tensor.device.type == "cuda"
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            if touch:
                buffer.zero_()
            self._buffers[path] = buffer
        return buffer

    def _copy(self, tensor: torch.Tensor, path: Path) -> torch.Tensor:
        if not _plain(tensor):
            return tensor.detach().clone()
        # Tied weights stay tied in the copy, and are copied once.
        key = (tensor.device.type, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        found = self._copied.get(key) if tensor.numel() else None
        if found is not None:
            return found
        buffer = self._buffer(tensor, path)
        buffer.copy_(tensor.detach(), non_blocking=True)
        self._copied[key] = buffer
        return buffer


class BackgroundSaver:
    """Saves to a CheckpointStore in a thread, one checkpoint at a time.

    Not for several threads to call.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._copies = HostCopy()
        self._thread: threading.Thread | None = None
        self._saved: SavedCheckpoint | None = None
        self._error: CheckpointError | None = None

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Make the buffers for states like this one, in the background."""
        self.wait()
        self._run(lambda: self._copies.prepare(state))

    def save(self, state: Mapping[str, Any], *, meta: Mapping[str, Any]) -> None:
        """Copy `state` and begin to write it.

        A save still under way is awaited first.

        Raises CheckpointError where that earlier save failed: this one has then not begun.
        """
        self.wait()
        copied = self._copies.take(state)
        marked = copy.deepcopy(dict(meta))
        self._run(lambda: self._write(copied, marked))

    def wait(self) -> SavedCheckpoint | None:
        """Wait for the save under way.

        The newest durable checkpoint, None where there is none yet.

        Raises CheckpointError where it failed, once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._saved

    @property
    def busy(self) -> bool:
        """A save, or the making of buffers, is under way."""
        return self._thread is not None and self._thread.is_alive()

    def _run(self, body: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                body()
            except CheckpointError as error:
                self._error = error
            except Exception as error:  # whatever it is, it must reach the training thread
                logger.exception("checkpoint in the background")
                self._error = CheckpointError(
                    f"no checkpoint could be written; earlier ones stand ({error!r})"
                )

        # Not a daemon: a script that ends waits for its last checkpoint to be on disk.
        self._thread = threading.Thread(target=guarded, name="pollux-checkpoint")
        self._thread.start()

    def _write(self, state: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        self._copies.await_transfers()
        self._saved = self._store.save(state, meta=meta)


def _plain(tensor: torch.Tensor) -> bool:
    """Whether `copy_` into a buffer keeps all: dense, of torch's class."""
    own = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return (
        own
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and tensor.device.type in ("cpu", "cuda")
    )


def _like(value: Mapping[Any, Any], pairs: dict[Any, Any]) -> Any:
    """Return a mapping of the same class (an OrderedDict, say), new values.

    Return a dict if the class does not allow that.
    """
    try:
        made = copy.copy(value)
        for key, item in pairs.items():
            made[key] = item  # type: ignore[index]
    except TypeError:
        return pairs
    return made
