"""Client that asks the running nodes a recorded question: one picture, one prompt, one action."""

from __future__ import annotations

import time
from collections.abc import Callable

from collab_llm.action import Generate
from collab_llm.msg import LinkState, NavigationAction
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.replay.compare import Reply
from collab_llm_nodes.replay.recording import Action, Step
from collab_llm_nodes.replay.replayers import ANSWER_DEADLINE_S
from collab_llm_nodes.robot.grammar import Code, Kind
from collab_llm_nodes.ros.client import AskingClient
from collab_llm_nodes.ros.convert import figures_from
from collab_llm_nodes.ros.qos import COMMAND, RESULT, STATE

MESSAGE_DEADLINE_S = 30.0


class ReplayClient(AskingClient):
    """See the module docstring."""

    def __init__(self) -> None:
        super().__init__("replay_client", COMMAND)
        self._action: NavigationAction | None = None
        self._link_up = False
        subscribe = self.node.create_subscription
        subscribe(NavigationAction, "navigation_action", self._on_action, RESULT)
        subscribe(LinkState, "link_state", self._on_link, STATE)

    def wait_for_graph(self, deadline_s: float, alive: Callable[[], None]) -> None:
        """Wait until all nodes are connected to one another; ``alive`` raises if one has ended.

        Raises:
            DeadlineExceeded: they are not in time.
        """

        def ready() -> bool:
            alive()
            readers = self.node.count_subscribers("generated_text")
            return self.connected() and self._link_up and readers >= 2  # cache, parser

        self.wait(ready, deadline_s, "the graph to come up")

    def ask(self, step: Step, sampling: SamplingConfig, max_tokens: int) -> Reply:
        """Return the answer of the nodes to the picture and prompt of ``step``.

        The picture is stamped anew, since nodes refuse old ones.

        Raises:
            CollabError: the answer failed, or a message did not arrive.
        """
        assert step.picture is not None, "such steps are not asked"
        begun = time.monotonic()
        observation = self.show(step.picture, MESSAGE_DEADLINE_S)
        goal = Generate.Goal(
            header=observation.header,
            prompt=step.prompt,
            images=[observation.image],
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seed=sampling.seed,
            law=sampling.law,
            max_tokens=max_tokens,
            deadline_s=ANSWER_DEADLINE_S,
            for_motion=True,  # its action is compared
        )
        result = self.answer(goal, MESSAGE_DEADLINE_S)
        self.wait(lambda: self._action is not None, MESSAGE_DEADLINE_S, "the action")
        read = self._action
        assert read is not None
        value = read.distance if read.kind == Kind.FORWARD else read.angle
        return Reply(
            tuple(result.tokens),
            result.text,
            Action(Kind(read.kind), value, Code(read.code)),
            figures_from(result.metrics)["tau"],
            time.monotonic() - begun,
        )

    def forget(self) -> None:
        self._action = None

    # Callbacks, in the executor's thread.

    def _on_action(self, msg: NavigationAction) -> None:
        with self.changed:
            if self.about_it(msg):
                self._action = msg
                self.changed.notify_all()

    def _on_link(self, msg: LinkState) -> None:
        with self.changed:
            self._link_up = msg.state == LinkState.UP
