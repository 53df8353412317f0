"""Mistakes planted in the core, one at a time: which of them the tests of the day find, and in how many seconds.

    python tools/mutations.py [--only N ...]

Each is applied to a copy of the commit (a git worktree in a temporary folder), whose sources come before those that are
installed. The tests of the package run with ``-m "not nightly and not thorough"``: first the files that are about the
place, then the others, and where these find nothing, those of the packages that need it and the integration tests.
A mistake that survives is a test that the day lacks. Exits with 1 where one does.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from attrs import frozen

ROOT = Path(__file__).parents[1]
DAY = ("-m", "not nightly and not thorough")
SECONDS = 900.0
"""Of one run of tests. A mistake by which ranks wait forever ends by the tests' own deadlines before that."""


@frozen
class Mutation:
    """A mistake: ``old``, which is in ``file`` once, becomes ``new``.

    Attributes:
        file: behind ``packages/<package>/src/pipegrid/``.
        old: exact text of the source.
        new: the text with the mistake.
        breaks: what no longer holds.
        tests: the files about the place, with spaces between them: of the package's ``tests`` folder; from the root,
            where they begin with a slash.
    """

    file: str
    old: str
    new: str
    breaks: str
    tests: str

    @property
    def package(self) -> str:
        """The package of the file."""
        return self.file.partition("/")[0]

    @property
    def path(self) -> Path:
        """From the root of the repository."""
        return Path("packages", self.package, "src", "pipegrid", self.file)

    def applied_to(self, text: str) -> str:
        """The source with the mistake.

        Raises:
            ValueError: ``old`` is not in it exactly once.
        """
        if text.count(self.old) != 1:
            raise ValueError(f"{self.path} has {self.old!r} {text.count(self.old)} times, not once")
        return text.replace(self.old, self.new)


