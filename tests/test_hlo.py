"""Reading compiled HLO, and what a kernel touches: hand-made programs with known answers."""

from __future__ import annotations

import pytest

from qwenjax.errors import InputError
from roofline.hlo import Array, Module, parse_hlo
from roofline.hlo_cost import LARGE_CONSTANT_BYTES, Touched, count_kernel


def module(entry: str, *others: str) -> Module:
    """A module of an ENTRY and other computations, each given as its header's name and its lines."""
    texts = ["HloModule test, is_scheduled=true, entry_computation_layout={()->f32[]}", ""]
    for text, head in [*((other, "%{}") for other in others), (entry, "ENTRY %{}")]:
        name, *lines = (line.strip() for line in text.strip().splitlines())
        texts += [f"{head.format(name)} (p: f32[]) -> f32[] {{", *(f"  {line}" for line in lines), "}", ""]
    return parse_hlo("\n".join(texts))


def touched(entry: str, *others: str) -> Touched:
    """What the ENTRY's last instruction touches."""
    program = module(entry, *others)
    return count_kernel(program.entry.root, program.entry, program)


def moved(entry: str, *others: str) -> tuple[int, int]:
    found = touched(entry, *others)
    return found.read_bytes, found.write_bytes


# The parser.


def test_shapes_operands_and_attributes() -> None:
    program = module(
        """main
        %p = (bf16[2,3]{1,0:T(8,128)(2,1)}, /*index=1*/(s32[], f8e4m3fn[7]{0})) parameter(0), sharding={replicated}
        %a.1 = bf16[2,3]{1,0} get-tuple-element(%p), index=0, metadata={op_name="params[\\'layers\\'][1][\\'o_proj\\']"}
        ROOT %dot.2 = f32[2,2]{1,0} dot(%a.1, %a.1), lhs_contracting_dims={1}, rhs_contracting_dims={1}, """
        """metadata={op_name="jit(step)/o_proj/dot_general" stack_frame_id=3}, backend_config={"known":{"n":"8"}}
        """
    )
    p, a, dot = program.entry.instructions
    assert p.arrays == (Array("bf16", (2, 3)), Array("s32", ()), Array("f8e4m3fn", (7,)))
    assert (p.bytes, p.elements) == (12 + 4 + 7, 6 + 1 + 7)
    assert a.attribute("index") == "0"
    assert a.op_name == "params['layers'][1]['o_proj']"
    assert dot.operands == ("a.1", "a.1")
    assert dot.numbers("lhs_contracting_dims") == (1,)
    assert dot.attribute("slice") is None
    assert dot.op_name == "jit(step)/o_proj/dot_general"
    assert dot.backend_config == {"known": {"n": "8"}}
    assert program.entry.root is dot


@pytest.mark.parametrize(
    ("text", "bytes_"), [("s4[3]", 2), ("pred[5]", 5), ("f64[2]", 16), ("token[]", 0), ("bf16[<=4,2]", 16)]
)
def test_bytes_of_element_types(text: str, bytes_: int) -> None:
    assert module(f"main\nROOT %p = {text} parameter(0)").entry.root.bytes == bytes_


def test_constants_and_texts_with_brackets_are_one_instruction() -> None:
    program = module(
        """main
        %c = s32[2]{0} constant({1, 2})
        %big = f32[9]{0} constant({...}), metadata={op_name="x(y"}
        ROOT %call = f32[2]{0} custom-call(%c, %big), custom_call_target="a)b(", backend_config="not json"
        """
    )
    assert [i.operands for i in program.entry.instructions] == [(), (), ("c", "big")]
    assert program.entry.root.attribute("custom_call_target") == "a)b("
    assert program.entry.root.backend_config == {}


