"""Play what a site does to polluxd: limits, reservations, preemption.

`python -m contrib.sites` brings up a private cluster with slurmdbd, accounts, QOSes, partitions, typed GPUs, features
and licenses, and writes sites-out/sites.json.
"""
