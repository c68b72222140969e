"""A new run continues what another has learnt: from a peer's state or an export, for every kind of model."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import resource
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from session_stage import Watcher
from small_run import ORGANISER, start_states, write_text
from test_founding import KINDS, exported, kind_plan
from test_shared_text import Tokens

from p2p_diloco import found, new_run
from p2p_diloco.app.cli.app import main
from p2p_diloco.app.models import run_model
from p2p_diloco.app.models.archivist import Archivist
from p2p_diloco.app.models.run_model import make_start
from p2p_diloco.app.text.token_shards import TokenText
from p2p_diloco.codec.vectors import Vector
from p2p_diloco.config.key_file import create_key_file, read_key_file, write_key_file
from p2p_diloco.config.manifest import RunManifest
from p2p_diloco.config.run_file import changed_keys, format_run_toml, read_run_toml
from p2p_diloco.config.run_plan import RunPlan, plan_run
from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.errors import ConfigError, NetworkError, P2PDilocoError
from p2p_diloco.ids import ZERO_DIGEST, SpanId, format_peer_id
from p2p_diloco.island.parameters import LocalParameters
from p2p_diloco.outer.state import genesis_state
from p2p_diloco.session.ending import StopRequest
from p2p_diloco.session.founding import genesis_digest, read_start, start_from
from p2p_diloco.session.network import Libp2pNetwork
from p2p_diloco.session.peer_plan import PeerPlan, read_founding
from p2p_diloco.session.start import run_peer
from p2p_diloco.signing import SigningKey
from p2p_diloco.storage.checkpoint import CheckpointFolder, save_checkpoint
from p2p_diloco.storage.export_folder import ExportPlan
from p2p_diloco.storage.identity import load_or_create_identity
from p2p_diloco.storage.run_folder import MANIFEST_FILE, RunFolder

Captured = pytest.CaptureFixture[str]
MODULE = """import torch
def build():
    net = torch.nn.Linear(4, 6)
    net.loss = lambda windows: net(windows[:, :4].float()).square().mean()
    return net
"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def kept(plan: RunPlan, start: dict[SpanId, Vector], state: str = "state", key: SigningKey = ORGANISER) -> Path:
    """Write a checkpoint as a peer does; return its path."""
    folder = RunFolder(Path(state), plan.rules.run)
    folder.write(MANIFEST_FILE, plan.manifest.sign(key).encode())
    checkpoints = CheckpointFolder(folder.path, run=plan.rules.run, elements=plan.rules.span_elements, keep=3)
    states = {span: genesis_state(start_N, ZERO_DIGEST) for span, start_N in start.items()}
    checkpoints.save(
        {span: dataclasses.replace(s, head=dataclasses.replace(s.head, round=9)) for span, s in states.items()}
    )
    return checkpoints.paths()[-1]


