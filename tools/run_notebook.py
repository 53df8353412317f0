"""Run the notebook of the documentation, and write its results into it: `python tools/run_notebook.py`.

Needs nbclient and ipykernel. `tools/tests/test_notebook.py` runs it as well, and compares what it prints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[1] / "docs" / "examples" / "plan_without_ranks.ipynb"


def run() -> Any:
    """The notebook with the results of a run, cell by cell in a fresh kernel.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    import nbclient
    import nbformat

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when it ran
    return notebook


def printed(notebook: Any) -> list[str]:
    """What each cell of code has printed."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    texts = [[one["text"] for one in cell["outputs"] if one["output_type"] == "stream"] for cell in cells]
    return ["".join("".join(part) for part in text) for text in texts]


def main() -> None:
    """Run, and write the results."""
    import nbformat

    nbformat.write(run(), NOTEBOOK)
    print(f"{NOTEBOOK.name} has the results of this run")


if __name__ == "__main__":
    main()
