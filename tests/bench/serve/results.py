"""Results as a run would leave them, with round numbers."""

from typing import Any

import msgspec

from kvferry.bench.serve.result import (
    SCHEMA,
    Answer,
    Described,
    Load,
    LoadRun,
    Machine,
    Mean,
    Model,
    Outcome,
    Prompts,
    Result,
    Stall,
    Turn,
    Watched,
)
from kvferry.bench.serve.statistics import summary

LOAD = Load(None, 2)


def answer(number: int = 0, ttft_s: float = 0.1, itl_s: tuple[float, ...] = (0.01, 0.03), **more: Any) -> Answer:
    """One that begins when the load does."""
    given = {"start_s": 0.0, "prompt_tokens": 10, "output_tokens": 1 + len(itl_s), "digest": f"text {number}"}
    return Answer(number=number, ttft_s=ttft_s, itl_s=itl_s, latency_s=ttft_s + sum(itl_s), **{**given, **more})


def load_run(*answers: Answer, load: Load = LOAD, moved: int | None = None, **more: Any) -> LoadRun:
    given: dict[str, Any] = {
        "cpu_s": {"client": 0.5, "decode": 1.0, "decode EngineCore": 2.0},
        "legs": {"decode: queue": Mean(len(answers), 0.002)},
        "load_average": 1.0,
        "complete": True,
        **more,
    }
    return LoadRun(load, 1.0, answers, summary(answers, 1.0, (99.0,), {}), moved_tokens=moved, **given)


def turn(contender: str, round_: int, *loads: LoadRun, **more: Any) -> Turn:
    given = {"outcome": Outcome.MEASURED, "idle_cpu": {"client": 0.1, "decode": 0.02, "decode EngineCore": 0.03}}
    return Turn(contender, round_, 0.0, loads=list(loads), **{**given, **more})


def result(*turns: Turn, **changed: Any) -> Result:
    names = dict.fromkeys(one.contender for one in turns)
    whole = Result(
        schema=SCHEMA,
        command="kvferry bench serve",
        made="2026-01-01T00:00:00+00:00",
        complete=True,
        interleaving="2 rounds",
        model=Model("tiny", "abc", "float32", 1024),
        prefill="tp=1,pp=1,dp=1",
        decode="tp=1,pp=1,dp=1",
        prompts=Prompts(2, 10, 3, 0, 1.0, 7),
        loads=(LOAD,),
        stall=Stall(6000, 1.0, 1),
        goodput_ms={},
        rounds=2,
        machine=Machine(2, "a processor", 1 << 34, 0, 0.5, 0.75),
        versions={"kvferry": "0"},
        contenders=tuple(Described(name, "direct", "a <note>") for name in names),
        turns=turns,
    )
    return msgspec.structs.replace(whole, **changed)


def watched(quiet_s: float, busy_s: float) -> Watched:
    return Watched((quiet_s,) * 10, (busy_s,) * 10, (0.5, 0.7), 0, (quiet_s,) * 8)
