"""The cluster at a glance, and one job."""

from typing import Any

from kansoku.deploy.dashboards._panels import (
    Logs,
    Metric,
    Profile,
    Traces,
    board,
    curves,
    heat,
    log_table,
    metric_table,
    number,
    profile,
    states,
    text_variable,
    traces,
)
from kansoku.deploy.dashboards._parts import FREE, by_job, job_variable, per_job

__all__ = ["cluster", "job"]

_POWER = 'max by (host_name, hw_name) (%hw.power{hw_type="gpu"})'
_BUSY = '%hw.gpu.utilization{hw_type="gpu",hw_gpu_task="general"}'
_MAPPED = "%kansoku.slurm.job.gpu"
_HELD = f"max by (host_name, hw_name) ({_MAPPED})"
_JOB_BUSY = per_job("%hw.gpu.utilization", ',hw_gpu_task="general"')
_ON_NODES = ' and on (host_name) max by (host_name) (%kansoku.slurm.job.gpu{slurm_job_id=~"$job"})'
_RUN = '"kansoku.run":~"$run"'
_USES = (
    ("Energy of a step", "energy_j", "joule", None),
    ("SMs active in a step", "sm_activity", "percentunit", 1),
    ("Device memory active in a step", "memory_activity", "percentunit", 1),
    ("Bytes through the NICs in a step", "nic_bytes", "bytes", None),
    ("Bytes over NVLink in a step", "nvlink_bytes", "bytes", None),
)
"""What the agent joins to step rows: title, column, unit, the highest value there can be."""
_GPU_NAME = "{{host_name}}/{{hw_name}}"


def _cluster_head() -> list[Any]:
    """Return the sums."""
    return [
        number("GPUs", Metric(text="count(max by (host_name, hw_name) (%kansoku.gpu.info))")),
        number("GPUs held by jobs", Metric(text=f"count({_HELD})")),
        number("GPU utilisation", Metric(text=f"avg({_BUSY})"), "percentunit"),
        number("GPU power", Metric(text='sum(%hw.power{hw_type="gpu"})'), "watt"),
        number(
            "GPU energy",
            Metric(text='sum(increase(%hw.energy{hw_type="gpu"}[$__range]))'),
            "joule",
            note="Over the time chosen above",
        ),
        number("GPUs lost", Metric(text="sum(%kansoku.gpu.lost)"), bad_above=1),
        number(
            "Nodes not in service",
            Metric(
                text="count(max by (slurm_node_name) (%kansoku.slurm.node.state"
                '{slurm_state=~"down|drain|fail|not_responding"})) or vector(0)'
            ),
            bad_above=1,
        ),
        number("Nodes reporting", Metric(text="count(max by (host_name) (%kansoku.agent.samples))")),
    ]  # fmt: skip


def _cluster_heat() -> list[Any]:
    """Return the power of every GPU, and who holds it."""
    return [
        heat(
            "GPU power, by the job that holds the GPU",
            Metric(text=by_job(_POWER), legend="{{slurm_job_id}} {{slurm_user}} {{host_name}}/{{hw_name}}"),
            unit="watt",
            note="One row a GPU; rows of one job stand together. A row gone dark in a bright "
            "block is a GPU that waits or is lost.",
        ),
        heat(
            "GPU power, GPUs that no job holds",
            Metric(text=f"{_POWER}{FREE}", legend="{{host_name}}/{{hw_name}}"),
            unit="watt",
            height=9,
            note="Free capacity: dark rows. A bright row is used past Slurm.",
        ),
        states(
            "Jobs on nodes: GPUs held",
            Metric(
                text=f"count by (host_name, slurm_job_id, slurm_user) ({_MAPPED})",
                legend="{{host_name}} {{slurm_job_id}} {{slurm_user}}",
            ),
        ),
    ]  # fmt: skip


