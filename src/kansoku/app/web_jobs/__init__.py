"""The pages of jobs and their training: list, job, run, rank, step; comparison, history, plans."""

from kansoku.app.web_jobs._bench import BENCHMARK
from kansoku.app.web_jobs._compare import COMPARE
from kansoku.app.web_jobs._history import HISTORY, IDLE, NODES, RELIABILITY
from kansoku.app.web_jobs._job import JOB
from kansoku.app.web_jobs._jobs import JOBS
from kansoku.app.web_jobs._plan import PLANNER
from kansoku.app.web_jobs._run import RANK, RUN
from kansoku.app.web_jobs._step import STEP
from kansoku.app.web_page import Page

__all__ = ["PAGES"]

PAGES: tuple[Page, ...] = (
    JOBS, JOB, RUN, RANK, STEP, COMPARE, HISTORY, RELIABILITY, IDLE, NODES, BENCHMARK, PLANNER,
)  # fmt: skip
