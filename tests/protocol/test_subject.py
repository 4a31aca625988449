"""The one form in which log lines say what they are about."""

from kvferry.protocol.loads import Order
from kvferry.protocol.messages import Offer
from kvferry.protocol.subject import Subject

INCARNATION = "0123456789abcdef" * 2
ADDRESS = ("10.0.0.1", 5600)


def test_a_request_a_producer_and_both_layouts_are_named():
    order = Order("d-1", "p-1", ADDRESS, INCARNATION, "2" * 32, [[1]], [[2]], 0, 128, "tp2pp4dp0")
    text = "request d-1 (from 01234567 tp2pp4dp0 at 10.0.0.1:5600 to tp1pp2dp3)"
    assert str(Subject("d-1", "tp1pp2dp3", order)) == text


def test_an_offer_is_named_as_its_order_is():
    offer = Offer(*ADDRESS, "engine", "p-1", INCARNATION, "3" * 32, 128, "4" * 32, "tp2pp4dp0")
    order = Order("d-1", "p-1", ADDRESS, INCARNATION, "2" * 32, [[1]], [[2]], 0, 128, "tp2pp4dp0")
    assert str(Subject("d-1", "tp1pp1dp0", offer)) == str(Subject("d-1", "tp1pp1dp0", order))


def test_of_a_producer_that_cannot_be_believed_nothing_is_said():
    assert str(Subject("d-1", "tp1pp1dp0")) == "request d-1 (at tp1pp1dp0)"