def test_computations_that_an_instruction_runs() -> None:
    nothing = "ROOT %p = f32[] parameter(0)"
    program = module(
        """main
        %p = f32[] parameter(0)
        ROOT %c = f32[] conditional(%p, %p, %p), branch_computations={%one, %two}
        """,
        f"one\n{nothing}",
        f"two\n{nothing}",
    )
    assert program.entry.root.calls == ("one", "two")
    assert set(program.computations) == {"one", "two", "main"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%a = f32[2] add(%p %p", "HLO = '%a = f32[2] add(%p %p': has a parenthesis that never closes."),
        ("%a: f32[2]", "HLO = '%a: f32[2]': is not an instruction."),
        ("%a = add(%p)", "HLO = '%a = add(%p)': has no shape."),
        ("%a = f32[2]{0}", "HLO = '%a = f32[2]{0}': has no operation after its shape."),
        ("%a = f99[2]{0} add(%p, %p)", "HLO = 'f99': is an unknown element type."),
        ("%a = f32[2]{0} add(%p, %q)", "HLO = 'q': is read in main and made nowhere there."),
    ],
)
def test_a_line_that_is_not_understood_is_refused(line: str, message: str) -> None:
    with pytest.raises(InputError) as refused:
        module(f"main\n%p = f32[2] parameter(0)\n{line}")
    assert str(refused.value) == f"{message} This XLA prints something new: report it with the version of jax."


def test_a_text_that_ends_early_is_refused() -> None:
    with pytest.raises(InputError) as refused:
        parse_hlo("HloModule cut\n\nENTRY %main (p: f32[]) -> f32[] {\n  %p = f32[] parameter(0)\n")
    assert str(refused.value) == "HLO: has no whole ENTRY computation. Give the text of a compiled module."


# What a kernel reads and writes.


def test_elementwise_reads_each_operand_once_and_writes_its_result() -> None:
    fused = """fused
        %p.0 = bf16[4,8]{1,0} parameter(0)
        %p.1 = f32[4,8]{1,0} parameter(1)
        %wide = f32[4,8]{1,0} convert(%p.0)
        %sum = f32[4,8]{1,0} add(%wide, %p.1)
        ROOT %square = f32[4,8]{1,0} multiply(%sum, %sum)"""
    entry = """main
        %x = bf16[4,8]{1,0} parameter(0)
        %y = f32[4,8]{1,0} parameter(1)
        ROOT %k = f32[4,8]{1,0} fusion(%x, %y), kind=kLoop, calls=%fused"""
    assert moved(entry, fused) == (4 * 8 * 2 + 4 * 8 * 4, 4 * 8 * 4)


def test_an_operand_given_twice_counts_once_through_views_and_tuples() -> None:
    fused = """fused
        %p.0 = f32[32]{0} parameter(0)
        %p.1 = f32[32]{0} parameter(1)
        ROOT %sum = f32[32]{0} add(%p.0, %p.1)"""
    twice = """main
        %x = f32[4,8]{1,0} parameter(0)
        %one = f32[32]{0} bitcast(%x)
        %two = f32[32]{0} bitcast(%x)
        ROOT %k = f32[32]{0} fusion(%one, %two), kind=kLoop, calls=%fused"""
    assert moved(twice, fused) == (128, 128)
    apart = """main
        %x = (f32[32]{0}, f32[32]{0}) parameter(0)
        %one = f32[32]{0} get-tuple-element(%x), index=0
        %same = f32[32]{0} get-tuple-element(%x), index=0
        %two = f32[32]{0} get-tuple-element(%x), index=1
        ROOT %k = f32[32]{0} fusion(%one, %SECOND), kind=kLoop, calls=%fused"""
    assert moved(apart.replace("SECOND", "two"), fused) == (256, 128)
    assert moved(apart.replace("SECOND", "same"), fused) == (128, 128)


SLICED = """fused
        %p.0 = bf16[100,8]{1,0} parameter(0)
        %view = bf16[800]{0} bitcast(%p.0)
        %part = bf16[16]{0} slice(%view), slice={[32:48]}
        %wide = f32[16]{0} convert(%part)
        ROOT %out = f32[16]{0} negate(%wide)"""


def test_a_slice_counts_what_it_takes() -> None:
    entry = """main
        %x = bf16[100,8]{1,0} parameter(0)
        ROOT %k = f32[16]{0} fusion(%x), kind=kLoop, calls=%fused"""
    assert moved(entry, SLICED) == (16 * 2, 16 * 4)


