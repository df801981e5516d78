"""Take the pictures of docs/dashboard.md and docs/dragon.md: the page in Chromium, beside the rest.

scripts/with-ros python scripts/dashboard_screenshots.py [FOLDER]
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.common.keys import Keys

from collab_llm_lab.demo.memory import memory_processes
from collab_llm_lab.demo.tasks import SHOWN, SHOWN_SEED
from collab_llm_nodes.assets import config_file
from collab_llm_nodes.processes import free_port, run_process
from collab_llm_nodes.protocols.edge_cloud.process import verifier_process
from collab_llm_nodes.ros.domain import isolate_ros

PROCESSES = {"motion": ["--driver", "sim"], "graph": [], "dashboard": []}
DEADLINE_S = 120.0


def main() -> int:
    """Start everything, drive, and write ``dashboard.png``, ``_stop.png`` and ``_memory.png``."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images")
    folder.mkdir(parents=True, exist_ok=True)
    isolate_ros()
    cloud, page = f"127.0.0.1:{free_port()}", free_port()
    common = ["--ros-args"]
    for name in ("embedded.yaml", "sim.yaml"):
        common += ["--params-file", str(config_file(name))]
    for setting in (
        f"cloud_verifier_bridge:verifier.address:={cloud}",
        f"sim_go2:seed:={SHOWN_SEED}",
        f"sim_go2:thing:={SHOWN}",
        "sim_go2:real_time_factor:=1.0",
        "sim_go2:lockstep:=false",
        f"dashboard:port:={page}",
    ):
        common += ["-p", setting]
    with contextlib.ExitStack() as stack:
        stack.enter_context(verifier_process(cloud, compute_s=0.05))
        for name, arguments in PROCESSES.items():
            node = [sys.executable, "-m", f"collab_llm_nodes.nodes.{name}"]
            stack.enter_context(run_process(name, [*node, *arguments, *common]))
        stack.enter_context(memory_processes(None))
        browser = stack.enter_context(_browser())
        _until(lambda: _loads(browser, f"http://127.0.0.1:{page}/"), "the page")
        _until(lambda: "motion allowed" in _text(browser), "motion")
        _until(lambda: "UP," in _text(browser), "the link")
        _until(lambda: "THE ROBOT'S MEMORY" in _text(browser).upper(), "the memory")
        wish = f"please go to the {SHOWN}"
        browser.find_element("css selector", "[data-id=instruction]").send_keys(wish + "\n")
        _until(lambda: "step 6" in _text(browser), "six steps")
        _until(lambda: browser.execute_script(_WHOLE_ANSWER), "an answer")
        browser.save_screenshot(str(folder / "dashboard.png"))
        browser.find_element("id", "stop").click()
        _until(lambda: "STOPPED" in _text(browser), "the stop")
        _until(lambda: "EMERGENCY STOP:" in _text(browser), "the state of motion")
        browser.set_window_size(420, 760)
        browser.get(f"http://127.0.0.1:{page}/stop")
        _until(lambda: "EMERGENCY STOP:" in _text(browser), "the stop page")
        browser.save_screenshot(str(folder / "dashboard_stop.png"))
        browser.set_window_size(1500, 1900)  # the whole panel is to be seen
        browser.get(f"http://127.0.0.1:{page}/")
        question = f"Where did you last see the {SHOWN}?"
        _until(lambda: _remembers(browser, question), "the memory's answer")
        panel = browser.find_element("css selector", "[data-id=recall]")
        panel.screenshot(str(folder / "dashboard_memory.png"))
    return 0


def _remembers(browser: Any, question: str) -> bool:
    """Ask the memory; return True if it tells a sighting, which is written with its episode."""
    for box in browser.find_elements("css selector", "[data-id=question]"):
        if not box.is_displayed():  # the page has just been loaded
            return False
        box.send_keys(Keys.CONTROL + "a" + Keys.NULL, question + Keys.ENTER)
    time.sleep(2.0)
    return bool(browser.execute_script(_SIGHTING))


_SIGHTING = (
    "const told = document.querySelector('[data-id=recollection]');"
    "return told !== null && /last seen from.*[.]$/s.test(told.innerText.trim())"
)
_WHOLE_ANSWER = "return document.querySelector('[data-id=answer] .matched') !== null"


def _browser() -> Any:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.add_argument("--window-size=1500,1150")
    driver = shutil.which("chromedriver") or "chromedriver"
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))


def _loads(browser: Any, address: str) -> bool:
    try:
        browser.get(address)
    except WebDriverException:  # nobody listens yet
        return False
    return "EMERGENCY STOP" in _text(browser)


def _text(browser: Any) -> str:
    return str(browser.execute_script("return document.body.innerText"))


def _until(condition: Callable[[], Any], what: str) -> None:
    due = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > due:
            raise SystemExit(f"{what}: not within {DEADLINE_S:g} s")
        time.sleep(0.1)


if __name__ == "__main__":
    raise SystemExit(main())
