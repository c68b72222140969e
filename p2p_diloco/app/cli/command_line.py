"""Parse a command line, call the command, and turn every error into one sentence and an exit code."""

from __future__ import annotations

import difflib
import errno
import inspect
import os
import re
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeAlias, Union, get_args, get_origin

from cyclopts import App, ArgumentCollection, CycloptsError
from cyclopts.exceptions import MissingArgumentError, UnknownCommandError, UnknownOptionError, UnusedCliTokensError

from p2p_diloco.app.cli.options import CommandContext
from p2p_diloco.app.cli.output import flush_or_discard, print_to_stderr, take_any_text
from p2p_diloco.config.settings import as_key
from p2p_diloco.config.toml_document import parse_value
from p2p_diloco.errors import ConfigError, P2PDilocoError, StateError, clean_text

STOPPED = 130
LONG_AT_WORK = frozenset({"training", "vectors"})
"""Threads of `app.training.training_thread` and `node.vector_actions`, by name: importing these would import torch."""
PATIENCE_SECONDS = 5.0
_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
_PERMISSION_ERRORS = frozenset({errno.EACCES, errno.EPERM})

Nearest: TypeAlias = Callable[[str, str], str | None]
"""Maps a command and an unknown option to the option probably meant, among those that its help does not list."""


def exit_code_of(program: str, run: Callable[[], int]) -> int:
    """Run a command line of a program and return its exit code; errors are printed."""
    take_any_text()
    try:
        return _run_and_flush(run)
    except KeyboardInterrupt:
        return STOPPED
    except BrokenPipeError:
        return 0  # the reader closed the pipe because it has read enough
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        return 0  # the same: rich turns a broken pipe into exit code 1
    except Exception as error:
        return _report(program, error)
    finally:
        flush_or_discard(sys.stdout)


def _run_and_flush(run: Callable[[], int]) -> int:
    """Run a command line and flush its output, so that a failed write can still be reported."""
    code = run()
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        pass  # keep the exit code: the reader that closed the pipe may still use it
    except OSError as error:
        raise StateError(f"cannot write the output: {error.strerror}; free some space or redirect it") from None
    return code


def split_arguments(
    arguments: Sequence[str], undotted: Collection[str] = ()
) -> tuple[list[str], tuple[Path, ...], dict[str, Any]]:
    """Split `@file.toml` and dotted overrides (`--outer.momentum 0.7`, `--outer.momentum=0.7`) from a command line.

    Args:
        arguments: the words of the command line.
        undotted: names that are overrides even without a dot, such as `outer_lr`.
    Returns:
        The other arguments, with dashes instead of underscores in flag names; the files; the overrides by dotted key.
    Raises:
        ConfigError: an override without a value.
    """
    rest: list[str] = []
    files: list[Path] = []
    overrides: dict[str, Any] = {}
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if word == "--":
            rest += [word, *words]
        elif word.startswith("@") and len(word) > 1:
            files.append(Path(word[1:]))
        elif re.fullmatch(r"--[A-Za-z_-]+(\.[A-Za-z_-]+)+", name) or (
            name.startswith("--") and as_key(name) in undotted
        ):
            text = value if equals else next(words, None)
            if text is None:
                raise ConfigError(f"{word} needs a value")
            overrides[as_key(name[2:])] = parse_value(text)
        elif word.startswith("--"):
            rest.append(f"{name.replace('_', '-')}{equals}{value}")
        else:
            rest.append(word)
    return rest, tuple(files), overrides


def call_command(
    app: App,
    words: Sequence[str],
    nearest: Nearest = lambda command, word: None,
    around: CommandContext | None = None,
) -> int:
    """Parse `words` and call the command; errors are raised.

    Args:
        around: passed to a command that declares `around`; the others refuse its files and overrides.
    Raises:
        P2PDilocoError: what is wrong and what to do.
    """
    try:
        command, bound, unparsed = app.parse_args(_joined_dash(words), print_error=False, exit_on_error=False)
    except CycloptsError as error:
        raise ConfigError(_sentence(error, app, nearest)) from None
    inputs = {"around": around} if "around" in unparsed else {}
    if around is not None and not inputs:
        _refuse_context(app, command, around)
    code = command(*bound.args, **bound.kwargs, **inputs)
    return code if isinstance(code, int) else 0


