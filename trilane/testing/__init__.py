"""Conformance tests for policies and caches of your own: the laws of docs/design.md, played in the simulator.

``PolicyLaws`` and ``CacheLaws`` are classes of pytest tests to derive from; ``worlds`` draws the small worlds in which
policies are played, and ``check_run`` holds a run of one against the laws about spans.
"""

from policies.testing import CacheLaws, CacheScenario  # also says what to install where pytest is missing
from trilane.testing.laws_of_runs import PolicyLaws, check_run
from trilane.testing.random_worlds import worlds
from trilane.testing.worlds import play

__all__ = ["CacheLaws", "CacheScenario", "PolicyLaws", "check_run", "play", "worlds"]
