"""The stages a server uses: of a stored plan, planned for the workers present, or equal ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from collab_llm_nodes.errors import ConfigError, ModelError
from collab_llm_nodes.protocols.jupiter.estimate import Estimate
from collab_llm_nodes.protocols.jupiter.gantt import Rows, planned_rows
from collab_llm_nodes.protocols.jupiter.lane import undivided
from collab_llm_nodes.protocols.jupiter.messages import WorkerInfo
from collab_llm_nodes.protocols.jupiter.partition import Placement
from collab_llm_nodes.protocols.jupiter.pipeline import equal_parts
from collab_llm_nodes.protocols.jupiter.planner import (
    COARSE_CUTS,
    JupiterPlan,
    PlannerConfig,
    split,
    stages_for,
)
from collab_llm_nodes.protocols.jupiter.profile import ModelFacts, Profile, least_length

_MEMORISED = 256  # divisions of prompts


class Arrangement:
    """Assigns layers to workers, and divides prompts into sub-sequences.

    Args:
        device_names: names of devices in profile and plan, by the workers' addresses.
        facts: of the model.
        config: the requests to plan for.
        profile: of the devices; without one all workers get equally many layers.
        stored: a plan to use while all its devices are present.

    Raises:
        ConfigError: a device is missing in the profile or the plan, or the plan has fewer lanes.
        ModelError: profile or plan are of another model.
    """

    def __init__(
        self,
        device_names: Mapping[str, str],
        facts: ModelFacts,
        config: PlannerConfig,
        profile: Profile | None = None,
        stored: JupiterPlan | None = None,
    ) -> None:
        self.profile = profile
        self.stored = stored
        self.config = config
        self._device_names = dict(device_names)
        self._context, self._first_layers = facts.context, facts.first_layers
        self._placements: tuple[Placement, ...] = ()
        if profile is not None:
            profile.check_model(facts)
            for device in self._device_names.values():
                profile.device(device)
        if stored is not None:
            self._check_stored(stored, facts)
        self._divide = lru_cache(_MEMORISED)(self._parts_of)

    def stages(self, addresses: Sequence[str], info: WorkerInfo) -> Sequence[Placement]:
        """Return the stages on these workers, as a :data:`pipeline.Plan` does.

        Raises:
            ModelError: the model does not fit into their memory.
        """
        address_of = {self._device_names[address]: address for address in addresses}
        if self.stored is not None and all(
            part.device in address_of for part in self.stored.placements
        ):
            chosen = self.stored.placements
        elif self.profile is not None:
            chosen = stages_for(self.profile, self.config, list(address_of))
        else:
            self._placements = ()
            return equal_parts(addresses, info, self._first_layers)
        self._placements = chosen
        return [Placement(address_of[part.device], part.first, part.last) for part in chosen]

    def timeline(self) -> Rows:
        """Return the predicted prefill of the typical prompt; empty without a profile."""
        placements = self._placements
        if self.profile is None or not placements:
            return []
        tokens = min(self.config.prompt_tokens, self._context)
        sent = self.profile.sending(self.config.states)
        return planned_rows(sent, placements, self.lengths(tokens))

    def lengths(self, tokens: int) -> Sequence[int]:
        """Return the sub-sequences of a prompt for the stages in use."""
        placements = self._placements
        stored = self.stored
        if stored is not None and placements == stored.placements and tokens <= stored.context:
            return stored.lengths(tokens)
        if self.profile is None or len(placements) < 2:
            return undivided(tokens)
        return self._divide(placements, tokens)

    def _parts_of(self, placements: tuple[Placement, ...], tokens: int) -> Sequence[int]:
        """Return the sub-sequences with the shortest predicted time, cut on a coarse grid."""
        assert self.profile is not None
        devices = [self.profile.device(part.device) for part in placements]
        least = least_length(devices, self.config.utilisation)
        if tokens < 2 * least:
            return undivided(tokens)
        step = max(1, tokens // COARSE_CUTS)
        most = self.config.parts_per_device * len(devices)
        rest = tokens % step
        sent = self.profile.sending(self.config.states)
        *parts, last = split(Estimate(sent, placements), tokens - rest, most, least, step).lengths
        return (*parts, last + rest)

    def _check_stored(self, stored: JupiterPlan, facts: ModelFacts) -> None:
        if stored.fingerprint != facts.fingerprint:
            raise ModelError(
                f"the plan is of model {stored.fingerprint[:12]}, this is {facts.fingerprint[:12]}",
                field="planning.plan",
                remedy="plan again",
            )
        names = set(self._device_names.values())
        strange = [part.device for part in stored.placements if part.device not in names]
        if strange:
            raise ConfigError(
                f"the plan has stages on {', '.join(strange)}, there are"
                f" {', '.join(sorted(names))}",
                field="planning.plan",
                remedy="name the workers' devices in planning.devices, or plan again",
            )
        if stored.config.lanes < self.config.lanes:
            raise ConfigError(
                f"the plan keeps memory for {stored.config.lanes} lanes, the pipeline has"
                f" {self.config.lanes}",
                field="planning.plan",
                remedy=f"plan with --lanes {self.config.lanes}, or lower pipeline.lanes",
            )
