"""Owner of an address, for limits by client."""

from __future__ import annotations

import ipaddress


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
