"""`p2p-diloco`: reads the command line, runs one command, and turns every error into one sentence and an exit code.

Nothing heavy is imported here: help and `status` answer at once, without torch and hivemind.
"""

from __future__ import annotations

import difflib
import errno
import importlib.metadata
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter
from cyclopts.exceptions import MissingArgumentError, UnknownCommandError, UnknownOptionError, UnusedCliTokensError

from p2p_diloco.cli.bench_commands import make_bench
from p2p_diloco.cli.flags import PeerFlags, SettingsFlags, Surroundings, settings_of
from p2p_diloco.cli.lab_commands import add_experiment, add_plan, add_replay
from p2p_diloco.cli.last_step import end_despite_last_step
from p2p_diloco.cli.lost_stream import flush_or_discard, print_to_stderr
from p2p_diloco.cli.refusals import Refusals
from p2p_diloco.errors import ConfigError, P2PDilocoError, StateError, clean_text
from p2p_diloco.invite import SCHEME
from p2p_diloco.manifest import RunManifest
from p2p_diloco.run_file import ALIASES, EXPLAINED
from p2p_diloco.settings import split_arguments
from p2p_diloco.toml_document import known_keys, nearest_key

STOPPED = 130
_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
_PERMISSION_ERRORS = frozenset({errno.EACCES, errno.EPERM})
# A paragraph is one line: the terminal wraps it.
_HELP = (
    "Train one language model on many machines that never wait for each other.\n\n"
    "A flag wins over the environment (P2P_DILOCO_PORT=31337), the environment over a file (@peer.toml), a file over "
    "the default. What all peers agree on is in run.toml; `new` and `bootstrap` take changes as --outer.momentum 0.7, "
    "and `new --help` lists what can be changed."
)
_RUN_COMMANDS = ("new", "bootstrap", "join")
"""Commands that read a manifest, and the names that others have for what is in it."""
_WORDS_AS_FLAGS = {"help": "--help", "version": "--version"}

_PEER_DEFAULTS = PeerFlags()
_SETTINGS_DEFAULTS = SettingsFlags()

