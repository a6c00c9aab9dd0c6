"""Which network interface has an address."""

from __future__ import annotations

import pytest

from mpexec import ConfigError
from mpexec.worker.interfaces import interface_of


def test_the_loopback_has_its_addresses() -> None:
    assert interface_of("127.0.0.1") == "lo"


def test_an_address_that_no_interface_has_is_named_with_what_there_is_and_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"203\.0\.113\.77.*there are: .*lo 127\.0\.0\.1.*GLOO_SOCKET_IFNAME"):
        interface_of("203.0.113.77")


def test_what_is_no_address_is_refused() -> None:
    with pytest.raises(ValueError, match="node-a"):
        interface_of("node-a")