MUTATIONS = (
    # ---- plans: data, and who needs it
    Mutation(
        "plans/plan/dataflow.py",
        "return tuple(sorted((destination, source) for source, destination in links))",
        "return tuple(sorted(links))",
        "gradients go the way that activations went",
        "lowering/test_lowering.py",
    ),
    Mutation(
        "plans/plan/plan.py",
        "sorted(place + each * replica for place in places for replica in self.routes.living(place))",
        "sorted(place * self.num_replicas + replica for place in places for replica in self.routes.living(place))",
        "actors are numbered by position and not by replica",
        "plan/test_routes.py generators/test_routed.py",
    ),
    Mutation(
        "plans/generators/looped.py",
        "warmup = min(warmup_per_hop * (num_positions - position - 1) + between, len(forwards))",
        "warmup = min(warmup_per_hop * (num_positions - position) + between, len(forwards))",
        "two forwards more than the schedule has are in flight",
        "generators/test_closed_forms.py generators/test_generators.py",
    ),
    # ---- plans: lowering
    Mutation(
        "plans/passes/lowering.py",
        "if before == self._done and self._batch and self._partners.isdisjoint(partners):",
        "if before == self._done and self._batch:",
        "two exchanges with one partner become one batch",
        "lowering/test_lowering.py",
    ),
    Mutation(
        "plans/passes/lowering.py",
        "else [place + 1 for place in made]",
        "else made",
        "an early receive, and its send, come before the compute that makes the message",
        "lowering/test_lowering.py",
    ),
    Mutation(
        "plans/passes/lowering.py",
        "yield Action(ActionKind.REDUCE, stage), members, max(ends, default=0)",
        "yield Action(ActionKind.REDUCE, stage), members, min(ends, default=0)",
        "replicas reduce a stage after the first of its computes",
        "generators/test_routed.py",
    ),
    Mutation(
        "plans/passes/lowering.py",
        "Group(name, {place for stage in stages for place in plan.placement[stage]}, tied=stages)",
        "Group(name, {plan.placement[stage][0] for stage in stages}, tied=stages)",
        "of a tied stage on several positions only one reduces",
        "lowering/test_lowering.py",
    ),
    # ---- plans: the proof
    Mutation(
        "plans/verify/position.py",
        "for held in {stage, *table.tied.get(name, ())}:",
        "for held in (stage,):",
        "a tied gradient is summed before the backward of its other stage",
        "verify/test_verify.py verify/test_mutations.py",
    ),
    Mutation(
        "plans/verify/position.py",
        "plan, step = self.table.plan, -1 if action.kind is F else 1",
        "plan, step = self.table.plan, -1",
        "backwards of slices are proved in the order of forwards",
        "generators/test_slices.py",
    ),
    Mutation(
        "plans/verify/position.py",
        "if sent == received or set(sent) != set(received):",
        "if len(sent) == len(received) or set(sent) != set(received):",
        "the order on a lane is not compared",
        "verify/test_verify.py verify/test_mutations.py",
    ),
    Mutation(
        "plans/verify/position.py",
        "        for other in others:\n            ours, theirs",
        "        for other in others[:1]:\n            ours, theirs",
        "the third member of a group may do its collectives in another order",
        "verify/test_collectives.py",
    ),
    Mutation(
        "plans/verify/table.py",
        "joined = [self.ids.joined[place, stage, kind] + piece for place in places if place != self.position]",
        "joined = [self.ids.joined[place, stage, kind] + piece for place in places if place < self.position]",
        "a compute of a shared stage waits for lower positions alone",
        "verify/test_collectives.py verify/test_explorer.py",
    ),
    Mutation(
        "plans/verify/verify.py",
        "if live > limit + 1e-9:",
        "if live >= limit + 1:",
        "a memory limit is passed by less than a microbatch",
        "verify/test_verify.py",
    ),
    # ---- transport: lanes
    Mutation(
        "transport/messages/message.py",
        "        self._table.clear()\n        self.passed = [] if learn else None",
        "        self.passed = [] if learn else None",
        "announcements of an earlier step are those of the next one",
        "test_transport_specs.py",
    ),
    Mutation(
        "transport/lane/lane.py",
        "and (not self._needs_shapes if shapes is None else plain[0].shape == shapes)",
        "and (not self._needs_shapes or shapes is not None)",
        "the shape that the caller of a receive gives is not compared",
        "test_transport_steady.py test_transport_shapes.py",
    ),
    Mutation(
        "transport/messages/message.py",
        "            announced = self._table[ahead]\n",
        "            announced = self._table[0]\n",
        "each message of a batch is compared with the first one that is known",
        "test_transport_specs.py",
    ),
    Mutation(
        "transport/lane/endpoint.py",
        "if sequence != first.sequence:",
        "if sequence < first.sequence:",
        "the header of a later message is taken for that of the next one",
        "test_transport_shapes.py test_transport_words.py",
    ),
    Mutation(
        "transport/lane/landing.py",
        "return alone and size > 0 and nbytes <= size",
        "return alone and size > 0",
        "a message is sent to a receive that is too small for it",
        "test_transport_beside_headers.py",
    ),
    Mutation(
        "transport/control/handshake.py",
        "if self._batch not in self._known and self.heard == self.said:",
        "if self._batch not in self._known:",
        "shapes of a step are known of a batch that the other end did not have",
        "test_transport_learned.py",
    ),
    # ---- reshard and bridges
    Mutation(
        "reshard/plan.py",
        "        if len(takers) > 1:\n            completing",
        "        if len(takers) > 2:\n            completing",
        "two copies do not give each other what they got",
        "test_reshard_plans.py",
    ),
    Mutation(
        "reshard/plan.py",
        "reductions=sender.partial_groups",
        "reductions=src.partial_groups",
        "partial sums of gradients are added up in the groups of the other side",
        "test_reshard_plans.py",
    ),
    Mutation(
        "bridges/bridge/exchange.py",
        "pieces = {peer: next(own) for peer, own in shares.items() if peer in senders}",
        "pieces = {peer: next(own) for peer, own in shares.items()}",
        "a leaf takes the piece of another leaf from a rank that sends it none",
        "test_bridges_payload.py",
    ),
    Mutation(
        "bridges/bridge/exchange.py",
        "            and gradients.shape == steady.shape\n            and gradients.dtype is steady.dtype\n",
        "            and gradients.dtype is steady.dtype\n",
        "the shape of a later gradient is not compared",
        "test_bridges_bridge.py",
    ),
    Mutation(
        "bridges/bridge/traffic.py",
        "        for ranks in part.reductions:\n            require_summed",
        "        for ranks in part.reductions if direction is _FORWARD else ():\n            require_summed",
        "partial sums of gradients are not added up",
        "test_bridges_bridge.py test_bridges_smoke.py",
    ),
    Mutation(
        "bridges/bridge/leaves.py",
        "values.append(with_gradient(value) if one.gradient else value)",
        "values.append(with_gradient(value) if one.shape is not None else value)",
        "a leaf that is declared without gradient gets one",
        "test_bridges_payload.py",
    ),
    # ---- gradients
    Mutation(
        "gradients/reduction/buckets.py",
        "            self._sum_over(self.replicas)\n",
        "            self._sum_over(self.tensor)\n",
        "the second sum of a partial gradient is over tp again, not over replicas",
        "/packages/schedules/tests/gradients/test_sharded_gradients.py",
    ),
    Mutation(
        "gradients/reduction/buckets.py",
        "        if self.layouts[0].divided != 1:\n            divisor = divisor / self.layouts[0].divided\n",
        "",
        "what fully_shard has divided is divided again",
        "/packages/schedules/tests/gradients/test_early_reduction.py",
    ),
    Mutation(
        "gradients/reduction/reduce.py",
        "            elif bucket.first is not None:\n                behind.add(id(bucket.first))\n",
        "",
        "buckets of a group start in the order in which they fill up on a rank",
        "test_sums_and_norms.py",
    ),
    Mutation(
        "gradients/clip.py",
        "    if layout.marks.replica:\n        return False\n",
        "",
        "a tied parameter counts once for each copy",
        "test_sums_and_norms.py",
    ),
    Mutation(
        "gradients/clip.py",
        "and (layout.marks.sharded or _first_outside(mesh, layout.tensor, layout))",
        "and _first_outside(mesh, layout.tensor, layout)",
        "of a parameter that is sharded over tp only the first shard counts",
        "test_sums_and_norms.py",
    ),
    Mutation(
        "gradients/reduction/tied.py",
        "for gradient in found if self.contributes else ():",
        "for gradient in found:",
        "tp replicas of a tied gradient are added up",
        "/packages/schedules/tests/gradients/test_tied.py",
    ),
    Mutation(
        "gradients/loss_scale.py",
        "if state.clean_steps + 1 < state.growth_interval:",
        "if state.clean_steps < state.growth_interval:",
        "the loss scale grows a step late",
        "/packages/schedules/tests/gradients/test_loss_scale.py",
    ),
    # ---- schedules: the runtime, and a step of Megatron's
    Mutation(
        "schedules/runtime/stages/deallocation.py",
        "        if self.unsent == 0:",
        "        if self.unsent <= 1:",
        "an output is freed before its last message has left",
        "runtime/test_stage_runner.py",
    ),
    Mutation(
        "schedules/runtime/stages/edge_queues.py",
        "self.unposted = expected - first",
        "self.unposted = expected",
        "more receives are posted than the plan has",
        "runtime/test_receives_ahead.py",
    ),
    Mutation(
        "schedules/runtime/stages/edge_queues.py",
        "            if piece in self.pending:\n                self.end(piece)\n",
        "",
        "an output that was changed in place before its send had ended is not noticed",
        "runtime/test_static_outputs.py runtime/test_stage_runner.py",
    ),
    Mutation(
        "schedules/megatron/forward.py",
        "return loss * (cp_size / num_microbatches), None, result[1]",
        "return loss / num_microbatches, None, result[1]",
        "a mean loss misses the factor of context parallelism",
        "runtime/test_stage_steps.py",
    ),
    Mutation(
        "schedules/megatron/place.py",
        "if place % window >= partial)",
        "if place % window > partial)",
        "one microbatch more of each window follows the model's own checkpointing",
        "megatron/test_units.py megatron/test_forward_backward.py",
    ),
    # ---- autograd, stages, training
    Mutation(
        "autograd/partition.py",
        "sharing |= {owner, claimed[node]}",
        "sharing.add(owner)",
        "of two nodes that share a parameter one leaves its gradient for W",
        "test_partition.py test_random_stages.py",
    ),
    Mutation(
        "stages/assignment.py",
        "            passed = next(i for i, layers in enumerate(lists) if layer in layers) + 1\n",
        "            passed = next(i for i, layers in enumerate(lists) if layer in layers)\n",
        "parameters that are registered behind the layers go to the first stage",
        "test_stages_cut.py",
    ),
    Mutation(
        "training/pipeline/counts.py",
        "self.totals[MICROBATCHES] / total.clamp(min=1) * count",
        "count / total.clamp(min=1)",
        "a loss misses the number of microbatches",
        "test_training_losses.py test_training_pipeline.py",
    ),
)


