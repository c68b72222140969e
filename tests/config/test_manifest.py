"""The manifest has one canonical form, one digest and one signature."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any, get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from p2p_diloco.app.text.data import HELD_OUT_SHARE
from p2p_diloco.codec.codec import CODEC_NAMES, codec_named
from p2p_diloco.config.decoder import MODEL_SIZES
from p2p_diloco.config.inner_rule import InnerRule
from p2p_diloco.config.manifest import (
    MAX_MANIFEST_BYTES,
    CodecName,
    InnerSection,
    ModelSection,
    OuterSection,
    RoundsSection,
    RunManifest,
    SignedManifest,
    decode_signed_manifest,
)
from p2p_diloco.config.run_file import draft_manifest
from p2p_diloco.config.toml_document import given_keys, known_keys
from p2p_diloco.errors import ConfigError, FrameError
from p2p_diloco.ids import ZERO_DIGEST, format_peer_id, sha256
from p2p_diloco.outer.outer_step import MergeRule, OuterRule
from p2p_diloco.signing import SIGNATURE_BYTES, SigningKey

ORGANISER = SigningKey(bytes(32))
STRANGER = SigningKey(bytes(range(32)))
MANIFEST = draft_manifest(organiser=ORGANISER.peer, now_seconds=1_700_000_000.9)
SIGNED = MANIFEST.sign(ORGANISER)


def changed(**values: Any) -> RunManifest:
    return draft_manifest(organiser=ORGANISER.peer, now_seconds=1_700_000_000.9, values=values)


def sections(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for field in model.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from sections(field.annotation)


def test_defaults_are_those_of_the_protocol() -> None:
    assert (MANIFEST.outer.learning_rate, MANIFEST.outer.momentum) == (0.7, 0.3)
    assert MANIFEST.outer.merge == "keep"
    assert (MANIFEST.codec.contribution, MANIFEST.codec.entry) == ("int4", "int4")
    assert (MANIFEST.rounds.fragments, MANIFEST.rounds.spans_per_fragment) == (4, 16)
    assert (MANIFEST.membership.group_size, MANIFEST.rounds.retained_cycles) == (16, 16)
    assert MANIFEST.organiser == format_peer_id(ORGANISER.peer)
    assert MANIFEST.rounds.clock_start == 1_700_000_000


def test_a_manifest_and_its_sections_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        MANIFEST.name = "other"  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        MANIFEST.outer.momentum = 0.9  # type: ignore[misc]


def test_the_canonical_form_is_pinned() -> None:
    """Another form would give the same values another run id: change the manifest's format number with it."""
    assert MANIFEST.canonical_bytes() == json.dumps(
        json.loads(MANIFEST.canonical_bytes()), sort_keys=True, separators=(",", ":")
    ).encode("ascii")
    assert MANIFEST.canonical_bytes().startswith(
        b'{"codec":{"contribution":"int4","entry":"int4"},"created":1700000000,'
    )
    assert MANIFEST.digest() == sha256(MANIFEST.canonical_bytes())


def test_the_canonical_form_includes_every_value() -> None:
    started = changed(model={"start": "ab" * 32}, inner={"batch_rate": "root"})
    assert set(known_keys(RunManifest)) == set(given_keys(json.loads(started.canonical_bytes())))
    own = set(given_keys(json.loads(MANIFEST.canonical_bytes())))
    newer = {"model.start", "inner.batch_rate"}
    assert set(known_keys(RunManifest)) - own == newer, "runs from before these keys keep their id"
    assert decode_signed_manifest(started.sign(ORGANISER).encode()).manifest == started


def test_equal_manifests_have_equal_digests_however_they_were_written() -> None:
    one = changed(outer={"learning_rate": 7e-1, "momentum": 0.30}, inner={"embedding_rate": 8})
    assert one.digest() == MANIFEST.digest()


@pytest.mark.parametrize(
    "values",
    [
        {"name": "other"},
        {"created": 1},
        {"model.seed": 1},
        {"model.layers": 3},
        {"data.fingerprint": "0" * 64},
        {"data.path": "words.txt", "data.share": True, "data.files": "0" * 64},
        {"outer.momentum": 0.25},
        {"codec.entry": "int8"},
        {"rounds.round_seconds": 4.999},
        {"rounds.clock_start": 1_700_000_000.5},
        {"rounds.retained_cycles": 9},
        {"trust": {"mode": "listed", "peers": [format_peer_id(STRANGER.peer)]}},
    ],
)
def test_every_change_gives_another_run(values: dict[str, Any]) -> None:
    assert changed(**values).digest() != MANIFEST.digest()


def test_a_clock_in_milliseconds_is_refused() -> None:
    with pytest.raises(ConfigError, match="less than or equal to"):
        changed(**{"rounds.clock_start": 1_700_000_000_000.0})


def test_every_field_has_a_description() -> None:
    for section in sections(RunManifest):
        assert section.__doc__
        for name, field in section.model_fields.items():
            is_section = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
            assert is_section or field.description, f"{section.__name__}.{name} has no description"


