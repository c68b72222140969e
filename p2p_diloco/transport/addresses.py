"""Multiaddrs in texts and records: select those that can be dialled, and explain failed dials."""

from __future__ import annotations

import re
from collections.abc import Sequence

from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import PeerId, format_peer_id, short_peer_id

_TCP_ADDRESS = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/[^/]+/tcp/\d+")
_DIAL_LINE = re.compile(r"\* \[([^\]]+)\] ([^\n]*)")
_HOST_AND_PORT = re.compile(r"/ip[46]/([^/]+)/tcp/\d+")
_PLACE = re.compile(r"/(?:ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/(\d{1,5})(?:/p2p/[^/]+)?$")
_PORT = re.compile(r"^/[^/]+/[^/]+/tcp/(\d{1,5})(?:/|$)")
_LONGEST_EXPLANATION = 600


def sort_addresses(peer: PeerId, addresses: Sequence[str]) -> tuple[str, ...]:
    """Return the TCP addresses of `peer` among `addresses`, in order, without their `/p2p/…` suffix.

    Raises:
        PeerError: there is none.
    """
    suffix = f"/p2p/{format_peer_id(peer)}"
    usable = tuple(
        base
        for base in dict.fromkeys(address.removesuffix(suffix) for address in addresses if address.endswith(suffix))
        if _TCP_ADDRESS.fullmatch(base) and _is_multiaddr(base)
    )
    if not usable:
        raise PeerError(
            f"{short_peer_id(peer)} cannot be dialled: none of its {len(addresses)} addresses is a TCP address that "
            f"ends in its id"
        )
    return usable


def host_of(address: str) -> str | None:
    """Return the IP address of a plain TCP multiaddr; None for host names and relayed addresses."""
    match = _HOST_AND_PORT.fullmatch(address)
    return match[1] if match is not None else None


def place_in(address: str) -> tuple[str, int] | None:
    """Return host (an IP address or a name) and port of a TCP multiaddr, with or without a peer id; else None."""
    match = _PLACE.match(address)
    return (match[1], int(match[2])) if match is not None else None


def port_in(address: str) -> int | None:
    """Return the TCP port of a multiaddr, with or without a peer id at its end, or None."""
    match = _PORT.search(address)
    return int(match[1]) if match is not None else None


def tcp_address(host: str, port: int) -> str:
    return f"/ip{6 if ':' in host else 4}/{host}/tcp/{port}"


def without_loopback(addresses: Sequence[str]) -> tuple[str, ...]:
    """Return the addresses without loopback ones, unless there is nothing else."""
    return tuple(address for address in addresses if not is_loopback(address)) or tuple(addresses)


def is_loopback(address: str) -> bool:
    return address.startswith(("/ip4/127.", "/ip6/::1/"))


def explain_refusal(error: str) -> str:
    """Shorten p2pd's error of a failed dial to one reason per address."""
    reasons = [f"{_shorten_address(address)} {_reason(text)}" for address, text in _DIAL_LINE.findall(error)]
    if reasons:
        return "; ".join(reasons)[:_LONGEST_EXPLANATION]
    if "dial backoff" in error:
        return "it failed a moment ago; libp2p waits before it tries again"
    return " ".join(error.split())[:_LONGEST_EXPLANATION]


def have_crossed(error: str) -> bool:
    """Return whether two peers dialled each other simultaneously: TCP makes that one connection with two initiators."""
    return "message is too short" in error


def _is_multiaddr(address: str) -> bool:
    try:
        Multiaddr(address)
    except (MultiaddrError, ValueError):
        return False
    return True


def _shorten_address(address: str) -> str:
    parts = address.split("/")
    return f"{parts[2]}:{parts[4]}" if len(parts) >= 5 else address


def _reason(text: str) -> str:
    if "connection refused" in text:
        return "refused"
    if "peer id mismatch" in text:
        return "is another peer"
    if "backoff" in text:
        return "failed a moment ago"
    if "deadline exceeded" in text or "i/o timeout" in text or "timed out" in text:
        return "timed out"
    return text.rsplit(": ", 1)[-1].strip()
