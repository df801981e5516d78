"""Addresses: sockets that listen there, and owners of addresses for limits by client."""

from __future__ import annotations

import errno
import ipaddress
import socket

from collab_llm_nodes.errors import ConfigError, Unavailable


def network_of(address: str) -> str:
    """Return the network whose owner is limited: an IPv4 address, or the /64 of an IPv6 one.

    One subscriber has a whole /64. "" stands for text that is no address.
    """
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(ip, ipaddress.IPv6Address):
        ip = ip.ipv4_mapped or ipaddress.IPv6Address(int(ip) >> 64 << 64)
    return str(ip)


def listen(host: str, port: int) -> socket.socket:
    """Return a TCP socket that listens at ``host``, an address or a name, and ``port``; 0: any.

    Raises:
        ConfigError: the address is none of this machine's.
        Unavailable: the port is in use, or not allowed.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host.strip("[]"), port))
        listener.listen()
    except socket.gaierror as error:
        listener.close()
        raise ConfigError(str(error), field="host", remedy="an address of this machine") from None
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            message = f"{host} is no address of this machine"
            raise ConfigError(message, field="host", remedy="one of: ip -brief address") from None
        raise Unavailable(
            f"cannot listen on {host}:{port}: {error.strerror}",
            field="port",
            remedy="stop the program that uses it, or choose another port",
        ) from None
    return listener
