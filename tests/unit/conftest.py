"""What tests of several files of this folder need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mpexec.mp_engine.sockets import SocketFolder

pytest.register_assert_rewrite("rpc_pairs")


@pytest.fixture
def folder() -> Iterator[SocketFolder]:
    """A folder for the socket of an RPC."""
    from mpexec.mp_engine.sockets import SocketFolder  # where most tests run, nothing has loaded ZMQ

    made = SocketFolder()
    yield made
    made.remove()
