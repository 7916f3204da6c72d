# edits before the mechanical step
sed -i 's/^aten, qsync = torch.ops.aten, torch.ops.qsync/aten = torch.ops.aten\nqsync = torch.ops.qsync/' backend/inductor/closed_bits.py
sed -i 's/^aten, prims = torch.ops.aten, torch.ops.prims/aten = torch.ops.aten\nprims = torch.ops.prims/' backend/inductor/relu.py
python3 - <<'P'
import re
p='tests/test_architecture.py'; s=open(p).read()
s=s.replace('''        "qsync_fx/devices/integers.py": "the one product of integers that a CPU may get wrong",
        "qsync_fx/devices/brain_floats.py": "whether that instruction set is a CPU's",
        "qsync_fx/devices/processor.py": "an instruction set of processors is called bf16",
''','''        "qsync_fx/devices/processor.py": "instruction sets of CPUs, one of which is called bf16",
''')
s=s.replace('''        "backend/operators/multiplying/conv_on_cpu.py": "the same of convolutions",
''','')
open(p,'w').write(s)
P
sed -i '45,47s/\bfield\b/header_field/g' qsync_fx/communication/wire/messages.py
sed -i '/narrow = \[precision for precision, change/s/precision/fmt/g; s/for place, precision in enumerate(sorted(narrow/for place, fmt in enumerate(sorted(narrow/; s/found\[name, precision\] = drawn/found[name, fmt] = drawn/' qsync_fx/profiling/statistics/indicators/chance.py
python3 - <<'P'
import re,subprocess
from pathlib import Path
p=Path('qsync_fx/report/text.py'); s=p.read_text()
def cut(pattern):
    global s
    m=re.search(pattern,s,re.S|re.M); assert m, pattern
    s=s[:m.start()]+s[m.end():]; return m.group(0)
long_=cut(r"^# Rich wants a number, and no line is that long\.\nAS_LONG_AS_IT_TAKES = 100_000\n+")
plain=cut(r"^def plain\(.*?(?=^def )")
table=cut(r"^def table_of\(.*?(?=^def )")
Path('qsync_fx/report/plain_table.py').write_text('''"""Tables of rich as plain text, and how they are made."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

'''+long_+plain+table.rstrip()+"\n")
s=s.replace("from rich import box\nfrom rich.console import Console, Group, RenderableType\n","from rich.console import Group, RenderableType\n").replace("from qsync_fx.report.numbers import short\n","from qsync_fx.report.numbers import short\nfrom qsync_fx.report.plain_table import plain, table_of\n")
p.write_text(s)
MOVED={"plain","table_of","AS_LONG_AS_IT_TAKES"}
for f in [*Path('.').rglob('*.py')]:
    if '.venv' in f.parts: continue
    t=f.read_text()
    def one(m):
        names=[n.strip() for n in m.group(2).replace("(","").replace(")","").split(",") if n.strip()]
        a=[n for n in names if n.split(" as ")[0] in MOVED]; b=[n for n in names if n not in a]
        out=[]
        if a: out.append(f"{m.group(1)}from qsync_fx.report.plain_table import {', '.join(a)}")
        if b: out.append(f"{m.group(1)}from qsync_fx.report.text import {', '.join(b)}")
        return "\n".join(out)
    r=re.sub(r"^([ \t]*)from qsync_fx\.report\.text import (\([^)]*\)|[^\n]*)",one,t,flags=re.M)
    if r!=t: f.write_text(r)
P
sed -i '112,114s/\bfield\b/spec_field/g' qsync_fx/devices/reading.py
