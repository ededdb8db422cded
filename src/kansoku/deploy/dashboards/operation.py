"""Slurm, incidents, and the telemetry's own health."""

from typing import Any

from kansoku.deploy.dashboards._panels import (
    Logs,
    Metric,
    board,
    curves,
    log_table,
    metric_table,
    number,
    states,
)
from kansoku.deploy.dashboards._parts import NODE, node_variable

__all__ = ["incidents", "slurm", "telemetry"]

_RATE = "[$__rate_interval]"
_HELD = "max by (host_name, hw_name, slurm_job_id, slurm_user, slurm_account, slurm_partition) (%kansoku.slurm.job.gpu)"


def slurm() -> Any:
    """Return the dashboard of Slurm."""
    out = '{slurm_state=~"down|drain|fail|not_responding"}'
    return board(
        "kansoku-slurm",
        "Slurm",
        [
            number("Jobs running", Metric(text='count(max by (slurm_job_id) (%kansoku.slurm.job.state{slurm_state="running"}))'), width=4),
            number("GPUs held", Metric(text=f"count({_HELD})"), width=4),
            number("GPUs in all", Metric(text="count(max by (host_name, hw_name) (%kansoku.gpu.info))"), width=4),
            number("Nodes idle", Metric(text='count(max by (slurm_node_name) (%kansoku.slurm.node.state{slurm_state="idle"})) or vector(0)'), width=4),
            number("Nodes not in service", Metric(text=f"count(max by (slurm_node_name) (%kansoku.slurm.node.state{out})) or vector(0)"), bad_above=1, width=4),
            number("Users logged in", Metric(text="count(sum by (kansoku_user) (%kansoku.login.sessions))"), width=4),
            curves("GPUs held by account", Metric(text=f"count by (slurm_account) ({_HELD})", legend="{{slurm_account}}"), stack=True),
            curves("GPUs held by user", Metric(text=f"count by (slurm_user) ({_HELD})", legend="{{slurm_user}}"), stack=True),
            curves("GPUs held by partition", Metric(text=f"count by (slurm_partition) ({_HELD})", legend="{{slurm_partition}}"), stack=True),
            curves("Nodes by state", Metric(text="count by (slurm_state) (max by (slurm_node_name, slurm_state) (%kansoku.slurm.node.state))", legend="{{slurm_state}}"), note="A node may have several: mixed and drain"),
            metric_table(
                "Jobs now: GPUs held",
                Metric(text=f"count by (slurm_job_id, slurm_user, slurm_account, slurm_partition) ({_HELD})", instant=True),
                {"slurm_job_id": "job", "slurm_user": "user", "slurm_account": "account", "slurm_partition": "partition"},
                value="GPUs",
            ),
            metric_table(
                "Which nodes are not in service",
                Metric(text=f"max by (slurm_node_name, slurm_state) (%kansoku.slurm.node.state{out})", instant=True),
                {"slurm_node_name": "node", "slurm_state": "state"},
            ),
            states("States of nodes", Metric(text='max by (slurm_node_name, slurm_state) (%kansoku.slurm.node.state{slurm_state=~"down|drain|fail|not_responding|reserved|maint"})', legend="{{slurm_node_name}} {{slurm_state}}")),
            curves("Login sessions", Metric(text="sum by (host_name, kansoku_user) (%kansoku.login.sessions)", legend="{{host_name}} {{kansoku_user}}"), width=24),
            log_table(
                "Jobs and nodes: changes",
                Logs(text='"kansoku.source":="slurm" | fields _time, "kansoku.subject", "kansoku.kind", _msg | sort by (_time desc) | limit 300'),
            ),
        ],
        note="Jobs, GPUs held, states of nodes",
    )  # fmt: skip


