"""Writes kvferry.json, the Grafana dashboard: `python dashboards/make.py`. Panels are added here, not there."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("kvferry.json")
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS, WIDTH, HEIGHT = 3, 8, 8
ENGINE = 'instance=~"$instance"'
INTERVAL = "$__rate_interval"


@dataclass(frozen=True)
class Panel:
    """A graph: `queries` are PromQL by legend."""

    title: str
    text: str
    unit: str
    queries: dict[str, str]


def rate(counter: str, by: str = "", where: str = ENGINE) -> str:
    """Per second, of a counter or of a histogram's `_sum` or `_count`."""
    group = f" by ({by})" if by else ""
    return f"sum{group} (rate({counter}{{{where}}}[{INTERVAL}]))"


def quantile(share: float, histogram: str, by: str = "", where: str = ENGINE) -> str:
    return f"histogram_quantile({share}, {rate(f'{histogram}_bucket', f'le, {by}' if by else 'le', where)})"


def quantiles(histogram: str, where: str = ENGINE) -> dict[str, str]:
    return {f"p{share}": quantile(share / 100, histogram, where=where) for share in (50, 90, 99)}


def now(gauge: str, by: str = "instance", where: str = ENGINE) -> str:
    return f"sum by ({by}) ({gauge}{{{where}}})"


ROWS: dict[str, list[Panel]] = {
    "Clients": [
        Panel(
            "Requests by status",
            "Answered by the gateway.",
            "reqps",
            {"{{status}}": rate("kvferry_gateway_requests_total", "status", "")},
        ),
        Panel(
            "Time to the first byte",
            "From a request's arrival at the gateway to its answer's first byte, both legs included.",
            "s",
            quantiles("kvferry_gateway_first_byte_seconds", ""),
        ),
        Panel(
            "Time of a whole request",
            "From a request's arrival at the gateway to its answer's end.",
            "s",
            quantiles("kvferry_gateway_request_seconds", ""),
        ),
        Panel(
            "What did not go straight",
            "Legs sent again, streams that broke, clients that left, and prompts that decode prefilled itself.",
            "reqps",
            {
                "retried {{leg}}": rate("kvferry_gateway_retries_total", "leg", ""),
                "broken streams": rate("kvferry_gateway_broken_streams_total", where=""),
                "clients gone": rate("kvferry_gateway_clients_gone_total", where=""),
                "plain decode: {{reason}}": rate("kvferry_gateway_plain_decodes_total", "reason", ""),
            },
        ),
        Panel(
            "Outstanding requests",
            "Under way at each instance, as the gateway counts them.",
            "short",
            # Prometheus renames a label of this name, because it gives every series its own.
            {
                "{{role}} {{exported_instance}}": now(
                    "kvferry_gateway_outstanding_requests", "role, exported_instance", ""
                )
            },
        ),
        Panel(
            "Ranks that are given work",
            "Fewer than there are: some are unreachable or drained.",
            "short",
            {"{{role}}": now("kvferry_gateway_usable", "role", "")},
        ),
    ],
    "Transfers": [
        Panel(
            "Bytes read",
            "By each decode instance, from all prefill instances.",
            "Bps",
            {"{{instance}}": rate("vllm:nixl_bytes_transferred_sum", "instance")},
        ),
        Panel(
            "Loads",
            "Of each worker. A failed one was not vouched for, or never read.",
            "ops",
            {
                "held": rate("vllm:nixl_xfer_time_seconds_count"),
                "failed": rate("vllm:nixl_num_failed_transfers_total"),
                "overdue reads": rate("kvferry:num_overdue_reads_total"),
                "drafter's layers left out": rate("kvferry:layers_left_out_total"),
            },
        ),
        Panel(
            "Time of a load",
            "From a worker's order to the producer's word that what was read was still held.",
            "s",
            quantiles("vllm:nixl_xfer_time_seconds"),
        ),
        Panel(
            "Phases of a load, p90",
            "claim: until the producer granted it. connect: until there was a connection. read: until every read had "
            "ended. ack: until the producer's word.",
            "s",
            {"{{phase}}": quantile(0.9, "kvferry:phase_seconds", "phase")},
        ),
        Panel(
            "First contact",
            "From a worker's first word to a prefill instance that it does not know to its connection.",
            "s",
            quantiles("kvferry:first_contact_seconds"),
        ),
        Panel(
            "Descriptors of a load",
            "Their number decides what posting a load costs.",
            "short",
            {
                "mean": f"{rate('vllm:nixl_num_descriptors_sum')} / {rate('vllm:nixl_num_descriptors_count')}",
                "p90": quantile(0.9, "vllm:nixl_num_descriptors"),
            },
        ),
    ],
    "Claims and leases": [
        Panel(
            "Claims",
            "By what the producer answered.",
            "ops",
            {"{{outcome}}": rate("kvferry:claims_total", "outcome")},
        ),
        Panel(
            "Prefilled by decode",
            "Requests that were offered a KV cache and compute it themselves, by why. Ought to be nothing.",
            "ops",
            {"{{reason}}": rate("kvferry:recomputed_total", "reason")},
        ),
        Panel(
            "Answered that it is gone",
            "Messages about what a prefill instance does not hold (any more).",
            "ops",
            {"{{message}}": rate("kvferry:gone_total", "message")},
        ),
        Panel(
            "Blocks held",
            "KV cache blocks of finished prefills that decode has not fetched yet.",
            "short",
            {"{{instance}}": now("kvferry:held_blocks")},
        ),
        Panel(
            "Left of leases",
            "When decode had fetched a prompt. Near zero: kv_lease_duration is too short.",
            "s",
            {f"p{share}": quantile(share / 100, "kvferry:lease_left_seconds") for share in (1, 10, 50)},
        ),
        Panel(
            "Leases that ran out",
            "Prefills that nobody fetched: the client left, decode was down, or the lease is too short.",
            "ops",
            {"{{instance}}": rate("vllm:nixl_num_kv_expired_reqs_total", "instance")},
        ),
    ],
    "Engines": [
        Panel(
            "Requests",
            "In each instance. Those that wait include those whose KV cache is on its way.",
            "short",
            {
                "running {{instance}}": now("vllm:num_requests_running"),
                "waiting {{instance}}": now("vllm:num_requests_waiting"),
            },
        ),
        Panel(
            "KV cache in use",
            "Of each engine core.",
            "percentunit",
            {"{{instance}} {{engine}}": f"vllm:kv_cache_usage_perc{{{ENGINE}}}"},
        ),
        Panel(
            "Time to the first token",
            "Of each instance alone: of prefill its one token, of decode the load included.",
            "s",
            {"p90 {{instance}}": quantile(0.9, "vllm:time_to_first_token_seconds", "instance")},
        ),
        Panel(
            "Time between tokens",
            "What a load must not disturb.",
            "s",
            {"p99 {{instance}}": quantile(0.99, "vllm:inter_token_latency_seconds", "instance")},
        ),
        Panel(
            "Prompt tokens not computed",
            "From the instance's own prefix cache, and through the connector.",
            "short",
            {
                "local {{instance}}": rate("vllm:prefix_cache_hits_total", "instance"),
                "external {{instance}}": rate("vllm:external_prefix_cache_hits_total", "instance"),
            },
        ),
        Panel(
            "Preemptions",
            "The KV cache is too small for what the instance is given.",
            "ops",
            {"{{instance}}": rate("vllm:num_preemptions_total", "instance")},
        ),
    ],
}


