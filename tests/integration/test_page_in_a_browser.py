"""The live page as people use it: a real Chromium, a real server, a real model."""

from __future__ import annotations

import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Request, Route, expect, sync_playwright

from moespeq.decode.engine import Engine
from moespeq.decode.loop import SpeculativeLoop
from moespeq.server.listening import listen
from moespeq.server.metrics import ServerMetrics
from moespeq.server.service import Service
from moespeq.server.serving import HttpServer
from moespeq.server.worker import EngineWorker, WorkerState
from moespeq.transfer.clock import MonotonicClock
from served import PROMPT

pytestmark = pytest.mark.browser

CHROMIUM = shutil.which("chromium")
WAIT_MS = 60_000  # bounds a failure only
CANVASES = ["speed-chart", "depth-chart", "acceptance-chart", "link-chart", "timeline", "experts-chart", "heat"]
COLOURS_OF = """canvas => {
  const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height), colours = new Set();
  for (let at = 0; at < data.length; at += 4) if (data[at + 3] === 255) colours.add(data.slice(at, at + 3).join());
  return colours.size;
}"""
LENGTHS = """answer => {
  window.lengths = [];
  new MutationObserver(() => window.lengths.push(answer.textContent.length))
    .observe(answer, {childList: true, characterData: true, subtree: true});
}"""

STRAYS = """() => {
  const strays = [];
  for (const swatch of document.querySelectorAll(".parts i, .scale i")) {
    const words = document.createRange(), {left, right, bottom} = swatch.getBoundingClientRect();
    words.selectNodeContents(swatch.parentElement);
    words.setStartAfter(swatch);
    const lines = [...words.getClientRects()];
    if (lines[0].top > bottom || lines.some((line) => line.left < right)) strays.push(swatch.parentElement.textContent);
  }
  return strays;
}"""  # labels that begin on another line than their swatch, or go on below it