def test_codec_names_are_those_that_exist() -> None:
    assert [codec_named(name).name for name in get_args(CodecName)] == list(get_args(CodecName))
    assert get_args(CodecName) == CODEC_NAMES


def test_rules_of_other_packages_have_the_same_names_and_defaults() -> None:
    """The manifest and these packages do not import each other's types; the code that connects them relies on this."""
    inner = InnerSection()  # a new run has the rate that suits its model
    rules = ((inner, InnerRule()), (MANIFEST.outer, OuterRule()))
    for section, rule in rules:
        own = asdict(rule)
        if isinstance(rule, InnerRule):
            own["step_tokens"] = own.pop("batch") * MODEL_SIZES["tiny"].context
            del own["final_share"]  # the same in all runs
        else:
            del own["planned_entries"]  # rounds.planned_cycles
        assert {**section.model_dump(), **own} == section.model_dump()
    merge = MergeRule()
    outer = MANIFEST.outer
    assert (outer.merge, outer.fragment_update_alpha) == (merge.kind, merge.alpha)
    assert set(get_args(ModelSection.model_fields["size"].annotation)) == set(MODEL_SIZES)
    changes = ModelSection(layers=1, width=64, heads=1, feed_forward=32, context=16).changes()
    assert asdict(replace(MODEL_SIZES["base"], **changes)).items() >= changes.items()
    assert MANIFEST.data.held_out == HELD_OUT_SHARE


