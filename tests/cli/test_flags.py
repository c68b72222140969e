"""Flags hold what was typed; `settings.py` validates it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from p2p_diloco.cli.flags import SettingsFlags, Surroundings, settings_of
from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.errors import ConfigError

NOWHERE = Surroundings(overrides={}, environment={})


def test_every_setting_has_a_flag() -> None:
    assert {slot.name for slot in fields(SettingsFlags)} == set(PeerSettings.model_fields)


def test_flags_override_the_environment_which_overrides_files(tmp_path: Path) -> None:
    file = tmp_path / "peer.toml"
    file.write_text('port = 1\nthreads = 2\ndevice = "cpu"\n')
    around = Surroundings(files=(file,), overrides={}, environment={"P2P_DILOCO_PORT": "3", "P2P_DILOCO_THREADS": "4"})
    settings = settings_of(SettingsFlags(port="5"), around)
    assert (settings.port, settings.threads, settings.device) == (5, 4, "cpu")


def test_only_typed_flags_are_given() -> None:
    assert SettingsFlags(device="cpu").given() == {"device": "cpu"}


def test_an_override_that_belongs_to_the_run_is_refused_and_explained() -> None:
    around = Surroundings(overrides={"outer.momentum": 0.7}, environment={})
    with pytest.raises(ConfigError, match=r"outer\.momentum in the command line belongs to the run"):
        settings_of(SettingsFlags(), around)
    assert settings_of(SettingsFlags(), around.without_overrides()) == settings_of(SettingsFlags(), NOWHERE)


def test_lists_may_be_given_with_commas_or_one_by_one() -> None:
    settings = settings_of(SettingsFlags(host_maddrs=("/ip4/127.0.0.1/tcp/1,/ip4/127.0.0.1/tcp/2",)), NOWHERE)
    assert settings.host_maddrs == ("/ip4/127.0.0.1/tcp/1", "/ip4/127.0.0.1/tcp/2")
