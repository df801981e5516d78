"""Ctrl-C during a training: the state is saved, and the processes that make data stay quiet."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from signals import ignores
from typer.testing import CliRunner

from collab_llm_lab.training.stopping import StopRequest, processes_ignoring_sigint
from collab_llm_lab.training.text import trainer
from collab_llm_nodes.cli import app


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Set the handlers that the command line has; restore pytest's."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_ends_at_once(
    number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with StopRequest() as stop:
        assert not stop()
        os.kill(os.getpid(), number)
        assert stop()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert "stopping after this step" in capfd.readouterr().err
    with pytest.raises(SystemExit) as ended:
        stop.end()
    assert ended.value.code == 128 + number


def test_without_a_signal_nothing_changes() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
    stop.end()


def test_in_the_background_of_a_script_ctrl_c_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
    assert not stop()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_process_started_deaf_ignores_ctrl_c_from_its_beginning() -> None:
    with processes_ignoring_sigint():
        child = multiprocessing.get_context("spawn").Process(target=signal.pause, daemon=True)
        child.start()
    try:
        assert child.pid is not None
        assert ignores(child.pid, signal.SIGINT)
        assert not ignores(os.getpid(), signal.SIGINT)
        assert not ignores(child.pid, signal.SIGTERM)
    finally:
        child.terminate()
        child.join()


def test_an_interrupted_command_writes_its_results_and_ends_with_130(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(config: trainer.TrainText, stop: StopRequest) -> bool:
        os.kill(os.getpid(), signal.SIGINT)
        return not stop()

    monkeypatch.setattr(trainer, "train_text", interrupted)
    file = tmp_path / "results.json"
    options = ["--plan", "tiny", "--device", "cpu", "--out", str(tmp_path), "--json", str(file)]
    result = CliRunner().invoke(app, ["train", "text", *options])
    assert result.exit_code == 130
    assert '"finished": false' in file.read_text()
