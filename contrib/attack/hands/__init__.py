"""Programs that the users of the attack suite run, attackers and victims.

Each runs in a process of its own, as the unix user, and imports nothing of the suite.
"""
