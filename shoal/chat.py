"""`shoal chat`: a conversation with a running server, in the terminal, or through a pipe for scripts."""

import os
import sys
from collections.abc import Callable, Iterable

from shoal.chat_conversation import Conversation
from shoal.chat_terminal import ChatTerminal
from shoal.client import Client, ServerError
from shoal.help import Parser

EPILOG = """\
examples:
  shoal chat
  shoal chat --url http://gpu-box:8000 --system "Answer in one sentence." --temperature 0
  printf 'I am Ada.\\nWho am I?\\n' | shoal chat --max-tokens 50

Ctrl-C stops an answer, Ctrl-D leaves the chat. /help lists the commands.
From a pipe, every line is a prompt in one conversation, and only the answers are printed.
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
    sampling.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    return made


def main(argv: list[str] | None = None) -> int:
    """Chats until the input ends. Returns 0; 1 without a server, or when a prompt from a pipe gets no answer."""
    args = parser().parse_args(argv)
    named = ("temperature", "top_p", "max_tokens", "seed")
    parameters = {name: value for name in named if (value := getattr(args, name)) is not None}
    try:
        with Client(args.url, args.api_key) as client:
            models = client.models()
            if args.model is None and not models:
                raise ServerError(f"{client.url} lists no model; name one with --model")
            if args.model is not None and models and args.model not in models:
                raise ServerError(f"{client.url} has no model {args.model!r}; it has {', '.join(models)}")
            model = args.model or next(iter(models))
            if "temperature" not in (models.get(model, {}).get("default_sampling") or {}):
                parameters.setdefault("temperature", TEMPERATURE)
            talk = Conversation(client, model, args.system, parameters)
            if sys.stdin.isatty() and sys.stdout.isatty():
                ChatTerminal(talk).run()
                return 0
            return piped(talk, sys.stdin, sys.stdout.write)
    except ServerError as error:
        print(f"shoal chat: {error}", file=sys.stderr)
        return 1


def piped(talk: Conversation, lines: Iterable[str], write: Callable[[str], object]) -> int:
    """Reads one prompt per line and writes only the answers. Stops at the first prompt that fails. Returns the exit
    code: 0, 1 after a failure, 130 after Ctrl-C."""

    def show(pieces: Iterable[str]) -> None:
        for piece in pieces:
            write(piece)
            sys.stdout.flush()

    for line in lines:
        if question := line.strip():
            try:
                answer = talk.ask(question, show)
            except ServerError as error:
                sys.stdout.flush()
                print(f"\nshoal chat: {error}", file=sys.stderr)
                return 1
            write("\n")
            if answer.finish_reason == "stopped":
                return 130
    return 0
