"""Refuse input that a command would ignore: an option without effect costs its user hours."""

from __future__ import annotations

import types
from typing import Any, Union, get_args, get_origin

from cyclopts import App, ArgumentCollection

from p2p_diloco.cli.flags import Surroundings
from p2p_diloco.errors import ConfigError
from p2p_diloco.rate import parse_rate, parse_traffic

HEED_SURROUNDINGS = (
    "new",
    "bootstrap",
    "join",
    "archive",
    "status",
    "pause",
    "resume",
    "limits",
    "leave",
    "sample",
    "export",
)
_AMOUNTS = {"--uplink": parse_rate, "--traffic": parse_traffic}


class Refusals:
    """Checks the typed tokens before the parser converts them; called by cyclopts as a `config`."""

    def __init__(self, around: Surroundings | None = None) -> None:
        self._around = around if around is not None else Surroundings(overrides={}, environment={})

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Refuse tokens that this command would ignore or round.

        Raises:
            ConfigError: an `@file` or a dotted override that the command does not take, or a fractional count.
        """
        if commands and commands[0] not in HEED_SURROUNDINGS:
            self._refuse_surroundings(" ".join(commands))
        for argument in arguments:
            if commands in (("plan",), ("new",)) and argument.name in _AMOUNTS:
                for token in argument.tokens:
                    _AMOUNTS[argument.name](token.value, argument.name)  # before the parser reports missing options
            if int in _kinds(argument.hint):
                for token in argument.tokens:
                    _refuse_fraction(token.keyword or argument.name, token.value)

    def _refuse_surroundings(self, command: str) -> None:
        given = [f"--{key}" for key in self._around.overrides] + [f"@{path}" for path in self._around.files]
        if given:
            raise ConfigError(
                f"{command} does not take {given[0]}; leave it out: only {', '.join(HEED_SURROUNDINGS[:-1])} and "
                f"{HEED_SURROUNDINGS[-1]} take files and dotted overrides"
            )


def _kinds(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _refuse_fraction(name: str, text: str) -> None:
    """Refuse a fraction, which the parser would round."""
    try:
        is_whole = float(text).is_integer()
    except ValueError:
        return  # perhaps another base; the parser reports what is not a number
    if not is_whole:
        raise ConfigError(f"{name} is {text}; expected a whole number")
