"""Share the fixtures and imports of the peer tests."""

from __future__ import annotations

from tests.session.conftest import no_thread_is_left, one_torch_thread  # noqa: F401
