"""Loading models, prompts and early-exit adapters."""