def _cluster_curves() -> list[Any]:
    """Return what goes over time, and what went wrong."""
    return [
        curves(
            "Power by node",
            Metric(text='sum by (host_name) (%hw.power{hw_type="gpu"})', legend="{{host_name}}"),
            unit="watt", stack=True,
        ),
        curves(
            "Utilisation of held GPUs by job",
            Metric(
                text="avg by (slurm_job_id, slurm_user) ("
                + by_job(f"max by (host_name, hw_name) ({_BUSY})") + ")",
                legend="{{slurm_job_id}} {{slurm_user}}",
            ),
            unit="percentunit", top=1,
        ),
        curves(
            "Through the fabric's NICs",
            Metric(
                text='sum by (network_io_direction) (rate(%hw.network.io{hw_type="network"}[$__rate_interval]))',
                legend="{{network_io_direction}}",
            ),
            unit="Bps",
        ),
        curves(
            "To and from Lustre",
            Metric(
                text="sum by (disk_io_direction) (rate(%kansoku.lustre.io[$__rate_interval]))",
                legend="{{disk_io_direction}}",
            ),
            unit="Bps",
        ),
        log_table(
            "Errors of the last hours",
            Logs(text='severity:in("error","critical") NOT "event.name":~"^kansoku\\\\." | fields _time, '
                 '"kansoku.subject", "kansoku.kind", "kansoku.source", _msg | sort by (_time desc) | limit 200'),
        ),
    ]  # fmt: skip


def cluster() -> Any:
    """Return the overview."""
    return board(
        "kansoku-cluster",
        "Cluster",
        [*_cluster_head(), *_cluster_heat(), *_cluster_curves()],
        jobs=True,
        note="Power, jobs, traffic and faults of the whole cluster",
    )  # fmt: skip


def _job_head() -> list[Any]:
    """Return whose it is, and its sums."""
    return [
        number("GPUs", Metric(text=f"count({per_job('%kansoku.gpu.info')})")),
        number("Nodes", Metric(text='count(max by (host_name) (%kansoku.slurm.job.state{slurm_job_id=~"$job"}))')),
        number("Utilisation", Metric(text=f"avg({_JOB_BUSY})"), "percentunit"),
        number("Power", Metric(text=f"sum({per_job('%hw.power')})"), "watt"),
        number(
            "GPUs below 10 % utilisation",
            Metric(text=f"count(({_JOB_BUSY}) < 0.1) or vector(0)"),
            bad_above=1,
        ),
        metric_table(
            "Whose it is",
            Metric(text='max by (slurm_job_id, slurm_user, slurm_account, slurm_partition, slurm_state) (%kansoku.slurm.job.state{slurm_job_id=~"$job"})', instant=True),
            {"slurm_job_id": "job", "slurm_user": "user", "slurm_account": "account",
             "slurm_partition": "partition", "slurm_state": "state"},
            width=9, height=4,
        ),
    ]  # fmt: skip


def _job_gpus() -> list[Any]:
    """Return its GPUs over time."""
    return [
        heat("GPU power", Metric(text=per_job("%hw.power"), legend=_GPU_NAME), unit="watt", height=10),
        curves("GPU utilisation", Metric(text=_JOB_BUSY, legend=_GPU_NAME), unit="percentunit", top=1),
        curves(
            "Tensor cores",
            Metric(text=per_job("%kansoku.gpu.activity", ',kansoku_gpu_unit="tensor"'), legend=_GPU_NAME),
            unit="percentunit", top=1, note="Where the GPU offers it (Hopper and newer)",
        ),
        curves("GPU memory", Metric(text=per_job("%hw.gpu.memory.usage"), legend=_GPU_NAME), unit="bytes"),
        curves("SM clock", Metric(text=per_job("%kansoku.gpu.clock.frequency", ',kansoku_gpu_clock="sm"'), legend=_GPU_NAME), unit="hertz"),
        curves("GPU temperature", Metric(text=per_job("%hw.temperature", ',hw_sensor_location="core"'), legend=_GPU_NAME), unit="celsius"),
        curves(
            "Clocks held down",
            Metric(
                text=by_job(
                    'sum by (host_name, hw_name) (rate(%kansoku.gpu.throttle.time{hw_type="gpu"}[$__rate_interval]))',
                    match='slurm_job_id=~"$job"',
                ),
                legend=_GPU_NAME,
            ),
            unit="percentunit", note="Share of time, summed over reasons",
        ),
    ]  # fmt: skip


