"""A peer listens on one port at every start, and never on the port of another state directory."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from small_run import peer_key

from p2p_diloco.config.invite import port_of
from p2p_diloco.storage import identity
from p2p_diloco.storage.identity import FIRST_PORT, LAST_PORT, PORT_FILE, keep_port

ANY = "/ip4/127.0.0.1/tcp/0"


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "OLD_DAEMON_SECONDS", 0.0)


class Start:
    """One start of a peer: the port that it takes, and its notices."""

    def __init__(self, folder: Path, name: str = "ada", *, addresses: tuple[str, ...] = (ANY,), preferred: int = 0):
        self.said: list[str] = []
        folder.mkdir(exist_ok=True)
        self.addresses = asyncio.run(
            keep_port(
                addresses,
                folder=folder,
                peer=peer_key(name).peer,
                preferred=preferred or None,
                notify=self.said.append,
            )
        )
        self.port = port_of(self.addresses[0])


@contextmanager
def taken(port: int) -> Iterator[None]:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen(1)
        yield


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_peer_listens_on_the_same_port_at_every_start(tmp_path: Path) -> None:
    first = Start(tmp_path / "ada")
    assert FIRST_PORT <= first.port <= LAST_PORT
    assert [Start(tmp_path / "ada").port for _ in range(3)] == [first.port] * 3
    assert first.said == []


def test_a_configured_port_takes_precedence_and_is_kept(tmp_path: Path) -> None:
    before, named = Start(tmp_path / "ada").port, free_port()
    assert Start(tmp_path / "ada", addresses=(f"/ip4/127.0.0.1/tcp/{named}",)).port == named != before
    assert Start(tmp_path / "ada").port == named


def test_a_kept_port_that_is_taken_is_replaced_for_good_with_one_notice(tmp_path: Path) -> None:
    before = Start(tmp_path / "ada").port
    with taken(before):
        moved = Start(tmp_path / "ada")
    assert moved.port != before
    assert moved.said == [
        f"port {before} is used by another program; this peer now listens on {moved.port} and keeps that port; open it "
        f"wherever port {before} was open"
    ]
    again = Start(tmp_path / "ada")
    assert (again.port, again.said) == (moved.port, [])


def test_a_port_still_held_by_this_peers_killed_daemon_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Start(tmp_path / "ada").port
    monkeypatch.setattr(identity, "OLD_DAEMON_SECONDS", 10.0)

    async def start() -> tuple[str, ...]:
        with ExitStack() as held:
            held.enter_context(taken(before))
            asyncio.get_running_loop().call_later(0.3, held.pop_all().close)
            return await keep_port((ANY,), folder=tmp_path / "ada", peer=peer_key("ada").peer, notify=pytest.fail)

    assert port_of(asyncio.run(start())[0]) == before


def test_state_directories_on_one_machine_never_take_each_others_port_while_one_is_stopped(tmp_path: Path) -> None:
    names = [f"peer-{number}" for number in range(30)]
    ports = [Start(tmp_path / name, name).port for name in names]
    assert len(set(ports)) == len(names)
    assert [Start(tmp_path / name, name).port for name in reversed(names)] == ports[::-1]


def test_a_bootstrap_peer_prefers_the_well_known_port_and_takes_another_if_it_is_taken(tmp_path: Path) -> None:
    known = free_port()
    assert Start(tmp_path / "boot", preferred=known).port == known
    with taken(known):
        second = Start(tmp_path / "second", "ben", preferred=known)
    assert second.port != known
    assert second.said[0].startswith(f"port {known} is used by another program; this peer now listens on {second.port}")
    assert Start(tmp_path / "second", "ben", preferred=known).port == second.port, "it is kept"


@pytest.mark.parametrize("content", [b"", b"torn\xff", b"0", b"70000", b"-5", b"9" * 5000])
def test_a_broken_port_file_counts_as_missing(tmp_path: Path, content: bytes) -> None:
    before = Start(tmp_path / "ada").port
    (tmp_path / "ada" / PORT_FILE).write_bytes(content)
    assert Start(tmp_path / "ada").port == before, "the port follows from the identity"


def test_all_addresses_without_a_port_share_one(tmp_path: Path) -> None:
    named = free_port()
    start = Start(tmp_path / "ada", addresses=(ANY, "/ip4/127.0.0.2/tcp/0", f"/ip4/127.0.0.3/tcp/{named}"))
    assert [port_of(address) for address in start.addresses] == [start.port, start.port, named]


def test_a_port_that_cannot_be_saved_is_reported_and_the_peer_continues(tmp_path: Path) -> None:
    (tmp_path / "ada" / PORT_FILE).mkdir(parents=True)
    start = Start(tmp_path / "ada")
    assert FIRST_PORT <= start.port <= LAST_PORT
    (sentence,) = start.said
    assert f"after a restart this peer may listen on another port than {start.port}" in sentence
