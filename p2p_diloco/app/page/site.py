"""The site: routes, the stream of changes, and what the owner asks of a peer."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlencode

import jinja2
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from p2p_diloco.app.page import facts
from p2p_diloco.app.page.access import MOST_BODY_BYTES, Access, Token
from p2p_diloco.app.page.metrics import CONTENT_TYPE, exposition
from p2p_diloco.app.page.peers import WatchedPeer
from p2p_diloco.app.page.sample_text import SampleText
from p2p_diloco.config.settings import LIMITS, PeerSettings
from p2p_diloco.errors import P2PDilocoError, clean_text
from p2p_diloco.rate import parse_seconds
from p2p_diloco.status.owner_requests import ask_peer, ask_to_leave
from p2p_diloco.wording import join_line

LOOK_SECONDS = 0.5
TELL_SECONDS = 1.0
"""Least time between two messages of a stream."""
PING_SECONDS = 15
MOST_STREAMS, MOST_STREAMS_OF_ONE = 200, 8
FOLDER = Path(__file__).parent / "templates"
_COLUMNS = (
    ("name", "machine", "name"),
    ("state", "state", "state"),
    ("tokens", "tokens", "tokens"),
    ("rate", "tokens/s", "rate"),
    ("loss", "loss", "loss"),
    ("share", "share of the run", "share"),
    ("reach", "reachable", ""),
    ("since", "since", "since"),
    ("seen", "last seen", "seen"),
    ("group", "group", "group"),
)
"""Key, heading, and key by which it sorts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePlan:
    """Content and audience of a page.

    Attributes:
        folders: state directories of the peers, the first of which is shown first.
        is_public: read-only, without addresses, keys and ids; for everybody.
        hosts: see `Access`.
        token: the secret of a private page; None for a public one.
        samples: whether to show text that the model writes.
    """

    folders: tuple[Path, ...]
    is_public: bool
    hosts: frozenset[str]
    token: Token | None
    samples: bool


class Choice(NamedTuple):
    """A visitor's choice of what to see."""

    peer: int
    sort: str
    is_descending: bool
    over: facts.Over


def make_site(plan: PagePlan) -> Starlette:
    """Return the application that serves the page."""
    site = _Site(plan)
    routes = [
        Route("/", site.page),
        Route("/live", site.live),
        Route("/metrics", site.metrics),
        Route("/page.css", site.style),
        Route("/page.js", site.script),
    ]
    if not plan.is_public:
        routes.append(Route("/do/{what}", site.change, methods=["POST"]))
    return Starlette(routes=routes, middleware=[Middleware(Access, hosts=plan.hosts)])


