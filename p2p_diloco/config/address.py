"""Addresses that users type: multiaddrs, checked before anything is dialled or bound.

They are plain strings everywhere else, because the libp2p binding has a different address class from this package;
this module validates them.
"""

from __future__ import annotations

from multiaddr import Multiaddr

from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import PeerId, parse_peer_id

MAX_ADDRESS_CHARACTERS = 512

_HOSTS = frozenset({"ip4", "ip6", "dns", "dns4", "dns6", "dnsaddr"})
_EXAMPLE = "/ip4/203.0.113.7/tcp/31337"


def parse_peer_address(text: str) -> tuple[str, PeerId]:
    """Check the full address of a peer, as in an invite: host, TCP port and `/p2p/<peer id>`.

    Returns:
        The address in its canonical spelling, and the peer that it names.
    Raises:
        ConfigError: it is not such an address.
    """
    address, parts = _parsed(text, f"{_EXAMPLE}/p2p/12D3KooW…")
    names = [name for name, _ in parts]
    if "p2p" not in names:
        raise ConfigError(f"address {text!r} has no peer id; expected {_EXAMPLE}/p2p/12D3KooW…")
    if len(names) != 3 or names[2] != "p2p":
        raise ConfigError(f"address {text!r} has {len(names)} parts; expected three, as in {_EXAMPLE}/p2p/12D3KooW…")
    if parts[1][1] == "0":
        raise ConfigError(
            f"address {text!r} has port 0, which cannot be dialled; expected the port on which the peer listens"
        )
    return address, parse_peer_id(str(parts[2][1]))


def parse_host_address(text: str) -> str:
    """Check an address to listen on or to announce: host and TCP port, without a peer id.

    Returns:
        The address in its canonical spelling.
    Raises:
        ConfigError: it is not such an address.
    """
    address, parts = _parsed(text, _EXAMPLE)
    if len(parts) != 2:
        last = parts[2][0]
        hint = "leave out /p2p/…, because the peer id is known" if last == "p2p" else f"/{last} is not supported"
        raise ConfigError(f"address {text!r} has {len(parts)} parts; expected two, as in {_EXAMPLE}; {hint}")
    return address


def port_of(address: str) -> int:
    """Return the port of an address that `parse_host_address` returned."""
    return int(address.split("/")[4])


def _parsed(text: str, example: str) -> tuple[str, list[tuple[str, str | None]]]:
    if len(text) > MAX_ADDRESS_CHARACTERS:
        raise ConfigError(f"an address has {len(text)} characters; expected at most {MAX_ADDRESS_CHARACTERS}")
    if not text.startswith("/") or not text.isprintable() or " " in text:
        raise ConfigError(f"{text!r} is not an address; expected one such as {example}")
    try:
        address = Multiaddr(text)
        parts = [(protocol.name, value) for protocol, value in address.items()]
    except (ValueError, LookupError) as error:
        # The package repeats the whole address in its error, which our text already shows.
        reason = str(error).removeprefix(f"Invalid MultiAddr {text!r}: ").removesuffix(f" (string: {text})")
        raise ConfigError(f"address {text!r} cannot be read: {reason}; expected one such as {example}") from None
    if len(parts) < 2 or parts[0][0] not in _HOSTS or parts[1][0] != "tcp":
        given = "/".join(name for name, _ in parts)
        raise ConfigError(f"address {text!r} is of kind /{given}; only TCP is supported, as in {example}")
    return str(address), parts
