"""The wrappers in C, over stand-ins for torch's module, engine, loader and optimizer."""

import gc
import inspect
import mmap
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.labs.sanitizers import sanitized_environment
from tests.labs.training import CACHE

from kansoku.capture.payload import phases
from kansoku.model import ring

SIZE = 1 << 20
FORWARD, BACKWARD = ring.KIND_CODES["forward"], ring.KIND_CODES["backward"]
DATA, OPTIMIZER = ring.KIND_CODES["data_wait"], ring.KIND_CODES["optimizer"]
STEP = ring.KIND_CODES["step"]


@pytest.fixture(autouse=True)
def cache(monkeypatch):
    monkeypatch.setenv("KANSOKU_CACHE_DIR", os.environ.get("KANSOKU_TEST_CACHE", str(CACHE)))


class Tensor:
    is_meta = False

    def __init__(self, *shape):
        self.shape = shape


class Engine:
    """As torch's: ``run_backward`` and other attributes."""

    queued = "callbacks"

    def __init__(self):
        self.inside = None

    def run_backward(self, *args, **kwargs):
        if self.inside is not None:
            self.inside()
        return args, kwargs


class Stage:
    """Stand-ins with the wrappers in C in place, over a ring of its own."""

    def __init__(self):
        class Module:
            """As torch's: two lines of ``__call__``, and a name for what they call."""

            _compiled_call_impl = None

            def __init__(self):
                self.training = True

            def __getattr__(self, name):
                raise AttributeError(name)

            def _call_impl(self, *args, **kwargs):
                return self.forward(*args, **kwargs)

        class Loader:
            pass

        def slowly(kind, result):
            def call(*args, **kwargs):
                self.slow.append(kind)
                return result(*args, **kwargs)

            return call

        self.Module, self.Loader, self.engine = Module, Loader, Engine()
        self.slow, self.failures, self.broken = [], [], 0
        self.grad, self.mode = True, None
        self.buffer = mmap.mmap(-1, SIZE)
        ring.format_ring(self.buffer, pid=1, process_start=0, anchor=(0, 0))
        self.writer = ring.RingWriter(self.buffer)
        self.optimizer = Optimizer()
        callbacks = phases.Callbacks(
            template=self.template, optimizers=lambda: [id(self.optimizer)], anchor=int, late=int
        )
        self.phases = phases._compiled(self.writer, -1, callbacks)
        self.calls = calls = self.phases.calls
        calls.depth = calls.last_eval = calls.updates = 0
        calls.eval_trains, calls.counting = False, None
        self.tracer = None
        self.begin(lambda: self.grad, lambda: self.mode)
        Module.__call__ = calls.call(Module, slowly("module", Module._call_impl))
        Loader.__next__ = calls.next(Loader, next_of, slowly("loader", next_of))
        self.wrapped = calls.engine(self.engine, slowly("engine", self.engine.run_backward))

    def begin(self, is_grad_enabled, fake_mode):
        self.calls.begin(
            self.phases, is_grad_enabled, fake_mode, lambda: self.tracer,
            self.failures.append, self.is_broken,
            lambda *_: self.slow.append("begins"), lambda *_: self.slow.append("ends"),
        )  # fmt: skip

    def template(self, kind, name, flags, attributes):
        if name == "Unnamed":
            raise RuntimeError("no room for a name")
        if name == "Ended":
            raise SystemExit(7)  # as a handler of the job's signals may
        return ring.pack_template(kind, flags=flags, name=self.writer.intern(name))

    def is_broken(self):
        self.broken += 1

    def spans(self):
        """Return (kind, name, flags, kind of the parent) of phases, in the order of their starts."""
        header = ring.read_header(self.buffer)
        names = ring.read_strings(self.buffer, header)
        kinds, rows = {0: 0}, []
        for number in range(self.phases.newest()):
            at = header.lanes[0].offset + number * ring.RECORD_BYTES
            row = {
                field: struct.unpack_from("=" + form, self.buffer, at + offset)[0]
                for field, offset, form in ring.RECORD_FIELDS
            }
            assert row["duration_ns"] >= 0 or row["kind"] == ring.KIND_CODES["step"]
            kinds[row["id"]] = row["kind"]
            rows.append((row["kind"], names[row["name"]], row["flags"], kinds[row["parent"]]))
        return [row for row in rows if row[0] != ring.KIND_CODES["step"]]


class Optimizer:
    param_groups = (1,)


def next_of(loader):
    return next(loader.batches)


def model_of(stage, forward, name="Model"):
    """Return a module whose forward is known to have been seen before, with a (2, 3) input."""
    made = type(name, (stage.Module,), {"forward": forward})()
    stage.calls.remember(id(made), (2, 3), 600.0, 6.0)
    return made


@pytest.fixture
def stage():
    made = Stage()
    yield made
    made.calls.stop()


