"""Every page of the web site, in the order of its menu, and their description for OpenAPI."""

import importlib
import importlib.util
import re
from functools import cache
from typing import Any

from kansoku.app.web_page import Page, Parameter

__all__ = ["page_paths", "web_pages"]

_MODULES = ("kansoku.app.web_fleet", "kansoku.app.web_jobs")
COLUMNS_TYPE = "application/x-kansoku-columns"


@cache
def web_pages() -> tuple[Page, ...]:
    """Return the pages of every module that is there; each has a tuple ``PAGES``."""
    found: list[Page] = []
    for name in _MODULES:
        if importlib.util.find_spec(name) is not None:
            found += getattr(importlib.import_module(name), "PAGES", ())
    return tuple(found)


def _schema(one: Parameter) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string", "maxLength": 4096}
    if one.choices:
        schema = {"type": "string", "enum": list(one.choices)}
    elif one.pattern is not None:
        schema["pattern"] = f"^(?:{one.pattern})$"
    else:
        schema["pattern"] = "^[^\\x00]*$"
    if one.in_path:
        schema["minLength"] = 1
    if one.default is not None:
        schema["default"] = one.default
    return schema


def page_paths(errors: dict[str, Any]) -> dict[str, Any]:
    """Return OpenAPI paths of every page's JSON twin, columns and files."""
    paths: dict[str, Any] = {}
    for page in web_pages():
        path = "/api/v1/pages" + re.sub(r"\{(\w+):path\}", r"{\1}", page.path)
        parameters = [_parameter(one) for one in page.parameters]

        def get(
            summary: str, answer: str, kind: str, schema: dict[str, str],
            parameters: list[dict[str, Any]] = parameters,
        ) -> dict[str, Any]:  # fmt: skip
            ok = {"description": answer, "content": {kind: {"schema": schema}}}
            problem = next(iter(errors.values()))
            return {
                "get": {
                    "summary": summary,
                    "parameters": parameters,
                    "responses": {"200": ok, **errors, "404": problem},
                }
            }

        paths[path] = get(
            f"What the page {page.title} shows.", "The page's figures.", "application/json",
            {"type": "object"},
        )  # fmt: skip
        for name in page.columns:
            paths[f"{path}/columns/{name}"] = get(
                f"Columns {name} of the page {page.title} as raw arrays.",
                "KCOL, a JSON header, little-endian arrays.", COLUMNS_TYPE, _BINARY,
            )  # fmt: skip
        for name in page.files:
            paths[f"{path}/files/{name}"] = get(
                f"The {name} of the page {page.title} as a file.",
                "The file.", "application/octet-stream", _BINARY,
            )  # fmt: skip
    return paths


_BINARY = {"type": "string", "format": "binary"}


def _parameter(one: Parameter) -> dict[str, Any]:
    return {
        "name": one.name,
        "in": "path" if one.in_path else "query",
        "required": one.in_path,
        "schema": _schema(one),
        "description": one.meaning,
    }
