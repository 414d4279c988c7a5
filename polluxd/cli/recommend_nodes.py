"""`polluxctl recommend-nodes`: how many nodes the jobs would use well, or are worth their price."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from polluxd.errors import ConfigError, PolluxError
from polluxd.model import Snapshot
from polluxd.model.snapshot_json import decode_snapshot
from polluxd.policy.cloud.powered_down import rented
from polluxd.policy.cloud.prices import hourly, price_of
from polluxd.sim.policies.autoscale import desired_nodes

from . import access
from .access import ConfigOption, JsonOption
from .output import count, emit_json, of_few_jobs


def recommend_nodes(
    config: ConfigOption = None,
    least: Annotated[int, typer.Option(metavar="NODES", help="never fewer")] = 0,
    most: Annotated[
        int | None, typer.Option(metavar="NODES", help="never more; default: twice the present nodes")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show how many nodes the jobs would use well.

    UTILITY is the sum of the jobs' speedups against one GPU, over the number of GPUs.
    Where nodes have prices: which of them are worth their price. Nothing is started or stopped.
    """
    newest = access.open_store(config)[0].newest_snapshot()
    if newest is None:
        raise PolluxError("no snapshot is stored yet: polluxd stores one with each decision")
    cycle, data = newest
    snapshot = decode_snapshot(data)
    if snapshot.settings.cloud_prices:
        _by_price(cycle, snapshot, as_json)
        return
    present = sum(n.gpus > 0 for n in snapshot.nodes)
    try:
        desired = desired_nodes(snapshot, least=least, most=max(2 * present, least) if most is None else most)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if as_json:
        emit_json(
            {
                "cycle": cycle,
                "jobs": len(snapshot.jobs),
                "nodes": present,
                "desired": desired.nodes,
                "utility": desired.utility,
                "expected": desired.expected,
                "reason": desired.reason,
                "tried": [{"nodes": nodes, "utility": found} for nodes, found in desired.tried],
            }
        )
        return
    change = desired.nodes - present
    step = f"{abs(change)} {'more' if change > 0 else 'fewer'}" if change else "as now"
    typer.echo(
        f"On the jobs and nodes of cycle {cycle}, {count(present, 'node')} with GPUs: {desired.reason}."
    )
    typer.echo(f"Desired: {count(desired.nodes, 'node')} ({step}), expected utility {desired.expected:.2f}.")
    if few := of_few_jobs(len(snapshot.jobs)):
        typer.echo(few)
    for nodes, found in desired.tried:
        typer.echo(f"  {count(nodes, 'node'):<12} utility {found:.2f}")


def _by_price(cycle: int, snapshot: Snapshot, as_json: bool) -> None:
    """Show the rented nodes that jobs may use now, by the rule of the daemon."""
    chosen = rented(snapshot)
    kinds = {node.name: price_of(node, snapshot.settings)[0] for node in snapshot.nodes}
    rows: list[dict[str, Any]] = [
        {
            "type": name,
            "price": price,
            "nodes": sum(kind == name for kind in kinds.values()),
            "desired": sum(kinds[node] == name for node in chosen.nodes),
        }
        for name, price in sorted(snapshot.settings.cloud_prices.items())
    ]
    cost = hourly(snapshot, chosen.plan)
    if as_json:
        emit_json({"cycle": cycle, "rented": rows, "cost_per_hour": cost})
        return
    typer.echo(f"On the jobs and nodes of cycle {cycle}, by the prices of the settings:")
    for row in rows:
        typer.echo(
            f"  {row['type']}: {row['desired']} of {count(row['nodes'], 'node')}, {row['price']:g} an hour each"
        )
    typer.echo(f"Cost: {cost:.2f} an hour.")
