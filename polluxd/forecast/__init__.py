"""When jobs start and end: the policy runs ahead from a decision's snapshot, again and again, with drawn unknowns.

    history (lengths, arrivals) -> ahead (one course of the cluster) -> intervals (quantiles, widened by past misses)

Nothing in polluxd's core knows this room. Its process (`service`) reads the database and writes forecasts to it.
"""
