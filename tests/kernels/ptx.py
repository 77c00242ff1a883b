"""Reading the PTX of one kernel: what of it runs before it waits for the kernels before it (`kernels.gpu.launch`)."""

import re
from dataclasses import dataclass

WAIT, LAUNCH = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
UNKNOWN = "?"
_PREDICATE = re.compile(r"@!?%\w+\s+")
_WRITE = re.compile(r"(st|red|atom)\.\S*global|cp\.\S*global\.shared")
_READ = re.compile(r"ld\.\S*global")
# An instruction writes its first operand, a register or several in braces. No address goes through memory.
_RESULT = re.compile(r"\S+\s+(\{[^}]*\}|[^,]*),(.*)")
_MEMORY = re.compile(r"(ld|st|red|atom|cp)\.(?!param)")
_REGISTER = re.compile(r"%\w+")
_COPY = re.compile(r"cp\.async\S*\.shared\S*\.global")


@dataclass(frozen=True, slots=True)
class DependentLaunch:
    """``waits`` and ``launches``: how often either instruction stands in the text. The rest is about what can be
    reached from the start of a program without a wait: its returns, its writes to global memory, and the numbers of the
    parameters that its loads from there take their addresses from (`UNKNOWN` where that cannot be told)."""

    waits: int
    launches: int
    returns_before: int
    writes_before: int
    reads_before: tuple[int | str, ...]


def dependent_launch(ptx: str) -> DependentLaunch:
    """Of the PTX of a kernel. Raises `ValueError` for a jump whose targets are not in the text."""
    body = instructions(ptx)
    before = [body[number] for number in _reached_without_wait(body)]
    operations = [_PREDICATE.sub("", instruction) for instruction in before]
    return DependentLaunch(
        waits=sum(WAIT in instruction for instruction in body),
        launches=sum(LAUNCH in instruction for instruction in body),
        returns_before=sum(_ends(operation) for operation in operations),
        writes_before=sum(_WRITE.match(operation) is not None for operation in operations),
        reads_before=_parameters_read(operations),
    )


def instructions(ptx: str) -> list[str]:
    """Instructions and labels ("name:") of the kernel's body, without comments, directives and semicolons."""
    body = ptx[ptx.index("{", ptx.index(".entry")) + 1 :]
    found, begun = [], ""
    for line in body.splitlines():
        line = line.split("//")[0].strip()
        if line.startswith(".loc"):  # alone among the directives it has no semicolon
            continue
        if line == "}" and not begun:
            break
        if re.fullmatch(r"[\w$]+:", line):
            found.append(line)
            continue
        begun = f"{begun} {line}".strip()
        while ";" in begun:
            instruction, begun = (part.strip() for part in begun.split(";", 1))
            if not instruction.startswith("."):
                found.append(instruction)
    return found


def _reached_without_wait(body: list[str]) -> list[int]:
    labels = {line[:-1]: number for number, line in enumerate(body) if line.endswith(":")}
    reached: set[int] = set()
    following = [0]
    while following:
        number = following.pop()
        if number in reached or number >= len(body):
            continue
        operation = _PREDICATE.sub("", body[number])
        if operation == WAIT and operation == body[number]:
            continue
        reached.add(number)
        if operation.startswith("brx"):
            raise ValueError(f"a jump to any of several places: {operation}")
        jumps = operation.startswith("bra")
        if jumps:
            following.append(labels[operation.split()[-1]])
        if operation != body[number] or not (jumps or _ends(operation)):
            following.append(number + 1)
    return sorted(reached)


def _ends(operation: str) -> bool:
    return operation in ("ret", "exit")


def _parameters_read(operations: list[str]) -> tuple[int | str, ...]:
    """The parameters in the addresses of all loads; what was loaded from memory itself counts as an offset."""
    derived: dict[str, set[int]] = {}

    def parameters(text: str) -> set[int]:
        found = {int(number) for number in re.findall(r"_param_(\d+)", text)}
        return found.union(*(derived.get(register, set()) for register in _REGISTER.findall(text)))

    known = -1
    while known != (known := sum(map(len, derived.values()))):  # until a pass over all of them adds nothing
        for operation in operations:
            moved = _RESULT.match(operation)
            if moved and not _MEMORY.match(operation):
                for register in _REGISTER.findall(moved[1]):
                    derived.setdefault(register, set()).update(parameters(moved[2]))
    found: set[int | str] = set()
    for operation in operations:
        if _READ.match(operation) or _COPY.match(operation):
            address = re.findall(r"\[([^]]*)\]", operation)[1 if _COPY.match(operation) else 0]
            found.update(parameters(address) or [UNKNOWN])
    return tuple(sorted(found, key=str))
