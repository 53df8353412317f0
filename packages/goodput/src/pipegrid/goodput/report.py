"""The goodput of policies as a table and as JSON."""

from __future__ import annotations

import json
import math
from statistics import mean

from attrs import asdict
from attrs.filters import exclude

from pipegrid.core.fields import checked_arguments
from pipegrid.core.tables import table, text_table
from pipegrid.goodput.durations import duration_text
from pipegrid.goodput.goodput import Goodput
from pipegrid.goodput.interval import daly_goodput
from pipegrid.goodput.simulate import CAUSES, Outcome
from pipegrid.planner.errors import JobError


@checked_arguments(JobError, kinds=True)
def goodput_table(found: Goodput, *, terminal: bool = False) -> str:
    """The scenario, a row for each policy with the share of the time that each cause takes, and what to choose.

    ``terminal``: drawn by rich where it is installed.

    Examples:
        >>> throughput = Throughput({8: 10.0, 7: 8.0}, batch=64)
        >>> failures = random_failures(8, mtbf="12h", duration="30d")
        >>> found = goodput(Scenario(throughput, failures, restart="10m", checkpoint="30s"), every="1h")
        >>> "restart" in goodput_table(found)
        True
    """
    rows = []
    for outcome in found.outcomes:
        shares = (outcome.goodput, *(outcome.lost[cause] / outcome.duration for cause in CAUSES))
        rows.append((outcome.policy, every_text(found, outcome), *(f"{100 * share:.2f}%" for share in shares)))
    headings = ("policy", "checkpoint every", "goodput", *(cause.replace("_", " ") for cause in CAUSES))
    right = range(2, len(headings))
    drawn = table(headings, rows, right=right, color=True) if terminal else text_table(headings, rows, right=right)
    return f"{_assumed(found)}\n{drawn}\n{_advice(found)}\n"


def every_text(found: Goodput, outcome: Outcome) -> str:
    """The interval of checkpoints, as a duration on all nodes and in steps."""
    if outcome.every is None:
        return "never"
    steps = "1 step" if outcome.every == 1 else f"{outcome.every} steps"
    return f"{duration_text(outcome.every * found.scenario.step)} ({steps})"


def _assumed(found: Goodput) -> str:
    scenario, failures = found.scenario, found.scenario.failures
    text = duration_text
    away = [outage.end - outage.start for outage in failures.outages]
    never = away.count(math.inf)
    back = f"{never} nodes never back" if never else f"nodes back after {text(mean(away or [0.0]))}"
    often = f", one every {text(failures.mtbf)}, {back}" if failures.count else ""
    restart = scenario.restart_seconds(scenario.throughput.nodes)
    each = [f"restart {text(restart)}", f"checkpoint {text(scenario.checkpoint)}"]
    each += [f"written after {text(scenario.write)} more"] if scenario.write else []
    policies = {outcome.policy for outcome in found.outcomes}
    peers, replanned = "", scenario.replanned
    if replanned is not None:
        fewer = replanned.nodes - 1
        peers = " (a dead node stops all replicas of a position: a restart)"
        if replanned.least <= fewer:
            peers = f" (by peers: a step takes {text(replanned.step(fewer))} with a node dead)"
    each += [f"new plan {text(scenario.replan)}{peers}"] if "re-plan" in policies else []
    if "spare" in policies:
        each += [f"{scenario.spares} of the nodes spare, promoted in {text(scenario.promote)}"]
    return (
        f"{scenario.throughput.nodes} nodes, {text(failures.duration)}: {failures.count} failures{often}; "
        f"a step takes {text(scenario.step)}\n{', '.join(each)}\n"
    )


def _advice(found: Goodput) -> str:
    scenario, best = found.scenario, found.best
    when = "without checkpoints" if best.every is None else f"with a checkpoint every {every_text(found, best)}"
    lines = [f"best: {best.policy} {when}, {100 * best.goodput:.2f}% of the work without failures"]
    if scenario.failures.count and scenario.checkpoint:
        restart = scenario.restart_seconds(scenario.throughput.nodes)
        share = daly_goodput(found.daly, checkpoint=scenario.checkpoint, restart=restart, mtbf=scenario.failures.mtbf)
        lines.append(
            f"Daly's formula for restarts on nodes that are replaced at once: every {duration_text(found.daly)}, "
            f"{100 * share:.2f}%"
        )
    if any(outcome.policy != "restart" for outcome in found.outcomes):
        lines += [
            "re-plan is pipegrid.survive where modules have equal dp, on gloo; elsewhere a prediction, as spare is"
        ]
    return "\n".join(lines)


@checked_arguments(JobError, kinds=True)
def goodput_json(found: Goodput) -> str:
    """The outcomes, the best first, and the scenario; times in seconds.

    Examples:
        >>> import json
        >>> failures = random_failures(8, mtbf="12h", duration="30d")
        >>> scenario = Scenario(Throughput({8: 10.0, 7: 8.0}, batch=64), failures, restart="10m", checkpoint="30s")
        >>> text = goodput_json(goodput(scenario, policies=("restart",), every="1h"))
        >>> json.loads(text)["failures"]
        57
    """
    scenario = found.scenario
    data = {
        "nodes": scenario.throughput.nodes,
        "step": scenario.step,
        "duration": scenario.failures.duration,
        "failures": scenario.failures.count,
        **asdict(scenario, recurse=False, filter=exclude("throughput", "failures", "replanned")),
        "outcomes": [asdict(outcome) for outcome in found.outcomes],
        "daly": found.daly if scenario.failures.count else None,
    }
    return json.dumps(data, indent=2)
