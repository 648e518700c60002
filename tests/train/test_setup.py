"""Set-up of a run in this process."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.base.errors import UserError
from pipeline.train import setup


class Loader:
    """Knows whether it was closed."""

    is_open = False

    def __enter__(self) -> None:
        self.is_open = True

    def __exit__(self, *exception: object) -> None:
        self.is_open = False


@pytest.mark.parametrize("fails", [True, False])
def test_a_set_up_that_fails_ends_the_decoding_processes(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They lived until the process ended, which may go on with other runs."""
    loader, of_others = Loader(), SimpleNamespace(engine=None, saver=SimpleNamespace(close=None))
    ranks = SimpleNamespace(device=torch.device("cpu"), on_all=lambda function: function())
    data = SimpleNamespace(split=None)
    context = SimpleNamespace(config=None, plan=None, ranks=ranks, stop=None, prepared=SimpleNamespace(data=data))
    state = SimpleNamespace(step=0, left_out=())
    build = setup._build_training_on_all_ranks

    def broken(*of: object) -> None:
        assert loader.is_open
        raise UserError("no room")

    def begun(context: Any, start: Any, undone: Any) -> Any:
        if fails:
            return build(context, start, undone)
        undone.enter_context(loader)
        return of_others

    replaced: dict[str, Any] = {
        "_connect_on_all_ranks": lambda *of: context,
        "_find_start_on_all_ranks": lambda *of: SimpleNamespace(
            model=SimpleNamespace(config=SimpleNamespace(pixels=None)), state=state
        ),
        "_build_training_on_all_ranks": begun,
        "_begin_monitoring_on_all_ranks": lambda *of: None,
        "_prepare_saving": lambda *of: of_others,
        "evaluators_of": lambda *of: [],
        "Feed": lambda *of: SimpleNamespace(loader=loader),
    }
    for name, value in replaced.items():
        monkeypatch.setattr(setup, name, value)
    context.config = SimpleNamespace(engine=SimpleNamespace(activation_checkpointing=False))
    monkeypatch.setattr(setup.objectives, "create", broken)
    nothing: Any = None
    if fails:
        with pytest.raises(UserError, match="no room"):
            setup.set_up(nothing, nothing)
    else:
        setup.set_up(nothing, nothing)
    assert loader.is_open != fails