StateDirectoryFlag = Annotated[
    str | None, Parameter(help="of the peer whose newest checkpoint is read; it may be training")
]
RunFlag = Annotated[str | None, Parameter(help="first digits of the run's id, where several runs are kept")]
KeyFlag = Annotated[Path | None, Parameter(help="organiser's key; organiser.key beside the run file if not named")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (this process's own if none is given) and return its exit code."""
    if arguments is None:
        return end_despite_last_step(_exit_code_of(sys.argv[1:]))
    return _exit_code_of(arguments)


def _exit_code_of(arguments: Sequence[str]) -> int:
    try:
        return _run_and_flush(arguments)
    except KeyboardInterrupt:
        return STOPPED
    except BrokenPipeError:
        return 0  # whoever read our output has read enough
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        return 0  # the same: rich answers a broken pipe with an exit code of 1
    except Exception as error:
        return _report(error)
    finally:
        flush_or_discard(sys.stdout)


def _run_and_flush(arguments: Sequence[str]) -> int:
    """Run one command line, and write all of its output while it can still be said that this fails."""
    code = run_command(arguments)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        pass  # and the code stays: whoever needs no more of the output may need that
    except OSError as error:
        raise StateError(f"cannot write the output: {error.strerror}; free some space or send it elsewhere") from None
    return code


def run_command(arguments: Sequence[str]) -> int:
    """Run one command line; errors come as exceptions.

    Raises:
        P2PDilocoError: what is wrong and what to do.
    """
    known_elsewhere = {*ALIASES, *EXPLAINED} if arguments and arguments[0] in _RUN_COMMANDS else ()
    rest, files, overrides = split_arguments(arguments, known_elsewhere)
    around = Surroundings(files=files, overrides=overrides, environment=dict(os.environ))
    app = make_app(around)
    if rest and rest[0] in _WORDS_AS_FLAGS:
        rest = [*rest[1:], _WORDS_AS_FLAGS[rest[0]]]
    words = _joined_dash(_invite_first(rest))
    try:
        command, bound, *_ = app.parse_args(words, print_error=False, exit_on_error=False)
    except CycloptsError as error:
        raise ConfigError(_sentence(error, list(error.app or app))) from None
    code = command(*bound.args, **bound.kwargs)
    if words[:1] == ["new"] and not {"--help", "-h"}.isdisjoint(words):
        from p2p_diloco.cli.new import print_keys

        print_keys()
    return code if isinstance(code, int) else 0


def make_app(around: Surroundings) -> App:
    """Return all commands, for a command line with these surroundings."""
    app = App(name="p2p-diloco", help=_HELP, version=_version, help_format="plaintext", config=Refusals(around))
    app.version_flags = ("--version", "-v")

    @app.command
    def new(
        path: Path = Path("run.toml"),
        /,
        *,
        name: str | None = None,
        islands: int | None = None,
        uplink: str | None = None,
        step_seconds: float | None = None,
        hours: float | None = None,
        device: str | None = None,
        threads: str | None = None,
        organiser_key: KeyFlag = None,
    ) -> int:
        """Write a new run, and make the key that signs it.

        Makes some inner steps here first, to choose how long a cycle is. At a terminal it asks for what you left out.

        Parameters
        ----------
        path
            file to write
        name
            name of the run, for people
        islands
            tune the run for so many islands: a few exchange fewer, larger messages; more can join later
        uplink
            upload rate of the slowest island, such as 20mbit or 2gbit; a thinner line makes cycles longer
        step_seconds
            length of an inner step, instead of measuring it
        hours
            planned length of the run: the inner rate falls along a cosine; without it there is no planned end
        device
            device to measure the step on: auto, cpu, cuda, cuda:<number> or mps
        threads
            CPU threads that training may use
        """
        from p2p_diloco.cli.new import NewRunOptions, make_run

        options = NewRunOptions(
            name=name,
            islands=islands,
            uplink=uplink,
            step_seconds=step_seconds,
            hours=hours,
            device=device,
            threads=threads,
            key_path=organiser_key,
        )
        return make_run(path, options, around)

    @app.command
    def bootstrap(
        run: Annotated[str, Parameter(help="run.toml, or the invite of a run that somebody founded already")],
        /,
        *,
        organiser_key: KeyFlag = None,
        start: Path | None = None,
        flags: PeerFlags = _PEER_DEFAULTS,
        settings: SettingsFlags = _SETTINGS_DEFAULTS,
    ) -> int:
        """Found a run and introduce its peers to each other; prints the whole join command first.

        Parameters
        ----------
        start
            a safetensors file with the first values of the tensors that the run trains; for a model of your own
        """
        from p2p_diloco.cli.bootstrap import run_bootstrap

        return run_bootstrap(run, key_path=organiser_key, start=start, settings=settings, flags=flags, around=around)

    @app.command
    def join(
        invite: str | None = None,
        /,
        *,
        found: Path | None = None,
        organiser_key: KeyFlag = None,
        flags: PeerFlags = _PEER_DEFAULTS,
        settings: SettingsFlags = _SETTINGS_DEFAULTS,
    ) -> int:
        """Join a run. The invite is all you need: model, data and schedule come from the signed manifest.

        Parameters
        ----------
        invite
            the line that begins with p2pdiloco://
        found
            instead of an invite: the run.toml of a run to found
        """
        from p2p_diloco.cli.join import run_join

        return run_join(
            invite,
            found=found,
            key_path=organiser_key,
            settings=settings,
            flags=flags,
            around=around,
        )

    @app.command
    def status(*, json: Annotated[bool, Parameter(negative=())] = False, state_directory: str | None = None) -> int:
        """Show the latest status written by the peer in this state directory.

        Parameters
        ----------
        json
            print it as JSON
        state_directory
            of the peer; the one that `join` uses if not named
        """
        settings = settings_of(SettingsFlags(state_directory=state_directory), around)
        from p2p_diloco.cli.status import show_status

        return show_status(settings.state_directory, as_json=json)

    @app.command
    def sample(
        prompt: Annotated[str, Parameter(help='text that the model continues, such as "def main"')],
        /,
        *,
        bytes: int = 400,
        temperature: float = 0.8,
        seed: int | None = None,
        state_directory: StateDirectoryFlag = None,
        run: RunFlag = None,
    ) -> int:
        """Print text that the run's model writes.

        Parameters
        ----------
        bytes
            how many bytes the model writes
        temperature
            0 takes the likeliest byte each time; the higher, the more random
        seed
            the same seed gives the same text; another one each time if not named
        """
        settings = settings_of(SettingsFlags(state_directory=state_directory), around)
        from p2p_diloco.cli.sample import SampleOptions, print_sample

        options = SampleOptions(
            prompt=prompt,
            num_bytes=bytes,
            temperature=temperature,
            seed=seed,
            state_directory=settings.state_directory,
            run=run,
        )
        return print_sample(options)

    @app.command
    def export(
        folder: Annotated[Path, Parameter(help="new folder for the files")],
        /,
        *,
        state_directory: StateDirectoryFlag = None,
        run: RunFlag = None,
    ) -> int:
        """Write the run's model as files that transformers and other programs load."""
        settings = settings_of(SettingsFlags(state_directory=state_directory), around)
        from p2p_diloco.cli.export import export_model

        return export_model(folder, state_directory=settings.state_directory, run=run)

    @app.command
    def demo(
        *,
        peers: int = 6,
        seconds: float = 150.0,
        model: str = "tiny",
        data: str | None = None,
        json: str | None = None,
        report: Path = Path("demo-report"),
        with_lone: Annotated[bool, Parameter(negative=())] = False,
    ) -> int:
        """Train in a swarm on this machine: one peer is killed, one comes late, the bootstrap is killed.

        Parameters
        ----------
        peers
            volunteers, the late one among them; more than three average in a grid
        seconds
            of training
        model
            tiny or small
        data
            text to train on: a file, a folder or a glob
        json
            file for the figures, or - for standard output
        report
            folder for report.html
        with_lone
            train one island alone beside the swarm, for comparison
        """
        from p2p_diloco.cli.demo import run_demo
        from p2p_diloco.cli.demo_plan import DemoOptions

        options = DemoOptions(
            peers=peers, seconds=seconds, model=model, data=data, json=json, report=report, with_lone=with_lone
        )
        return run_demo(options, around)

    app.command(make_bench())
    add_experiment(app)
    add_plan(app)
    add_replay(app)
    return app


def _invite_first(words: Sequence[str]) -> list[str]:
    """Put an invite right behind its command, lest a flag with many values swallow it."""
    invites = [word for word in words[1:] if word.strip().lower().startswith(f"{SCHEME}://")]
    return [*words[:1], *invites, *(word for word in words[1:] if word not in invites)]


def _joined_dash(words: Sequence[str]) -> list[str]:
    """Tie a lone dash to its flag: `--json -` means standard output, and the parser would take it for a flag."""
    joined: list[str] = []
    for word in words:
        if word == "-" and joined and joined[-1].startswith("--") and "=" not in joined[-1]:
            joined[-1] += "=-"
        else:
            joined.append(word)
    return joined


def _version() -> str:
    try:
        return importlib.metadata.version("p2p-diloco")
    except importlib.metadata.PackageNotFoundError:
        return "not installed; run from its source folder"


def _sentence(error: CycloptsError, commands: Sequence[str]) -> str:
    """Put a parser's complaint the way that ours read, with the nearest name where something is misspelt."""
    chain = " ".join(error.command_chain or ())
    see = f"see {' '.join(filter(None, ('p2p-diloco', chain)))} --help"
    if isinstance(error, UnknownCommandError) and error.unused_tokens:
        names = [name for name in commands if not name.startswith("-")]
        near = difflib.get_close_matches(error.unused_tokens[0], names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are: {', '.join(names)}; {see}"
        return f"unknown command {error.unused_tokens[0]}; {hint}"
    if isinstance(error, UnknownOptionError):
        word = (error.token.keyword or error.token.value).partition("=")[0]
        nearest = _nearest_flag(word, [name for each in error.argument_collection if each.show for name in each.names])
        if nearest is None and chain in _RUN_COMMANDS:
            key = nearest_key(word.lstrip("-").replace("-", "_"), known_keys(RunManifest))
            nearest = f"--{key}" if key else None
        return f"unknown option {word}; {f'did you mean {nearest}?' if nearest else see}"
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        purpose = f": {error.argument.parameter.help}" if error.argument.parameter.help else ""
        needed = f"{chain} needs {error.argument.name}" if error.keyword is None else f"{error.keyword} needs a value"
        return f"{needed}{purpose}; {see}"
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        return f"{chain} has no use for {error.unused_tokens[0]!r}; leave it out, or {see}"
    line = " ".join(str(error).split()).rstrip(".")
    return f"{line[:1].lower()}{line[1:]}; {see}"


def _nearest_flag(word: str, names: Sequence[str]) -> str | None:
    return next(iter(difflib.get_close_matches(word, [name for name in names if name.startswith("--")], n=1)), None)


def _report(error: Exception) -> int:
    known = _known_error(error)
    if known is not None:
        _print_error(str(known))
        return known.exit_code
    traceback.print_exception(error)
    _print_error(f"internal error ({type(error).__name__}: {error}); please report it with the lines above")
    return P2PDilocoError.exit_code


def _known_error(error: BaseException) -> P2PDilocoError | None:
    """Return the first error that says who must act, also from within a group."""
    if isinstance(error, P2PDilocoError):
        return error
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        return StateError(
            f"cannot write {error.filename or 'to the disk'}: {error.strerror}; free some space, or choose another "
            "place with --state-directory"
        )
    # Without a name it is no file: a bug of ours, perhaps, that needs its traceback.
    if isinstance(error, OSError) and error.errno in _PERMISSION_ERRORS and error.filename is not None:
        return ConfigError(
            f"permission denied: {os.fsdecode(error.filename)}; let this user read and write there, or name another "
            "file or folder"
        )
    if isinstance(error, BaseExceptionGroup):
        return next((known for inner in error.exceptions if (known := _known_error(inner)) is not None), None)
    return None


def _print_error(text: str) -> None:
    """Print one sentence; what other peers sent may be part of it."""
    print_to_stderr(f"p2p-diloco: error: {clean_text(text)}")
