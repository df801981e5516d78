"""Both sides' machines: any schedule of delays, hand-overs and losses gives the same answer."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from dragon_timeline import plain_answer
from enumeration import TableModel
from hypothesis import given, settings
from hypothesis import strategies as st

from collab_llm_lab.bench.dragon.simulation import Delays, Simulation, two_machines
from collab_llm_nodes.decoding.aggregation import (
    AggregationConfig,
    AggregationLaw,
    Party,
    SideDraft,
)
from collab_llm_nodes.decoding.sampling import SparseDistribution
from collab_llm_nodes.errors import InvalidInput, ProtocolError
from collab_llm_nodes.protocols.base import Source
from collab_llm_nodes.protocols.dragon.machine import AheadConfig, SideMachine
from collab_llm_nodes.protocols.dragon.messages import Draft, Target
from collab_llm_nodes.protocols.dragon.profiler import Profiler
from collab_llm_nodes.protocols.dragon.scheduler import POLICIES, ScheduleConfig, Scheduler

VOCAB, MOST = 6, 14
EOS = frozenset({0})
DEVICE, CLOUD = Party.DEVICE, Party.CLOUD


NEVER = 10**6


class Tables:
    """Two sides whose distributions and weights depend on the whole prefix.

    Args:
        silent: positions from which device and cloud have no say. A side that alone has one keeps
            it: both lose theirs at one position, or never.
    """

    def __init__(
        self, seed: int, likeness: float, silent: tuple[int, int] = (NEVER, NEVER)
    ) -> None:
        self.silent = silent
        self.passes = [0, 0]
        self.common = TableModel(VOCAB, seed)
        self.own = (TableModel(VOCAB, seed + 1), TableModel(VOCAB, seed + 2))
        self.likeness = likeness

    def __call__(self, party: Party, prefix: tuple[int, ...]) -> tuple[np.ndarray, float]:
        self.passes[party] += 1
        p = self.likeness * self.common(prefix) + (1 - self.likeness) * self.own[party](prefix)
        weight = random.Random(f"{party} {prefix}").uniform(-1, 1)
        return p.astype(np.float32), -np.inf if len(prefix) >= self.silent[party] else weight


class Lossy(Simulation):
    """A link that breaks at given times; all that is under way is lost.

    The stream is opened again after ``pause``, with a new machine in the cloud that is told the
    answer as the device knows it.
    """

    generation = 0

    def break_at(self, times: list[float], pause: float, make_cloud: object) -> None:
        for time in times:
            self._at(time, self._break)
            self._at(time + pause, lambda: self._mend(make_cloud))

    def _break(self) -> None:
        self.generation += 1
        self.machines[DEVICE].on_lost()
        self._running[CLOUD] = None
        self._serve(DEVICE)

    def _mend(self, make_cloud: object) -> None:
        device = self.machines[DEVICE]
        if device.linked or device.finished:
            return
        self.generation += 1
        cloud = make_cloud(tuple(device.answer))  # type: ignore[operator]
        self.machines = (device, cloud)
        self._running[CLOUD] = None
        device.on_linked(self.now)
        self._serve(DEVICE)
        self._serve(CLOUD)

    def _serve(self, party: Party) -> None:
        if party is CLOUD and not self.machines[DEVICE].linked:
            return
        super()._serve(party)

    def _send(self, party: Party, message: object) -> None:
        generation = self.generation
        arrival = self.now + self._delays.link(party, self.now)
        arrival = self._arrival[party] = max(arrival, self._arrival[party])

        def deliver() -> None:
            if self.generation == generation:
                self._receive(party.other, message)  # type: ignore[arg-type]

        self._at(arrival, deliver)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10**6),
    likeness=st.sampled_from([0.0, 0.6, 0.95, 1.0]),
    law=st.sampled_from(["shared", "coin"]),
    policy=st.sampled_from(POLICIES),
    ahead=st.integers(0, 6),
    breaks=st.lists(st.floats(0.0, 30.0), max_size=3),
    silent=st.sampled_from(
        [(NEVER, NEVER), (0, 0), (4, 4), (0, NEVER), (4, NEVER), (NEVER, 0), (NEVER, 4)]
    ),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_no_schedule_changes_the_answer(
    seed: int,
    likeness: float,
    law: str,
    policy: str,
    ahead: int,
    breaks: list[float],
    silent: tuple[int, int],
    temperature: float,
) -> None:
    """Delays, hand-overs, ended passes, broken streams and sides that lose their say: the answer is
    that of a plain loop in which both sides draft each token."""
    model = Tables(seed % 97, likeness, silent)
    own = AggregationLaw(AggregationConfig(law=law, top_p=0.9), VOCAB, temperature, seed)
    schedule = ScheduleConfig(aggregate_on=policy, seed=seed)
    chance = random.Random(seed)
    delays = Delays(lambda *_: chance.uniform(0.1, 2.0), lambda *_: chance.uniform(0.0, 3.0))
    lead = AheadConfig(ahead)
    machines = two_machines(own, schedule, vocab_size=VOCAB, eos=EOS, max_tokens=MOST, ahead=lead)

    def make_cloud(answer: tuple[int, ...]) -> SideMachine:
        return SideMachine(
            CLOUD,
            own,
            Scheduler(schedule),
            Profiler(),
            vocab_size=VOCAB,
            eos=EOS,
            max_tokens=MOST,
            ahead=lead,
            answer=answer,
        )

    world = Lossy(machines, model, delays)
    world.break_at(breaks, 1.5, make_cloud)
    run = world.finish()
    assert run.tokens == plain_answer(own, model, EOS, MOST)
    device = machines[DEVICE]
    assert len(device.sources) == len(run.tokens)
    assert Source.UNVERIFIED not in device.sources
    by_device, by_cloud = (Source.ACCEPTED, Source.DEVICE), (Source.ACCEPTED, Source.CLOUD)
    told = [(source in by_device, source in by_cloud) for source in device.sources]
    assert told == device.figures.fates
    assert len(run.known_s) == len(run.tokens)


def test_the_answer_does_not_depend_on_the_side_that_aggregates() -> None:
    model = Tables(5, 0.5)
    for seed in range(20):
        own = AggregationLaw(AggregationConfig(), VOCAB, 1.0, seed)
        answers = set()
        for policy in POLICIES:
            machines = two_machines(
                own, ScheduleConfig(aggregate_on=policy), vocab_size=VOCAB, max_tokens=MOST
            )
            run = Simulation(machines, model, Delays.constant((1.0, 0.7), 2.0)).finish()
            answers.add(run.tokens)
        assert len(answers) == 1


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sole", list(Party))
@pytest.mark.parametrize("begin", [0, 3])
def test_the_only_side_with_a_say_waits_for_nobody(policy: str, sole: Party, begin: int) -> None:
    """A token takes one pass of that side, at any round trip; the other side's passes end."""
    silent = (NEVER, begin) if sole is DEVICE else (begin, NEVER)
    model = Tables(7, 0.0, silent)
    own = AggregationLaw(AggregationConfig(), VOCAB, 1.0, 5)
    machines = two_machines(
        own, ScheduleConfig(aggregate_on=policy), vocab_size=VOCAB, max_tokens=60
    )
    decode_s, rtt_s = (1.0, 0.5), 4.0
    run = Simulation(machines, model, Delays.constant(decode_s, rtt_s)).finish()
    assert run.tokens == plain_answer(own, model, frozenset(), 60)
    late = begin + 1
    paces = np.diff(run.known_s[late + int(2 * rtt_s / decode_s[sole]) :])
    assert paces == pytest.approx(decode_s[sole])
    assert run.total_s - run.known_s[begin] <= (60 - late) * decode_s[sole] + 2 * rtt_s
    written = set(machines[DEVICE].sources[late:])
    assert written == {Source.DEVICE if sole is DEVICE else Source.CLOUD}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sole", list(Party))
