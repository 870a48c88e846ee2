"""The field `program` of a request, read: the branches that it continues, and what each of them gets."""

from collections.abc import Sequence
from dataclasses import dataclass

from router.programs import BranchCall, BranchUnknown, Held, Programs
from router.wire.errors import invalid, program_unknown
from router.wire.requests import CompletionRequest, ProgramCall, ProgramFork
from worker.messages import Lease


@dataclass(frozen=True)
class ContinuedBranch:
    """A branch that a request continues. `text`: what follows what the branch holds."""

    call: BranchCall
    held: Held
    text: str


def program_key(tenant: str, program_id: str) -> str:
    """The program's name in the router: clients with different keys never share a program."""
    return f"{tenant}/{program_id}"


def branch_call(call: ProgramCall | None, tenant: str) -> BranchCall | None:
    """A request as a part of its program. Raises ApiError (400) for one of several branches."""
    if call is None:
        return None
    if call.forks is not None:
        raise invalid("Only completions have forks: send a request for each branch.", "program.forks")
    return _branch_call(call, _named(call), tenant, call.then, call.remaining)


def held_branch(programs: Programs, call: ProgramCall, tenant: str, branch: str | None = None) -> Held:
    """A branch and its text, by default the one of `call`. Raises ApiError (409) if that is not known here."""
    name = _named(call) if branch is None else branch
    try:
        return programs.look(program_key(tenant, call.id), name, call.parent, bool(call.continues), call.held)
    except BranchUnknown as error:
        raise program_unknown(str(error)) from None


def continued_branches(programs: Programs, request: CompletionRequest, tenant: str) -> list[ContinuedBranch]:
    """The branches that a request for completions continues: one, or its forks. Raises ApiError."""
    call, prompt = request.program, request.prompt
    if call is None:
        return []
    if not isinstance(prompt, str):
        raise invalid("With 'program', 'prompt' must be one text.", "prompt")
    if (request.n or 1) != 1:
        raise invalid("With 'program', 'n' must be 1: a branch has one text. Fork branches by 'program.parent'.", "n")
    if request.echo:
        raise invalid("With 'program', 'echo' must be false.", "echo")
    if call.forks is None:
        one = _branch_call(call, _named(call), tenant, call.then, call.remaining)
        return [ContinuedBranch(one, held_branch(programs, call, tenant), prompt)]
    _check_forks(call, call.forks)
    return [
        ContinuedBranch(
            _branch_call(call, fork.branch, tenant, fork.then, fork.remaining),
            held_branch(programs, call, tenant, fork.branch),
            prompt + fork.prompt,
        )
        for fork in call.forks
    ]


def _check_forks(call: ProgramCall, forks: Sequence[ProgramFork]) -> None:
    for field in ("branch", "then", "remaining"):
        if getattr(call, field) is not None:
            raise invalid(f"With 'program.forks', each fork has its own {field!r}.", f"program.{field}")
    if call.continues and call.parent is None:
        raise invalid("Forks continue their parent: send 'program.parent', too.", "program.parent")
    names = [fork.branch for fork in forks]
    if len(set(names)) < len(names):
        raise invalid("Two forks have the same 'branch'.", "program.forks")


def _named(call: ProgramCall) -> str:
    if call.branch is None:
        raise invalid("'program' needs a 'branch', or 'forks'.", "program.branch")
    return call.branch


def _branch_call(call: ProgramCall, branch: str, tenant: str, then: str | None, remaining: int | None) -> BranchCall:
    lease = Lease(program_key(tenant, call.id), branch, call.lease_s or 0.0)
    return BranchCall(lease, call.parent, then, remaining, call.deadline_s)
