"""Redaction of a report: texts without addresses, peer ids, names, paths, keys and invites.

Each of these is replaced by a pseudonym such as `peer-1` or `address-3`, the same for the same thing in the whole
report, so that events stay readable. In case of doubt a word is replaced: a report that is hard to read does less harm
than one that tells too much. Names that follow no pattern (of the run, of people and machines) are learnt before.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

from p2p_diloco.config.manifest import RunManifest
from p2p_diloco.config.toml_document import known_keys
from p2p_diloco.ids import SHORT_CHARACTERS

MOST_CHARACTERS = 16 * 1024
"""Length at which a text is cut off; what a cut may have split is removed too."""
_CUT_MARGIN = 512
_ANYWHERE = 6
"""Length from which a learnt name is replaced within words, too."""

_B58 = "[1-9A-HJ-NP-Za-km-z]"
_PROTOCOLS = "ip4|ip6|ip6zone|dns|dns4|dns6|dnsaddr|tcp|udp|quic|quic-v1|p2p|ipfs|ws|wss|tls|http|https|p2p-circuit"
_IDS = rf"(?:12D3KooW{_B58}{{44}}|12D3KooW{_B58}*|(?:Qm|16Uiu2HA|1){_B58}{{40,50}})"
_SHORT_IDS = rf"(?:12D3{_B58}*)?(?:\.\.\.?|…)(?:{_B58}{{{SHORT_CHARACTERS}}}(?!{_B58})|(?<=12D3\.\.){_B58}{{4,8}})"
_IN_PATH = r"(?:[^\s\"'`<>|,;:()\]\[]| (?=[\w.-]+[\\/]\S))"
"""A character of a path; a space only if a slash follows the next word."""
_IN_QUOTES = (
    r"(?<=[\"'`])(?:file://)?(?:[A-Za-z]:[\\/]|\\\\|~[\w.-]*/|/(?!(?:%s)/))[^\"'`\n]+(?=[\"'`])" % _PROTOCOLS  # noqa: UP031
)
_PATHS = (
    rf"{_IN_QUOTES}|file://[^\s\"'`<>|,;()]+|(?<![^\W_])[A-Za-z]:[\\/]{_IN_PATH}+|\\\\[^\s\"'`<>|]+|(?<!\w)~[\w.-]*/[^\s\"'`<>|]*"
    rf"|(?<![\w/…])/(?!(?:{_PROTOCOLS})/)[^\s\"'`<>|/,;:()\]\[]{_IN_PATH}+"
)
_PATTERNS = (
    ("invite", r"p2pdiloco(?::|%3A)(?:/|%2F|\\/){2}[^\s\"'`<>\\]*"),
    ("secret", r"-----BEGIN [\s\S]*?(?:-----END [^-]*-----|\Z)"),
    ("address", r"(?<![\w+.-])(?!file:)[A-Za-z][A-Za-z0-9+.-]*://[^\s\"'`<>\\]+"),
    ("user", r"(?<![\w.+-])[\w.+-]+@\w[\w-]*(?:\.[\w-]+)*"),
    ("peer", rf"{_IDS}|{_SHORT_IDS}"),
    ("path", _PATHS),
    ("host", r"(?<=/dns/)[^/\s]+|(?<=/dns[46]/)[^/\s]+|(?<=/dnsaddr/)[^/\s]+"),
    ("digest", r"(?<![^\W_])(?:0x)?(?=\d*[A-Fa-f]|\d{32})[0-9A-Fa-f]{16,}(?![^\W_])"),
    ("secret", r"(?<![\w+-])(?=[\w+-]*\d)(?=[\w+-]*[a-z])(?=[\w+-]*[A-Z])(?![\w+-]*12D3KooW)[A-Za-z0-9+_-]{24,}={0,2}"),
    ("secret", r"(?<![\w+/-])(?=[A-Za-z0-9/]*\+|[A-Za-z0-9/]*=)[A-Za-z0-9+/]{40,}={0,2}"),
    ("address", r"(?<![^\W_])[0-9A-Fa-f]{2}(?:[:-][0-9A-Fa-f]{2}){5}(?![^\W_])"),
    ("six", r"(?<![^\W_])[0-9A-Fa-f:]*:[0-9A-Fa-f:.]+(?:%25[\w.-]+|%[\w.-]+)?"),
    ("address", r"\d{1,3}(?:\.\d{1,3}){3,}|(?<!\d)\d{1,3}(?:-\d{1,3}){3}(?!\d)"),
    ("host", r"(?<![\w.-])(?:[^\W_][\w-]*\.)+(?:[^\W\d_]{2,}|xn--[\w-]+)(?![\w-])"),
    ("host", r"(?<![\w.-])(?!line:|localhost:)[^\W\d_][\w-]*(?=:\d{2,5}(?!\d))"),
)
_OWN_KINDS = frozenset({"path", "run"})
"""Kinds of learnt names that no stranger chooses."""
_NUM_WHOLE = 4
"""The first patterns replace a whole that may hold learnt names: invites, PEM blocks, URLs and mail addresses."""
_DOTTED = frozenset(
    "events.jsonl events.old.jsonl status.json control.json traffic.json peers.json manifest.json run.toml peer.toml "
    "rosters.bin ballots.bin history.sqlite identity.key organiser.key".split()
) | frozenset(known_keys(RunManifest))
"""Words with dots that are no host names."""
_CODE = ("p2p_diloco.", "torch.", "numpy.", "hivemind.", "asyncio.")


class Redactor:
    """Replaces what identifies people and machines; one object serves a whole report."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], str] = {}
        self._counts: dict[str, int] = {}
        self._kinds: dict[str, str] = {}
        self._names: dict[str, tuple[str, str]] = {}
        self._tails: dict[str, str] = {}
        self._pattern = self._compiled()

    @property
    def kinds(self) -> Mapping[str, str]:
        """Return the kind of each address, such as "IPv4, private", by pseudonym."""
        return dict(sorted(self._kinds.items(), key=lambda item: (item[0].rstrip("0123456789"), len(item[0]), item[0])))

    @property
    def counts(self) -> Mapping[str, int]:
        """Return the number of different things that were replaced, by kind."""
        return dict(sorted(self._counts.items()))

    def learn(self, kind: str, *names: str) -> None:
        """Replace these names by pseudonyms of a kind; the same pseudonym for all of one call."""
        found = [unicodedata.normalize("NFC", name).strip() for name in names]
        for name in [name for name in found if name and not self._is_harmless(name)]:
            self._names.setdefault(name.lower(), (kind, found[0].lower()))
        self._pattern = self._compiled()

    def learn_peers(self, text: str) -> None:
        """Learn the full peer ids in a text, so that their short forms get the same pseudonyms."""
        ids = [found[0] for found in re.finditer(rf"12D3KooW{_B58}{{44}}", text)]
        fresh = [peer for peer in ids if peer[-SHORT_CHARACTERS:] not in self._tails]
        for peer in fresh:
            self._tails[peer[-SHORT_CHARACTERS:]] = self.pseudonym("peer", peer[-SHORT_CHARACTERS:])
        if fresh:
            self._pattern = self._compiled()

    def pseudonym(self, kind: str, thing: str) -> str:
        """Return the pseudonym of a thing, a new one if it has none."""
        if (kind, thing) not in self._known:
            self._counts[kind] = self._counts.get(kind, 0) + 1
            self._known[kind, thing] = f"{kind}-{self._counts[kind]}"
        return self._known[kind, thing]

    def text(self, text: str) -> str:
        """Return `text` with pseudonyms."""
        text = unicodedata.normalize("NFC", text)
        if len(text) > MOST_CHARACTERS:
            return self._pattern.sub(self._replaced, text[:MOST_CHARACTERS])[: MOST_CHARACTERS - _CUT_MARGIN] + "…"
        return self._pattern.sub(self._replaced, text)

    def document(self, document: Any) -> Any:
        """Return a JSON document with all its texts replaced; keys that are plain words of this package stay."""
        if isinstance(document, str):
            return self.text(document)
        if isinstance(document, Mapping):
            return {self._key(str(key)): self.document(value) for key, value in document.items()}
        if isinstance(document, list | tuple):
            return [self.document(value) for value in document]
        return document

    def _key(self, key: str) -> str:
        is_plain = re.fullmatch(r"[a-z][a-z_0-9]{0,39}", key) and key not in self._names
        return key if is_plain else self.text(key)

    def _is_harmless(self, name: str) -> bool:
        return len(name) < 2 or name.lower() in ("root", "user", "localhost", "unknown", "none")

    def _compiled(self) -> re.Pattern[str]:
        names = sorted(self._names, key=len, reverse=True)
        below = rf"(?:[\\/]{_IN_PATH}*)?"
        literal = [re.escape(name) + (below if self._names[name][0] == "path" else "") for name in names]
        edged = [rf"(?<![^\W_]){pattern}(?![^\W_])" for pattern in literal]
        literal = [
            whole if len(name) < _ANYWHERE else part for name, part, whole in zip(names, literal, edged, strict=True)
        ]
        tails = [rf"(?:12D3{_B58}*)?(?:\.\.\.?|…)?(?-i:{re.escape(tail)})" for tail in self._tails]
        # Before paths and hosts, a name is replaced as a whole: it may hold one. But others choose names of people and
        # machines, and one such as 203.0 may begin what is longer, so these then end where a word does.
        whole = [
            pattern if self._names[name][0] in _OWN_KINDS else rf"(?<![^\W_]){re.escape(name)}(?![\w./:@\\-])"
            for name, pattern in zip(names, literal, strict=True)
        ]
        early = [("name", "|".join(whole)), ("peer", "|".join(tails))]
        first = [*_PATTERNS[:_NUM_WHOLE], *early, *_PATTERNS[_NUM_WHOLE:], ("name", "|".join(literal))]
        self._groups = [kind for kind, pattern in first if pattern]
        parts = [pattern for _, pattern in first if pattern]
        exact = {"peer", "secret"}
        return re.compile(
            "|".join(
                f"({pattern})" if kind in exact else f"((?i:{pattern}))"
                for kind, pattern in zip(self._groups, parts, strict=True)
            )
        )

    def _replaced(self, found: re.Match[str]) -> str:
        kind, text = self._groups[(found.lastindex or 1) - 1], found[0]
        match kind:
            case "name":
                return self._name(text)
            case "peer":
                return self._peer(text)
            case "six":
                return self._six(text)
            case "host":
                return self._host(text)
            case "digest":
                # The same in the reports of all machines, so that their states can be compared.
                return f"digest-{hashlib.sha256(text.lower().removeprefix('0x').encode()).hexdigest()[:8]}"
            case "address":
                return self._address(text)
            case "path":
                return self._path(text)
            case "secret":
                return self.pseudonym(kind, text)
            case _:
                return self.pseudonym(kind, text.lower())

    def _name(self, text: str) -> str:
        kind, first = self._names.get(text.lower(), ("name", text.lower()))
        if kind != "name":
            return self.pseudonym(kind, first)
        # A learnt folder, with what is below it.
        last = re.split(r"[\\/]", text)[-1]
        return f"{self._path(text[: -len(last)])}/{last}" if last in _DOTTED else self._path(text)

    def _peer(self, text: str) -> str:
        tail = re.split(r"\.\.+|…", text)[-1][-SHORT_CHARACTERS:]
        if len(tail) < SHORT_CHARACTERS or "…" in text:
            matches = [known for known in self._tails if tail and known.endswith(tail)]
            tail = matches[0] if len(matches) == 1 else tail
        return self.pseudonym("peer", tail)

    def _path(self, text: str) -> str:
        stripped = text.rstrip(".,;:!?")
        return self.pseudonym("path", stripped.rstrip("/\\")) + text[len(stripped) :]

    def _host(self, text: str) -> str:
        if text.lower() in _DOTTED or text.startswith(_CODE):
            return text
        return self._address(text)

    def _six(self, text: str) -> str:
        """Replace an IPv6 address; a port or the end of a sentence may follow it. Other text is looked at in parts."""
        for end in (len(text), len(text.rstrip(":.")), text.rfind(":")):
            if end > 0 and text[:end].count(":") > 1 and _ip(text[:end]) is not None:
                return self._address(text[:end]) + self._rest(text[end:])
        return self._rest(text)

    def _rest(self, text: str) -> str:
        parts = [part if ":" in part else self._pattern.sub(self._replaced, part) for part in re.split("(:)", text)]
        return "".join(parts)

    def _address(self, text: str) -> str:
        found = _ip(text.strip("[]"))
        pseudonym = self.pseudonym("address", str(found or text.rstrip(".").lower()))
        self._kinds[pseudonym] = _kind_of(found, text)
        return pseudonym


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


_SHARED = ipaddress.ip_network("100.64.0.0/10")


def _kind_of(address: ipaddress.IPv4Address | ipaddress.IPv6Address | None, text: str) -> str:
    if address is None:
        return "web address" if "://" in text else "name"
    kinds = {
        "this machine": address.is_loopback,
        "all interfaces": address.is_unspecified,
        "link-local": address.is_link_local,
        "shared by a provider (CGNAT) or a VPN": address.version == 4 and address in _SHARED,
        "public": address.is_global,
    }
    return f"IPv{address.version}, {next((kind for kind, holds in kinds.items() if holds), 'private')}"


def names_in(document: Any, keys: Iterable[str] = ("name", "run_name")) -> list[str]:
    """Return the texts at keys that hold names of runs and people, anywhere in a JSON document."""
    wanted = frozenset(keys)
    if isinstance(document, Mapping):
        own = [value for key, value in document.items() if key in wanted and isinstance(value, str)]
        return own + [name for value in document.values() for name in names_in(value, wanted)]
    if isinstance(document, list | tuple):
        return [name for value in document for name in names_in(value, wanted)]
    return []