def test_a_side_without_a_say_runs_no_passes(policy: str, sole: Party) -> None:
    model = Tables(7, 0.0, (NEVER, 0) if sole is DEVICE else (0, NEVER))
    own = AggregationLaw(AggregationConfig(), VOCAB, 1.0, 5)
    machines = two_machines(
        own, ScheduleConfig(aggregate_on=policy), vocab_size=VOCAB, max_tokens=200
    )
    run = Simulation(machines, model, Delays.constant((1.0, 1.0), 4.0)).finish()
    assert len(run.tokens) == 200
    assert model.passes[sole.other] <= 10
    assert run.handovers <= 2


@pytest.mark.parametrize("silent", [(NEVER, NEVER), (2, NEVER), (NEVER, 2), (2, 2)])
def test_pinned_to_the_device_it_sends_targets_only(silent: tuple[int, int]) -> None:
    model = Tables(2, 0.5, silent)
    own = AggregationLaw(AggregationConfig(), VOCAB, 1.0, 3)
    machines = two_machines(
        own, ScheduleConfig(aggregate_on="device"), vocab_size=VOCAB, max_tokens=MOST
    )
    sent: list[object] = []
    device = machines[DEVICE]
    poll = device.poll
    device.poll = lambda: [sent.append(m) or m for m in poll()]  # type: ignore
    Simulation(machines, model, Delays.constant((1.0, 0.7), 2.0)).finish()
    assert len(sent) == MOST
    for message in sent:
        assert isinstance(message, Target)
        # The fate of a draft tells about its documents, unless they are the only ones that count.
        assert message.accepted[DEVICE] == message.sole
        assert message.sole == (silent == (NEVER, 2) and message.position >= 2)
        assert (message.expected, message.decode_s) == ((0.0, 0.0), 0.0)
    heard = [fate[CLOUD] for fate in machines[CLOUD].figures.fates]
    told = [fate[CLOUD] for fate in device.figures.fates]
    assert heard == told[: len(heard)] != []


