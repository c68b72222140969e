"""Without numba, NumPy does the work and nothing else changes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from p2p_diloco.codec import vectors

PROJECT = Path(__file__).resolve().parent.parent.parent

# All steps of a span: one peer contributes, a reducer averages with another peer's, and the first peer follows.
ONE_SPAN = """
import hashlib, sys
import numpy as np
from p2p_diloco.codec.codec import codec_named
from p2p_diloco.ids import ZERO_DIGEST, PeerId, SpanId, sha256
from p2p_diloco.codec.vectors import compiled_loops, why_no_loops
from p2p_diloco.outer.state import IslandSpan, InFlight
from p2p_diloco.outer.outer_step import MergeRule
from p2p_diloco.outer.outer_step import OuterRule
from p2p_diloco.outer.mean import mark_radial
from p2p_diloco.outer.state import genesis_state
from p2p_diloco.span_log import AbsorbedEntry
from p2p_diloco.protocol.actions import Part, ReduceSpan, Stage
from p2p_diloco.span.fused import contribute_span, follow_span
from p2p_diloco.span.reduce import Codecs, reduce_parts

ELEMENTS = 64 * 50
bits = np.random.Generator(np.random.Philox(key=3))
draw = lambda: bits.standard_normal(ELEMENTS, dtype=np.float32)
state, span, codec = genesis_state(draw(), ZERO_DIGEST), SpanId(0, 0), codec_named("int4")
codecs = Codecs(contribution=codec, row_mean=codec_named("int8"), entry=codec, rounds_stochastically=True,
                radial={span: mark_radial(0, ELEMENTS, ())})
local_N = state.anchor_N + np.float32(0.01) * draw()
sent = contribute_span(IslandSpan(state, InFlight(), local_N), round_index=0, codec=codec, max_norm_ratio=1.0)
payloads = [bytes(sent.payload), codec.encode(np.float32(0.02) * draw())]
parts = tuple(Part(peer=PeerId(sha256(payload)), payload=payload, weight=1.0 + place,
                   norm=codec.norm(payload, ELEMENTS)) for place, payload in enumerate(payloads))
order = ReduceSpan(round=0, span=span, stage=Stage.WHOLE, parts=parts, norm_limit=float("inf"), rounding_seed=b"seed")
mean = reduce_parts(order, codecs, ELEMENTS)
entry = AbsorbedEntry(digest=ZERO_DIGEST, round=0, roster=ZERO_DIGEST, radius=1.0, median_weight=1.0)
followed = follow_span(sent.advance, entry=entry, payload=mean.payload,
                       codecs=codecs, outer_rule=OuterRule(), merge_rule=MergeRule())
digest = hashlib.sha256(payloads[0] + bytes(mean.payload))
for array in (followed[0].anchor_N, followed[0].momentum_N, followed[2]):
    digest.update(array.tobytes())
print(digest.hexdigest(), compiled_loops() is not None, why_no_loops())
"""


def test_loops_exist_where_numba_is_installed() -> None:
    loops = vectors.compiled_loops()
    assert loops is not None
    assert loops is vectors.compiled_loops()
    with vectors.numpy_alone():
        assert vectors.compiled_loops() is None
    assert vectors.compiled_loops() is loops
    assert vectors.why_no_loops() == ""


def test_a_span_has_the_same_bytes_without_numba(tmp_path: Path) -> None:
    digest, has_loops, reason = one_span()
    assert (has_loops, reason) == ("True", "")
    (tmp_path / "numba.py").write_text("raise ModuleNotFoundError(\"No module named 'numba'\", name='numba')\n")
    assert one_span(tmp_path) == (digest, "False", "ModuleNotFoundError: No module named 'numba'")


def one_span(*first: Path) -> tuple[str, str, str]:
    """Return the output of a process that imports from these folders first."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (*first, PROJECT)))}
    run = subprocess.run([sys.executable, "-c", ONE_SPAN], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    digest, has_loops, reason = run.stdout.rstrip("\n").split(" ", 2)
    return digest, has_loops, reason
