"""The trained model of a run, read from a peer's newest checkpoint or from an export.

This only reads, so that it works while the peer trains.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from p2p_diloco.config.manifest import RunManifest, decode_kept_manifest
from p2p_diloco.config.run_file import read_run_toml
from p2p_diloco.config.run_plan import RunPlan, plan_run
from p2p_diloco.errors import ConfigError, StateError
from p2p_diloco.ids import SpanId, sha256
from p2p_diloco.island.inner_state import saved_buffers
from p2p_diloco.outer.state import SpanState
from p2p_diloco.session.export_files import tensor_bytes
from p2p_diloco.session.founding import EXPORTED_TENSORS, read_buffers, read_tensors
from p2p_diloco.session.held_state import Slice, anchor_slice
from p2p_diloco.storage.checkpoint import CHECKPOINTS, CheckpointFolder
from p2p_diloco.storage.run_folder import MANIFEST_FILE, TOKENIZER_FILE

RUN_FILE = "run.toml"
"""Name of the run file in an export."""
_RUN_FOLDER = re.compile(r"[0-9a-f]{16}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearntModel:
    """The anchor φ of a run.

    Attributes:
        plan: plan of the run.
        parameters: φ by the names of the model's tensors, float32.
        rounds: number of rounds up to the latest whose update is included; 0: the initial model.
        refused: a sentence for each newer checkpoint that was refused.
        tokenizer: the files of its tokenizer, encoded; None if each byte is a token.
        buffers: the model's buffers as this peer saved them last, by name; none if it does not train. Of an export of
            a user's own model, also its frozen tensors.
    """

    plan: RunPlan
    parameters: dict[str, Tensor]
    rounds: int
    refused: tuple[str, ...] = ()
    tokenizer: bytes | None = None
    buffers: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def manifest(self) -> RunManifest:
        return self.plan.manifest

    @property
    def cycles(self) -> float:
        """The rounds in cycles; a cycle has one round per fragment."""
        return self.rounds / self.manifest.rounds.fragments


def load_source(source: Path, run: str | None, named: str) -> LearntModel:
    """Load what a new run continues: a state directory, one run's folder in it, or an export; its rounds are then 0.

    Args:
        run: first digits of the run id; None if the state directory holds only one run.
        named: what names the source, for errors, such as `--continue`.
    Raises:
        ConfigError: it is none of these, the run is ambiguous, nothing was learnt, or the export is broken.
        StateError: there is no checkpoint yet, or none can be read.
    """
    source = source.expanduser()
    is_state = any(source.glob(f"*/{CHECKPOINTS}"))  # a model may have been saved in the same folder
    if is_state or not any((source / name).is_file() for name in EXPORTED_TENSORS):
        if _RUN_FOLDER.fullmatch(source.name) and any(source.glob(CHECKPOINTS)):
            source, run = source.parent, source.name
        try:
            learnt = load_learnt_model(source, run, needs_tokenizer=False)
        except (ConfigError, StateError) as error:
            raise type(error)(str(error).replace("--state-directory", named)) from None
        if learnt.rounds == 0:  # all that a bootstrap peer has on its disk
            raise ConfigError(
                f"{source} holds only the start of the run, before anything was learnt; name the state directory of a "
                "peer that trains, or an export"
            )
        return learnt
    if run is not None:
        raise ConfigError(f"--run chooses a run of a state directory, and {source} is an export; leave it out")
    if not (source / RUN_FILE).is_file():
        raise ConfigError(
            f"{source} is an export without {RUN_FILE}, which tells what to continue; make a run of the same model, "
            f"and found it with p2p-diloco bootstrap {RUN_FILE} --start {source}"
        )
    plan = plan_run(read_run_toml(source / RUN_FILE))
    parameters = dict(read_tensors(plan, source))
    # Other kinds have none, or tensors under other names.
    buffers = read_buffers(plan, source) if plan.manifest.model.kind in ("own", "python") else {}
    return LearntModel(plan=plan, parameters=parameters, rounds=0, buffers=buffers)


def start_of(learnt: LearntModel) -> tuple[bytes, str]:
    """Return the file of initial values of a run that continues this one, and its SHA-256 for the manifest."""
    content = tensor_bytes({**learnt.buffers, **learnt.parameters}, {"run": learnt.manifest.digest().hex()})
    return content, sha256(content).hex()


def load_learnt_model(state_directory: Path, run: str | None = None, *, needs_tokenizer: bool = True) -> LearntModel:
    """Load the newest checkpoint in a state directory.

    Args:
        needs_tokenizer: whether the tokenizer of a model of tokens is loaded too.
        state_directory: state directory of a peer, which may be running.
        run: first digits of the run id; None if there is only one run.
    Raises:
        ConfigError: no peer has run there, or the run is ambiguous.
        StateError: there is no checkpoint yet, or none can be read.
    """
    folders = _run_folders(state_directory)
    folders = [folder for folder in folders if any(folder.glob(CHECKPOINTS))]
    if not folders:
        raise _no_checkpoint(state_directory)
    folder = _choose_run(state_directory, folders, run)
    plan = _plan_of(folder)
    checkpoints = CheckpointFolder(folder, run=plan.rules.run, elements=plan.rules.span_elements, keep=1)
    states, refused = checkpoints.read_newest()
    if states is None:
        broken = (
            f"{refused[0]}; there is no sound one in {folder}, so name the state of another peer" if refused else ""
        )
        raise StateError(broken) if refused else _no_checkpoint(state_directory)
    rounds = max(0, *(state.head.round + 1 for state in states.values()))
    return replace(learnt_model(plan, folder, states, rounds, needs_tokenizer=needs_tokenizer), refused=refused)


def learnt_model(
    plan: RunPlan,
    folder: Path | None,
    states: Mapping[SpanId, SpanState],
    rounds: int,
    *,
    needs_tokenizer: bool = True,
) -> LearntModel:
    """Return the model whose anchor is in `states`.

    Args:
        folder: the run's folder of a peer, with its buffers and the tokenizer of a run that has one; None: none.
        rounds: number of rounds up to the latest whose update is included.
    Raises:
        StateError: the tokenizer is missing, or another one.
    """
    places = {
        slot.name: Slice(fragment.index, slot.start, slot.stop)
        for fragment in plan.fragments
        for slot in fragment.tensors
    }
    return LearntModel(
        plan=plan,
        parameters={
            name: torch.from_numpy(anchor_slice(plan, states, places[name])).view(shape)
            for name, shape in plan.shapes.items()
        },
        rounds=rounds,
        tokenizer=_tokenizer_of(folder, plan) if folder is not None and needs_tokenizer else None,
        buffers=saved_buffers(folder) if folder is not None else {},
    )


def _tokenizer_of(folder: Path, plan: RunPlan) -> bytes | None:
    wanted, path = plan.manifest.data.tokenizer, folder / TOKENIZER_FILE
    if wanted is None or plan.manifest.model.is_own_loop:  # such a model is exported without a tokenizer
        return None
    try:
        raw = path.read_bytes()
    except OSError:
        raise StateError(f"{folder} has no {TOKENIZER_FILE}; name the state directory of a peer that trains") from None
    if sha256(raw).hex() != wanted:
        raise StateError(f"{path} is not the tokenizer of the run; name the state directory of another peer")
    return raw


def _no_checkpoint(state_directory: Path) -> StateError:
    return StateError(
        f"the peer in {state_directory} has no checkpoint yet; it writes the first one a few seconds after it has the "
        "state of the run, so try again then (p2p-diloco status shows its progress)"
    )


def _run_folders(state_directory: Path) -> list[Path]:
    try:
        folders = sorted(path for path in state_directory.iterdir() if _RUN_FOLDER.fullmatch(path.name))
    except (FileNotFoundError, NotADirectoryError):
        folders = []
    except OSError as error:
        raise StateError(
            f"cannot read the state directory {state_directory}: {error.strerror}; give this user read access, or name "
            "another with --state-directory"
        ) from None
    if not folders:
        raise ConfigError(
            f"no peer has run with the state directory {state_directory}; name another with --state-directory"
        )
    return folders


def _choose_run(state_directory: Path, folders: Sequence[Path], run: str | None) -> Path:
    chosen = [folder for folder in folders if run is None or folder.name.startswith(run.lower()[:16])]
    if len(chosen) == 1:
        return chosen[0]
    names = ", ".join(folder.name for folder in folders)
    wanted = "" if run is None else f"{len(chosen)} of them begin with {run}; "
    raise ConfigError(
        f"{state_directory} holds checkpoints of {len(folders)} runs: {names}; {wanted}choose one with --run and the "
        "first digits of its id"
    )


def _plan_of(folder: Path) -> RunPlan:
    path = folder / MANIFEST_FILE
    try:
        encoded = path.read_bytes()
    except FileNotFoundError:
        raise StateError(
            f"{folder} has no manifest, which describes the model; start its peer once more to write it, or name the "
            "state directory of another peer with --state-directory"
        ) from None
    except OSError as error:
        raise StateError(f"cannot read {path}: {error.strerror}; give this user read access") from None
    return plan_run(decode_kept_manifest(encoded, path, "name the state directory of another peer").manifest)
