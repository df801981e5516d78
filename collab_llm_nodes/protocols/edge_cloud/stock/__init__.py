"""Stock servers (vLLM, SGLang) in the verifier's place: docs/stock-servers.md."""
