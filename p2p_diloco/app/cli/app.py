"""`p2p-diloco`: its commands, and how one command line is read and run.

Nothing heavy is imported here, so that help and `status` start fast: without torch and hivemind.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from p2p_diloco.app.cli.command_line import (
    call_command,
    check_typed,
    end_despite_last_step,
    exit_code_of,
    split_arguments,
)
from p2p_diloco.app.cli.options import (
    NONE_TYPED,
    CommandContext,
    Every,
    Keep,
    LearntOptions,
    LimitsFlags,
    NewRunOptions,
    OwnStateFlag,
    PeerOptions,
    PlanOptions,
    SettingsFlags,
    StartOptions,
)
from p2p_diloco.config.invite import is_invite
from p2p_diloco.config.manifest import RunManifest
from p2p_diloco.config.run_file import ALIASES, EXPLAINED
from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.config.toml_document import known_keys, nearest_key

PROGRAM = "p2p-diloco"
# A paragraph is one line: the terminal wraps it.
_HELP = (
    "Train one language model on many machines that never wait for each other.\n\n"
    "Settings of this machine come from flags, from the environment (P2P_DILOCO_PORT=31337) or from a file "
    "(@peer.toml); the first of these wins. Everything that peers must agree on is in run.toml. `new` and `bootstrap` "
    "also take its keys as flags, such as --outer.momentum 0.7; `new --help` lists them."
)
_RUN_COMMANDS = ("new", "bootstrap", "join", "archive")
"""Commands that take manifest keys as flags, also under the names that other programs use for them."""
_WORDS_AS_FLAGS = {"help": "--help", "version": "--version"}

_START_DEFAULTS = StartOptions()
_PEER_DEFAULTS = PeerOptions()
_LEARNT_DEFAULTS = LearntOptions()
_NEW_RUN_DEFAULTS = NewRunOptions()

Switch = Annotated[bool, Parameter(negative="")]
Around = Annotated[CommandContext, Parameter(parse=False)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (by default `sys.argv`) and return its exit code."""
    if arguments is None:
        return end_despite_last_step(exit_code_of(PROGRAM, lambda: run_command(sys.argv[1:])))
    return exit_code_of(PROGRAM, lambda: run_command(arguments))


def run_command(arguments: Sequence[str]) -> int:
    """Run one command line; errors are raised.

    Raises:
        P2PDilocoError: what is wrong and what to do.
    """
    known_elsewhere = {*ALIASES, *EXPLAINED} if arguments and arguments[0] in _RUN_COMMANDS else set()
    if arguments and arguments[0] != "new":
        known_elsewhere -= PeerSettings.model_fields.keys()  # such as --model, which names a copy on this machine
    rest, files, overrides = split_arguments(arguments, known_elsewhere)
    around = CommandContext(files=files, overrides=overrides, environment=dict(os.environ), arguments=tuple(arguments))
    if rest and rest[0] in _WORDS_AS_FLAGS:
        rest = [*rest[1:], _WORDS_AS_FLAGS[rest[0]]]
    words = _invite_first(rest)
    code = call_command(app, words, _nearest_manifest_flag, around)
    if words[:1] == ["new"] and not {"--help", "-h"}.isdisjoint(words):
        from p2p_diloco.app.cli.new import print_keys

        print_keys()
    return code


def _invite_first(words: Sequence[str]) -> list[str]:
    """Move an invite right after its command, so that a flag with many values cannot consume it."""
    invites = [word for word in words[1:] if is_invite(word)]
    return [*words[:1], *invites, *(word for word in words[1:] if word not in invites)]


def _version() -> str:
    try:
        return importlib.metadata.version("p2p-diloco")
    except importlib.metadata.PackageNotFoundError:
        return "not installed; run from its source folder"


def _nearest_manifest_flag(command: str, word: str) -> str | None:
    key = nearest_key(word.lstrip("-").replace("-", "_"), known_keys(RunManifest)) if command in _RUN_COMMANDS else None
    return f"--{key}" if key else None


