"""Every route of the API is described; what fails while a page is drawn gets its status."""

import re

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from kansoku.app.serve.access import Access
from kansoku.app.serve.api import Api, api_routes
from kansoku.app.serve.openapi import openapi
from kansoku.app.web_page import Page, Screen
from kansoku.errors import BusyError, StoreError
from kansoku.store import LocalStore
from kansoku.web import routes


def test_every_route_of_the_api_is_described_and_nothing_else(tmp_path):
    with LocalStore(tmp_path) as store:
        access = Access({}, {})
        api = api_routes(Api(store=store, access=access, statistics=dict))
        every = [*api, *routes(store=store, access=access)]
        served = {
            re.sub(r"\{(\w+):path\}", r"{\1}", route.path)
            for route in every
            if getattr(route, "path", "").startswith("/api/")
        }
    described = set(openapi()["paths"])
    # One route serves every table, one every named query; the description names each.
    for family in ("tables", "queries"):
        assert f"/api/v1/{family}/{{{family[:-1] if family == 'tables' else 'query'}}}" in served
        named = {path for path in described if path.startswith(f"/api/v1/{family}/")}
        assert named
        described -= named
    served = {path for path in served if not path.endswith(("{table}", "{query}"))}
    assert served - described == {"/api/openapi.json"}
    assert described - served == set()


@pytest.mark.parametrize(("error", "status"), [(StoreError("gone"), 503), (BusyError("busy"), 503)])
def test_a_page_that_fails_late_says_so_in_its_status(tmp_path, error, status):
    def build(reading, values):
        import time

        time.sleep(0.05)  # longer than headers alone would wait
        raise error

    page = Page(path="/slow", title="Slow", build=build, columns={"none": build})
    with LocalStore(tmp_path) as store:
        client = TestClient(
            Starlette(routes=routes(store=store, access=Access({}, {}), pages=[page]))
        )
        answer = client.get("/slow")
        assert answer.status_code == status
        assert str(error) in answer.text
        twin = client.get("/api/v1/pages/slow")
        assert (twin.status_code, twin.json()["error"]) == (status, str(error))


def test_curves_of_the_same_figures_are_made_once(tmp_path, monkeypatch):
    from kansoku.view import Line, Series
    from kansoku.web import _draw

    made = []
    real = _draw.series_item
    monkeypatch.setattr(_draw, "series_item", lambda *a, **k: made.append(1) or real(*a, **k))

    def build(reading, values):
        height = [1.0, float(len(made) > 1)]
        block = Series(title="t", x_title="x", y_title="y",
                       lines=[Line(name="n", x=[0.0, 1.0], y=height)])  # fmt: skip
        return Screen(title="S", blocks=[block], answer={"schema": "x"})

    page = Page(path="/s", title="S", build=build)
    with LocalStore(tmp_path) as store:
        client = TestClient(
            Starlette(routes=routes(store=store, access=Access({}, {}), pages=[page]))
        )
        first, second = client.get("/s").text, client.get("/s").text
        assert len(made) == 1
        assert first == second
        made.append(1)
        assert client.get("/s").text != first
