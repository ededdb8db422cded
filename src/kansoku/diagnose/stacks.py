"""Stacks of all ranks: the few that do something else than the many.

Reads what py-spy, faulthandler and torch's workers dump. In synchronous training almost all ranks
stand in the same collective; a rank that reads a file, sleeps or compiles is the one waited for.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kansoku.diagnose.observation import Observation
from kansoku.model import Domain

__all__ = ["Stack", "looks_like_stacks", "outliers", "stacks_of_text"]

_SPY_FRAME = re.compile(r"^\s+([\w<>.$~:]+(?: \[[\w.-]+\])?)(?: \(([^()]*?)(?::(\d+))?\))?\s*$")
_FAULT_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+),? in (\S+)')
_THREAD = re.compile(r"^\s*(?:Current thread|Thread)\s+(\S+)(.*)$")
_PROCESS = re.compile(r"^Process (\d+):\s*(.*)$")
_RANK_WORD = re.compile(r"\b(?:global_)?rank[ =:_-]*(\d{1,6})\b", re.IGNORECASE)

_COLLECTIVE = re.compile(
    r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|barrier|broadcast|wait\b|synchronize|"
    r"nccl|gloo|c10d|distributed_c10d|_engine_run_backward|isend|irecv|batch_isend|"
    r"finalize_backward",
    re.IGNORECASE,
)
_COMPILES = re.compile(r"torch/_(?:inductor|dynamo)|triton/(?:compiler|runtime)|cpp_extension")
_DOING: tuple[tuple[str, Domain, str, re.Pattern[str]], ...] = (
    ("writes a checkpoint", Domain.STORAGE, "checkpoint",
     re.compile(
         r"checkpoint|torch[./]serialization|\bsave\b|_save_|state_dict|safetensors|fsync",
         re.IGNORECASE)),
    ("reads data", Domain.STORAGE, "data loading",
     re.compile(
         r"__getitem__|fetch|dataset|data_?loader|dataload|\bread\w*\b|\bopen\b|pread|"
         r"mmap|h5py|pyarrow|webdataset|tarfile|PIL|decode|getobject|boto|s3fs|fsspec|"
         r"listdir|glob|\bstat\b|nfs", re.IGNORECASE)),
    ("compiles", Domain.FRAMEWORK, "compilation",
     re.compile(r"inductor|dynamo|triton.*compile|cpp_extension|ninja|\bcompile\b", re.IGNORECASE)),
    ("collects garbage", Domain.APPLICATION, "garbage collection", re.compile(
        r"gc_collect|\bgc\b", re.IGNORECASE)),
    ("waits for the network", Domain.NETWORK, "ip network",
     re.compile(
         r"socket|ssl|urllib|requests|http|getaddrinfo|recv_into|connect\b|wandb|mlflow",
         re.IGNORECASE)),
    ("waits for the GPU driver", Domain.GPU_HARDWARE, "driver",
     re.compile(r"cudaMalloc|cuMem|cudaDevice|libcuda|nvidia|ioctl", re.IGNORECASE)),
    ("waits for a lock or another process", Domain.APPLICATION, "code bug",
     re.compile(r"acquire|\block\b|queue.*get|join\b|select\b|poll\b|futex|sleep", re.IGNORECASE)),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The main thread of one process, innermost frame first."""

    rank: int | None
    node: str | None
    source: str
    frames: tuple[str, ...]


def looks_like_stacks(head: str) -> bool:
    """Say whether a text is a dump of stacks."""
    if re.search(r"^Process \d+:", head, re.MULTILINE) and "Thread" in head:
        return True
    return (
        bool(re.search(r"^(?:Current thread|Thread) 0x", head, re.MULTILINE)) and 'File "' in head
    )


