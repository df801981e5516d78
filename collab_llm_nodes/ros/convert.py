"""Conversion between the protocols' dataclasses and ROS messages."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from std_msgs.msg import Header

from collab_llm.msg import Draft as DraftMsg
from collab_llm.msg import EarlyExit as EarlyExitMsg
from collab_llm.msg import GenerationMetrics as MetricsMsg
from collab_llm.msg import Status
from collab_llm.msg import Verdict as VerdictMsg
from collab_llm_nodes.decoding.sampling import SamplingConfig, SparseDistribution
from collab_llm_nodes.errors import BY_CODE, CollabError, ConfigError, InvalidInput, quoted
from collab_llm_nodes.metrics import GenerationMetrics
from collab_llm_nodes.models.guide import Guide
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.edge_cloud.messages import (
    Draft,
    EarlyExit,
    Verdict,
)
from collab_llm_nodes.transport.wire import Failure

_CODE_OF = {
    value: name
    for name in dir(Status)
    if name.isupper() and isinstance(value := getattr(Status, name), int)
}


MAX_DEADLINE_S = 86400.0

_TURN = re.compile(r"turns(?:\[(\d+)\]\.(role|content))?")
_FIELD = re.compile(r"([a-z_]\w*(?:\[\d+\])?(?:\.\w+)*): (.*)", re.DOTALL)


def status_named(code: str, message: str) -> Status:
    """Return the status whose code has the name ``code``, such as "UNAVAILABLE"."""
    return Status(code=getattr(Status, code, Status.INTERNAL), message=message)


def status_of(error: CollabError) -> Status:
    """Return the status of ``error``; the default ``Status()`` is OK.

    A turn is named as the interfaces of this package have it: ``turns[1].role`` is
    ``turn_roles[1]``.
    """
    turn = _TURN.fullmatch(error.field)
    if turn is None:
        return status_named(error.code, str(error))
    index, part = turn.groups()
    name = f"turn_{part}s[{index}]" if part else "turn_contents"
    renamed = CollabError(str(error.args[0]), field=name, remedy=error.remedy)
    return status_named(error.code, str(renamed))


def code_of(status: Status) -> str:
    """Return the name of a status's code, such as "UNAVAILABLE"."""
    return _CODE_OF.get(status.code, CollabError.code)


def error_from(status: Status) -> CollabError:
    """Return the typed error of ``status``, whose message keeps the remedy."""
    named = _FIELD.fullmatch(status.message)
    name, said = named.groups() if named else ("", status.message)
    return BY_CODE.get(code_of(status), CollabError)(said, field=name)


def raise_for(status: Status) -> None:
    """Raise the typed error of ``status``; return if it is OK."""
    if status.code != Status.OK:
        raise error_from(status)


@contextmanager
def of_a_request() -> Iterator[None]:
    """Call a value out of range the request's fault, not the node's configuration's."""
    try:
        yield
    except ConfigError as error:
        raise InvalidInput(str(error.args[0]), field=error.field, remedy=error.remedy) from error


def sampling_from(request: Any) -> SamplingConfig:
    """Return the sampling of a request; zero, empty and absent fields mean the default.

    Raises:
        InvalidInput: a value is out of its range.
    """
    with of_a_request():
        return SamplingConfig(
            temperature=float(getattr(request, "temperature", 0.0)),
            top_k=int(getattr(request, "top_k", 0)),
            top_p=float(getattr(request, "top_p", 0.0)) or 1.0,
            seed=int(request.seed),
            law=str(getattr(request, "law", "")) or "rejection",
        )


def deadline_from(request: Any, default_s: float) -> float:
    """Return the seconds in which ``request`` is to be answered; 0 means ``default_s``.

    Raises:
        InvalidInput: it is out of range.
    """
    if not 0.0 <= request.deadline_s <= MAX_DEADLINE_S:
        raise InvalidInput(
            f"must be in 0..{MAX_DEADLINE_S:g} s",
            field="deadline_s",
            remedy="0 = the node's default",
        )
    return request.deadline_s or default_s


def images_from(request: Any) -> tuple[bytes, ...]:
    """Return the JPEG bytes of a request's ``images``. Raises InvalidInput: another format."""
    images = []
    for i, image in enumerate(request.images):
        if "jp" not in image.format.lower():
            raise InvalidInput(
                f"format {quoted(image.format)}",
                field=f"images[{i}]",
                remedy="send JPEG, format 'jpeg'",
            )
        images.append(bytes(image.data))
    return tuple(images)


def turns_from(request: Any) -> tuple[Turn, ...]:
    """Return the turns of a request. Raises InvalidInput: a role without content, or vice versa."""
    roles, contents = request.turn_roles, request.turn_contents
    if len(roles) != len(contents):
        raise InvalidInput(
            f"{len(roles)} roles, {len(contents)} contents",
            field="turn_roles",
            remedy="give one of each for every turn",
        )
    return tuple(Turn(role, content) for role, content in zip(roles, contents, strict=True))


