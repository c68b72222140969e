"""A machine's private settings come in layers, and each typo is reported with its layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from p2p_diloco.config.settings import (
    BOOTSTRAP_PORT,
    LIMITS,
    PeerSettings,
    bytes_per_second,
    flags_as_keys,
    load_settings,
)
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import format_peer_id
from p2p_diloco.signing import SigningKey

NAME = format_peer_id(SigningKey(bytes(32)).peer)
PEER = f"/ip4/203.0.113.7/tcp/31337/p2p/{NAME}"
HERE = "/ip4/127.0.0.1/tcp/0"


def settings_file(folder: Path, text: str, name: str = "peer.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_joiner_needs_no_settings() -> None:
    settings = load_settings()
    assert settings == PeerSettings()
    assert (settings.device, settings.port, settings.initial_peers) == ("auto", None, ())
    assert settings.state_directory.name == "p2p-diloco"
    assert settings.identity_file == settings.state_directory / "identity.key"


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load_settings().port = 1  # type: ignore[misc]


def test_flags_override_environment_files_and_defaults(tmp_path: Path) -> None:
    file = settings_file(tmp_path, 'port = 1\nthreads = 1\ndevice = "cuda:1"\npublic_name = "file"')
    environment = {"P2P_DILOCO_PORT": "2", "P2P_DILOCO_THREADS": "2", "PATH": "x", "P2P_DILOCO_PUBLIC_NAME": ""}
    settings = load_settings(flags={"port": 3, "threads": None}, environment=environment, files=[file])
    assert (settings.port, settings.threads, settings.device, settings.public_name) == (3, 2, "cuda:1", "file")
    assert settings.dial_out_only is False


def test_a_later_file_overrides_an_earlier_one(tmp_path: Path) -> None:
    first = settings_file(tmp_path, "port = 1\nthreads = 1", "first.toml")
    second = settings_file(tmp_path, "port = 2", "second.toml")
    settings = load_settings(files=[first, second])
    assert (settings.port, settings.threads) == (2, 1)


def test_dashes_and_underscores_are_equivalent(tmp_path: Path) -> None:
    file = settings_file(tmp_path, f'host-maddrs = ["{HERE}"]')
    assert load_settings(files=[file]).host_maddrs == (HERE,)
    assert load_settings(flags={"initial-peers": [PEER]}).initial_peers == (PEER,)
    assert load_settings(flags={"--initial_peers": (PEER,)}).initial_peers == (PEER,)


@pytest.mark.parametrize("separator", [",", " ", ", ", "\n"])
def test_lists_given_as_text_are_split(separator: str) -> None:
    text = separator.join([PEER, PEER.replace("31337", "1")])
    expected = (PEER, PEER.replace("31337", "1"))
    assert load_settings(environment={"P2P_DILOCO_INITIAL_PEERS": text}).initial_peers == expected
    assert load_settings(flags={"initial_peers": [text]}).initial_peers == expected
    assert load_settings(flags={"initial_peers": text}).initial_peers == expected


def test_an_empty_list_does_not_override(tmp_path: Path) -> None:
    file = settings_file(tmp_path, f'initial_peers = ["{PEER}"]')
    assert load_settings(flags={"initial_peers": ()}, files=[file]).initial_peers == (PEER,)


def test_text_stays_text_and_numbers_are_parsed() -> None:
    environment = {
        "P2P_DILOCO_DATA": "007",
        "P2P_DILOCO_PUBLIC_NAME": "10",
        "P2P_DILOCO_THREADS": "2",
        "P2P_DILOCO_PORT": "0",
    }
    settings = load_settings(environment=environment)
    assert (settings.data, settings.public_name, settings.threads, settings.port) == ("007", "10", 2, 0)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("port", "7", 7),
        ("threads", "2", 2),
        ("keep_checkpoints", "9", 9),
        ("windows_at_once", "4", 4),
        ("ranks", "2", 2),
        ("nice", "5", 5),
        ("gpu_duty", "0.5", 0.5),
        ("gpu_duty", "none", None),
        ("no_port_mapping", "yes", True),
        ("keep_trace", "1", True),
        ("initial_peers", f"{PEER}, {PEER}", (PEER, PEER)),
        ("disk_free", "2GB", 2e9),
    ],
)
def test_every_type_can_be_given_as_text(key: str, text: str, value: object) -> None:
    for settings in (load_settings(environment={f"P2P_DILOCO_{key.upper()}": text}), load_settings(flags={key: text})):
        assert getattr(settings, key) == value


@pytest.mark.parametrize(("text", "value"), [("1", True), ("Yes", True), ("true", True), ("0", False), ("NO", False)])
def test_switches_accept_the_usual_words(text: str, value: bool) -> None:
    assert load_settings(environment={"P2P_DILOCO_DIAL_OUT_ONLY": text}).dial_out_only is value


def test_the_home_directory_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    settings = load_settings(
        environment={"P2P_DILOCO_STATE_DIRECTORY": "~/state", "P2P_DILOCO_DATA": "~/texts/*.txt"},
        flags={"identity_path": Path("~/id")},
    )
    assert settings.state_directory == Path("/home/ada/state")
    assert settings.identity_file == Path("/home/ada/id")
    assert settings.data == "/home/ada/texts/*.txt"


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        (
            {"environment": {"P2P_DILOCO_PROT": "1"}},
            "unknown variable P2P_DILOCO_PROT in the environment; did you mean P2P_DILOCO_PORT?",
        ),
        ({"flags": {"devise": "cpu"}}, "unknown key devise in the command line; did you mean device?"),
        ({"flags": {"port": 70000}}, "port = 70000 in the command line: should be less than or equal to 65535"),
        ({"environment": {"P2P_DILOCO_PORT": "http"}}, 'port = "http" in the environment: should be a valid integer'),
        (
            {"environment": {"P2P_DILOCO_DIAL_OUT_ONLY": "maybe"}},
            'dial_out_only = "maybe" in the environment: should be a valid boolean',
        ),
        (
            {"flags": {"device": "gpu"}},
            "device in the command line: unknown device 'gpu'; expected auto, cpu, cuda, cuda:<number> or mps",
        ),
        (
            {"flags": {"public_name": "http://x"}},
            "public_name in the command line: 'http://x' is not a host name or IP address; expected one such as "
            "bootstrap.example.org",
        ),
        (
            {"flags": {"outer.momentum": 0.5}},
            "outer.momentum in the command line belongs to the run and is the same for all peers; only the "
            "organiser can change it, in run.toml",
        ),
        (
            {"flags": {"port": 1, "host_maddrs": [HERE]}},
            f"port 1 and host_maddrs {HERE} both name a port to listen on; use only one of them",
        ),
        (
            {"flags": {"dial_out_only": True}, "environment": {"P2P_DILOCO_PUBLIC_NAME": "example.org"}},
            "dial_out_only contradicts host_maddrs, announce_maddrs and public_name; use only one of them",
        ),
    ],
)
def test_an_error_names_its_layer(layers: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(**layers)
    assert str(caught.value) == text


@pytest.mark.parametrize("key", ["host_maddrs", "announce_maddrs"])
def test_addresses_of_this_machine_are_checked(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key} in the command line: address .* leave out /p2p/…"):
        load_settings(flags={key: [PEER]})


def test_addresses_of_other_peers_must_name_the_peer() -> None:
    with pytest.raises(ConfigError, match=r"initial_peers in the command line: address .* has no peer id"):
        load_settings(flags={"initial_peers": ["/ip4/203.0.113.7/tcp/31337"]})


def test_an_unknown_variable_that_resembles_no_known_one_lists_them() -> None:
    with pytest.raises(ConfigError, match=r"unknown variable P2P_DILOCO_ZZZ .*; known are: P2P_DILOCO_DEVICE, "):
        load_settings(environment={"P2P_DILOCO_ZZZ": "1"})


def test_an_unknown_key_in_a_file_names_the_file(tmp_path: Path) -> None:
    file = settings_file(tmp_path, "prot = 1")
    with pytest.raises(ConfigError) as caught:
        load_settings(files=[file])
    assert str(caught.value) == f"unknown key prot in {file}; did you mean port?"


def test_a_value_of_the_run_is_not_a_setting(tmp_path: Path) -> None:
    file = settings_file(tmp_path, '[model]\nsize = "base"')
    with pytest.raises(
        ConfigError, match=r"model\.size in .*peer\.toml belongs to the run and is the same for all peers"
    ):
        load_settings(files=[file])


def test_data_is_a_setting_although_the_run_has_a_section_of_that_name(tmp_path: Path) -> None:
    assert load_settings(files=[settings_file(tmp_path, 'data = "texts"')]).data == "texts"


def test_a_peer_listens_on_the_configured_addresses() -> None:
    assert PeerSettings().listen_addresses(BOOTSTRAP_PORT) == ("/ip4/0.0.0.0/tcp/31337",)
    assert PeerSettings(port=5).listen_addresses(BOOTSTRAP_PORT) == ("/ip4/0.0.0.0/tcp/5",)
    assert PeerSettings(host_maddrs=(HERE,)).listen_addresses(0) == (HERE,)
    assert PeerSettings(dial_out_only=True).listen_addresses(0) == ()


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("example.org", "/dns4/example.org/tcp/7"),
        ("203.0.113.7", "/ip4/203.0.113.7/tcp/7"),
        ("2001:db8::1", "/ip6/2001:db8::1/tcp/7"),
    ],
)
def test_a_public_name_becomes_an_address(name: str, address: str) -> None:
    assert PeerSettings(public_name=name).announced_addresses(7) == (address,)


def test_a_public_name_is_announced_with_the_ports_listened_on() -> None:
    hosts = ("/ip4/0.0.0.0/tcp/4000", "/ip6/::/tcp/4000", "/ip4/0.0.0.0/tcp/5000")
    settings = PeerSettings(public_name="example.org", host_maddrs=hosts)
    assert settings.announced_addresses(7) == ("/dns4/example.org/tcp/4000", "/dns4/example.org/tcp/5000")
    assert PeerSettings(public_name="example.org", port=9).announced_addresses(7) == ("/dns4/example.org/tcp/9",)


@pytest.mark.parametrize("settings", [{}, {"port": 0}, {"host_maddrs": ("/ip4/0.0.0.0/tcp/0",)}])
def test_a_public_name_needs_a_known_port(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="set one, such as --port 31337"):
        PeerSettings(public_name="example.org", **settings).announced_addresses(0)


def test_full_addresses_override_the_public_name() -> None:
    settings = PeerSettings(public_name="example.org", announce_maddrs=("/ip4/203.0.113.7/tcp/1",))
    assert settings.announced_addresses(7) == ("/ip4/203.0.113.7/tcp/1",)
    assert PeerSettings().announced_addresses(7) == ()


def test_caps_are_rates_in_every_layer(tmp_path: Path) -> None:
    file = settings_file(tmp_path, 'max_upload = "20mbit"\nmax_download = "2gbit"')
    assert load_settings(files=[file]).max_upload == 20e6
    environment = {"P2P_DILOCO_MAX_UPLOAD": "10mbit"}
    settings = load_settings(flags={"max_upload": "500kbit"}, environment=environment, files=[file])
    assert (settings.max_upload, settings.max_download) == (500e3, 2e9)
    assert load_settings(environment=environment, files=[file]).max_upload == 10e6
    assert (load_settings().max_upload, load_settings().max_download) == (None, None)
    assert load_settings(files=[settings_file(tmp_path, "max_upload = 1000000")]).max_upload == 1e6


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("choose another place with --state-directory", "choose another place with state_directory"),
        ("limit this with --max-upload and --max-download", "limit this with max_upload and max_download"),
        ("set one, such as --port 31337", "set one, such as port 31337"),
        ("/tmp/x--port is taken; see --host-maddrs", "/tmp/x--port is taken; see host_maddrs"),
        ("bootstrap run.toml --start model", "bootstrap run.toml --start model"),
    ],
)
def test_flags_in_texts_become_keys_for_python_users(text: str, expected: str) -> None:
    assert flags_as_keys(text) == expected


@pytest.mark.parametrize("name", ["max_upload", "max_download"])
def test_an_invalid_cap_error_names_what_is_expected(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(flags={name: "fast"})
    assert str(caught.value) == (
        f"{name} in the command line: it is 'fast'; expected a rate with its unit, kbit, mbit or gbit per second, such "
        "as 20mbit"
    )
    with pytest.raises(ConfigError, match=r"64 kbit/s is too slow to take part .*at least 128 kbit/s"):
        load_settings(environment={f"P2P_DILOCO_{name.upper()}": "64kbit"})


def test_caps_are_converted_to_bytes() -> None:
    assert bytes_per_second(None) is None
    assert bytes_per_second(20e6) == 2.5e6


LIMIT_TEXTS = {
    "max_upload": "5000kbit",
    "max_download": "20000kbit",
    "monthly_quota": "500000MB",
    "hours": "22:00-07:00",
    "days": "sat,sun",
    "on_battery": "pause",
    "disk_cap": "20000MB",
    "disk_free": "1500MB",
    "nice": "10",
    "gpu_duty": "0.5",
}


def test_limits_are_settings_like_others_and_can_be_written_as_text(tmp_path: Path) -> None:
    environment = {f"P2P_DILOCO_{key.upper()}": text for key, text in LIMIT_TEXTS.items()}
    file = settings_file(tmp_path, "\n".join(f'{key} = "{text}"' for key, text in LIMIT_TEXTS.items() if key < "g"))
    settings = load_settings(environment=environment)
    assert set(LIMIT_TEXTS) == set(LIMITS)
    assert settings.limit_texts() == LIMIT_TEXTS
    assert load_settings(flags=LIMIT_TEXTS) == settings
    assert (settings.monthly_quota, settings.disk_free, settings.nice, settings.gpu_duty) == (500e9, 1.5e9, 10, 0.5)
    assert load_settings(files=[file]).disk_cap == 20e9
    hours, days = settings.schedule
    assert (str(hours), str(days)) == ("22:00-07:00", "sat,sun")
    assert load_settings().limit_texts() == {}
    assert load_settings().schedule == (None, None)


def test_limits_change_one_by_one_and_none_removes_them() -> None:
    before = load_settings(flags=LIMIT_TEXTS)
    after = before.with_limits({"max_upload": "none", "hours": "NONE", "nice": "3"}, "the command line")
    assert (after.max_upload, after.hours, after.nice, after.days) == (None, None, 3, "sat,sun")
    free = before.with_limits(dict.fromkeys((*LIMIT_TEXTS.keys() - {"on_battery"},), "none"), "the command line")
    assert free.with_limits({"on_battery": "run"}, "the command line").limit_texts() == {}


@pytest.mark.parametrize(
    ("key", "text", "reason"),
    [
        ("monthly_quota", "500", "it is '500'; expected an amount with its unit"),
        ("monthly_quota", "10kb", "10.0 kB is too little; expected at least 1.0 MB"),
        ("disk_cap", "lots", "it is 'lots'; expected an amount with its unit"),
        ("hours", "at night", "it is 'at night'; expected two different times of the day"),
        ("days", "weekend", "it is 'weekend'; expected days of the week"),
        ("nice", "-5", "greater than or equal to 0"),
        ("gpu_duty", "1.5", "less than or equal to 1"),
        ("on_battery", "stop", "'pause' or 'run'"),
        ("port", "31337", "cannot be changed while a peer runs; expected max_upload, "),
    ],
)
def test_a_limit_that_is_none_is_refused_with_what_is_expected(key: str, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_settings().with_limits({key: text}, "the command line")
