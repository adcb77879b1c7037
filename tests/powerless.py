"""Root may read and write everything; tests of what may not be read or written run without that right."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

#: Linux's version 3 of the interface: two sets of 32 bits, of which files concern the first.
_VERSION = 0x20080522
_BYPASSES = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def _call(function: str, sets: ctypes.Array[_Sets]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, function)(ctypes.byref(_Header(_VERSION, 0)), sets) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@contextmanager
def powerless() -> Iterator[None]:
    """This thread has no more right to files than their modes give it."""
    before, without = (_Sets * 2)(), (_Sets * 2)()
    _call("capget", before)
    ctypes.memmove(without, before, ctypes.sizeof(before))
    without[0].effective &= ~_BYPASSES
    _call("capset", without)
    try:
        yield
    finally:
        _call("capset", before)
