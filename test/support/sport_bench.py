"""The Sport API client against a simulated robot, under a virtual clock."""

from __future__ import annotations

import math
from typing import Any

from fake_sport_server import SportServer

from collab_llm_nodes.robot.go2.sport import Api, Call, Command, Go2, Go2Config, SportState

AHEAD = Command(0.4, 0.0, 0.0)


class Bench:
    """A driver's state machine and a robot, on one simulated clock. Answers come at once."""

    def __init__(self, config: Go2Config | None = None, **behaviour: Any) -> None:
        self.now = 100.0
        self.robot = SportServer(**behaviour)
        self.robot.advance(self.now)
        self.go2 = Go2(config or Go2Config(avoid=False))
        self.command: Command | None = None  # sent at 20 Hz
        self.speaks = True  # the robot's state comes
        self.sent: list[tuple[float, Call]] = []
        self.carry(self.go2.begin(self.now))

    def carry(self, calls: list[Call]) -> None:
        for call in calls:
            self.sent.append((self.now, call))
            api = call.api
            code, data, _ = self.robot.request(
                api.service, api.number, call.id, call.parameter, self.now
            )
            if not call.reply or api.value in self.robot.mute:
                continue
            answer = self.go2.requests.on_response(call.id, api.number, code, data)
            assert answer is not None
            self.carry(self.go2.on_answer(answer, self.now))

    def run(self, seconds: float) -> None:
        """Ticks at 100 Hz, state at 50 Hz, commands at 20 Hz."""
        for i in range(round(seconds * 100)):
            self.now += 0.01
            self.robot.advance(self.now)
            if i % 2 == 0 and self.speaks:
                r = self.robot
                speed = math.hypot(r.velocity[0], r.velocity[1])
                state = SportState(r.machine, 0, speed, r.velocity[2])
                self.carry(self.go2.on_state(state, self.now))
            if i % 5 == 0 and self.command is not None:
                self.carry(self.go2.on_command(self.command, self.now))
            self.carry(self.go2.tick(self.now))

    def times(self, api: Api, since: float = 0.0) -> list[float]:
        return [at for at, call in self.sent if call.api is api and at >= since]

    @property
    def moving(self) -> bool:
        return any(abs(v) > 1e-6 for v in self.robot.velocity)
