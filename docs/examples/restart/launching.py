"""torchrun on this machine, as one agent or as several that stand for nodes; no port is fixed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from attrs import frozen

JOB = Path(__file__).with_name("job.py")


@frozen(kw_only=True)
class Launch:
    """How the ranks are started.

    Attributes:
        ranks: of each agent.
        agents: torchruns, each of which stands for a node; they find each other through a file.
        restarts: torchrun's ``--max-restarts``.
        seconds: after which everything that was started is killed.
    """

    ranks: int = 2
    agents: int = 1
    restarts: int = 0
    seconds: float = 300.0

    def command(self, rendezvous: Path) -> list[str]:
        """Of one agent; the agents of a launch share ``rendezvous``, a file that does not exist yet."""
        return [
            *(sys.executable, "-m", "torch.distributed.run"),
            *(f"--nnodes={self.agents}", f"--nproc-per-node={self.ranks}", f"--max-restarts={self.restarts}"),
            # By address, not by the machine's name, which not every machine can look up.
            *("--local-addr=localhost", "--monitor-interval=0.1"),
            *("--rdzv-backend=c10d", f"--rdzv-id={rendezvous.name}"),
            *("--rdzv-conf=store_type=file", f"--rdzv-endpoint={rendezvous}"),
        ]

    def start(self, directory: Path, arguments: Sequence[str], script: Path = JOB) -> list[subprocess.Popen[str]]:
        """Start the agents, each with its ranks in a session of its own."""
        directory.mkdir(parents=True, exist_ok=True)
        command = self.command(directory / f"rendezvous-{uuid.uuid4().hex}")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return [
            subprocess.Popen(
                [*command, str(script), "--directory", str(directory), *arguments],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            for _ in range(self.agents)
        ]

    def run(self, directory: Path, arguments: Sequence[str], script: Path = JOB) -> tuple[list[int], str]:
        """Run to the end; the agents' exit codes, and what all have written.

        Raises:
            TimeoutError: it took longer than ``seconds``.
        """
        agents = self.start(directory, arguments, script)
        return finish(agents, seconds=self.seconds)


def finish(agents: Sequence[subprocess.Popen[str]], *, seconds: float) -> tuple[list[int], str]:
    """Wait for the agents' ends, and end what is left of them."""
    end, said = time.monotonic() + seconds, []
    try:
        for agent in agents:
            said += [agent.communicate(timeout=max(0.1, end - time.monotonic()))[0]]
    except subprocess.TimeoutExpired as error:
        kill(agents)
        said += [agent.communicate()[0] for agent in agents[len(said) :]]
        raise TimeoutError(f"the job did not end within {seconds:g} s; it wrote:\n{''.join(said)}") from error
    finally:
        kill(agents)
    return [agent.returncode for agent in agents], "".join(said)


def kill(agents: Sequence[subprocess.Popen[str]]) -> None:
    """Kill agents and ranks; each agent's ranks have sessions of their own, and its id in their environment."""
    for agent in agents:
        for rank in ranks_of(agent.pid).values():
            _kill(rank)
        if agent.poll() is None:
            _kill(agent.pid)


def ranks_of(agent: int) -> dict[int, int]:
    """The processes of an agent's ranks, by rank: its children that have a rank in their environment."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            environment = (process / "environ").read_bytes().split(b"\0") if parent == agent else []
        except OSError:
            continue  # it has ended meanwhile
        rank = next((item[5:] for item in environment if item.startswith(b"RANK=")), None)
        if rank is not None:
            found[int(rank)] = int(process.name)
    return found


def _kill(process: int) -> None:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return
