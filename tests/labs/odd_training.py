"""A training of one process that does, late, what trainings seldom do; it knows nothing of kansoku.

``python odd_training.py OUT``: writes what it computed to ``OUT/odd.json``.
"""

import copy
import gc
import inspect
import json
import os
import pickle
import sys
import threading
import weakref
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

USUAL = 20
"""Updates before the odd part."""


class Net(nn.Module):
    def __init__(self, recompute=None):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.recompute = recompute
        self.fails = False

    def forward(self, x=None, input_ids=None, scale=1.0):
        x = input_ids if x is None else x
        if self.fails:
            raise ValueError("mine")
        if self.recompute is None:
            return self.second(torch.relu(self.first(x))) * scale
        hidden = checkpoint(self.first, x, use_reentrant=self.recompute == "reentrant")
        return self.second(torch.relu(hidden)) * scale


class ByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, named):
        return self.inner(named["x"] if isinstance(named, dict) else named[0])


class Nested(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def deep(levels):
    """Return a chain of modules that comes near the interpreter's limit of recursion."""
    model = nn.Identity()
    for _ in range(levels):
        model = Nested(model)
    return model


class Louder(Net):
    def __call__(self, *args, **kwargs):
        return 2 * super().__call__(*args, **kwargs)


class Backwards(torch.autograd.Function):
    """Its backward runs a model forward and backward of its own."""

    @staticmethod
    def forward(ctx, x, net):
        ctx.net = net
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            ctx.net(torch.ones(2, 8)).sum().backward()
        return gradient, None


def odd(net, other, optimizer, batch):
    """Yield (what, function); each function returns something that must not change."""

    def update(model, *args, **kwargs):
        loss = model(*args, **kwargs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss).hex()

    def raises(function):
        try:
            function()
        except ValueError as error:
            return str(error)
        return "nothing"

    def failing():
        net.fails = True
        try:
            return raises(lambda: net(batch))
        finally:
            net.fails = False

    def failing_backward():
        loss = net(batch).sum()
        loss.register_hook(lambda _: (_ for _ in ()).throw(ValueError("in the backward")))
        return raises(loss.backward)

    def evaluates():
        net.eval()
        with torch.no_grad():
            result = float(
                sum(net(one).sum() for one in DataLoader(torch.ones(6, 8), batch_size=2))
            )
        net.train()
        return result

    def in_eval_mode():
        net.eval()
        results = [update(net, batch) for _ in range(3)]
        net.train()
        return results

    def by_lbfgs():
        lbfgs = torch.optim.LBFGS(other.parameters(), max_iter=3)

        def closure():
            lbfgs.zero_grad()
            loss = other(batch).square().sum()
            loss.backward()
            return loss

        return float(lbfgs.step(closure)).hex()

    def in_a_thread():
        found = []
        thread = threading.Thread(target=lambda: found.append(float(net(batch).sum())))
        thread.start()
        thread.join()
        return found

    def beside_a_thread():
        """Train while another thread stands in a forward."""
        inside, may_go_on = threading.Event(), threading.Event()

        def waits(*_):
            inside.set()
            may_go_on.wait(20)

        handle = other.first.register_forward_hook(waits)
        thread = threading.Thread(target=other, args=(batch,))
        thread.start()
        inside.wait(20)
        results = [update(net, batch) for _ in range(3)]
        may_go_on.set()
        thread.join()
        handle.remove()
        return results

    def in_a_fork():
        child = os.fork()
        if child == 0:
            os._exit(0 if [update(net, batch) for _ in range(3)] else 1)
        return os.waitpid(child, 0)[1]

    def nested():
        return float(Backwards.apply(net(batch), other).sum().backward() is None)

    def hooked():
        seen = []
        handle = net.register_forward_hook(lambda *_: seen.append("after"))
        result = update(net, batch)
        handle.remove()
        return seen, result

    def profiled():
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True
        ) as profile:
            net(batch)
        return len([e for e in profile.events() if e.name.startswith("nn.Module")])

    def dropped():
        """Return how many of the models that are no longer used are still there."""
        references = []
        for _ in range(3):
            model = Net()
            update(model, batch)
            references.append(weakref.ref(model))
        del model
        gc.collect()
        return sum(reference() is not None for reference in references)

    def update_that_raises():
        def raises_in_it(*_):
            raise ValueError("in the update")

        handle = optimizer.register_step_pre_hook(raises_in_it)
        said = raises(lambda: update(net, batch))
        handle.remove()
        return said, [update(net, batch) for _ in range(3)]

    def hook_that_trains():
        def trains(*_):
            net(batch).sum().backward()

        handle = optimizer.register_step_post_hook(trains)
        result = update(net, batch)
        handle.remove()
        return result

    yield "keyword", lambda: [update(net, input_ids=batch) for _ in range(2)]
    yield "other shapes", lambda: [update(net, torch.ones(n, 8)) for n in (3, 5, 3, 5)]
    yield "other model", lambda: [float(m(batch).sum()).hex() for m in (other, net, other, net)]
    yield "own call", lambda: update(Louder().requires_grad_(), batch)
    yield (
        "bound and unbound",
        lambda: [update(net.__call__, batch), float(nn.Module.__call__(net, batch).sum())],
    )
    yield "failing", failing
    yield "failing backward", failing_backward
    yield "after it", lambda: update(net, batch, scale=0.5)
    yield "evaluates", evaluates
    yield "in eval mode", in_eval_mode
    yield "reentrant", lambda: update(Net("reentrant"), batch.clone().requires_grad_())
    yield "not reentrant", lambda: update(Net("not reentrant"), batch)
    yield "meta", lambda: list(nn.Linear(8, 8, device="meta")(batch.to("meta")).shape)
    yield "lbfgs", by_lbfgs
    yield "thread", in_a_thread
    yield "beside a thread", beside_a_thread
    yield "fork", in_a_fork
    yield "nested", nested
    yield "hooked", hooked
    yield "hook that trains", hook_that_trains
    yield "copied", lambda: float(copy.deepcopy(net)(batch).sum()).hex()
    yield "pickled", lambda: float(pickle.loads(pickle.dumps(net))(batch).sum()).hex()
    yield "scripted", lambda: float(torch.jit.script(nn.Linear(8, 8))(batch * 0).sum()) is not None
    yield "traced", lambda: str(torch.jit.trace(net, batch).graph)
    yield (
        "attributes",
        lambda: [inspect.isfunction(nn.Module.__call__), inspect.ismethod(net.__call__)],
    )
    yield "profiled", lambda: [profiled() for _ in range(2)]
    yield "by dictionary", lambda: [update(ByName(), {"x": batch}) for _ in range(3)]
    yield "by list", lambda: [float(ByName()([batch]).sum()) is not None for _ in range(3)]
    yield "deep", lambda: float(deep(230)(batch).sum()).hex()
    yield "dropped", dropped
    yield "update that raises", update_that_raises
    yield (
        "symbolic",
        lambda: len(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU())).graph.nodes),
    )
    yield "signature", lambda: [str(inspect.signature(net.forward)), callable(net.__call__)]
    yield (
        "gradients",
        lambda: float(torch.autograd.grad(net(batch).sum(), net.first.weight)[0].sum()).hex(),
    )
    yield "mapped", lambda: float(torch.func.vmap(net)(batch).sum()).hex()
    yield (
        "called as a function",
        lambda: float(
            torch.func.functional_call(net, dict(net.named_parameters()), (batch,)).sum()
        ).hex(),
    )
    yield "usual again", lambda: [update(net, batch) for _ in range(3)]


def main():
    torch.manual_seed(3)
    torch.set_num_threads(1)
    net, other = Net(), Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for batch in DataLoader(torch.randn(2 * USUAL, 8), batch_size=2):
        net(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {"before": type(nn.Module.__dict__["__call__"]).__name__}
    for what, function in odd(net, other, optimizer, batch):
        found[what] = function()
    found["after"] = type(nn.Module.__dict__["__call__"]).__name__
    # Dynamo has to look through the wrapper of modules.
    import torch._dynamo as dynamo

    compiled = torch.compile(net.__call__, backend="eager", fullgraph=True)
    for _ in range(2):
        compiled(batch).sum().backward()
        optimizer.step()
    found["graphs"] = dynamo.utils.counters["stats"]["unique_graphs"]
    found["breaks"] = sum(dynamo.utils.counters["graph_break"].values())
    found["compiled"] = type(nn.Module.__dict__["__call__"]).__name__
    exported = torch.export.export(Net(), (batch,), strict=True)
    found["exported"] = len(exported.graph.nodes)
    (Path(sys.argv[1]) / "odd.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
