"""Fairness between tenants: what an account starts with, and when it is forgotten."""

from engine.tenants import TenantCounters


def test_who_comes_late_starts_at_the_lowest_counter_of_the_active() -> None:
    tenants = TenantCounters()
    much, little = tenants.enter("much"), tenants.enter("little")
    much.counter, little.counter = 90, 40
    assert tenants.enter("late").counter == 40


def test_who_was_away_keeps_what_it_used_beyond_that() -> None:
    tenants = TenantCounters()
    stays, leaves = tenants.enter("stays"), tenants.enter("leaves")
    stays.counter, leaves.counter = 40, 90
    tenants.leave("leaves")
    assert tenants.enter("leaves").counter == 90


def test_requests_of_a_tenant_share_one_account() -> None:
    tenants = TenantCounters()
    first = tenants.enter("a")
    assert tenants.enter("a") is first
    tenants.leave("a")
    assert tenants.enter("a") is first


def test_everything_is_forgotten_when_nobody_is_active() -> None:
    tenants = TenantCounters()
    tenants.enter("a").counter += 90
    tenants.enter("a")
    tenants.leave("a")
    tenants.leave("a")
    assert tenants.enter("b").counter == 0
    assert tenants.enter("a").counter == 0
