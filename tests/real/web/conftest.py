"""One server with a made-up day of 100 nodes."""

import os
from pathlib import Path

import pytest
from tests.labs.fleet_day import DAY_END_NS, write_day

from kansoku.app.serve import Server, ServeSettings

ARTEFACTS = Path(os.environ.get("KANSOKU_ARTEFACTS") or Path(__file__).parents[3] / "artefacts")


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """Return the server's address and what was written into its store."""
    settings = ServeSettings(
        folder=tmp_path_factory.mktemp("site"), port=0, otlp_port=None, grpc_port=None
    )
    with Server(settings, clock_ns=lambda: DAY_END_NS) as server:
        yield server, write_day(server.store, gauges=("power", "temperature"))


@pytest.fixture(scope="session")
def artefacts():
    """Return the folder where screenshots are kept."""
    folder = ARTEFACTS / "web"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
