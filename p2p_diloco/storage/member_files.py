"""Files of a run's folder: `members.json` with who is and was in the run, `credit.json` with the tokens included.

The peer writes them for `p2p-diloco members`, and reads them when it starts. Losing one loses what it shows, and
nothing that the run needs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from p2p_diloco.errors import P2PDilocoError, StateError
from p2p_diloco.ids import DIGEST_BYTES, Digest, PeerId, SpanId, format_peer_id, parse_peer_id
from p2p_diloco.protocol.round.credit import BLOCK_CYCLES, MOST_BLOCKS, Block, SavedCredit, Tip
from p2p_diloco.protocol.wire.peer_name import decode_name

MEMBERS_FILE, CREDIT_FILE = "members.json", "credit.json"
MOST_REMEMBERED = 4096
"""Maximum number of members in the file; those that were seen last are kept."""
MOST_FILE_BYTES = 16 << 20
STATES = ("member", "silent", "not listed", "left", "gone")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRecord:
    """A peer that is or was on a roster. Times are Unix seconds.

    Attributes:
        name: what its owner calls it, as it last said.
        state: "member", or "silent" if it is one and nothing arrives from it; "not listed" if it is in contact without
            being a member; "left" if it declared that, otherwise "gone".
        since: the beginning of the cycle that first listed it.
        last_seen: when its last heartbeat arrived here; None: there was none.
        hours: for how long rosters have listed it.
        incarnation: that of its last heartbeat; 0 before the first.
        tokens: tokens trained in that incarnation, as it claims.
        tokens_before: the same of the incarnations before that this peer has heard of.
    """

    peer: PeerId
    since: float
    name: str = ""
    state: str = "gone"
    last_seen: float | None = None
    hours: float = 0.0
    incarnation: int = 0
    tokens: int = 0
    tokens_before: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """The members of a run, the longest-listed first, and when they were saved, Unix seconds."""

    updated: float = 0.0
    records: tuple[MemberRecord, ...] = ()


def encode_members(members: Members) -> bytes:
    """Return the content of `members.json`; beyond `MOST_REMEMBERED`, without those that were seen longest ago."""
    ranked = sorted(members.records, key=lambda each: (each.state not in ("member", "silent"), -_seen(each)))
    kept = sorted(ranked[:MOST_REMEMBERED], key=lambda each: (each.since, each.peer))
    return _encode({"updated": members.updated, "members": [_record_document(each) for each in kept]})


def read_members(folder: Path) -> Members:
    """Return what is saved in a run's folder; nobody if there is no file.

    Raises:
        StateError: the file cannot be read, or is broken.
    """
    return _read(folder / MEMBERS_FILE, _members_of) or Members()


def encode_credit(credit: SavedCredit) -> bytes:
    """Return the content of `credit.json`."""
    peers = sorted({peer for block in credit.blocks.values() for peer in block.sums})
    place = {peer: number for number, peer in enumerate(peers)}
    document = {
        "block_cycles": BLOCK_CYCLES,
        "followed": credit.followed,
        "line": credit.line.hex() if credit.line is not None else "",
        "peers": [format_peer_id(peer) for peer in peers],
        "blocks": [
            [number, f"{block.missing:x}", [[place[peer], tokens] for peer, tokens in sorted(block.sums.items())]]
            for number, block in sorted(credit.blocks.items())
        ],
        "tips": [[*span, tip.digest.hex(), tip.height, tip.round] for span, tip in sorted(credit.tips.items())],
    }
    return _encode(document)


def read_credit(folder: Path) -> SavedCredit:
    """Return what is saved in a run's folder; nothing if there is no file.

    Raises:
        StateError: the file cannot be read, or is broken.
    """
    return _read(folder / CREDIT_FILE, _credit_of) or SavedCredit()


def _record_document(record: MemberRecord) -> dict[str, Any]:
    document = {name: getattr(record, name) for name in MemberRecord.__dataclass_fields__}
    return {**document, "peer": format_peer_id(record.peer)}


def _seen(record: MemberRecord) -> float:
    return record.since if record.last_seen is None else record.last_seen


def _members_of(document: Any) -> Members:
    records = tuple(map(_record_of, _list(document["members"], MOST_REMEMBERED)))
    return Members(updated=_time(document["updated"]), records=records)


def _record_of(document: Any) -> MemberRecord:
    last_seen, state = document["last_seen"], document["state"]
    if state not in STATES:
        raise ValueError("a state is unknown")
    return MemberRecord(
        peer=parse_peer_id(document["peer"]),
        name=decode_name(document["name"].encode("utf-8", "replace")),
        state=state,
        since=_time(document["since"]),
        last_seen=None if last_seen is None else _time(last_seen),
        hours=_time(document["hours"]),
        incarnation=_count(document["incarnation"]),
        tokens=_count(document["tokens"]),
        tokens_before=_count(document["tokens_before"]),
    )


def _credit_of(document: Any) -> SavedCredit:
    if document["block_cycles"] != BLOCK_CYCLES:
        raise ValueError(f"its blocks have {document['block_cycles']} cycles, not {BLOCK_CYCLES}")
    peers = [parse_peer_id(text) for text in document["peers"]]
    blocks = {}
    for number, missing, sums in _list(document["blocks"], MOST_BLOCKS):
        bits = int(missing, 16)
        if not 0 <= bits < 1 << BLOCK_CYCLES:
            raise ValueError("a block has other cycles")
        blocks[_count(number)] = Block({peers[_count(place)]: _count(tokens) for place, tokens in sums}, bits)
    tips = {
        SpanId(_count(fragment), _count(index)): Tip(
            digest=_digest(text), height=_count(height), round=int(round_index)
        )
        for fragment, index, text, height, round_index in document["tips"]
    }
    line = _digest(document["line"]) if document["line"] else None
    return SavedCredit(blocks=blocks, tips=tips, followed=int(document["followed"]), line=line)


def _list(value: Any, most: int) -> Sequence[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise ValueError(f"it holds no list of at most {most}")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"it holds {str(value)[:20]!r} where a count was expected")
    return value


def _time(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"it holds {str(value)[:20]!r} where a time was expected")
    return float(value)


def _digest(text: Any) -> Digest:
    digest = Digest(bytes.fromhex(text))
    if len(digest) != DIGEST_BYTES:
        raise ValueError("it holds a digest of another length")
    return digest


def _encode(document: dict[str, Any]) -> bytes:
    return json.dumps(document, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def _read(path: Path, parse: Callable[[Any], _T]) -> _T | None:
    try:
        with path.open("rb") as file:
            content = file.read(MOST_FILE_BYTES + 1)
        if len(content) > MOST_FILE_BYTES:
            raise ValueError(f"it has more than {MOST_FILE_BYTES} bytes")
        return parse(json.loads(content))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateError(f"cannot read {path}: {error.strerror}; check the folder and the disk") from None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, P2PDilocoError) as error:
        raise StateError(f"{path} is broken ({error}); what it remembered is lost") from None
