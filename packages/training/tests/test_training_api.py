"""The public names, and that the package is imported without torch and without transformers."""

import subprocess
import sys

import pipegrid.training


def test_the_public_names_are_pinned():
    assert set(pipegrid.training.__all__) == set()


def test_the_package_is_imported_with_torch_blocked():
    program = (
        "import sys; sys.modules['torch'] = None\nfrom pipegrid.training import *\nprint('transformers' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr) == ("False\n", "")
