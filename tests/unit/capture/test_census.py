"""One forward counted from begin to end: kernels of their own, failures, retries while tracing."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.labs.training import CACHE
from torch import nn
from torch.nn import functional

from kansoku.capture.payload import census, products

WIDTH, TOKENS = 32, 4 * 16
IDS = torch.zeros(4, 16, dtype=torch.long)


class Step:
    """What a step adds up."""

    flops = tokens = 0.0

    def work(self, flops, tokens):
        self.flops += flops
        self.tokens += tokens


@pytest.fixture(params=["operators", "modules"])
def by(request, monkeypatch):
    monkeypatch.setenv("KANSOKU_CACHE_DIR", str(CACHE))
    monkeypatch.setenv("KANSOKU_NATIVE", str(int(request.param == "operators")))
    CACHE.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(products, "_tried", False)
    monkeypatch.setattr(products, "_products", None)
    for name in ("_known", "_tries", "_roots"):
        monkeypatch.setattr(census, name, {})
    monkeypatch.setattr(census, "_last", (None, None, 0.0, 0.0), raising=False)
    phases = Step()
    recorder = SimpleNamespace(phases=phases, miss=lambda _: None, calls=None)
    monkeypatch.setattr(census, "RECORDER", recorder)
    monkeypatch.setattr(products, "RECORDER", recorder)
    return request.param


def forward(model, *args):
    """Run a forward as the hooks do; return what it added to the step, in forwards."""
    before = census.RECORDER.phases.flops
    counting = census.begin(model, args, {})
    handles = []
    if counting is not None:
        for name, module in model.named_modules():
            if name and "_orig_mod" not in name:  # compiled code passes by the hooks
                handles.append(module.register_forward_pre_hook(counting.see))
    try:
        model(*args)
    finally:
        if counting is not None:
            counting.end()
        for handle in handles:
            handle.remove()
    return (census.RECORDER.phases.flops - before) / 3


class Model(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.embedding = nn.Embedding(8, WIDTH)
        self.part = part

    def forward(self, ids):
        return self.part(self.embedding(ids))


class KernelLinear(nn.Linear):
    """A product that torch does not see, as those of Transformer Engine."""

    def forward(self, x):
        return torch.from_numpy(x.detach().numpy() @ self.weight.detach().numpy().T)


class KernelAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q = self.q(x).detach().numpy()
        return torch.from_numpy(q @ np.swapaxes(q, 1, 2) @ q)


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.fails = True

    def forward(self, x):
        x = self.first(x)
        if self.fails:
            raise MemoryError
        return self.first(x)


def test_kernels_that_torch_does_not_see_count_by_their_modules(by):
    assert forward(Model(KernelLinear(WIDTH, 8)), IDS) == 2 * TOKENS * WIDTH * 8
    attention = 4 * 4 * 16 * 16 * WIDTH
    assert forward(Model(KernelAttention()), IDS) == 2 * TOKENS * WIDTH**2 + attention


def test_the_same_shapes_count_the_same_without_looking_again(by):
    model = Model(nn.Linear(WIDTH, 8))
    first = forward(model, IDS)
    assert census.begin(model, (IDS,), {}) is None
    assert census.RECORDER.phases.flops == 2 * 3 * first
    assert forward(model, IDS[:2]) == first / 2


def test_a_forward_that_fails_is_not_taken_for_a_whole_one(by):
    model = Model(Failing())
    with pytest.raises(MemoryError):
        forward(model, IDS)
    assert census.RECORDER.phases.flops == 0
    model.part.fails = False
    assert forward(model, IDS) == 2 * 2 * TOKENS * WIDTH**2


def test_a_model_called_while_an_error_is_handled_counts(by):
    try:
        raise KeyError  # such as a batch too large, halved in the except clause
    except KeyError:
        assert forward(Model(nn.Linear(WIDTH, 8)), IDS) == 2 * TOKENS * WIDTH * 8


def test_the_function_is_torchs_own_again_after_the_forward(by):
    original = functional.scaled_dot_product_attention

    class Attends(nn.Module):
        def forward(self, x):
            h = x.unflatten(-1, (4, 8)).transpose(1, 2)
            return functional.scaled_dot_product_attention(h, h, h, is_causal=True)

    assert forward(Model(Attends()), IDS) == 4 * 4 * 16 * 16 * WIDTH
    assert functional.scaled_dot_product_attention is original


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_forward_in_which_a_compiler_traces_is_counted_again(by):
    model = Model(torch.compile(nn.Linear(WIDTH, 8), backend="aot_eager"))
    expected = 2 * TOKENS * WIDTH * 8
    assert [forward(model, IDS) for _ in range(3)] == [expected] * 3
    assert len(census._known) == 1