def stacks_of_text(
    lines: Iterable[str], *, name: str, node: str | None, rank: int | None
) -> list[Stack]:
    """Return the main thread of every process of a dump."""
    found: list[Stack] = []
    process_rank, frames, main, threads = rank, [], False, []  # type: ignore[var-annotated]
    fault = False

    def end_thread() -> None:
        nonlocal frames, main
        if frames:
            threads.append((main, tuple(frames)))
        frames, main = [], False

    def end_process() -> None:
        end_thread()
        if threads:
            # faulthandler prints the main thread last; py-spy names it.
            chosen = next((f for is_main, f in threads if is_main), None)
            chosen = chosen or (threads[-1][1] if fault else threads[0][1])
            found.append(Stack(rank=process_rank, node=node, source=name, frames=chosen))
        threads.clear()

    for line in lines:
        begins = _PROCESS.match(line)
        named = (
            None
            if begins
            else _RANK_WORD.search(line)
            if line[:1] in "=#-[" or "rank" in line[:12].lower()
            else None
        )
        if begins or named:
            end_process()
            hint = _RANK_WORD.search(begins[2]) if begins else named
            process_rank = int(hint[1]) if hint else rank
            continue
        thread = _THREAD.match(line)
        if thread is not None:
            end_thread()
            fault = fault or "most recent call first" in line
            main = "MainThread" in line
            continue
        spy, other = _SPY_FRAME.match(line), _FAULT_FRAME.match(line)
        if other is not None:
            frames.append(f"{other[3]} ({other[1]})")
        elif spy is not None and (spy[2] or "[" in (spy[1] or "")):
            frames.append(f"{spy[1]} ({spy[2] or ''})")
    end_process()
    return found


def _place(stack: Stack) -> str:
    """Return what distinguishes a stack: whether it stands in a collective, else its own code."""
    if any(_COLLECTIVE.search(frame) for frame in stack.frames[:8]):
        inner = next(f for f in stack.frames[:8] if _COLLECTIVE.search(f))
        return f"collective {inner.split(' ')[0]}"
    return stack.frames[0]


def _doing(stack: Stack) -> tuple[str, Domain, str]:
    if any(_COMPILES.search(frame) for frame in stack.frames[:12]):
        # Whatever it does at the moment, it does it for the compiler.
        return "compiles", Domain.FRAMEWORK, "compilation"
    for frame in stack.frames[:12]:
        for what, domain, component, pattern in _DOING:
            if pattern.search(frame):
                return what, domain, component
    return "runs its own code", Domain.APPLICATION, "code bug"


def outliers(stacks: Sequence[Stack]) -> list[Observation]:
    """Return the ranks whose stack differs from nearly all others'."""
    if len(stacks) < 2:
        return []
    places: dict[str, list[Stack]] = defaultdict(list)
    for stack in stacks:
        places[_place(stack)].append(stack)
    waiting = [
        s for place, items in places.items() if place.startswith("collective") for s in items
    ]
    kinds = Counter({place: len(items) for place, items in places.items()})
    usual, many = kinds.most_common(1)[0]
    if len(waiting) * 2 >= len(stacks):
        odd = [s for s in stacks if s not in waiting]
        if not odd:
            # All wait, but not for the same: the few wait for something the many never enter.
            odd = [s for place, items in places.items() if place != usual for s in items]
            odd = odd if many * 3 >= len(stacks) * 2 else []
    else:
        odd = [s for place, items in places.items() if place != usual for s in items]
        odd = odd if many * 4 >= len(stacks) * 3 else []
    if len(odd) > max(1, len(stacks) // 3):
        return []
    found = []
    for stack in odd:
        waits = _place(stack).startswith("collective")
        what, domain, component = (
            ("waits in another collective", Domain.APPLICATION, "divergent collectives")
            if waits else _doing(stack)
        )  # fmt: skip
        found.append(
            Observation(
                rule="stack.outlier",
                text=f"{what}: {stack.frames[0]}; {many} of {len(stacks)} stacks stand in "
                f"{usual.removeprefix('collective ')}",
                source=stack.source,
                kind="trace",
                domain=domain,
                component=component,
                role="either",
                strength=0.75,
                meaning="the others wait for the one that does something else",
                action="look at what this rank does, its files and its node",
                node=stack.node,
                rank=stack.rank,
            )
        )
    return found
