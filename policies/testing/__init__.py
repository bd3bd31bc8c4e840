"""Conformance tests for parts of policies, without a simulator: the laws of caches, and checks of purity.

``trilane.testing`` has the laws of whole policies.
"""

try:
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
except ImportError as error:
    raise ImportError("conformance tests need pytest and hypothesis: pip install trilane[test]") from error

from policies.testing.cache_laws import CacheLaws, CacheScenario
from policies.testing.purity import check_answers, shared_state, snapshot, watched

__all__ = ["CacheLaws", "CacheScenario", "check_answers", "shared_state", "snapshot", "watched"]
