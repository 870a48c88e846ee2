"""Ten workloads of programs, each written twice: in the language, and as plain calls of OpenAI's protocol.

The kinds are those of the SGLang paper (arXiv 2312.07104, section 6). Texts are made up, of words from a fixed list:
their lengths can be chosen, and no data set is needed. Both forms make the same calls with the same parameters: what
a programmer would write with the `openai` package. Two more are run by name: `agents` waits for tools, and `forks_16`
is `forks` with 16 judgements instead of 4.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import shoal
from bench.programs.raw_client import RawClient

WORDS = (
    "water fish light stone river green small house people travel under morning answer paper music winter garden "
    "letter number window simple market early bridge forest silver question yellow summer doctor table city"
).split()
GRADES = ["A", "B", "C", "D"]


def text(seed: str, words: int) -> str:
    """Made-up prose of `words` words; the same for the same seed."""
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(words))


@dataclass(frozen=True)
class ProgramWorkload:
    """A workload. `program` in the language and `raw` as plain calls return the same kind of answer; `arguments` makes
    those of program number i. `scale` is the length of its shared texts, in words."""

    name: str
    program: Any
    raw: Callable[..., Awaitable[Any]]
    arguments: Callable[[int, int], dict[str, Any]]


# ---------------------------------------------------------------- few-shot multiple choice (MMLU)

SHOTS = 5


def _shots(scale: int) -> str:
    return "".join(
        f"Question: {text(f'shot {i}', scale // SHOTS)}?\nA. {text(f'a{i}', 4)}\nB. {text(f'b{i}', 4)}\nAnswer: A\n\n"
        for i in range(SHOTS)
    )


@shoal.function
def multiple_choice(s: Any, shots: str, question: str) -> Any:
    s += shots + "Question: " + question + "?\nAnswer: " + shoal.select("answer", GRADES)
    return s["answer"]


async def multiple_choice_raw(client: RawClient, shots: str, question: str) -> Any:
    return await client.select(shots + "Question: " + question + "?\nAnswer: ", GRADES)


# ---------------------------------------------------------------- likeliest ending (HellaSwag)


@shoal.function
def ending(s: Any, shots: str, context: str, endings: Sequence[str]) -> Any:
    s += shots + context + shoal.select("ending", endings)
    return s["ending"]


async def ending_raw(client: RawClient, shots: str, context: str, endings: Sequence[str]) -> Any:
    return await client.select(shots + context, endings)


# ---------------------------------------------------------------- judging along dimensions, and a summary (forks)

DIMENSIONS = (
    *("clarity", "style", "evidence", "order", "grammar", "rhythm", "wit", "depth"),
    *("tone", "focus", "length", "opening", "ending", "sources", "balance", "title"),
)


@shoal.function
def judge(s: Any, essay: str, dimensions: int = 4) -> Any:
    s += "Judge this essay.\n\n" + essay + "\n\n"
    names = DIMENSIONS[:dimensions]
    forks = s.fork(len(names))
    forks += lambda i: f"The {names[i]} of the essay:" + shoal.gen("judgement", max_tokens=16, ignore_eos=True)
    forks.join()
    s += "".join(f"The {name}:{said}\n" for name, said in zip(names, s["judgement"], strict=True))
    s += "In sum:" + shoal.gen("sum", max_tokens=16, ignore_eos=True)
    return s["sum"]


async def judge_raw(client: RawClient, essay: str, dimensions: int = 4) -> Any:
    start = "Judge this essay.\n\n" + essay + "\n\n"
    names = DIMENSIONS[:dimensions]
    judgements = await client.all(
        *(client.complete(start + f"The {name} of the essay:", max_tokens=16) for name in names)
    )
    start += "".join(f"The {name}:{said}\n" for name, said in zip(names, judgements, strict=True))
    return await client.complete(start + "In sum:", max_tokens=16)


# ---------------------------------------------------------------- an agent with a tool (ReAct)

TURNS = 3


@shoal.function
def agent(s: Any, examples: str, task: str) -> Any:
    s += examples + "Task: " + task + "\n"
    for turn in range(TURNS):
        s += "Thought:" + shoal.gen("thought", max_tokens=12, ignore_eos=True) + "\nAction: "
        s += shoal.select("action", ["search", "look", "finish"]) + "\n"
        s += "Observation: " + text(f"{turn} {s['action']}", 24) + "\n"
    return s["action"]


async def agent_raw(client: RawClient, examples: str, task: str) -> Any:
    so_far = examples + "Task: " + task + "\n"
    action = ""
    for turn in range(TURNS):
        so_far += "Thought:"
        so_far += await client.complete(so_far, max_tokens=12) + "\nAction: "
        action = await client.select(so_far, ["search", "look", "finish"])
        so_far += action + "\nObservation: " + text(f"{turn} {action}", 24) + "\n"
    return action


# ---------------------------------------------------------------- tree of thought


@shoal.function
def tree(s: Any, question: str) -> Any:
    s += "Question: " + question + "\n"
    plans = s.fork(2)
    plans += lambda i: f"Plan {i}:" + shoal.gen("plan", max_tokens=12, ignore_eos=True) + "\n"
    solutions = []
    for plan in plans:
        leaves = plan.fork(2)
        leaves += lambda i: f"Solution {i}:" + shoal.gen("solution", max_tokens=12, ignore_eos=True)
        solutions += list(leaves)
    s += "".join(f"({i}) {leaf['solution']}\n" for i, leaf in enumerate(solutions))
    s += "The best is (" + shoal.select("best", ["0", "1", "2", "3"])
    return s["best"]


async def tree_raw(client: RawClient, question: str) -> Any:
    start = "Question: " + question + "\n"

    async def solve(i: int) -> list[str]:
        plan = start + f"Plan {i}:"
        plan += await client.complete(plan, max_tokens=12) + "\n"
        return await client.all(*(client.complete(plan + f"Solution {j}:", max_tokens=12) for j in range(2)))

    solutions = [solution for some in await client.all(solve(0), solve(1)) for solution in some]
    start += "".join(f"({i}) {solution}\n" for i, solution in enumerate(solutions))
    return await client.select(start + "The best is (", ["0", "1", "2", "3"])


# ---------------------------------------------------------------- skeleton of thought


@shoal.function
def skeleton(s: Any, topic: str) -> Any:
    s += "Tips for " + topic + ":\n"
    for i in range(3):
        s += f"{i}." + shoal.gen("tip", max_tokens=6, ignore_eos=True) + "\n"
    forks = s.fork(3)
    forks += lambda i: f"Tip {i} in detail:" + shoal.gen("detail", max_tokens=16, ignore_eos=True)
    forks.join()
    return s["detail"]


async def skeleton_raw(client: RawClient, topic: str) -> Any:
    so_far = "Tips for " + topic + ":\n"
    for i in range(3):
        so_far += f"{i}."
        so_far += await client.complete(so_far, max_tokens=6) + "\n"
    return await client.all(*(client.complete(so_far + f"Tip {i} in detail:", max_tokens=16) for i in range(3)))


# ---------------------------------------------------------------- a JSON object of fixed form

FIELDS = ("name", "house", "wand", "patron")


@shoal.function
def fields(s: Any, document: str) -> Any:
    s += document + "\nThe facts as JSON:\n{"
    for name in FIELDS:
        s += f'"{name}": "' + shoal.gen(name, max_tokens=6, ignore_eos=True) + '", '
    s += '"grade": "' + shoal.select("grade", GRADES) + '"}'
    return s["grade"]


async def fields_raw(client: RawClient, document: str) -> Any:
    so_far = document + "\nThe facts as JSON:\n{"
    for name in FIELDS:
        so_far += f'"{name}": "'
        so_far += await client.complete(so_far, max_tokens=6) + '", '
    return await client.select(so_far + '"grade": "', GRADES)


# ---------------------------------------------------------------- a conversation


@shoal.function
def conversation(s: Any, rules: str, questions: Sequence[str]) -> Any:
    s += rules + "\n"
    for i, question in enumerate(questions):
        s += "User: " + question + "\nAssistant:" + shoal.gen(f"answer_{i}", max_tokens=12, ignore_eos=True) + "\n"
    return s[f"answer_{len(questions) - 1}"]


async def conversation_raw(client: RawClient, rules: str, questions: Sequence[str]) -> Any:
    so_far, answer = rules + "\n", ""
    for question in questions:
        so_far += "User: " + question + "\nAssistant:"
        answer = await client.complete(so_far, max_tokens=12)
        so_far += answer + "\n"
    return answer


# ---------------------------------------------------------------- questions about documents


@shoal.function
def documents(s: Any, context: str, question: str) -> Any:
    s += shoal.unordered("Question: " + question + "\n", "Context: " + context + "\n")
    s += "Answer:" + shoal.gen("answer", max_tokens=8, ignore_eos=True)
    return s["answer"]


async def documents_raw(client: RawClient, context: str, question: str) -> Any:
    prompt = "Context: " + context + "\n" + "Question: " + question + "\nAnswer:"  # the order that shares most
    return await client.complete(prompt, max_tokens=8)


# ---------------------------------------------------------------- several answers, and a vote (self-consistency)


@shoal.function
def vote(s: Any, shots: str, question: str) -> Any:
    s += shots + "Question: " + question + "?\n"
    forks = s.fork(4)
    forks += lambda i: f"Attempt {i}:" + shoal.gen("attempt", max_tokens=12, ignore_eos=True)
    forks += "\nSo the answer is " + shoal.select("answer", GRADES)
    forks.join()
    return s["answer"]


async def vote_raw(client: RawClient, shots: str, question: str) -> Any:
    start = shots + "Question: " + question + "?\n"

    async def attempt(i: int) -> str:
        own = start + f"Attempt {i}:"
        own += await client.complete(own, max_tokens=12)
        return await client.select(own + "\nSo the answer is ", GRADES)

    return await client.all(*(attempt(i) for i in range(4)))


# ---------------------------------------------------------------- agents with slow tools, whose KV does not all fit

ROUNDS = 6
TOOL_S = 0.5, 2.0  # the shortest and the longest time of a tool


def _tool_s(task: str, turn: int) -> float:
    """The seconds that a tool takes."""
    return random.Random(f"{task} {turn}").uniform(*TOOL_S)


def _found(task: str, turn: int) -> str:
    """The text that a tool finds."""
    return text(f"{task} {turn}", 60)


def _call_tool(task: str, turn: int, thought: str) -> str:
    time.sleep(_tool_s(task, turn))
    return _found(task, turn)


@shoal.function
def tool_user(s: Any, task: str) -> Any:
    s += "Task: " + task + "\n"
    for turn in range(ROUNDS):
        s += "Thought:" + shoal.gen("thought", max_tokens=32, ignore_eos=True) + "\nObservation: "
        s += shoal.in_thread(_call_tool, task, turn, s["thought"]) + "\n"
    s += "The answer is" + shoal.gen("answer", max_tokens=32, ignore_eos=True)
    return s["answer"]


async def tool_user_raw(client: RawClient, task: str) -> Any:
    so_far = "Task: " + task + "\n"
    for turn in range(ROUNDS):
        so_far += "Thought:"
        so_far += await client.complete(so_far, max_tokens=32) + "\nObservation: "
        await asyncio.sleep(_tool_s(task, turn))
        so_far += _found(task, turn) + "\n"
    return await client.complete(so_far + "The answer is", max_tokens=32)


AGENTS = ProgramWorkload("agents", tool_user, tool_user_raw, lambda i, n: {"task": text(f"task {i}", n)})
MANY_FORKS = ProgramWorkload(
    "forks_16",
    judge.bind(dimensions=16),
    partial(judge_raw, dimensions=16),
    lambda i, n: {"essay": text(f"essay {i}", n)},
)
WORKLOADS = {
    workload.name: workload
    for workload in (
        ProgramWorkload(
            "select",
            multiple_choice,
            multiple_choice_raw,
            lambda i, n: {"shots": _shots(n), "question": text(f"q{i}", 20)},
        ),
        ProgramWorkload(
            "hellaswag",
            ending,
            ending_raw,
            lambda i, n: {
                "shots": text("shots", n),
                "context": text(f"c{i}", 30),
                "endings": [" " + text(f"e{i}{j}", 12) for j in range(4)],
            },
        ),
        ProgramWorkload("forks", judge, judge_raw, lambda i, n: {"essay": text(f"essay {i}", n)}),
        ProgramWorkload("react", agent, agent_raw, lambda i, n: {"examples": text("x", n), "task": text(f"t{i}", 12)}),
        ProgramWorkload("tree", tree, tree_raw, lambda i, n: {"question": text(f"q{i}", n)}),
        ProgramWorkload("skeleton", skeleton, skeleton_raw, lambda i, n: {"topic": text(f"t{i}", n)}),
        ProgramWorkload("json", fields, fields_raw, lambda i, n: {"document": text(f"d{i}", n)}),
        ProgramWorkload(
            "chat",
            conversation,
            conversation_raw,
            lambda i, n: {"rules": text("rules", n), "questions": [text(f"q{i}{j}", 10) for j in range(3)]},
        ),
        ProgramWorkload(
            "rag",
            documents,
            documents_raw,
            lambda i, n: {"context": text(f"d{i % 3}", n), "question": text(f"q{i}", 10)},
        ),
        ProgramWorkload("vote", vote, vote_raw, lambda i, n: {"shots": text("s", n), "question": text(f"q{i}", 20)}),
    )
}
