"""What an interrupt comes out as, whatever was made of it on the way."""

from concurrent.futures import InvalidStateError

import pytest

from emtau_dask.interrupts import handler_of_signals, interruptible


def _interrupted():
    with interruptible():
        try:
            raise KeyboardInterrupt
        finally:
            raise InvalidStateError("of a future of dask's scheduler, into which the interrupt fell")


def test_an_error_that_an_interrupt_brought_about_is_raised_as_the_interrupt():
    with pytest.raises(KeyboardInterrupt) as raised:
        _interrupted()
    assert isinstance(raised.value.__cause__, InvalidStateError)


def _failing_after_a_signal():
    handler = handler_of_signals()
    with interruptible():
        handler()
        raise RuntimeError("of a process that got the signal, too")


def test_an_error_after_a_signal_is_raised_as_the_interrupt():
    with pytest.raises(KeyboardInterrupt):
        _failing_after_a_signal()


def test_any_other_error_stays_what_it_is():
    with pytest.raises(ValueError, match="of a task"), interruptible():
        raise ValueError("of a task")
