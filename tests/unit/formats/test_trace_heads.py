"""First bytes of real shapes; and that telling them loads nothing heavy."""

import subprocess
import sys

from tests.labs.kineto_files import Job, text, write

from kansoku.formats.trace_heads import is_execution_trace, is_inspector


def test_heads():
    inspector = b'{"header": {"id": "0x7", "rank": 2}, "metadata": {}, "coll_perf": {"coll": "A"'
    execution = b'{\n  "schema": "1.1.1-chakra.0.0.4", "pid": 5, "nodes": ['
    kineto = b'{\n  "schemaVersion": 1,\n  "traceEvents": ['
    heads = (inspector, execution, kineto, b"", b"\x1f\x8b\x08")
    assert [is_inspector(head) for head in heads] == [True, False, False, False, False]
    assert [is_execution_trace(head) for head in heads] == [False, True, False, False, False]


def test_the_breakdown_of_a_kineto_trace_loads_no_heavy_module(tmp_path):
    path = write(tmp_path / "rank0.json", text(Job()))
    heavy = ("polars", "pyarrow", "pandas", "scipy", "duckdb", "ClusterShell", "rich", "numpy.ma")
    code = (
        "import sys; from kansoku.app.trace import breakdown\n"
        f"assert breakdown([{str(path)!r}]).to_json()['ranks'][0]['busy_us'] > 0\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"
