"""Build the documents as a site, with its links checked, and run the commands that they mark as runnable: `make docs`.

The site is of all documents of the project, which link to each other: README, docs, and those beside programs. A fenced
block after `<!-- run -->` is run in an empty folder, with this environment's programs on the path.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)")
BLOCK = re.compile(r"^<!-- run -->\n+```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)
RUN_SECONDS = 120.0


def main() -> int:
    """Build the site into a folder; return 1 if a link is broken or a command fails."""
    parser = argparse.ArgumentParser(description="Build the documents as a site, and run their commands.")
    parser.add_argument("--into", type=Path, default=PROJECT / "build" / "site", help="folder for the site")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        is_built = build(Path(folder), options.into)
    failures = [failure for page in pages() for failure in run_blocks(page)]
    for failure in failures:
        print(failure)
    print(f"site: {options.into / 'index.html'}" if is_built else "the site has broken links; see above")
    return 0 if is_built and not failures else 1


def pages() -> list[Path]:
    """Return the documents, as git knows them."""
    done = subprocess.run(["git", "ls-files", "*.md"], cwd=PROJECT, check=True, capture_output=True, text=True)
    return [PROJECT / line for line in done.stdout.splitlines() if not line.startswith("tests/")]


def linked_files(page: Path) -> Iterator[Path]:
    """Yield the files of the project, other than documents, to which a page links."""
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        target = (page.parent / link).resolve()
        if not re.match(r"[a-z]+:", link) and target.is_file() and target.suffix != ".md":
            yield target


def build(folder: Path, into: Path) -> bool:
    """Gather documents and what they link to, and build them; return whether all links lead somewhere."""
    source = folder / "source"
    for page in pages():
        for file in (page, *linked_files(page)):
            place = source / file.relative_to(PROJECT)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, place)
    settings = {
        "site_name": "p2p_diloco",
        "docs_dir": str(source),
        "site_dir": str(into.resolve()),
        "use_directory_urls": False,
        "strict": True,
        "theme": {"name": "mkdocs", "highlightjs": False},
        "plugins": ["search"],
        "validation": {"links": {"not_found": "warn", "anchors": "warn", "unrecognized_links": "ignore"}},
        "markdown_extensions": ["tables", "fenced_code", {"toc": {"permalink": True}}],
    }
    (folder / "mkdocs.yml").write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
    command = [sys.executable, "-m", "mkdocs", "build", "--config-file", str(folder / "mkdocs.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print("".join(line for line in done.stderr.splitlines(keepends=True) if not line.startswith("INFO")), end="")
    return done.returncode == 0


def run_blocks(page: Path) -> Iterator[str]:
    """Run the blocks of a page that are marked as runnable, and yield what fails."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for block in BLOCK.findall(page.read_text(encoding="utf-8")):
        with tempfile.TemporaryDirectory() as folder:
            try:
                done = subprocess.run(
                    ["bash", "-euo", "pipefail", "-c", block],
                    cwd=folder,
                    env={**environment, "HOME": folder, "P2P_DILOCO_STATE_DIRECTORY": f"{folder}/state"},
                    capture_output=True,
                    text=True,
                    timeout=RUN_SECONDS,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                yield f"{page.relative_to(PROJECT)}: not over within {RUN_SECONDS:g} s:\n{block}"
                continue
        print(f"ran a block of {page.relative_to(PROJECT)}")
        if done.returncode != 0:
            yield f"{page.relative_to(PROJECT)}: exit code {done.returncode}:\n{block}{done.stdout}{done.stderr}"


if __name__ == "__main__":
    raise SystemExit(main())
