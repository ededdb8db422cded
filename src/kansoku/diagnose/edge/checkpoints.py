"""Find checkpoints below a folder and say which are whole, without loading any.

Known are files of torch.save, safetensors, folders of torch's distributed checkpoint, of Hugging
Face's Trainer, and folders of such files named after a step (Megatron, DeepSpeed). Nothing of a
checkpoint is executed: distributed metadata is unpickled with every class replaced by an inert one.
"""

import io
import json
import os
import pickle
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from kansoku.diagnose.checkpoints import Checkpoint

__all__ = ["find_checkpoints", "set_aside"]

_WEIGHTS = {".pt", ".pth", ".ckpt", ".safetensors"}
_OLD_NAMES = "pytorch_model"
_DRAFT = re.compile(r"(?:^|[._-])(?:tmp|temp|partial|part|draft|writing)(?:[._-]|$)", re.IGNORECASE)
_STEP = re.compile(
    r"(?:checkpoint|ckpt|global[_-]?step|step|iteration|iter)[-_=]?0*(\d{1,12})", re.IGNORECASE
)
_ASIDE = ".incomplete"
_MARKERS = ("latest_checkpointed_iteration.txt", "latest")
_MOST_ENTRIES = 20_000
_DEEPEST = 4
_LARGEST_METADATA_BYTES = 512 << 20
_LARGEST_HEADER_BYTES = 256 << 20


class _Inert:
    """Stands for every class and function that a pickle names; keeps plain attributes alone."""

    def __new__(cls, *_args: object, **_words: object) -> Self:
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    def __setitem__(self, key: object, value: object) -> None: ...

    def append(self, value: object) -> None:
        """Take an item of a list."""


