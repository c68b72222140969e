"""`publish` uploads an export to the Hub; a fake stands in for the Hub's client."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from p2p_diloco.app.cli.app import main
from p2p_diloco.session.export_files import Provenance, own_files

Captured = pytest.CaptureFixture[str]
WORDS = ["publish", "out", "ada/night"]
RUN = "ab" * 32


class Hub:
    """Records what a client of the Hub is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.is_private = True
        self.error: Exception | None = None

    def HfApi(self, *, token: str) -> Hub:  # the client's name
        assert token == "hf_secret"
        return self

    def create_repo(self, repository: str, **options: Any) -> None:
        if self.error is not None:
            raise self.error
        self.asked.append((repository, options))

    def model_info(self, repository: str) -> SimpleNamespace:
        assert repository == self.asked[-1][0], "created before"
        return SimpleNamespace(private=self.is_private)

    def upload_folder(self, *, repo_id: str, **options: Any) -> None:
        self.asked.append((repo_id, options))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    """Return the Hub, next to an export in `out` with a hidden file."""
    provenance = Provenance(run_name="night", run=RUN, text=None, rounds=3, cycles=1.0)
    (tmp_path / "out").mkdir()
    for name, content in own_files({"weight": torch.ones(300)}, provenance, is_whole=True).items():
        (tmp_path / "out" / name).write_bytes(content)
    (tmp_path / "out" / ".archivist").write_text("word")
    hub, module = Hub(), ModuleType("huggingface_hub")
    module.HfApi = hub.HfApi  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    return hub


def test_a_dry_run_shows_what_would_be_uploaded(hub: Hub, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    assert main([*WORDS, "--dry-run"]) == 0
    captured = capsys.readouterr()
    shown = [line.split()[-1] for line in captured.out.splitlines()[:-1]]
    assert shown == ["README.md", "model.safetensors"]
    assert "would upload 2 files, " in captured.out
    assert "names no licence, so nobody may use the model; add a line" in captured.err
    assert hub.asked == []
    assert main(WORDS) == 2
    assert "set HF_TOKEN to a token that may write to ada/night" in capsys.readouterr().err


def test_an_export_becomes_a_private_repository_unless_it_is_to_be_public(hub: Hub, capsys: Captured) -> None:
    card = Path("out/README.md")
    card.write_text(card.read_text().replace("tags:", "license: mit\ntags:"))
    assert main(WORDS) == 0
    create, upload = hub.asked
    assert create == ("ada/night", {"private": True, "exist_ok": True})
    assert upload[1] == {
        "folder_path": Path("out"),
        "allow_patterns": ["README.md", "model.safetensors"],
        "commit_message": f"p2p_diloco run {RUN}",
    }
    captured = capsys.readouterr()
    assert "to https://huggingface.co/ada/night (private)" in captured.out
    assert captured.err == ""
    assert main([*WORDS, "--public"]) == 0
    assert hub.asked[2][1]["private"] is False


def test_a_public_repository_gets_nothing_that_is_to_be_private(hub: Hub, capsys: Captured) -> None:
    hub.is_private = False
    assert main(WORDS) == 2
    assert "ada/night exists and is public; add --public to upload to it" in capsys.readouterr().err
    assert len(hub.asked) == 1, "nothing was uploaded"


@pytest.mark.parametrize(
    ("status", "code", "text"),
    [(401, 2, "the Hub refuses HF_TOKEN for ada/night (no)"), (500, 3, "cannot upload to ada/night (no); nothing is")],
)
def test_a_refusal_is_told_from_a_failure(hub: Hub, capsys: Captured, status: int, code: int, text: str) -> None:
    hub.error = OSError("no")
    hub.error.response = SimpleNamespace(status_code=status)  # type: ignore[attr-defined]
    assert main(WORDS) == code
    assert text in capsys.readouterr().err


@pytest.mark.usefixtures("hub")
def test_only_an_export_is_published(tmp_path: Path, capsys: Captured) -> None:
    weights = tmp_path / "out" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    (tmp_path / "empty").mkdir()
    for folder in ("out", "empty", "nowhere"):
        assert main(["publish", folder, "ada/night"]) == 2
        assert f"{folder} is not an export of a run; make one with p2p-diloco export" in capsys.readouterr().err
    assert main(["publish", "out", "night"]) == 2
    assert "'night' is not the name of a repository; expected owner/name" in capsys.readouterr().err