def _job_nodes() -> list[Any]:
    """Return network and storage of its nodes: other jobs on them count in."""
    return [
        curves(
            "Sent by the job's nodes",
            Metric(
                text='sum by (host_name, hw_name) (rate(%hw.network.io{hw_type="network",network_io_direction="transmit"}[$__rate_interval]))' + _ON_NODES,
                legend=_GPU_NAME,
            ),
            unit="Bps", note="By RDMA port. Ports of one node that differ are worth a look.",
        ),
        curves(
            "Paused by PFC on the job's nodes",
            Metric(
                text="sum by (host_name, network_interface_name, network_io_direction) (rate(%kansoku.nic.pause.time[$__rate_interval]))" + _ON_NODES,
                legend="{{host_name}} {{network_interface_name}} {{network_io_direction}}",
            ),
            unit="percentunit",
        ),
        curves(
            "Lustre on the job's nodes",
            Metric(
                text="sum by (host_name, disk_io_direction) (rate(%kansoku.lustre.io[$__rate_interval]))" + _ON_NODES,
                legend="{{host_name}} {{disk_io_direction}}",
            ),
            unit="Bps",
        ),
        curves(
            "Waiting for I/O on the job's nodes",
            Metric(
                text='rate(%kansoku.io.pressure.time{kansoku_pressure="full"}[$__rate_interval])' + _ON_NODES,
                legend="{{host_name}}",
            ),
            unit="percentunit",
        ),
    ]  # fmt: skip


def _job_inside() -> list[Any]:
    """Return steps, spans and profiles, where the job was recorded."""
    return [
        log_table(
            "Ranks: mean step and its parts",
            Logs(
                text=f'"event.name":="kansoku.steps" {_RUN} | stats by ("kansoku.run", "kansoku.rank") count() steps, '
                'avg("kansoku.duration_ns") step_ns, avg("kansoku.forward_ns") forward_ns, '
                'avg("kansoku.backward_ns") backward_ns, avg("kansoku.collective_ns") exposed_collective_ns, '
                'avg("kansoku.data_wait_ns") data_wait_ns, sum("kansoku.energy_j") energy_j, '
                'sum("kansoku.nic_bytes") nic_bytes, sum("kansoku.nvlink_bytes") nvlink_bytes, '
                'avg("kansoku.sm_activity") sm_activity, avg("kansoku.memory_activity") memory_activity',
                kind="stats",
            ),
            note="Own work high where the others' collective time is high: a straggler",
        ),
        curves(
            "Step time",
            Logs(text=f'"event.name":="kansoku.steps" {_RUN} | stats by ("kansoku.rank") avg("kansoku.duration_ns") step_ns',
                 kind="statsRange", legend="rank {{kansoku.rank}}"),
            unit="ns", width=24,
        ),
        *(
            curves(
                title,
                Logs(text=f'"event.name":="kansoku.steps" {_RUN} | stats by ("kansoku.rank") avg("kansoku.{column}") {column}',
                     kind="statsRange", legend="rank {{kansoku.rank}}"),
                unit=unit, top=top, note="Of each rank; joined by time from the agent's samples",
            )
            for title, column, unit, top in _USES
        ),
        traces("Sampled steps", Traces(service="kansoku-agent", tags="kansoku.run=$run")),
        profile("CPU profile of the ranks", Profile(labels='{service_name="kansoku.training",run=~"$run"}')),
    ]  # fmt: skip


def job() -> Any:
    """Return the dashboard of one job."""
    return board(
        "kansoku-job",
        "Job",
        [*_job_head(), *_job_gpus(), *_job_nodes(), *_job_inside()],
        variables=[*job_variable(), text_variable("run", "run", "slurm-.*")],
        note="One job: its GPUs, its nodes' network and storage, its steps. The run of a job "
        "recorded by TaskProlog is slurm-JOB-STEP-RESTART.",
    )  # fmt: skip
