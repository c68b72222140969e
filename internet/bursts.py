"""Measure what raw TCP carries on the lines of a scene: `python -m internet.bursts bad`.

Every few seconds each home sends a burst to each of the two peers that average, as it sends contributions, and waits
until each frame is acknowledged. This tells how much of a late contribution is due to the lines and TCP alone.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

from internet.places import Internet, Place
from internet.scenes import SCENES

PORT, FRAME_BYTES = 31400, 70_000
"""A contribution to one span, in a round of 1 MB with 16 spans."""
CONNECT_SECONDS = 20.0
LINES = ("near", "good", "mixed", "far", "bad")
"""Scenes with one machine at the end of each line."""


def serve() -> None:
    """Acknowledge each frame of all connections with a byte, until this process is killed."""
    with socket.create_server(("0.0.0.0", PORT)) as server:
        while True:
            threading.Thread(target=_acknowledge, args=(server.accept()[0],), daemon=True).start()


def _acknowledge(connection: socket.socket) -> None:
    left = FRAME_BYTES
    with contextlib.suppress(OSError):
        while came := connection.recv(min(left, 1 << 16)):
            left -= len(came)
            if left == 0:
                connection.send(b".")
                left = FRAME_BYTES


def send(host: str, bursts: int, frames: int, window: int, every: float) -> None:
    """Send bursts to a host at the same times as all others; print the seconds that each took.

    Args:
        window: most frames that are not acknowledged.
        every: seconds from one burst to the next.
    """
    took = []
    with socket.create_connection((host, PORT), CONNECT_SECONDS) as connection:
        connection.settimeout(None)
        first = (time.time() // every + 1) * every
        for number in range(bursts):
            time.sleep(max(first + number * every - time.time(), 0.0))
            began, sent, read = time.monotonic(), 0, 0
            while read < frames:
                while sent < min(frames, read + window):
                    connection.sendall(bytes(FRAME_BYTES))
                    sent += 1
                came = len(connection.recv(frames))
                if not came:
                    raise ConnectionError(f"{host} closed the connection")
                read += came
            took.append(time.monotonic() - began)
    print(" ".join(f"{seconds:.1f}" for seconds in took))


def _run(place: Place, *arguments: str) -> subprocess.Popen[str]:
    command = (*place.entrance, sys.executable, "-m", "internet.bursts", *arguments)
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def main() -> None:
    """Play a scene, or be one end of it."""
    parser = argparse.ArgumentParser(prog="python -m internet.bursts", description=__doc__)
    parser.add_argument("scene", choices=[*LINES, "serve", "send"])
    parser.add_argument("host", nargs="?", help="with send: where to")
    parser.add_argument("--bursts", type=int, default=8)
    parser.add_argument("--frames", type=int, default=8, help=f"frames of {FRAME_BYTES} bytes in a burst")
    parser.add_argument("--window", type=int, default=1000, help="most frames that are not acknowledged")
    parser.add_argument("--every", type=float, default=10.0, help="seconds from one burst to the next")
    parser.add_argument("--congestion", help="congestion control of TCP, such as cubic")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.scene == "serve":
        serve()
    elif options.scene == "send":
        send(options.host, options.bursts, options.frames, options.window, options.every)
    else:
        given = [f"--{name}={getattr(options, name)}" for name in ("bursts", "frames", "window", "every")]
        scene = SCENES[options.scene]()
        homes = list(scene.trainers)
        reducers = {scene.bootstrap: scene.bootstrap_address, homes[0]: scene.sites[homes[0]].address}
        with Internet(scene.sites, seed=options.seed, congestion=options.congestion) as internet, _ended() as processes:
            processes += [_run(internet.places[name], "serve") for name in reducers]
            time.sleep(1.0)
            sending = {
                (home, to): _run(internet.places[home], "send", host, *given)
                for home in homes
                for to, host in reducers.items()
                if home != to
            }
            processes += sending.values()
            print(f"seconds of each burst of {options.frames} x {FRAME_BYTES} bytes, {internet.congestion}:")
            for (home, to), process in sending.items():
                print(f"  {home} to {to}: {process.communicate()[0].strip()}")


@contextlib.contextmanager
def _ended() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
