"""Blocks in training loops of other packages: weights match eager mode, and loggers and debuggers
read correct values.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from torch import Tensor, nn

Item = dict[str, Tensor]

ITEMS: list[Item] = [
    {"x": torch.linspace(-1, 1, 4 * length).reshape(length, 4)} for length in (3, 1, 2, 5)
]


class Minibatch(nn.Module):
    """Computes the loss of a list of examples of different lengths."""

    def __init__(self, enabled: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enabled = enabled
        self.layer = nn.Linear(4, 4)
        self.report = ab.Report()

    def forward(self, examples: list[Item]) -> Tensor:
        with ab.batch(enabled=self.enabled) as scope:
            losses = [self.layer(example["x"]).tanh().square().sum() for example in examples]
            loss = torch.stack(losses).mean()
        self.report = scope.report()
        return loss


def check(train: Callable[[Minibatch], object]) -> None:
    """Checks that training gives the same weights with and without blocks, and batches ops."""
    ours, eager = Minibatch(True), Minibatch(False)
    before = ours.layer.weight.detach().clone()
    train(ours)
    train(eager)
    assert not torch.equal(before, ours.layer.weight)
    torch.testing.assert_close(ours.state_dict(), eager.state_dict())
    assert 0 < ours.report.launches < ours.report.nodes


def loader() -> Any:
    return torch.utils.data.DataLoader(ITEMS, batch_size=2, collate_fn=list)  # type: ignore[arg-type]


def test_a_plain_loop() -> None:
    def train(model: Minibatch) -> None:
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        for examples in loader():
            optimizer.zero_grad()
            model(examples).backward()
            optimizer.step()

    check(train)


def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    logged: list[float] = []

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, model: Minibatch) -> None:
            super().__init__()
            self.model = model

        def training_step(self, examples: list[Item]) -> Tensor:
            loss: Tensor = self.model(examples)
            self.log("loss", loss, prog_bar=True)
            return loss

        def on_train_batch_end(self, *_: object) -> None:
            logged.append(float(self.trainer.callback_metrics["loss"]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 0.1)

    def train(model: Minibatch) -> None:
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(Module(model), loader())

    check(train)
    ours, eager = logged[:2], logged[2:]
    assert ours == pytest.approx(eager)


def test_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")

    def train(model: Minibatch) -> None:
        accelerator = accelerate.Accelerator(cpu=True)
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        prepared, optimizer, batches = accelerator.prepare(model, optimizer, loader())
        for examples in batches:
            with accelerator.accumulate(prepared):
                accelerator.backward(prepared(examples))
                accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    check(train)


def test_transformers_trainer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Trainer(transformers.Trainer):  # type: ignore[misc, name-defined]
        def compute_loss(self, model: nn.Module, inputs: Any, **_: object) -> Any:
            return model(inputs["examples"])

    def train(model: Minibatch) -> None:
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            use_cpu=True,
            max_steps=2,
            per_device_train_batch_size=2,
            save_strategy="no",
            report_to=[],
            logging_steps=1,
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        Trainer(
            model=model,
            args=arguments,
            train_dataset=ITEMS,
            data_collator=lambda examples: {"examples": examples},
        ).train()

    check(train)


def test_a_debugger_shows_values(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, torch_autobatch as ab\n"
        "linear = torch.nn.Linear(1, 1, bias=False)\n"
        "torch.nn.init.constant_(linear.weight, 21.0)\n"
        "with ab.batch():\n"
        "    loss = linear(torch.ones(1)).sum() * 2\n"
        "    done = True\n"
        "print('loss', loss.item())\n"
    )
    said = subprocess.run(
        [sys.executable, "-m", "pdb", str(program)],
        input="break 6\ncontinue\nprint(ab.is_pending(loss))\nprint(loss)\ncontinue\nquit\n",
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "True\n" in said
    assert "tensor(42." in said
    assert "loss 42.0" in said
