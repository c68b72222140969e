"""Input checks: for our own vectors, and for bytes from peers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from p2p_diloco.codec.interface import Encoded, Vector
from p2p_diloco.errors import FrameError, NonFiniteUpdate
from p2p_diloco.kernels.bounds import LARGEST, SMALLEST


def contiguous_vector(vector_N: Vector) -> Vector:
    """Return the vector as a contiguous array; a wrong type or shape is our own bug."""
    assert vector_N.dtype == np.float32, f"codecs take float32, not {vector_N.dtype}"
    assert vector_N.ndim == 1, f"codecs take flat vectors, not shape {vector_N.shape}"
    return np.ascontiguousarray(vector_N)


def bytes_of_size(name: str, encoded: Encoded, elements: int, expected_bytes: int) -> npt.NDArray[np.uint8]:
    """View bytes from a peer as an array after checking their number.

    Raises:
        FrameError: there are more or fewer bytes than expected.
    """
    received_bytes = memoryview(encoded).nbytes
    if received_bytes != expected_bytes:
        raise FrameError(f"{name} span of {elements} elements has {received_bytes} bytes; expected {expected_bytes}")
    return np.frombuffer(encoded, dtype=np.uint8)


def refuse_non_finite_update(vector_N: Vector) -> None:
    """Raise NonFiniteUpdate if one of our own vectors holds a NaN or an infinity."""
    count_text = _non_finite_text(vector_N)
    if count_text:
        raise NonFiniteUpdate(f"the update to encode holds {count_text}; it is skipped in this round")


def within_bounds(vector_N: Vector) -> Vector:
    """Return finite values within the bounds: too small ones become zero, too large ones are clipped.

    Returns the same vector if nothing is out of bounds.
    """
    magnitude_N = np.abs(vector_N)
    if not _is_out_of_bounds(magnitude_N).any():
        return vector_N
    return np.where(magnitude_N < SMALLEST, np.float32(0), np.clip(vector_N, np.float32(-LARGEST), np.float32(LARGEST)))


def refuse_frame_out_of_bounds(name: str, vector_N: Vector) -> None:
    """Raise FrameError if a peer's vector holds a NaN, an infinity, or a value that no encoder writes."""
    count_text = _non_finite_text(vector_N)
    if count_text:
        raise FrameError(f"{name} span holds {count_text}")
    wrong_N = _is_out_of_bounds(np.abs(vector_N))
    if wrong_N.any():
        element = int(np.argmax(wrong_N))
        raise FrameError(
            f"{name} span holds {int(np.count_nonzero(wrong_N))} of {vector_N.size} values out of bounds, the first at "
            f"element {element} ({vector_N[element]:.3g}); expected 0 or a magnitude from {SMALLEST:.3g} to "
            f"{LARGEST:.3g}"
        )


def _is_out_of_bounds(magnitude_N: Vector) -> npt.NDArray[np.bool_]:
    wrong_N: npt.NDArray[np.bool_] = (magnitude_N > LARGEST) | ((magnitude_N < SMALLEST) & (magnitude_N != 0))
    return wrong_N


def _non_finite_text(vector_N: Vector) -> str:
    finite_N = np.isfinite(vector_N)
    if finite_N.all():
        return ""
    count = vector_N.size - int(np.count_nonzero(finite_N))
    return f"{count} of {vector_N.size} values that are not finite, the first at element {int(np.argmin(finite_N))}"