def check_typed(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Check what was typed before missing options are reported; called by cyclopts as a `config`.

    Raises:
        ConfigError: a value is invalid, or a count is a fraction, which the parser would round.
    """
    for argument in arguments:
        for token in argument.tokens:
            if int in _kinds(argument.hint):
                _refuse_fraction(token.keyword or argument.name, token.value)
        if argument.tokens:
            argument.convert_and_validate()


def _refuse_context(app: App, command: Callable[..., object], around: CommandContext) -> None:
    """Refuse an `@file` or a dotted override of a command that would ignore it: that costs its user hours."""
    commands = {name: found for name in app if not name.startswith("-") and (found := app[name].default_command)}
    given = [f"--{key}" for key in around.overrides] + [f"@{path}" for path in around.files]
    refusing = next((name for name, found in commands.items() if found is command), None)
    if given and refusing is not None:
        takers = [name for name, found in commands.items() if "around" in inspect.signature(found).parameters]
        raise ConfigError(
            f"{refusing} does not take {given[0]}; leave it out: only {', '.join(takers[:-1])} and {takers[-1]} take "
            "files and dotted overrides"
        )


def _kinds(hint: object) -> tuple[object, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _refuse_fraction(name: str, text: str) -> None:
    try:
        is_whole = float(text).is_integer()
    except ValueError:
        return  # perhaps another base; the parser reports what is not a number
    if not is_whole:
        raise ConfigError(f"{name} is {text}; expected a whole number")


def _joined_dash(words: Sequence[str]) -> list[str]:
    """Join a lone dash to its flag: in `--json -` it means standard output, but the parser would read it as a flag."""
    joined: list[str] = []
    for word in words:
        if word == "-" and joined and joined[-1].startswith("--") and "=" not in joined[-1]:
            joined[-1] += "=-"
        else:
            joined.append(word)
    return joined


def _sentence(error: CycloptsError, app: App, nearest: Nearest) -> str:
    """Reword a parser's error in our style, with the nearest name if something is misspelt."""
    chain = " ".join(error.command_chain or ())
    see = f"see {' '.join(filter(None, (app.name[0], chain)))} --help"
    if isinstance(error, UnknownCommandError) and error.unused_tokens:
        if error.unused_tokens[0].startswith("-"):
            word = error.unused_tokens[0].partition("=")[0]
            found = _nearest_flag(word, ["--help", "--version"])
            hint = f"did you mean {found}?" if found else f"options follow a command; {see}"
            return f"unknown option {word}; {hint}"
        names = [name for name in error.app or app if not name.startswith("-")]
        near = difflib.get_close_matches(error.unused_tokens[0], names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are: {', '.join(names)}; {see}"
        return f"unknown command {error.unused_tokens[0]}; {hint}"
    if isinstance(error, UnknownOptionError):
        word = (error.token.keyword or error.token.value).partition("=")[0]
        names = [name for each in error.argument_collection if each.show for name in each.names]
        found = _nearest_flag(word, names) or nearest(chain, word)
        return f"unknown option {word}; {f'did you mean {found}?' if found else see}"
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        purpose = f": {error.argument.parameter.help}" if error.argument.parameter.help else ""
        needed = (
            f"{chain or app.name[0]} needs {error.argument.name}"
            if error.keyword is None
            else f"{error.keyword} needs a value"
        )
        return f"{needed}{purpose}; {see}"
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        return f"{chain} does not take {error.unused_tokens[0]!r}; leave it out, or {see}"
    line = " ".join(str(error).split()).rstrip(".")
    return f"{line[:1].lower()}{line[1:]}; {see}"


def _nearest_flag(word: str, names: Sequence[str]) -> str | None:
    return next(iter(difflib.get_close_matches(word, [name for name in names if name.startswith("--")], 1, 0.65)), None)


def _report(program: str, error: Exception) -> int:
    known = _known_error(error)
    if known is not None:
        _print_error(program, str(known))
        return known.exit_code
    traceback.print_exception(error)
    _print_error(program, f"internal error ({type(error).__name__}: {error}); please report it with the lines above")
    return P2PDilocoError.exit_code


def _known_error(error: BaseException) -> P2PDilocoError | None:
    """Return the first `P2PDilocoError`, also from within an exception group."""
    if isinstance(error, P2PDilocoError):
        return error
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        return StateError(
            f"cannot write {error.filename or 'to the disk'}: {error.strerror}; free some space, or choose another "
            "place with --state-directory"
        )
    # Without a file name it may be our own bug, which needs its traceback.
    if isinstance(error, OSError) and error.errno in _PERMISSION_ERRORS and error.filename is not None:
        return ConfigError(
            f"permission denied: {os.fsdecode(error.filename)}; give this user read and write access, or name "
            "another file or folder"
        )
    if isinstance(error, BaseExceptionGroup):
        return next((known for inner in error.exceptions if (known := _known_error(inner)) is not None), None)
    return None


def _print_error(program: str, text: str) -> None:
    """Print one sentence, cleaned because it may contain text from other peers."""
    print_to_stderr(f"{program}: error: {clean_text(text)}")


def end_despite_last_step(exit_code: int) -> int:
    """Return the exit code, or exit the process with it at once if one of those threads is still busy.

    A peer waits a few seconds for its last step, and a step may take minutes. The interpreter ends remaining threads
    when they return to it, which inside torch's C++ aborts the process with another exit code.
    """
    if any(thread.name in LONG_AT_WORK for thread in threading.enumerate()):
        _wait_for_writers()
        for stream in (sys.stdout, sys.stderr):
            flush_or_discard(stream)
        os._exit(exit_code)
    return exit_code


def _wait_for_writers() -> None:
    """Give the non-daemon threads a while to finish their writes."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join(max(deadline - time.monotonic(), 0.0))
