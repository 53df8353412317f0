"""The public names, and that the package is imported without torch and without transformers."""

import subprocess
import sys

import pytest

import pipegrid.training

NAMES = {
    *("Attempt", "CheckpointError", "Checkpoints", "DropoutMasks", "Names", "Pipeline", "PipelineModule", "Sampling"),
    *("Stage", "TrainingState", "balance_samples", "check_stages", "generate", "pipeline_stage"),
    "tie_stage_parameters",
}
# Imported from the package as well; outside of __all__.
FURTHER = {
    *("CheckpointMismatchError", "CorruptCheckpointError", "CutError", "GenerationError", "RestartError"),
    *("Boundary", "Compared", "CutProof", "LoadedCheckpoint", "Spread", "StageComparison", "Tie"),
    *("NO_PROGRESS", "PREEMPTED", "attempt_store", "compile_layers", "export_safetensors", "load_safetensors"),
    *("prove_cut", "sequence_slices", "stop_restarts", "ties_of", "whole_names"),
}


def test_the_public_names_are_pinned():
    assert set(pipegrid.training.__all__) == NAMES


@pytest.mark.parametrize("name", sorted(NAMES | FURTHER))
def test_a_name_is_imported_from_the_package(name):
    assert getattr(pipegrid.training, name) is not None


def test_the_package_is_imported_with_torch_blocked():
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from pipegrid.training import *\n"
        "print('transformers' in sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr) == ("False\n", "")
