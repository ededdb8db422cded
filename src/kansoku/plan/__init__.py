"""Planner: parameters, FLOPs, memory, step time, placement and search, without measuring."""

from kansoku.plan.budget import Budget, Cadence, train_budget
from kansoku.plan.flops import CONVENTIONS, StepFlops, step_flops, utilisation
from kansoku.plan.hardware import Hardware, cluster_hardware, generic_hardware
from kansoku.plan.layout import Layout, LayoutColumns, Training
from kansoku.plan.memory import MemoryColumns, memory_columns
from kansoku.plan.parameters import ParameterCounts, count_parameters
from kansoku.plan.placement import Placement, place
from kansoku.plan.search import Candidate, SearchResult, Space, search
from kansoku.plan.timing import TimeColumns, TrafficColumns, step_time
from kansoku.plan.whatif import Change, Resource, changes, resources

__all__ = [
    "CONVENTIONS",
    "Budget",
    "Cadence",
    "Candidate",
    "Change",
    "Hardware",
    "Layout",
    "LayoutColumns",
    "MemoryColumns",
    "ParameterCounts",
    "Placement",
    "Resource",
    "SearchResult",
    "Space",
    "StepFlops",
    "TimeColumns",
    "TrafficColumns",
    "Training",
    "changes",
    "cluster_hardware",
    "count_parameters",
    "generic_hardware",
    "memory_columns",
    "place",
    "resources",
    "search",
    "step_flops",
    "step_time",
    "train_budget",
    "utilisation",
]
