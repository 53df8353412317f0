"""The command line: show a layout, balance one, or split layers evenly.

    python -m pipegrid.layout "Et*3|(tt|)*29,m|L" --pp 16
    python -m pipegrid.layout balance --costs costs.json --pp 8
    python -m pipegrid.layout even 61 --pp 8 --vpp 2

Exit status: 0; 2 for wrong input, with the reason on stderr.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipegrid.core.parser import Parser
from pipegrid.core.strict_json import read_json
from pipegrid.layout import (
    Balance,
    LayoutError,
    LayoutGrammar,
    LayoutReport,
    PipelineParallelLayerLayout,
    balance,
    even,
    report,
)

_COSTS = """\
costs.json holds forward plus backward times: an object from kind of layer to a number (each layer of that kind) or a
list (one number each), or a list with one number per layer. memory.json has the same form; its numbers are memory per
microbatch in flight, each of which may be {"fixed": ..., "per_microbatch": ...} instead."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    command = arguments[0] if arguments else ""
    try:
        if command == "balance":
            _balance(arguments[1:])
        elif command == "even":
            _even(arguments[1:])
        else:
            _show(arguments)
    except (LayoutError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _show(arguments: Sequence[str]) -> None:
    parser = _parser("", "Show the layers of a layout on each rank.", "costs of the layers: adds the report")
    parser.add_argument("layout", help="layout string, such as 'Et*3|(tt|)*29,m|L'; or a command: balance, even")
    parser.add_argument(
        "--num-layers", type=int, help="check the layout against a model with this number of decoder layers"
    )
    parser.add_argument("--mtp-num-layers", type=int, default=0, help="... and this number of MTP layers (default 0)")
    options = parser.parse_args(arguments)
    layout = PipelineParallelLayerLayout(options.layout, options.pp, grammar=_grammar(options.symbol))
    if options.num_layers is not None:
        layout.validate_layer_layout(options.num_layers, options.mtp_num_layers)
    _finish(options, layout, _report(options, layout))


def _even(arguments: Sequence[str]) -> None:
    parser = _parser("even", "Split layers evenly over the stages.", "costs of the layers: adds the report")
    parser.add_argument("num_layers", type=int, help="layers of the model, embedding and loss not counted")
    parser.add_argument("--vpp", type=int, default=1, help="chunks per rank (default 1)")
    parser.add_argument("--account-for-embedding", action="store_true", help="count the embedding as a layer")
    parser.add_argument("--account-for-loss", action="store_true", help="count the loss as a layer")
    parser.add_argument("--first", type=int, help="layers on the first rank")
    parser.add_argument("--last", type=int, help="layers on the last rank")
    options = parser.parse_args(arguments)
    layout = even(
        options.num_layers,
        options.pp,
        options.vpp,
        account_for_embedding=options.account_for_embedding,
        account_for_loss=options.account_for_loss,
        first=options.first,
        last=options.last,
        grammar=_grammar(options.symbol),
    )
    _finish(options, layout, _report(options, layout))


def _balance(arguments: Sequence[str]) -> None:
    description = "Find the layout with the least cost of the most expensive stage."
    parser = _parser("balance", description, "costs of the layers", costs_required=True)
    parser.add_argument("--layers", help="the model, such as 'Et*61mL'; default: the layers of costs.json")
    parser.add_argument("--vpp", type=int, default=1, help="chunks per rank (default 1)")
    parser.add_argument("--nodes", type=int, help="bound of the search with a limit and vpp > 1")
    options = parser.parse_args(arguments)
    result = balance(
        _read_json(options.costs),
        options.pp,
        options.vpp,
        layers=options.layers,
        **_memory(options),
        nodes=options.nodes,
        grammar=_grammar(options.symbol),
    )
    _finish(options, result.layout, result.report, result)


def _parser(command: str, description: str, costs: str, *, costs_required: bool = False) -> argparse.ArgumentParser:
    parser = Parser(
        prog=f"python -m pipegrid.layout {command}".strip(),
        description=description,
        epilog=_COSTS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pp", type=int, required=True, help="number of pp ranks")
    parser.add_argument("--costs", type=Path, required=costs_required, metavar="costs.json", help=costs)
    parser.add_argument("--memory", type=Path, metavar="memory.json", help="memory of the layers")
    parser.add_argument("--limit", help="memory of a rank; or one number per rank, with commas")
    parser.add_argument("--microbatches", type=int, help="microbatches per step (default: many)")
    parser.add_argument("--symbol", action="append", default=[], metavar="v=vision", help="register a kind of layer")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--svg", type=Path, metavar="out.svg", help="write the picture of the report (needs costs)")
    return parser


def _report(options: argparse.Namespace, layout: PipelineParallelLayerLayout) -> LayoutReport | None:
    if options.costs is None:
        if any(getattr(options, name) is not None for name in ("memory", "limit", "microbatches", "svg")):
            raise LayoutError("--memory, --limit, --microbatches and --svg need --costs")
        return None
    return report(layout, _read_json(options.costs), **_memory(options))


def _finish(
    options: argparse.Namespace,
    layout: PipelineParallelLayerLayout,
    numbers: LayoutReport | None,
    result: Balance | None = None,
) -> None:
    if options.svg is not None and numbers is not None:
        options.svg.write_text(numbers.svg(), encoding="utf-8")
    if options.json:
        data = json.loads(layout.to_json())
        data["stages"] = [[str(kind) for kind in stage] for stage in layout.stages]
        if numbers is not None:
            data["report"] = numbers.to_dict()
        if result is not None:
            data |= {"lower_bound": result.lower_bound, "gap": result.gap, "optimal": result.optimal}
        print(json.dumps(data, indent=2))
        return
    print(f"{layout}\n\n{layout.pretty_repr()}")
    if numbers is not None:
        print(f"\n{numbers.table()}")
    if result is not None:
        proven = f"not proven optimal: the bottleneck is at most {result.gap:.2%} above the least possible"
        print("proven optimal" if result.optimal else proven)


def _grammar(symbols: Sequence[str]) -> LayoutGrammar:
    return LayoutGrammar(symbols={letter: kind for letter, _, kind in (symbol.partition("=") for symbol in symbols)})


def _memory(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `balance` and `report` about memory."""
    memory = None if options.memory is None else _read_json(options.memory)
    return {"memory": memory, "limit": _limit(options.limit), "microbatches": options.microbatches}


def _limit(text: str | None) -> float | list[float] | None:
    if text is None:
        return None
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise LayoutError(f"--limit {text!r} must be a number, or numbers with commas between them") from error
    return numbers[0] if len(numbers) == 1 else numbers


def _read_json(path: Path) -> dict[str, float] | list[float]:
    """The contents of a JSON file, checked by their user."""
    try:
        data: dict[str, float] | list[float] = read_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LayoutError(f"{path} is not JSON: {error}") from error
    return data


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # not on Windows
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader that has enough, such as head, ends this quietly
    sys.exit(main())
