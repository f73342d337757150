"""The page, in a headless Chromium: people ask, read, stop and leave.

``SCREENSHOT=docs/chat.png`` in the environment makes the picture for the documentation.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from minisgl_backend.server.process import TritonServer
from tests.gateway import magistral as magistral_model
from tests.gateway.conftest import KEYS, Gateway
from tests.gateway.test_leaving import Engine
from tests.server.client import PATIENCE_S

pytestmark = pytest.mark.server

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FRANCE = "What is the capital of France?"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no chromium on PATH")
    with sync_playwright() as playwright:
        # as root, for example in a container, Chromium has no sandbox
        opened = playwright.chromium.launch(
            executable_path=CHROMIUM, chromium_sandbox=os.geteuid() != 0
        )
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """An empty page; whatever it complains about in the console fails the test."""
    made = browser.new_page(viewport={"width": 900, "height": 640})
    made.set_default_timeout(PATIENCE_S * 1000)
    expect.set_options(timeout=PATIENCE_S * 1000)
    complaints: list[str] = []
    made.on("pageerror", lambda error: complaints.append(str(error)))
    made.on(
        "console",
        lambda message: complaints.append(message.text) if message.type == "error" else None,
    )
    yield made
    made.close()
    # the browser itself logs each unsuccessful answer
    assert not [text for text in complaints if "Failed to load resource" not in text]


def opened(page: Page, gateway: Gateway) -> None:
    page.goto(gateway.url)
    expect(page.get_by_role("status")).to_have_text("minisgl")


def ask(page: Page, text: str) -> None:
    page.get_by_label("Your message", exact=True).last.fill(text)
    page.keyboard.press("Enter")


def test_a_conversation(page: Page, gateway: Gateway) -> None:
    opened(page, gateway)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("0")
    for question, answer in ((FRANCE, "Paris"), ("What is 7 plus 8?", "15")):
        ask(page, question)
        last = page.locator("article.assistant").last
        expect(last.locator(".figures")).to_have_text(
            re.compile(r"\d+ tokens · \d+ tokens/s · first after \d+ ms · prompt \d+, \d+ of them")
        )
        expect(last.locator(".text")).to_have_text(answer)
    ask(page, "Tell me a story about a fox.")
    expect(page.locator("article.assistant .figures")).to_have_count(3)
    if picture := os.environ.get("SCREENSHOT"):
        page.emulate_media(color_scheme="light")
        page.screenshot(path=picture)
        assert Path(picture).stat().st_size < 200_000
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("article")).to_have_count(0)


TOOL = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def test_a_call_is_shown_and_answered(page: Page, agent: Gateway) -> None:
    opened(page, agent)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Tools").fill(json.dumps(TOOL))
    ask(page, "How is the weather in Bogotá?")
    called = page.locator("article.assistant")
    expect(called.locator(".text")).to_have_text("I will look it up.")
    expect(called.locator("figure.call figcaption")).to_have_text("weather")
    expect(called.locator("figure.call pre")).to_have_text('{\n  "city": "Bogotá"\n}')
    page.get_by_label("Result of weather").fill("Rain, 14 degrees.")
    page.get_by_role("button", name="Send results").click()
    expect(page.locator("article.assistant .text").last).to_have_text("It rains in Bogotá.")
    expect(page.get_by_role("button", name="Send results")).to_have_count(0)
    expect(page.locator("article.user")).to_have_count(1)


def test_a_message_takes_the_results_along(page: Page, agent: Gateway) -> None:
    sent: list[Any] = []
    page.on("request", lambda request: sent.append(request.post_data_json))
    opened(page, agent)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Tools").fill(json.dumps([{"type": "function", "function": TOOL}]))
    ask(page, "How is the weather in Bogotá?")
    page.get_by_label("Result of weather").fill("Rain.")
    ask(page, "Be brief.")
    expect(page.locator("article.assistant .text").last).to_have_text("It rains in Bogotá.")
    user, called, result, more = sent[-1]["messages"]
    assert called["content"] == "I will look it up."
    (call,) = called["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Bogotá"}'}
    assert result == {"role": "tool", "tool_call_id": call["id"], "content": "Rain."}
    assert (user["role"], more) == ("user", {"role": "user", "content": "Be brief."})


def test_tools_that_are_no_json_are_told(page: Page, agent: Gateway) -> None:
    opened(page, agent)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Tools").fill("{weather}")
    ask(page, FRANCE)
    expect(page.get_by_role("alert")).to_contain_text("the tools are not JSON")
    page.get_by_label("Tools").fill("")
    ask(page, FRANCE)
    expect(page.locator("article.assistant .text").last).to_have_text("It rains in Bogotá.")


def test_results_that_could_not_be_sent_can_be_sent_again(page: Page, agent: Gateway) -> None:
    opened(page, agent)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Tools").fill(json.dumps(TOOL))
    ask(page, "How is the weather in Bogotá?")
    page.get_by_label("Result of weather").fill("Rain.")
    page.get_by_label("Temperature").fill("-1")
    page.get_by_role("button", name="Send results").click()
    expect(page.get_by_role("alert")).to_contain_text("temperature must be")
    page.get_by_label("Temperature").fill("0")
    page.get_by_role("button", name="Send results").click()
    expect(page.locator("article.assistant .text").last).to_have_text("It rains in Bogotá.")


def test_thoughts_stay_closed_until_they_are_opened(page: Page, magistral: Gateway) -> None:
    sent: list[Any] = []
    page.on("request", lambda request: sent.append(request.post_data_json))
    opened(page, magistral)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Thinking").select_option("on")
    ask(page, FRANCE)
    expect(page.locator("article.assistant .figures")).to_have_count(1)
    summary = page.locator("details.thoughts summary")
    expect(summary).to_have_text(re.compile(r"Thought for \d+\.\d s"))
    thoughts = page.locator("details.thoughts div")
    expect(thoughts).to_be_hidden()
    summary.click()
    expect(thoughts).to_be_visible()
    assert thoughts.text_content() == magistral_model.THOUGHT
    expect(page.locator("article.assistant .text")).to_contain_text(magistral_model.WORDS)
    ask(page, "Sure?")
    expect(page.locator("article.assistant .figures")).to_have_count(2)
    asked = [body for body in sent if body]
    assert [body["enable_thinking"] for body in asked] == [True, True]
    assert asked[1]["messages"][1]["reasoning_content"] == magistral_model.THOUGHT


def test_an_answer_without_text(page: Page, gateway: Gateway) -> None:
    usage = {
        "prompt_tokens": 5,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    events = f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=events))
    opened(page, gateway)
    ask(page, FRANCE)
    expect(page.locator(".figures")).to_have_text("1 token · prompt 5, 0 of them cached")


def test_parameters_reach_the_engine(page: Page, gateway: Gateway) -> None:
    opened(page, gateway)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Most tokens").fill("2")
    page.get_by_label("System message").fill("Be brief.")
    ask(page, "Count from 1 to 10.")
    expect(page.locator(".figures")).to_contain_text("cut at the most tokens · 2 tokens")
    page.get_by_label("Temperature").fill("-1")
    ask(page, "Again.")
    expect(page.get_by_role("alert")).to_contain_text("temperature must be")


def test_a_key_is_asked_for(page: Page, guarded: Gateway) -> None:
    page.goto(guarded.url)
    expect(page.get_by_role("status")).to_have_text("no API key is given")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("API key").fill(KEYS[0])
    page.get_by_label("API key").blur()
    expect(page.get_by_role("status")).to_have_text("minisgl")


def test_stop_ends_the_answer_in_the_engine(
    page: Page, talker: TritonServer, wide: Gateway
) -> None:
    engine = Engine(talker)
    opened(page, wide)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Most tokens").fill("7000")
    for stop in (lambda: page.get_by_role("button", name="Stop").click(), None):
        ask(page, "Go on.")
        last = page.locator("article.assistant").last
        expect(last.locator(".text")).to_contain_text("look it up")
        if stop is not None:
            stop()
        else:
            page.keyboard.press("Escape")
        expect(last.locator(".figures")).to_have_text("stopped")
    engine.check_cancelled(2)
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_a_new_chat_knows_nothing_of_an_answer_under_way(
    page: Page, talker: TritonServer, wide: Gateway
) -> None:
    engine = Engine(talker)
    sent: list[Any] = []
    page.on("request", lambda request: sent.append(request.post_data_json))
    opened(page, wide)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Most tokens").fill("7000")
    for _ in range(2):
        ask(page, "Go on.")
        expect(page.locator("article.assistant .text")).to_contain_text("look it up")
        page.get_by_role("button", name="New chat").click()
        expect(page.locator("article")).to_have_count(0)
        expect(page.get_by_role("button", name="Send")).to_be_visible()
    question = {"role": "user", "content": "Go on."}
    assert [body["messages"] for body in sent if body] == [[question]] * 2
    engine.check_cancelled(2)


def test_a_closed_tab_frees_the_engine(page: Page, talker: TritonServer, wide: Gateway) -> None:
    engine = Engine(talker)
    opened(page, wide)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Most tokens").fill("7000")
    ask(page, "Go on.")
    expect(page.locator("article.assistant .text")).to_contain_text("look it up")
    engine.wait_busy()
    page.close()
    engine.check_cancelled()


def test_a_setting_that_is_no_number_is_told(page: Page, gateway: Gateway) -> None:
    sent: list[Any] = []
    page.on("request", lambda request: sent.append(request.post_data_json))
    opened(page, gateway)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("")
    page.get_by_label("Temperature").press_sequentially("1e")
    ask(page, FRANCE)
    expect(page.get_by_role("alert")).to_have_text("temperature is not a number")
    assert not [body for body in sent if body]
    question = page.get_by_label("Your message", exact=True).last
    expect(question).to_have_value(FRANCE)  # to be asked again


MARKDOWN = """\
# Title
Some **bold**, *italic* and `code <b>`.

