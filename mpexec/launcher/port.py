"""A port for the ranks' rendezvous that nobody else on this machine is given meanwhile."""

from __future__ import annotations

import errno
import socket

from mpexec.errors import ConfigError


def reserve_port(port: int = 0) -> socket.socket:
    """Take a free TCP port, or this one, without listening; it is kept until the socket is closed.

    The kernel gives a bound port to nobody who asks for a free one. Rank 0 binds and listens on it nevertheless, since
    both sockets allow the address to be used again, as torch's store does (with libuv and without).

    Raises:
        ConfigError: Somebody listens on `port`, or it may not be used.
    """
    try:
        try:
            return _bind(socket.AF_INET6, "::", port)
        except OSError as error:
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                raise
            return _bind(socket.AF_INET, "0.0.0.0", port)  # a machine without IPv6
    except OSError as error:
        raise ConfigError(f"port {port} cannot be used for the rendezvous: {error.strerror}") from error


def _bind(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind((address, port))
    except BaseException:
        bound.close()
        raise
    return bound