def test_a_step_is_recorded_without_a_call_of_python(stage):
    inner = model_of(stage, lambda self, x: x, "Inner")
    model = model_of(stage, lambda self, x: inner(inner(x)))
    loader = stage.Loader()
    loader.batches = iter([Tensor(2, 3)])
    x = loader.__next__()
    assert model(x) is x
    assert stage.wrapped.run_backward(x, keep=True) == ((x,), {"keep": True})
    stage.calls.update_begins(stage.optimizer, (), {})
    assert stage.phases.flops == 600.0
    assert stage.phases.tokens == 6.0
    stage.calls.update_ends(stage.optimizer, (), {})
    assert stage.spans() == [
        (DATA, "DataLoader", 0, STEP),
        (FORWARD, "Model", 0, STEP),
        (BACKWARD, "backward", 0, STEP),
        (OPTIMIZER, "Optimizer", 0, STEP),
    ]
    assert stage.phases.step_span == 0  # the update ended the step
    assert stage.slow == stage.failures == []


def test_what_is_not_the_forward_of_before_goes_the_python_way(stage):
    model = model_of(stage, lambda self, *args, **kwargs: (args, kwargs))
    x = Tensor(2, 3)
    other = type("Other", (stage.Module,), {"forward": lambda self, x: x})()
    meta, long = Tensor(2, 3), Tensor(2, 4)
    meta.is_meta = True
    for call in (
        lambda: other(x),
        lambda: model(long),
        lambda: model(meta),
        model,
        lambda: model(a=x),
    ):
        stage.slow.clear()
        call()
        assert stage.slow == ["module"]
    stage.slow.clear()
    stage.grad = False
    model(x)
    stage.grad, stage.mode = True, "fake tensors"
    model(x)
    stage.mode, stage.tracer = None, "a graph"
    model(x)
    stage.tracer, model.training = None, False
    model(x)
    assert stage.slow == ["module"] * 4
    stage.calls.eval_trains = True  # a model in eval mode that is trained
    model(x)
    assert stage.slow == ["module"] * 4
    assert stage.spans() == [(FORWARD, "Model", 0, STEP)]


def test_tokens_by_keyword_are_the_forward_of_before_too(stage):
    model = model_of(stage, lambda self, **kwargs: kwargs)
    x = Tensor(2, 3)
    assert model(labels=1, input_ids=x) == {"labels": 1, "input_ids": x}
    assert stage.slow == []
    assert stage.phases.tokens == 6.0


def test_a_forward_inside_a_backward_is_repeated_and_computes_nothing_new(stage):
    part = type("Part", (stage.Module,), {"forward": lambda self, x: x})()
    x = Tensor(5)
    stage.engine.inside = lambda: part(x)
    stage.wrapped.run_backward(x)
    assert stage.spans() == [
        (BACKWARD, "backward", 0, STEP),
        (FORWARD, "Part", ring.FLAG_RECOMPUTE, BACKWARD),
    ]
    assert stage.phases.flops == 0.0


def test_a_backward_inside_a_forward_lets_the_forward_go_on(stage):
    """Inner modules after it are inner ones still."""
    inner = type("Inner", (stage.Module,), {"forward": lambda self, x: x})()

    def forward(self, x):
        stage.wrapped.run_backward(x)
        return inner(x)

    model_of(stage, forward)(Tensor(2, 3))
    assert [span[:2] for span in stage.spans()] == [(FORWARD, "Model"), (BACKWARD, "backward")]


def test_an_error_of_the_job_goes_on_and_everything_is_closed(stage):
    def fails(*_):
        raise ZeroDivisionError("the job's own")

    model = model_of(stage, fails)
    loader = stage.Loader()
    loader.batches = iter(())
    stage.engine.inside = fails
    with pytest.raises(ZeroDivisionError):
        model(Tensor(2, 3))
    with pytest.raises(StopIteration):
        loader.__next__()
    with pytest.raises(ZeroDivisionError):
        stage.wrapped.run_backward()
    assert stage.broken == 1
    assert stage.calls.depth == 0
    assert stage.phases.parent == stage.phases.step_span
    assert [span[0] for span in stage.spans()] == [FORWARD, DATA, BACKWARD]


def test_an_error_of_ours_is_counted_and_the_job_goes_on(stage):
    model = model_of(stage, lambda self, x: x, "Unnamed")
    x = Tensor(2, 3)
    assert model(x) is x
    assert [str(error) for error in stage.failures] == ["no room for a name"]

    def fails():
        raise RuntimeError("no answer")

    stage.begin(fails, fails)
    loader = stage.Loader()
    loader.batches = iter([x])
    assert loader.__next__() is x
    assert stage.wrapped.run_backward(x) == ((x,), {})
    assert [str(error) for error in stage.failures[1:]] == ["no answer"] * 2


def test_an_instance_may_have_a_call_of_its_own_as_with_torch(stage):
    """``module.compile()`` puts one there; so do some libraries with ``_call_impl``."""
    model = model_of(stage, lambda self, x: x)
    model._compiled_call_impl = lambda x: ("compiled", x)
    x = Tensor(2, 3)
    assert model(x) == ("compiled", x)
    model._compiled_call_impl = None
    model._call_impl = lambda x: ("replaced", x)
    assert model(x) == ("replaced", x)
    assert len(stage.spans()) == 2


