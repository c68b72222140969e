"""Flags that commands share: every setting of a machine, by the name that it has in files and in the environment."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from p2p_diloco.config.settings import PeerSettings, load_settings

_SETTINGS = Group("This machine", help="Or P2P_DILOCO_PORT and so on in the environment, or a file: @peer.toml.")


FiguresFlag = Annotated[str | None, Parameter(help="file for the figures, or - for standard output")]
TextFlag = Annotated[str | None, Parameter(help=PeerSettings.model_fields["data"].description)]


def _setting(name: str, *, many: bool = False) -> Parameter:
    description = PeerSettings.model_fields[name].description
    return Parameter(help=description, group=_SETTINGS, consume_multiple=many, negative=())


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsFlags:
    """As typed; `settings.py` checks them, so that flag, variable and file get the same words."""

    device: Annotated[str | None, _setting("device")] = None
    threads: Annotated[str | None, _setting("threads")] = None
    data: Annotated[str | None, _setting("data")] = None
    state_directory: Annotated[str | None, _setting("state_directory")] = None
    keep_checkpoints: Annotated[str | None, _setting("keep_checkpoints")] = None
    identity_path: Annotated[str | None, _setting("identity_path")] = None
    port: Annotated[str | None, _setting("port")] = None
    public_name: Annotated[str | None, _setting("public_name")] = None
    host_maddrs: Annotated[tuple[str, ...] | None, _setting("host_maddrs", many=True)] = None
    announce_maddrs: Annotated[tuple[str, ...] | None, _setting("announce_maddrs", many=True)] = None
    initial_peers: Annotated[tuple[str, ...] | None, _setting("initial_peers", many=True)] = None
    dial_out_only: Annotated[bool | None, _setting("dial_out_only")] = None
    no_port_mapping: Annotated[bool | None, _setting("no_port_mapping")] = None
    max_upload: Annotated[str | None, _setting("max_upload")] = None
    max_download: Annotated[str | None, _setting("max_download")] = None
    keep_diary: Annotated[bool | None, _setting("keep_diary")] = None

    def given(self) -> dict[str, Any]:
        """Return the flags that were typed."""
        values = {slot.name: getattr(self, slot.name) for slot in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


def _check_pause(_: Any, seconds: float) -> None:
    if not (seconds >= 0 and math.isfinite(seconds)):
        raise ValueError(f"{seconds:g} is no number of seconds; expected 0 (never measure) or more, such as 30")


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFlags:
    """How long a peer runs and how often it measures."""

    until_round: Annotated[
        int | None, Parameter(help="stop after this round; all peers that name the same one end with the same bytes")
    ] = None
    evaluate_seconds: Annotated[
        float,
        Parameter(help="seconds between two measurements of the held-out loss; 0 = never", validator=_check_pause),
    ] = 30.0
    with_parent: Annotated[bool, Parameter(show=False, negative=())] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a command line brings beside its flags.

    Attributes:
        files: given as `@file.toml`.
        overrides: given as `--section.key value`.
        environment: variables.
    """

    files: tuple[Path, ...] = ()
    overrides: Mapping[str, Any]
    environment: Mapping[str, str]

    def without_overrides(self) -> Surroundings:
        """Return the same for a command that has used the overrides itself."""
        return replace(self, overrides={})


def settings_of(flags: SettingsFlags, around: Surroundings) -> PeerSettings:
    """Put the layers together; a dotted override is agreed by all peers, so here it is an error that says so.

    Raises:
        ConfigError: an unknown key, a value that does not fit, or a contradiction.
    """
    typed = {**flags.given(), **around.overrides}
    return load_settings(flags=typed, environment=around.environment, files=around.files)
