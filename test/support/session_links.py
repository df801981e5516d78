"""A session as the tests of its link and its machines open it."""

from __future__ import annotations

from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.protocols.edge_cloud.link import LinkConfig
from collab_llm_nodes.protocols.edge_cloud.messages import Draft, Open, Verdict

GREEDY = SamplingConfig()
PROMPT = Prompt("go to the red box")
OPEN = Open(PROMPT.text, (), GREEDY, 24, "")
PATIENT = LinkConfig(verdict_deadline_s=600)
DRAFT = Draft(0, 0, (5, 6, 7, 8))
VERDICT = Verdict(0, (5, 6, 9), 2, False, 0.01)