def incidents() -> Any:
    """Return the dashboard of incidents, findings and events."""
    return board(
        "kansoku-incidents",
        "Incidents",
        [
            number("Incidents opened", Logs(text='"event.name":="kansoku.incidents" | stats count_uniq("kansoku.id") incidents', kind="stats"), width=6),
            number("Findings made", Logs(text='"event.name":="kansoku.findings" | stats count() findings', kind="stats"), width=6),
            number("Errors reported", Logs(text='severity:in("error","critical") | stats count() errors', kind="stats"), width=6),
            log_table(
                "Incidents",
                Logs(text='"event.name":="kansoku.incidents" "kansoku.domain":~"$domain" | fields _time, "kansoku.id", "kansoku.state", "kansoku.domain", "kansoku.subject", "kansoku.kind", "kansoku.verdict", "kansoku.confidence", "kansoku.actions" | sort by (_time desc) | limit 200'),
            ),
            log_table(
                "Findings",
                Logs(text='"event.name":="kansoku.findings" "kansoku.domain":~"$domain" | fields _time, "kansoku.severity", "kansoku.domain", "kansoku.subject", _msg, "kansoku.confidence", "kansoku.source" | sort by (_time desc) | limit 300'),
            ),
            curves("Events by kind", Logs(text='"kansoku.kind":* NOT "event.name":~"^kansoku\\\\." | stats by ("kansoku.kind") count() events', kind="statsRange", legend="{{kansoku.kind}}"), width=24),
            log_table(
                "What nodes report most",
                Logs(text='severity:in("error","warning","critical") NOT "event.name":~"^kansoku\\\\." | stats by ("kansoku.subject", "kansoku.kind") count() events, max(_time) last | sort by (events desc) | limit 100', kind="stats"),
            ),
            log_table(
                "Kernel and driver",
                Logs(text='"kansoku.source":in("kernel","kernel_log","nvml","dcgm") | fields _time, severity, "kansoku.subject", "kansoku.kind", _msg | sort by (_time desc) | limit 300'),
            ),
            curves(
                "Rules that fire",
                Metric(text='count by (alertname, severity) (ALERTS{alertstate="firing"}) or vector(0)', legend="{{alertname}} {{severity}}"),
                width=24, note="Written by vmalert",
            ),
        ],
        variables=[_domain()],
        note="Incidents, findings, events and alerts",
    )  # fmt: skip


def _domain() -> Any:
    from kansoku.deploy.dashboards._panels import text_variable

    return text_variable("domain", "domain", ".*")


def telemetry() -> Any:
    """Return the dashboard of the agents themselves."""
    age = f"time() - %kansoku.agent.collector.last_success{{{NODE}}}"
    name = "{{host_name}} {{kansoku_collector}}"
    return board(
        "kansoku-telemetry",
        "Telemetry health",
        [
            number("Nodes reporting", Metric(text=f"count(max by (host_name) (%kansoku.agent.samples{{{NODE}}}))"), width=4),
            number("Samples a second", Metric(text=f"sum(rate(%kansoku.agent.samples{{{NODE}}}{_RATE}))"), "cps", width=4),
            number("Dropped", Metric(text=f"sum(increase(%kansoku.agent.dropped{{{NODE}}}[$__range]))"), bad_above=1, width=4),
            number("Failed rounds of collectors", Metric(text=f"sum(increase(%kansoku.agent.collector.failures{{{NODE}}}[$__range]))"), bad_above=1, width=4),
            number("Oldest success", Metric(text=f"max({age})"), "s", bad_above=180, width=4),
            number("Series", Metric(text='count({__name__=~"hw_.+|system_.+|nfs_.+|kansoku_.+"})'), width=4),
            curves("Age of the last success", Metric(text=f"max by (host_name, kansoku_collector) ({age})", legend=name), unit="s"),
            curves("Time of a round by collector", Metric(text=f"max by (kansoku_collector) (%kansoku.agent.collector.duration{{{NODE}}})", legend="{{kansoku_collector}}"), unit="s"),
            curves("CPU of agents", Metric(text=f"rate(%kansoku.agent.cpu.time{{{NODE}}}{_RATE})", legend="{{host_name}}"), unit="percentunit", note="Of one core"),
            curves("Memory of agents", Metric(text=f"%kansoku.agent.memory.usage{{{NODE}}}", legend="{{host_name}}"), unit="bytes"),
            curves("Samples a second by node", Metric(text=f"rate(%kansoku.agent.samples{{{NODE}}}{_RATE})", legend="{{host_name}}"), unit="cps"),
            curves("Dropped, and why", Metric(text=f"sum by (host_name, kansoku_cause) (increase(%kansoku.agent.dropped{{{NODE}}}{_RATE}))", legend="{{host_name}} {{kansoku_cause}}")),
            curves(
                "Records of jobs' rings",
                Metric(text=f"sum by (host_name) (rate(%kansoku.run.ring.records{{{NODE}}}{_RATE}))", legend="{{host_name}}"),
                Metric(text=f"sum by (host_name) (rate(%kansoku.run.ring.lost{{{NODE}}}{_RATE}))", legend="{{host_name}} lost"),
                unit="cps",
            ),
            metric_table(
                "What machines lack",
                Metric(text=f"count by (kansoku_collector) (%kansoku.agent.collector.absent{{{NODE}}} > 0)", instant=True),
                {"kansoku_collector": "collector"}, value="nodes without",
            ),
        ],
        variables=[node_variable()],
        note="Whether what the other dashboards show is whole and fresh",
    )  # fmt: skip
