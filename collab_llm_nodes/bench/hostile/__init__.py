"""``collab-llm bench verifier --hostile``: what beside attackers becomes of honest clients.

``attacks.py`` lists the attacks, one coroutine each; ``attacker.py`` is the process that runs one;
``robots.py`` holds the honest clients; ``report.py`` starts a verifier for each attack and judges.
"""
