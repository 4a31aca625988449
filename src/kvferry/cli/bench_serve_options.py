"""The options of ``kvferry bench serve``; their defaults are in its signature."""

from pathlib import Path
from typing import Annotated

import typer

from kvferry.bench.serve.contenders import KNOWN, USUAL
from kvferry.bench.serve.question import DTYPES
from kvferry.cluster.manifest import Router as Front

Contender = Annotated[
    list[str] | None,
    typer.Option(
        help=f"Who is measured, in this order; may be repeated. Known: {', '.join(KNOWN)}; NAME=FILE describes "
        f"another one. Without any: {', '.join(USUAL)}."
    ),
]
Python = Annotated[
    list[str] | None, typer.Option(help="NAME=INTERPRETER: the Python environment of a contender's engines.")
]
Model = Annotated[
    Path | None, typer.Option(help="Model directory; a tiny random model where not given.", show_default=False)
]
Prefill = Annotated[str, typer.Option(help="Layout of prefill engines, and of a first plain one of two.")]
Decode = Annotated[str, typer.Option(help="Layout of decode engines, and of plain ones.")]
NumPrompts = Annotated[int, typer.Option(help="Requests under each load.")]
RandomInputLen = Annotated[int, typer.Option(help="Tokens of each prompt.")]
RandomOutputLen = Annotated[int, typer.Option(help="Tokens of each answer.")]
RandomPrefixLen = Annotated[int, typer.Option(help="Tokens that all prompts begin with, beside their own.")]
RequestRate = Annotated[
    list[float] | None,
    typer.Option(help="Requests per second, as a Poisson process; inf (without any): at once. May be repeated."),
]
MaxConcurrency = Annotated[
    list[int] | None, typer.Option(help="Most requests at a time. May be repeated: each with each rate.")
]
Burstiness = Annotated[float, typer.Option(help="Below 1 arrivals are burstier than a Poisson process.")]
Goodput = Annotated[
    list[str] | None, typer.Option(help="KEY:MILLISECONDS that a good request keeps; KEY is ttft, tpot or e2el.")
]
PercentileMetrics = Annotated[str, typer.Option(help="What to show, separated by commas.")]
MetricPercentiles = Annotated[str, typer.Option(help="Percentiles, separated by commas.")]
Seed = Annotated[int | None, typer.Option(help="Of prompts and arrivals; drawn and printed without.")]
NumWarmups = Annotated[int, typer.Option(help="Requests before anything is measured.")]
MaxNumSeqs = Annotated[int, typer.Option(help="Requests that an engine runs at once.")]
Dtype = Annotated[str, typer.Option(help=f"Of the engines: {', '.join(DTYPES)}.")]
Rounds = Annotated[int, typer.Option(help="How often every contender has its turn.")]
Pin = Annotated[bool, typer.Option("--pin", help="Give each engine an equal share of the cores to itself.")]
Router = Annotated[Front, typer.Option(help="What is in front of KVFerry's engines; others always have vllm-router.")]
Stall = Annotated[bool, typer.Option("--stall", help="Also watch a running request while long prompts arrive.")]
StallInputLen = Annotated[int, typer.Option(help="Tokens of such a prompt.")]
StallSeconds = Annotated[float, typer.Option(help="Of watching, each of quiet and not.")]
StallTurns = Annotated[int, typer.Option(help="How often, quiet and not in turn.")]
Idle = Annotated[float, typer.Option(help="Seconds for which engines are watched doing nothing.")]
Deadline = Annotated[float, typer.Option(help="Seconds that engines may take to start.")]
Json = Annotated[Path | None, typer.Option(help="Write the result there.", show_default=False)]
Html = Annotated[Path | None, typer.Option(help="Write the report there.", show_default=False)]
Logs = Annotated[Path | None, typer.Option(help="Directory for what processes say.", show_default=False)]
