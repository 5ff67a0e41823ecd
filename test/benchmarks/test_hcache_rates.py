"""HCache's figure 9, simulated: restorations are between nothing and the other arms at any rate."""

import pytest

from benchmark.simulator import hcache_rates
from benchmark.simulator.hcache_model import HCACHE, IDEAL, KV, RE, TESTBED, busy, fitted
from benchmark.simulator.hcache_rates import PaperCosts, served
from sglang_hc.tools.simulator.costs import Part

SYSTEM = fitted(TESTBED[0])


@pytest.mark.parametrize("load", [0.6, 1.5])
def test_hcache_is_next_to_the_ideal(load, monkeypatch):
    monkeypatch.setattr(hcache_rates, "SESSIONS", 60)
    rate = load / busy(SYSTEM, KV)
    found = {arm: served(SYSTEM, arm, rate) for arm in (IDEAL, HCACHE, KV, RE)}
    first = [found[arm].first_token for arm in (IDEAL, HCACHE, KV, RE)]
    assert first == sorted(first)
    assert 1.0 < found[HCACHE].between_tokens / found[IDEAL].between_tokens < 1.04
    assert found[HCACHE].rate >= 0.98 * found[KV].rate


@pytest.mark.parametrize("arm", [HCACHE, KV])
def test_a_first_token_is_a_restoration_and_then_a_prefill(arm):
    costs = PaperCosts(SYSTEM, arm)
    plan = costs.restored(2048, 0, 64)
    assert plan.tokens == 2048
    alone = SYSTEM.seconds(costs.plan, 2048) + SYSTEM.prefill(64, 2048)
    assert costs.pass_seconds([Part(64, 0, plan)]) == pytest.approx(alone)
