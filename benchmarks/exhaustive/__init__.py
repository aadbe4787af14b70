"""Tiny problems whose best plan is found by trying every partition, against ``solve``."""
