"""`doctor INVITE` gives each address a verdict of its own and asks the run without joining it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from p2p_diloco.app.cli.app import main
from p2p_diloco.app.cli.doctor import Finding, examine
from p2p_diloco.app.cli.doctor_network import (
    DialledAddress,
    check_addresses,
    check_listed,
    check_model,
    check_reach,
    check_run_disk,
    check_wall_clock,
    dial,
)
from p2p_diloco.config.key_file import create_key_file
from p2p_diloco.config.manifest import RunManifest
from p2p_diloco.config.run_file import read_run_toml
from p2p_diloco.config.run_plan import plan_run
from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.errors import DialFailure, NotReached
from p2p_diloco.ids import PeerId, format_peer_id
from p2p_diloco.protocol.wire.entry import NO_SIGNATURE
from p2p_diloco.protocol.wire.messages import (
    ManifestReply,
    ManifestRequest,
    Message,
    Ping,
    Pong,
    ReachReply,
    ReachRequest,
    decode_message,
    encode_message,
)
from p2p_diloco.session.peer_plan import read_founding
from p2p_diloco.transport.libp2p import Libp2pTransport
from p2p_diloco.transport.link import Lane, Transport, TransportListener

Captured = pytest.CaptureFixture[str]
PEER, OTHER = PeerId(bytes(32)), PeerId(bytes([1] * 32))


def address(port: int, host: str = "ip4/127.0.0.1") -> str:
    return f"/{host}/tcp/{port}/p2p/{format_peer_id(PEER)}"


@contextmanager
def silent_port(backlog: int = 8) -> Iterator[int]:
    """A port that accepts connections and never answers."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen(backlog)
        yield bound.getsockname()[1]


@contextmanager
def full_port() -> Iterator[int]:
    """A port whose queue is full, so that the system drops further connections, as a firewall does."""
    with silent_port(backlog=0) as port, socket.create_connection(("127.0.0.1", port)):
        yield port


@contextmanager
def web_server() -> Iterator[int]:
    class Quiet(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Quiet) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def closed_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def test_each_kind_of_dead_address_has_its_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2p_diloco.app.cli.doctor_network.DIAL_SECONDS", 0.5)
    closed = closed_port()
    with silent_port() as silent, full_port() as full, web_server() as web:
        addresses = [
            *map(address, (closed, silent, full, web)),
            address(9, "dns4/no-such-host.invalid"),
            address(9, "ip4/255.255.255.255"),
        ]

        async def dial_all() -> list[DialledAddress]:
            return await asyncio.gather(*map(dial, addresses))

        dialled = asyncio.run(dial_all())
    kinds = [one.failure.failure for one in dialled if one.failure is not None]
    assert kinds == [
        DialFailure.REFUSED,
        DialFailure.SILENT,
        DialFailure.TIMED_OUT,
        DialFailure.OTHER_PROTOCOL,
        DialFailure.NO_NAME,
        DialFailure.NO_ROUTE,
    ]
    *findings, last = check_addresses(dialled)
    assert all(finding.result == "failure" and finding.remedy for finding in findings)
    assert findings[0].finding == f"127.0.0.1:{closed} refused"
    assert (last.result, last.finding) == ("failure", "0 of 6 answer")
    assert last.remedy.startswith("most likely another program answers at this address")


def test_dead_addresses_are_warnings_beside_one_that_answers() -> None:
    dead = NotReached("127.0.0.1:9 refused", DialFailure.REFUSED)
    dialled = [
        DialledAddress(peer=PEER, address=address(9), failure=dead),
        DialledAddress(peer=PEER, address=address(7), seconds=0.0123),
    ]
    assert [finding.result for finding in check_addresses(dialled)] == ["warning", "ok", "ok"]
    assert check_addresses(dialled)[1].finding == "127.0.0.1:7 is 12D3..Nz9ttwiw, in 12 ms"


def reply(host: str, reason: str = "") -> ReachReply:
    return ReachReply(nonce=1, host=host.encode(), port=31338, reason=reason.encode(), cycle=0, signature=NO_SIGNATURE)


@pytest.mark.parametrize(
    ("finding", "result", "text"),
    [
        (check_reach({}, ()), "ok", "outbound only, as configured"),
        (check_reach({}, (31338,)), "warning", "no peer has answered within 7 s whether it can dial this machine"),
        (check_reach({PEER: reply("8.8.4.4")}, (31338,)), "ok", "reachable at 8.8.4.4:31338, by 1 peer"),
        (
            check_reach({PEER: reply("192.168.1.7"), OTHER: reply("8.8.4.4", "8.8.4.4:31338 timed out")}, (31338,)),
            "ok",
            "reachable at 192.168.1.7:31338, within its own network, by 1 peer",
        ),
        (
            check_reach({PEER: reply("8.8.4.4", "8.8.4.4:31338 timed out")}, (31338,)),
            "warning",
            "no peer could dial this machine (8.8.4.4:31338 timed out); it trains, outbound only",
        ),
        (check_reach({PEER: reply("\x1b[2J")}, (31338,)), "ok", "reachable at 0.0.0.0:31338, within its own network"),
        (check_wall_clock([]), "warning", "no peer has told the run's time"),
        (check_wall_clock([0.2, 0.4, 900.0]), "ok", "this machine's clock is 0.4 s behind the run's time at 3 peers"),
        (
            check_wall_clock([-7200.0]),
            "warning",
            "this machine's clock is 2 h 00 min ahead of the run's time at 1 peer",
        ),
    ],
)
def test_answers_of_peers_become_findings(finding: Finding, result: str, text: str) -> None:
    assert finding.result == result
    assert finding.finding.startswith(text)


