"""``collab-llm bench collective``: collective adaptive speculation (paper 002), step by step."""
