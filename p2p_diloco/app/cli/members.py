"""`p2p-diloco id` and `members`: who the peer of this machine is, and who else is or was in its run."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from p2p_diloco.app.cli.owner import latest_status
from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.errors import ConfigError, StateError
from p2p_diloco.ids import Digest, PeerId, format_peer_id, short_peer_id
from p2p_diloco.protocol.round.credit import SavedCredit, cycles_of
from p2p_diloco.status.owner_requests import is_running
from p2p_diloco.status.status_file import read_status
from p2p_diloco.storage.identity import load_or_create_identity, read_name, write_name
from p2p_diloco.storage.member_files import MemberRecord, read_credit, read_members
from p2p_diloco.storage.run_folder import run_folder
from p2p_diloco.wording import NOTHING, format_count, format_seconds, format_share, short_peer

LOG_WIDTH = 120
"""Width in columns of output that does not go to a terminal."""


def show_identity(settings: PeerSettings, name: str | None, *, as_json: bool) -> int:
    """Print the id and the name of the peer of a state directory; make its key if it has none yet.

    Args:
        name: the name to store first; empty: remove the stored one; None: change nothing.
    Raises:
        ConfigError: it is not a name, or the key cannot be read.
        StateError: the state directory cannot be written.
    """
    folder = settings.state_directory
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StateError(
            f"cannot write {folder}: {error.strerror}; choose another place with --state-directory"
        ) from None
    if name is not None:
        write_name(folder, name)
    peer, kept = load_or_create_identity(settings.identity_file).peer, read_name(folder)
    if as_json:
        print(json.dumps({"peer": format_peer_id(peer), "short": short_peer_id(peer), "name": kept}, indent=2))
        return 0
    print(f"id     {format_peer_id(peer)}\nshort  {short_peer_id(peer)}\nname   {kept or 'none'}")
    status = read_status(folder)
    if status is not None and is_running(status) and status.name != kept:
        print("the peer that is running takes this name at its next start")
    return 0


def show_members(folder: Path, *, as_json: bool) -> int:
    """Print who is and was in the run of the latest peer of a state directory, as it has saved it.

    Raises:
        ConfigError: no peer has run there, or it has seen no member.
        StateError: its file is broken.
    """
    members = read_members(_run_folder(folder))
    if not members.records:
        raise ConfigError(f"the peer of {folder} has seen no member of its run yet; try again later")
    if as_json:
        print(json.dumps({"updated": members.updated, "members": [*map(_member_document, members.records)]}, indent=2))
        return 0
    table = _table("name", "id", "state", "since", "last seen", right=("claimed tokens", "hours"))
    for record in members.records:
        table.add_row(
            record.name or NOTHING,
            short_peer(format_peer_id(record.peer)),
            record.state,
            _date(record.since),
            NOTHING if record.last_seen is None else _date(record.last_seen),
            format_count(record.tokens + record.tokens_before),
            f"{record.hours:.1f}",
        )
    console = _console()
    console.print(table)
    age = format_seconds(max(time.time() - members.updated, 0.0))
    console.print(f"as this peer saw it {age} ago; nobody checks names and claimed tokens")
    return 0


def show_credit(folder: Path, *, as_json: bool) -> int:
    """Print the tokens of each member that entries include: of the blocks that are complete here, and the newest one.

    Raises:
        ConfigError: no peer has run there, or it has counted no entries.
        StateError: its file is broken.
    """
    place = _run_folder(folder)
    credit, names = read_credit(place), {record.peer: record.name for record in read_members(place).records}
    if not credit.blocks:
        raise ConfigError(f"the peer of {folder} has counted no entries of its run yet; try again later")
    newest, spans = max(credit.blocks), max(len(credit.tips), 1)
    shown = [number for number in credit.blocks if number == newest or credit.is_complete(number)]
    sums: Counter[PeerId] = Counter()
    for number in shown:
        sums.update(credit.blocks[number].sums)
    covered = [cycle for number in sorted(shown) for cycle in credit.covered(number)]
    if as_json:
        members = [
            {"peer": format_peer_id(peer), "name": names.get(peer, ""), "tokens": total // spans, "token_spans": total}
            for peer, total in sums.most_common()
        ]
        blocks = [_block_document(credit, number) for number in sorted(credit.blocks)]
        covers = {"covers": _ranges(covered), "in_progress": credit.followed}
        document = {"spans": spans, **covers, "members": members, "blocks": blocks}
        print(json.dumps(document, indent=2))
        return 0
    table = _table("name", "id", right=("tokens", "share"))
    for peer, total in sums.most_common():
        share = format_share(total / max(sums.total(), 1))
        table.add_row(names.get(peer) or NOTHING, short_peer(format_peer_id(peer)), f"{total // spans:,}", share)
    console = _console()
    console.print(table)
    console.print(
        f"tokens in the entries of {_in_words(covered)}, and of cycle {credit.followed} so far, as this peer has "
        "counted them; what members claim does not count"
    )
    for number in sorted(credit.blocks):
        if missing := credit.missing(number):
            what = "is incomplete" if number == newest else "is left out"
            console.print(
                f"the block of {_in_words(cycles_of(number))} {what}: this peer lacks entries of {_in_words(missing)}"
            )
    return 0


def _run_folder(folder: Path) -> Path:
    """Return the folder of the run in which the peer of a state directory took part last."""
    status = latest_status(folder)
    if not status.run:
        raise ConfigError(f"the peer of {folder} has not reached its run yet; try again later")
    return run_folder(folder, Digest(bytes.fromhex(status.run)))


def _member_document(record: MemberRecord) -> dict[str, object]:
    return {
        "peer": format_peer_id(record.peer),
        "name": record.name,
        "state": record.state,
        "since": record.since,
        "last_seen": record.last_seen,
        "claimed_tokens": record.tokens + record.tokens_before,
        "hours": round(record.hours, 4),
    }


def _block_document(credit: SavedCredit, number: int) -> dict[str, object]:
    sums = credit.blocks[number].sums
    return {
        "cycles": _ranges(cycles_of(number)),
        "complete": credit.is_complete(number),
        "missing": _ranges(credit.missing(number)),
        "token_spans": {format_peer_id(peer): total for peer, total in sorted(sums.items())},
    }


def _ranges(cycles: Sequence[int]) -> list[list[int]]:
    """Return ascending numbers as ranges, each with its first and last."""
    found: list[list[int]] = []
    for cycle in cycles:
        if found and cycle == found[-1][1] + 1:
            found[-1][1] = cycle
        else:
            found.append([cycle, cycle])
    return found


def _in_words(cycles: Sequence[int]) -> str:
    texts = [f"{first} to {last}" if first < last else f"{first}" for first, last in _ranges(cycles)]
    return f"cycles {', '.join(texts)}" if texts else "no whole cycle yet"


def _date(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):  # a run's clock may be anything
        return NOTHING


def _table(*left: str, right: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _console() -> Console:
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = LOG_WIDTH
    return console
