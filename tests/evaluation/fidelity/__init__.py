"""Tests of the comparison of live and simulated runs."""
