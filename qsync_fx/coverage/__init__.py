"""What became of a plan: which modules are in graphs of ours, what runs there, and why others are in none.

Dynamo decides what is compiled, frame by frame, and leaves to Python what it cannot trace. `log` keeps what it decided, `causes` says why,
`findings` what that means for a plan.
"""
