"""Keeps the tests out of the user's own cache."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRECISIONLINT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield
