"""The ports of a node are small: any object with these methods will do, and the real parts have them."""

from __future__ import annotations

import inspect

import pytest

from p2p_diloco.node.ports import EntryArchive, PeerMemory, SwarmObserver
from p2p_diloco.storage.archive import Archive
from p2p_diloco.storage.run_folder import RunFolder
from simulator.machine import Machine


@pytest.mark.parametrize(
    ("port", "given"),
    [
        (PeerMemory, RunFolder),
        (SwarmObserver, Machine),
        (EntryArchive, Archive),
    ],
    ids=["memory", "observer", "archive"],
)
def test_each_port_is_implemented_with_the_same_arguments(port: type, given: type) -> None:
    wanted = {name: call for name, call in vars(port).items() if inspect.isfunction(call) and name[0] != "_"}
    assert wanted
    for name, call in wanted.items():
        assert list(inspect.signature(getattr(given, name)).parameters) == list(inspect.signature(call).parameters)
