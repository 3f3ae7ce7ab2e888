"""The perf suite's library: what is measured, how it is run and judged, and what is shown of it.

Data flows one way: `catalogue` names benches, each of which has `cases`; a `workshop` makes their
callables, `running` measures them by `fp8.testing.timing`, `judging` holds them to thresholds and
claims, `values` makes the record's entries, and `tables` shows those. docs/perf.md says how to use
it.
"""
