"""A document with known keys: typos are detected, and errors are one sentence."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from p2p_diloco.config.toml_document import (
    MAX_DOCUMENT_BYTES,
    given_keys,
    known_keys,
    nearest_key,
    parse_value,
    read_toml,
    validated,
    with_value,
)
from p2p_diloco.errors import ConfigError


class Wheel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    radius: float = 1.0
    spokes: tuple[int, ...] = ()


class Cart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    name: str
    front: Wheel = Wheel()
    horses: int = 1


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cart.toml"
    path.write_text('name = "é"\n[front]\nradius = 2\n', encoding="utf-8")
    assert read_toml(path) == {"name": "é", "front": {"radius": 2}}


@pytest.mark.parametrize(
    ("content", "claim"),
    [
        (b"name = ", "cart.toml is not TOML: Invalid value (at end of document)"),
        (b"\xff\xfe", "cart.toml is not UTF-8 text: byte 0 cannot be decoded"),
        (
            b"#" * (MAX_DOCUMENT_BYTES + 1),
            f"cart.toml is longer than {MAX_DOCUMENT_BYTES} bytes; is it the right file?",
        ),
        (b"a = " + b"[" * 100_000, "cart.toml is not TOML: "),
    ],
)
def test_a_file_that_is_not_toml_is_reported(tmp_path: Path, content: bytes, claim: str) -> None:
    path = tmp_path / "cart.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_toml(path)
    assert claim in str(caught.value)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file .*cart\.toml"):
        read_toml(tmp_path / "cart.toml")


def test_a_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*: Is a directory"):
        read_toml(tmp_path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4),
        ("0.5", 0.5),
        ("1e-3", 1e-3),
        ("true", True),
        ('["a", "b"]', ["a", "b"]),
        ('"4"', "4"),
        ("blend", "blend"),
        ("", ""),
        ("a\nb = 2", "a\nb = 2"),
        ("[" * 100_000, "[" * 100_000),
        ("True", "True"),
    ],
)
def test_command_line_words_become_values(text: str, value: Any) -> None:
    assert parse_value(text) == value


def test_values_are_set_by_dotted_key_without_changing_the_document() -> None:
    document = {"front": {"radius": 1}, "name": "a"}
    assert with_value(document, "front.radius", 2) == {"front": {"radius": 2}, "name": "a"}
    assert with_value(document, "back.left.radius", 3)["back"] == {"left": {"radius": 3}}
    assert document == {"front": {"radius": 1}, "name": "a"}


def test_a_value_has_no_keys() -> None:
    with pytest.raises(ConfigError, match=r"cannot set name\.first: name is a value, not a section"):
        with_value({"name": "a"}, "name.first", "b")


def test_keys_are_dotted_and_in_order() -> None:
    assert list(known_keys(Cart)) == ["name", "front.radius", "front.spokes", "horses"]
    assert list(given_keys({"front": {"radius": 1}, "empty": {}, "x": 1})) == ["front.radius", "empty", "x"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("front.radus", "front.radius"),
        ("radius", "front.radius"),
        ("back.radius", "front.radius"),
        ("hrses", "horses"),
        ("spoke", "front.spokes"),
        ("zzz", None),
    ],
)
def test_the_nearest_key_is_suggested(typed: str, meant: str | None) -> None:
    assert nearest_key(typed, known_keys(Cart)) == meant


def test_lists_become_tuples_and_integers_become_floats() -> None:
    cart = validated(Cart, {"name": "a", "front": {"radius": 2, "spokes": [1, 2]}}, "cart.toml")
    assert cart == Cart(name="a", front=Wheel(radius=2.0, spokes=(1, 2)))
    assert isinstance(cart.front.radius, float)


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ({"name": "a", "hrses": 2}, "unknown key hrses in cart.toml; did you mean horses?"),
        (
            {"name": "a", "front": {"zzz": 2}},
            "unknown key front.zzz in cart.toml; known are: front.radius, front.spokes",
        ),
        ({"name": "a", "zzz": 2}, "unknown key zzz in cart.toml; known are: name, front, horses"),
        ({"name": "a", "zzz": {}}, "unknown key zzz in cart.toml; known are: name, front, horses"),
        (
            {"name": "a", "front": {"radius": {"x": 1}}},
            "unknown key front.radius.x in cart.toml; did you mean front.radius?",
        ),
        ({}, "name is missing in cart.toml"),
        ({"name": "a", "front": 3}, "front in cart.toml is a value; expected a section, [front]"),
        ({"name": "a", "horses": "2"}, 'horses = "2" in cart.toml: should be a valid integer'),
        ({"name": "a", "horses": 1.5}, "horses = 1.5 in cart.toml: should be a valid integer"),
        ({"name": 1}, "name = 1 in cart.toml: should be a valid string"),
        ({"name": "a", "horses": {}}, "horses in cart.toml: should be a valid integer"),
        ({"name": "a", "front": {"spokes": [1, "x"]}}, 'front.spokes.1 = "x" in cart.toml: should be a valid integer'),
    ],
)
def test_an_error_is_one_sentence(document: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validated(Cart, document, "cart.toml")
    assert str(caught.value) == text


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["name", "front", "horses", "radius"]), values))
def test_any_document_validates_or_raises_config_error(document: dict[str, Any]) -> None:
    with contextlib.suppress(ConfigError):
        validated(Cart, document, "cart.toml")
