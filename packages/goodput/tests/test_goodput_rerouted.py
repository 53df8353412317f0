"""Throughput where peers take over the work of dead nodes, and goodput with it."""

from __future__ import annotations

from statistics import mean

import pytest
from attrs import evolve

from pipegrid.goodput import Failures, Outage, Scenario, Throughput, rerouted_throughput, simulate
from pipegrid.goodput.__main__ import main
from pipegrid.planner import JobError, plan
from pipegrid.plans.plan.routes import Routes
from pipegrid.search.routed import reroute, schedule_routes
from planner_kit.jobs import small_job


def chosen(*, dp, pp, per_node=1, **options):
    job = small_job(alone=True, batch=8, schedules=("1f1b",), **options)
    (module,) = job.modules
    job = evolve(job, modules=(evolve(module, dp=(dp,), pp=(pp,)),), links=evolve(job.links, gpus_per_node=per_node))
    return plan(job, gpus=dp * pp).winner


def test_one_dead_node_is_the_mean_over_the_positions_of_a_rerouted_step():
    choice = chosen(dp=2, pp=3)
    throughput = rerouted_throughput(choice, nodes=6)
    steps = []
    for position in range(3):
        routes = reroute(Routes.identity(2, choice.num_microbatches), {position: [1]}, plan=choice.plan)
        limits = [80e9 - taken.total + taken.activations for taken in choice.memory]
        steps.append(schedule_routes(choice.plan, routes, choice.costs, limits).makespan + choice.reduction)
    assert throughput.rate(6) == pytest.approx(8 / choice.step)
    assert throughput.rate(5) == pytest.approx(mean(8 / step for step in steps))
    assert throughput.rate(5) < 0.9 * throughput.rate(6)  # one rank does the work of two
    assert throughput.least == 5


def test_two_dead_nodes_of_four_replicas():
    choice = chosen(dp=4, pp=2)
    throughput = rerouted_throughput(choice, nodes=8, deaths=2)
    assert [nodes for nodes, _ in throughput.table] == [6, 7, 8]
    assert throughput.rate(6) < throughput.rate(7) < throughput.rate(8)


def test_a_node_with_all_replicas_of_a_position_has_no_peers():
    throughput = rerouted_throughput(chosen(dp=2, pp=2, per_node=2), nodes=2)
    assert throughput.table == ((2, throughput.rate(2)),)


def test_idle_nodes_may_die():
    choice = chosen(dp=2, pp=2)
    throughput = rerouted_throughput(choice, nodes=5)
    assert throughput.rate(4) == pytest.approx((4 * rerouted_throughput(choice, nodes=4).rate(3) + 8 / choice.step) / 5)


def test_modules_with_different_dp_are_an_error():
    job = small_job(batch=4, schedules=("1f1b",))
    images, language = job.modules
    job = evolve(job, modules=(evolve(images, dp=(2,), placing="apart"), evolve(language, dp=(1,))))
    with pytest.raises(JobError, match="the modules have images dp=2, language dp=1; peers take over where"):
        rerouted_throughput(plan(job, gpus=4).winner, nodes=1)


def test_below_the_replanned_numbers_a_death_is_a_restart():
    outages = Failures([Outage("a", 100), Outage("b", 300)], 1000)
    given = Scenario(
        Throughput({4: 1.0, 3: 1.0, 2: 1.0}, 1),
        outages,
        restart=50,
        checkpoint=0,
        replan=1,
        replanned=Throughput({4: 1}, 1),
    )
    never, always = simulate(given, "re-plan", 10), simulate(evolve(given, replanned=None), "re-plan", 10)
    assert never.goodput == simulate(given, "restart", 10).goodput
    assert (never.lost["recovery"], always.lost["recovery"]) == (100, 2)
    once = simulate(evolve(given, replanned=Throughput({4: 1.0, 3: 0.5}, 1)), "re-plan", 10)
    assert once.lost["recovery"] == 51
    assert once.lost["fewer_nodes"] == pytest.approx(99.5, abs=1)  # half of 199 s with three nodes
    with pytest.raises(JobError, match="replanned is for 3 nodes, the throughput for 4"):
        evolve(given, replanned=Throughput({3: 1.0}, 1))
    with pytest.raises(JobError, match="replanned has 2 samples per second, the throughput of all nodes at most 1"):
        evolve(given, replanned=Throughput({4: 2.0}, 1))


def test_a_table_has_no_grids_to_reroute_on_and_is_not_planned(tmp_path, capsys):
    path = tmp_path / "throughput.toml"
    path.write_text("batch = 800\n[throughput]\n8 = 80\n")
    assert main([str(path), "--mtbf", "12h", "--restart", "5m", "--checkpoint", "20s", "--reroute"]) == 2
    assert "--reroute is for a job" in capsys.readouterr().err
    for unused in (
        ["--nodes", "99"],
        ["--memory", "80GB"],
    ):  # the figures would be those of other nodes than were asked for
        assert main([str(path), "--mtbf", "12h", "--restart", "5m", "--checkpoint", "20s", *unused]) == 2
        assert "--nodes and --memory are of a job that is planned" in capsys.readouterr().err


def test_the_command_line_reroutes(tmp_path, capsys):
    job = tmp_path / "job.toml"
    job.write_text(
        "global_batch = 8\ndevice = {flops = 1e14, memory = '80GB'}\nlinks = {inside = 3e11, between = 4e10, "
        "gpus_per_node = 1}\n[training]\nschedules = ['1f1b']\n[[modules]]\nname = 'm'\nmessage = 1e6\ndp = [2]\n"
        "[[modules.layers]]\nkind = 'decoder'\ncount = 4\nflops = 1e12\n"
    )
    given = [str(job), "--nodes", "4", "--mtbf", "12h", "--restart", "5m", "--checkpoint", "20s"]
    assert main([*given, "--for", "20d", "--policy", "re-plan", "--every", "1h", "--reroute"]) == 0
    assert "new plan 10s (by peers: a step takes " in capsys.readouterr().out


def test_fewer_nodes_than_the_choice_is_on_are_an_error():
    with pytest.raises(JobError, match="nodes is 3; the choice is on 4 nodes of 1 GPUs"):
        rerouted_throughput(chosen(dp=2, pp=2), nodes=3)
