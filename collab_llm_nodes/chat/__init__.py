"""Chat models behind one interface: in process, or any OpenAI-compatible server."""
