"""Answers for motion go first at the draft model, and others still end."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from tiny_models import scene, tiny_folder, tiny_model

from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import DeadlineExceeded
from collab_llm_nodes.models.loading import ModelConfig
from collab_llm_nodes.protocols.base import Control, Progress, Request, Resources, Turn
from collab_llm_nodes.protocols.edge_cloud.carrier import VerifierCarrier
from collab_llm_nodes.protocols.edge_cloud.client import EdgeClientConfig
from collab_llm_nodes.protocols.edge_cloud.motion_priority import SHARE, MotionPriority
from collab_llm_nodes.protocols.edge_cloud.running import EdgeCloud, EdgeCloudConfig
from collab_llm_nodes.protocols.edge_cloud.service import VerifierConfig, start_server
from collab_llm_nodes.protocols.edge_cloud.verifier_client import ClientLinkConfig, VerifierClient

ARCHITECTURE = "qwen2_vl"
CONFIG = EdgeCloudConfig(
    model=ModelConfig(path=str(tiny_folder(ARCHITECTURE, 0))), client=EdgeClientConfig(gamma=3)
)


def test_others_rest_while_motion_is_under_way_and_have_their_share_afterwards() -> None:
    now = [0.0]
    way = MotionPriority(clock=lambda: now[0])
    woken: list[float] = []
    forget = way.on_release(lambda: woken.append(now[0]))
    assert way.may_run()
    with way.held():
        assert not way.may_run()
        with way.held():
            now[0] = 4.0
        assert way.may_run(), "one has ended: others have their share of its time"
        now[0] = 5.0
        assert not way.may_run(), "the share is used up, and another is under way"
        assert not way.wait(0.0)
    assert way.wait(0.0)
    assert woken == [4.0, 5.0]
    forget()
    with way.held():
        pass
    assert len(woken) == 2


def test_motion_that_asks_again_at_once_leaves_others_a_fifth_of_the_time() -> None:
    now, share = [0.0], 0.0
    way = MotionPriority(clock=lambda: now[0])
    for _ in range(10):
        with way.held():
            for _ in range(100):
                now[0] += 0.01
                share += 0.01 * way.may_run()
    assert share == pytest.approx(9 * SHARE, abs=0.2), "the first time nobody has earned any"


def request(name: str, tokens: int, **fields: Any) -> Request:
    plain = Request(name, CONFIG, (Turn("user", f"go to the {name}"),), (scene(1),))
    return replace(plain, max_tokens=tokens, **fields)


def in_time() -> Control:
    return Control(time.monotonic() + 120.0)


def test_a_question_rests_between_two_passes_and_goes_on_from_where_it_was() -> None:
    """Both answers are those that each gets alone."""
    draft, target = (Engine(tiny_model(ARCHITECTURE, seed=0)) for _ in range(2))
    passes: list[str] = []
    run = draft.run

    begun, moving = threading.Event(), threading.Event()

    def counting(*arguments: Any, **options: Any) -> Any:
        passes.append(threading.current_thread().name.split("_")[0])
        if passes[-1] == "motion":
            moving.set()
        return run(*arguments, **options)

    def emit(told: Progress) -> None:
        begun.set()
        assert moving.wait(60.0)

    with start_server(VerifierConfig(address="127.0.0.1:0"), target) as server:
        client = VerifierClient(ClientLinkConfig(address=f"127.0.0.1:{server.port}"))
        resources = Resources(VerifierCarrier(client))
        edge = EdgeCloud(draft, CONFIG, resources)
        question = request("red ball", 60)
        motion = request("blue cone", 12, for_motion=True)
        quiet = lambda told: None  # noqa: E731
        alone = [edge.run(each, quiet, in_time()).tokens for each in (motion, question)]
        edge = EdgeCloud(draft, CONFIG, resources)  # nobody has earned a share of its time
        draft.run = counting  # type: ignore[method-assign]
        with ThreadPoolExecutor(1, "question") as asker, ThreadPoolExecutor(1, "motion") as mover:
            asked = asker.submit(edge.run, question, emit, in_time())
            assert begun.wait(60.0)
            moved = mover.submit(edge.run, motion, quiet, in_time()).result(60.0)
            whole = asked.result(120.0)
        client.close()
    first, after = passes.index("motion"), len(passes) - passes[::-1].index("motion")
    assert set(passes[first:after]) == {"motion"}
    assert "question" in passes[after:], "it had not ended"
    assert [moved.tokens, whole.tokens] == alone
    assert whole.error is None


def test_a_question_that_finds_motion_under_way_waits_for_no_longer_than_its_deadline() -> None:
    draft = Engine(tiny_model(ARCHITECTURE, seed=0))
    edge = EdgeCloud(draft, CONFIG, Resources())
    with edge.motion_priority.held(), pytest.raises(DeadlineExceeded):
        edge.run(request("ball", 4), lambda told: None, Control(time.monotonic() + 0.05))
