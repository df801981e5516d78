"""Metrics of one answer of DRAGON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from collab_llm_nodes.metrics import GenerationMetrics


@dataclass
class DragonMetrics(GenerationMetrics):
    """Cost of an answer of two sides; ``rounds`` are aggregations.

    Attributes:
        accepted_device, accepted_cloud: drafts that became the target token.
        discarded: the device's drafts that a rejection made void.
        ended_passes: the device's passes whose result was void.
        handovers: times the aggregator changed sides.
        reconnects: times the stream to the cloud was opened again.
        device_documents: pieces that were found on the device; 0: its side had no say.
        cloud_documents: pieces in the cloud's store; 0: its side had no say, or it never took part.
    """

    accepted_device: int = 0
    accepted_cloud: int = 0
    discarded: int = 0
    ended_passes: int = 0
    handovers: int = 0
    reconnects: int = 0
    device_documents: int = 0
    cloud_documents: int = 0

    def figures(self) -> Mapping[str, float]:
        judged = max(1, self.rounds)
        return {
            "acceptance_device": self.accepted_device / judged,
            "acceptance_cloud": self.accepted_cloud / judged,
            "discarded_tokens": self.discarded,
            "ended_passes": self.ended_passes,
            "handovers": self.handovers,
            "reconnects": self.reconnects,
            "device_documents": self.device_documents,
            "cloud_documents": self.cloud_documents,
        }
