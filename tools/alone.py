"""What an environment without torch can do: run by `nox -s install` in one that holds the packages without torch alone.

Prints what is installed, the CPU seconds of each import, and each command with its status; ends with 1 where torch is
there, an import takes half a second of CPU or brings more than the standard library, attrs, cattrs and pipegrid, or a
command fails.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tempfile
from pathlib import Path

IMPORT = """
import sys, time
before = set(sys.modules)
began = time.process_time()
import pipegrid.{name}
spent = time.process_time() - began
new = {{name.partition(".")[0] for name in set(sys.modules) - before}} - sys.stdlib_module_names
print(f"{{spent:.2f}}", *sorted(new))
"""
MOST_SECONDS = 0.5
ALLOWED = {"pipegrid", "attr", "attrs", "cattr", "cattrs", "typing_extensions"}
PIPELINE = ["--pp", "2", "--microbatches", "4"]
COMMANDS = [
    ["show", "1f1b", *PIPELINE, "--plan", "plan.csv"],
    ["verify", "plan.csv"],
    ["compare", *PIPELINE],
    ["simulate", "plan.csv"],
    ["search", *PIPELINE, "--memory-limit", "1"],
    ["layout", "Ett|ttL", "--pp", "2"],
    ["topology", "describe", "--world", "4", "a:tp=2,dp=2"],
    ["plan", "job.toml", "--gpus", "64"],
    ["goodput", "job.toml", "--nodes", "8", "--mtbf", "12h", "--restart", "10m", "--checkpoint", "30s"],
]


def main() -> int:
    """Print the three lists; 1 where something is not as it must be."""
    faults = []
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an import is measured as it is after the first, which compiles
    installed = sorted(f"{one.name} {one.version}" for one in importlib.metadata.distributions())
    print("installed:", ", ".join(installed))
    if any(one.startswith("torch ") for one in installed):
        faults.append("torch is installed")
    for name in sorted(one.split()[0].removeprefix("pipegrid-") for one in installed if one.startswith("pipegrid-")):
        for _ in range(2):
            run = subprocess.run(
                [sys.executable, "-c", IMPORT.format(name=name)], capture_output=True, text=True, check=False
            )
        seconds, *brought = run.stdout.split() or ["inf"]
        print(f"import pipegrid.{name}: {seconds} s of CPU; brings {', '.join(brought)}")
        if run.returncode or not ALLOWED.issuperset(brought):
            faults.append(f"import pipegrid.{name} brings {sorted({*brought} - ALLOWED)}{run.stderr}")
        if float(seconds) >= MOST_SECONDS:
            faults.append(f"import pipegrid.{name} takes {seconds} s of CPU; less than {MOST_SECONDS} is promised")
    script = Path(sys.executable).with_name("pipegrid")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.toml").write_text(Path("docs/examples/jobs/vlm.toml").read_text())
        for command in COMMANDS:
            run = subprocess.run([script, *command], cwd=folder, capture_output=True, text=True, check=False)
            first = (run.stdout or run.stderr).strip().partition("\n")[0]
            print(f"pipegrid {' '.join(command)}: {run.returncode}  {first}")
            if run.returncode:
                faults.append(f"pipegrid {' '.join(command)} ends with {run.returncode}: {run.stderr}")
    print("\n".join(faults), file=sys.stderr)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
