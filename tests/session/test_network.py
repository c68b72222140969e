"""Addresses that a peer with a public name announces."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from p2p_diloco.session.network import with_local_ones

PUBLIC = "/ip4/45.10.0.1/tcp/31337"


@pytest.fixture(autouse=True)
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    def addresses(*found: str) -> list[SimpleNamespace]:
        kinds = {True: socket.AF_INET6, False: socket.AF_INET}
        return [SimpleNamespace(family=kinds[":" in each], address=each) for each in found]

    here = {"lo": addresses("127.0.0.1", "::1"), "eth0": addresses("192.168.1.10", "fe80::1%eth0")}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: here)


def test_machines_on_the_same_lan_get_the_local_address_after_the_public_one() -> None:
    found = with_local_ones((PUBLIC,), ("/ip4/0.0.0.0/tcp/31337",))
    assert found == (PUBLIC, "/ip4/192.168.1.10/tcp/31337")


def test_a_peer_that_listens_on_one_address_announces_no_other() -> None:
    assert with_local_ones((PUBLIC,), ("/ip4/45.10.0.1/tcp/31337",)) == (PUBLIC,)
