from __future__ import annotations

import headfold
import pytest


def test_every_public_name_can_be_imported():
    assert len(headfold.__all__) > 8
    for name in headfold.__all__:
        assert getattr(headfold, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        headfold.nonsense  # noqa: B018
