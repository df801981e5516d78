"""Questions to the robot's memory on the dashboard: content, and the node."""

from __future__ import annotations

import math
from array import array
from typing import Any

import pytest
from dashboard_graph import EVIL, graph
from started_nodes import start

from collab_llm_nodes.dashboard import drawing
from collab_llm_nodes.dashboard.view import FOUND, TEXT, Found, Recall, View, recalls, words
from collab_llm_nodes.protocols.base import Source
from collab_llm_nodes.protocols.dragon.metrics import DragonMetrics
from collab_llm_nodes.protocols.edge_cloud.metrics import EdgeCloudMetrics
from collab_llm_nodes.protocols.minions.metrics import MinionsMetrics

__all__ = ["graph"]  # fixture


def test_an_answer_keeps_the_pieces_that_it_rests_on() -> None:
    view = View(1.0)
    assert view.snapshot(0.0).recall is None
    view.on_found("a", "where?", [Found("episode 1", "a red ball was seen", 0.75)])
    asked = view.snapshot(0.0).recall
    assert asked is not None
    assert (asked.question, asked.text, asked.final) == ("where?", "", False)
    assert asked.found == (Found("episode 1", "a red ball was seen", 0.75),)
    view.on_recall(Recall("a", "where?", "there", (5,), (Source.CLOUD,), final=True))
    told = view.snapshot(0.0).recall
    assert told is not None
    assert told.found == asked.found
    assert 'class="token cloud"' in drawing.answer_html(words(told.text, told.ends, told.sources))
    view.on_recall(Recall("b", "and now?", "here"))
    other = view.snapshot(0.0).recall
    assert other is not None
    assert other.found is None
    assert (view.looked_up("a"), view.looked_up("b")) == (True, False)


def test_what_strangers_tell_of_a_question_is_bounded() -> None:
    view = View(1.0)
    for number in range(100):
        pieces = [Found("n" * 999, EVIL * 99, 0.1)] * 99 + [Found("x", "y", math.nan)]
        view.on_found(f"s{number}", "q" * 9999, pieces)
    view.on_recall(Recall("s99", "q" * 9999, "t" * 9999, stage="s" * 999, error="e" * 9999))
    told = view.snapshot(0.0).recall
    assert told is not None
    assert told.found is not None
    assert len(told.question) == len(told.text) == len(told.error) == TEXT
    assert len(told.found) == FOUND
    assert not view.looked_up("s0")
    assert "<img" not in drawing.found_html(told.found)


def test_no_piece_is_said_so() -> None:
    assert drawing.found_html(None) == ""
    assert "No document" in drawing.found_html(())


def test_the_figures_tell_the_protocol() -> None:
    assert recalls(DragonMetrics().figures())
    assert not recalls(EdgeCloudMetrics().figures())
    assert not recalls(MinionsMetrics().figures())


@pytest.mark.ros
def test_the_node_asks_dragon_and_shows_what_it_says(graph: Any) -> None:
    from generate_server import GenerateServer

    from collab_llm.msg import DragonRetrieval, GeneratedText
    from collab_llm_nodes.nodes.dashboard import Dashboard
    from collab_llm_nodes.ros.qos import RESULT

    node = start(graph, Dashboard, port=0, rate=10.0)
    node.ask("where?")
    absent = graph.wait_for(lambda: node.shown().recall)
    assert (absent.question, absent.error) == ("where?", "dragon_server is not there")
    assert not node.shown().remembers

    user = graph.node("dragon_server")
    server = GenerateServer(user, "dragon")
    texts = user.create_publisher(GeneratedText, "generated_text", RESULT)
    found = user.create_publisher(DragonRetrieval, "dragon/retrieval", RESULT)
    graph.wait_for(lambda: node.shown().remembers)
    graph.wait_for(lambda: texts.get_subscription_count() and found.get_subscription_count())
    node.ask("say there")
    graph.wait_for(lambda: server.requests)
    assert (server.requests[0].protocol, server.requests[0].prompt) == ("dragon", "say there")
    found.publish(
        DragonRetrieval(session_id="s1", names=["episode"], texts=["a ball"], weights=[1.0])
    )
    graph.wait_for(lambda: node.shown().recall.found)
    told = GeneratedText(session_id="s1", prompt="say there", text="there", final=True)
    told.ends, told.sources = array("I", [5]), array("B", [GeneratedText.CLOUD])
    texts.publish(told)
    graph.wait_for(lambda: node.shown().recall.final)
    recall = node.shown().recall
    assert (recall.text, recall.sources) == ("there", (Source.CLOUD,))
    assert recall.found == (Found("episode", "a ball", 1.0),)
    assert node.shown().answer.text == "", "the robot's own answer stays"

    def refused() -> bool:  # the one before may not have ended yet
        node.ask("refuse")
        return "refused" in node.shown().recall.error

    graph.wait_for(refused)


@pytest.mark.ros
def test_the_node_has_questions_about_documents_answered(graph: Any) -> None:
    from generate_server import GenerateServer

    from collab_llm_nodes.nodes.dashboard import Dashboard

    node = start(graph, Dashboard, port=0, rate=10.0)
    node.ask_documents("how heavy?", (("manual.pdf", ""),))
    absent = graph.wait_for(lambda: node.shown().reading)
    assert (absent.question, absent.error) == ("how heavy?", "minions_server is not there")
    assert not node.shown().reads

    server = GenerateServer(graph.node("minions_server"), "minions")
    graph.wait_for(lambda: node.shown().reads)
    node.ask_documents("wait long", (("manual.pdf", ""), ("pasted text", "7 kg")))
    (asked,) = graph.wait_for(lambda: server.requests)
    assert (asked.protocol, asked.prompt) == ("minions", "wait long")
    assert list(asked.document_names) == ["manual.pdf", "pasted text"]
    assert list(asked.document_contents) == ["", "7 kg"]
    names = ("manual.pdf", "pasted text")
    graph.wait_for(lambda: node.shown().reading.documents == names)
    node.ask("where?")
    other = graph.wait_for(lambda: node.shown().recall)
    assert other.error == "dragon_server is not there", "each is asked for itself"
    server.release()

    def refused() -> bool:  # the one before may not have ended yet
        node.ask_documents("refuse", ())
        return "refused" in node.shown().reading.error

    graph.wait_for(refused)
