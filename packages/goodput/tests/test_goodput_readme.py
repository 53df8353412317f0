"""The README's example runs with this package and what it declares: no torch."""


def test_it_runs(readme_example):
    rows = {line.split()[0] for line in readme_example.splitlines() if line.strip()}
    assert {"re-plan", "restart", "spare"} <= rows
    assert "Daly's formula" in readme_example
