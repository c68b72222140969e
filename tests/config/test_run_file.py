"""`run.toml` holds the manifest, and accepts names known from other projects."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.config.decoder import MODEL_SIZES
from p2p_diloco.config.manifest import SUITED_RATES, RunManifest
from p2p_diloco.config.run_file import (
    ALIASES,
    EXPLAINED,
    continued_values,
    draft_manifest,
    format_run_toml,
    manifest_of,
    read_run_toml,
    values_by_key,
    write_run_toml,
)
from p2p_diloco.config.run_plan import plan_run
from p2p_diloco.config.toml_document import known_keys
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import PeerId, format_peer_id
from p2p_diloco.signing import SigningKey

ORGANISER = SigningKey(bytes(32)).peer
NOW = 1_700_000_000.9


def drafted(**values: Any) -> RunManifest:
    return draft_manifest(organiser=ORGANISER, now_seconds=NOW, values=values)


def test_a_new_run_starts_now() -> None:
    manifest = draft_manifest(organiser=ORGANISER, now_seconds=NOW, name="mine")
    assert (manifest.name, manifest.organiser) == ("mine", format_peer_id(ORGANISER))
    assert (manifest.created, manifest.rounds.clock_start) == (1_700_000_000, 1_700_000_000.0)


@pytest.mark.parametrize(
    ("values", "weights"),
    [
        ({}, "equal"),
        ({"trust.weights": "tokens"}, "tokens"),
        ({"trust.mode": "listed", "trust.peers": [format_peer_id(ORGANISER)]}, "tokens"),
        ({"trust.mode": "listed", "trust.peers": [format_peer_id(ORGANISER)], "trust.weights": "equal"}, "equal"),
    ],
)
def test_islands_of_a_new_run_count_by_their_tokens_only_where_people_know_each_other(
    values: dict[str, Any], weights: str
) -> None:
    manifest = drafted(**values)
    assert manifest.trust.weights == weights
    rules = plan_run(manifest).rules
    assert rules.has_strangers == (weights == "equal")
    limits = (rules.weight_clip, rules.contribution_limit, rules.entry_limit)
    assert limits == ((4.0, 4.0, 6.0) if weights == "equal" else (256.0, 16.0, 24.0))


def test_a_run_that_continues_another_among_other_people_counts_as_a_new_one_among_them_would() -> None:
    friends = drafted(**{"trust.mode": "listed", "trust.peers": [format_peer_id(ORGANISER)]})
    assert drafted(**continued_values(friends, {})).trust.weights == "tokens"
    assert drafted(**continued_values(friends, {"trust.mode": "open", "trust.peers": ""})).trust.weights == "equal"


@pytest.mark.parametrize(
    ("values", "rate"),
    [
        ({}, 4e-3),
        ({"model.size": "small"}, 4e-3),
        ({"model.size": "base"}, 2e-3),
        ({"inner.optimizer": "adamw"}, 2e-3),
        ({"inner.optimizer": "adamw", "model.size": "base"}, 4e-4),
        ({"inner_lr": 1e-4}, 1e-4),
        ({"model": {"size": "small"}, "inner": {"learning_rate": 1e-3}}, 1e-3),
    ],
)
def test_the_inner_rate_suits_the_model_unless_it_is_given(values: dict[str, Any], rate: float) -> None:
    assert drafted(**values).inner.learning_rate == rate
    assert all(rates.keys() == MODEL_SIZES.keys() for rates in SUITED_RATES.values())


@pytest.mark.parametrize(
    ("values", "tokens"),
    [
        ({}, 256),
        ({"model.size": "small"}, 1024),
        ({"model.size": "base"}, 4096),
        ({"model.size": "base", "model.context": 512}, 2048),
        ({"model.source": "hf:llama", "model.context": 1024}, 4096),
        ({"model.source": "hf:llama"}, 256),  # `new` finds out the context, and drafts the run again
        ({"model.size": "base", "inner.step_tokens": 65536}, 65536),
    ],
)
def test_a_step_has_four_windows_unless_its_tokens_are_given(values: dict[str, Any], tokens: int) -> None:
    assert drafted(**values).inner.step_tokens == tokens


def test_a_batch_of_windows_is_explained() -> None:
    with pytest.raises(ConfigError) as caught:
        manifest_of({"inner": {"batch": 4}}, "run.toml")
    assert str(caught.value) == (
        "inner.batch in run.toml counts windows, but here a step is counted in predicted tokens; set inner.step_tokens "
        "to windows x model.context, such as 256 for 4 windows of 64 tokens"
    )


def test_a_written_file_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run.toml"
    manifest = drafted(
        name='a "run" \\ 🦙',
        model={"size": "small", "layers": 3},
        inner={"learning_rate": 1e-05},
        trust={"mode": "listed", "peers": [format_peer_id(ORGANISER)]},
    )
    write_run_toml(path, manifest)
    assert read_run_toml(path) == manifest
    assert read_run_toml(path).digest() == manifest.digest()


@given(
    name=st.text(min_size=1, max_size=64),
    rate=st.floats(1e-300, 1e300),
    peers=st.lists(st.binary(min_size=32, max_size=32).map(lambda key: format_peer_id(PeerId(key))), max_size=3),
    fingerprint=st.none() | st.binary(min_size=32, max_size=32).map(bytes.hex),
)
def test_every_manifest_survives_its_file(name: str, rate: float, peers: list[str], fingerprint: str | None) -> None:
    try:
        manifest = drafted(
            name=name,
            inner={"learning_rate": rate},
            data={"fingerprint": fingerprint},
            trust={"mode": "listed" if peers else "open", "peers": peers},
        )
    except ConfigError:
        return  # a name with control characters
    assert manifest_of(tomllib.loads(format_run_toml(manifest)), "the file") == manifest


def test_every_value_is_in_the_file_with_a_comment() -> None:
    text = format_run_toml(drafted())
    for key in known_keys(RunManifest):
        word = key.rpartition(".")[2]
        lines = [line for line in text.splitlines() if line.removeprefix("# ").startswith(f"{word} =")]
        assert lines, f"{key} is missing"
        assert all("  # " in line for line in lines)
    assert all(len(line) <= 140 for line in text.splitlines())
    assert "# Timing. Each round exchanges one fragment" in text


def test_an_unset_value_is_a_comment() -> None:
    assert "\n# layers =" in format_run_toml(drafted())
    assert "\nlayers = 3" in format_run_toml(drafted(model={"layers": 3}))


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="already exists and is never overwritten"):
        write_run_toml(path, drafted())
    assert path.read_text() == "precious"


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (1, "format = 1\n[limits]\nkappa = 2.0\n"),
        (3, 'format = 3\n[outer]\nlate = "drop"\n[limits]\nmax_norm_ratio = 4.0\n'),
    ],
)
def test_a_file_of_an_older_format_is_refused_with_what_to_do_and_left_as_it_is(
    tmp_path: Path, found: int, text: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    expected = (
        f"{path} is of format {found}, and this version of p2p-diloco reads format 5; use the version that made the "
        "run, or make a new run with `p2p-diloco new`"
    )
    with pytest.raises(ConfigError) as caught:
        read_run_toml(path)
    assert str(caught.value) == expected
    with pytest.raises(ConfigError) as caught:
        values_by_key(tomllib.loads(text), str(path))  # as the base of a new run
    assert str(caught.value) == expected
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("limits.retained_cycles", "did you mean rounds.retained_cycles?"),
        ("outer.late", "did you mean outer.mean?"),
        ("membership.heartbeat_seconds", "did you mean membership.group_size?"),
    ],
)
def test_a_key_of_an_older_format_is_unknown(key: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        values_by_key({key: 1}, "the file")
    assert str(caught.value) == f"unknown key {key} in the file; {hint}"


def test_overrides_take_precedence_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    write_run_toml(path, drafted())
    manifest = read_run_toml(path, {"outer.momentum": 0.25, "rounds": {"fragments": 2}, "name": "other"})
    assert (manifest.outer.momentum, manifest.rounds.fragments, manifest.name) == (0.25, 2, "other")
    assert manifest.outer.learning_rate == 0.7


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_aliases_are_accepted_at_the_top_level_and_in_their_section(alias: str) -> None:
    target = ALIASES[alias]
    assert target in known_keys(RunManifest)
    values: dict[str, float | str] = {"rounds.fragments": 2, "model.vocabulary": 256, "model.source": "hf:gpt2"}
    value = values.get(target, 0.25)
    others = {"outer.merge": "blend"} if target.endswith("alpha") else {}
    expected = drafted(**{target: value, **others})
    assert drafted(**{alias: value, **others}) == expected
    assert drafted(**{f"{target.partition('.')[0]}.{alias}": value, **others}) == expected


def test_an_alias_on_the_command_line_takes_precedence_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    write_run_toml(path, drafted())
    assert read_run_toml(path, {"outer_lr": 0.7}).outer.learning_rate == 0.7


def test_a_name_and_its_alias_together_are_an_error() -> None:
    with pytest.raises(ConfigError) as caught:
        manifest_of({"outer": {"learning_rate": 1.0, "outer_lr": 0.7}}, "run.toml")
    assert str(caught.value) == (
        "outer.learning_rate and its other name outer.outer_lr are both in run.toml; use only one of them"
    )


def test_an_alias_in_another_section_is_unknown() -> None:
    with pytest.raises(ConfigError, match=r"unknown key inner\.outer_lr in the new run"):
        drafted(**{"inner.outer_lr": 0.7})


@pytest.mark.parametrize("word", sorted(EXPLAINED))
@pytest.mark.parametrize("section", ["", "rounds."])
def test_names_without_a_counterpart_are_explained(word: str, section: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^{section}{word} in run\.toml (counts|names|cannot be set).*; (set|leave) "
    ):
        manifest_of({f"{section}{word}": 3}, "run.toml")


def test_an_unknown_key_in_a_file_names_the_file_and_the_nearest_key(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(format_run_toml(drafted()).replace("\nmomentum =", "\nmomentun ="))
    with pytest.raises(ConfigError) as caught:
        read_run_toml(path)
    assert str(caught.value) == f"unknown key outer.momentun in {path}; did you mean outer.momentum?"


def test_an_override_inside_a_value_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"cannot set name\.first: name is a value, not a section"):
        drafted(**{"name.first": "x"})


def test_values_by_key_are_flat_and_have_canonical_names() -> None:
    values = values_by_key({"outer_lr": 0.8, "rounds": {"fragments": 2}}, "base.toml")
    assert values == {"outer.learning_rate": 0.8, "rounds.fragments": 2}
    with pytest.raises(ConfigError, match=r"sync_every in base\.toml counts inner steps"):
        values_by_key({"sync_every": 8}, "base.toml")