class _Locked(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:  # noqa: ARG002 - its signature
        return _Inert

    def persistent_load(self, pid: object) -> None:  # noqa: ARG002 - the same
        return None


def _torch_problem(path: Path) -> str | None:
    """Say why a file of torch.save is not whole; its old format ends without a mark."""
    with path.open("rb") as file:
        start = file.read(4)
    if not start:
        return "empty"
    if start[:1] == b"\x80":
        return None
    if start != b"PK\x03\x04":
        return "not a file of torch.save"
    try:
        # The central directory stands at the end: a file that was cut off has none.
        with zipfile.ZipFile(path) as archive:
            if not archive.namelist():
                return "it holds nothing"
    except (zipfile.BadZipFile, ValueError, EOFError):
        return "cut off: its end is missing"
    return None


def _safetensors_problem(path: Path) -> str | None:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _LARGEST_HEADER_BYTES):
            return "cut off within its header"
        try:
            header = json.loads(file.read(length))
            ends = [v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"]
            wanted = 8 + length + max(ends, default=0)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            return "its header is no safetensors header"
    return None if size >= wanted else f"cut off: {size} of {wanted} bytes"


def _file_problem(path: Path) -> str | None:
    problem = _safetensors_problem if path.suffix == ".safetensors" else _torch_problem
    try:
        found = problem(path)
    except OSError as error:
        return error.strerror or str(error)
    return None if found is None else f"{path.name}: {found}"


def _needed(metadata: Path) -> dict[str, int]:
    """Return file to the bytes that distributed metadata says it holds; raise for no metadata."""
    loaded = _Locked(io.BytesIO(metadata.read_bytes())).load()
    stored = vars(loaded)["storage_data"]
    wanted: dict[str, int] = {}
    for info in stored.values():
        facts = vars(info)
        name, end = str(facts["relative_path"]), int(facts["offset"]) + int(facts["length"])
        wanted[name] = max(wanted.get(name, 0), end)
    return wanted


def _distributed_problem(folder: Path) -> str | None:
    metadata = folder / ".metadata"
    if not metadata.is_file():
        return ".metadata is missing, which is written last"
    if metadata.stat().st_size > _LARGEST_METADATA_BYTES:
        return None
    try:
        wanted = _needed(metadata)
    except (OSError, pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError,
            AttributeError, IndexError, MemoryError):  # fmt: skip
        return ".metadata is damaged"
    for name, size in sorted(wanted.items()):
        try:
            there = (folder / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if there < size:
            return f"{name} is cut off: {there} of {size} bytes"
    return None


def _huggingface_problem(folder: Path) -> str | None:
    trainers = re.fullmatch(r"checkpoint-\d+", folder.name)
    if trainers and not (folder / "trainer_state.json").is_file():
        return "trainer_state.json is missing, which is written last"
    for index in sorted(folder.glob("*.index.json")):
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return f"{index.name} is damaged"
        for name in sorted(map(str, names)):
            if not (folder / name).is_file():
                return f"{name} is missing"
    return _files_problem(folder)


def _is_weights(name: str) -> bool:
    """Say whether a file's name is that of weights; ``.bin`` alone may be anything."""
    return Path(name).suffix in _WEIGHTS or (name.startswith(_OLD_NAMES) and name.endswith(".bin"))


def _begins_as_weights(path: Path) -> bool:
    """Say whether a file begins as torch.save's old (pickle) or new (zip) format does."""
    with path.open("rb") as file:
        start = file.read(4)
    return start[:1] == b"\x80" or start == b"PK\x03\x04"


def _weights(folder: Path) -> list[Path]:
    return [p for p in sorted(folder.rglob("*")) if _is_weights(p.name) and p.is_file()]


def _files_problem(folder: Path) -> str | None:
    files = _weights(folder)
    return next(filter(None, map(_file_problem, files)), None) if files else "it holds no weights"


def _beyond_marker(folder: Path, step: int | None) -> str | None:
    """Say where a marker beside the folder, written last, still names an earlier step."""
    for name in _MARKERS:
        marker = folder.parent / name
        if step is None or not marker.is_file():
            continue
        try:
            said = re.search(r"(\d+)\s*$", marker.read_text(encoding="utf-8")[:200])
        except (OSError, UnicodeDecodeError):
            continue
        if said and int(said[1]) < step:
            return f"{name} still names step {int(said[1])}"
    return None


def _folder_kind(folder: Path, names: set[str]) -> str | None:
    if ".metadata" in names or any(name.endswith(".distcp") for name in names):
        return "distributed"
    weights = any(map(_is_weights, names))
    if "trainer_state.json" in names or ("config.json" in names and weights):
        return "huggingface"
    if _STEP.search(folder.name) and _weights(folder):
        return "files"
    return None


def _step_of(name: str) -> int | None:
    said = _STEP.search(name)
    if said:
        return int(said[1])
    digits = re.findall(r"\d{1,12}", name)
    return int(digits[-1]) if digits else None


def _of_folder(folder: Path, kind: str, name: str) -> Checkpoint:
    step = _step_of(folder.name)
    if _DRAFT.search(folder.name):
        problem: str | None = "still being written, by its name"
    elif kind == "distributed":
        problem = _distributed_problem(folder)
    elif kind == "huggingface":
        problem = _huggingface_problem(folder)
    else:
        problem = _files_problem(folder)
    problem = problem or _beyond_marker(folder, step)
    files = [path.stat() for path in folder.rglob("*") if path.is_file()]
    return Checkpoint(
        name=name,
        kind=kind,
        step=step,
        size_bytes=sum(f.st_size for f in files),
        saved_ns=max((f.st_mtime_ns for f in files), default=folder.stat().st_mtime_ns),
        problem=problem,
    )


def _of_file(path: Path, name: str) -> Checkpoint:
    facts = path.stat()
    draft = "still being written, by its name" if _DRAFT.search(path.name) else None
    return Checkpoint(
        name=name,
        kind="safetensors" if path.suffix == ".safetensors" else "torch",
        step=_step_of(path.name),
        size_bytes=facts.st_size,
        saved_ns=facts.st_mtime_ns,
        problem=draft or _file_problem(path),
    )


def _walk(folder: Path, root: Path, depth: int) -> Iterator[Checkpoint]:
    with os.scandir(folder) as listing:
        entries = sorted(listing, key=lambda e: e.name)[:_MOST_ENTRIES]
    entries = [e for e in entries if not e.is_symlink() and not e.name.endswith(_ASIDE)]
    kind = _folder_kind(folder, {e.name for e in entries})
    if kind is not None:
        name = str(folder.relative_to(root)) if folder != root else folder.name
        yield _of_folder(folder, kind, name)
        return
    for entry in entries:
        path = Path(entry.path)
        try:
            if entry.is_dir():
                if depth < _DEEPEST:
                    yield from _walk(path, root, depth + 1)
            elif _is_weights(entry.name):
                yield _of_file(path, str(path.relative_to(root)))
        except OSError:
            continue  # replaced or removed at this moment


def find_checkpoints(path: Path) -> list[Checkpoint]:
    """Return the checkpoints at or below a path; an absent path has none.

    A single file is one where its name or its first bytes say so: a log is none.
    """
    try:
        if path.is_file():
            named = _is_weights(path.name) or _begins_as_weights(path)
            return [_of_file(path, path.name)] if named else []
        return list(_walk(path, path, 0)) if path.is_dir() else []
    except OSError:
        return []


def set_aside(root: Path, broken: Checkpoint) -> Path:
    """Rename a checkpoint that is not whole, so that the job finds the last good one."""
    below = root / broken.name
    path = below if below.exists() else root
    target = path.with_name(f"{path.name}{_ASIDE}")
    path.rename(target)
    return target
