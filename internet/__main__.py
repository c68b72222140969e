"""`python -m internet`: play scenes on an internet of namespaces, and print what each came to."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
from pathlib import Path

from internet.places import NoInternetError
from internet.play import How, Play, played
from internet.report import Row, lines_of, report
from internet.scenes import SCENES
from internet.troubles import TROUBLES

SECONDS = 300.0
BROKEN, NOT_PERMITTED = 1, 3


def main() -> int:
    """Play the scenes that are named; return 0 if all could be played."""
    parser = argparse.ArgumentParser(prog="python -m internet", description=__doc__)
    parser.add_argument("scenes", nargs="*", default=list(SCENES), metavar="scene", help=", ".join(SCENES))
    parser.add_argument("--how", choices=[how.value for how in How], default=How.LOOP.value, help="who trains")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="length of a play")
    parser.add_argument("--plays", type=int, default=1, help="plays of each scene")
    parser.add_argument("--seed", type=int, default=0, help="of losses, jitter and ports")
    parser.add_argument("--round-seconds", type=float, help="length of rounds, in place of the one that `new` chooses")
    parser.add_argument("--step-seconds", type=float, default=0.1, help="length of the own loop's steps")
    parser.add_argument("--trouble", choices=list(TROUBLES), help="what goes wrong on the way, at the second home")
    parser.add_argument("--congestion", help="congestion control of TCP, such as cubic")
    parser.add_argument("--json", type=Path, help="append a row for each play to this file")
    parser.add_argument("--keep", type=Path, help="keep the folders of all processes here")
    parser.add_argument("--rosters", action="store_true", help="list the rosters, and what the statuses said")
    options = parser.parse_args()
    for name in options.scenes:
        if name not in SCENES:
            parser.error(f"{name} is no scene; expected one of {', '.join(SCENES)}")
    for number in range(options.plays):
        for name in options.scenes:
            try:
                row = _play(name, number, options)
            except NoInternetError as error:
                print(f"error: {error}", file=sys.stderr)
                return NOT_PERMITTED
            print("\n".join(lines_of(row)), flush=True)
            if options.rosters:
                print("\n".join(f"    {change}" for change in (*row.rosters, *row.told)), flush=True)
            if options.json is not None:
                with options.json.open("a") as file:
                    file.write(json.dumps(dataclasses.asdict(row)) + "\n")
    return 0


def _play(name: str, number: int, options: argparse.Namespace) -> Row:
    play = Play(
        how=How(options.how),
        seconds=options.seconds,
        step_seconds=options.step_seconds,
        round_seconds=options.round_seconds,
        trouble=TROUBLES[options.trouble] if options.trouble is not None else None,
    )
    keep = options.keep / f"{name}-{number}" if options.keep is not None else None
    if keep is not None and keep.exists():
        shutil.rmtree(keep)
    with played(SCENES[name](), play, seed=options.seed + number, congestion=options.congestion, keep=keep) as result:
        return report(name, result)


if __name__ == "__main__":
    sys.exit(main())
