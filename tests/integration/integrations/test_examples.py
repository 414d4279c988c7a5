"""The complete examples train on tiny data; their pages show them.

Each example has a plain twin; the documentation shows the difference.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from docs.generate import EXAMPLES, examples
from tests.unit.agent.conftest import run_ranks

TEXT = b"the quick brown fox jumps over the lazy dog. " * 40


def run(kind: str, name: str, folder: Path, *arguments: str) -> str:
    """Run one example in this process; return what it prints."""
    before, out = (sys.argv, os.getcwd()), io.StringIO()
    sys.argv = [name, *arguments]
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(str(EXAMPLES / kind / f"{name}.py"), run_name="__main__")
    finally:
        sys.argv = before[0]
        os.chdir(before[1])
    return out.getvalue()


def last(printed: str, what: str) -> float:
    return float(re.findall(rf"{what}'?:? ([0-9.]+)", printed)[-1])


def run_alone(kind: str, name: str, folder: Path, *arguments: str) -> str:
    """Run one example in a process of its own, where its training is the first one."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, str(EXAMPLES / kind / f"{name}.py"), *arguments]
    return subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True).stdout


TWINS = ((run, "plain"), (run_alone, "elastic"))


@pytest.fixture
def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Run both twins."""
    monkeypatch.setenv("POLLUX_CHECKPOINT_DIR", str(tmp_path / "checkpoints"))

    def run_both(name: str, *arguments: str) -> list[str]:
        printed = [by(kind, name, tmp_path / kind, *arguments) for by, kind in TWINS]
        assert list((tmp_path / "checkpoints").glob("checkpoint-*"))
        return printed

    return run_both


def test_image_classification(both: Any, tmp_path: Path) -> None:
    plain, elastic = both("image_classification", "4")
    assert min(last(plain, "accuracy"), last(elastic, "accuracy")) > 0.85
    again = run_alone("elastic", "image_classification", tmp_path / "elastic", "4")
    assert again == "", "it has finished already"
    assert torch.load(tmp_path / "elastic/best.pt").keys() == torch.load(tmp_path / "plain/best.pt").keys()


def by_torchrun(name: str, folder: Path, *arguments: str) -> dict[str, str]:
    """Run both twins on two ranks; return what each prints."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    printed = {}
    for kind in ("plain", "elastic"):
        command = [*torchrun, str(EXAMPLES / kind / f"{name}.py"), *arguments]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        printed[kind] = done.stdout + done.stderr
    return printed


@pytest.mark.skipif(torch.__version__ < "2.13", reason="fully_shard is supported from torch 2.13 on")
def test_pretraining(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(TEXT)
    printed = by_torchrun("pretraining", tmp_path, str(tmp_path / "text"), "50")
    assert max(last(each, "loss") for each in printed.values()) < 2.0


def test_a_script_for_torchrun(tmp_path: Path) -> None:
    """The page "From torchrun and DDP to Pollux" shows this pair."""
    printed = by_torchrun("ddp", tmp_path, "8")
    assert min(last(printed["plain"], "accuracy"), last(printed["elastic"], "accuracy")) > 0.85
    assert "pollux: batch size 32 on 2 GPUs: 16 per GPU" in printed["elastic"]
    torch.load(tmp_path / "model.pt", weights_only=True)


def test_language_model(both: Any, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(TEXT)
    plain, elastic = both("language_model", str(tmp_path / "text"), "60")
    assert max(last(plain, "loss"), last(elastic, "loss")) < 2.0


def test_flax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes of their own: JAX has threads, and other tests fork."""
    pytest.importorskip("flax")
    monkeypatch.setenv("POLLUX_CHECKPOINT_DIR", str(tmp_path / "checkpoints"))
    for kind in ("plain", "elastic"):
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / kind / "flax_digits.py"), "8"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        assert last(done.stdout, "accuracy") > 0.85
    assert list((tmp_path / "checkpoints").glob("checkpoint-*"))


def test_gan(both: Any) -> None:
    for printed in both("gan", "2"):
        assert printed.count("mean radius") == 2


def sharded(folder: str) -> str:
    os.environ["POLLUX_CHECKPOINT_DIR"] = f"{folder}/checkpoints"
    return run("elastic", "sharded", Path(folder), "2")


@pytest.mark.skipif(torch.__version__ < "2.13", reason="fully_shard is supported from torch 2.13 on")
def test_sharded(tmp_path: Path) -> None:
    first, other = run_ranks(2, sharded, str(tmp_path))
    assert first.count("loss") == 2
    assert other == ""


def test_lightning(both: Any) -> None:
    pytest.importorskip("lightning")
    plain, elastic = both("lightning_module", "3")
    assert min(last(plain, "accuracy"), last(elastic, "accuracy")) > 0.8


def test_fine_tuning(both: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = tmp_path / "model"
    model.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film"]
    (model / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(str(model / "vocab.txt")).save_pretrained(model)
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
    )
    transformers.BertForSequenceClassification(config).save_pretrained(model)
    rows = [f"{i % 2}\t{('bad', 'good')[i % 2]} film" for i in range(160)]
    (tmp_path / "table").write_text("\n".join(rows))
    plain, elastic = both("fine_tuning", str(model), str(tmp_path / "table"), "10", "0.01")
    assert max(last(plain, "eval_loss"), last(elastic, "eval_loss")) < 0.4


def test_the_page_shows_each_example_with_its_difference() -> None:
    page = examples()
    names = {path.stem for path in (EXAMPLES / "plain").glob("*.py")}
    assert names == {path.stem for path in (EXAMPLES / "elastic").glob("*.py")}
    for name in names:
        assert f"contrib/examples/elastic/{name}.py" in page
    assert "+job = pollux.attach(model, optimizer, scheduler, state=kept)" in page
    assert "-for epoch in range(EPOCHS):" in page
