"""Lets the tests of this folder import what stands beside the trainer's tests, and end as those do."""

from __future__ import annotations

from tests.peer.conftest import _no_thread_is_left, _one_torch_thread  # noqa: F401
