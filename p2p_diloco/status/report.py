"""`report.html`: a run as one self-contained web page that loads nothing from elsewhere."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from p2p_diloco.errors import StateError
from p2p_diloco.status.chart import NUM_COLOURS, Chart, Flag, Line, draw_chart

REPORT_FILE = "report.html"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPoint:
    """One measurement: seconds since training began, tokens seen by the measured model, loss in nats."""

    seconds: float
    tokens: float
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCurve:
    """Held-out loss of the anchor, a peer or an island trained alone; `kind` is "anchor", "peer" or "lone"."""

    name: str
    kind: str
    points: tuple[LossPoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """An event: seconds since training began, and the swarm's tokens by then."""

    seconds: float
    tokens: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """A table: its title, column names and rows."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The contents of a report.

    Attributes:
        title: title of the page.
        verdict: one sentence under the title.
        good: whether the verdict is good.
        curves: loss curves.
        moments: marked in the charts and listed under them.
        baseline_loss: loss to compare with, nats per byte.
        sheets: tables under the charts.
        footnote: where the figures come from.
    """

    title: str
    verdict: str
    good: bool
    curves: tuple[LossCurve, ...]
    moments: tuple[Moment, ...]
    baseline_loss: float | None
    sheets: tuple[Sheet, ...]
    footnote: str


def format_report(report: Report) -> str:
    """Return the HTML page."""
    verdict = "good" if report.good else "bad"
    body = [
        f"<h1>{escape(report.title)}</h1>",
        f'<p class="verdict {verdict}">{escape(report.verdict)}</p>',
        "<h2>Held-out loss over time</h2>",
        draw_chart(_chart(report, by_tokens=False)),
        "<h2>Held-out loss over tokens</h2>",
        "<p>Tokens that the model was trained on: those of the whole swarm for the shared model and for peers, only "
        "its own for an island that trains alone.</p>",
        draw_chart(_chart(report, by_tokens=True)),
        "<h2>What happened</h2>",
        _moments(report.moments),
        *(_sheet(sheet) for sheet in report.sheets),
        f"<footer>{escape(report.footnote)}</footer>",
    ]
    head = f'<meta charset="utf-8"><title>{escape(report.title)}</title>'
    view = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    page = "\n".join(body)
    head = f"<head>{head}{view}\n<style>{_STYLE}</style></head>"
    return f'<!doctype html>\n<html lang="en">\n{head}\n<body>\n{page}\n</body>\n</html>\n'


def write_report(folder: Path, report: Report) -> Path:
    """Write the page to `report.html` in `folder` atomically; return its path.

    Raises:
        StateError: the folder cannot be created or written.
    """
    path, draft = folder / REPORT_FILE, folder / f".{REPORT_FILE}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft.write_text(format_report(report), encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise StateError(f"cannot write {path}: {error.strerror}; name another folder with --report") from None
    return path


def _chart(report: Report, *, by_tokens: bool) -> Chart:
    styles = _styles(report.curves)
    # Draw the anchor last, on top of the others.
    ordered = sorted(zip(report.curves, styles, strict=True), key=lambda pair: pair[0].kind == "anchor")
    return Chart(
        title=f"held-out loss over {'tokens' if by_tokens else 'time'}",
        x_name="tokens" if by_tokens else "seconds since the first round",
        y_name="nats per byte",
        lines=tuple(
            Line(
                name=curve.name,
                points=tuple((point.tokens if by_tokens else point.seconds, point.loss) for point in curve.points),
                style=style,
            )
            for curve, style in ordered
        ),
        flags=tuple(
            Flag(x=moment.tokens if by_tokens else moment.seconds, number=number, text=moment.text)
            for number, moment in enumerate(report.moments, start=1)
        ),
        level=None if report.baseline_loss is None else (report.baseline_loss, "bigram entropy"),
    )


def _styles(curves: Sequence[LossCurve]) -> list[str]:
    colours = iter(range(len(curves)))
    return [curve.kind if curve.kind in ("anchor", "lone") else f"c{next(colours) % NUM_COLOURS}" for curve in curves]


def _moments(moments: Iterable[Moment]) -> str:
    items = "\n".join(
        f'<li><span class="when">{moment.seconds:.1f} s</span> {escape(moment.text)}</li>' for moment in moments
    )
    return f"<ol>\n{items}\n</ol>"


def _sheet(sheet: Sheet) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in sheet.columns)
    rows = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in sheet.rows)
    return (
        f'<h2>{escape(sheet.title)}</h2>\n<div class="wide"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{rows}</tbody></table></div>"
    )


_STYLE = """
:root{--ink:#1b1f24;--soft:#667080;--rule:#e3e6ea;--page:#fff;--good:#1a7f4b;--bad:#b3261e;
--k0:#2f6fde;--k1:#d9772b;--k2:#2a9d6f;--k3:#b04fc4;--k4:#c9a227;--k5:#d6456b;--k6:#3aa7c9;--k7:#7a6a58}
@media(prefers-color-scheme:dark){:root{--ink:#e8eaed;--soft:#98a2b3;--rule:#2c323a;--page:#14171b;--good:#5ccf94;
--bad:#ff8a80;--k0:#7aa7ff;--k1:#ffa666;--k2:#63d0a2;--k3:#d990ea;--k4:#e5c75a;--k5:#ff8aa6;--k6:#7fd3ee;--k7:#bba78f}}
body{font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:60rem;margin:2rem auto;
padding:0 1rem}
h1{font-size:1.6rem;margin-bottom:.2rem}h2{font-size:1.1rem;margin-top:2rem}
.verdict{font-size:1.1rem;margin-top:0}.good{color:var(--good)}.bad{color:var(--bad)}
svg{width:100%;height:auto;display:block}svg text{font-size:12px;fill:var(--soft)}
.grid{stroke:var(--rule)}.axis{stroke:var(--soft)}
.line{fill:none;stroke-width:1.5;stroke:currentColor}.line circle{fill:currentColor;stroke:none;opacity:.75}
svg text.label{fill:currentColor}svg text.name{fill:var(--ink)}
.anchor{color:var(--ink)}.line.anchor{stroke-width:3}svg text.label.anchor{font-weight:700}
.lone{color:var(--soft)}.line.lone path{stroke-dasharray:2 4}
.c0{color:var(--k0)}.c1{color:var(--k1)}.c2{color:var(--k2)}.c3{color:var(--k3)}
.c4{color:var(--k4)}.c5{color:var(--k5)}.c6{color:var(--k6)}.c7{color:var(--k7)}
.level{stroke:var(--bad);stroke-dasharray:6 4}svg text.levelname{fill:var(--bad)}
.flag path{stroke:var(--soft);stroke-dasharray:1 3}.when{color:var(--soft);font-variant-numeric:tabular-nums}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.25rem 1rem .25rem 0;border-bottom:1px solid var(--rule);vertical-align:top}
th{color:var(--soft);font-weight:400}td{overflow-wrap:anywhere}footer{margin-top:2rem;color:var(--soft);font-size:.9rem}
"""
