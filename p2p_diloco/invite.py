"""Invites: one line that names a run and who to ask first.

`p2pdiloco://<run id>?b=<multiaddr>&b=<multiaddr>` is all that a newcomer types. It holds no secret: the run id is the
digest of the signed manifest, so whoever answers can be checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, urlsplit

from p2p_diloco.address import parse_peer_address
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import DIGEST_BYTES, Digest

SCHEME = "p2pdiloco"
MAX_INVITE_CHARACTERS = 8192
MAX_BOOTSTRAPS = 16

_EXAMPLE = f"{SCHEME}://<run id>?b=/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW…"


@dataclass(frozen=True, slots=True, kw_only=True)
class Invite:
    """Where a newcomer begins.

    Attributes:
        run: digest of the run's manifest.
        bootstraps: full addresses of peers to ask first, each ending in `/p2p/<peer id>`; at least one.
    """

    run: Digest
    bootstraps: tuple[str, ...]


def format_invite(invite: Invite) -> str:
    """Return the one line; between double quotes it is safe in every shell."""
    query = "&".join(f"b={quote(address, safe='/:')}" for address in invite.bootstraps)
    return f"{SCHEME}://{invite.run.hex()}?{query}"


def parse_invite(text: str) -> Invite:
    """Read an invite as people paste it: space and quotes around it do not matter.

    Raises:
        ConfigError: what is wrong with it, and how it should look.
    """
    line = text.strip().strip("\"'").strip()
    if len(line) > MAX_INVITE_CHARACTERS:
        raise ConfigError(f"the invite has {len(line)} characters; expected at most {MAX_INVITE_CHARACTERS}")
    if not line.isprintable() or " " in line:
        raise ConfigError(f"the invite holds a space or a line break; expected one line: {_EXAMPLE}")
    scheme, found, rest = line.partition("://")
    if not found or scheme.lower() != SCHEME:
        raise ConfigError(f"{_shortened(line)!r} is not an invite; expected {_EXAMPLE}")
    try:
        parts = urlsplit(f"//{rest}")
    except ValueError:
        raise ConfigError(f"{_shortened(line)!r} is not an invite; expected {_EXAMPLE}") from None
    if parts.path not in ("", "/") or parts.fragment:
        extra = parts.path if parts.path not in ("", "/") else f"#{parts.fragment}"
        raise ConfigError(f"the invite holds {_shortened(extra)!r} after its run id; expected {_EXAMPLE}")
    return Invite(run=parse_run_id(parts.netloc), bootstraps=_parsed_bootstraps(parts.query))


def parse_run_id(text: str) -> Digest:
    """Read a run id, 64 hexadecimal digits.

    Raises:
        ConfigError: too few, too many, or other characters.
    """
    expected = 2 * DIGEST_BYTES
    if len(text) != expected:
        raise ConfigError(f"the run id has {len(text)} characters, expected {expected} digits; was the line cut off?")
    strange = sorted(set(text.lower()) - set("0123456789abcdef"))
    if strange:
        raise ConfigError(f"the run id holds {''.join(strange)!r}; expected hexadecimal digits (0 to 9, a to f) only")
    return Digest(bytes.fromhex(text))


def _parsed_bootstraps(query: str) -> tuple[str, ...]:
    found: list[str] = []
    for name, address in parse_qsl(query, keep_blank_values=True):
        if name != "b":
            raise ConfigError(
                f"the invite holds {_shortened(name)!r}, which this version does not know; expected only b=…"
            )
        checked, _ = parse_peer_address(address)
        if checked not in found:
            found.append(checked)
    if not found:
        raise ConfigError(f"the invite names no bootstrap address; was the line cut off? expected {_EXAMPLE}")
    if len(found) > MAX_BOOTSTRAPS:
        raise ConfigError(f"the invite names {len(found)} bootstrap addresses; expected at most {MAX_BOOTSTRAPS}")
    return tuple(found)


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:59]}…"
