"""A policy normalises all suites of a run alike: by common statistics, by equal ones, or by the key that is named."""

from copy import deepcopy
from dataclasses import replace

import pytest

from vlarl.errors import UsageError
from vlarl.policies.load import load_policy
from vlarl.policies.openvla.policy import OpenVLAPolicy

SUITES = ("libero_goal", "libero_object")


@pytest.fixture(scope="module")
def policy() -> OpenVLAPolicy:
    loaded = load_policy("builtin:tiny-oft")
    assert isinstance(loaded, OpenVLAPolicy)
    return loaded


def with_statistics(policy: OpenVLAPolicy, **changes: float) -> OpenVLAPolicy:
    """The policy with statistics for each suite whose first action value has this upper bound."""
    (common,) = policy.config.norm_stats.values()
    stats = {suite: deepcopy(dict(common)) for suite in changes}
    for suite, bound in changes.items():
        stats[suite]["action"]["q99"][0] = bound
    policy.config = replace(policy.config, norm_stats=stats)
    policy.normalizer = type(policy.normalizer)(policy.config)
    return policy


def test_common_statistics_serve_all_suites(policy):
    policy = deepcopy(policy)
    policy.use_statistics(None, *SUITES)
    assert policy.normalizer.unnorm_key == next(iter(policy.config.norm_stats))


def test_equal_statistics_serve_all_suites_and_different_ones_are_refused(policy):
    equal = with_statistics(deepcopy(policy), libero_goal=1.0, libero_object_no_noops=1.0)
    equal.use_statistics(None, *SUITES)
    assert equal.normalizer.unnorm_key == "libero_goal"
    differing = with_statistics(deepcopy(policy), libero_goal=1.0, libero_object_no_noops=2.0)
    with pytest.raises(UsageError, match="statistics for libero_goal and for libero_object differ, and one run norm"):
        differing.use_statistics(None, *SUITES)
    differing.use_statistics("libero_object_no_noops", *SUITES)
    assert differing.normalizer.unnorm_key == "libero_object_no_noops"
