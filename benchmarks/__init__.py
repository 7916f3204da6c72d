"""What is measured, in folders by what it is of: run as scripts from a clone, `python benchmarks/steps/step_time.py`.

Invariant: a script puts the clone on the path before it imports from these folders, and runs from any folder. What it writes lies in
results/.
"""
