"""CUTLASS 3.x kernels for Hopper, compiled for the CPU: hopper_on_cpu has functions for PTX.

Invariant: except for `asm` statements, the code is the code for nvcc: tiles, layouts, swizzles,
descriptors, pipelines, schedulers and epilogues equal the GPU's. `TABLE` replaces each `asm`
statement; others end the program when they are reached.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from qsync_fx.backend.cuda.kernel_build.library import Library
from qsync_fx.backend.cuda.kernel_config import KernelConfig
from tests.support.cuda.on_cpu import cutlass_cpu

HERE = Path(__file__).resolve().parent / "hopper_on_cpu"

TOGETHER = 5
"""Number of kernels per file: the headers of CUTLASS 3.x compile as long as two kernels."""

HEADERS = (
    "cute/arch/cluster_sm90.hpp",
    "cute/arch/copy_sm90.hpp",
    "cute/arch/copy_sm90_desc.hpp",
    "cute/arch/copy_sm90_tma.hpp",
    "cute/arch/mma_sm90_gmma.hpp",
    "cute/stride.hpp",
    "cutlass/arch/barrier.h",
    "cutlass/arch/reg_reconfig.h",
    "cutlass/barrier.h",
    "cutlass/conv/device/conv_universal_adapter.hpp",
    "cutlass/gemm/kernel/static_tile_scheduler.hpp",
)
"""Headers that are changed."""

CHANGES = {
    # Conditions that no macro of ours can set: `__CUDA_ARCH__` would also enable other device code.
    "#define CUDA_BARRIER_ENABLED 0": "#define CUDA_BARRIER_ENABLED 1",
    "#if (__CUDA_ARCH__ >= 700)": "#if 1",
    "#if defined(__CUDA_ARCH__)\n    if (params_.raster_order_": "#if 1\n    if (params_.raster_order_",
    # The reference outlives its argument, a shape: nvcc stores it in registers, g++ in reused stack
    # memory.
    "  Coord coord;\n  Shape const& shape;\n": "  Coord coord;\n  Shape shape;\n",
}
"""Changes other than PTX."""

PRODUCT = r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.(\w+)\.(\w+)\.(\w+)"
FORMATS = {"s8", "e4m3", "e5m2", "f16", "bf16", "tf32"}
"""Operand formats of the products in hopper_on_cpu/wgmma.h."""

_PARENTHESES = re.compile(r'"(?:[^"\\]|\\.)*"|//[^\n]*|[()]')
_LOAD = r"cp\.async\.bulk\.tensor\.\dd\.shared::cluster\.global\."
_AT = r"\[%0\], \[%1, \{(.*?)\}\], \[%2\]"

TABLE: tuple[tuple[str, str], ...] = (
    (r"wgmma\.(?:fence|commit_group|wait_group)", ""),
    (
        r"(?:setmaxnreg|fence\.|prefetch\.tensormap|cp\.async\.bulk\.(?:commit_group|wait_group|prefetch))",
        "",
    ),
    (r"mbarrier\.inval", ""),
    (r"mbarrier\.init\S* \[%(\d)\], %(\d)", "on_cpu::barrier_init({0}, {1})"),
    (r".*LAB_WAIT: mbarrier\.try_wait\S* P1, \[%(\d)\], %(\d)", "on_cpu::barrier_wait({0}, {1})"),
    (r".*@P2 mbarrier\.test_wait", "%0 = %3 == 1 && on_cpu::barrier_passed(%1, %2)"),
    (r".*mbarrier\.try_wait\S* P1, \[%1\], %2; selp", "%0 = on_cpu::barrier_passed(%1, %2)"),
    (
        r".*setp.*@p mapa.*@p mbarrier\.arrive\.expect_tx",
        "if (%2 == 1) on_cpu::barrier_expect(on_cpu::mapa(%0, %1), %3), "
        "on_cpu::barrier_arrive(on_cpu::mapa(%0, %1))",
    ),
    (
        r".*mapa\S* remAddr32, %0, %1; mbarrier\.arrive\.shared::cluster",
        "on_cpu::barrier_arrive(on_cpu::mapa(%0, %1))",
    ),
    (
        r"mbarrier\.arrive\.expect_tx\S* _, \[%(\d)\], %(\d)",
        "on_cpu::barrier_expect({0}, {1}), on_cpu::barrier_arrive({0})",
    ),
    (r"mbarrier\.arrive\S* (?:_|state), \[%(\d)\]", "on_cpu::barrier_arrive({0})"),
    (r"mbarrier\.expect_tx\S* \[%(\d)\], %(\d)", "on_cpu::barrier_expect({0}, {1})"),
    (r".*@p mbarrier\.complete_tx\S* \[%1\], %0", "if (%2 == 1) on_cpu::barrier_complete(%1, %0)"),
    (r"ld\.global\.acquire", "on_cpu::give_way(), %0 = *%1"),
    (r"red\.relaxed\.gpu\.global\.add", "*%0 += %1"),
    (r"(?:bar|barrier)\.sync %0, %1", "on_cpu::named_sync(%0, %1)"),
    (r"(?:bar|barrier)\.arrive %0, %1", "on_cpu::named_arrive(%0, %1)"),
    (r"barrier\.cluster\.arrive", "on_cpu::cluster_arrive()"),
    (r"barrier\.cluster\.wait", "on_cpu::cluster_wait()"),
    (
        r"mov\.u32 %0, %%(nclusterid|clusterid|cluster_ctaid|cluster_nctaid)\.([xyz])",
        "%0 = on_cpu::special.{0}.{1}",
    ),
    (r"mov\.u32 %0, %%cluster_ctarank", "%0 = on_cpu::special.cluster_ctarank"),
    (r"mapa\.shared::cluster\.u32 %0, %1, %2", "%0 = on_cpu::mapa(%1, %2)"),
    (r".*elect\.sync", "%1 = threadIdx.x % 32 == 0, %0 = 0"),
    (r"stmatrix\S*m8n8\.shared\.b16 \[%0\], \{(.*?)\}", "on_cpu::stmatrix<false>(%0, {{{0}}})"),
    (
        r"stmatrix\S*m8n8\.trans\.shared\.b16 \[%0\], \{(.*?)\}",
        "on_cpu::stmatrix<true>(%0, {{{0}}})",
    ),
    (
        r"cp\.async\.bulk\.tensor\.\dd\.global\S* \[%0, \{(.*?)\}\], \[%1\]",
        "on_cpu::tma_store(%0, %1, {{{0}}})",
    ),
    (
        _LOAD + r"im2col\S*bytes\.multicast\S* " + _AT + r", \{(.*?)\}, (%\d+)",
        "on_cpu::tma_load(%0, %1, %2, {{{0}}}, {{{1}}}, {2})",
    ),
    (
        _LOAD + r"im2col\S*bytes " + _AT + r", \{(.*?)\}",
        "on_cpu::tma_load(%0, %1, %2, {{{0}}}, {{{1}}}, 0)",
    ),
    (
        _LOAD + r"mbarrier\S*multicast\S* " + _AT + r", (%\d+)",
        "on_cpu::tma_load(%0, %1, %2, {{{0}}}, {{}}, {1})",
    ),
    (_LOAD + r"mbarrier\S* " + _AT, "on_cpu::tma_load(%0, %1, %2, {{{0}}}, {{}}, 0)"),
)
"""Replacements of instructions: {0} is the first group of the pattern, %0 the first operand."""


def replaced(text: str) -> str:
    """Return a header's text with calls instead of its `asm` statements."""
    pieces, end = [], 0
    for match in re.finditer(r"\basm\b(?:\s+volatile)?\s*\(", text):
        close = _closing(text, match.end() - 1)
        pieces += [text[end : match.start()], _call(text[match.end() : close])]
        end = close + 1
    # The launch syntax of a kernel is not C++; each_cluster.h launches instead.
    code = re.sub(r"<<<.*?>>>", "", "".join([*pieces, text[end:]]))
    for original, replacement in CHANGES.items():
        code = code.replace(original, replacement)
    return code


