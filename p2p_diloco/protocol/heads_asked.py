"""Who was asked where the spans of a fragment stand, and who has said so while it is replayed.

A fragment that is replayed differs from its donors until it is done, and each of their signs of life shows it. Asked
with each, a donor with a thin line says the same again and again, where it should send entries.
"""

from __future__ import annotations

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.window import Asked


class HeadsAsked:
    """Questions about heads, one at a time for each fragment. No I/O."""

    def __init__(self) -> None:
        self._asked: dict[int, Asked] = {}
        self._heard: dict[int, set[PeerId]] = {}

    def may_ask(self, fragment: int, donor: PeerId, now: float, *, is_replayed: bool) -> bool:
        """Tell whether nobody is being asked and, while the fragment is replayed, this donor has not been heard."""
        if not is_replayed:
            self._heard.pop(fragment, None)
        asked = self._asked.get(fragment)
        return donor not in self._heard.get(fragment, ()) and (asked is None or asked.until <= now)

    def ask(self, fragment: int, donor: PeerId, until: float) -> None:
        """Note a question."""
        self._asked[fragment] = Asked(donor=donor, until=until)

    def take(self, fragment: int, sender: PeerId) -> bool:
        """Note a reply; False: it answers no question."""
        asked = self._asked.get(fragment)
        if asked is None or asked.donor != sender:
            return False
        del self._asked[fragment]
        self._heard.setdefault(fragment, set()).add(sender)
        return True

    def forget(self, fragment: int) -> None:
        """Let all be asked again: something here is not what they were compared with."""
        self._heard.pop(fragment, None)

    def clear(self) -> None:
        """Forget all."""
        self._asked.clear()
        self._heard.clear()
