"""Ctrl-C in the middle of real commands: a line on what is kept, and the same command goes on to
what it would have been.
"""

import contextlib
import shlex
import signal
import threading

import pytest
from helpers.smaller import TEXT, output_of, run_cell

from kvalign.app.cli.main import main
from kvalign.app.commands.eval_run import Cell

pytestmark = pytest.mark.slow


def stopped(command, folder, when, capfd, by=signal.SIGINT):
    """The last line of a command that is stopped, in this process, once such a file is there."""
    is_over = threading.Event()

    def stop():
        while not list(folder.glob(when)):
            if is_over.wait(0.02):
                return
        if not is_over.wait(0.2):  # until what follows has begun
            signal.pthread_kill(threading.main_thread().ident, by)

    watcher = threading.Thread(target=stop)
    watcher.start()
    try:
        with contextlib.chdir(folder):
            code = main(shlex.split(command))
    finally:
        is_over.set()
        watcher.join()
    assert code == 130
    return capfd.readouterr().err.splitlines()[-1]


def says(command, kept):
    name = " ".join(word for word in command.split()[:2] if not word.startswith("-"))
    return f"kvalign {name}: interrupted; {kept}; to go on: kvalign {command}"


def test_gen_data_keeps_shards(tmp_path, capfd):
    """test_recording.py: what goes on ends in the same bytes."""
    (tmp_path / "words.txt").write_text(TEXT)
    command = "gen-data --corpus text:words.txt --num-tokens 3072 --shard-mb 2 --out stopped"
    line = stopped(command, tmp_path, "stopped/*-00001.safetensors", capfd, by=signal.SIGTERM)
    num_shards = int(line.split("interrupted; ")[1].split()[0])
    assert line == says(command, f"{num_shards} shards are kept in stopped") and num_shards > 0


SUITE = """
title: Two
about: Two cells.
cells:
  - {name: short, command: eval perplexity --methods window --cache-sizes 16 --num-tokens 30}
  - {name: long, command: eval perplexity --methods recompute --cache-sizes 200 --num-tokens 40}
"""


def test_a_suite_keeps_finished_cells(tmp_path, monkeypatch, capfd, undrawn):
    """The second one, in a process of its own, is stopped."""
    (tmp_path / "two.yaml").write_text(SUITE)
    command, place = "eval run two.yaml --out results", "kvalign.app.commands.eval_run.Cell.output"
    apart = Cell.output
    monkeypatch.setattr(place, lambda cell: (run_cell if cell.name == "short" else apart)(cell))
    line = stopped(command, tmp_path, "results/short.json", capfd)
    assert line == says(command, "1 of 2 cells are finished in results")
    monkeypatch.setattr(place, run_cell)
    with contextlib.chdir(tmp_path):
        assert output_of(shlex.split(command)) == "report: results/report.html\n"
    assert (tmp_path / "results" / "long.json").exists()
