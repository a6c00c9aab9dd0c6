"""Settings of the user's process that a library of others must not change."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

_RAYS = ("RAY_", "PYTHONBREAKPOINT")


@contextlib.contextmanager
def kept_settings() -> Iterator[None]:
    """Signal handlers, and the variables of Ray, are afterwards what they were: it changes some of both."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    variables = dict(os.environ)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                if handler is not None and signal.getsignal(number) is not handler:
                    signal.signal(number, handler)
        # Only what is Ray's: other threads of the program may set variables of their own meanwhile.
        for name in [name for name in os.environ if name.startswith(_RAYS) and name not in variables]:
            del os.environ[name]
        os.environ.update({name: value for name, value in variables.items() if name.startswith(_RAYS)})
