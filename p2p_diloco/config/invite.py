"""Invites and addresses: one line that names a run and the peers to ask first.

`p2pdiloco://<run id>?v=<version>&b=<multiaddr>&b=<multiaddr>` is all that a new peer needs. It contains no secret: the
run id is the digest of the signed manifest, so any answer can be verified. It names several peers, so that it stays
valid when one leaves; `v` is their protocol version, `r` the newest roster known to the peer that printed it.

Addresses are multiaddrs, checked here before anything is dialled or bound. They are strings everywhere else, because
the libp2p binding has a class of its own.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from urllib.parse import parse_qsl, quote, urlsplit

from multiaddr import Multiaddr

from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import DIGEST_BYTES, Digest, PeerId, parse_peer_id
from p2p_diloco.protocol.wire.messages import PROTOCOL_VERSION
from p2p_diloco.transport.addresses import without_loopback

SCHEME = "p2pdiloco"
MAX_INVITE_CHARACTERS, MAX_ADDRESS_CHARACTERS = 8192, 512
MAX_BOOTSTRAPS = 16
MOST_NAMED = 8
"""Maximum number of addresses in a printed invite."""
MOST_PRINTED_CHARACTERS = 1400

_AMPERSAND = re.compile(r"(?:&|%26)(?:amp;)+|%26(?=[vbr]=)", re.IGNORECASE)
_AROUND = "\"'`\u201c\u201d\u2018\u2019«»<>()[].,;:!&"
"""Quotes, brackets and the end of a sentence around an invite; it ends in a letter or a digit."""

_HOSTS = frozenset({"ip4", "ip6", "dns", "dns4", "dns6", "dnsaddr"})
_EXAMPLE_ADDRESS = "/ip4/203.0.113.7/tcp/31337"
_EXAMPLE = f"{SCHEME}://<run id>?b={_EXAMPLE_ADDRESS}/p2p/12D3KooW…"


class VersionError(ConfigError):
    """The peers of the run use another protocol version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invite:
    """A parsed invite.

    Attributes:
        run: digest of the run's manifest.
        bootstraps: full addresses of peers to ask first, bootstraps or members, each ending in `/p2p/<peer id>`; at
            least one.
        roster: digest of the newest roster known to the printing peer. Not used yet.
        complaints: a sentence for each invalid address that was skipped.
    """

    run: Digest
    bootstraps: tuple[str, ...]
    roster: Digest | None = None
    complaints: tuple[str, ...] = ()


def format_invite(invite: Invite) -> str:
    """Return the invite as one line; in double quotes it is safe in every shell."""
    # The roster comes first: if the line is cut off, only the last address is lost.
    roster = [] if invite.roster is None else [f"r={invite.roster.hex()}"]
    query = "&".join(
        [f"v={PROTOCOL_VERSION}", *roster, *(f"b={quote(address, safe='/:')}" for address in invite.bootstraps)]
    )
    return f"{SCHEME}://{invite.run.hex()}?{query}"


def fresh_invite(run: Digest, peers: Sequence[Sequence[str]], roster: Digest | None = None) -> Invite:
    """Make an invite that names as many peers as fit into a line that is still easy to paste.

    Args:
        peers: full addresses of each peer, in order of preference. All first addresses come before any second one. They
            are validated like user input, because they may come from other peers.
        roster: see `Invite`.
    """
    listed = [address for turn in zip_longest(*peers) for address in turn if address is not None]
    named: tuple[str, ...] = ()
    for address in without_loopback(tuple(dict.fromkeys(listed))):
        if len(named) == MOST_NAMED:
            break
        with contextlib.suppress(ConfigError):
            longer = Invite(run=run, bootstraps=(*named, parse_peer_address(address)[0]), roster=roster)
            if len(format_invite(longer)) <= MOST_PRINTED_CHARACTERS:
                named = longer.bootstraps
    return Invite(run=run, bootstraps=named, roster=roster)


def is_invite(text: str) -> bool:
    """Return whether a text is an invite, valid or not, and not a path."""
    return f"{SCHEME}://" in text.lower()


def parse_invite(text: str) -> Invite:
    """Parse an invite as users paste it: with what mail, chat and web pages add to it, or within its command.

    An invalid address among valid ones is skipped, with a complaint, since the others still lead to the run.

    Raises:
        ConfigError: it is not a valid invite.
    """
    if not isinstance(text, str):
        raise ConfigError(f"the invite is of type {type(text).__name__}; expected a text: {_EXAMPLE}")
    if len(text) > MAX_INVITE_CHARACTERS:
        raise ConfigError(f"the invite has {len(text)} characters; expected at most {MAX_INVITE_CHARACTERS}")
    visible = "".join(character for character in text if character.isprintable() and not character.isspace())
    line = _AMPERSAND.sub("&", visible[max(0, visible.lower().find(f"{SCHEME}://")) :]).strip(_AROUND)
    scheme, found, rest = line.partition("://")
    if not found or scheme.lower() != SCHEME:
        raise ConfigError(f"{_shortened(line)!r} is not an invite; expected {_EXAMPLE}")
    try:
        parts = urlsplit(f"//{rest}")
    except ValueError:
        raise ConfigError(f"{_shortened(line)!r} is not an invite; expected {_EXAMPLE}") from None
    if parts.path not in ("", "/") or parts.fragment:
        extra = parts.path if parts.path not in ("", "/") else f"#{parts.fragment}"
        raise ConfigError(f"the invite has {_shortened(extra)!r} after its run id; expected {_EXAMPLE}")
    return _parsed_query(parse_run_id(parts.netloc), parts.query)