@contextmanager
def page_server(engine: Engine, *, port: int = 0, **service: Any) -> Iterator[tuple[str, Service]]:
    """`engine` behind a socket of this process: its address, and the service."""
    clock = MonotonicClock()
    worker = EngineWorker(lambda: nullcontext(engine), max_waiting=8, clock=clock)
    metrics = ServerMetrics(lambda: worker.num_running, lambda: worker.num_waiting)
    made = Service(worker, metrics, clock, **({"model_name": "demo"} | service))
    engine.show(made.history)
    server, listening = HttpServer(made, grace_s=1, cors_origins=()), listen("127.0.0.1", port)
    thread = threading.Thread(target=server.run, args=(listening,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/", made
    finally:
        server.stop()
        thread.join()
        listening.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed; apt-get install chromium")
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@dataclass
class Visit:
    """A tab, and what it complained of or asked of others."""

    page: Page
    complaints: list[str] = field(default_factory=list)

    def is_ready(self) -> None:
        expect(self.page.locator("#status")).to_have_text("ready")

    def send(self, prompt: str = PROMPT, *, tokens: int = 48) -> None:
        self.page.fill("#prompt", prompt)
        self.page.fill("#most", str(tokens))
        self.page.click("#send")

    def has_ended(self) -> None:
        expect(self.page.locator("#answer-says")).to_contain_text("ended it")


Open = Callable[..., AbstractContextManager[Visit]]


@pytest.fixture
def visit(browser: Browser) -> Open:
    """Opens a page in a tab of its own, whose every request to another host fails."""

    @contextmanager
    def opened(url: str, *, may_complain: bool = False, **context: Any) -> Iterator[Visit]:
        tab = browser.new_context(**context)
        made = Visit(tab.new_page())

        def only_here(route: Route, request: Request) -> None:
            if request.url.startswith(url):
                route.continue_()
            else:
                made.complaints.append(f"asked {request.url}")
                route.abort()

        tab.route("**/*", only_here)
        made.page.on("console", lambda said: made.complaints.append(said.text))
        made.page.on("pageerror", lambda error: made.complaints.append(str(error)))
        made.page.goto(url)
        yield made
        tab.close()
        assert may_complain or not made.complaints, made.complaints

    return opened


@pytest.fixture(scope="module")
def url(served_engine: Engine) -> Iterator[str]:
    with page_server(served_engine) as (address, _):
        yield address


def test_a_prompt_is_answered_token_by_token_and_all_charts_fill(visit: Open, url: str, served_engine: Engine) -> None:
    expected = served_engine.generate(PROMPT, max_new_tokens=40, ignore_eos=True).text
    with visit(url) as seen:
        seen.is_ready()
        page = seen.page
        assert page.input_value("#style") == "chat"
        page.select_option("#style", "text")
        page.eval_on_selector("#answer", LENGTHS)
        seen.send(tokens=40)
        seen.has_ended()
        assert expected.startswith(" ")
        shown = page.text_content("#answer")
        assert shown
        assert expected.removeprefix(" ").startswith(shown)
        lengths = page.evaluate("window.lengths")
        assert len(lengths) > 3
        assert lengths == sorted(lengths)
        expect(page.locator("#gain")).not_to_have_text("–")
        for name in CANVASES:
            assert page.eval_on_selector(f"#{name}", COLOURS_OF) > 2, name
            assert page.get_attribute(f"#{name}", "aria-label"), name
        assert "8 layers and 16 experts" in str(page.get_attribute("#heat", "aria-label"))
        assert page.locator("#memory .parts li").count() == 5
        assert page.locator("#causes li").count() == 7
        assert "gains" in str(page.text_content("#gain-means"))
        expect(page.locator("#over")).to_have_text(re.compile(r"Over the last \d+ rounds"))
        expect(page.locator("#link-chart-says")).to_have_text(
            re.compile(
                r"In the last \d+ rounds the link moved .* of the time, and the model waited for it .* of the time."
            )
        )
        expect(page.locator("#timeline-says")).to_have_text(
            re.compile(r"(.* s) for the last \d+ rounds: .* the model waited for experts, .* of the \1\. Above")
        )


def test_the_keyboard_alone_sends_a_prompt_and_reads_the_map(visit: Open, url: str) -> None:
    with visit(url) as seen:
        seen.is_ready()
        keyboard, focused = seen.page.keyboard, seen.page.locator(":focus")
        keyboard.press("Tab")
        expect(focused).to_have_text("Skip to the prompt box")
        keyboard.press("Enter")
        keyboard.press("Tab")
        expect(focused).to_have_id("prompt")
        keyboard.type("Tom has 5 apples.")
        for _ in range(5):  # style, tokens, temperature, stop
            keyboard.press("Tab")
        expect(focused).to_have_id("send")
        keyboard.press("Enter")
        seen.has_ended()
        keyboard.press("Tab")
        expect(focused).to_have_id("answer")
        keyboard.press("Tab")
        expect(focused).to_have_id("heat")
        keyboard.press("ArrowDown")
        keyboard.press("ArrowDown")
        keyboard.press("ArrowRight")
        expect(seen.page.locator("#heat-cell")).to_contain_text("Layer 1, expert 1:")


def test_stop_ends_the_answer_and_frees_the_engine(visit: Open, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    propose = SpeculativeLoop.propose

    def slowly(self: SpeculativeLoop, *arguments: Any) -> Any:
        time.sleep(0.2)  # so that the answer is not complete before the click
        return propose(self, *arguments)

    monkeypatch.setattr(SpeculativeLoop, "propose", slowly)
    with visit(url) as seen:
        seen.is_ready()
        seen.page.select_option("#style", "text")
        seen.send(tokens=110)
        expect(seen.page.locator("#answer")).not_to_be_empty(timeout=WAIT_MS)
        seen.page.click("#stop")
        expect(seen.page.locator("#answer-says")).to_have_text("Stopped.")
        expect(seen.page.locator("#queue")).to_contain_text("0 running")
        expect(seen.page.locator("#send")).to_be_enabled()


def test_what_cannot_be_sent_says_why_and_leads_to_what_is_to_mend(visit: Open, url: str) -> None:
    with visit(url) as seen:
        seen.is_ready()
        page, says, keyboard = seen.page, seen.page.locator("#answer-says"), seen.page.keyboard
        page.click("#send")
        expect(says).to_contain_text("no prompt yet")
        expect(page.locator(":focus")).to_have_id("prompt")
        keyboard.type(PROMPT)
        for name, wrong in (("most", "0"), ("most", "1.5"), ("most", "-3"), ("temperature", "2.5")):
            page.fill(f"#{name}", wrong)
            page.focus("#prompt")
            keyboard.press("Control+Enter")
            expect(says).to_contain_text(f"{name.replace('most', 'tokens').capitalize()}: give a")
            expect(page.locator(":focus")).to_have_id(name)
            page.fill(f"#{name}", "")
            keyboard.press("Tab")
            expect(page.locator(f"#{name}")).to_have_value({"most": "200", "temperature": "0"}[name])
            expect(page.locator(f"#{name}")).to_have_attribute("aria-invalid", "false")
        assert page.text_content("#answer") == ""


def test_what_the_server_refuses_is_said_in_its_words(visit: Open, url: str) -> None:
    with visit(url, may_complain=True) as seen:
        seen.is_ready()
        seen.send("a " * 400)
        expect(seen.page.locator("#answer-says")).to_contain_text("the context 128")


def test_dark_is_the_systems_wish_or_the_persons(visit: Open, url: str) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    with visit(url, color_scheme="dark", reduced_motion="reduce") as seen:
        seen.is_ready()
        assert seen.page.evaluate(ground) == "rgb(13, 17, 23)"
        seen.page.click("#theme")
        expect(seen.page.locator("#theme")).to_have_text("Theme: light")
        assert seen.page.evaluate(ground) == "rgb(243, 245, 248)"
        seen.page.reload()
        expect(seen.page.locator("#theme")).to_have_text("Theme: light")


def test_a_narrow_screen_needs_no_scrolling_sideways(visit: Open, url: str) -> None:
    with visit(url) as seen:
        seen.is_ready()
        expect(seen.page.locator("#memory .parts li")).to_have_count(5)
        for width in (320, 360, 800):
            seen.page.set_viewport_size({"width": width, "height": 700})
            assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
            assert seen.page.evaluate(STRAYS) == []


def test_a_key_is_asked_for_and_used_for_all(visit: Open, served_engine: Engine) -> None:
    with page_server(served_engine, api_key="secret") as (url, _), visit(url, may_complain=True) as seen:
        expect(seen.page.locator("#status")).to_have_text("wants its API key")
        expect(seen.page.locator("#send")).to_be_disabled()
        expect(seen.page.locator("#speed-means")).to_have_text("No key, no figures.")
        expect(seen.page.locator(":focus")).to_have_id("key")
        seen.page.fill("#key", "wrong")
        seen.page.keyboard.press("Enter")
        expect(seen.page.locator("#key-hint")).to_contain_text("not the server's")
        seen.page.fill("#key", "secret")
        seen.page.keyboard.press("Enter")
        seen.is_ready()
        expect(seen.page.locator("#key-form")).to_be_hidden()
        expect(seen.page.locator(":focus")).to_have_id("prompt")
        seen.send(tokens=2)
        seen.has_ended()


def test_a_server_that_is_gone_is_said_to_be_and_its_return_is_noticed(visit: Open, served_engine: Engine) -> None:
    with ExitStack() as tab:
        with page_server(served_engine) as (url, _):
            seen = tab.enter_context(visit(url, may_complain=True))
            speed, problem = seen.page.locator("#speed"), seen.page.locator("#problem")
            seen.is_ready()
            seen.send(tokens=8)
            seen.has_ended()
            expect(speed).not_to_have_text("–")
        expect(problem).to_contain_text("The server does not answer")
        expect(seen.page.locator("#status")).to_have_text("no answer")
        expect(speed).not_to_have_text("–")  # its last figures stay
        seen.page.click("#send")
        expect(seen.page.locator("#answer-says")).to_contain_text("The server went away before the answer was complete")
        with page_server(served_engine, port=int(url.rstrip("/").rpartition(":")[2])):
            seen.is_ready()
            expect(problem).to_be_hidden()
            expect(speed).to_have_text("–")  # another server, which did nothing yet


def test_an_answer_that_breaks_off_is_said_to_and_stays(visit: Open, url: str) -> None:
    event = b'data: {"choices": [{"text": " Half"}]}\n\n'
    headers = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 999\r\n\r\n"

    is_read = threading.Event()

    def break_off(listening: socket.socket) -> None:
        accepted, _ = listening.accept()
        with accepted:
            accepted.recv(1 << 16)
            accepted.sendall(headers + event)
            is_read.wait(WAIT_MS / 1e3)

    with socket.create_server(("127.0.0.1", 0)) as listening, visit(url, may_complain=True) as seen:
        broken = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        answering = threading.Thread(target=break_off, args=(listening,))
        answering.start()
        seen.page.route("**/v1/**", lambda route: route.continue_(url=broken))
        seen.is_ready()
        seen.send()
        expect(seen.page.locator("#answer")).to_have_text("Half")
        is_read.set()
        expect(seen.page.locator("#answer-says")).to_contain_text("The server went away before the answer was complete")
        expect(seen.page.locator("#answer")).to_have_text("Half")
        answering.join()


def test_a_load_is_shown_with_its_progress_and_nothing_can_be_sent(visit: Open, served_engine: Engine) -> None:
    with page_server(served_engine) as (url, service):
        service.progress.update(3 << 20, 8 << 20, "loading the draft's base")
        with visit(url) as seen:
            seen.is_ready()
            service.worker._state = WorkerState.LOADING
            expect(seen.page.locator("#status")).to_have_text("loading the draft's base, 3.00 MiB of 8.00 MiB (38 %)")
            expect(seen.page.locator("#send")).to_be_disabled()
            seen.page.press("#prompt", "Control+Enter")
            expect(seen.page.locator("#answer-says")).to_contain_text("The server takes no prompt now: loading")
            expect(seen.page.locator("#speed-means")).to_have_text("No round yet.")
            service.worker._state = WorkerState.READY
            seen.is_ready()
            expect(seen.page.locator("#send")).to_be_enabled()
            expect(seen.page.locator("#speed-means")).to_have_text("No round yet: send a prompt.")


def test_a_map_of_nothing_says_so(visit: Open, served_engine: Engine) -> None:
    with page_server(served_engine) as (url, _), visit(url) as seen:
        seen.is_ready()
        assert seen.page.eval_on_selector("#heat", COLOURS_OF) > 0


FEED = """async (ks) => {
  const {Passes} = await import("/page/passes.js"), passes = new Passes();
  const {drawHeadline} = await import("/page/headline.js"), {drawCharts} = await import("/page/charts.js");
  const columns = ["number", "is_prefill", "k", "accepted", "committed", "hits", "late", "misses", "begin_s", "end_s"];
  const rows = ks.map(([k, accepted], index) => [index + 1, 0, k, accepted, accepted + 1, 9, 0, 1, index, index + 1]);
  const totals = {hits: 1900, late: 0, misses: 131, prefill_hits: 51, prefill_late: 0, prefill_misses: 1686};
  passes.add({columns, passes: rows, spans: [], totals});
  drawHeadline(passes, false, "");
  drawCharts(passes);
  return ["gain-means", "experts-chart-says"].map((id) => document.getElementById(id).textContent);
}"""


@pytest.mark.parametrize(
    ("rounds", "means"),
    [
        ([[4, 4]] + [[0, 0]] * 99, "Only 1 round of 100 drafted: the rest had k 0."),
        ([[4, 0]] * 98 + [[4, 1]] * 2, "Drafting does not pay now: hardly a drafted token is kept."),
        ([[0, 0]] * 5, "Nothing is drafted: one token a round."),
    ],
)
def test_what_is_not_drafted_is_not_said_to_be_refused(
    visit: Open, url: str, rounds: list[list[int]], means: str
) -> None:
    with visit(url) as seen:
        seen.is_ready()
        gain, experts = seen.page.evaluate(FEED, rounds)
        assert gain == means
        caption = (
            "Since the start, in rounds: 1,900 hits, 0 late, 131 misses; in prefills, which this chart leaves out: "
        )
        assert experts.startswith(f"{caption}51 hits, 0 late, 1,686 misses.")


def test_a_name_with_markup_is_shown_as_text(visit: Open, served_engine: Engine) -> None:
    name = "<img src=x onerror=alert(1)>"
    with page_server(served_engine, model_name=name) as (url, _), visit(url) as seen:
        seen.is_ready()
        expect(seen.page.locator("#model")).to_have_text(name)
        assert seen.page.locator("h1 img").count() == 0


def test_a_tab_that_stays_open_keeps_no_more_than_it_shows(visit: Open, url: str) -> None:
    feed = """async () => {
      const {Passes} = await import("/page/passes.js"), passes = new Passes();
      for (let number = 1; number <= 3000; number += 1) {
        const spans = [{number, copies: [], waits: []}];
        passes.add({columns: ["number", "is_prefill"], passes: [[number, 0]], spans, totals: {}});
      }
      return [passes.all.length, passes.spans.size, passes.all.at(-1).number];
    }"""
    with visit(url) as seen:
        assert seen.page.evaluate(feed) == [480, 16, 3000]