def test_a_side_runs_ahead_no_further_than_allowed() -> None:
    for ahead in (1, 3):
        machines = two_machines(
            AggregationLaw(AggregationConfig(), VOCAB, 1.0, 3),
            ScheduleConfig(),
            vocab_size=VOCAB,
            max_tokens=40,
            ahead=AheadConfig(ahead),
        )
        made, now = 0, 0.0
        device = machines[DEVICE]
        while (wanted := device.wanted) is not None:
            assert len(wanted.prefix) == made
            device.on_pass(wanted, np.full(VOCAB, 1 / VOCAB), 0.0, 0.1, now)
            made, now = made + 1, now + 0.1
        assert made == ahead


def test_the_lead_covers_the_round_trip() -> None:
    assert AheadConfig().drafts(rtt_s=0.3, decode_s=0.05) == 8
    assert AheadConfig().drafts(rtt_s=0.0, decode_s=0.05) == 4
    assert AheadConfig().drafts(rtt_s=9.0, decode_s=0.001) == 64
    assert AheadConfig(3).drafts(rtt_s=9.0, decode_s=0.001) == 3


def test_the_device_finishes_alone_and_says_so() -> None:
    model = Tables(9, 0.4)
    own = AggregationLaw(AggregationConfig(), VOCAB, 1.0, 8)
    machines = two_machines(own, ScheduleConfig(), vocab_size=VOCAB, max_tokens=MOST)
    world = Simulation(machines, model, Delays.constant((1.0, 1.0), 2.0))

    def vanish() -> None:
        world._events = [e for e in world._events if e[0] < world.now]
        machines[DEVICE].go_alone(world.now)
        world._running[DEVICE] = None
        world._serve(DEVICE)

    world._at(11.0, vanish)
    run = world.finish()
    together = machines[DEVICE].sources.index(Source.UNVERIFIED)
    assert 0 < together < MOST
    assert run.tokens[:together] == plain_answer(own, model, frozenset(), MOST)[:together]
    answer = run.tokens[:together]
    for position in range(together, MOST):  # the rest is drawn of the device's distribution
        draft = own.propose(*model(DEVICE, answer), position, DEVICE)
        answer += (draft.token,)
    assert run.tokens == answer
    assert set(machines[DEVICE].sources[together:]) == {Source.UNVERIFIED}


def test_a_pass_is_void_once_its_chain_is_rejected() -> None:
    model = Tables(3, 0.0)
    own = AggregationLaw(AggregationConfig(), VOCAB, 1.0, 1)
    device, cloud = two_machines(own, ScheduleConfig(), vocab_size=VOCAB, max_tokens=MOST)
    first, other = device.wanted, cloud.wanted
    assert first is not None
    assert other is not None
    device.on_pass(first, *model(DEVICE, ()), 0.1, 0.0)
    second = device.wanted
    assert second is not None
    assert not device.is_void(second)
    drafts = [own.propose(*model(side, ()), 0, side) for side in Party]
    judged = own.judge((drafts[0], drafts[1]), 0)
    cloud.aggregator = DEVICE
    cloud.on_pass(other, *model(CLOUD, ()), 0.1, 0.0)
    for message in cloud.poll():
        device.on_message(message, 1.0)
    assert device.answer == [judged.token]
    assert device.is_void(second) == (not judged.accepted[0])
    if device.is_void(second):
        device.on_pass(second, *model(DEVICE, second.prefix), 0.1, 1.0)
        assert device.figures.ended_passes == 1


