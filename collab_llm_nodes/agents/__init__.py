"""The robot as tools of agent frameworks, by the Model Context Protocol (docs/agents.md)."""
