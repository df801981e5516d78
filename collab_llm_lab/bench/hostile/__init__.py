"""Honest clients beside attackers of a verifier, of DRAGON's cloud and of Jupiter's stage workers.

``collab-llm bench verifier --hostile``, ``bench dragon-hostile`` and ``bench jupiter-hostile`` run
it. ``table.py`` holds a row for each attack and the goals, ``messages.py`` the messages of the rows
and ``attacks.py`` their senders; ``attacker.py`` is the process that runs one attack. ``robots.py``
holds the honest clients and ``<kind>_server.py`` the server under attack. ``report.py`` starts a
server for each attack and judges.
"""
