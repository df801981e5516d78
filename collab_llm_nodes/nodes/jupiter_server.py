"""Jupiter (paper 004) as a node: one model over several workers.

Hosts the action ``jupiter/generate`` and its blocking service ``jupiter_generate``; the service
``jupiter_plan``, which plans without running anything; and the topic ``jupiter_stages``, which
reports the layers of each worker and their last timeline. Started by ``protocol_server jupiter``.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.task import Future
from sensor_msgs.msg import CompressedImage

from collab_llm.msg import JupiterStages, Timeline
from collab_llm.srv import JupiterPlan
from collab_llm_nodes.config import setting
from collab_llm_nodes.errors import Busy, Cancelled, CollabError, Inactive
from collab_llm_nodes.protocols.base import Control
from collab_llm_nodes.protocols.jupiter.gantt import Rows, describe, draw_plan, plan_rows
from collab_llm_nodes.protocols.jupiter.partition import Placement
from collab_llm_nodes.protocols.jupiter.running import Jupiter
from collab_llm_nodes.protocols.jupiter.settings import JupiterConfig
from collab_llm_nodes.ros.clock import STEADY
from collab_llm_nodes.ros.convert import deadline_from, of_a_request, status_of
from collab_llm_nodes.ros.generation_host import HostConfig
from collab_llm_nodes.ros.health import Level, Status
from collab_llm_nodes.ros.managed_node import guarded
from collab_llm_nodes.ros.protocol_server import ProtocolServer
from collab_llm_nodes.ros.qos import REQUESTS, STATE

_STAGES_S = 1.0
"""Shortest time between two messages on ``jupiter_stages``, which reports changes."""


@dataclass(frozen=True)
class JupiterServerConfig(JupiterConfig, HostConfig):
    """Parameters of the node."""

    deadline_s: float = setting(
        120.0, "One answer, when the request names no deadline [s].", low=0.05, high=3600.0
    )
    max_waiting: int = setting(
        16, "Answers in progress or waiting; more are refused as BUSY.", low=1, high=256
    )


class JupiterServer(ProtocolServer[JupiterServerConfig]):
    """See the module docstring."""

    def __init__(self, **node_arguments: Any) -> None:
        super().__init__("jupiter", config_type=JupiterServerConfig, **node_arguments)
        self._plan_control: Control | None = None
        self._published: tuple[object, ...] = ()

    @property
    def jupiter(self) -> Jupiter:
        """The running protocol."""
        return cast(Jupiter, self.host.running)

    def configure(self) -> None:
        """Arrange the workers and create the interfaces; blocks while workers are missing.

        Raises:
            CollabError: as ``running.start``.
        """
        super().configure()
        self._planning = ThreadPoolExecutor(1, "jupiter-plan")
        self._plans = self.create_service(
            JupiterPlan,
            "jupiter_plan",
            self._serve_plan,
            qos_profile=REQUESTS,
            callback_group=ReentrantCallbackGroup(),
        )
        self._stages = self.create_publisher(JupiterStages, "jupiter_stages", STATE)
        self._stages_timer = self.create_timer(_STAGES_S, self._publish_stages, clock=STEADY)
        self._published = ()

    def deactivate(self) -> None:
        super().deactivate()
        if self._plan_control is not None:
            self._plan_control.cancel()

    def cleanup(self) -> None:
        service = self._plans

        def release() -> None:
            self.destroy_service(service)

        self.destroy_timer(self._stages_timer)
        self.destroy_publisher(self._stages)
        self._planning.shutdown(wait=True)  # the running plan was cancelled
        self.host.close(release)

    def details(self, now: float) -> list[Status]:
        """Return the state of the last answers and of the workers."""
        found = super().details(now)
        missing = self.jupiter.pipeline.missing
        text = f"missing: {', '.join(missing)}" if missing else "all are there"
        return [*found, Status("workers", Level.WARN if missing else Level.OK, text)]

    # Plans.

    async def _serve_plan(
        self, request: JupiterPlan.Request, response: JupiterPlan.Response
    ) -> JupiterPlan.Response:
        try:
            control = self._admit_plan(request)
        except CollabError as error:
            self.warn_of("jupiter_plan", error)
            response.status = status_of(error)
            return response
        made = Future()
        self._plan_control = control
        self._planning.submit(self._plan, request, control, made)
        try:
            await made
        finally:
            self._plan_control = None
        found = made.result()
        return found if isinstance(found, JupiterPlan.Response) else response

    def _admit_plan(self, request: JupiterPlan.Request) -> Control:
        """Return the deadline of a plan.

        Raises:
            CollabError: the node is inactive, or makes another plan.
        """
        if not self.active:
            raise Inactive(f"{self.get_name()} is not active", remedy="activate it (lifecycle)")
        if self._plan_control is not None:
            raise Busy("another plan is being made", remedy="try again")
        return Control(time.monotonic() + deadline_from(request, self.config.deadline_s))

    def _plan(self, request: JupiterPlan.Request, control: Control, made: Future) -> None:
        """Make a plan in the planning thread, and always respond."""
        response = JupiterPlan.Response()
        try:
            response = self._planned(request, control)
        except Cancelled:
            gone = Inactive(f"{self.get_name()} was deactivated", remedy="activate it")
            response.status = status_of(gone)
        except CollabError as error:
            self.warn_of("jupiter_plan", error)
            response.status = status_of(error)
        except Exception as error:  # noqa: BLE001 - the caller needs a response
            response.status = status_of(self.fault_of("jupiter_plan", error))
        finally:
            self.post(made.set_result, response)

    def _planned(self, request: JupiterPlan.Request, control: Control) -> JupiterPlan.Response:
        profile = self.jupiter.profile
        with of_a_request():
            plan = self.jupiter.plan(
                control,
                prompt_tokens=request.prompt_tokens,
                answer_tokens=request.answer_tokens,
                lanes=request.lanes,
                devices=request.devices,
            )
        predicted, prompt = plan.predicted, plan.typical_prompt
        names, first, last = _stages_of(plan.placements)
        response = JupiterPlan.Response(
            devices=names,
            first_layers=first,
            last_layers=last,
            memory_bytes=array("Q", plan.memory_bytes),
            lengths=array("I", plan.lengths(prompt)),
            prefill_s=predicted.prefill_s,
            decode_s=predicted.decode_s,
            prefill_loss=predicted.prefill_loss,
            decode_loss=predicted.decode_loss,
            paper_plan_s=predicted.paper_plan_s,
            text=describe(plan),
            timeline=_to_msg(plan_rows(plan, profile, prompt)),
        )
        if request.draw:
            control.check()
            drawn = draw_plan(plan, profile, self.jupiter.measured_timeline())
            response.picture = CompressedImage(format="png", data=array("B", drawn))
        return response

    # Stages.

    @guarded
    def _publish_stages(self) -> None:
        """Publish the stages and their timelines if they have changed."""
        pipeline = self.jupiter.pipeline
        chain = pipeline.current
        sound = chain is not None and chain.failed is None
        passes = chain.passes if chain is not None and sound else []
        state = (
            id(chain) if sound else 0,
            passes[-1] if passes else None,
            len(pipeline.losses),
            tuple(pipeline.missing),
            pipeline.lanes_in_use,
        )
        if state == self._published:
            return
        self._published = state
        message = JupiterStages(
            model=self.config.model.path,
            missing=[self.config.device_names[worker] for worker in pipeline.missing],
            losses=len(pipeline.losses),
            lanes=self.config.pipeline.lanes,
            lanes_in_use=pipeline.lanes_in_use,
        )
        message.header.stamp = self.get_clock().now().to_msg()
        if chain is not None and sound:
            names, first, last = _stages_of(
                [
                    Placement(self.config.device_names[p.device], p.first, p.last)
                    for p in chain.parts
                ]
            )
            message.devices, message.first_layers, message.last_layers = names, first, last
            message.tensor_bytes = array("Q", chain.bytes)
            message.planned = _to_msg(self.jupiter.planned_timeline())
            message.measured = _to_msg(self.jupiter.measured_timeline())
        self._stages.publish(message)


def _stages_of(parts: Sequence[Placement]) -> tuple[list[str], array[int], array[int]]:
    """Return devices, first and last layers of stages as arrays of a message."""
    first, last = array("I", [p.first for p in parts]), array("I", [p.last - 1 for p in parts])
    return [part.device for part in parts], first, last


def _to_msg(rows: Rows) -> Timeline:
    spans = [(row, *span) for row, (_, each) in enumerate(rows) for span in each]
    return Timeline(
        rows=[name for name, _ in rows],
        row=array("H", [row for row, _, _, _ in spans]),
        number=array("I", [number for _, number, _, _ in spans]),
        begin=array("d", [begin for _, _, begin, _ in spans]),
        end=array("d", [end for _, _, _, end in spans]),
    )
