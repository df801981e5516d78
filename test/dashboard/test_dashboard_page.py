"""The dashboard's page, in a browser."""

from __future__ import annotations

import itertools
import re
import shutil
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from dashboard_graph import EVIL, A, B, R, graph
from dashboard_server import TOKEN, Server
from started_nodes import start

from collab_llm_nodes.dashboard.stages import Stage, Stages, timeline
from collab_llm_nodes.dashboard.view import Found, Motion, Reading, Snapshot, View

__all__ = ["graph"]  # fixture


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium without the internet."""
    selenium = pytest.importorskip("selenium.webdriver", reason="pip install selenium")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no chromium and chromedriver: apt-get install chromium chromium-driver")
    options = selenium.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--window-size=1500,1150",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ):
        options.add_argument(argument)
    service = selenium.ChromeService(executable_path=driver)
    with selenium.Chrome(options=options, service=service) as chrome:
        chrome.set_page_load_timeout(60)
        yield chrome


class Page:
    """The page of ``node`` in ``browser``."""

    def __init__(self, browser: Any, node: Any) -> None:
        self.browser = browser
        browser.get(f"http://127.0.0.1:{node.port}/")

    def find(self, selector: str) -> Any:
        """The first element of a CSS selector."""
        return self.browser.find_element("css selector", selector)

    def script(self, code: str) -> Any:
        """Return what JavaScript returns."""
        return self.browser.execute_script(f"return {code}")

    def text(self, name: str) -> str:
        """Return the text of an element that ``page.py`` names, or of the bar."""
        selector = f"[data-id={name}], #{name}"
        return str(self.script(f"document.querySelector({selector!r})?.innerText ?? ''"))

    def wait(self, condition: Any, what: str) -> Any:
        """Wait until ``condition()``; fail after a minute with what the page shows."""
        due = time.monotonic() + 60.0
        while not (value := condition()):
            if time.monotonic() > due:
                shown = self.script("document.body.innerText")
                pytest.fail(f"{what}: not within 60 s. The page says:\n{shown}\n{self.log()}")
            threading.Event().wait(0.05)
        return value

    def log(self) -> list[str]:
        """Return what went wrong in the browser."""
        entries = self.browser.get_log("browser")
        return [e["message"] for e in entries if e["level"] == "SEVERE"]


class Cloud:
    """Answers of a scripted model, streamed and with their tokens' sources, as draft_vlm's are."""

    def __init__(self, graph: Any, *script: str) -> None:
        from rclpy.action import ActionServer
        from rclpy.parameter import Parameter

        from collab_llm.action import Generate
        from collab_llm.msg import Draft, GeneratedText, LinkState
        from collab_llm_nodes.ros.qos import RESULT, STATE

        self.script = list(script)
        simulated = [Parameter("use_sim_time", value=True)]
        self.node = graph.node("cloud", parameter_overrides=simulated)
        self._texts = self.node.create_publisher(GeneratedText, "generated_text", RESULT)
        self._drafts = self.node.create_publisher(Draft, "draft", RESULT)
        self._links = self.node.create_publisher(LinkState, "link_state", STATE)
        self._server = ActionServer(self.node, Generate, "edge_cloud/generate", self._answer)
        self._told = 0
        self.node.create_timer(0.1, self._tell)

    def _tell(self) -> None:
        from collab_llm.msg import LinkState

        link = LinkState(state=LinkState.UP, verifier="cloud:50551", model="scripted", rtt_s=0.02)
        link.header.stamp = self.node.get_clock().now().to_msg()
        self._links.publish(link)

    def _answer(self, goal: Any) -> Any:
        from array import array

        from collab_llm.action import Generate
        from collab_llm.msg import Draft, GeneratedText

        self._told += 1
        session, header = f"session{self._told}", goal.request.header
        text = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        tokens = re.findall(r"\s?\S+", text)
        ends = list(itertools.accumulate(map(len, tokens)))
        self._drafts.publish(Draft(session_id=session, tokens=[1, 2, 3, 4], ahead=True))
        for count in (len(tokens) // 2, len(tokens)):
            text = "".join(tokens[:count])
            message = GeneratedText(header=header, session_id=session, text=text, for_motion=True)
            message.prompt, message.verified = goal.request.prompt, True
            message.tokens, message.ends = array("i", range(count)), array("I", ends[:count])
            message.sources = array("B", [(A, A, R, A, A, B)[n % 6] for n in range(count)])
            message.metrics.rounds, message.metrics.tokens = 1 + count // 3, count
            message.metrics.total_s = 0.04
            message.metrics.names = ["tau", "draft_s", "wait_s"]
            message.metrics.values = array("d", [3.0, 0.01, 0.025])
            message.final = count == len(tokens)
            self._texts.publish(message)
        goal.succeed()
        return Generate.Result(header=header, text=text, session_id=session, verified=True)


@pytest.mark.ros
@pytest.mark.timeout(400)
def test_a_visitor_instructs_sees_motion_and_stops(graph: Any, browser: Any) -> None:
    """The whole page, with the simulator, the real navigator and the real motion_guard."""
    from collab_llm_nodes.nodes.camera_ingest import CameraIngest
    from collab_llm_nodes.nodes.dashboard import Dashboard
    from collab_llm_nodes.nodes.motion_guard import MotionGuard
    from collab_llm_nodes.nodes.navigation_action_parser import NavigationActionParser
    from collab_llm_nodes.nodes.navigator import Navigator
    from collab_llm_nodes.nodes.sim_go2 import SimGo2
    from collab_llm_nodes.robot.mission import MAX_INSTRUCTION

    cloud = Cloud(
        graph,
        f"{EVIL} is on the left. the next action is turn left 30 degree.",
        "the cone is ahead. the next action is move forward 75 cm.",
    )
    sim = start(graph, SimGo2, use_sim_time=True, seed=3)
    start(graph, CameraIngest, use_sim_time=True, source="compressed")
    start(graph, MotionGuard, use_sim_time=True)
    reading = {"max_age": 60.0, "grammar__reason": "lenient"}  # the answers hold no plain English
    start(graph, NavigationActionParser, use_sim_time=True, **reading)
    start(graph, Navigator, use_sim_time=True)
    node = start(graph, Dashboard, port=0, rate=10.0)

    page = Page(browser, node)
    page.wait(lambda: page.script("document.getElementById('camera')?.naturalWidth > 0"), "camera")
    page.wait(lambda: page.text("link").startswith("UP"), "link")
    page.wait(lambda: "motion allowed" in page.text("motion"), "motion_guard")
    assert "no action yet" in page.text("action")

    # Instruct, and see what happens.
    wish = page.find("[data-id=instruction]")
    wish.send_keys("   ", "\ue007")  # Enter
    page.wait(lambda: "write where to go" in page.script("document.body.innerText"), "a reaction")
    assert wish.get_attribute("maxlength") == str(MAX_INSTRUCTION)
    wish.send_keys("find the cone")
    page.find("[data-id=go]").click()
    page.wait(lambda: "step" in page.text("goal"), "the instruction is followed")
    page.wait(lambda: "ahead" in page.text("action"), "the second action")
    page.wait(lambda: cloud.script[0][:8] in page.text("answer"), "the answer")
    for name in ("accepted", "recovered", "bonus", "matched"):
        assert page.find(f"[data-id=answer] .token.{name}")
    assert "push-ahead" in page.script("document.body.innerText")
    begun = page.text("pose")
    page.wait(lambda: page.text("pose") != begun, "the robot moves")
    page.wait(lambda: page.script("document.querySelector('.overlay line') !== null"), "direction")

    # Stop by the button, while the page's own thread does not answer at all.
    page.wait(lambda: sim._base.speed > 0.1, "driving")
    held, released = threading.Event(), threading.Event()

    def lag() -> None:
        held.set()
        released.wait(60.0)

    node._server._pages.loop.call_soon_threadsafe(lag)
    assert held.wait(10.0)
    page.find("#stop").click()
    page.wait(lambda: page.text("stop-result") == "STOPPED", "the stop is confirmed")
    page.wait(lambda: sim._base.speed == 0.0, "the robot stands")
    released.set()
    page.wait(lambda: "EMERGENCY STOP" in page.text("motion"), "the state of motion")
    page.wait(lambda: "step" not in page.text("goal"), "the instruction is over")
    assert "emergency" in page.text("goal").lower()

    # Reset: asked, then done. Another instruction, cancelled; and the key.
    page.find("#reset").click()
    assert page.script("document.getElementById('confirm').open")
    page.wait(reset_by_hand(page), "reset")
    page.find("[data-id=go]").click()
    page.wait(lambda: sim._base.speed > 0.1, "driving again")
    page.find("[data-id=cancel]").click()
    page.wait(lambda: "gave the instruction up" in page.text("goal"), "cancelled")
    page.find("[data-id=instruction]").send_keys("\ue00c")  # Escape, in a text field
    page.wait(lambda: page.text("stop-result") == "STOPPED", "stopped by the key")

    # A model's text was never markup.
    assert page.script("window.evil") is None
    assert not [entry for entry in page.log() if "Refused" in entry or "NOTFOUND" in entry]


def reset_by_hand(page: Page) -> Any:
    """A condition: the emergency stop is reset; it may be too early at first."""

    def done() -> bool:
        if "motion allowed" in page.text("motion"):
            return True
        if page.script("document.getElementById('confirm').open"):
            page.find("#reset-yes").click()
        elif page.text("stop-result").startswith("not reset"):
            page.find("#reset").click()
        return False

    return done


@pytest.mark.ros
def test_a_page_behind_a_token(graph: Any, browser: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from collab_llm_nodes.nodes.dashboard import Dashboard

    monkeypatch.setenv("COLLAB_LLM_DASHBOARD_TOKEN", TOKEN)
    page = Page(browser, start(graph, Dashboard, port=0))
    page.find("[name=token]").send_keys(TOKEN + "\n")
    page.wait(lambda: "motion_guard was not heard" in page.text("motion"), "the bar")
    page.wait(lambda: "no odometry yet" in page.text("pose"), "the page's web socket")
    browser.delete_all_cookies()
    page.find("#stop").click()
    page.wait(lambda: "log in again" in page.text("stop-result"), "a stop that failed is told")


@pytest.mark.ros
@pytest.mark.slow
def test_a_question_about_documents_appears_when_there_is_one(graph: Any, browser: Any) -> None:
    from array import array

    from collab_llm.msg import GeneratedText
    from collab_llm_nodes.nodes.dashboard import Dashboard
    from collab_llm_nodes.ros.qos import RESULT

    node = start(graph, Dashboard, port=0, rate=10.0)
    texts = graph.node("server").create_publisher(GeneratedText, "generated_text", RESULT)
    graph.wait_for(texts.get_subscription_count)
    page = Page(browser, node)
    page.wait(lambda: page.text("link"), "the page")
    assert not page.find("[data-id=reading]").is_displayed()
    answer = GeneratedText(session_id="d", prompt=f"{EVIL}?", text="7 kg", final=True)
    answer.metrics.names = ["sent_bytes", "sent_extract", "jobs.1", "kept.1"]
    answer.metrics.values = array("d", [40.0, 40.0, 12.0, 1.0])
    texts.publish(answer)
    page.wait(lambda: "7 kg" in page.text("reading"), "the answer")
    assert f"{EVIL}?" in page.text("reading")
    assert "read by the remote: 40 bytes (extract 40)" in page.text("reading")
    assert "12" in page.text("rounds").split()


@pytest.mark.ros
@pytest.mark.slow
def test_an_instruction_that_waits_is_confirmed_on_the_page(graph: Any, browser: Any) -> None:
    from std_msgs.msg import String
    from std_srvs.srv import Trigger

    from collab_llm_nodes.nodes.dashboard import Dashboard
    from collab_llm_nodes.ros.qos import STATE

    node, user = start(graph, Dashboard, port=0, rate=10.0), graph.node("instruct")
    page = Page(browser, node)
    page.wait(lambda: page.text("link"), "the page")
    assert not page.find("[data-id=confirm]").is_displayed()
    confirmed = []

    def on_confirmed(request: Any, response: Any) -> Any:
        confirmed.append(request)
        return response

    user.create_service(Trigger, "confirm_instruction", on_confirmed)
    pending = user.create_publisher(String, "pending_instruction", STATE)
    pending.publish(String(data=f"find {EVIL}"))
    page.wait(lambda: page.find("[data-id=confirm]").is_displayed(), "the button")
    assert f"find {EVIL}" in page.text("pending")
    page.find("[data-id=confirm]").click()
    graph.wait_for(lambda: confirmed)


@pytest.mark.ros
@pytest.mark.slow
def test_the_robot_s_memory_is_asked_on_the_page(graph: Any, browser: Any) -> None:
    from array import array

    from generate_server import GenerateServer

    from collab_llm.msg import DragonRetrieval, GeneratedText
    from collab_llm_nodes.nodes.dashboard import Dashboard
    from collab_llm_nodes.ros.qos import RESULT

    node = start(graph, Dashboard, port=0, rate=10.0)
    page = Page(browser, node)
    page.wait(lambda: page.text("link"), "the page")
    assert not page.find("[data-id=recall]").is_displayed()
    user = graph.node("dragon_server")
    server = GenerateServer(user, "dragon")
    texts = user.create_publisher(GeneratedText, "generated_text", RESULT)
    found = user.create_publisher(DragonRetrieval, "dragon/retrieval", RESULT)
    graph.wait_for(lambda: texts.get_subscription_count() and found.get_subscription_count())
    page.wait(lambda: page.find("[data-id=recall]").is_displayed(), "the panel")
    page.find("[data-id=question]").send_keys("say where\n")
    graph.wait_for(lambda: server.requests)
    assert server.requests[0].prompt == "say where"
    pieces = {"names": ["episode 1", EVIL], "texts": ["a red ball was seen", EVIL]}
    found.publish(DragonRetrieval(session_id="s1", weights=[0.75, 0.25], **pieces))
    told = GeneratedText(session_id="s1", prompt="say where", text="in the hall", final=True)
    told.ends, told.sources = (
        array("I", [2, 11]),
        array("B", [GeneratedText.UNVERIFIED, GeneratedText.CLOUD]),
    )
    told.metrics.names, told.metrics.values = ["cloud_documents"], array("d", [3.0])
    texts.publish(told)
    page.wait(lambda: page.text("recollection") == "in the hall", "the answer")
    assert page.find("[data-id=recollection] .token.cloud").text.strip() == "the hall"
    page.wait(lambda: "a red ball was seen" in page.text("found"), "the pieces")
    assert "75%" in page.text("found")
    assert EVIL in page.text("found")
    assert page.script("window.evil") is None
    assert "2 tokens: 1 by the cloud, 1 by the robot alone" in page.text("recall")


@pytest.mark.ros
@pytest.mark.slow
def test_the_stages_of_a_model_appear_with_their_first_word(graph: Any, browser: Any) -> None:
    from array import array

    from collab_llm.msg import JupiterStages
    from collab_llm.msg import Timeline as TimelineMsg
    from collab_llm_nodes.nodes.dashboard import Dashboard
    from collab_llm_nodes.ros.qos import STATE

    node = start(graph, Dashboard, port=0, rate=10.0)
    server = graph.node("jupiter_server")
    stages = server.create_publisher(JupiterStages, "jupiter_stages", STATE)
    page = Page(browser, node)
    page.wait(lambda: page.text("link"), "the page")
    assert not page.find("[data-id=stages]").is_displayed()
    line = TimelineMsg(rows=[EVIL], row=array("H", [0]), number=array("I", [0]))
    line.begin, line.end = array("d", [0.0]), array("d", [0.25])
    stages.publish(JupiterStages(model=EVIL, missing=["rover"], measured=line))
    page.wait(lambda: "missing: rover" in page.text("stages"), "who is missing")
    assert "250.0 ms" in page.text("measured")
    assert EVIL[:60] in page.text("measured"), "a name is cut, and is text"


@pytest.mark.ros
@pytest.mark.slow
def test_documents_are_asked_about_on_the_page(graph: Any, browser: Any) -> None:
    from array import array

    from generate_server import GenerateServer

    from collab_llm.msg import GeneratedText
    from collab_llm_nodes.nodes.dashboard import Dashboard
    from collab_llm_nodes.ros.qos import RESULT

    node = start(graph, Dashboard, port=0, rate=10.0)
    page = Page(browser, node)
    user = graph.node("minions_server")
    server = GenerateServer(user, "minions")
    texts = user.create_publisher(GeneratedText, "generated_text", RESULT)
    graph.wait_for(texts.get_subscription_count)
    page.wait(lambda: page.find("[data-id=reading]").is_displayed(), "the panel")
    page.find("[data-id=files]").send_keys("manual.pdf, log.md,")
    page.find("[data-id=pasted]").send_keys("It weighs 7 kg.")
    page.find("[data-id=about]").send_keys("say weight")
    page.find("[data-id=ask]").click()
    (asked,) = graph.wait_for(lambda: server.requests)
    assert list(asked.document_names) == ["manual.pdf", "log.md", "pasted text"]
    assert list(asked.document_contents) == ["", "", "It weighs 7 kg."]
    told = GeneratedText(session_id="s1", prompt="say weight", text="7 kg", final=True)
    told.metrics.names, told.metrics.values = ["sent_bytes"], array("d", [40.0])
    texts.publish(told)
    page.wait(lambda: "7 kg" in page.text("reading"), "the answer")
    assert page.text("documents") == "from: manual.pdf, log.md, pasted text"


@pytest.mark.parametrize(("width", "height"), [(320, 640), (414, 800), (800, 600), (1500, 1150)])
def test_nothing_is_hidden_squeezed_or_cut(browser: Any, width: int, height: int) -> None:
    """At any width, with the longest texts: the bar covers nothing and stays on top."""
    pytest.importorskip("nicegui", reason="pip install -r requirements/dashboard.txt")
    server = Server()
    reasons = tuple(f"REASON_{n}" for n in range(12))
    server.robot.state = Motion(reasons=reasons, text="no fresh picture, " * 6)
    server.robot.snapshot = full_snapshot()
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        page = Page(browser, server.served)
        page.wait(lambda: reasons[-1] in page.text("motion"), "the reasons")
        page.wait(lambda: NODE in page.text("health"), "the page")
        edge = "document.querySelector({!r}).getBoundingClientRect().{}"
        assert page.script(edge.format("#bar", "bottom")) <= page.script(
            edge.format(".camera", "top")
        )
        assert page.script(edge.format("#bar", "height")) < height / 2
        assert page.script("document.documentElement.scrollWidth") <= width
        assert page.script(CUT) == []
        assert page.script(BROKEN_NAMES) == []
        browser.execute_script("window.scrollTo(0, 1e6)")
        page.wait(lambda: page.script("window.scrollY > 0"), "the end of the page")
        assert page.script(edge.format("#bar", "top")) == 0
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        server.served.close()


NODE = "cloud_verifier_bridge"
CUT = """[...document.querySelectorAll('.panel *')]
    .filter((e) => e.clientWidth && e.scrollWidth > e.clientWidth + 1)
    .map((e) => e.outerHTML.slice(0, 100))"""
BROKEN_NAMES = """[...document.querySelectorAll('.health td, .found td')]
    .filter((e) => e.clientWidth < 30).map((e) => e.outerHTML.slice(0, 100))"""


def full_snapshot() -> Snapshot:
    """A snapshot with long names in every panel."""
    view = View(1.5)
    for node in (NODE, "robot_1/navigation_action_parser"):
        view.on_health(f"{node}: node", 2, "no fresh picture: is camera_ingest running?", 0.0)
    counts = ("jobs", "done", "kept", "abstained", "truncated", "unreadable", "failed", "cut")
    figures = {f"{name}.{n}": 1e4 for name in counts for n in (1, 2, 3)}
    view.on_reading(Reading("s", "how heavy?", "7 kg", figures={"sent_bytes": 9e6, **figures}))
    pieces = [Found("manual_go2_battery_pack_2026.pdf", "the battery weighs 7 kg", 0.5)]
    view.on_found("d", "where is the red ball?", pieces)
    device = "payload-computer-of-the-living-room:50561"
    line = timeline([device], [(0, 0, 0.0, 0.3)])
    stages = (Stage(device, 0, 27, 10**10),)
    view.on_stages(Stages("model", stages, planned=line, measured=line))
    return view.snapshot(0.0)