# ------------------------------------------------------- a peer that does not keep the rules


def kept(*ids: int) -> SparseDistribution:
    return SparseDistribution(np.array(ids), np.ones(len(ids), np.float32))


def cloud_draft(position: int, epoch: int = 0, token: int = 1) -> Draft:
    return Draft(position, epoch, SideDraft(token, kept(1, 2), 0.0), 0.01, 0, 0.0)


def target(position: int, token: int = 1, accepted: tuple[bool, bool] = (True, True)) -> Target:
    return Target(position, token, accepted, CLOUD, False, (1.0, 1.0), 0.01, 0.0)


def sole_target(position: int, accepted: tuple[bool, bool] = (False, True)) -> Target:
    """A target of a cloud that says it is the only side with a say."""
    return replace(target(position, accepted=accepted), sole=True)


def a_device(policy: str = "device") -> SideMachine:
    own = AggregationLaw(AggregationConfig(), VOCAB, 0.0)
    schedule = ScheduleConfig(aggregate_on=policy)
    return two_machines(own, schedule, vocab_size=VOCAB, max_tokens=4)[DEVICE]


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([cloud_draft(1)], "position"),
        ([cloud_draft(0), cloud_draft(0)], "position"),
        ([cloud_draft(0, epoch=1)], "position"),
        ([cloud_draft(i) for i in range(5)], "position"),
        ([target(0)], "aggregator"),
    ],
)
def test_impossible_drafts_are_typed_errors(messages: list[Draft], field: str) -> None:
    device = a_device()
    for message in messages[:-1]:
        device.on_message(message, 0.0)
    with pytest.raises(ProtocolError) as caught:
        device.on_message(messages[-1], 0.0)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("message", "error", "field"),
    [
        (target(1), ProtocolError, "position"),
        (target(0, token=VOCAB), InvalidInput, "token"),
        (target(0, token=2), ProtocolError, "accepted"),
        (target(0, accepted=(False, True)), ProtocolError, "accepted"),
    ],
)
def test_impossible_targets_are_typed_errors(
    message: Target, error: type[Exception], field: str
) -> None:
    device = a_device("cloud")
    wanted = device.wanted
    assert wanted is not None
    device.on_pass(wanted, np.eye(VOCAB)[1], 0.0, 0.1, 0.0)
    with pytest.raises(error) as caught:
        device.on_message(message, 0.0)
    assert caught.value.field == field  # type: ignore[attr-defined]
    device.on_message(target(0), 0.0)  # the machine is as it was
    assert device.answer == [1]


def test_a_side_that_was_told_to_stay_silent_is_not_asked_again() -> None:
    device = a_device("cloud")
    wanted = device.wanted
    assert wanted is not None
    device.on_pass(wanted, np.eye(VOCAB)[1], -np.inf, 0.1, 0.0)
    with pytest.raises(ProtocolError, match="accepted"):
        device.on_message(sole_target(0, accepted=(True, True)), 0.0)
    device.on_message(sole_target(0), 0.0)  # its draft was the same token, and did not count
    assert device.answer == [1]
    assert device.wanted is None
    assert device.is_void(wanted)
    assert device.waits_for_peer
    device.on_message(sole_target(1), 0.0)
    with pytest.raises(ProtocolError, match="position"):
        device.on_message(target(2), 0.0)  # its draft would be needed
    device.on_lost()
    assert device.wanted is not None


def test_a_draft_of_an_earlier_epoch_is_dropped() -> None:
    device = a_device()
    wanted = device.wanted
    assert wanted is not None
    device.on_pass(wanted, np.eye(VOCAB)[2], 5.0, 0.1, 0.0)
    device.on_message(cloud_draft(0, token=1), 0.0)
    assert device.answer == [2]  # the device weighs more
    device.on_message(cloud_draft(1, epoch=0), 0.0)
    wanted = device.wanted
    assert wanted is not None
    device.on_pass(wanted, np.eye(VOCAB)[2], 5.0, 0.1, 0.0)
    assert device.waits_for_peer  # the stale draft did not count
    device.on_message(cloud_draft(1, epoch=1), 0.0)
    assert len(device.answer) == 2