class _Site:
    def __init__(self, plan: PagePlan) -> None:
        self._plan = plan
        self._peers = [WatchedPeer(folder) for folder in plan.folders]
        self._lines = [facts.organiser_lines(folder) for folder in plan.folders]
        loader = jinja2.FileSystemLoader(FOLDER)
        pages = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
        self._template = pages.get_template("page.html")
        self._samples = [SampleText(folder) for folder in plan.folders] if plan.samples else []
        self._rendered: dict[tuple[Choice, bool], tuple[float, tuple[object, ...], str]] = {}
        self._streams: Counter[str] = Counter()
        self._static = {name: (FOLDER / name).read_text(encoding="utf-8") for name in ("page.css", "page.js")}

    async def page(self, request: Request) -> Response:
        """Serve the page; whoever comes with the token gets it as a cookie."""
        token = self._plan.token
        given = request.query_params.get("token")
        if given is not None:
            response = RedirectResponse("./", 303)
            if token is not None and token.fits(given):
                response.set_cookie(token.cookie, given, httponly=True, samesite="strict")
            return response
        may_change = token is not None and token.is_held_by(request)
        answer = request.query_params.get("answer", "")[:300] if may_change else ""
        return HTMLResponse(self._page(self._choice(request), may_change, answer))

    def _choice(self, request: Request) -> Choice:
        """Return what a visitor wants to see; what is unknown is left out, so that there are few kinds of pages."""
        asked = request.query_params
        peer, sort = asked.get("peer", ""), asked.get("sort", "")
        return Choice(
            peer=int(peer) if peer in map(str, range(len(self._peers))) else 0,
            sort=sort if sort in facts.SORTS else "",
            is_descending=asked.get("down") == "1",
            over="tokens" if asked.get("over") == "tokens" else "time",
        )

    def _page(self, choice: Choice, may_change: bool, answer: str) -> str:
        """Render the page, or return what was rendered since the files last changed."""
        stamps = tuple(watched.stamp() for watched in self._peers)
        second = time.monotonic() // 5.0  # what depends on the time alone, such as ages, is that old at most
        kept = self._rendered.get((choice, may_change))
        if kept is not None and not answer and kept[0] == second and kept[1] == stamps:
            return kept[2]
        text = self._template.render(self._facts(choice, may_change, answer))
        if not answer:
            self._rendered[choice, may_change] = second, stamps, text
        return text

    def _facts(self, choice: Choice, may_change: bool, answer: str) -> dict[str, Any]:
        # Without the token, a private page shows what a public one does: the state directory may be closed to others.
        index, sort, over, is_public = choice.peer, choice.sort, choice.over, not may_change
        view = self._peers[index].view()
        status = view.status

        def link(**changes: str) -> str:
            return f"./?{urlencode({'peer': str(index), 'sort': sort, 'over': over, **changes})}"

        columns = []
        for key, text, by in _COLUMNS:
            if key == "group" and len(status.grid) < 2:
                continue
            is_sorted = bool(by) and sort == by
            turned = "1" if is_sorted and not choice.is_descending else "0"
            order = ("descending" if choice.is_descending else "ascending") if is_sorted else ""
            columns.append({"key": key, "text": text, "link": link(sort=by, down=turned) if by else "", "order": order})
        sample = self._samples[index].latest(shows_errors=may_change) if self._samples else None
        return {
            "title": facts.title(view),
            "sentence": facts.sentence(view),
            "peers": [(self._name(number), f"./?peer={number}", number == index) for number in range(len(self._peers))],
            "peer": index,
            "answer": answer,
            "alarms": facts.alarms(view, is_public=is_public),
            "figures": facts.figures(view),
            "over": over,
            "over_link": link(over="time" if over == "tokens" else "tokens"),
            "loss_chart": facts.loss_chart(view, over),
            "rate_chart": facts.rate_chart(view),
            "strip": facts.strip(view),
            "columns": columns,
            "members": facts.members(view, sort=sort, is_descending=choice.is_descending, is_public=is_public),
            "machine": facts.machine(view),
            "limits": facts.limits(view),
            "may_change": may_change,
            "is_public": is_public,
            "has_token": self._plan.token is not None,
            "limit_keys": LIMITS,
            "sample_text": sample,
            "join_line": join_line(status.invite, own_model=status.own_model) if status.invite else "",
            "lines": self._lines[index],
            "events": [] if is_public else facts.events(view),
            "updated": time.strftime("%H:%M:%S", time.localtime(status.updated)) if status.updated else "–",
        }

    def _name(self, index: int) -> str:
        status = self._peers[index].view().status
        return f"{clean_text(status.run_name) or 'run'} · peer {index + 1}"

    async def live(self, request: Request) -> Response:
        """Send a line whenever a file has changed."""
        address = request.client.host if request.client is not None else ""
        if self._streams.total() >= MOST_STREAMS or self._streams[address] >= MOST_STREAMS_OF_ONE:
            return PlainTextResponse("too many open streams; the page renews itself more slowly\n", 503)
        return EventSourceResponse(self._changes(address), ping=PING_SECONDS)

    async def _changes(self, address: str) -> AsyncIterator[ServerSentEvent]:
        self._streams[address] += 1
        try:
            last: tuple[object, ...] = ()
            while True:
                stamps = tuple(peer.stamp() for peer in self._peers)
                if stamps != last:
                    last = stamps
                    yield ServerSentEvent(data="changed")
                    await asyncio.sleep(TELL_SECONDS - LOOK_SECONDS)
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            self._streams[address] -= 1
            if self._streams[address] <= 0:
                del self._streams[address]

    async def metrics(self, request: Request) -> Response:
        """Serve the figures in the format of Prometheus."""
        views = [peer.view() for peer in self._peers]
        return Response(exposition(views, is_public=self._plan.is_public), media_type=CONTENT_TYPE)

    async def style(self, request: Request) -> Response:
        return Response(self._static["page.css"], media_type="text/css")

    async def script(self, request: Request) -> Response:
        return Response(self._static["page.js"], media_type="text/javascript")

    async def change(self, request: Request) -> Response:
        """Ask a peer for something, and show its answer."""
        token = self._plan.token
        if token is None or not token.is_held_by(request):
            text = "to change something, open the whole address that p2p-diloco printed; it ends in a token\n"
            return PlainTextResponse(text, 403)
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MOST_BODY_BYTES:
                return PlainTextResponse("this form is too long\n", 413)
        form = {key: values[0] for key, values in parse_qs(body.decode("utf-8", "replace")).items()}
        peer = form.get("peer", "")
        if not (peer.isascii() and peer.isdigit() and int(peer) < len(self._peers)):
            return PlainTextResponse("there is no such peer on this page\n", 404)
        make = _CHANGES.get(request.path_params["what"])
        if make is None:
            return PlainTextResponse("this page knows no such request\n", 404)
        try:
            answer = await run_in_threadpool(make, self._peers[int(peer)].folder, form)
        except P2PDilocoError as error:
            answer = f"not done: {error}"
        return RedirectResponse(f"../?{urlencode({'peer': peer, 'answer': answer})}", 303)


def _pause(folder: Path, form: dict[str, str]) -> str:
    seconds = parse_seconds(form["for"], "the length of the pause") if form.get("for") else None
    until = None if seconds is None else time.time() + seconds
    return ask_peer(folder, lambda control: replace(control, pauses=True, pauses_until=until)).paused


def _resume(folder: Path, form: dict[str, str]) -> str:
    status = ask_peer(folder, lambda control: replace(control, pauses=False, pauses_until=None))
    return f"still {status.paused}" if status.paused else "running again"


def _limit(folder: Path, form: dict[str, str]) -> str:
    changes = {form.get("key", ""): form.get("value", "").strip()}
    PeerSettings().with_limits(changes, "the form")
    status = ask_peer(folder, lambda control: replace(control, limits={**control.limits, **changes}))
    return f"limits now in force: {', '.join(f'{key} {text}' for key, text in status.limits.items()) or 'none'}"


def _leave(folder: Path, form: dict[str, str]) -> str:
    if form.get("sure") != "yes":
        return "not done: tick the box to confirm that you want to leave"
    ask_to_leave(folder)
    return "the peer is leaving; its state is kept, and the command with which you joined brings it back"


_CHANGES: dict[str, Callable[[Path, dict[str, str]], str]] = {
    "pause": _pause,
    "resume": _resume,
    "limit": _limit,
    "leave": _leave,
}


def hosts_of(port: int) -> frozenset[str]:
    """Return the hosts, as browsers send them, of a page on this machine alone."""
    return frozenset(f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]"))
