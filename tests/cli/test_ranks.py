"""The place of a process among the ranks of an island, and its device."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2p_diloco.app.cli.ranks import Place, device_of_rank, follow, place_among_ranks
from p2p_diloco.app.training import built_in
from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.errors import RANK_LOST_CODE, ConfigError
from p2p_diloco.island.island import Island
from p2p_diloco.island.ranks import RankLost


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        ({"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}, None),
        ({"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"}, Place(rank=3, count=4, local_rank=1)),
    ],
)
def test_the_place_is_that_of_torchrun(environment: dict[str, str], place: Place | None) -> None:
    assert place_among_ranks(environment) == place


@pytest.mark.parametrize("environment", [{"WORLD_SIZE": "2"}, {"WORLD_SIZE": "2", "RANK": "a", "LOCAL_RANK": "0"}])
def test_an_incomplete_place_is_an_error(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"WORLD_SIZE is set .* start the ranks of an island with torchrun, or with"):
        place_among_ranks(environment)


@pytest.mark.parametrize(
    ("setting", "local_rank", "num_gpus", "device"),
    [
        ("auto", 1, 0, "cpu"),
        ("cpu", 1, 4, "cpu"),
        ("auto", 3, 4, "cuda:3"),
        ("cuda", 0, 4, "cuda:0"),
    ],
)
def test_each_rank_has_a_device(setting: str, local_rank: int, num_gpus: int, device: str) -> None:
    assert device_of_rank(setting, local_rank, num_gpus=num_gpus) == device


@pytest.mark.parametrize(
    ("setting", "num_gpus", "reason"),
    [
        ("cuda:1", 4, "--device cuda:1 names one GPU, but each rank needs its own; leave --device out"),
        ("mps", 0, "an Apple GPU cannot be shared by several ranks; leave --ranks out"),
        ("auto", 2, "rank 2 of this machine has no GPU of its own, there are 2; start 2 ranks, or train on the"),
    ],
)
def test_a_rank_without_a_gpu_of_its_own_is_refused(setting: str, num_gpus: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        device_of_rank(setting, 2, num_gpus=num_gpus)


@pytest.fixture
def _handlers() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_handlers")
@pytest.mark.parametrize(
    ("error", "printed"),
    [
        (RankLost("rank 0 of this island has ended"), "rank 1: rank 0 of this island has ended\n"),
        (built_in.KnownError("rank 0 reports this itself"), ""),
    ],
)
def test_a_rank_says_why_it_ends_if_rank_0_cannot(
    error: Exception, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(island: Any, settings: PeerSettings) -> None:
        raise error

    monkeypatch.setattr(built_in, "follow_rank_0", fail)
    island = cast(Island, SimpleNamespace(ranks=SimpleNamespace(rank=1)))
    assert follow(island, PeerSettings()) == RANK_LOST_CODE
    assert capsys.readouterr().err == printed
