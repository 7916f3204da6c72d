"""Benchmark scripts, in folders by subject.

Each script runs from a clone, in any working directory: `python benchmarks/steps/step_time.py`. It
adds the clone to `sys.path` before it imports from these packages. `--json PATH` writes its rows;
the published results are in results/. Start reading with support/harness.py.
"""