app = App(name=PROGRAM, help=_HELP, version=_version, help_format="plaintext", config=check_typed)
app.version_flags = ("--version", "-v", "-V")


@app.command
def new(path: Path = Path("run.toml"), /, *, options: NewRunOptions = _NEW_RUN_DEFAULTS, around: Around) -> int:
    """Write a new run, and make the key that signs it.

    Makes some inner steps first, to choose the length of a cycle. At a terminal it asks for what you leave out.

    Parameters
    ----------
    path
        run file to write
    """
    from p2p_diloco.app.cli.new import make_run

    return make_run(path, options, around)


@app.command
def tokenize(
    folder: Annotated[Path, Parameter(help="new folder for the shards")],
    /,
    *sources: Annotated[
        str, Parameter(help="file, folder, glob, or hf:NAME:CONFIG[SPLIT] for a dataset; =0.3 adds a weight")
    ],
    tokenizer: Annotated[str, Parameter(help="tokenizer.json, a folder with it, or hf: and the id of a model")],
    column: str = "text",
    encoding: str | None = None,
    end_token: str | None = None,
    held_out: float = 0.01,
    most_tokens: int | None = None,
    skip_bad: Switch = False,
) -> int:
    """Turn texts into shards of tokens that a run can train on.

    Parameters
    ----------
    column
        column of a record (JSON, CSV, Parquet, datasets) that holds its text or chat messages; dots lead into
        nested ones
    encoding
        encoding of text files without a byte-order mark, such as latin-1 [default: UTF-8]
    end_token
        token between two documents, such as "</s>" [default: the tokenizer's own]
    held_out
        share of the text that is kept for evaluation
    most_tokens
        maximum number of tokens from each source [default: all]
    skip_bad
        leave out what cannot be read or tokenised, and count it
    """
    from p2p_diloco.app.cli.tokenize import tokenize as run
    from p2p_diloco.app.text.tokenize_text import TokenizeOptions

    options = TokenizeOptions(
        sources=sources,
        tokenizer=tokenizer,
        column=column,
        encoding=encoding,
        end_token=end_token,
        held_out=held_out,
        most_tokens=most_tokens,
        skip_bad=skip_bad,
    )
    return run(folder, options)


@app.command
def bootstrap(
    run: Annotated[str, Parameter(help="run.toml, or the invite of a run that exists")],
    /,
    *,
    start: Path | None = None,
    options: PeerOptions = _PEER_DEFAULTS,
    around: Around,
) -> int:
    """Found a run and introduce its peers to each other. Prints the join command first.

    Parameters
    ----------
    start
        export of a run, or safetensors file, with the initial values of the trained tensors
    """
    from p2p_diloco.app.cli.join import request_bootstrap
    from p2p_diloco.app.cli.peer_process import run_bootstrap_peer

    return run_bootstrap_peer(request_bootstrap(run, options, around, start=start), options)


@app.command
def join(
    invite: str | None = None,
    /,
    *,
    found: Path | None = None,
    options: PeerOptions = _PEER_DEFAULTS,
    around: Around,
) -> int:
    """Join a run. The invite is all you need: model, data and schedule come from the signed manifest.

    Parameters
    ----------
    invite
        the line that begins with p2pdiloco://
    found
        run.toml of a run to found, instead of an invite
    """
    from p2p_diloco.app.cli.join import request_join, run_join

    return run_join(request_join(invite, options, around, found=found), options, around)


@app.command
def archive(
    run: Annotated[str, Parameter(help="the invite of a run, or run.toml to found one")],
    /,
    *,
    into: Path | None = None,
    every: Every = 100,
    keep: Keep = 3,
    options: StartOptions = _START_DEFAULTS,
    around: Around,
) -> int:
    """Follow a run without training, and export its model every few cycles. Needs no GPU.

    Parameters
    ----------
    into
        folder for the exports [default: exports in the state directory]
    every
        cycles from one export to the next
    keep
        number of exports to keep
    """
    from p2p_diloco.app.cli.join import request_archive
    from p2p_diloco.app.cli.peer_process import run_archivist

    plan, exports = request_archive(run, options, around, into=into, every=every, keep=keep)
    return run_archivist(plan, exports, options)


