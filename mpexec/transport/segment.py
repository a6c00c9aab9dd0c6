"""Memory that processes share: one memfd, mapped whole, without a name that could leak."""

from __future__ import annotations

import os
from typing import Self

from mpexec.transport import linux

PAGE = 4096


class Segment:
    """A memfd and its mapping.

    Attributes:
        fd: The descriptor, to be sent to other processes; owned.
        words: The segment as aligned 64-bit words. One index assignment is one store instruction, which other
            processes see whole; `struct.pack_into("<Q", ...)` would write byte by byte and may be seen torn.
        data: The segment as bytes.
    """

    __slots__ = ("data", "fd", "size", "words")

    def __init__(self, fd: int, size: int) -> None:
        self.fd = linux.OwnedFd(fd)
        self.size = size
        self.data = linux.Mapping(fd, size).view()
        self.words = self.data.cast("Q")

    @classmethod
    def create(cls, name: str, size: int) -> Self:
        """A new segment of `size` bytes, a multiple of the page size, all zero."""
        return cls(linux.memfd_create(name, size), size)

    @classmethod
    def attach(cls, fd: int) -> Self:
        """Map a segment whose descriptor came from another process; takes ownership of `fd`."""
        return cls(fd, os.fstat(fd).st_size)

    def close(self) -> None:
        """Unmap and close; again changes nothing. No views of users exist into these segments."""
        self.words.release()
        self.data.release()
        self.fd.close()
