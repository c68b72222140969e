"""The run that a bench is."""

from __future__ import annotations

import pytest

from benchmarks.averaging.our_run import our_orders
from p2p_diloco.codec.codec import CODEC_NAMES
from p2p_diloco.config.manifest import decode_signed_manifest
from p2p_diloco.errors import ConfigError
from p2p_diloco.signing import SigningKey


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_its_manifest_is_signed_and_a_round_is_an_exchange_of_everything(codec: str) -> None:
    orders = our_orders(codec=codec, spans=8, turn_seconds=60.0)
    signed = decode_signed_manifest(bytes.fromhex(orders["manifest"]))
    manifest = signed.verify(signed.manifest.digest()).manifest
    assert SigningKey(bytes.fromhex(orders["organiser"])).peer is not None
    assert (manifest.rounds.fragments, manifest.rounds.spans_per_fragment) == (1, 8)
    assert manifest.codec.contribution == codec


def test_a_turn_ends_before_contributions_come_too_late() -> None:
    orders = our_orders(codec="int4", spans=8, turn_seconds=60.0)
    manifest = decode_signed_manifest(bytes.fromhex(orders["manifest"])).manifest
    assert 0.5 * manifest.rounds.round_seconds >= 60.0


def test_another_codec_is_refused() -> None:
    with pytest.raises(ConfigError, match="--codec is 'int5'; expected one of float32"):
        our_orders(codec="int5", spans=8, turn_seconds=60.0)