def test_a_model_section_lists_its_differences_from_its_size() -> None:
    assert ModelSection().changes() == {}
    assert ModelSection(size="small", layers=3, context=64).changes() == {"layers": 3, "context": 64}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"outer.merge": "mix"}, "outer.merge = \"mix\" in the new run: should be 'keep' or 'blend'"),
        (
            {"outer.fragment_update_alpha": 0.5},
            'outer in the new run: fragment_update_alpha = 0.5 has no meaning with merge = "keep"; set merge = "blend" '
            "or leave it out",
        ),
        (
            {"codec.entry": "int3"},
            "codec.entry = \"int3\" in the new run: should be 'float32', 'bfloat16', 'int8' or 'int4'",
        ),
        ({"outer.momentum": 1.0}, "outer.momentum = 1.0 in the new run: should be less than 1"),
        (
            {"outer.learning_rate": float("inf")},
            "outer.learning_rate = Infinity in the new run: should be a finite number",
        ),
        (
            {"rounds.round_seconds": 0},
            "rounds.round_seconds = 0 in the new run: should be greater than or equal to 0.05",
        ),
        ({"rounds.fragments": 0}, "rounds.fragments = 0 in the new run: should be greater than or equal to 1"),
        ({"rounds.fragments": True}, "rounds.fragments = true in the new run: should be a valid integer"),
        (
            {"trust.mode": "listed"},
            'trust in the new run: mode = "listed" and peers belong together; set both or none',
        ),
        (
            {"trust": {"mode": "listed", "peers": ["Bob"]}},
            "trust.peers.0 in the new run: 'Bob' is not the id of an Ed25519 peer; expected text that begins with "
            "12D3KooW",
        ),
        (
            {"name": "\x1b[2J"},
            "name in the new run: expected text of at least one character, without control characters",
        ),
        (
            {"name": "safe\u202e gpj.exe"},
            "name in the new run: expected text of at least one character, without control characters",
        ),
        ({"name": ""}, "name in the new run: expected text of at least one character, without control characters"),
        ({"name": "x" * 65}, f'name = "{"x" * 65}" in the new run: should have at most 64 characters'),
        ({"data.fingerprint": "AB"}, "data.fingerprint in the new run: expected 64 hexadecimal digits in lower case"),
        (
            {"data.path": "words.txt", "data.share": True},
            "data in the new run: share = true and files belong together; set both or none "
            "(`p2p-diloco fingerprint PATH` prints files)",
        ),
        (
            {"data.path": "words.txt", "data.files": "0" * 64},
            "data in the new run: share = true and files belong together; set both or none "
            "(`p2p-diloco fingerprint PATH` prints files)",
        ),
        (
            {"data.share": True, "data.files": "0" * 64},
            'data in the new run: share = true has no meaning with path = "stdlib", which every machine has; '
            "leave it out",
        ),
        ({"inner.beta2": 1}, "inner.beta2 = 1 in the new run: should be less than 1"),
        (
            {"format": 1},
            "the new run is of format 1, and this version of p2p-diloco reads format 4; "
            "use the version that made the run, or make a new run with `p2p-diloco new`",
        ),
    ],
)
def test_invalid_values_are_refused_in_one_sentence(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        changed(**values)
    assert str(caught.value) == text


def test_the_organiser_is_a_peer() -> None:
    with pytest.raises(ValidationError, match="12D3KooW"):
        RunManifest(name="a", organiser="Bob", created=0, rounds=RoundsSection(clock_start=0))


def test_a_blend_may_have_alpha_one() -> None:
    assert OuterSection(merge="blend", fragment_update_alpha=1.0).fragment_update_alpha == 1.0


def test_a_signed_manifest_is_encoded_decoded_and_verified() -> None:
    encoded = SIGNED.encode()
    assert encoded == SIGNED.signature + MANIFEST.canonical_bytes()
    assert decode_signed_manifest(encoded) == SIGNED
    assert decode_signed_manifest(encoded).verify(MANIFEST.digest()).manifest == MANIFEST


@given(
    name=st.text(min_size=1, max_size=64).filter(lambda text: text.isprintable() and text.isascii()),
    learning_rate=st.floats(1e-9, 1e9),
    clock_start=st.floats(0, 1e11),
    seed=st.integers(0, 2**63 - 1),
)
@example(name="Grüße 🦙", learning_rate=0.1, clock_start=0.1, seed=0)
def test_every_manifest_survives_encoding(name: str, learning_rate: float, clock_start: float, seed: int) -> None:
    manifest = changed(
        name=name,
        outer={"learning_rate": learning_rate},
        rounds={"clock_start": clock_start},
        model={"seed": seed},
    )
    assert decode_signed_manifest(manifest.sign(ORGANISER).encode()).verify(manifest.digest()).manifest == manifest


def test_only_the_organiser_can_sign() -> None:
    with pytest.raises(ConfigError) as caught:
        MANIFEST.sign(STRANGER)
    assert str(caught.value) == (
        f"the key belongs to {format_peer_id(STRANGER.peer)}, but the run names {format_peer_id(ORGANISER.peer)} as "
        "its organiser; use the key that `p2p-diloco new` made with this run, or make a new run"
    )


def test_a_manifest_too_long_to_send_is_not_signed() -> None:
    # 8,000 characters of four bytes each, written as twelve; model_copy skips the checks.
    data = MANIFEST.data.model_copy(update={"path": "🦙" * 8000})
    with pytest.raises(ConfigError, match=f"expected at most {MAX_MANIFEST_BYTES}"):
        MANIFEST.model_copy(update={"data": data}).sign(ORGANISER)


def test_a_manifest_of_another_run_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        SIGNED.verify(ZERO_DIGEST)
    assert str(caught.value) == (
        f"the manifest has the digest {MANIFEST.digest().hex()}, but the invite names run {ZERO_DIGEST.hex()}; "
        "ask for a new invite"
    )


def test_a_signature_by_another_key_is_refused() -> None:
    forged = SignedManifest(manifest=MANIFEST, signature=STRANGER.sign(MANIFEST.canonical_bytes()))
    with pytest.raises(ConfigError, match=f"is not signed by its organiser {MANIFEST.organiser}; do not join it"):
        forged.verify(MANIFEST.digest())


def test_a_signature_without_the_domain_prefix_is_refused() -> None:
    bare = SignedManifest(manifest=MANIFEST, signature=ORGANISER.sign(MANIFEST.canonical_bytes()))
    with pytest.raises(ConfigError, match="is not signed by its organiser"):
        bare.verify(MANIFEST.digest())


def spliced(before: bytes, after: bytes) -> bytes:
    assert before in SIGNED.encode()
    return SIGNED.encode().replace(before, after)


@pytest.mark.parametrize(
    ("encoded", "claim"),
    [
        (b"", f"a manifest of 0 bytes; expected 65 to {MAX_MANIFEST_BYTES}"),
        (bytes(SIGNATURE_BYTES), "a manifest of 64 bytes"),
        (bytes(MAX_MANIFEST_BYTES + 1), f"a manifest of {MAX_MANIFEST_BYTES + 1} bytes"),
        (bytes(SIGNATURE_BYTES) + b"{}", "a manifest that this version cannot read (name: Field required)"),
        (bytes(SIGNATURE_BYTES) + b"[" * 60_000, "a manifest that this version cannot read (its text: "),
        (bytes(SIGNATURE_BYTES) + b"\xff", "a manifest that this version cannot read (its text: "),
        (
            spliced(b'"format":4', b'"format":1'),
            "a manifest of format 1, and this version of p2p-diloco reads format 4; use",
        ),
        (spliced(b'"format":4', b'"format":4,"more":1'), "(more: Extra inputs are not permitted)"),
        (spliced(b'"created":', b'"created": '), "a manifest that is not in canonical form"),
        (spliced(b'"format":4', b'"format":4,"format":4'), "a manifest that is not in canonical form"),
        (spliced(b'"momentum":0.3', b'"momentum":3e-1'), "a manifest that is not in canonical form"),
    ],
)
def test_bytes_that_are_not_a_manifest_are_a_bad_frame(encoded: bytes, claim: str) -> None:
    with pytest.raises(FrameError) as caught:
        decode_signed_manifest(encoded)
    assert claim in str(caught.value)
    assert len(str(caught.value)) < 300


@given(st.binary(max_size=300), st.integers(0, 900), st.integers(0, 30))
def test_any_bytes_decode_or_raise_frame_error(noise: bytes, place: int, removed: int) -> None:
    encoded = SIGNED.encode()
    for attempt in (noise, SIGNED.signature + noise, encoded[:place] + noise + encoded[place + removed :]):
        with contextlib.suppress(FrameError):
            decode_signed_manifest(attempt)