def continued(path: str = "run2.toml") -> tuple[RunManifest, dict[SpanId, Vector]]:
    """Return a new run and what its founder would start from."""
    manifest = read_run_toml(Path(path))
    return manifest, read_start(plan_run(manifest), Path(path).with_suffix(".start.safetensors"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", ["state", "export"])
def test_a_run_continues_every_kind_of_model_with_other_terms(kind: str, source: str) -> None:
    start, plan = exported(kind, Path("export")), kind_plan(kind)
    kept(plan, start)
    assert main(["new", "run2.toml", "--continue", source, "--inner.learning_rate", "0.01"]) == 0
    manifest, own = continued()
    assert genesis_digest(own) == genesis_digest(start)
    changed = changed_keys(plan.manifest, manifest)
    assert changed.keys() == {
        "organiser", "created", "rounds.clock_start", "model.start", "inner.learning_rate"
    }  # fmt: skip
    assert manifest.inner.learning_rate == 0.01


def test_the_start_does_not_depend_on_the_fragments_of_either_run() -> None:
    start = exported("built-in", Path("export"))
    assert main(["new", "run2.toml", "--continue", "export", "--rounds.fragments", "3", "--name", "again"]) == 0
    manifest, own = continued()
    assert (manifest.name, manifest.rounds.fragments) == ("again", 3)
    assert np.array_equal(*(np.sort(np.concatenate(list(vectors.values()))) for vectors in (start, own)))


def test_rounds_are_chosen_anew_where_their_conditions_are_given() -> None:
    exported("built-in", Path("export"))
    assert (
        main(["new", "a.toml", "--continue", "export", "--step-seconds", "0.5", "--islands", "2", "--hours", "2"]) == 0
    )
    manifest, _ = continued("a.toml")
    assert (manifest.rounds.round_seconds, manifest.rounds.fragments, manifest.rounds.planned_steps) == (4.0, 1, 8)
    assert (manifest.rounds.planned_cycles, manifest.inner.schedule, manifest.outer.final_share < 1) == (
        1800,
        "cosine",
        True,
    )
    assert manifest.inner.step_tokens == 24, "the rest is taken over"


def test_a_function_of_a_changed_module_that_builds_the_same_model_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    Path("module_a.py").write_text(MODULE)
    assert (
        main(
            [
                "new",
                "run.toml",
                "--model",
                "python:module_a:build",
                "--model.context",
                "12",
                "--rounds.round_seconds",
                "8",
            ]
        )
        == 0
    )
    manifest = read_run_toml(Path("run.toml"))
    plan = plan_run(manifest)
    start = make_start(plan, own="python:module_a:build")
    kept(plan, start, key=read_key_file(Path("organiser.key")))
    Path("module_a.py").write_text(MODULE + "# no dropout\n")
    assert main(["new", "run2.toml", "--continue", "state"]) == 0
    again, own = continued()
    assert again.model.code != manifest.model.code
    assert genesis_digest(own) == genesis_digest(start)
    Path("module_a.py").write_text(MODULE.replace("4, 6", "4, 7"))
    sys.modules.pop("module_a")
    assert main(["new", "run3.toml", "--continue", "state"]) == 2
    assert "tensor weight has shape (7, 4) here and (6, 4) in the run" in capsys.readouterr().err


def test_a_text_of_the_same_tokenizer_may_replace_the_other(tmp_path: Path, capsys: Captured) -> None:
    tokens = Tokens(tmp_path)
    text = TokenText(tokens.root)
    values = {"data.path": "own", "data.fingerprint": "ab" * 32, "data.tokenizer": text.index.tokenizer}
    plan = kind_plan("built-in", **values, **{"model.vocabulary": 1000})
    start = make_start(plan)
    kept(plan, start)
    assert main(["new", "run2.toml", "--continue", "state", "--data.path", "own"]) == 0
    manifest, own = continued()
    assert manifest.data.fingerprint == text.fingerprint.hex()
    assert genesis_digest(own) == genesis_digest(start)
    capsys.readouterr()
    write_text(tmp_path)
    before = sorted(os.listdir())
    assert main(["new", "run3.toml", "--continue", "state", "--data.path", "words.txt"]) == 2
    assert capsys.readouterr().err.startswith(
        "p2p-diloco: error: the tokens of words.txt are not those of the run; a run that continues another keeps its"
    )
    bytes_plan = kind_plan("built-in")
    kept(bytes_plan, make_start(bytes_plan), "bytes")
    assert main(["new", "run3.toml", "--continue", "bytes", "--data.path", "own"]) == 2
    assert "the tokens of own are not those of the run" in capsys.readouterr().err
    assert sorted(os.listdir()) == sorted([*before, "bytes"])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def fill(path: Path, value: float) -> None:
    tensors = load_file(path)
    tensors["model.norm.weight"].fill_(value)
    save_file(tensors, path)


def replace(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


TO_EXPORT = ["--continue", "export"]


@pytest.mark.parametrize(
    ("change", "words", "code", "said"),
    [
        (
            lambda: None,
            ["--continue", "nowhere"],
            2,
            "no peer has run with the state directory nowhere; name another with --con",
        ),
        (lambda: Path("empty").mkdir(), ["--continue", "empty"], 2, "no peer has run with the state directory empty"),
        (
            lambda: cut(newest_file()),
            ["--continue", "state"],
            4,
            "0.safetensors is broken .* and is not used; there is no sound one in",
        ),
        (lambda: newest_file().unlink(), ["--continue", "state"], 4, "the peer in state has no checkpoint yet"),
        (
            lambda: kept(OTHER, make_start(OTHER)),
            ["--continue", "state"],
            2,
            "state holds checkpoints of 2 runs: .*; choose one with --run",
        ),
        (lambda: None, ["--continue", "state", "--run", "xyz"], 2, "0 of them begin with xyz; choose one with --run"),
        (
            lambda: None,
            [*TO_EXPORT, "--run", "ab"],
            2,
            "--run chooses a run of a state directory, and export is an export",
        ),
        (
            lambda: None,
            ["--run", "ab"],
            2,
            "--run chooses the run to continue, but there is no --continue; leave it out",
        ),
        (
            lambda: None,
            [*TO_EXPORT, "--model", "hf:x"],
            2,
            "keeps its model; leave model.source out, or do not continue it",
        ),
        (lambda: None, [*TO_EXPORT, "--model.width", "32"], 2, "keeps its model; leave model.width out"),
        (lambda: None, [*TO_EXPORT, "--rounds.fragments", "99"], 2, "cannot split .* tensors into 99 fragments"),
        (lambda: None, [*TO_EXPORT, "--inner.learning_rate", "-1"], 2, "inner.learning_rate = -1 in the new run"),
        (lambda: None, [*TO_EXPORT, "--data.path", "gone"], 2, "data.path: there is no file or folder gone"),
        (lambda: None, [*TO_EXPORT, "--islands", "0"], 2, "--islands is 0; expected at least 1"),
        (
            lambda: Path("run2.start.safetensors").touch(),
            TO_EXPORT,
            2,
            "run2.start.safetensors already exists and is never",
        ),
        (lambda: cut(Path("export/model.safetensors")), TO_EXPORT, 2, "model.safetensors is not a safetensors file"),
        (
            lambda: fill(Path("export/model.safetensors"), float("nan")),
            TO_EXPORT,
            2,
            "model.norm.weight in .* holds values other than finite",
        ),
        (
            lambda: replace(Path("export/config.json"), '_heads": 2', '_heads": 4'),
            TO_EXPORT,
            2,
            "num_attention_heads is 4 in .* and 2 in",
        ),
        (
            lambda: replace(Path("export/run.toml"), "width = 16", "width = 32"),
            TO_EXPORT,
            2,
            r"has shape \(256, 16\) in .* and \(256, 32\) in the",
        ),
        (
            lambda: Path("export/run.toml").unlink(),
            TO_EXPORT,
            2,
            "export is an export without run.toml, which tells what to continue",
        ),
        (lambda: Path("export/run.toml").write_text("["), TO_EXPORT, 2, "export/run.toml is not TOML"),
        (
            lambda: replace(Path("export/run.toml"), '"stdlib"', '"(left out of the export)"'),
            TO_EXPORT,
            2,
            "an export does not name the text of its run; name your copy with --data.path",
        ),
    ],
)
def test_what_cannot_be_continued_is_refused_and_leaves_no_files(
    change: Any, words: list[str], code: int, said: str, capsys: Captured
) -> None:
    kept(PLAN, exported("built-in", Path("export")))
    change()
    before = sorted(Path().rglob("*"))
    assert main(["new", "run2.toml", *words]) == code
    error = capsys.readouterr().err
    assert re.search(said, error), error
    assert error.count("\n") == 1
    assert sorted(Path().rglob("*")) == before


PLAN, OTHER = kind_plan("built-in"), kind_plan("built-in", **{"model.seed": 1})


def newest_file() -> Path:
    return max(Path("state").rglob("checkpoint-*"))


def test_the_start_of_a_run_which_a_bootstrap_peer_keeps_is_not_continued(capsys: Captured) -> None:
    path = kept(PLAN, make_start(PLAN))
    save_checkpoint(path, PLAN.rules.run, start_states(PLAN))
    assert main(["new", "run2.toml", "--continue", "state"]) == 2
    assert (
        "state holds only the start of the run, before anything was learnt; name the state" in capsys.readouterr().err
    )


def test_a_model_saved_in_a_state_directory_does_not_hide_its_checkpoints() -> None:
    start = exported("built-in", Path("state"))
    kept(OTHER, make_start(OTHER))
    assert main(["new", "run2.toml", "--continue", "state"]) == 0
    assert genesis_digest(continued()[1]) == genesis_digest(make_start(OTHER)) != genesis_digest(start)


def test_a_cut_checkpoint_is_reported_and_an_older_one_is_continued(capsys: Captured) -> None:
    start = exported("built-in", Path("export"))
    kept(PLAN, start)
    cut(kept(PLAN, make_start(PLAN)))
    assert main(["new", "run2.toml", "--continue", "state"]) == 0
    assert re.search("checkpoint-000000001.safetensors is broken .*; using an older one", capsys.readouterr().err)
    assert genesis_digest(continued()[1]) == genesis_digest(start)


@pytest.mark.parametrize(
    "source", [["state", "--run", OTHER.rules.run.hex()[:6]], [f"state/{OTHER.rules.run.hex()[:16]}"]]
)
def test_one_of_several_runs_is_chosen(source: list[str]) -> None:
    kept(PLAN, make_start(PLAN))
    kept(OTHER, make_start(OTHER))
    assert main(["new", "run2.toml", "--continue", *source]) == 0
    assert genesis_digest(continued()[1]) == genesis_digest(make_start(OTHER))


def test_an_export_keeps_the_path_of_the_text_to_itself(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    start = exported("built-in", Path("export"), **{"data.path": str(text)})
    assert str(text) not in Path("export/run.toml").read_text()
    assert main(["new", "run2.toml", "--continue", "export", "--data.path", str(text)]) == 0
    manifest, own = continued()
    assert (manifest.data.path, genesis_digest(own)) == (str(text), genesis_digest(start))


def test_the_founder_needs_the_very_file_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    kept(PLAN, exported("built-in", Path("export")))
    assert main(["new", "run2.toml", "--continue", "state"]) == 0
    manifest, _ = continued()
    plan, path = plan_run(manifest), Path("run2.start.safetensors")
    monkeypatch.setattr(run_model, "build_run_model", lambda *_, **__: pytest.fail("a large model may take minutes"))
    with pytest.raises(
        ConfigError, match='"small" starts from a file, and neither that nor a sound checkpoint is here'
    ):
        make_start(plan)
    with pytest.raises(ConfigError, match=r"export has SHA-256 .*, but the run starts from .*, so restore it next to"):
        read_start(plan, Path("export"))
    cut(path)
    with pytest.raises(ConfigError, match=r"run2.start.safetensors has SHA-256 .*, but the run starts from"):
        read_start(plan, path)
    path.unlink()
    with pytest.raises(
        ConfigError, match=r"cannot read run2.start.safetensors: No such file or directory; the run starts"
    ):
        read_start(plan, path)


def edited(text: str, key: str, value: str) -> str:
    """Return a run file with one value changed, as an editor does it."""
    section, _, name = key.rpartition(".")
    at = text.index(f"[{section}]") if section else 0
    line = re.search(rf"^(# )?{name} =.*$", text[at:], re.MULTILINE)
    assert line is not None
    return text[:at] + text[at:].replace(line[0], f"{name} = {value}", 1)


EDITS = [
    ("inner.learning_rate", "0.5", "inner.learning_rate from 0.004 to 0.5", "--inner.learning_rate 0.5"),
    ("rounds.fragments", "3", "rounds.fragments from 2 to 3", "--rounds.fragments 3"),
    ("rounds.clock_start", "7.0", "rounds.clock_start from 1000000.0 to 7.0", "--rounds.clock_start 7.0"),
    ("codec.entry", '"int8"', 'codec.entry from "int4" to "int8"', "--codec.entry int8"),
    ("data.path", '"a b.txt"', 'data.path from "stdlib" to "a b.txt"', "--data.path 'a b.txt'"),
    ("data.fingerprint", f'"{"ab" * 32}"', r"data.fingerprint from not set to", f"--data.fingerprint {'ab' * 32}"),
    ("model.seed", "9", "model.seed from 0 to 9", None),
    ("organiser", None, None, None),
    ("name", '"other"', None, None),
    ("created", "7", None, None),
]


class NoNetwork(Libp2pNetwork):
    """Ends the start of a peer once all has been checked."""

    TEXT = "no network today"

    def online(self, *_: Any, **__: Any) -> Any:
        raise NetworkError(self.TEXT)


EXPORTS = ExportPlan(folder=Path("exports"), every=1, keep=1)


def started(state: str = "state", *, archives: bool = True) -> str:
    """Found the run of `run.toml` with an archivist, or a bootstrap peer; return the error with which that ends."""
    source = read_founding(Path("run.toml"), make_start=make_start)
    settings = PeerSettings(state_directory=Path(state))
    training = Archivist(EXPORTS) if archives else None
    plan = PeerPlan(settings=settings, source=source, training=training, network=NoNetwork())
    with pytest.raises(P2PDilocoError) as caught:
        asyncio.run(run_peer(plan, Watcher(), StopRequest()))
    return str(caught.value)


def test_a_founder_without_a_model_is_refused_before_it_is_online() -> None:
    write_key_file(Path("organiser.key"), ORGANISER)
    Path("run.toml").write_text(format_run_toml(PLAN.manifest))
    founding = read_founding(Path("run.toml"))
    plan = PeerPlan(settings=PeerSettings(state_directory=Path("state")), source=founding, network=NoNetwork())
    with pytest.raises(ConfigError, match="has neither a model nor initial tensors; give Founding"):
        asyncio.run(run_peer(plan, Watcher(), StopRequest()))


@pytest.mark.parametrize(("key", "value", "said", "flags"), EDITS)
def test_an_edited_run_is_not_founded_beside_the_state_of_the_run(
    key: str, value: str | None, said: str | None, flags: str | None
) -> None:
    kept(PLAN, make_start(PLAN))
    write_key_file(Path("organiser.key"), ORGANISER)
    text = format_run_toml(PLAN.manifest)
    if value is None:  # another organiser
        Path("organiser.key").unlink()
        other = create_key_file(Path("organiser.key"))
        value = f'"{format_peer_id(other.peer)}"'
    Path("run.toml").write_text(edited(text, key, value))
    before = sorted(Path().rglob("*"))
    if said is None:  # the file of another run: it starts
        assert started() == NoNetwork.TEXT
        return
    error = started()
    assert f'values of "small" were changed after the run began in state ({said}' in error
    assert error.endswith("or found another one with another --state-directory")
    run = PLAN.rules.run.hex()[:16]
    found = f"--continue state --run {run} {flags}), or found" if flags else "to go on with it, or found another one"
    assert found in error
    assert sorted(Path().rglob("*")) == before


def founded_here() -> RunManifest:
    """Write the file, the key and a checkpoint of a run that this peer has founded."""
    write_key_file(Path("organiser.key"), ORGANISER)
    Path("run.toml").write_text(format_run_toml(PLAN.manifest))
    me = load_or_create_identity(Path("state/identity.key"))
    manifest = PLAN.manifest.model_copy(update={"founder": format_peer_id(me.peer)})
    kept(plan_run(manifest), make_start(PLAN))
    return manifest


def test_the_same_file_goes_on_with_its_run_and_another_state_directory_founds_afresh() -> None:
    founded_here()
    assert started() == started("another") == NoNetwork.TEXT
    Path("run.toml").write_text(edited(Path("run.toml").read_text(), "outer.momentum", "0.9"))
    assert "(outer.momentum from 0.3 to 0.9)" in started()
    assert started("another") == NoNetwork.TEXT, "nothing has been learnt there"


@pytest.mark.parametrize(
    ("founder", "state", "continues"),
    [
        ("state/bootstrap", "state", "--continue STATE"),
        ("state/archive", "state", "--continue state/archive"),
        ("state", "state/bootstrap", "--continue state "),
        ("state/bootstrap", "state/archive", "--continue STATE"),
    ],
)
def test_an_edited_run_is_not_founded_beside_another_peer_of_this_machine(
    founder: str, state: str, continues: str
) -> None:
    write_key_file(Path("organiser.key"), ORGANISER)
    kept(PLAN, make_start(PLAN), founder)
    Path("run.toml").write_text(edited(format_run_toml(PLAN.manifest), "outer.momentum", "0.9"))
    error = started(state)
    assert f"after the run began in {founder} (outer.momentum from 0.3 to 0.9)" in error
    assert continues in error
    assert started("another") == NoNetwork.TEXT


def test_a_run_is_not_founded_again_by_another_identity() -> None:
    manifest = founded_here()
    Path("state/identity.key").unlink()
    assert started() == (
        f'state holds the run "small" of this file, founded by {manifest.founder}, and this peer is a new one; start '
        "it with that identity or with the run's invite, or found another run with another --state-directory"
    )
    other = load_or_create_identity(Path("state/identity.key"))
    assert f"and this peer is {format_peer_id(other.peer)}; start it with that identity" in started()


def test_the_offered_command_works(capsys: Captured) -> None:
    founded_here()
    Path("run.toml").write_text(edited(Path("run.toml").read_text(), "inner.warmup_steps", "7"))
    words = shlex.split(re.search(r"continues it \((.*)\), or found", started())[1])  # type: ignore[index]
    assert main(words[words.index("new") :]) == 0
    assert continued()[0].inner.warmup_steps == 7
    Path("run2.toml").rename("run.toml")
    Path("run2.start.safetensors").rename("run.start.safetensors")
    assert started() == NoNetwork.TEXT, "it is another run, though its name and state directory are the same"
    Path("run2.toml").touch()
    Path("run.toml").write_text(edited(format_run_toml(PLAN.manifest), "inner.warmup_steps", "7"))
    assert "new run3.toml --continue state" in started()
    assert re.search(
        r"new run3.toml --continue STATE --run \w+ --\S+ 7; STATE: that of a peer that trains\), or",
        started(archives=False),
    )


def test_own_loops_get_the_sentence_with_names_of_settings() -> None:
    net = torch.nn.Linear(3, 2)
    manifest = new_run("run.toml", net)
    plan = plan_run(manifest)
    kept(plan, start_from(plan, LocalParameters(net, plan.fragments)), key=read_key_file(Path("organiser.key")))
    Path("run.toml").write_text(edited(Path("run.toml").read_text(), "data.path", '"words.txt"'))
    with pytest.raises(
        ConfigError, match=r"--data.path words.txt\), or found another one with another state_directory$"
    ):
        found("run.toml", net, settings={"state_directory": "state"})


def test_the_text_of_the_old_run_must_be_here_unless_another_is_named(tmp_path: Path, capsys: Captured) -> None:
    text = write_text(tmp_path)
    plan = kind_plan("built-in", **{"data.path": "words.txt"})
    kept(plan, make_start(plan))
    text.rename("moved.txt")
    assert main(["new", "run2.toml", "--continue", "state"]) == 2
    assert "error: the run's text is not at words.txt; name your copy with --data.path\n" in capsys.readouterr().err
    assert main(["new", "run2.toml", "--continue", "state", "--data.path", "moved.txt"]) == 0
    own = kind_plan("own", **{"data.path": "words.txt"})
    kept(own, exported("own", Path("export")), "own")
    assert main(["new", "run3.toml", "--continue", "own"]) == 0, "a loop of one's own reads its own text"


def test_a_full_disk_leaves_no_files(capsys: Captured) -> None:
    kept(PLAN, exported("built-in", Path("export")))
    before = sorted(Path().rglob("*"))
    with limited_files():
        assert main(["new", "run2.toml", "--continue", "state"]) == 4
    assert "cannot write run2.start.safetensors: File too large" in capsys.readouterr().err
    assert sorted(Path().rglob("*")) == before


@contextmanager
def limited_files() -> Iterator[None]:
    """Let no file grow beyond one kilobyte, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
