"""The `daric-rag` command."""

from __future__ import annotations

import argparse
import difflib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from daric_rag import __version__
from daric_rag.commands import ask, cache, warm
from daric_rag.commands.interrupt import end_child_processes
from daric_rag.commands.quiet import quiet_environment
from daric_rag.errors import DaricError

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


class Parser(argparse.ArgumentParser):
    """An argument parser that suggests what was meant, for its own options and its commands'."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown options here, where the options that exist are known."""
        values, unknown = super().parse_known_args(args, namespace)
        options = [item for item in unknown if item.startswith("-")]
        if options:
            known = [name for action in self._actions for name in action.option_strings]
            self.error(f"unknown option {options[0]}{_suggestion(options[0].partition('=')[0], known)}")
        if unknown:
            self.error(f"unexpected argument {unknown[0]!r}")
        return values, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = [str(choice) for choice in action.choices]
            hint = _suggestion(str(value), names) or f"; there are: {', '.join(names)}"
            raise argparse.ArgumentError(None, f"unknown {action.metavar or 'value'} {value!r}{hint}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` (default: the process's) and return the exit status.

    0: done. 1: it failed. 2: an option or a file is not as it must be. 130: interrupted.
    """
    options = build_parser().parse_args(arguments)
    quiet_environment()
    _end_on_sigterm()
    try:
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        end_child_processes()
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output is gone; the interpreter must not fail again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except ValueError as error:
        return _failed(error, BAD_INPUT)
    except (DaricError, OSError) as error:
        return _failed(error, FAILED)


def build_parser() -> argparse.ArgumentParser:
    """The parser with all commands."""
    parser = Parser(prog="daric-rag", description="Retrieval-augmented generation that reuses documents' KV.")
    parser.add_argument("--version", action="version", version=f"daric-rag {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command", parser_class=Parser)
    for command in (ask, warm, cache):
        command.add_parser(commands)
    return parser


def _suggestion(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _failed(error: Exception, status: int) -> int:
    print(f"daric-rag: {error}", file=sys.stderr)
    return status


def _end_on_sigterm() -> None:
    """Let SIGTERM end the engine's processes too, as leaving a `with` block does."""

    def leave(number: int, frame: object) -> NoReturn:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)


if __name__ == "__main__":
    sys.exit(main())
