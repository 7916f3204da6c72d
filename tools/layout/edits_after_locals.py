import os
import sys

os.chdir(sys.argv[1])


def sub(p, *prs):
    s = open(p).read()
    for a, b in prs:
        if a not in s:
            print("NOT", p, a[:50])
        s = s.replace(a, b)
    open(p, "w").write(s)


sub(
    "passes/pass_manager.py",
    (
        """without the plan; the "
        f"rest of the model follows it. Please report it, with the model or with the graph: {VERIFY}=raise makes an error of this warning, "
        "and its""",
        """without the plan; "
        f"the rest of the model follows it. Please report it, with the model or with the graph: {VERIFY}=raise makes an error of this "
        "warning, and its""",
    ),
)
sub(
    "passes/custom_passes.py",
    (
        '''let the pass run before for the plan to "
                "decide"''',
        '''let the pass run before for the plan "
                "to decide"''',
    ),
)
sub("passes/stochastic_gradients.py", ("new, kept=tuple(used))", "new, saved=tuple(used))"))
