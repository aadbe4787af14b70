"""Clusters made real on one Linux machine: namespaces as hosts, shaped veth pairs as links."""

from benchmarks.testbed.network import Testbed, leftovers, remove_namespace, why_not
from benchmarks.testbed.processes import Outcome

__all__ = ["Outcome", "Testbed", "leftovers", "remove_namespace", "why_not"]
