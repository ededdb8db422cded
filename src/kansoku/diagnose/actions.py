"""What to do about a cause, as operators do it."""

from kansoku.diagnose.observation import Observation
from kansoku.model import Action, Domain, Subject

__all__ = ["actions_for"]

_NODE_KINDS = {"node", "gpu", "nic"}

_GENERAL = {
    Domain.APPLICATION: "hand the job to its owner with the evidence; the nodes may go on serving",
    Domain.FRAMEWORK: "look for the rank that stopped first; align library versions on all nodes",
    Domain.GPU_HARDWARE: "take the node out of service and resume on a reserved one",
    Domain.NETWORK: "check the link and its switch port; compare with the neighbours on the leaf",
    Domain.STORAGE: "check the target's server, then quota and space; resume from a checkpoint",
    Domain.SCHEDULER: "no fault of the machine: requeue, or ask for more time",
    Domain.HOST: "drain the node and check its kernel log, memory and limits",
}


def actions_for(domain: Domain, subject: Subject | None, lead: Observation) -> tuple[Action, ...]:
    """Return the specific action of the rule, then the general one, with commands to copy."""
    actions = []
    if lead.action:
        actions.append(Action(sentence=lead.action))
    node = None
    if subject is not None and subject.kind in _NODE_KINDS:
        node = subject.name.split("/")[0]
    command = None
    if node is not None and domain in {Domain.GPU_HARDWARE, Domain.HOST}:
        reason = f"kansoku: {lead.component}"
        command = f"scontrol update nodename={node} state=drain reason='{reason}'"
    actions.append(Action(sentence=_GENERAL[domain], command=command))
    return tuple(actions)