@app.command
def doctor(
    invite: str | None = None,
    /,
    *,
    json: Annotated[bool, Parameter(negative=())] = False,
    settings: SettingsFlags = NONE_TYPED,
    around: Around,
) -> int:
    """Check whether this machine can take part in a run. It joins nothing and changes nothing.

    Parameters
    ----------
    invite
        check the way to this run too: its addresses, and what it needs
    json
        print JSON
    """
    from p2p_diloco.app.cli.doctor import run_doctor

    return run_doctor(invite, around.settings(settings), as_json=json)


@app.command
def status(
    *,
    watch: Switch = False,
    json: Annotated[bool, Parameter(negative=())] = False,
    state_directory: OwnStateFlag = None,
    around: Around,
) -> int:
    """Show the latest status written by the peer in this state directory.

    Parameters
    ----------
    watch
        go on until Ctrl-C, and show each change
    json
        print JSON; with --watch, one document a line
    """
    from p2p_diloco.app.cli.owner import show_status, watch_status

    return (watch_status if watch else show_status)(_folder(state_directory, around), as_json=json)


@app.command
def report(*, into: Path | None = None, state_directory: OwnStateFlag = None, around: Around) -> int:
    """Write what helps to understand a field trial into one zip file, without addresses, ids, names, paths and keys.

    Look at the file before you send it. The peer may run.

    Parameters
    ----------
    into
        new file [default: p2p-diloco-report-TIME.zip in this folder]
    """
    from p2p_diloco.app.cli.report import write_report

    settings = around.settings({"state_directory": state_directory})
    return write_report(settings.state_directory, into, settings)


@app.command
def page(
    *states: Annotated[Path, Parameter(help="state directory of a peer; several make one page")],
    public: Switch = False,
    host: str | None = None,
    port: int | None = None,
    samples: bool = True,
    with_parent: Annotated[bool, Parameter(show=False, negative=())] = False,
    around: Around,
) -> int:
    """Serve a web page about the peer on this machine, for you alone or, with --public, for everybody.

    The page reads the files that the peer writes. If it ends, the peer goes on. Figures for Prometheus are at /metrics.

    Parameters
    ----------
    public
        for everybody: read-only, without addresses, keys and ids of members; put a proxy with TLS before it
    host
        address to listen on, with --public, such as 0.0.0.0 [default: this machine alone]
    port
        port to listen on [default: the first free one from 31380]
    samples
        show text that the model writes, renewed every five minutes while somebody looks
    """
    from p2p_diloco.app.cli.page import serve_page

    if with_parent:
        from p2p_diloco.app.cli.ranks import end_with_parent

        end_with_parent()
    folders = states or (_folder(None, around),)
    return serve_page(folders, host=host, port=port, is_public=public, samples=samples)


@app.command
def pause(
    *,
    duration: Annotated[
        str | None, Parameter(name="--for", help="how long, such as 2h [default: until resume]")
    ] = None,
    state_directory: OwnStateFlag = None,
    around: Around,
) -> int:
    """Pause the peer that runs on this machine: it makes no steps and contributes nothing, but follows the run."""
    from p2p_diloco.app.cli.owner import pause_peer

    return pause_peer(_folder(state_directory, around), duration)


@app.command
def resume(*, state_directory: OwnStateFlag = None, around: Around) -> int:
    """End a pause before its time."""
    from p2p_diloco.app.cli.owner import resume_peer

    return resume_peer(_folder(state_directory, around))


@app.command
def limits(
    *,
    json: Annotated[bool, Parameter(negative=())] = False,
    state_directory: OwnStateFlag = None,
    changes: LimitsFlags = NONE_TYPED,
    around: Around,
) -> int:
    """Show the limits of the peer on this machine and what it has used, or change limits while it runs.

    Parameters
    ----------
    json
        print JSON
    """
    from p2p_diloco.app.cli.owner import limit_peer

    return limit_peer(_folder(state_directory, around), changes, as_json=json)