def changed(manifest: RunManifest, section: str, **values: Any) -> RunManifest:
    return manifest.model_copy(update={section: getattr(manifest, section).model_copy(update=values)})


def test_what_a_run_needs_is_compared_with_this_machine(run_file: Path) -> None:
    manifest = read_run_toml(run_file)
    listed = changed(manifest, "trust", mode="listed", peers=(format_peer_id(PEER),))
    code = changed(manifest, "model", source="python:mine:model")
    own = changed(manifest, "model", tensors=(("weight", (64, 64), "radial"),))
    plan = plan_run(manifest)
    checkpoints = 4 * 8 * plan.num_parameters
    findings = [
        check_listed(manifest, None),
        check_listed(listed, None),
        check_listed(listed, OTHER),
        check_listed(listed, PEER),
        check_model(manifest, None, []),
        check_model(manifest, None, ["transformers"]),
        check_model(code, None, []),
        check_model(own, None, []),
        check_run_disk(plan, PeerSettings(), int(1e9)),
        check_run_disk(plan, PeerSettings(), checkpoints),
        check_run_disk(plan, PeerSettings(), checkpoints - 1),
        check_run_disk(plan, PeerSettings(disk_cap=1e6), int(1e9)),
    ]
    expected = "ok failure failure ok ok failure failure warning ok warning failure failure"
    assert " ".join(finding.result for finding in findings) == expected
    assert "send this peer id" in findings[2].remedy
    assert findings[6].remedy.endswith("start with --model python:mine:model")


class Member(TransportListener):
    """Answers as a member does before a peer joins; its clock is two hours ahead, and it dials back."""

    def __init__(self, transport: Transport, manifest: bytes) -> None:
        self._transport = transport
        self._manifest = manifest

    def frame_received(self, peer: PeerId, lane: Lane, frame: bytes | bytearray | memoryview) -> None:
        message, answer = decode_message(frame), None
        match message:
            case ManifestRequest():
                answer = ManifestReply(manifest=self._manifest)
            case Ping(nonce=nonce):
                answer = Pong(nonce=nonce, clock_seconds=time.time() + 7200.0)
            case ReachRequest(ports=(port,)):
                answer = replace(reply("127.0.0.1"), port=port)
        assert answer is not None, f"a visitor sends no {type(message).__name__}"
        self._post(peer, answer)

    def _post(self, peer: PeerId, answer: Message) -> None:
        soon = asyncio.get_running_loop().time() + 5.0
        self._transport.post(peer, encode_message(answer), lane=Lane.CONTROL, deadline=soon)


def test_a_run_is_asked_by_a_visitor_that_leaves_nothing(run_file: Path, tmp_path: Path) -> None:
    key = create_key_file(tmp_path / "member.key")
    signed = read_founding(run_file).by(key.peer).signed
    state = tmp_path / "visitor"

    async def visit() -> list[Finding]:
        transport = Libp2pTransport(
            peer=key.peer,
            run=signed.manifest.digest(),
            identity_path=tmp_path / "member.key",
            host_maddrs=("/ip4/127.0.0.1/tcp/0",),
        )
        async with transport:
            transport.serve(Member(transport, signed.encode()))
            addresses = [*transport.listen_addresses(), f"/ip4/127.0.0.1/tcp/1/p2p/{format_peer_id(key.peer)}"]
            invite = f"p2pdiloco://{transport.run.hex()}?{'&'.join(f'b={one}' for one in addresses)}"
            settings = PeerSettings(state_directory=state, host_maddrs=("/ip4/127.0.0.1/tcp/0",))
            return await examine(invite, settings, lambda finding: None)

    findings = {finding.name: finding for finding in asyncio.run(visit())}
    assert [name for name, finding in findings.items() if finding.result == "failure"] == []
    assert findings["addresses"].finding == "1 of 2 answer"
    assert findings["manifest"].finding.startswith('"night", format 5, signed, from ')
    assert "2 h 00 min behind the run's time at 1 peer" in findings["run-clock"].finding
    assert findings["reach"].finding.startswith("reachable at 127.0.0.1:")
    assert {"daemon", "device", "listed", "model", "run-memory", "run-disk", "text"} <= findings.keys()
    assert not state.exists()


def test_a_port_that_is_taken_is_a_failure_and_the_daemon_is_tried_at_another(capsys: Captured) -> None:
    with silent_port() as port:
        assert main(["doctor", "--json", "--host-maddrs", f"/ip4/127.0.0.1/tcp/{port}"]) == 7
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["port"]["finding"] == f"port {port} on 127.0.0.1 is used by another program"
    assert checks["daemon"]["result"] == "ok"
