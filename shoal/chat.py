"""`shoal chat`: a conversation with a running server, in the terminal, or through a pipe for scripts."""

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from io import TextIOWrapper

from shoal.chat_conversation import MANY_ROUNDS, ChatConversation
from shoal.chat_terminal import ChatTerminal
from shoal.chat_tools import Toolbox, ToolError, load, shown
from shoal.client import Client, ServerError, Streamed, StreamedCall
from shoal.help import Parser

EPILOG = """\
examples:
  shoal chat
  shoal chat --url http://gpu-box:8000 --system "Answer in one sentence." --temperature 0
  shoal chat --tool math:sqrt --tool my_tools:search
  printf 'I am Ada.\\nWho am I?\\n' | shoal chat --max-tokens 50

Ctrl-C stops an answer or a tool, Ctrl-D leaves the chat. /help lists the commands.
From a pipe, every line is a prompt in one conversation, and only the answers are printed: neither thinking nor calls.

A tool is a Python function, in a module of this folder or an installed one. The model reads its name, its docstring,
and the names and types of its parameters. Before a call runs, the chat shows it and asks. From a pipe it cannot ask:
there calls are denied, unless --allow-tools is said.
"""
# Not OpenAI's default of 1, at which small models such as the default one talk nonsense.
TEMPERATURE = 0.6


def parser() -> Parser:
    """The command line of `shoal chat`."""
    made = Parser("shoal chat", "Talk to a running server in the terminal.", EPILOG)
    made.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    made.add_argument("--model", help="default: the first that the server lists")
    made.add_argument(
        "--api-key", metavar="KEY", default=os.environ.get("OPENAI_API_KEY"), help="default: $OPENAI_API_KEY"
    )
    made.add_argument(
        "--system", metavar="TEXT", help="the system prompt, which the model reads before the conversation"
    )
    sampling = made.add_argument_group("how it answers")
    sampling.add_argument(
        "--temperature",
        type=float,
        metavar="X",
        help=f"0 always takes the likeliest token (default: the model's own, else {TEMPERATURE})",
    )
    sampling.add_argument(
        "--top-p", type=float, metavar="X", help="sample from the likeliest tokens with this total probability"
    )
    sampling.add_argument("--max-tokens", type=int, metavar="N", help="most tokens in an answer")
    sampling.add_argument(
        "--seed", type=int, metavar="N", help="the same seed gives the same answer; /retry takes the next one"
    )
    sampling.add_argument(
        "--reasoning-effort",
        metavar="LEVEL",
        choices=("none", "minimal", "low", "medium", "high"),
        help="how much a model that thinks is to think: none, minimal, low, medium or high (default: the model's own)",
    )
    tools = made.add_argument_group("tools")
    tools.add_argument(
        "--tool",
        metavar="MODULE:FUNCTION",
        action="append",
        default=[],
        help="a Python function that the model may call; may be given several times",
    )
    tools.add_argument("--allow-tools", action="store_true", help="run the model's calls without asking")
    return made


def main(argv: list[str] | None = None) -> int:
    """Chats until the input ends. Returns 0; 1 without a server, or when a prompt from a pipe gets no answer; 2 for a
    tool that is not there."""
    args = parser().parse_args(argv)
    for stream in (sys.stdin, sys.stdout, sys.stderr):  # whatever the locale, a character is no reason to end
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    named = ("temperature", "top_p", "max_tokens", "seed", "reasoning_effort")
    parameters = {name: value for name in named if (value := getattr(args, name)) is not None}
    if args.tool:
        sys.path.insert(0, os.getcwd())
    try:
        tools = Toolbox([load(where) for where in args.tool], args.allow_tools)
        with Client(args.url, args.api_key) as client:
            models = client.models()
            if args.model is None and not models:
                raise ServerError(f"{client.url} lists no model; name one with --model")
            if args.model is not None and models and args.model not in models:
                raise ServerError(f"{client.url} has no model {args.model!r}; it has {', '.join(models)}")
            model = args.model or next(iter(models))
            if "temperature" not in (models.get(model, {}).get("default_sampling") or {}):
                parameters.setdefault("temperature", TEMPERATURE)
            talk = ChatConversation(client, model, args.system, parameters, tools)
            if sys.stdin.isatty() and sys.stdout.isatty():
                ChatTerminal(talk).run()
                return 0
            return piped(talk, sys.stdin, sys.stdout.write)
    except (ServerError, ToolError) as error:
        print(f"shoal chat: {error}", file=sys.stderr)
        return 2 if isinstance(error, ToolError) else 1


def piped(talk: ChatConversation, lines: Iterable[str], write: Callable[[str], object]) -> int:
    """Reads one prompt per line and writes only the answers. Stops at the first prompt that fails. Returns the exit
    code: 0, 1 after a failure, 130 after Ctrl-C."""
    separator = ""  # between the text before calls of tools and the text after them

    def show(pieces: Iterable[Streamed]) -> None:
        nonlocal separator
        text = ""
        for text in (piece for piece in pieces if isinstance(piece, str)):
            write(separator + text)
            separator = ""
            sys.stdout.flush()
        if text and not text.endswith("\n"):
            separator = "\n"

    def deny(asked: StreamedCall) -> bool:
        print(
            f"shoal chat: {shown(asked.name, asked.arguments)} is denied; --allow-tools lets tools run", file=sys.stderr
        )
        return False

    def call(asked: StreamedCall) -> str:
        with redirect_stdout(sys.stderr):
            return talk.tools.answer(asked, deny)

    for line in lines:
        if question := line.strip():
            separator = ""
            try:
                answer = talk.ask(question, show, call)
            except ServerError as error:
                sys.stdout.flush()
                print(f"\nshoal chat: {error}", file=sys.stderr)
                return 1
            write("\n")
            if answer.finish_reason == "rounds":
                print("shoal chat: " + MANY_ROUNDS, file=sys.stderr)
            if answer.finish_reason == "stopped":
                return 130
    return 0