@app.command
def leave(*, state_directory: OwnStateFlag = None, around: Around) -> int:
    """Let the peer that runs on this machine leave the run, and wait until it has; its state is kept."""
    from p2p_diloco.app.cli.owner import leave_peer

    return leave_peer(_folder(state_directory, around))


@app.command
def id(
    *,
    name: str | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
    state_directory: OwnStateFlag = None,
    around: Around,
) -> int:
    """Show the id and the name of the peer on this machine, by which others see it, or give it a name.

    Parameters
    ----------
    name
        what to call this peer, at most 24 bytes; "" removes the name
    json
        print JSON
    """
    from p2p_diloco.app.cli.members import show_identity

    return show_identity(around.settings({"state_directory": state_directory}), name, as_json=json)


@app.command
def members(
    *,
    credit: Switch = False,
    json: Annotated[bool, Parameter(negative=())] = False,
    state_directory: OwnStateFlag = None,
    around: Around,
) -> int:
    """Show who is in the run of the peer on this machine, and who was.

    Parameters
    ----------
    credit
        show the tokens of each member that entries include, as this peer has counted them
    json
        print JSON
    """
    from p2p_diloco.app.cli.members import show_credit, show_members

    show = show_credit if credit else show_members
    return show(_folder(state_directory, around), as_json=json)


def _folder(state_directory: str | None, around: CommandContext) -> Path:
    return around.settings({"state_directory": state_directory}).state_directory


def _copy(source: LearntOptions, around: CommandContext) -> PeerSettings:
    return around.settings({"state_directory": source.state_directory, "model": source.model})


@app.command
def sample(
    prompt: Annotated[str, Parameter(help='text to continue, such as "def main"')],
    /,
    *,
    bytes: int = 400,
    temperature: float = 0.8,
    seed: int | None = None,
    source: LearntOptions = _LEARNT_DEFAULTS,
    around: Around,
) -> int:
    """Generate text with the model of a run.

    Parameters
    ----------
    bytes
        length of the generated text, unless the model ends it before
    temperature
        0 = always the most likely token; higher = more random
    seed
        the same seed gives the same text [default: a new one each time]
    """
    from p2p_diloco.app.cli.sample import print_sample

    return print_sample(prompt, _copy(source, around), source.run, num_bytes=bytes, temperature=temperature, seed=seed)


@app.command
def export(
    folder: Annotated[Path, Parameter(help="new folder for the files")],
    /,
    *,
    source: LearntOptions = _LEARNT_DEFAULTS,
    around: Around,
) -> int:
    """Write the run's model as files that transformers and other programs load."""
    from p2p_diloco.app.cli.sample import export_model

    return export_model(folder, _copy(source, around), source.run)


@app.command
def publish(
    folder: Annotated[Path, Parameter(help="folder that export or an archivist wrote")],
    repository: Annotated[str, Parameter(help="owner/name on the Hub; created if it does not exist")],
    /,
    *,
    public: Switch = False,
    dry_run: Switch = False,
) -> int:
    """Upload an export with its model card to the Hugging Face Hub. The token is in the variable HF_TOKEN.

    Parameters
    ----------
    public
        everybody may see it [default: only its owner]
    dry_run
        print the files and their sizes, and upload nothing
    """
    from p2p_diloco.app.cli.publish import publish_export

    return publish_export(folder, repository, is_public=public, is_dry_run=dry_run)


@app.command
def fingerprint(path: Annotated[str, Parameter(help="text of a run: a file, a folder or a glob")], /) -> int:
    """Print the values by which a run names a text: data.fingerprint, and data.files for a run that shares it."""
    from p2p_diloco.app.cli.tokenize import print_fingerprint

    return print_fingerprint(path)


@app.command
def plan(*, options: PlanOptions) -> int:
    """Estimate what a run would need: traffic, length of a cycle, speed relative to training alone."""
    from p2p_diloco.app.cli.plan import print_plan

    return print_plan(options)
