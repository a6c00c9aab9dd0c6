"""Files that a caller names: where they are, and how they are written whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from mpexec.errors import ConfigError


def absolute(path: str | Path) -> Path:
    """The path as seen from this process's folder, whoever uses it; "~" is the user's home.

    Raises:
        ConfigError: It is no path that another process can be told, or empty, which is no name for the current folder.
    """
    if not isinstance(path, str | Path) or not str(path):
        raise ConfigError(f"{path!r} names no file or folder: give a path, '.' for the current folder")
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{str(path)!r} is no path that another process can be told: {error}") from None
    return Path(os.path.expanduser(path)).absolute()  # that of pathlib raises where there is no such user


def is_writable(file: Path) -> bool:
    """True if `write_whole` can write there, as far as can be said before: it is tried under another name."""
    try:
        if not _may_be_replaced(file):
            return False
        beside = _beside(file)
        beside.touch(exist_ok=False)
        beside.unlink()
    except (OSError, ValueError):  # the latter for what is no file name at all
        return False
    return True


def write_whole(file: Path, content: bytes) -> None:
    """Write a file, or replace it; whatever ends this early leaves it as it was.

    Raises:
        OSError: It cannot be written.
    """
    half = _beside(file)
    try:
        half.write_bytes(content)
        half.replace(os.path.realpath(file))
    finally:
        half.unlink(missing_ok=True)


def _may_be_replaced(file: Path) -> bool:
    """Raises OSError where there cannot be such a file, for example because its name is too long."""
    try:
        mode = file.stat().st_mode
    except FileNotFoundError:
        return True
    return stat.S_ISREG(mode) and os.access(file, os.W_OK)  # never a device: whoever is root could


def _beside(file: Path) -> Path:
    """A new name in the folder of the file, or of the one that it is a link to."""
    return Path(os.path.realpath(file)).with_name(f".mpexec-{os.getpid()}-{os.urandom(4).hex()}")