@pytest.mark.parametrize("count", [0, 1, 6, 7, 8, 9, 40])
def test_any_number_of_arguments_goes_through(stage, count):
    model = model_of(stage, lambda self, *args, **kwargs: (args, kwargs))
    x = Tensor(2, 3)
    args, kwargs = (x, *range(count)), {f"k{n}": n for n in range(count)}
    assert model(*args) == (args, {})
    assert model(*args, **kwargs) == (args, kwargs)
    assert stage.Module.__call__(model, *args) == (args, {})
    assert model.__call__(*args, **kwargs) == (args, kwargs)
    assert type(model).__dict__.get("__call__") is None
    stage.grad = False
    assert model(*args, **kwargs) == (args, kwargs)


def test_subclasses_may_call_up(stage):
    class Louder(stage.Module):
        def forward(self, x):
            return x

        def __call__(self, x):
            return "louder", super().__call__(x)

    x, louder = Tensor(2, 3), Louder()
    stage.calls.remember(id(louder), (2, 3), 1.0, 1.0)
    assert louder(x) == ("louder", x)
    assert stage.slow == ["module"]  # what super() gives is the wrapper in Python


def test_who_reads_the_attribute_gets_the_wrapper_in_python(stage):
    """Compilers, profilers and libraries look into it, save it and wrap it."""
    model = model_of(stage, lambda self, x: x)
    kept = stage.Module.__call__
    assert inspect.isfunction(kept)
    assert inspect.ismethod(model.__call__)
    assert model.__call__.__func__ is kept
    assert model.__call__.__self__ is model
    x = Tensor(2, 3)
    assert model(x) is kept(model, x) is model.__call__(x) is x
    assert stage.slow == ["module"] * 2
    with pytest.raises(AttributeError):
        kept(3)


def test_under_a_profiler_or_a_tracer_calls_have_python_frames(stage):
    model = model_of(stage, lambda self, x: x)
    seen = []
    for watch in (sys.setprofile, sys.settrace):
        watch(lambda frame, *_: seen.append(frame.f_code.co_name))
        try:
            model(Tensor(2, 3))
        finally:
            watch(None)
    assert stage.slow == ["module"] * 2
    assert seen.count("call") >= 2  # the stand-in's


def test_an_input_without_a_shape_goes_the_python_way(stage):
    model = model_of(stage, lambda self, x: x)
    for x in ([Tensor(2, 3)], {"x": Tensor(2, 3)}, None):
        assert model(x) is x
    assert stage.slow == ["module"] * 3
    assert stage.failures == []


def test_what_a_handler_of_signals_raises_inside_us_is_the_jobs(stage):
    model = model_of(stage, lambda self, x: x, "Ended")
    with pytest.raises(SystemExit):
        model(Tensor(2, 3))
    assert stage.failures == []
    assert stage.calls.depth == 0


def test_another_thread_is_not_observed(stage):
    model = model_of(stage, lambda self, x: x)
    thread = threading.Thread(target=lambda: (model(Tensor(2, 3)), stage.wrapped.run_backward()))
    thread.start()
    thread.join()
    assert stage.slow == ["module", "engine"]
    assert stage.spans() == []


def test_once_stopped_everything_goes_the_python_way(stage):
    """As in a forked child, which must not write its parent's ring."""
    model = model_of(stage, lambda self, x: x)
    stage.calls.stop()
    loader = stage.Loader()
    loader.batches = iter([1])
    model(Tensor(2, 3))
    loader.__next__()
    stage.wrapped.run_backward()
    stage.calls.update_begins(stage.optimizer)
    stage.calls.update_ends(stage.optimizer)
    assert stage.slow == ["module", "loader", "engine", "begins", "ends"]
    assert stage.phases.newest() == 0


def test_stopped_in_the_middle_of_a_phase_nothing_is_written(stage):
    model = model_of(stage, lambda self, x: stage.calls.stop())
    model(Tensor(2, 3))
    assert stage.calls.depth == 0
    assert stage.phases.parent != 0  # still open: whoever stopped closes


def test_the_engine_is_the_jobs_in_everything_else(stage):
    assert stage.wrapped.queued == "callbacks"
    with pytest.raises(AttributeError):
        stage.wrapped.absent  # noqa: B018 - the lookup is the test


def test_a_thousand_steps_leave_no_reference(stage):
    x = Tensor(2, 3)
    model = model_of(stage, lambda self, x, *more, **named: x)
    gc.collect()
    before = [sys.getrefcount(o) for o in (x, model, stage.optimizer, type(model), stage.phases)]
    for _ in range(1000):
        model(x)
        stage.wrapped.run_backward(x, keep=x)
        stage.calls.update_begins(stage.optimizer, (), {})
        stage.calls.update_ends(stage.optimizer, (), {})
    after = [sys.getrefcount(o) for o in (x, model, stage.optimizer, type(model), stage.phases)]
    assert after == before


def test_the_same_under_sanitizers(tmp_path):
    """Address and undefined-behaviour sanitizers watch the tests above."""
    environment = sanitized_environment(KANSOKU_TEST_CACHE=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not sanitizers", __file__],
        env=environment, capture_output=True, text=True, check=False, timeout=300,
        cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "passed" in done.stdout
