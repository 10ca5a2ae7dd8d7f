"""The rules of gc, tried in every order of the steps of writers, collectors, a repacker, forks, readers and deletions.

With all rules no order leaves a checkpoint or a pin without a record (case 34); without any one of them some order does, so
that the model is known to be able to fail. `tests/stores/test_gc_machine.py` does the same to the store itself.
"""

import pytest

from .gc_model import BREAK, HOLD, Model, Run


@pytest.mark.parametrize("run", [run for run in HOLD if not run.large], ids=lambda run: run.name)
def test_no_order_of_steps_breaks_a_checkpoint(run: Run) -> None:
    """Case 34: gc interleaved anywhere."""
    result = Model(run).explore()
    assert result.broken is None, "\n".join(result.steps)
    assert result.states > 1000


@pytest.mark.parametrize("run", [run for run in BREAK if not run.large], ids=lambda run: run.name)
def test_without_one_of_the_rules_some_order_of_steps_does(run: Run) -> None:
    result = Model(run).explore()
    assert result.broken is not None
    assert result.steps


def test_both_ways_of_searching_meet_the_same_states() -> None:
    run = HOLD[0]
    assert Model(run).explore() == Model(run).explore_large()
