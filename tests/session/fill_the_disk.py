"""Fill a file system of its own, and print what a peer's archive did: `python fill_the_disk.py FOLDER`.

Run it in a mount namespace (`unshare --mount`): it mounts a small tmpfs over FOLDER. It prints one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from kept_entries import log_of
from small_run import small_plan, start_states

from p2p_diloco.errors import StateError
from p2p_diloco.ids import SpanId, sha256
from p2p_diloco.protocol.wire.ballot import Ballots
from p2p_diloco.storage.archive import Archive
from p2p_diloco.storage.run_folder import RunFolder

SIZE_KIB = 512
SPAN = SpanId(0, 0)


def fill(path: Path, leave_bytes: int) -> None:
    """Take all space except some bytes."""
    with path.open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        file.truncate(max(file.tell() - leave_bytes, 0))


def main(folder: Path) -> dict[str, object]:
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_KIB}k", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        return {"not_permitted": mounted.stderr.strip()}
    plan, heard = small_plan(), []
    start = start_states(plan)
    run_folder = RunFolder(folder, plan.rules.run)
    archive = Archive(
        run_folder.path, plan=plan, keep=2, soon=lambda write: write(), report=lambda topic, text: heard.append(text)
    )
    run_folder.make_room_with(archive.make_room)
    entries, states = log_of(plan, SPAN, start[SPAN], 5)
    archive.save(start)
    for entry in entries[:4]:
        archive.keep_entry(entry)
    fill(folder / "others", leave_bytes=8192)
    refused = ""
    try:
        archive.save({**start, SPAN: states[3]})
    except StateError as error:
        refused = str(error)
    drafts = [path.name for path in run_folder.path.iterdir() if ".part" in path.name]
    fill(folder / "more of others", leave_bytes=0)
    run_folder.keep_ballots(Ballots(parent=sha256(b"parent"), bonds=()))
    archive.keep_entry(entries[4])
    recalled = archive.recall()
    return {
        "refused": refused,
        "drafts": drafts,
        "heard": heard,
        "recalled": recalled is not None,
        "served": [archive.entry_after(SPAN, entry.parent) == entry for entry in entries],
        "ballots": run_folder.recall_ballots().parent == sha256(b"parent"),
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
