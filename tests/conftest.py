"""What must be so before lowbit is imported, and the settings of every test."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import Counter
from importlib import import_module

if (
    "PYTEST_XDIST_WORKER" in os.environ
):  # several processes at once: with a thread a core each, they would wait in turns
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():  # kernels in Triton run in its interpreter, on CPU tensors
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from hypothesis import HealthCheck, settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell, which tests of Ctrl-C would miss
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "lowbit",
    deadline=None,
    derandomize=True,  # the same examples everywhere, so that a failure is everyone's
    database=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
settings.load_profile("lowbit")

sys.modules.setdefault("openvino_telemetry", None)  # it would fork a process per event to report usage


class _FailuresAtOnce:
    """Prints each failure as it happens: a run of continuous integration that is stopped ends without its summary."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            terminal = self.config.pluginmanager.get_plugin("terminalreporter")
            terminal.write_line(f"\n{report.nodeid} ({report.when})\n{report.longreprtext}")


def pytest_configure(config):
    if os.environ.get("CI") and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(_FailuresAtOnce(config))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """``@pytest.mark.thinned(n)``: every n-th case of the test is fast, all others are slow."""
    seen = Counter()
    for item in items:
        mark = item.get_closest_marker("thinned")
        if mark is not None:
            test = item.nodeid.partition("[")[0]
            if seen[test] % mark.args[0]:
                item.add_marker(pytest.mark.slow)
            seen[test] += 1


def pytest_collection_finish(session):
    """What was imported to collect the tests lives as long as they do: garbage is not sought in it, test by test."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config):
    gc.unfreeze()  # the interpreter frees it as it ends


@pytest.fixture(autouse=True, scope="session")
def _quick_interpreter():
    from lowbit.backends import triton

    if triton.INTERPRETED:
        from support.interpreter import hasten

        hasten()


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory):
    """Ops are timed while other tests run, and the times are kept for nobody.

    So the processor's caches are not emptied before each run of an op, which would take as long as all else.
    """
    os.environ["LOWBIT_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    import_module("lowbit.memory.timing")._FLUSH = 1 << 16


@pytest.fixture(autouse=True)
def _clean_state():
    """Every test begins with the same random state and an empty compiler, and fails if it leaves a setting behind."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    if "torch._dynamo.utils" in sys.modules:  # recompilations of several tests would count towards one limit
        torch.compiler.reset()
    assert torch.get_num_threads() == threads, "the test left another number of threads behind"
    tiny = torch.full((1,), 1e-39)
    assert bool(tiny * 1 != 0), "the test left set_flush_denormal(True) behind"


@pytest.fixture
def run(monkeypatch, capsys):
    """The command in this process, which is quicker: ``run("formats")`` gives what it prints, or complains of."""
    import lowbit.cli as cli

    def call(*arguments: str, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["lowbit", *arguments])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as stop:
            cli.main()
        told = capsys.readouterr()
        assert (stop.value.code or 0) == code, told.err
        return told.err if code else told.out

    return call


@pytest.fixture(scope="module")
def steady_times():
    """Ops take what their arithmetic and traffic take at fixed rates; none is run to be timed."""
    from lowbit.memory.cost import Rates
    from lowbit.memory.timing import Timings

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Timings, "seconds", lambda self, call: None)
        estimator = import_module("lowbit.memory.estimator")
        patch.setattr(estimator, "rates", lambda device: Rates(5e10, 8e9))
        patch.setattr(estimator, "RECOMPUTATIONS", [])
        yield