def parse_run_id(text: str, noun: str = "run id") -> Digest:
    """Parse a run id, 64 hexadecimal digits; errors name it `noun`.

    Raises:
        ConfigError: too few, too many, or other characters.
    """
    expected = 2 * DIGEST_BYTES
    if len(text) != expected:
        characters = "1 character" if len(text) == 1 else f"{len(text)} characters"
        raise ConfigError(f"the {noun} has {characters}, expected {expected} digits; was the line cut off?")
    strange = sorted(set(text.lower()) - set("0123456789abcdef"))
    if strange:
        raise ConfigError(
            f"the {noun} contains {''.join(strange)!r}; expected only hexadecimal digits (0 to 9, a to f)"
        )
    return Digest(bytes.fromhex(text))


def _parsed_query(run: Digest, query: str) -> Invite:
    found: dict[str, None] = {}
    wrong: list[ConfigError] = []
    roster: Digest | None = None
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name not in ("v", "b", "r"):
            raise ConfigError(
                f"the invite has {_shortened(name)!r}, which this version does not know; expected v=…, b=… or r=…"
            )
        try:
            if name == "v":
                _check_version(text)
            elif name == "r":
                roster = parse_run_id(text, "roster digest")
            else:
                found[parse_peer_address(text)[0]] = None
        except VersionError:
            raise
        except ConfigError as error:
            wrong.append(error)
    if not found:
        if wrong:
            raise ConfigError(f"{wrong[0]}; was the line cut off?")
        raise ConfigError(
            "the invite names no bootstrap address; was the line cut off, or pasted without its double quotes? "
            f"expected {_EXAMPLE}"
        )
    if len(found) > MAX_BOOTSTRAPS:
        raise ConfigError(f"the invite names {len(found)} bootstrap addresses; expected at most {MAX_BOOTSTRAPS}")
    complaints = tuple(f"ignoring a part of the invite: {error}" for error in wrong[:MAX_BOOTSTRAPS])
    return Invite(run=run, bootstraps=tuple(found), roster=roster, complaints=complaints)


def _check_version(text: str) -> None:
    """Refuse an invite of another protocol version: its peers would close the connection without a visible reason.

    Raises:
        VersionError: the version differs.
    """
    if text != str(PROTOCOL_VERSION):
        is_newer = text.isascii() and text.isdecimal() and len(text) < 10 and int(text) > PROTOCOL_VERSION
        remedy = "update p2p_diloco here" if is_newer else "the peers of this run must update p2p_diloco, or use theirs"
        raise VersionError(
            f"the invite is for protocol version {_shortened(text)!r}, but this program uses {PROTOCOL_VERSION}; "
            f"{remedy}"
        )


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:59]}…"


def parse_peer_address(text: str) -> tuple[str, PeerId]:
    """Check the full address of a peer, as in an invite: host, TCP port and `/p2p/<peer id>`.

    Returns:
        The address in its canonical spelling, and the peer that it names.
    Raises:
        ConfigError: it is not such an address.
    """
    example = f"{_EXAMPLE_ADDRESS}/p2p/12D3KooW…"
    address, parts = _parsed_address(text, example)
    names = [name for name, _ in parts]
    if "p2p" not in names:
        raise ConfigError(f"address {text!r} has no peer id; expected {example}")
    if len(names) != 3 or names[2] != "p2p":
        raise ConfigError(f"address {text!r} has {len(names)} parts; expected three, as in {example}")
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
    address, parts = _parsed_address(text, _EXAMPLE_ADDRESS)
    if len(parts) != 2:
        last = parts[2][0]
        hint = "leave out /p2p/…, because the peer id is known" if last == "p2p" else f"/{last} is not supported"
        raise ConfigError(f"address {text!r} has {len(parts)} parts; expected two, as in {_EXAMPLE_ADDRESS}; {hint}")
    return address


def port_of(address: str) -> int:
    """Return the port of an address that `parse_host_address` returned."""
    return int(address.split("/")[4])


def _parsed_address(text: str, example: str) -> tuple[str, list[tuple[str, str | None]]]:
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
