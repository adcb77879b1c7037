"""Loads the CUDA library and calls it: a status that is not OK becomes an exception that names the call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from fut_runtime.cuda.structs import ABI_VERSION, PLAIN_FUNCTIONS, STATUS_FUNCTIONS, Status
from fut_runtime.errors import FutError, UnsupportedError

#: The library that the package was built with, if it was.
LIBRARY_FILE = Path(__file__).with_name("_fut.so")


class CudaCallError(FutError):
    """A call of the library failed.

    Attributes:
        status: whether an argument was refused before anything ran, or CUDA failed.
    """

    def __init__(self, message: str, status: Status) -> None:
        super().__init__(message)
        self.status = status


class Library:
    """The functions of csrc/fut.h.

    `call` runs those that return a status; the others are attributes by their names in the header.
    """

    def __init__(self, path: Path) -> None:
        """Load a library.

        Raises:
            UnsupportedError: there is none, it cannot be loaded, or it is of another version than this package.
        """
        if not path.is_file():
            raise UnsupportedError(
                f"this installation has no CUDA library ({path.name}): install again where nvcc is, or run `make cuda`"
            )
        try:
            self._functions = ctypes.CDLL(str(path))
        except OSError as error:
            raise UnsupportedError(f"the CUDA library cannot be loaded ({error})") from error
        self.path = path
        self._bind("fut_abi_version")
        version = self.fut_abi_version()
        if version != ABI_VERSION:
            raise UnsupportedError(
                f"{path}: has ABI version {version}, expected {ABI_VERSION}; it was left by another version of this "
                "package: install again, or run `make cuda`"
            )
        for name in (*STATUS_FUNCTIONS, *PLAIN_FUNCTIONS):
            self._bind(name)

    def call(self, name: str, *arguments: object, about: str | Callable[[], str] = "") -> None:
        """Run a function that returns a status.

        Args:
            name: its name in the header.
            *arguments: its arguments; structures and arrays by `ctypes.byref` or as they are.
            about: what it was called for, such as a tensor's name and shape, or a function that says it; goes into the
                message.

        Raises:
            CudaCallError: the status is not OK.
        """
        status = self._function(name)(*arguments)
        if status == Status.OK:
            return
        text = self.fut_last_error()
        kind = {Status.INVALID: "refused its arguments", Status.CUDA: "failed in CUDA"}.get(status, f"status {status}")
        context = about if isinstance(about, str) else about()
        where = f" ({context})" if context else ""
        reason = text.decode(errors="replace") if text else "no reason given"
        known = status if status in (Status.INVALID, Status.CUDA) else Status.CUDA
        raise CudaCallError(f"{name}{where} {kind}: {reason}", Status(known))

    def __getattr__(self, name: str) -> Any:
        if name not in PLAIN_FUNCTIONS:
            raise AttributeError(f"the library has no function {name!r} that returns a value")
        return self._function(name)

    def _bind(self, name: str) -> None:
        function = self._function(name)
        if name in STATUS_FUNCTIONS:
            function.restype, function.argtypes = ctypes.c_int, STATUS_FUNCTIONS[name]
        else:
            function.restype, function.argtypes = PLAIN_FUNCTIONS[name]

    def _function(self, name: str) -> Any:
        try:
            return getattr(self._functions, name)
        except AttributeError:
            raise UnsupportedError(
                f"{self.path}: has no function {name}; it was left by another version of this package: install "
                "again, or run `make cuda`"
            ) from None


@cache
def library() -> Library:
    """The package's own library, loaded once.

    Raises:
        UnsupportedError: as for `Library`.
    """
    return Library(LIBRARY_FILE)