def _closing(text: str, position: int) -> int:
    depth = 0
    for match in _PARENTHESES.finditer(text, position):
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    raise ValueError("a parenthesis is not closed")


def _call(statement: str) -> str:
    """Return a statement's replacement; its operands are written `"constraint"(expression)`."""
    template = re.match(r'(\s*"(?:[^"\\]|\\.)*")+', statement)
    assert template is not None, statement
    words = (
        "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', template[0]))
        .replace("\\n", " ")
        .replace("\\t", " ")
    )
    words = " ".join(re.sub(r"\.reg [^;]*;", "", words).strip().removeprefix("{").split())
    operands, rest = [], statement[template.end() :]
    for match in re.finditer(r'"[+=]?[a-z]"\s*\(', rest):
        operands.append(rest[match.end() : _closing(rest, match.end() - 1)])
    if product := re.search(PRODUCT, words):
        return _product(product.groups(), operands)
    for pattern, form in TABLE:
        if match := re.match(pattern, words):
            groups = [f"%{group}" if group.isdigit() else group for group in match.groups()]
            text = form.format(*groups) if groups else form
            return re.sub(r"%(\d+)", lambda reference: f"({operands[int(reference[1])]})", text)
    return f'on_cpu::fail("{words[:60]}")'


def _product(names: Sequence[str], operands: Sequence[str]) -> str:
    """Return the call of a product.

    Its operands are sums, A as a descriptor or in four registers, B, whether to add, and which
    operands are not contiguous along k.
    """
    columns, depth, sums, a, b = names
    if sums == "f16" or not {a, b} <= FORMATS:
        return f'on_cpu::fail("wgmma of {a} and {b} to {sums}")'
    count = int(columns) // 2
    remaining = list(operands[count:])
    shared = "desc_a" in remaining[0]
    first = remaining.pop(0) if shared else f"{{{', '.join(remaining.pop(0) for _ in range(4))}}}"
    # Then B, whether to add, and two signs; for 16 bits also whether A (in shared memory) and B are
    # not contiguous along k.
    second, add, across = remaining[0], remaining[1], remaining[4:]
    arguments = ", ".join(["sums", first, second, *(f"{flag} != 0" for flag in (add, *across))])
    name = f"wgmma_{'ss' if shared else 'rs'}<{columns}, {depth}, on_cpu::{a}, on_cpu::{b}>"
    return (
        f"void *const sums[] = {{{', '.join(f'&({each})' for each in operands[:count])}}}; "
        f"on_cpu::{name}({arguments})"
    )


def build(configs: Sequence[KernelConfig], folder: Path) -> dict[KernelConfig, Library]:
    """Compile kernels; the result accepts CPU addresses."""
    headers = cutlass_cpu.changed_headers(folder, dict.fromkeys(HEADERS, replaced))
    return cutlass_cpu.build(configs, folder, headers, HERE, together=TOGETHER)