def guide_in(request: Any) -> Guide | None:
    """Return the guide of a request, if it has one. Raises InvalidInput: none that can be used."""
    return Guide(request.guide_kind, request.guide_source) if request.guide_kind else None


def draft_to_msg(draft: Draft, header: Header, session_id: str) -> DraftMsg:
    """Return ``draft`` for its topic."""
    probs = draft.probs or ()
    return DraftMsg(
        header=header,
        session_id=session_id,
        round=draft.round,
        start=draft.start,
        tokens=array("i", draft.tokens),
        support_sizes=array("H", [len(q.ids) for q in probs]),
        support_ids=_concatenate("i", [q.ids for q in probs], np.int32),
        support_probs=_concatenate("f", [q.probs for q in probs], np.float32),
        cached=draft.cached,
        ahead=draft.after is not None,
        after=array("i", draft.after or ()),
        solo=draft.autoregressive_rounds,
    )


def draft_from_msg(msg: DraftMsg, sampling: SamplingConfig) -> Draft:
    """Return the draft in a message; by ``sampling`` an empty support means no distributions."""
    probs: tuple[SparseDistribution, ...] | None = None
    if sampling.sends_probabilities:
        ends = np.cumsum(msg.support_sizes, dtype=np.int64)
        if len(ends) and not ends[-1] == len(msg.support_ids) == len(msg.support_probs):
            raise InvalidInput("support_sizes do not add up", field="support_sizes")
        ids = np.split(np.asarray(msg.support_ids, np.int32), ends[:-1]) if len(ends) else []
        values = np.split(np.asarray(msg.support_probs, np.float32), ends[:-1]) if len(ends) else []
        probs = tuple(SparseDistribution(i, p) for i, p in zip(ids, values, strict=True))
    after = tuple(msg.after) if msg.ahead else None
    return Draft(msg.round, msg.start, tuple(msg.tokens), probs, msg.cached, after, msg.solo)


def exit_to_msg(exit_: EarlyExit, header: Header, session_id: str) -> EarlyExitMsg:
    """Return the exit for the topic ``early_exit``."""
    return EarlyExitMsg(
        header=header,
        session_id=session_id,
        round=exit_.round,
        layer=exit_.layer,
        tokens=array("i", exit_.tokens),
        accepted=exit_.accepted,
        finished=exit_.finished,
        confidence=exit_.confidence,
    )


def exit_from_msg(msg: EarlyExitMsg) -> EarlyExit:
    """Return the exit in a message."""
    return EarlyExit(
        msg.round, msg.layer, tuple(msg.tokens), msg.accepted, msg.finished, msg.confidence
    )


def verdict_to_msg(verdict: Verdict | Failure, header: Header, session_id: str) -> VerdictMsg:
    """Return the message for the topic ``verdict``; a failure ends the session there too."""
    msg = VerdictMsg(header=header, session_id=session_id)
    if isinstance(verdict, Failure):
        msg.status = status_of(verdict.error())
        return msg
    msg.round = verdict.round
    msg.tokens = array("i", verdict.tokens)
    msg.accepted = verdict.accepted
    msg.finished = verdict.finished
    msg.compute_s, msg.queue_s = verdict.compute_s, verdict.queue_s
    msg.draft_s = verdict.draft_s
    return msg


def verdict_from_msg(msg: VerdictMsg) -> Verdict | Failure:
    """Return the verdict, or the failure, in a message."""
    if msg.status.code != Status.OK:
        return Failure.of(error_from(msg.status))
    return Verdict(
        msg.round,
        tuple(msg.tokens),
        msg.accepted,
        msg.finished,
        msg.compute_s,
        msg.queue_s,
        msg.draft_s,
    )


def metrics_to_msg(metrics: GenerationMetrics) -> MetricsMsg:
    """Return the common counters, and the protocol's own figures by name."""
    figures = metrics.figures()
    # The arrays check the ranges; rclpy's C code would end the process for a value outside them.
    rounds, tokens = array("I", (metrics.rounds, metrics.tokens))
    bytes_up, bytes_down = array("Q", (metrics.bytes_up, metrics.bytes_down))
    return MetricsMsg(
        rounds=rounds,
        tokens=tokens,
        time_to_first_token_s=float(metrics.time_to_first_token_s),
        total_s=float(metrics.total_s),
        bytes_up=bytes_up,
        bytes_down=bytes_down,
        names=[str(name) for name in figures],
        values=array("d", figures.values()),
    )


def figures_from(msg: MetricsMsg) -> dict[str, float]:
    """Return the figures that only the protocol knows, by name."""
    return dict(zip(msg.names, msg.values, strict=False))


def _concatenate(code: str, parts: list[np.ndarray], dtype: type) -> array:  # type: ignore[type-arg]
    out = array(code)
    if parts:
        out.frombytes(np.concatenate(parts).astype(dtype).tobytes())
    return out
