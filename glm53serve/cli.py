"""The commands. Everything heavy is imported by the command that needs it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from glm53serve import __version__
from glm53serve.commands.errors import one_line_errors
from glm53serve.descriptors import fill_standard_descriptors
from glm53serve.settings import SettingError, Settings

USAGE_ERROR = 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, exit 2."""
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(USAGE_ERROR)


def main(argv: Sequence[str] | None = None) -> int:
    """The `glm53serve` command."""
    fill_standard_descriptors()
    arguments = _glm53serve_parser().parse_args(argv)
    return _run("glm53serve", arguments.run, arguments)


def main_drop_in(argv: Sequence[str] | None = None) -> int:
    """The `glm53` command: the daemon as a gateway starts it, or the one-shot form."""
    fill_standard_descriptors()

    def run(arguments: list[str], settings: Settings) -> int:
        from glm53serve.commands import drop_in

        return drop_in.run(arguments, settings)

    return _run("glm53", run, list(sys.argv[1:] if argv is None else argv))


def _run(name: str, command: Callable[[Any, Settings], int], arguments: Any) -> int:
    """Run a command with the environment's settings; what a person or the machine did wrong is one line and exit 1."""
    try:
        settings = Settings.from_environ()
    except SettingError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    with one_line_errors(name) as outcome:
        outcome.code = command(arguments, settings)
    return outcome.code


def _glm53serve_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="glm53serve", description="Serve GLM-5.3-Flash-architecture models over a line protocol on stdin and stdout.")
    parser.add_argument("--version", action="version", version=f"glm53serve {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=_Parser)
    _add_serve(commands)
    _add_generate(commands)
    _add_chat(commands)
    _add_info(commands)
    _add_synth(commands)
    _add_convert(commands)
    _add_doctor(commands)
    return parser


def _model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=None, metavar="DIR", help="model directory (default: the shipped model)")
    parser.add_argument("--backend", choices=("auto", "cpu", "cuda", "vulkan"), default=None, help="what runs the layers (default: GLM53_BACKEND)")


def _add_serve(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser("serve", help="run the daemon: frames in on stdin, tokens out on stdout")
    _model(parser)
    parser.add_argument("--slots", type=int, default=None, help="conversations held at once (default: KV_SLOTS)")

    def run(arguments: argparse.Namespace, settings: Settings) -> int:
        from glm53serve.commands import serve

        return serve.run(arguments, settings)

    parser.set_defaults(run=run)


def _add_generate(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser("generate", help="answer one prompt and stream the answer")
    _model(parser)
    parser.add_argument("--prompt", required=True, help="the text to go on from, or the question with --chat")
    parser.add_argument("--chat", action="store_true", help="apply the model's chat template to the prompt")
    parser.add_argument("--no-think", action="store_true", help="with --chat: ask for the answer without a thought")
    parser.add_argument("--max-tokens", type=int, default=256, help="most tokens to generate (default 256)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 = always the most likely token (default)")
    parser.add_argument("--top-p", type=float, default=1.0, help="nucleus mass (default 1 = all tokens)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampler (default 0)")

    def run(arguments: argparse.Namespace, settings: Settings) -> int:
        from glm53serve.commands import generate

        return generate.run(arguments, settings)

    parser.set_defaults(run=run)


def _add_chat(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser("chat", help="talk to a model: a terminal client of the daemon (Ctrl-C cancels an answer)")
    _model(parser)
    parser.add_argument("--no-think", action="store_true", help="ask for answers without a thought")
    parser.add_argument("--max-tokens", type=int, default=1024, help="most tokens of an answer (default 1024)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 = always the most likely token (default)")
    parser.add_argument("--top-p", type=float, default=1.0, help="nucleus mass (default 1 = all tokens)")

    def run(arguments: argparse.Namespace, settings: Settings) -> int:
        from glm53serve.commands import chat

        return chat.run(arguments, settings)

    parser.set_defaults(run=run)


def _add_info(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser("info", help="what a checkpoint is: layers, formats, sizes, the RAM it needs")
    parser.add_argument("directory", type=Path, metavar="DIR", nargs="?", default=None, help="model directory (default: the shipped model)")

    def run(arguments: argparse.Namespace, settings: Settings) -> int:
        from glm53serve.load import shipped_model
        from glm53serve.model.info import describe

        print(describe(arguments.directory or shipped_model()))
        return 0

    parser.set_defaults(run=run)


def _add_synth(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser("synth", help="write a random model of a given shape")
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to write it")
    parser.add_argument("--shape", choices=("nano", "tiny", "mid", "flash"), required=True)
    parser.add_argument("--layers", type=int, default=None, help="number of layers (default: the shape's)")
    parser.add_argument("--experts", type=int, default=None, help="routed experts a layer (default: the shape's)")
    parser.add_argument("--format", choices=("bf16", "fp8", "int4"), default="bf16", help="stored format (default bf16)")
    parser.add_argument("--seed", type=int, default=0)

    def run(arguments: argparse.Namespace, settings: Settings) -> int:
        from glm53serve.model.synth import synth

        synth(arguments.directory, arguments.shape, layers=arguments.layers, experts=arguments.experts, fmt=arguments.format, seed=arguments.seed)
        return 0

    parser.set_defaults(run=run)


def _add_convert(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser("convert", help="write a copy of a model with smaller experts; started again, it goes on where it was stopped")
    parser.add_argument("source", type=Path, metavar="SRC", help="model directory")
    parser.add_argument("target", type=Path, metavar="DST", help="new or empty directory, or one of a conversion that was stopped")
    formats = ("int4", "int8", "bf16")
    parser.add_argument("--experts", choices=formats, default="int4", help="format of the routed experts (default int4)")
    parser.add_argument("--dense", choices=formats, default="bf16", help="format of the other matrices (default bf16)")
    parser.add_argument("--verify", action="store_true", help="compare sampled tensors with the source afterwards, or those of a finished DST")

    def run(arguments: argparse.Namespace, settings: Settings) -> int:
        from glm53serve.commands import convert

        return convert.run(arguments, settings)

    parser.set_defaults(run=run)


def _add_doctor(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser("doctor", help="what this machine offers and what a model would make of it")
    parser.add_argument("--model", type=Path, default=None, metavar="DIR", help="model directory (default: the shipped model)")

    def run(arguments: argparse.Namespace, settings: Settings) -> int:
        from glm53serve.commands import doctor

        return doctor.run(arguments, settings)

    parser.set_defaults(run=run)
