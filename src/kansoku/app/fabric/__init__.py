"""The fabric watch: controller, agent, status, matrix, and its rows for the store."""

from kansoku.app.fabric._answers import (
    matrix,
    matrix_json,
    matrix_view,
    status,
    status_json,
    status_view,
)
from kansoku.app.fabric._control import (
    DEFAULT_CONTROLLER,
    Address,
    agent,
    controller_app,
    learn_services,
    load_settings,
    make_service,
    serve_controller,
    service_end,
    service_start,
)
from kansoku.app.fabric._following import follow
from kansoku.app.fabric._tables import outcome_tables, save_outcomes

__all__ = [
    "DEFAULT_CONTROLLER",
    "Address",
    "agent",
    "controller_app",
    "follow",
    "learn_services",
    "load_settings",
    "make_service",
    "matrix",
    "matrix_json",
    "matrix_view",
    "outcome_tables",
    "save_outcomes",
    "serve_controller",
    "service_end",
    "service_start",
    "status",
    "status_json",
    "status_view",
]
