"""Generate the pages of docs/reference that follow from the code: `make reference`.

tests/test_reference.py fails while a page differs from the code.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic.fields import FieldInfo

from p2p_diloco.app.cli.app import app
from p2p_diloco.config.manifest import RunManifest, Section
from p2p_diloco.config.settings import ENVIRONMENT_PREFIX, PeerSettings
from p2p_diloco.status.event_log import TOPICS
from p2p_diloco.status.status_file import ByteCounts, PeerLine, PeerStatus

FOLDER = Path(__file__).parent / "reference"
NOTE = "Generated from the code by `make reference`.\n"
_DEFAULT = re.compile(r"(.*?)(?: \[default: (.*)\])?", re.DOTALL)


def pages() -> dict[str, str]:
    """Return the text of each page by the name of its file."""
    return {
        "commands.md": commands_page(),
        "manifest.md": manifest_page(),
        "settings.md": settings_page(),
        "status.md": status_page(),
        "events.md": events_page(),
    }


def commands_page() -> str:
    """Return the commands and their options."""
    parts = [
        f"# Commands\n\n{NOTE}\n`p2p-diloco COMMAND --help` prints the same. `join`, `bootstrap`, `archive` "
        "and `doctor` also accept the\n[settings of this machine](settings.md) as flags; `new` and `bootstrap` accept "
        "the [keys of the manifest](manifest.md).\n"
    ]
    for name in (name for name in app if not name.startswith("-")):
        command = app[name]
        rows = []
        for argument in command.assemble_argument_collection(parse_docstring=True):
            if not argument.show or argument.parameter.group[0].name == "This machine":
                continue
            default = argument.field_info.default
            is_told = default not in (None, False) and default is not inspect.Parameter.empty
            flag = argument.names[0] if argument.names[0].startswith("-") else argument.names[0].upper()
            rows.append((f"`{flag}`", *_with_default(argument.parameter.help, f"`{default}`" if is_told else "")))
        parts += [f"\n## {name}\n\n{_summary(command.help)}\n\n"]
        parts += [_table(("option", "meaning", "default"), rows)] if rows else []
    return "".join(parts)


def manifest_page() -> str:
    """Return the keys of run.toml."""
    parts = [
        f"# The manifest: `run.toml`\n\n{NOTE}\nAll peers of a run agree on these values. `p2p-diloco new` writes the "
        "file and accepts each key as a flag,\nsuch as `--outer.momentum 0.2`. The run id is the SHA-256 of "
        "these values.\n\n"
    ]
    sections = {name: field for name, field in RunManifest.model_fields.items() if _section(field.annotation)}
    plain = {name: field for name, field in RunManifest.model_fields.items() if name not in sections}
    parts.append(_keys(plain))
    for name, field in sections.items():
        section = _section(field.annotation)
        assert section is not None
        summary = inspect.cleandoc(section.__doc__ or "").split("\n\n")[0].replace("\n", " ")
        parts.append(f"\n## [{name}]\n\n{summary}\n\n{_keys(section.model_fields)}")
    return "".join(parts)


def settings_page() -> str:
    """Return the settings of a machine."""
    rows = []
    for name, field in PeerSettings.model_fields.items():
        is_told = not field.default_factory and field.default not in (None, False, ())
        default = f"`{field.default}`" if is_told else ""
        flag, variable = f"`--{name.replace('_', '-')}`", f"`{ENVIRONMENT_PREFIX}{name.upper()}`"
        rows.append((flag, variable, *_with_default(field.description, default)))
    return (
        f"# Settings of this machine\n\n{NOTE}\nThey are private to a peer. Pass them as flags of `join`, "
        "`bootstrap`, `archive` and `doctor`, as environment variables,\nor as keys of a file (`@peer.toml`; a key is "
        "the flag with underscores). A flag overrides the environment, and the\nenvironment overrides a file.\n\n"
        + _table(("flag", "environment", "meaning", "default"), rows)
    )


def status_page() -> str:
    """Return the fields of `status --json`."""
    parts = [
        f"# Status\n\n{NOTE}\nThe fields of `p2p-diloco status --json` and of `Swarm.status`. A peer writes them to "
        "`status.json` in its state\ndirectory about once a second.\n\n",
        _fields(PeerStatus),
        "\n## bytes_sent, bytes_received\n\n",
        _fields(ByteCounts),
        "\n## peers\n\n",
        _fields(PeerLine),
    ]
    return "".join(parts)


def events_page() -> str:
    """Return the topics of events."""
    rows = [(f"`{topic}`", meaning) for topic, meaning in sorted(TOPICS.items())]
    return (
        f"# Events\n\n{NOTE}\nA peer prints its events and appends them to `events.jsonl` in its state directory, one "
        "JSON object each: `time` (Unix\nseconds), `topic`, `text` (a sentence for people) and `figures` (its numbers "
        "by name). Programs should use topic and\nfigures; texts may change. At 32 MiB, about a week, the file becomes "
        "`events.old.jsonl` and a new one begins.\n\n" + _table(("topic", "when"), rows)
    )


def _section(annotation: object) -> type[Section] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def _keys(fields: Mapping[str, FieldInfo]) -> str:
    rows = []
    for name, field in fields.items():
        default = field.default
        is_told = not field.is_required() and not field.default_factory and default not in (None, ())
        text = str(default).lower() if isinstance(default, bool) else str(default)
        rows.append((f"`{name}`", field.description, f"`{text}`" if is_told else ""))
    return _table(("key", "meaning", "default"), rows)


def _fields(kind: type) -> str:
    """Return the fields of a data class, each annotated with its meaning."""
    rows = []
    for slot in dataclasses.fields(kind):
        declared = ast.parse(str(slot.type), mode="eval").body
        assert isinstance(declared, ast.Subscript)
        assert isinstance(declared.slice, ast.Tuple)
        plain, meaning = declared.slice.elts
        rows.append((f"`{slot.name}`", ast.literal_eval(meaning), f"`{ast.unparse(plain)}`"))
    return _table(("field", "meaning", "type"), rows)


def _summary(text: str) -> str:
    """Return a docstring without its parameters."""
    return inspect.cleandoc(text).split("\n\nParameters\n")[0]


def _with_default(text: str | None, default: str) -> tuple[str, str]:
    """Return a meaning and its default, which the meaning may name itself."""
    found = _DEFAULT.fullmatch((text or "").strip())
    assert found is not None
    return found[1], default or found[2] or ""


def _table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [tuple(head)]
    lines.append(("---",) * len(lines[0]))
    lines += [tuple(str(cell).replace("|", "\\|") for cell in row) for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    """Write all pages."""
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