def test_a_slice_of_a_slice_counts_the_inner_one() -> None:
    fused = SLICED.replace("ROOT %out = f32[16]{0} negate(%wide)", "%less = f32[2]{0} slice(%wide), slice={[0:2]}")
    fused += "\n        ROOT %out = f32[2]{0} negate(%less)"
    entry = """main
        %x = bf16[100,8]{1,0} parameter(0)
        ROOT %k = f32[2]{0} fusion(%x), kind=kLoop, calls=%fused"""
    assert moved(entry, fused) == (2 * 2, 2 * 4)


def test_an_operand_that_is_also_read_whole_counts_whole() -> None:
    fused = SLICED.replace("ROOT %out = f32[16]{0} negate(%wide)", "%first = bf16[800]{0} negate(%view)")
    fused += "\n        ROOT %out = (f32[16]{0}, bf16[800]{0}) tuple(%wide, %first)"
    entry = """main
        %x = bf16[100,8]{1,0} parameter(0)
        ROOT %k = (f32[16]{0}, bf16[800]{0}) fusion(%x), kind=kLoop, calls=%fused"""
    assert moved(entry, fused) == (800 * 2, 16 * 4 + 800 * 2)


def test_a_dynamic_slice_counts_its_result_and_its_places() -> None:
    entry = """main
        %x = f32[64,32]{1,0} parameter(0)
        %i = s32[] parameter(1)
        ROOT %k = f32[1,32]{1,0} dynamic-slice(%x, %i, %i), dynamic_slice_sizes={1,32}"""
    assert moved(entry) == (32 * 4 + 4, 32 * 4)


def test_a_gather_counts_its_rows_with_repeats() -> None:
    fused = """fused
        %table = bf16[1000,64]{1,0} parameter(0)
        %rows = s32[3]{0} parameter(1)
        %picked = bf16[3,64]{1,0} gather(%table, %rows), offset_dims={1}, slice_sizes={1,64}
        ROOT %wide = f32[3,64]{1,0} convert(%picked)"""
    entry = """main
        %t = bf16[1000,64]{1,0} parameter(0)
        %r = s32[3]{0} parameter(1)
        ROOT %k = f32[3,64]{1,0} fusion(%t, %r), kind=kLoop, calls=%fused"""
    assert moved(entry, fused) == (3 * 64 * 2 + 3 * 4, 3 * 64 * 4)


def test_a_gather_of_more_than_there_is_counts_the_table_once() -> None:
    entry = """main
        %t = f32[2,8]{1,0} parameter(0)
        %r = s32[5]{0} parameter(1)
        ROOT %k = f32[5,8]{1,0} gather(%t, %r), offset_dims={1}, slice_sizes={1,8}"""
    assert moved(entry) == (2 * 8 * 4 + 5 * 4, 5 * 8 * 4)


REPLACES = "replaces\n%old = f32[] parameter(0)\nROOT %new = f32[] parameter(1)"
ADDS = "adds\n%old = f32[] parameter(0)\n%new = f32[] parameter(1)\nROOT %sum = f32[] add(%old, %new)"


@pytest.mark.parametrize(("region", "buffer_reads"), [(REPLACES, 0), (ADDS, 3 * 8 * 4)])
def test_a_scatter_into_a_parameter_touches_its_updates(region: str, buffer_reads: int) -> None:
    fused = f"""fused
        %p.0 = f32[1000,8]{{1,0}} parameter(0)
        %p.1 = s32[3,1]{{1,0}} parameter(1)
        %p.2 = bf16[3,8]{{1,0}} parameter(2)
        %wide = f32[3,8]{{1,0}} convert(%p.2)
        ROOT %s = f32[1000,8]{{1,0}} scatter(%p.0, %p.1, %wide), to_apply=%{region.partition(chr(10))[0]}"""
    entry = """main
        %x = f32[1000,8]{1,0} parameter(0)
        %i = s32[3,1]{1,0} parameter(1)
        %u = bf16[3,8]{1,0} parameter(2)
        ROOT %k = f32[1000,8]{1,0} fusion(%x, %i, %u), kind=kInput, calls=%fused"""
    assert moved(entry, region, fused) == (buffer_reads + 3 * 4 + 3 * 8 * 2, 3 * 8 * 4)