1. one
2. two

- <script>alert(1)</script>

```html
<img src=x onerror=alert(1)>

* no list
```
2 * 3 * 4 <i>stays</i>"""


def rendered(page: Page, text: str) -> str:
    """The HTML that the page makes of a text."""
    html: str = page.evaluate(
        """async (text) => {
          const { markdown } = await import("/markdown.js");
          const box = document.createElement("div");
          box.append(...markdown(text));
          return box.innerHTML;
        }""",
        text,
    )
    return html


def test_markdown_is_shown_and_html_is_not(page: Page, gateway: Gateway) -> None:
    opened(page, gateway)
    assert rendered(page, MARKDOWN) == (
        "<h3>Title</h3>"
        "<p>Some <strong>bold</strong>, <em>italic</em> and <code>code &lt;b&gt;</code>.</p>"
        '<ol start="1"><li>one</li><li>two</li></ol>'
        "<ul><li>&lt;script&gt;alert(1)&lt;/script&gt;</li></ul>"
        "<pre><code>&lt;img src=x onerror=alert(1)&gt;\n\n* no list</code></pre>"
        "<p>2 * 3 * 4 &lt;i&gt;stays&lt;/i&gt;</p>"
    )


def test_marks_of_code(page: Page, gateway: Gateway) -> None:
    opened(page, gateway)
    for text, html in (
        ("```x = 1``` sets x\nand on", "<p><code>x = 1</code> sets x\nand on</p>"),
        ("```py\nx = 1\n`````\nand on", "<pre><code>x = 1</code></pre><p>and on</p>"),
        ("````\n```\n~~~~\n````", "<pre><code>```\n~~~~</code></pre>"),
        ("a ``b ` c`` d ` e", "<p>a <code>b ` c</code> d ` e</p>"),
        ("a```b`c", "<p>a```b`c</p>"),
    ):
        assert rendered(page, text) == html


def test_the_page_may_load_nothing_from_elsewhere(page: Page, gateway: Gateway) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    opened(page, gateway)
    assert asked and all(url.startswith((gateway.url, "data:")) for url in asked)
    policy = gateway.get("/").headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy


def test_everything_has_a_name(page: Page, gateway: Gateway) -> None:
    """What users can press or fill in, by the names that a screen reader says."""
    opened(page, gateway)
    page.get_by_role("button", name="Settings").click()
    snapshot = page.locator("body").aria_snapshot()
    for role in ("textbox", "spinbutton", "button", "combobox"):
        assert not re.search(rf"- {role}(?! \"\w)", snapshot), snapshot
    expect(page.get_by_role("button", name="Settings")).to_have_attribute("aria-expanded", "true")
    expect(page.get_by_role("log")).to_have_accessible_name("Conversation")
