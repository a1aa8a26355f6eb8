"""Checkpoints that older versions wrote are loaded, and the run goes on as it did there."""

from pathlib import Path

import pytest
import torch

from tests.optim.golden_checkpoints import AFTER, MAKES, SAVED, Net, train

FOLDER = Path(__file__).parents[1] / "golden" / "checkpoints"
FILES = sorted(FOLDER.glob("*/*.pt"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_checkpoint_of_every_version_goes_on_as_it_did_there(file: Path) -> None:
    saved = torch.load(file, weights_only=True)
    model = Net()
    opt = MAKES[file.stem](model)
    model.load_state_dict(saved["model"])
    opt.load_state_dict(saved["state"])
    got = train(model, opt, SAVED, AFTER)
    torch.testing.assert_close(got, saved["after"], rtol=1e-12, atol=1e-12)


def test_every_optimizer_has_a_checkpoint_in_the_layout_of_today() -> None:
    assert {file.stem for file in FILES if file.parent.name == "unreleased"} == set(MAKES)
