"""Run seeds of the simulation, or replay one with a trace: ``python -m tests.simulation --help``."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from .scenario import Result, simulate
from .seeds import attempts

PROGRESS = 1000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__.partition(":")[0])
    parser.add_argument("--seeds", type=int, default=2000, help="how many to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=1, help="processes to run them in")
    parser.add_argument("--seed", type=int, help="replay this one and tell what happens")
    options = parser.parse_args()
    if options.seed is not None:
        _report(simulate(options.seed, trace=print))
        return 0
    return _run(range(options.first, options.first + options.seeds), options.jobs)


def _run(seeds: range, jobs: int) -> int:
    started = time.perf_counter()
    total = Result(Counter(), Counter(), 0.0)
    with attempts(seeds, jobs) as results:
        for done, (_, result) in enumerate(results, 1):
            if isinstance(result, str):
                print(result, file=sys.stderr)
                return 1
            total += result
            if not done % PROGRESS:
                print(f"{done} seeds in {time.perf_counter() - started:.0f} s", file=sys.stderr)
    _report(total)
    elapsed = time.perf_counter() - started
    print(f"\n{len(seeds)} seeds from {seeds.start} on, {len(seeds) / elapsed:.1f} seeds/s, no rule broken")
    return 0


def _report(result: Result) -> None:
    print("\nhow often which event met a party in which state")
    for (state, event), count in sorted(result.coverage.items()):
        print(f"{count:9}  {state:22} {event}")
    print(f"\n{len(result.coverage)} pairs of state and event; requests ended as")
    for how, count in result.ends.most_common():
        print(f"{count:9}  {how}")
    print(f"\nthe last one came to rest {result.rest:.0f} simulated seconds after the trouble ended")


if __name__ == "__main__":
    sys.exit(main())