UPDATED = """fused
        %p.0 = f32[1000,8]{1,0} parameter(0)
        %p.1 = f32[1,8]{1,0} parameter(1)
        %i = s32[] parameter(2)
        %new = f32[1000,8]{1,0} dynamic-update-slice(%p.0, %p.1, %i, %i)
        ROOT %out = f32[1000,8]{1,0} bitcast(%new)"""
UPDATE = """main
        %x = f32[1000,8]{1,0} parameter(0)
        %u = f32[1,8]{1,0} parameter(1)
        %i = s32[] parameter(2)
        ROOT %k = f32[1000,8]{1,0} fusion(%x, %u, %i), kind=kLoop, calls=%fused"""


def test_a_slice_update_in_place_touches_the_slice() -> None:
    assert moved(UPDATE, UPDATED) == (8 * 4 + 4, 8 * 4)


def test_two_updates_of_one_buffer_touch_both_slices() -> None:
    again = "%second = f32[1000,8]{1,0} dynamic-update-slice(%new, %p.1, %i, %i)"
    fused = UPDATED.replace("ROOT %out", f"{again}\n        ROOT %out").replace("bitcast(%new)", "bitcast(%second)")
    assert moved(UPDATE, fused) == (8 * 4 + 4, 2 * 8 * 4)


def test_an_update_of_what_the_kernel_made_itself_writes_everything() -> None:
    fused = UPDATED.replace("dynamic-update-slice(%p.0", "dynamic-update-slice(%made").replace(
        "%p.1 = f32", "%made = f32[1000,8]{1,0} negate(%p.0)\n        %p.1 = f32"
    )
    assert moved(UPDATE, fused) == (1000 * 8 * 4 + 8 * 4 + 4, 1000 * 8 * 4)


def test_an_updated_buffer_that_is_also_read_counts_what_is_read() -> None:
    fused = UPDATED.replace(
        "ROOT %out = f32[1000,8]{1,0} bitcast(%new)",
        "%look = f32[4,8]{1,0} slice(%new), slice={[0:4], [0:8]}\n"
        "        ROOT %both = (f32[1000,8]{1,0}, f32[4,8]{1,0}) tuple(%new, %look)",
    )
    entry = UPDATE.replace("%k = f32[1000,8]{1,0}", "%k = (f32[1000,8]{1,0}, f32[4,8]{1,0})")
    assert moved(entry, fused) == (4 * 8 * 4 + 8 * 4 + 4, 8 * 4 + 4 * 8 * 4)


def test_a_reduction_reads_all_and_writes_little() -> None:
    fused = """fused
        %p.0 = bf16[64,32]{1,0} parameter(0)
        %zero = f32[] constant(0)
        %wide = f32[64,32]{1,0} convert(%p.0)
        ROOT %sum = f32[64]{0} reduce(%wide, %zero), dimensions={1}, to_apply=%adds"""
    entry = """main
        %x = bf16[64,32]{1,0} parameter(0)
        ROOT %k = f32[64]{0} fusion(%x), kind=kInput, calls=%fused"""
    assert moved(entry, ADDS, fused) == (64 * 32 * 2, 64 * 4)


def test_several_results_are_all_written() -> None:
    fused = """fused
        %p.0 = f32[16]{0} parameter(0)
        %a = bf16[16]{0} convert(%p.0)
        %b = f32[16]{0} negate(%p.0)
        ROOT %both = (bf16[16]{0}, f32[16]{0}) tuple(%a, %b)"""
    entry = """main
        %x = f32[16]{0} parameter(0)
        ROOT %k = (bf16[16]{0}, f32[16]{0}) fusion(%x), kind=kLoop, calls=%fused"""
    assert moved(entry, fused) == (16 * 4, 16 * 2 + 16 * 4)


