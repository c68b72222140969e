"""Flags that commands share: every machine setting, with the same name as in files and the environment."""

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


def _check_count(_: Any, count: int) -> None:
    if count < 1:
        raise ValueError(f"{count} is too small; expected at least 1")


CountFlag = Annotated[int, Parameter(validator=_check_count)]


def _setting(name: str, *, many: bool = False) -> Parameter:
    description = PeerSettings.model_fields[name].description
    return Parameter(help=description, group=_SETTINGS, consume_multiple=many, negative=())


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsFlags:
    """Limits of this machine's owner as typed; `limits` also changes them while a peer runs."""

    max_upload: Annotated[str | None, _setting("max_upload")] = None
    max_download: Annotated[str | None, _setting("max_download")] = None
    monthly_quota: Annotated[str | None, _setting("monthly_quota")] = None
    hours: Annotated[str | None, _setting("hours")] = None
    days: Annotated[str | None, _setting("days")] = None
    on_battery: Annotated[str | None, _setting("on_battery")] = None
    disk_cap: Annotated[str | None, _setting("disk_cap")] = None
    disk_free: Annotated[str | None, _setting("disk_free")] = None
    nice: Annotated[str | None, _setting("nice")] = None
    gpu_duty: Annotated[str | None, _setting("gpu_duty")] = None

    def given(self) -> dict[str, Any]:
        """Return the flags that were typed."""
        values = {slot.name: getattr(self, slot.name) for slot in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsFlags(LimitsFlags):
    """Settings as typed; `settings.py` checks them, so that flags, variables and files get the same errors."""

    device: Annotated[str | None, _setting("device")] = None
    threads: Annotated[str | None, _setting("threads")] = None
    data: Annotated[str | None, _setting("data")] = None
    model: Annotated[str | None, _setting("model")] = None
    precision: Annotated[str | None, _setting("precision")] = None
    windows_at_once: Annotated[str | None, _setting("windows_at_once")] = None
    recompute: Annotated[str | None, _setting("recompute")] = None
    ranks: Annotated[str | None, _setting("ranks")] = None
    shards: Annotated[str | None, _setting("shards")] = None
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
    keep_trace: Annotated[bool | None, _setting("keep_trace")] = None
    tensorboard: Annotated[str | None, _setting("tensorboard")] = None


def _check_pause(_: Any, seconds: float) -> None:
    if not (seconds >= 0 and math.isfinite(seconds)):
        raise ValueError(f"{seconds:g} is not a valid number of seconds; expected 0 (never) or more, such as 30")


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class EndFlags:
    """The length of a peer's run."""

    until_round: Annotated[
        int | None, Parameter(help="stop after this round; all peers that name the same one end with the same bytes")
    ] = None
    with_parent: Annotated[bool, Parameter(show=False, negative=())] = False


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFlags(EndFlags):
    """The length of a peer's run, and the interval of its measurements."""

    evaluate_seconds: Annotated[
        float,
        Parameter(help="seconds between two measurements of the held-out loss; 0 = never", validator=_check_pause),
    ] = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Inputs of a command line other than its flags.

    Attributes:
        files: given as `@file.toml`.
        overrides: given as `--section.key value`.
        environment: environment variables.
        arguments: the whole command line, to start it again in another process.
    """

    files: tuple[Path, ...] = ()
    overrides: Mapping[str, Any]
    environment: Mapping[str, str]
    arguments: tuple[str, ...] = ()

    def without_overrides(self) -> Surroundings:
        """Return a copy without overrides, for a command that has already used them."""
        return replace(self, overrides={})


def settings_of(flags: SettingsFlags, around: Surroundings) -> PeerSettings:
    """Merge the layers of settings; a dotted override belongs to the manifest, so here it raises an error.

    Raises:
        ConfigError: an unknown key, an invalid value, or a contradiction.
    """
    typed = {**flags.given(), **around.overrides}
    return load_settings(flags=typed, environment=around.environment, files=around.files)
