"""The demo: rooms driven through the whole graph, a table, a film and figures."""
