"""The messages of a chat, with their calls of tools, and how they are written to a file."""

import json
import re
from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any

from shoal.chat_tools import DENIED, Toolbox, shown
from shoal.client import THINKING_NAMES, ChatAnswer, Client, Streamed, StreamedCall

MAX_ROUNDS = 16  # of calls in one turn
MANY_ROUNDS = f"no answer after {MAX_ROUNDS} rounds of calls"
INTERRUPTED = "error: the user stopped this call"


def denied(call: StreamedCall) -> str:
    """The result of a call where no tools run."""
    return DENIED


class ChatConversation:
    """The messages so far. A question that gets no answer is removed again.

    A turn is a question with all that follows it: calls of tools with their results, and an answer. No call is without
    its result. `question` is the last one, kept or not; `thinking` is what the model thought in answering it.
    """

    def __init__(
        self, client: Client, model: str, system: str | None, parameters: dict[str, Any], tools: Toolbox | None = None
    ) -> None:
        self.client, self.model, self.parameters = client, model, parameters
        self.system = system
        self.tools = tools or Toolbox()
        self.question: str | None = None
        self._turn = 0  # where in the messages the last turn begins, or would
        self.reset()

    def reset(self) -> None:
        """Forgets everything but the system prompt."""
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        self.thinking = ""
        self._find_last()

    def ask(
        self,
        question: str,
        show: Callable[[Iterable[Streamed]], None],
        call: Callable[[StreamedCall], str] = denied,
        again: bool = False,
    ) -> ChatAnswer:
        """Sends a question and hands the pieces of the answer to `show` as they come. While the model calls tools,
        `call` gives their results, and the answer goes on. With `again`, the question replaces the last one; if it gets
        no answer, the replaced turn stays.

        A KeyboardInterrupt in `show` or `call` stops the answer; the text so far is kept. Returns the last answer of
        the turn. Its `finish_reason` is "stopped" after a KeyboardInterrupt, and "rounds" if the model calls tools
        forever. Raises ServerError.
        """
        before = self.messages
        self._turn = self._turn if again else len(before)
        self.question, self.thinking = question, ""
        self.messages = [*before[: self._turn], {"role": "user", "content": question}]
        try:
            answer = self._answered(show, call)
        except BaseException:
            self.messages = before
            raise
        if self.messages[-1]["role"] == "user":
            self.messages = before
        return answer

    def retry(
        self, show: Callable[[Iterable[Streamed]], None], call: Callable[[StreamedCall], str] = denied
    ) -> ChatAnswer:
        """Asks the last question again, with the next seed where there is one. Raises ServerError."""
        assert self.question is not None
        if "seed" in self.parameters:
            self.parameters["seed"] += 1
        return self.ask(self.question, show, call, again=True)

    def undo(self) -> bool:
        """Removes the last turn. Returns false if there is none."""
        self._find_last()
        if self.question is None:
            return False
        del self.messages[self._turn :]
        self.thinking = ""
        self._find_last()
        return True

    def _find_last(self) -> None:
        users = [number for number, message in enumerate(self.messages) if message["role"] == "user"]
        self._turn = users[-1] if users else len(self.messages)
        self.question = self.messages[self._turn]["content"] if users else None

    def _answered(self, show: Callable[[Iterable[Streamed]], None], call: Callable[[StreamedCall], str]) -> ChatAnswer:
        for _ in range(MAX_ROUNDS):
            answer = self._round(show)
            if not answer.calls:
                return answer
            if not self._called(answer.calls, call):
                answer.finish_reason = "stopped"
                return answer
        answer.finish_reason = "rounds"
        return answer

    def _round(self, show: Callable[[Iterable[Streamed]], None]) -> ChatAnswer:
        """Sends one request. Its answer becomes a message unless it has neither text nor calls."""
        answer = ChatAnswer()
        parameters = self.parameters | ({"tools": self.tools.described()} if self.tools.tools else {})
        with closing(self.client.chat(self.model, self._sent(), answer, **parameters)) as pieces:
            try:
                show(pieces)
            except KeyboardInterrupt:
                answer.finish_reason = "stopped"
                answer.calls = []  # the last may lack a part
        self.thinking = "\n\n".join(part for part in (self.thinking, answer.thinking.strip()) if part)
        if answer.text or answer.calls:
            message: dict[str, Any] = {"role": "assistant", "content": answer.text or None}
            if answer.thinking:
                message[answer.thinking_name] = answer.thinking
            if answer.calls:
                message["tool_calls"] = [
                    {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
                    for one in answer.calls
                ]
            self.messages.append(message)
        return answer

    def _called(self, calls: list[StreamedCall], call: Callable[[StreamedCall], str]) -> bool:
        """Adds the results of calls. Returns false if a KeyboardInterrupt stopped one: it and those after it get an
        error for their result."""
        stopped = False
        for one in calls:
            try:
                result = INTERRUPTED if stopped else call(one)
            except KeyboardInterrupt:
                stopped, result = True, INTERRUPTED
            self.messages.append({"role": "tool", "tool_call_id": one.id, "content": result})
        return not stopped

    def _sent(self) -> list[dict[str, Any]]:
        """The messages as the model reads them: with the thinking of this turn, which its calls of tools follow from,
        without that of others."""
        old = ({key: said for key, said in message.items() if key not in THINKING_NAMES} for message in self.messages)
        return [*list(old)[: self._turn], *self.messages[self._turn :]]


def transcript(messages: list[dict[str, Any]], as_json: bool) -> str:
    """The conversation as a file: Markdown with a heading for each message, or OpenAI's messages as JSON."""
    if as_json:
        return json.dumps(messages, indent=2, ensure_ascii=False) + "\n"
    names: dict[str, str] = {}
    parts = []
    for message in messages:
        heading, text = message["role"], (message["content"] or "").strip()
        if heading == "tool":
            heading, text = f"tool {names.get(message['tool_call_id'], '')}".strip(), _fenced(text)
        thinking = next((message[name].strip() for name in THINKING_NAMES if message.get(name)), "")
        thought = f"<details><summary>thinking</summary>\n\n{thinking}\n\n</details>" if thinking else ""
        calls = [call["function"] for call in message.get("tool_calls", [])]
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", [])}
        called = _fenced("\n".join(shown(call["name"], call["arguments"]) for call in calls)) if calls else ""
        parts.append("\n\n".join(part for part in (f"## {heading}", thought, text, called) if part) + "\n")
    return "\n".join(parts)


def _fenced(text: str) -> str:
    """`text` as a block of code, whatever fences are in it."""
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 0)
    return f"{fence}\n{text}\n{fence}"
