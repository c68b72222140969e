"""The plan of a peer, made by a command or a user's loop. Importing this imports neither torch nor the network."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2p_diloco.config.invite import Invite
from p2p_diloco.config.key_file import read_key_file
from p2p_diloco.config.manifest import SignedManifest
from p2p_diloco.config.run_file import KEY_FILE, read_run_toml, start_file
from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.errors import ConfigError
from p2p_diloco.guest.sensors import Sensors
from p2p_diloco.ids import Digest, PeerId, format_peer_id
from p2p_diloco.node.clock_sync import steady_unix_seconds
from p2p_diloco.signing import SigningKey

if TYPE_CHECKING:
    from p2p_diloco.codec.vectors import Vector
    from p2p_diloco.config.run_plan import RunPlan
    from p2p_diloco.ids import SpanId
    from p2p_diloco.session.network import Network
    from p2p_diloco.session.training import Training


MakeStart = Callable[["RunPlan", str | None], "dict[SpanId, Vector]"]
"""Builds the untrained model of a run and returns its initial φ; the second argument is the setting `model`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Founding:
    """A run to found, or to continue as its founder.

    Attributes:
        signed: signed manifest of the run.
        organiser_key: signs the founding roster.
        start: file or export of initial tensors; None: those of the model trained here.
        make_start: builds them where none is; None: only a file has them.
        names_founder: write this peer into the manifest as the only founder. A second bootstrap started with the same
            run file then founds another run, with another id, and never a second history of this one.
    """

    signed: SignedManifest
    organiser_key: SigningKey
    start: Path | None = None
    make_start: MakeStart | None = None
    names_founder: bool = True

    @property
    def run(self) -> Digest:
        return self.signed.manifest.digest()

    def by(self, me: PeerId) -> Founding:
        """Return a copy whose manifest names this peer as the founder.

        Raises:
            ConfigError: the run file names another founder.
        """
        manifest, own = self.signed.manifest, format_peer_id(me)
        if manifest.founder not in (None, own):
            raise ConfigError(
                f"the run names {manifest.founder} as its founder, but this peer is {own}; start it with the run's "
                "invite instead, to introduce peers to the existing run"
            )
        if manifest.founder is not None or not self.names_founder:
            return self
        return replace(self, signed=manifest.model_copy(update={"founder": own}).sign(self.organiser_key))


def read_founding(
    path: Path,
    key_path: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    start: Path | None = None,
    make_start: MakeStart | None = None,
) -> Founding:
    """Read the run at `path` and sign it with its organiser's key: `key_path`, or the key file next to the run.

    Args:
        overrides: values by dotted key in place of those in the file.
        start: initial tensors; None: of a run that continues another, the file next to the run.
        make_start: as in `Founding`.
    Raises:
        ConfigError: the file or the key is missing or wrong.
    """
    manifest = read_run_toml(path, overrides)
    key = read_key_file(key_path or path.with_name(KEY_FILE))
    if start is None and manifest.model.start is not None:
        start = start_file(path)
    return Founding(signed=manifest.sign(key), organiser_key=key, start=start, make_start=make_start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """A machine's clocks, both in Unix seconds.

    Attributes:
        steady: monotonic; never adjusted while the machine runs.
        wall: the machine's wall clock.
    """

    steady: Callable[[], float] = field(default_factory=steady_unix_seconds)
    wall: Callable[[], float] = field(default_factory=lambda: time.time)


AskQuota = Callable[[str, float], str]
"""Asks for a monthly quota, given a sentence about the traffic and the bytes of a month; returns a text for
`monthly_quota`. Called in a thread that may block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPlan:
    """One peer of a run.

    Attributes:
        settings: settings of this machine.
        source: the run to found, or the invite of the run to join.
        training: what this peer does with the run; None for a bootstrap peer, which only serves it.
        until_round: stop after this round, together with all others; None: run on.
        network: network access; None: libp2p.
        clocks: clocks of this machine.
        ask_quota: asks the machine's owner for a monthly quota, once the traffic of the run is known; None: do not ask.
        sensors: power, disk and priority of this machine.
    """

    settings: PeerSettings
    source: Founding | Invite
    training: Training | None = None
    until_round: int | None = None
    network: Network | None = None
    clocks: Clocks = field(default_factory=Clocks)
    ask_quota: AskQuota | None = None
    sensors: Sensors = field(default_factory=Sensors)

    @property
    def founding(self) -> Founding | None:
        return self.source if isinstance(self.source, Founding) else None

    @property
    def invite(self) -> Invite | None:
        return self.source if isinstance(self.source, Invite) else None

    @property
    def trains(self) -> bool:
        return self.training is not None and self.training.trains

    @property
    def keeps_state(self) -> bool:
        """Whether this peer follows the run to its end, instead of holding the state only while nobody else does."""
        return self.training is not None
