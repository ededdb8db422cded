"""Render the configuration of a fleet from one cluster file."""

import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kansoku import __version__
from kansoku.capture import write_payload
from kansoku.catalog.cluster import Cluster, load_cluster, shipped_clusters
from kansoku.deploy import RenderedFile, Settings, render_files, shipped_versions
from kansoku.errors import ConfigurationError, PlatformError
from kansoku.view import Column, Sentence, Table, Tone, View

__all__ = ["DeployOptions", "deploy_files", "deploy_render"]

_MARK = ".kansoku-rendered"
"""Lists what a rendering wrote, so that the next one may take it away again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployOptions:
    """How to render."""

    collector_version: str | None = None
    """None for the version that the files are written for."""
    tls: bool = False
    serve: bool = False
    """The gateway feeds ``kansoku serve`` too."""
    prefix: str = "/opt/kansoku"
    dashboards: bool = True
    """False leaves Grafana's dashboards out, and with them the ``grafana`` extra."""


def deploy_files(
    cluster: Cluster, options: DeployOptions | None = None
) -> tuple[Settings, tuple[RenderedFile, ...]]:
    """Return the settings and every file as text; nothing is written.

    Raises ConfigurationError for a name, address, version or prefix that cannot be rendered,
    DependencyError where dashboards are wanted without the ``grafana`` extra.
    """
    chosen = options or DeployOptions()
    settings = Settings(
        cluster=cluster,
        collector_version=chosen.collector_version or shipped_versions()["collector"],
        tls=chosen.tls,
        serve=chosen.serve,
        prefix=chosen.prefix,
    )
    banner = f"Rendered by kansoku {__version__} from the cluster file of {cluster.name}"
    files = list(render_files(settings, banner=banner))
    if chosen.dashboards:
        from kansoku.deploy.dashboards import dashboards

        for name, board in dashboards().items():
            text = json.dumps(board, indent=2, ensure_ascii=False) + "\n"
            files.append(RenderedFile(path=f"grafana/dashboards/{name}.json", text=text))
    return settings, tuple(sorted(files, key=lambda file: file.path))


def deploy_render(
    cluster_file: str | Path,
    out: Path | None = None,
    *,
    options: DeployOptions | None = None,
    dry_run: bool = False,
) -> tuple[dict[str, Any], View]:
    """Write the files below ``out`` (default ``./deploy-NAME``); return the JSON answer and a View.

    A folder that holds anything a rendering did not write is refused, so nothing of yours is lost;
    files that a former rendering wrote and this one does not are removed.
    """
    path = _cluster_path(cluster_file)
    cluster = load_cluster(path)
    settings, files = deploy_files(cluster, options)
    folder = out if out is not None else Path(f"deploy-{cluster.name}")
    source = RenderedFile(path="cluster.toml", text=path.read_text("utf-8"))
    every = (*files, source)
    _check_folder(folder)
    if not dry_run:
        _write(folder, every)
    answer = {
        "version": 1,
        "cluster": cluster.name,
        "folder": str(folder),
        "written": not dry_run,
        "collector_version": settings.collector_version,
        "files": [
            {"path": f.path, "bytes": len(f.text.encode()), "place": f.place, "host": f.host}
            for f in every
        ],
        "unknown": list(settings.unknown()),
    }
    return answer, _view(settings, every, folder, dry_run=dry_run)


def _cluster_path(file_or_name: str | Path) -> Path:
    path = Path(file_or_name)
    return path if path.exists() else shipped_clusters().get(str(file_or_name), path)


def _check_folder(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ConfigurationError("is no folder", where=str(folder), remedy="give --out DIR")
    if any(folder.iterdir()) and not (folder / _MARK).is_file():
        raise ConfigurationError(
            "is not empty and was not rendered by kansoku",
            where=str(folder),
            remedy="give another --out DIR, or empty it",
        )


def _write(folder: Path, files: tuple[RenderedFile, ...]) -> None:
    mark = folder / _MARK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        before = _listed(mark)
        for file in files:
            _write_file(folder / file.path, file.text, file.mode)
        capture = folder / "capture"
        write_payload(str(capture))
        written = [f.path for f in files]
        written += [str(p.relative_to(folder)) for p in sorted(capture.rglob("*")) if p.is_file()]
        mark.write_text("".join(f"{name}\n" for name in written), encoding="utf-8")
        for name in sorted(before - set(written)):
            _remove(folder, name)
    except OSError as error:
        raise PlatformError(
            f"cannot write: {error.strerror or error}", where=str(error.filename or folder)
        ) from None


def _listed(mark: Path) -> set[str]:
    """Return what the former rendering wrote; a path that leads outside is ignored."""
    if not mark.is_file():
        return set()
    names = mark.read_text(encoding="utf-8").splitlines()
    return {name for name in names if name and not name.startswith("/") and ".." not in name}


def _remove(folder: Path, name: str) -> None:
    target = folder / name
    if target.is_file() and not target.is_symlink():
        target.unlink()


def _write_file(path: Path, text: str, mode: int) -> None:
    """Write through a file beside it: a reader never sees half, nor a secret too widely."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    descriptor = os.open(part, flags, stat.S_IRUSR | stat.S_IWUSR)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)
    part.chmod(mode)
    part.replace(path)


def _view(
    settings: Settings, files: tuple[RenderedFile, ...], folder: Path, *, dry_run: bool
) -> View:
    rows: dict[str, list[RenderedFile]] = {}
    for file in files:
        head, _, rest = file.path.partition("/")
        rows.setdefault(f"{head}/" if rest else "", []).append(file)
    table = Table(
        title="Would write" if dry_run else "Written",
        columns=[
            Column(title="folder"),
            Column(title="files", numeric=True),
            Column(title="KiB", numeric=True),
            Column(title="for"),
        ],
        rows=[
            (
                name or ".",
                len(found),
                round(sum(len(f.text.encode()) for f in found) / 1024, 1),
                ", ".join(dict.fromkeys(f.host for f in found if f.host)) or _FOR.get(name, "–"),
            )
            for name, found in sorted(rows.items())
        ],
        note=f"README.md in {folder} says what goes where"
        + ("" if dry_run else "; capture/ holds the recorder for TaskProlog"),
    )
    blocks: list[Table | Sentence] = [table]
    if not settings.tls:
        blocks.append(
            Sentence(
                text="Tokens travel readable: receivers listen on loopback until you change that",
                tone=Tone.NOTICE,
                detail="--tls renders certificates in",
            )
        )
    blocks += [
        Sentence(text=f"unknown: {sentence}", tone=Tone.MUTED) for sentence in settings.unknown()
    ]
    title = f"{settings.cluster.title}: {folder}, collector {settings.collector_version}"
    return View(title=title, blocks=blocks)


_FOR = {"": "compose, README", "grafana/": "Grafana"}
