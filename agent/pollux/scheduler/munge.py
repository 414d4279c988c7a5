"""Munge credentials, by libmunge (munge(3))."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from pollux.errors import PolluxAgentError

_OPT_SOCKET = 8
_OPT_UID_RESTRICTION = 9


class MungeError(PolluxAgentError):
    """Munge refused, or munged does not answer."""


class MungeMissing(MungeError):
    """libmunge is not installed here."""


@cache
def _library() -> Any:
    try:
        library = ctypes.CDLL("libmunge.so.2")
    except OSError:
        raise MungeMissing(
            "libmunge.so.2 is missing here: install munge, which every Slurm host needs"
        ) from None
    library.munge_ctx_create.restype = ctypes.c_void_p
    library.munge_ctx_destroy.argtypes = [ctypes.c_void_p]
    library.munge_strerror.restype = ctypes.c_char_p
    return library


@contextmanager
def _context(socket: Path | None, for_uid: int | None = None) -> Iterator[ctypes.c_void_p]:
    library = _library()
    made = ctypes.c_void_p(library.munge_ctx_create())
    try:
        if socket is not None:
            _check(library.munge_ctx_set(made, ctypes.c_int(_OPT_SOCKET), ctypes.c_char_p(bytes(socket))))
        if for_uid is not None:
            _check(library.munge_ctx_set(made, ctypes.c_int(_OPT_UID_RESTRICTION), ctypes.c_uint32(for_uid)))
        yield made
    finally:
        library.munge_ctx_destroy(made)


def _check(error: int) -> None:
    if error:
        message = _library().munge_strerror(ctypes.c_int(error)).decode()
        raise MungeError(f"munge: {message}")


class Munge:
    """Makes and reads credentials through one munged.

    Args:
        socket: munged's socket; None: the one that libmunge was built for.
    """

    def __init__(self, socket: Path | None = None) -> None:
        self._socket = socket

    def encode(self, payload: bytes, *, for_uid: int | None = None) -> bytes:
        """Return a credential around `payload`, at most 1 MiB. Raises MungeError.

        With `for_uid`, only that user can decode it, once on each machine.
        """
        credential = ctypes.c_char_p()
        with _context(self._socket, for_uid) as context:
            error = _library().munge_encode(
                ctypes.byref(credential), context, ctypes.c_char_p(payload), ctypes.c_int(len(payload))
            )
        try:
            _check(error)
            return credential.value or b""
        finally:
            _free(credential)

    def decode(self, credential: bytes) -> tuple[bytes, int]:
        """Return the payload of a credential and the uid of its maker.

        Raises MungeError: forged, expired, replayed, meant for another user, or munged does not answer.
        """
        data, length = ctypes.c_void_p(), ctypes.c_int()
        uid, gid = ctypes.c_uint32(), ctypes.c_uint32()
        with _context(self._socket) as context:
            error = _library().munge_decode(
                ctypes.c_char_p(credential),
                context,
                *map(ctypes.byref, (data, length, uid, gid)),
            )
        try:
            _check(error)
            return ctypes.string_at(data, length.value) if data else b"", uid.value
        finally:
            _free(data)


def _free(memory: ctypes.c_void_p | ctypes.c_char_p) -> None:
    """Release what libmunge allocated, also with an error."""
    if memory:
        free = ctypes.CDLL(None).free
        free.argtypes = [ctypes.c_void_p]
        free(ctypes.cast(memory, ctypes.c_void_p))
