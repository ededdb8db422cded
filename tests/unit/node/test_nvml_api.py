"""Our NVML binding against nvidia-ml-py, call by call, on the same library.

Both load the compiled stand-in; that library is ours, but how each binding lays out arguments and
structures is checked against NVIDIA's own here.
"""

import json
import subprocess
import sys

import pytest
from tests.labs.nvml import FakeNvml

CODE = """
import ctypes, json, sys
import pynvml
from kansoku.node.edge._nvml_api import NvmlApi, NvmlError, _CALLS, _TEXTS

pynvml.nvmlInit()
api = NvmlApi()
def plain(value):
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, ctypes.Structure):
        names = [n for n, *_ in value._fields_ if n not in ("numbers",)]
        theirs = {"busIdLegacy", "busId", "total", "free", "used", "gpu", "memory",
                  "referenceTime", "violationTime"}
        return {n: plain(getattr(value, n)) for n in names if n in theirs}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value
def result(call, errors):
    try:
        return plain(call())
    except errors as error:
        return f"error {error.value}"
mine, theirs = {}, {}
ours, other = api.handle(3), pynvml.nvmlDeviceGetHandleByIndex(3)
for short, (_, kinds, answers) in [*_CALLS.items(), *((t, ("", (), ())) for t in _TEXTS)]:
    if short in ("MigDeviceHandleByIndex", "GpuInstanceId"):
        continue
    name = "nvmlDeviceGet" + short
    more = (1,) * len(kinds)
    if short == "Temperature":
        more = (0,)
    mine[short] = result(lambda: api.ask(name, ours, *more), NvmlError)
    theirs[short] = result(lambda: getattr(pynvml, name)(other, *more), pynvml.NVMLError)
keys = (82, 186, (138, 0xFFFFFFFF), 230)
mine["fields"] = [(v.fieldId, v.scopeId, v.valueType, v.nvmlReturn, v.value.ullVal)
                  for v in api.ask("nvmlDeviceGetFieldValues", ours, keys)]
theirs["fields"] = [(v.fieldId, v.scopeId, v.valueType, v.nvmlReturn, v.value.ullVal)
                    for v in pynvml.nvmlDeviceGetFieldValues(other, keys)]
mine["processes"] = [(p.pid, p.usedGpuMemory) for p in
                     api.ask("nvmlDeviceGetComputeRunningProcesses", ours)]
theirs["processes"] = [(p.pid, p.usedGpuMemory) for p in
                       pynvml.nvmlDeviceGetComputeRunningProcesses(other)]
a, b = api.gpm_sample(), api.gpm_sample()
api.gpm_read(ours, a); api.gpm_read(ours, b)
mine["gpm"] = api.gpm_metrics(a, b, [2, 5])
get = pynvml.c_nvmlGpmMetricsGet_t()
get.version, get.numMetrics = 1, 2
get.sample1, get.sample2 = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
pynvml.nvmlGpmSampleGet(other, get.sample1); pynvml.nvmlGpmSampleGet(other, get.sample2)
get.metrics[0].metricId, get.metrics[1].metricId = 2, 5
pynvml.nvmlGpmMetricsGet(get)
theirs["gpm"] = [get.metrics[0].value, get.metrics[1].value]
mine["driver"], theirs["driver"] = (api.ask("nvmlSystemGetDriverVersion"),
                                    pynvml.nvmlSystemGetDriverVersion())
print(json.dumps([mine, theirs]))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    nvml = FakeNvml(tmp_path_factory.mktemp("nvml"))
    nvml.set(
        process=77, gpm_2=61.5, gpm_5=33.25, field_138=4096, field_230={3: 2}, ecc_uncorrected=9,
        violation_1_ns=123, rows_pending=1, clock_reasons=0x44, energy_mj=2**40, decoder=12,
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env=nvml.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_both_bindings_agree_on_every_call(answers):
    mine, theirs = answers
    assert mine == theirs
    assert len(mine) > 30


def test_the_planted_values_came_through(answers):
    mine, _ = answers
    assert mine["TotalEnergyConsumption"] == 2**40
    assert mine["gpm"] == [61.5, 33.25]
    assert mine["ViolationStatus"]["violationTime"] == 123
    assert mine["JpgUtilization"] == "error 13", "the stand-in lacks the function"
