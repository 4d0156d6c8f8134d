"""The built site in a browser, in frames as wide as a screen and as a telephone: ./dev docs --build makes it.

A script shows one page after the other, looks into each, and sends what it found to the server of the site.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import pytest

from tests.browser.chromium import NARROW, WIDE, command, needs_chromium
from tests.documents import ROOT

SITE, SCREENSHOTS = ROOT / "build" / "site", ROOT / "build" / "screenshots"
built = pytest.mark.skipif(not (SITE / "index.html").exists(), reason="needs the site: ./dev docs --build")
pytestmark = [needs_chromium, built]
SHOWN = {"home": "", "how-to": "how-to/explain/", "reference": "api/te_fuser.ops/"}
FRAME = '<body style="margin:0"><iframe style="border:0;width:{width}px;height:900px" src="/{page}"></iframe>'
LOOK = """
const frame = document.querySelector('iframe'), found = {};
const wait = ms => new Promise(done => setTimeout(done, ms));
const show = page => new Promise(done => { frame.onload = () => done(frame.contentDocument); frame.src = '/' + page; });
async function search(words) {
  const there = await show(''), field = there.querySelector('input[data-md-component=search-query]');
  field.focus();
  field.value = words;
  field.dispatchEvent(new KeyboardEvent('keyup', {key: 's', bubbles: true}));
  for (let k = 0; k < 200 && !there.querySelector('.md-search-result__item'); ++k) await wait(50);
  return [...there.querySelectorAll('.md-search-result__link')].map(link => link.href);
}
async function toggled(there) {
  const scheme = () => there.defaultView.getComputedStyle(there.body).backgroundColor, before = scheme();
  there.querySelector('[data-md-component=palette] label:not([hidden])').click();
  return [before, scheme()];
}
async function look() {
  for (const page of PAGES) {
    const there = await show(page), images = [...there.images];
    await Promise.all(images.map(image => { image.loading = 'eager'; return image.decode().catch(() => 0); }));
    found[page] = {
      beyond: there.documentElement.scrollWidth - WIDTH,
      missing: images.filter(image => !image.naturalWidth).map(image => image.src),
      labels: [...there.querySelectorAll('nav .md-ellipsis')].map(label => label.textContent.trim()),
      text: there.querySelector('article').innerText,
    };
  }
  return {pages: found, schemes: await toggled(await show('')), results: await search('LayerNorm')};
}
look().catch(error => String(error)).then(said => fetch('/said', {method: 'POST', body: JSON.stringify(said)}));
"""


class Server(ThreadingHTTPServer):
    """The site, pages with a frame that a script fills (`/look`) or that stays (`/frame`), and what the script says."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), partial(Handler, directory=str(SITE)))
        self.said: Queue[Any] = Queue()
        self.missing: list[str] = []
        self.own: dict[str, str] = {}


class Handler(SimpleHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if (text := self.server.own.get(self.path)) is None:
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(text.encode())

    def do_POST(self) -> None:
        self.server.said.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def send_error(self, code: int, *arguments: Any, **named: Any) -> None:
        self.server.missing.append(self.path)
        super().send_error(code, *arguments, **named)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as serving:
        thread = Thread(target=serving.serve_forever)
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()


@pytest.fixture(scope="module", params=[WIDE, NARROW])
def looked(request: pytest.FixtureRequest, server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Findings of the script at one width, a narrow one of all pages, and the lines of the browser's console."""
    width, folder = request.param, tmp_path_factory.mktemp("browser")
    pages = [p.parent.relative_to(SITE).as_posix() + "/" for p in SITE.rglob("index.html") if p.parent != SITE]
    shown = ["", *sorted(pages)] if width == NARROW else [*SHOWN.values()]
    script = LOOK.replace("PAGES", json.dumps(shown)).replace("WIDTH", str(width))
    server.own["/look"] = FRAME.format(width=width, page="") + f"<script>{script}</script>"
    there = f"http://127.0.0.1:{server.server_port}/look"
    with open(folder / "log", "w") as log:
        arguments = ("--enable-logging=stderr", f"--window-size={WIDE},900", "--remote-debugging-port=0", there)
        process = subprocess.Popen(command(folder / "profile", *arguments), stderr=log, stdout=log)
        try:
            said: dict[str, Any] = server.said.get(timeout=150)
        finally:
            process.terminate()
            process.wait(30)
    assert isinstance(said, dict), said
    return said | {"console": re.findall(r".*CONSOLE.*", (folder / "log").read_text())}


def test_pages_are_no_wider_than_the_window(looked: dict[str, Any]) -> None:
    """Code, tables and pictures that are wider scroll by themselves."""
    assert {*SHOWN.values()} <= looked["pages"].keys()
    assert {name: page["beyond"] for name, page in looked["pages"].items() if page["beyond"] > 0} == {}


def test_pages_have_their_text_their_pictures_and_the_nav(looked: dict[str, Any]) -> None:
    for name, page in looked["pages"].items():
        assert page["missing"] == [], name
        assert len(page["text"]) > 200, name
        assert {"Home", "Start", "Use", "Extend", "Reference", "About", "Quickstart"} <= {*page["labels"]}, name


def test_nothing_is_missing_and_the_console_is_empty(looked: dict[str, Any], server: Server) -> None:
    assert looked["console"] == []
    assert [path for path in server.missing if path != "/favicon.ico"] == []


def test_search_finds_an_op_on_its_page(looked: dict[str, Any]) -> None:
    assert any("/api/te_fuser.ops/" in link for link in looked["results"]), looked["results"]


def test_there_is_a_dark_scheme(looked: dict[str, Any]) -> None:
    light, dark = (sum(map(int, re.findall(r"\d+", color)[:3])) for color in looked["schemes"])
    assert light > 600 and dark < 200


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("name", SHOWN)
def test_a_screenshot_is_no_blank_page(name: str, width: int, server: Server, tmp_path: Path) -> None:
    """Screenshots stay in build/screenshots, for people to look at."""
    SCREENSHOTS.mkdir(exist_ok=True)
    path = SCREENSHOTS / f"{name}-{width}.png"
    path.unlink(missing_ok=True)
    server.own["/frame"] = FRAME.format(width=width, page=SHOWN[name])
    there = f"http://127.0.0.1:{server.server_port}/frame"
    arguments = (f"--window-size={max(width, 500)},900", "--virtual-time-budget=4000", f"--screenshot={path}", there)
    subprocess.run(command(tmp_path / "profile", *arguments), capture_output=True, timeout=60, check=True)
    assert path.stat().st_size > 30_000
