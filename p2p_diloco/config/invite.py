"""Invites: one line that names a run and the peers to ask first.

`p2pdiloco://<run id>?v=<version>&b=<multiaddr>&b=<multiaddr>` is all that a new peer needs. It contains no secret: the
run id is the digest of the signed manifest, so any answer can be verified. It names several peers, so that it stays
valid when one leaves; `v` is their protocol version, `r` the newest roster known to the peer that printed it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from urllib.parse import parse_qsl, quote, urlsplit

from p2p_diloco.config.address import parse_peer_address
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import DIGEST_BYTES, Digest
from p2p_diloco.protocol.wire.messages import PROTOCOL_VERSION

SCHEME = "p2pdiloco"
MAX_INVITE_CHARACTERS = 8192
MAX_BOOTSTRAPS = 16
MOST_NAMED = 8
"""Maximum number of addresses in a printed invite."""
MOST_PRINTED_CHARACTERS = 1400

_AMPERSAND = re.compile(r"(?:&|%26)(?:amp;)+|%26(?=[vbr]=)", re.IGNORECASE)
_AROUND = "\"'`\u201c\u201d\u2018\u2019«»<>()[].,;:!&"
"""Quotes, brackets and the end of a sentence around an invite; it ends in a letter or a digit."""

_EXAMPLE = f"{SCHEME}://<run id>?b=/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW…"


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
    for address in worth_sharing(tuple(dict.fromkeys(listed))):
        if len(named) == MOST_NAMED:
            break
        with contextlib.suppress(ConfigError):
            longer = Invite(run=run, bootstraps=(*named, parse_peer_address(address)[0]), roster=roster)
            if len(format_invite(longer)) <= MOST_PRINTED_CHARACTERS:
                named = longer.bootstraps
    return Invite(run=run, bootstraps=named, roster=roster)


def worth_sharing(addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Return the addresses without loopback ones, unless there is nothing else."""
    return tuple(a for a in addresses if not a.startswith(("/ip4/127.", "/ip6/::1/"))) or addresses


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
    """Parse a run id, 64 hexadecimal digits.

    Args:
        noun: name of the value, for the error.
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
    for name, text in _parameters(query):
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


def _parameters(query: str) -> Iterator[tuple[str, str]]:
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name not in ("v", "b", "r"):
            raise ConfigError(
                f"the invite has {_shortened(name)!r}, which this version does not know; expected v=…, b=… or r=…"
            )
        yield name, text


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
