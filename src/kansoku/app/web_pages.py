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
    """Return OpenAPI paths of every page's JSON twin and columns."""
    problem = next(iter(errors.values()))
    paths: dict[str, Any] = {}
    for page in web_pages():
        parameters = [
            {
                "name": one.name,
                "in": "path" if one.in_path else "query",
                "required": one.in_path,
                "schema": _schema(one),
                "description": one.meaning,
            }
            for one in page.parameters
        ]
        path = "/api/v1/pages" + re.sub(r"\{(\w+):path\}", r"{\1}", page.path)
        paths[path] = {
            "get": {
                "summary": f"What the page {page.title} shows.",
                "parameters": parameters,
                "responses": {
                    "200": {
                        "description": "The page's figures.",
                        "content": {"application/json": {"schema": {"type": "object"}}},
                    },
                    **errors,
                    "404": problem,
                },
            }
        }
        for name in page.columns:
            paths[f"{path}/columns/{name}"] = {
                "get": {
                    "summary": f"Columns {name} of the page {page.title} as raw arrays.",
                    "parameters": parameters,
                    "responses": {
                        "200": {
                            "description": "KCOL, a JSON header, little-endian arrays.",
                            "content": {
                                COLUMNS_TYPE: {"schema": {"type": "string", "format": "binary"}}
                            },
                        },
                        **errors,
                        "404": problem,
                    },
                }
            }
    return paths
