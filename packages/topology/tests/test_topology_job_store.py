"""A store in the launching process: it outlives every rank."""

import os
import signal
import subprocess
import sys
import time

import pytest

from pipegrid.topology import GridError, GroupConnectionError, job_store, serve_store
from pipegrid.topology.__main__ import main

RANK = """
import os, signal, sys
from pipegrid.topology import job_store
store = job_store("run")
store.set("said", sys.argv[1])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_outlives_its_clients_and_labels_are_key_spaces(monkeypatch):
    monkeypatch.delenv("PIPEGRID_STORE", raising=False)
    with serve_store() as address:
        assert subprocess.run([sys.executable, "-c", RANK, "hello"], check=False).returncode == -signal.SIGKILL
        assert job_store("run").get("said") == b"hello"
        assert job_store("run", address=address).get("said") == b"hello"
        assert not job_store("another").check(["said"])
    assert "PIPEGRID_STORE" not in os.environ


def test_without_an_address_or_a_server_the_error_says_so(monkeypatch):
    monkeypatch.delenv("PIPEGRID_STORE", raising=False)
    with pytest.raises(GridError, match=r"the address of the job's store is ''; it is host:port"):
        job_store("run")
    with serve_store() as address:
        pass
    from datetime import timedelta

    with pytest.raises(GroupConnectionError, match=f"cannot connect to the job's store at {address} for 'run': "):
        job_store("run", address=address, timeout=timedelta(seconds=1))


def test_the_command_line_serves_it_beside_a_launcher():
    script = "from pipegrid.topology import job_store; import sys; sys.exit(job_store('run').add('n', 7))"
    assert main(["serve", sys.executable, "-c", script]) == 7
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert main(["serve", "--", sys.executable, "-c", killed]) == 128 + signal.SIGKILL


def test_the_command_line_says_that_there_is_nothing_to_run(capsys):
    for nothing in (["serve"], ["serve", "--"]):
        with pytest.raises(SystemExit, match="2"):
            main(nothing)
        assert "serve needs a COMMAND" in capsys.readouterr().err
    assert main(["serve", "no-such-launcher"]) == 127
    assert capsys.readouterr().err == "no-such-launcher: No such file or directory\n"


def test_a_port_that_is_none_or_is_taken_is_named(capsys):
    with serve_store() as address:
        taken = address.rpartition(":")[2]
        assert main(["serve", "--port", taken, "true"]) == 2
    assert f"cannot serve the job's store at localhost:{taken}: " in capsys.readouterr().err
    assert main(["serve", "--port", "65536", "true"]) == 2
    assert capsys.readouterr().err == "port is 65536; it must be an integer of 0 to 65535\n"
    for port in ("65536", "²"):
        with pytest.raises(GridError, match=f"the address of the job's store is 'localhost:{port}'"):
            job_store("run", address=f"localhost:{port}")


def test_the_launcher_gets_sigterm_and_ends_first(tmp_path):
    ready = tmp_path / "ready"
    script = (
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        f"pathlib.Path({str(ready)!r}).touch()\n"
        "time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-m", "pipegrid.topology", "serve", sys.executable, "-c", script])
    end = time.monotonic() + 30
    while not ready.exists() and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 75
