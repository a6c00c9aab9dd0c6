"""The network interfaces of this machine, asked of the kernel: no name is resolved and no host contacted."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct

from mpexec.errors import ConfigError

_SIOCGIFADDR = 0x8915


def interface_of(address: str) -> str:
    """The name of the interface that has an address, IPv4 or IPv6.

    Raises:
        ConfigError: None has it.
    """
    wanted = ipaddress.ip_address(address.partition("%")[0])
    found = _addresses()
    for name, own in found:
        if own == wanted:
            return name
    listed = ", ".join(f"{name} {own}" for name, own in found)
    raise ConfigError(
        f"no network interface of this machine has its address in the cluster, {address} (there are: {listed}). "
        "Name the one that reaches the other machines: env={'GLOO_SOCKET_IFNAME': ...}, or NCCL_SOCKET_IFNAME for CUDA."
    )


def _addresses() -> list[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    found: list[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append((name, ipaddress.IPv4Address(answer[20:24])))
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:
        for line in file:
            fields = line.split()
            found.append((fields[5], ipaddress.IPv6Address(int(fields[0], 16))))
    return found
