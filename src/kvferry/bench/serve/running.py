"""The run: in each round every contender in turn, its engines alone on the machine."""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from kvferry.bench import machine
from kvferry.bench.serve import meters, workload
from kvferry.bench.serve.arrival import offsets
from kvferry.bench.serve.client import Target, drive
from kvferry.bench.serve.contenders import Contender
from kvferry.bench.serve.question import STALL_ANSWER_TOKENS, Question
from kvferry.bench.serve.result import Answer, Load, LoadRun, Outcome, Turn
from kvferry.bench.serve.stage import MissingError, Stage
from kvferry.bench.serve.stalling import stalls
from kvferry.bench.serve.statistics import summary
from kvferry.cluster.supervisor import Supervisor
from kvferry.errors import DispatchError, KVFerryError

STALL_RUNNING_TOKENS = 64
WATCHED_ITSELF = "the watched request failed"


class Progress(Protocol):
    """Told what goes on."""

    def turn(self, turn: Turn) -> None:
        """A turn begins."""

    def ended(self, turn: Turn) -> None:
        """It has ended, well or not."""

    def say(self, what: str) -> None:
        """What the turn is doing now."""

    def answered(self, done: int, total: int) -> None:
        """Requests of the load under way."""


class Run:
    """Measures; ``turns`` grows meanwhile, and holds what there is when the run is broken off.

    Args:
        logs: directory for what processes say.
    """

    def __init__(self, question: Question, logs: Path, progress: Progress) -> None:
        self.turns: list[Turn] = []
        self.complete = False
        self._question, self._logs, self._progress = question, logs, progress
        self._began = time.monotonic()

    def go(self) -> None:
        """All rounds. A contender that could not run is left out of the following ones.

        Raises:
            KeyboardInterrupt, SystemExit: somebody wants the end; all processes have ended.
        """
        left_out: set[str] = set()
        for round_ in range(self._question.rounds):
            for name, contender in self._question.contenders.items():
                if name not in left_out:
                    turn = self._turn(name, contender, round_)
                    if turn.outcome is not Outcome.MEASURED:
                        left_out.add(name)
        self.complete = True

    def _turn(self, name: str, contender: Contender, round_: int) -> Turn:
        turn = Turn(name, round_, time.monotonic() - self._began)
        self.turns.append(turn)
        self._progress.turn(turn)
        try:
            with tempfile.TemporaryDirectory(prefix="kvferry-serve-") as directory:
                logs = self._logs / f"{name}-{round_}"
                with Supervisor(logs) as supervisor:
                    self._measure(turn, Stage(self._question, contender, supervisor, Path(directory)), supervisor)
            turn.outcome = Outcome.MEASURED
        except MissingError as error:
            turn.outcome, turn.reason = Outcome.NOT_INSTALLED, str(error)
        except (KVFerryError, TimeoutError) as error:
            turn.outcome, turn.reason = Outcome.FAILED, str(error) or type(error).__name__
        except (KeyboardInterrupt, SystemExit):
            turn.outcome, turn.reason = Outcome.INTERRUPTED, "interrupted"
            raise
        finally:
            self._progress.ended(turn)
        return turn

    def _measure(self, turn: Turn, stage: Stage, supervisor: Supervisor) -> None:
        begin = time.monotonic()
        target = stage.start(self._progress.say)
        turn.started_s = time.monotonic() - begin
        self._warm_up(target)
        if self._question.idle_s:
            self._progress.say(f"watching it do nothing for {self._question.idle_s:g} s")
            turn.idle_cpu = _idle(supervisor, self._question.idle_s)
        for number, load in enumerate(self._question.loads):
            self._load(turn, stage, supervisor, target, load, number)
        if self._question.stall is not None:
            self._stall(turn, target)
        supervisor.require_running(stage.engines)

    def _warm_up(self, target: Target) -> None:
        """Some functions are compiled at the first request that needs them. Raises ``DispatchError``."""
        asked = self._question
        self._progress.say("warming up")
        some = msgspec.structs.replace(asked.prompts, count=asked.warmups)
        answers: list[Answer] = []
        prompts = workload.prompts(some, asked.vocabulary, workload.WARMUP)
        asyncio.run(drive(target, prompts, asked.prompts.output_len, [0.0] * len(prompts), 1, answers.append))
        if failed := [answer.error for answer in answers if answer.error]:
            raise DispatchError(f"it does not answer: {failed[0]}")

    def _load(self, turn: Turn, stage: Stage, supervisor: Supervisor, target: Target, load: Load, number: int) -> None:
        asked = self._question
        prompts = workload.prompts(asked.prompts, asked.vocabulary, turn.round, number)
        at = offsets(len(prompts), load.rate, asked.prompts.burstiness, asked.prompts.seed + turn.round)
        answers: list[Answer] = []

        def answered(answer: Answer) -> None:
            answers.append(answer)
            self._progress.answered(len(answers), len(prompts))

        self._progress.say(load.label)
        said, cpu = meters.read(stage.exporters), meters.cpu_seconds(supervisor)
        try:
            asyncio.run(drive(target, prompts, asked.prompts.output_len, at, load.concurrency, answered))
        finally:
            if answers:
                spent = meters.grown(cpu, meters.cpu_seconds(supervisor))
                legs, moved = meters.between(said, meters.read(stage.exporters))
                turn.loads.append(
                    LoadRun(
                        load=load,
                        duration_s=(duration := _duration(answers)),
                        answers=tuple(sorted(answers, key=lambda answer: answer.number)),
                        summary=summary(answers, duration, asked.percentiles, asked.goodput_ms or {}),
                        cpu_s=spent,
                        legs=legs,
                        moved_tokens=None if stage.contender.front.plain else moved,
                        load_average=machine.load(),
                        complete=len(answers) == len(prompts),
                    )
                )

    def _stall(self, turn: Turn, target: Target) -> None:
        asked, stall = self._question, self._question.stall
        assert stall is not None
        seed, vocabulary = asked.prompts.seed, asked.vocabulary
        running = workload.tokens(STALL_RUNNING_TOKENS, vocabulary, seed, workload.STALL_STREAM)
        pulled = workload.tokens(stall.input_len, vocabulary, seed, workload.STALL_PULLED)

        async def watch() -> None:
            first: list[Answer] = []
            self._progress.say("computing the long prompt")
            await drive(target, [pulled], 1, [0.0], None, first.append)  # so that prefill has it in its cache
            if first[0].error:
                raise DispatchError(f"the long prompt: {first[0].error}")
            async for watched in stalls(target, running, pulled, stall, STALL_ANSWER_TOKENS):
                turn.stalls.append(watched)
                self._progress.answered(len(turn.stalls), stall.turns)

        self._progress.say("watching a request while long prompts arrive")
        try:
            asyncio.run(watch())
        except KVFerryError:
            raise
        except TimeoutError as error:
            raise DispatchError(str(error)) from error
        except Exception as error:  # whatever ended the watched request
            raise DispatchError(f"{WATCHED_ITSELF}: {error}") from error


def _idle(supervisor: Supervisor, seconds: float) -> dict[str, float]:
    before, begin = meters.cpu_seconds(supervisor), time.monotonic()
    time.sleep(seconds)
    spent, passed = meters.grown(before, meters.cpu_seconds(supervisor)), time.monotonic() - begin
    return {name: one / passed for name, one in spent.items()}


def _duration(answers: Sequence[Answer]) -> float:
    return max(answer.start_s + answer.latency_s for answer in answers)
