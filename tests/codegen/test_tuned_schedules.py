"""The store of measured schedules: what comes back, who wins, what damage does."""

from __future__ import annotations

import json
import threading
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from te_fuser.codegen.cache_files import EntryFile
from te_fuser.codegen.schedule import Kind, Schedule, Sums
from te_fuser.codegen.tuned_schedules import TunedSchedules, shape_class, store_for
from te_fuser.config import config
from tests.parallel.ranks import forking

ROWS = Schedule(Kind.SHARED, 8, 256, 1, 2, 3, 2, Sums.REGISTERS, keeps=True)
COLUMNS = Schedule(Kind.COLUMNS, 8, 32, 8, 1, 1, 4, Sums.REGISTERS)
PLAIN = Schedule(Kind.REGISTERS, 8, 128, 1, 4, 1, 6, Sums.NONE, rounds=0)


def test_what_was_kept_comes_back(tmp_path: Path) -> None:
    store = TunedSchedules(tmp_path / "gpu.json")
    assert store.find("a", 5) == ()
    store.put("a", [ROWS, COLUMNS], rows=5, ms=0.25)
    store.put("b", [PLAIN])
    for other in (store, TunedSchedules(store.path)):
        assert other.find("a", 5) == other.find("a", 8) == (ROWS, COLUMNS)
        assert other.find("a", 4) == other.find("a", 9) == other.find("a") == ()
        assert other.find("b", 5) == other.find("b", 10**6) == other.find("b") == (PLAIN,)
    assert json.loads(store.path.read_text())["entries"]["a"]["rows<=8"]["ms"] == 0.25


def test_near_rows_come_before_any(tmp_path: Path) -> None:
    store = TunedSchedules(tmp_path / "gpu.json")
    store.put("a", [ROWS])
    store.put("a", [COLUMNS], rows=64)
    store.put("a", [PLAIN], rows=64)  # a later measurement replaces an earlier one
    assert store.find("a", 64) == store.find("a", 33) == (PLAIN,)
    assert store.find("a", 65) == (ROWS,)


def test_another_process_is_seen(tmp_path: Path) -> None:
    mine, other = TunedSchedules(tmp_path / "gpu.json"), TunedSchedules(tmp_path / "gpu.json")
    assert mine.find("a") == ()
    other.put("a", [ROWS])
    assert mine.find("a") == (ROWS,)
    mine.put("b", [PLAIN])
    assert other.find("a") == (ROWS,) and other.find("b") == (PLAIN,)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 99, "entries": {}}', '{"format": 1, "entries": 3}', '{"format": 1}', "\x00\xff"]
)
def test_a_damaged_file_counts_as_empty(text: str, tmp_path: Path) -> None:
    store = TunedSchedules(tmp_path / "gpu.json")
    store.path.write_text(text)
    assert store.find("a") == ()
    store.put("a", [ROWS])
    assert store.find("a") == (ROWS,)


@pytest.mark.parametrize("change", [{"kind": "nowhere"}, {"sums": 3}, {"colour": 1}, {"vector": None}, None], ids=str)
def test_a_damaged_entry_counts_as_none(change: dict[str, object] | None, tmp_path: Path) -> None:
    store = TunedSchedules(tmp_path / "gpu.json")
    store.put("a", [ROWS])
    store.put("b", [PLAIN])
    content = json.loads(store.path.read_text())
    (schedule,) = content["entries"]["a"]["any"]["schedules"]
    content["entries"]["a"]["any"]["schedules"] = [{**schedule, **change}] if change else "nothing"
    store.path.write_text(json.dumps(content))
    assert store.find("a") == () and store.find("b") == (PLAIN,)


def test_shape_classes() -> None:
    found = [shape_class(rows) for rows in (None, 0, 1, 2, 3, 4, 5, 8192, 8193)]
    assert found == [
        "any", "rows<=1", "rows<=1", "rows<=2", "rows<=4", "rows<=4", "rows<=8", "rows<=8192", "rows<=16384"
    ]  # fmt: skip
    with pytest.raises(ValueError, match="cannot have -1 rows"):
        shape_class(-1)


def test_nothing_cannot_be_kept(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no schedule to keep"):
        TunedSchedules(tmp_path / "gpu.json").put("a", [])


def test_each_gpu_has_its_file(tmp_path: Path) -> None:
    store = store_for("NVIDIA H200", tmp_path)
    assert store is store_for("NVIDIA H200", tmp_path) and store.path.name == "nvidia-h200.schedules.json"
    assert store_for("NVIDIA H100 80GB HBM3", tmp_path).path != store.path


def test_what_lay_among_the_cpus_kernels_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(config, "cache_dir", None)
    old, new = tmp_path / "te_fuser" / "cpu" / "tuned", tmp_path / "te_fuser" / "tuned"
    TunedSchedules(old / "nvidia-h200.schedules.json").put("a", [ROWS])
    assert store_for("NVIDIA H200").find("a") == (ROWS,)
    assert store_for("NVIDIA H200").path.parent == new and not old.exists()
    TunedSchedules(old / "nvidia-h200.schedules.json").put("a", [PLAIN])  # by an older version, later
    assert store_for("NVIDIA H200").find("a") == (ROWS,)


def _keep_many(path: Path, name: str) -> None:
    store = TunedSchedules(path)
    for number in range(20):
        store.put(f"{name}{number}", [PLAIN])


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    """The file is whole at any time, and what other threads wrote stays."""
    path = tmp_path / "gpu.json"
    TunedSchedules(path).put("first", [ROWS])
    writers = [threading.Thread(target=_keep_many, args=(path, name)) for name in "ab"]
    for w in writers:
        w.start()
    while any(w.is_alive() for w in writers):
        assert TunedSchedules(path).find("first") == (ROWS,)
    for w in writers:
        w.join()
    assert len(json.loads(path.read_text())["entries"]) == 41
    assert [p.name for p in tmp_path.iterdir()] == ["gpu.json"]


def _write(path: Path, together: Barrier) -> None:
    together.wait(120)
    for number in range(40):
        EntryFile(path).change(lambda entries, n=number: entries.update({f"theirs {n}": {}}))


def test_processes_do_not_lose_each_others_entries(tmp_path: Path) -> None:
    file, number = EntryFile(tmp_path / "gpu.json"), 0
    context = forking()
    together = context.Barrier(2)
    other = context.Process(target=_write, args=(file.path, together))
    other.start()
    together.wait(120)
    while other.exitcode is None:  # as long as it writes, so that they meet
        number += 1
        file.change(lambda entries, n=number: entries.update({f"ours {n % 40}": {"number": n}}))
    found = file.entries()
    assert other.exitcode == 0 and found[f"ours {number % 40}"] == {"number": number}
    assert sum(key.startswith("theirs") for key in found) == 40