def dashboard() -> dict[str, Any]:
    return {
        "uid": "kvferry",
        "title": "KVFerry",
        "description": "A disaggregated vLLM: the gateway, the transfers between prefill and decode, and the engines.",
        "tags": ["vllm", "kvferry"],
        "schemaVersion": 38,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_datasource(), _instances()]},
        "panels": list(_panels()),
    }


def _datasource() -> dict[str, Any]:
    """Chosen by whoever imports, so that the file names no data source of anybody's."""
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _instances() -> dict[str, Any]:
    return {
        "name": "instance",
        "label": "Engine",
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": "label_values(vllm:kv_cache_usage_perc, instance)", "refId": "instance"},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _panels() -> Any:
    number, top = 0, 0
    for title, panels in ROWS.items():
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "gridPos": {"x": 0, "y": top, "w": 24, "h": 1},
            "panels": [],
        }
        for index, panel in enumerate(panels):
            number += 1
            row, column = divmod(index, COLUMNS)
            place = {"x": column * WIDTH, "y": top + 1 + row * HEIGHT, "w": WIDTH, "h": HEIGHT}
            yield _graph(panel, number, place)
        top += 1 + -(-len(panels) // COLUMNS) * HEIGHT


def _graph(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": DATASOURCE, "expr": query, "legendFormat": legend}
            for index, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def text() -> str:
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