def needing(package: str) -> list[str]:
    """The packages that declare ``package``, in tests or themselves, those with the fewest needs first."""
    needs = {}
    for path in sorted((ROOT / "packages").glob("*/pyproject.toml")):
        found = tomllib.loads(path.read_text())
        listed = [*found["project"]["dependencies"], *found["dependency-groups"]["test"]]
        needs[path.parent.name] = {match[1] for one in listed if (match := re.match(r"pipegrid-(\w+)", one))}
    return sorted((name for name, own in needs.items() if package in own), key=lambda name: len(needs[name]))


def runs(mutation: Mutation, root: Path) -> Iterator[tuple[str, list[str]]]:
    """What is run, in turn: a name, and pytest's arguments."""
    own = root / "packages" / mutation.package / "tests"
    near = [root / one[1:] if one.startswith("/") else own / one for one in mutation.tests.split()]
    for path in near:
        yield path.name, [str(path)]
    yield mutation.package, [str(own), *(f"--ignore={path}" for path in near)]
    for name in needing(mutation.package):
        yield name, [str(root / "packages" / name / "tests"), *(f"--ignore={path}" for path in near)]
    yield "integration_tests", [str(root / "integration_tests")]


def pytest(root: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """The day's tests among ``arguments``, up to the first that fails, with the sources below ``root``."""
    sources = os.pathsep.join(str(path) for path in sorted(root.glob("packages/*/src")))
    environment = {**os.environ, "PYTHONPATH": sources, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *DAY, *arguments]
    return subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )


