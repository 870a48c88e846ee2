"""The messages of a chat, and how they are written to a file."""

from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any

from shoal.client import Answer, Client


class Conversation:
    """The messages so far. A question that gets no answer is removed again."""

    def __init__(self, client: Client, model: str, system: str | None, parameters: dict[str, Any]) -> None:
        self.client, self.model, self.parameters = client, model, parameters
        self.system = system
        self.reset()

    def reset(self) -> None:
        """Forgets everything but the system prompt."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def ask(self, question: str, show: Callable[[Iterable[str]], None]) -> Answer:
        """Sends a question and hands the pieces of the answer to `show` as they come. A KeyboardInterrupt in `show`
        stops the answer; the text so far is kept. Raises ServerError."""
        answer = Answer()
        self.messages.append({"role": "user", "content": question})
        with closing(self.client.chat(self.model, self.messages, answer, **self.parameters)) as pieces:
            try:
                show(pieces)
            except KeyboardInterrupt:
                answer.finish_reason = "stopped"
            except BaseException:
                self.messages.pop()
                raise
        if answer.text:
            self.messages.append({"role": "assistant", "content": answer.text})
        else:
            self.messages.pop()
        return answer


def transcript(messages: list[dict[str, str]], as_json: bool) -> str:
    """The conversation as a file: Markdown with a heading for each message, or OpenAI's messages as JSON."""
    if as_json:
        import json

        return json.dumps(messages, indent=2, ensure_ascii=False) + "\n"
    return "\n".join(f"## {message['role']}\n\n{message['content'].strip()}\n" for message in messages)
