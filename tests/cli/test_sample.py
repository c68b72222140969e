"""`sample` prints what a checkpoint's model writes, and `export` writes it for other programs."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file

from p2p_diloco.cli.app import main
from p2p_diloco.config.run_file import draft_manifest
from p2p_diloco.errors import has_unseen
from p2p_diloco.ids import ZERO_DIGEST, Digest
from p2p_diloco.outer.state import genesis_state
from p2p_diloco.peer.founding import make_start
from p2p_diloco.peer.own_model import describe_model
from p2p_diloco.peer.run_plan import plan_run
from p2p_diloco.signing import SigningKey
from p2p_diloco.status.status_file import PeerStatus, write_status
from p2p_diloco.storage.checkpoint import CheckpointFolder
from p2p_diloco.storage.run_folder import MANIFEST_FILE, RunFolder
from p2p_diloco.training.parameters import LocalParameters

Captured = pytest.CaptureFixture[str]
ORGANISER = SigningKey(b"o" * 32)
SMALL = {"model.layers": 1, "model.width": 16, "model.heads": 2, "model.feed_forward": 24, "model.context": 12}


@pytest.fixture
def run(tmp_path: Path) -> Digest:
    """A run whose start lies in the state directory: a model that gives every byte the same chance."""
    values = {**SMALL, "data.path": "/home/ada/secret.txt"}
    manifest = draft_manifest(organiser=ORGANISER.peer, now_seconds=1e6, name="night", values=values)
    plan = plan_run(manifest)
    folder = RunFolder(tmp_path / "state", plan.rules.run)
    folder.write(MANIFEST_FILE, manifest.sign(ORGANISER).encode())
    states = {span: genesis_state(start_N, ZERO_DIGEST) for span, start_N in make_start(plan).items()}
    CheckpointFolder(folder.path, run=plan.rules.run, elements=plan.rules.span_elements, keep=1).save(states)
    return plan.rules.run


def sampled(capsys: Captured, *words: str) -> str:
    assert main(["sample", "def main", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.usefixtures("run")
def test_a_model_that_has_learnt_nothing_is_named_so(tmp_path: Path, capsys: Captured) -> None:
    for words in (["sample", "def main"], ["export", str(tmp_path / "model")]):
        assert main(words) == 0
        assert "is the start of the run, before anything was learnt; the next one comes" in capsys.readouterr().err


@pytest.mark.usefixtures("run")
def test_the_prompt_goes_on_and_the_same_seed_gives_the_same_text(capsys: Captured) -> None:
    first, second, other = (sampled(capsys, "--seed", seed) for seed in ("1", "1", "2"))
    assert first.startswith("def main")
    assert first.endswith("\n")
    assert first == second
    assert len({first, other, sampled(capsys), sampled(capsys)}) == 4, "without a seed each is another"


@pytest.mark.usefixtures("run")
def test_any_bytes_are_shown_and_no_control_character_is(capsys: Captured) -> None:
    text = sampled(capsys, "--seed", "1", "--bytes", "5000", "--temperature", "1")
    assert 2_000 < len(text) <= 5_010
    assert {character for character in text if has_unseen(character)} <= {"\n", "\t"}


@pytest.mark.usefixtures("run")
def test_a_terminal_of_few_characters_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert main(["sample", "naïve", "--bytes", "1", "--temperature", "0"]) == 0
    assert raw.getvalue().startswith(b"na?ve")


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["x", "--bytes", "0"], "--bytes is 0; expected at least 1"),
        (["x", "--bytes", "1.5"], "--bytes is 1.5; expected a whole number"),
        (["x", "--temperature", "-1"], "the temperature is -1; expected 0"),
        (["x", "--seed", "-1"], "the seed is -1; expected 0"),
        ([""], "the prompt is empty; expected at least one byte"),
        (["x", "--state-directory", "nowhere"], "no peer has run with the state directory nowhere; name another"),
        (["x", "--run", "zz"], "0 of them begin with zz; choose one with --run"),
    ],
)
def test_what_does_not_fit_is_one_sentence(words: list[str], text: str, capsys: Captured) -> None:
    assert main(["sample", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert text in captured.err


def test_a_peer_without_a_checkpoint_has_nothing_to_export(tmp_path: Path, capsys: Captured) -> None:
    RunFolder(tmp_path / "state", Digest(bytes(32)))
    assert main(["export", "out"]) == 4
    assert "has no checkpoint yet" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_export_is_a_folder_that_tells_where_it_comes_from(run: Digest, tmp_path: Path, capsys: Captured) -> None:
    write_status(tmp_path / "state", PeerStatus(run=run.hex(), tokens=4_096, anchor_loss=1.25))
    assert main(["export", "out"]) == 0
    assert "wrote out: model.safetensors, config.json" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"
    assert load_file(tmp_path / "out" / "model.safetensors")["model.embed_tokens.weight"].shape == (256, 16)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "# night" in card
    assert run.hex() in card
    assert "| tokens | 4,096 by" in card
    assert "| held-out loss | 1.2500" in card
    assert "secret" not in card, "where the organiser has the text is nobody's business"


def test_an_export_of_a_model_of_somebody_s_own_has_the_names_of_its_tensors(tmp_path: Path, capsys: Captured) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    values = {"model": describe_model(model), "rounds": {"fragments": 2}}
    manifest = draft_manifest(organiser=ORGANISER.peer, now_seconds=1e6, name="night", values=values)
    plan = plan_run(manifest)
    folder = RunFolder(tmp_path / "state", plan.rules.run)
    folder.write(MANIFEST_FILE, manifest.sign(ORGANISER).encode())
    start = make_start(plan, LocalParameters(model, plan.fragments))
    states = {span: genesis_state(start_N, ZERO_DIGEST) for span, start_N in start.items()}
    CheckpointFolder(folder.path, run=plan.rules.run, elements=plan.rules.span_elements, keep=1).save(states)
    write_status(tmp_path / "state", PeerStatus(run=plan.rules.run.hex(), tokens=4_096, loss=0.5))
    assert main(["export", "out"]) == 0
    assert "wrote out: model.safetensors, README.md" in capsys.readouterr().out
    held, own = load_file(tmp_path / "out" / "model.safetensors"), dict(model.named_parameters())
    assert held.keys() == own.keys(), "what the run trains, and no buffer"
    assert all((held[name] == own[name].detach().numpy()).all() for name in own)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "strict=False" in card
    assert "| training loss | 0.5, of" in card
    assert "| trained on" not in card, "peers bring their own data"
    assert main(["sample", "def main"]) == 2
    assert '"night" trains its own model, which this command cannot build' in capsys.readouterr().err


@pytest.mark.usefixtures("run")
def test_a_status_of_another_run_says_nothing_of_this_one(tmp_path: Path) -> None:
    write_status(tmp_path / "state", PeerStatus(run="cd" * 32, tokens=4_096, anchor_loss=1.25))
    assert main(["export", "out"]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| tokens" not in card
    assert "held-out" not in card


@pytest.mark.usefixtures("run")
def test_a_folder_that_holds_something_is_refused(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("")
    assert main(["export", "out"]) == 2
    assert "out is not empty, and nothing in it is overwritten; name a new folder" in capsys.readouterr().err
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["precious"]
