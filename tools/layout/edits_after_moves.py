"""Edits by hand after the mechanical step: the table of layers and the page on architecture."""

import re
import sys
from pathlib import Path

T = Path(sys.argv[1])
LAYERS = [
    "errors environment serialization entry_points formatting text_tables option_help plan rounding formats ops devices options autocast_policy module_paths graph plan_cache coverage",
    "predictor",
    "passes",
    "backend",
    "allocator communication diagnostics optim profiler plan_switching timeline",
    "distributed",
    "cli",
]
p = T / "tests/test_architecture.py"
s = p.read_text()
body = "LAYERS = (\n"
for l in LAYERS:
    if len(l) > 90:
        i = l.rfind(" ", 0, 100)
        body += f'    "{l[:i]} "\n    "{l[i + 1 :]}",\n'
    else:
        body += f'    "{l}",\n'
body += ")\n"
s = re.sub(r"LAYERS = \(\n.*?\n\)\n", body, s, 1, flags=re.S)
s = s.replace(
    'assert named["qsync_fx/devices/cpu_features.py"] == named["qsync_fx/graph/fx_utils.py"] == {"bf16"}',
    'assert named["qsync_fx/graph/fx_utils.py"] == {"bf16"}',
)
p.write_text(s)
p = T / "docs/architecture.md"
s = p.read_text()
lst = "\n".join(f"{i}. " + " ".join(f"`{n}`" for n in l.split()) for i, l in enumerate(LAYERS, 1))
s = re.sub(r"^1\. `errors`.*?^7\. `cli`", lambda m: lst, s, 1, flags=re.S | re.M)
TREE = """qsync_fx/          the public API and the values that all parts share
  errors.py          errors that say what is wrong, where, and what to do
  environment.py     all environment variables
  formats.py         the table of number formats
  options.py         the options of the backend; option_help.py, their help texts
  serialization/     strict JSON and TOML to frozen dataclasses and back; atomic_files.py writes a file or leaves it as it was
  ops/               the operator table: adjustable, dependent or fixed, and why
  devices/           format support per device, the device catalog, the roofline model
  plan/              Plan, ClusterPlan, operator ids, patterns, plan files
  plan_cache.py      the plan that a cached profile gives when the user requests none
  plan_switching.py  another plan for a model that is compiled
  rounding.py        random streams of stochastic rounding
  graph/             the precision graph over fx.Graph: node metadata, aliasing, dataflow, symbolic costs
  coverage/          which modules Dynamo compiled, which it did not, and why
  predictor/         cost of a plan from profiles and catalogs
    indicator/         sensitivity of gradients to each operator's format
    cost_mapper/       from a plan to states, casts and seconds
    replayer/          step time of a cluster
    memory/            peak memory of a training step
    model/             the model as a value, independent of torch
  profiler/          measure(): runs a model on the device at hand and returns a Profile
    timing/ links/     operator times and peak memory; times of gradients on the network
    sensitivity/       measured indicators; tensor_capture/, the tensors that they read
  timeline/          a step as a timeline per device; Perfetto
  allocator/         find_plan: problem, plan evaluator, precision recovery, baselines, analysis
    milp/              the mixed-integer program and its search
      memory_bound/      lower bounds on peak memory
  communication/     compressed gradients: DDP and FSDP hooks, all-reduce, error feedback
    codecs/ aqgb/ duo/ gradient codecs; the systems AQGB and DUO
  distributed/       compress, guard, find_plan over ranks
    consensus/         agreement of ranks before and during training
    monitoring/        drift of step time, memory and links
  diagnostics/       explain, plan coverage, DOT
  formatting.py      numbers as text; text_tables.py, tables as text
  optim/             SGD, Adam and AdamW of torch.optim with a step of one pass over memory
  cli/               the command qsync; commands/, one file a verb
passes/            import qsync_fx.passes: one file a pass; pass_base.py, pass_manager.py, verifier.py, lowering_registry.py
  tracing/           from Dynamo's graph to ATen operators with ids
  rewriting/         find-and-replace passes
backend/           import qsync_fx.backend: the torch.compile backend; compile.py, from Dynamo's graph to code
  inductor/          settings, lowerings and decompositions for Inductor
  operators/         qsync:: operators, forward beside backward; gemm/, dispatch of matrix products to kernels
  numerics/          reference implementation of every kernel, bit-exact
  cuda/              CUDA kernels from CUTLASS templates, compiled on demand; its __init__.py lists the packages
cpp/               the native module qsync_fx._C: quantizer, INT8 and BF16 matrix products, gradient codecs, optimizers,
                   for AMX, AVX-512 with and without VNNI, AVX2 and any processor; a folder per kernel family
  cutlass/           templates of CUDA kernels; backend/cuda/templates is a link to it
tests/             mirrors the tree; support/ has shared helpers, gpu/ runs on a GPU, passes/golden/ has the graph after each pass
"""
s = re.sub(
    r"(## Where things are\n\n```\n).*?(```\n)",
    lambda m: m.group(1) + TREE.replace("forward beside backward", "forward and backward") + m.group(2),
    s,
    1,
    flags=re.S,
)
p.write_text(s)


def sub(path, *pairs):
    p = T / path
    s = p.read_text()
    for a, b in pairs:
        if a not in s:
            print("NOT FOUND", path, a)
        s = s.replace(a, b)
    p.write_text(s)


sub(
    "tests/backend/operators/test_integers.py",
    ("from lowered_layers import", "from tests.support.computing.lowered_layers import"),
)
sub(
    "tests/backend/cuda/kernel_build/test_cuda_cache.py",
    ("from kernel_caches import", "from tests.support.cuda.compiled.kernel_caches import"),
)
sub("docs/allocator.md", ("(../qsync_fx/allocator/exact", "(../qsync_fx/allocator/milp"))
sub(
    "docs/comparing.md",
    ("(../qsync_fx/allocator/exact", "(../qsync_fx/allocator/milp"),
    ("(../qsync_fx/allocator/studies)", "(../qsync_fx/allocator/analysis.py)"),
    ("(../qsync_fx/allocator/baselines)", "(../qsync_fx/allocator/baselines.py)"),
    ("(../qsync_fx/allocator/paper)", "(../qsync_fx/allocator/recovery.py)"),
)
sub(
    "backend/cuda/runtime/call_cache.py",
    (
        "format=QUANTIZER_FORMATS[encoding(row).name], rounding=",
        "format=QUANTIZER_FORMATS[encoding(row).name],\n            rounding=",
    ),
)
sub(
    "backend/cuda/runtime/launch.py",
    (
        "a.stride(), b.stride(), a.data_ptr() & 15, b.data_ptr() & 15,",
        "a.stride(), b.stride(),\n        a.data_ptr() & 15, b.data_ptr() & 15,",
    ),
)