def find(mutation: Mutation, root: Path) -> str | None:
    """The first test that fails with the mistake in the tree ``root``; None where all pass."""
    target = root / mutation.path
    text = target.read_text()
    target.write_text(mutation.applied_to(text))
    try:
        for name, arguments in runs(mutation, root):
            try:
                done = pytest(root, arguments)
            except subprocess.TimeoutExpired:
                return f"{name}: it does not end"
            if done.returncode == 5:  # none of its tests is one of the day
                continue
            if done.returncode:
                failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
                return failed[1] if failed else f"{name}: {done.stdout[-200:]}{done.stderr[-200:]}"
    finally:
        target.write_text(text)
    return None


def table(rows: Iterable[tuple[int, Mutation, str | None, float]]) -> Iterator[str]:
    """The lines of a table: each mistake, and the test that has found it."""
    yield "  N   s      found by, or SURVIVED"
    for number, mutation, found, seconds in rows:
        where = "SURVIVED" if found is None else found.removeprefix("packages/")
        yield f"{number:>3} {seconds:>5.0f}  {mutation.file}: {mutation.breaks}\n             {where}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the mistakes that were asked for, and print what found each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="these, by number from 1")
    asked = parser.parse_args(argv).only or range(1, len(MUTATIONS) + 1)
    rows = []
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree = Path(folder, "tree")
        git = ("git", "-C", str(ROOT), "worktree")
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), "HEAD"], check=True)
        try:
            for number in asked:
                began = time.monotonic()
                found = find(MUTATIONS[number - 1], tree)
                rows.append((number, MUTATIONS[number - 1], found, time.monotonic() - began))
                print("\n".join(list(table(rows[-1:]))[1:]), flush=True)
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)
    survived = [number for number, _, found, _ in rows if found is None]
    print(f"{len(rows) - len(survived)} of {len(rows)} are found; survived: {survived or 'none'}")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