def test_what_the_outputs_do_not_need_is_not_read() -> None:
    fused = """fused
        %p.0 = f32[16]{0} parameter(0)
        %p.1 = f32[16]{0} parameter(1)
        %unused = f32[16]{0} negate(%p.1)
        ROOT %a = f32[16]{0} negate(%p.0)"""
    entry = """main
        %x = f32[16]{0} parameter(0)
        %y = f32[16]{0} parameter(1)
        ROOT %k = f32[16]{0} fusion(%x, %y), kind=kLoop, calls=%fused"""
    assert moved(entry, fused) == (64, 64)


def test_a_broadcast_scalar_costs_its_four_bytes_and_a_copy_both_ways() -> None:
    entry = """main
        %x = f32[] parameter(0)
        ROOT %k = f32[512]{0} broadcast(%x), dimensions={}"""
    assert moved(entry) == (4, 2048)
    assert moved("main\n%x = f32[512]{0} parameter(0)\nROOT %k = f32[512]{0} copy(%x)") == (2048, 2048)


@pytest.mark.parametrize(("elements", "read"), [(LARGE_CONSTANT_BYTES // 4, 0), (2**20, 2**22)])
def test_only_large_constants_are_read(elements: int, read: int) -> None:
    entry = f"""main
        %c = f32[{elements}]{{0}} constant({{...}})
        ROOT %k = f32[{elements}]{{0}} negate(%c)"""
    assert moved(entry) == (read, 4 * elements)


# FLOPs.


def test_a_fused_product_counts_two_for_each_multiply_add() -> None:
    fused = """fused
        %a = bf16[5,2,3,7]{3,2,1,0} parameter(0)
        %b = bf16[5,11,2,7]{3,2,1,0} parameter(1)
        ROOT %dot = f32[5,3,11]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={1,3}, """
    fused += "rhs_batch_dims={0}, rhs_contracting_dims={2,3}"
    entry = """main
        %x = bf16[5,2,3,7]{3,2,1,0} parameter(0)
        %y = bf16[5,11,2,7]{3,2,1,0} parameter(1)
        ROOT %k = f32[5,3,11]{2,1,0} fusion(%x, %y), kind=kCustom, calls=%fused"""
    assert touched(entry, fused).flops == {"bf16": 2 * 5 * 3 * 11 * (2 * 7)}


def test_a_product_made_into_a_sum_counts_and_the_sum_of_its_parts_does_not() -> None:
    named = 'metadata={op_name="jit(step)/o_proj/dot_general"}'
    fused = f"""fused
        %w = f32[64,32]{{1,0}} parameter(0)
        %x = f32[32]{{0}} parameter(1)
        %wide = f32[64,32]{{1,0}} broadcast(%x), dimensions={{1}}
        %products = f32[64,32]{{1,0}} multiply(%w, %wide), {named}
        %scaled = f32[64,32]{{1,0}} multiply(%products, %products), metadata={{op_name="jit(step)/o_proj/mul"}}
        %zero = f32[] constant(0)
        ROOT %sum = f32[64]{{0}} reduce(%scaled, %zero), dimensions={{1}}, to_apply=%adds, {named}"""
    entry = """main
        %w = f32[64,32]{1,0} parameter(0)
        %x = f32[32]{0} parameter(1)
        ROOT %k = f32[64]{0} fusion(%w, %x), kind=kInput, calls=%fused"""
    assert touched(entry, ADDS, fused).flops == {"": 2 * 64 * 32}


def test_cublas_says_what_it_contracts_and_its_workspace_is_not_written() -> None:
    entry = """main
        %x = bf16[16,32]{1,0} parameter(0)
        %w = bf16[32,64]{1,0} parameter(1)
        ROOT %k = (bf16[16,64]{1,0}, s8[4194304]{0}) custom-call(%x, %w), custom_call_target="__cublas$gemm", """
    entry += (
        'backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
        '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}'
    )
    found = touched(entry)
    assert found.flops == {"bf16": 2 * 16 * 64 * 32}
    assert (found.read_bytes, found.write_bytes) == (2 * (16 * 32 + 32 * 64), 2 * 16 * 64)
