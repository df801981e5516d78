"""Settings of the link to a verifier: ours, or a stock server in its place."""

from __future__ import annotations

from dataclasses import dataclass

from collab_llm_nodes.config import setting
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.protocols.edge_cloud.verifier_client import ClientLinkConfig
from collab_llm_nodes.transport.http import check_url

OURS = "verifier"
KINDS = (OURS, "vllm", "sglang")


@dataclass(frozen=True)
class TargetLinkConfig(ClientLinkConfig):
    """Address of the verifier, or of a stock server, TLS and time limits. Files are PEM files."""

    kind: str = setting(
        OURS,
        "What verifies drafts. verifier: collab-llm verifier at address; vllm or sglang: a stock"
        " server at url, without early exits.",
        choices=KINDS,
        read_only=True,
    )
    url: str = setting(
        "", "URL of a stock server, such as https://host:8000, with or without /v1.", read_only=True
    )
    model: str = setting("", "Name of the model, as the stock server knows it.", read_only=True)
    tokenizer: str = setting(
        "",
        "The stock server's model, by folder, hub id or shipped name: its tokenizer and template"
        " are compared with the server's. No weights are read.",
        read_only=True,
    )
    unencrypted: bool = setting(
        False,
        "Allow http:// to other machines, which exposes prompts, pictures and key on the network.",
        read_only=True,
    )
    method: str = setting(
        "auto",
        "Requests of a round at vLLM. probes: one token after each draft token, which uses the"
        " server's prefix cache; one_request: all at once, which reads the whole prompt again;"
        " auto: what costs less, by time and seconds_per_megabyte.",
        choices=("auto", "probes", "one_request"),
        read_only=True,
    )
    seconds_per_megabyte: float = setting(
        0.0,
        "Price of a megabyte on the link, for method: auto; as planner.seconds_per_megabyte [s].",
        low=0.0,
        high=1e6,
        read_only=True,
    )
    score_ahead: int = setting(
        2,
        "Drafts for later rounds that a stock server scores at a time, before it is known whether"
        " they are needed. Each costs the server a round. 0: none, a round trip more for each.",
        low=0,
        high=64,
        read_only=True,
    )
    parallel: int = setting(
        32, "Concurrent requests to a stock server.", low=1, high=1024, read_only=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind == OURS:
            return
        for name in ("url", "model", "tokenizer"):
            if not getattr(self, name):
                raise ConfigError(
                    f"a server of kind {self.kind} needs one", field=name, remedy=f"set {name}"
                )
        if self.tls_cert:
            raise ConfigError(
                "a stock server is given no client certificate",
                field="tls_cert",
                remedy="use token_file, or a proxy on this machine that has the certificate",
            )
        check_url(
            self.url,
            unencrypted=self.unencrypted,
            tls_ca=self.tls_ca,
            example="https://host:8000",
        )

    @property
    def base_url(self) -> str:
        """``url`` without ``/v1``: some paths of stock servers are beside it."""
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def server(self) -> str:
        """The address of the verifier, or the URL of a stock server."""
        return self.address if self.kind == OURS else self.url
