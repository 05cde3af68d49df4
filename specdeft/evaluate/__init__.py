"""Measure what drafting gains and check that it changes nothing; every number is kept with its origin.

Knows workloads, results and their provenance; knows nothing of kernels or of how trees and heads come about.
"""
