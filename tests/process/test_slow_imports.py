"""What is made while modules are imported is not garbage collected later, and collection goes on afterwards."""

import gc

import pytest

from pipeline.process.start import without_collection


@pytest.mark.parametrize("is_enabled", [True, False])
def test_collection_is_suspended_and_goes_on_as_before(is_enabled: bool) -> None:
    was_enabled, before = gc.isenabled(), gc.get_freeze_count()
    (gc.enable if is_enabled else gc.disable)()
    try:
        with without_collection():
            assert not gc.isenabled()
            made = [[] for _ in range(1000)]
        assert gc.isenabled() == is_enabled
        assert gc.get_freeze_count() >= before + len(made)
    finally:
        gc.unfreeze()
        if before:  # As tests/conftest.py had it.
            gc.freeze()
        (gc.enable if was_enabled else gc.disable)()
