"""The options of the commands, each declared once: name, type, default, meaning and check.

The settings of a machine are declared in `config/settings.py`; their flags follow from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypedDict, get_origin

from cyclopts import Group, Parameter

from p2p_diloco.config.settings import LIMITS, PeerSettings, load_settings
from p2p_diloco.errors import ConfigError
from p2p_diloco.rate import check_count, check_positive, count_named, parse_rate, parse_traffic

NONE_TYPED: Mapping[str, Any] = MappingProxyType({})
_SETTINGS = Group("This machine", help="Or P2P_DILOCO_PORT and so on in the environment, or a file: @peer.toml.")


def _checked(check: Callable[..., object], *details: str) -> Parameter:
    """Return a declaration of an option whose value `check(value, *details)` may refuse with a `ConfigError`."""
    return Parameter(validator=lambda _, value: value is None or check(value, *details))


def _check_pause(seconds: float, name: str) -> None:
    if not (seconds >= 0 and math.isfinite(seconds)):
        raise ConfigError(
            f"{name}: {seconds:g} is not a valid number of seconds; expected 0 (never) or more, such as 30"
        )


def _settings_flags(keys: Collection[str]) -> Any:
    """Return the type of a dictionary of those settings that were typed; `config/settings.py` checks them.

    They are taken as texts, so that flags, variables and files get the same errors.
    """
    flags: dict[str, Any] = {}
    for key in keys:
        setting = PeerSettings.model_fields[key]
        is_list = get_origin(setting.annotation) is tuple
        kind: Any = tuple[str, ...] if is_list else bool if setting.annotation is bool else str
        flag = Parameter(help=setting.description, group=_SETTINGS, consume_multiple=is_list, negative=())
        flags[key] = Annotated[kind, flag]
    typed = TypedDict("SettingsFlags", flags, total=False)  # type: ignore[misc]  # made from the settings
    return Annotated[typed, Parameter(name="*")]


if TYPE_CHECKING:
    SettingsFlags: TypeAlias = Mapping[str, Any]
    LimitsFlags: TypeAlias = Mapping[str, Any]
else:
    SettingsFlags = _settings_flags(PeerSettings.model_fields)
    LimitsFlags = _settings_flags(LIMITS)

FiguresFlag = Annotated[str | None, Parameter(help="file for the figures, or - for standard output")]
TextFlag = Annotated[str | None, Parameter(help=PeerSettings.model_fields["data"].description)]
KeyFlag = Annotated[Path | None, Parameter(help="key that signs the run [default: organiser.key next to the run file]")]
OwnStateFlag = Annotated[str | None, Parameter(help="state directory of the peer [default: the one that `join` uses]")]
StateDirectoryFlag = Annotated[
    str | None, Parameter(help="state directory of the peer whose newest checkpoint is read; the peer may be running")
]
RunFlag = Annotated[str | None, Parameter(help="first digits of the run id, if the directory holds several runs")]
OwnModelFlag = Annotated[
    str | None,
    Parameter(help="your copy of the base model of a LoRA, or the python:<module>:<function> that you agree to run"),
]
Every = Annotated[int, _checked(check_count, "--every")]
Keep = Annotated[int, _checked(check_count, "--keep")]
Traffic = Annotated[str | None, _checked(parse_traffic, "--traffic")]
LanFlag = Annotated[bool, Parameter(negative="")]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """The options of every command that starts a peer.

    Attributes:
        until_round: stop after this round; peers that stop after the same one end with the same model
        page: serve a web page about this peer, for this machine alone, and print its address
    """

    organiser_key: KeyFlag = None
    until_round: int | None = None
    page: Annotated[bool, Parameter(negative=())] = False
    with_parent: Annotated[bool, Parameter(show=False, negative=())] = False
    settings: SettingsFlags = field(default_factory=dict)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions(StartOptions):
    """The options of a command whose peer may measure the held-out loss.

    Attributes:
        evaluate_seconds: seconds between two measurements of the loss on text that nobody trains on; 0 = never
    """

    evaluate_seconds: Annotated[float, _checked(_check_pause, "--evaluate-seconds")] = 30.0


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class LearntOptions:
    """The options of a command that reads the model of a run."""

    state_directory: StateDirectoryFlag = None
    run: RunFlag = None
    model: OwnModelFlag = None


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class NewRunOptions:
    """The options of `new`; None: not given.

    Attributes:
        name: name of the run
        islands: number of islands to tune the run for; more can join later
        uplink: upload rate of the slowest island, such as 20mbit or 2gbit; a slower line needs longer cycles
        step_seconds: duration of an inner step; measured here if not given
        hours: planned length of the run, towards whose end the learning rates fall [default: no planned end]
        lan: all machines are on one local network, where shorter rounds suffice
        traffic: maximum that a machine sends and receives, such as 10GB/day; it makes cycles up to four times as long
        device: device to measure the step on: auto, cpu, cuda, cuda:<number> or mps
        threads: CPU threads that training may use
        source: state directory of a peer, or export, of a run whose model and values the new run takes over
        run: first digits of that run's id, if the state directory holds several
    """

    name: str | None = None
    islands: Annotated[int | None, _checked(check_count, "--islands")] = None
    uplink: Annotated[str | None, _checked(parse_rate, "--uplink")] = None
    step_seconds: Annotated[float | None, _checked(check_positive, "--step-seconds", "0.045")] = None
    hours: Annotated[float | None, _checked(check_positive, "--hours", "12")] = None
    lan: LanFlag = False
    traffic: Traffic = None
    device: str | None = None
    threads: str | None = None
    key_path: Annotated[KeyFlag, Parameter(name="--organiser-key")] = None
    source: Annotated[Path | None, Parameter(name="--continue")] = None
    run: str | None = None

    @property
    def chooses_rounds(self) -> bool:
        """Whether the rounds are chosen here, and not those of a run to continue."""
        conditions = (self.islands, self.uplink, self.step_seconds, self.traffic)
        return self.source is None or self.lan or any(condition is not None for condition in conditions)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options of `plan`.

    Attributes:
        parameters: number of parameters of the model, such as 12B
        islands: number of islands, or counts of kinds, such as 1xH100,4xlaptop or 2x40TFLOPS,3x1300tokens/s
        uplink: upload rate of the slowest island, such as 20mbit or 2gbit
        step_seconds: duration of a planned inner step [default: 1.0; where kinds are named, that of the middle island]
        tokens: planned tokens of the run, for kinds of islands, such as 20B [default: 20 per parameter]
        windows: windows of a planned step, for kinds of islands
        context: tokens of a window, for kinds of islands
        cores: cores that share the outer work of an island; today a process uses one
        group_size: peers that average with each other in one row
        lan: all machines are on one local network, where shorter rounds suffice
        traffic: maximum that a machine sends and receives, such as 10GB/day; it makes cycles up to four times as long
    """

    parameters: str
    islands: str
    uplink: Annotated[str, _checked(parse_rate, "--uplink")]
    step_seconds: Annotated[float | None, _checked(check_positive, "--step-seconds", "0.045")] = None
    tokens: Annotated[str | None, _checked(count_named, "--tokens")] = None
    windows: Annotated[int, _checked(check_count, "--windows")] = 4
    context: Annotated[int, _checked(check_count, "--context")] = 1024
    cores: Annotated[int, _checked(check_count, "--cores")] = 1
    group_size: Annotated[int, _checked(check_count, "--group-size")] = 16
    lan: LanFlag = False
    traffic: Traffic = None
    json: FiguresFlag = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandContext:
    """Inputs of a command line other than its flags.

    Attributes:
        files: given as `@file.toml`.
        overrides: given as `--section.key value`.
        environment: environment variables.
        arguments: the whole command line, to start it again in another process.
    """

    files: tuple[Path, ...] = ()
    overrides: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()

    def settings(self, flags: Mapping[str, Any] = NONE_TYPED, *, founds: bool = False) -> PeerSettings:
        """Merge the layers of settings.

        Args:
            flags: values as typed, by name; None counts as not given.
            founds: the overrides are of the run that this peer founds; otherwise each raises an error, because it
                belongs to the manifest.
        Raises:
            ConfigError: an unknown key, an invalid value, or a contradiction.
        """
        typed = {**flags} if founds else {**flags, **self.overrides}
        return load_settings(flags=typed, environment=self.environment, files=self.files)
