"""Transfer between records and blocks: every implementation against brute-force Python loops."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from daric_rag.engine.worker.kv_layout import KVCaches, KVLayout, PackedOrder, gpu_layout
from daric_rag.engine.worker.transfer import (
    NO_RECORD,
    NO_ROTATION,
    Kind,
    RopeTable,
    Transfer,
    TransferPlan,
    TransferRange,
    kernels,
)
from daric_rag.engine.worker.transfer import transfer as transfer_module
from daric_rag.engine.worker.transfer.reference import Reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LAYERS, NUM_BLOCKS = 3, 12

needs_kernels = pytest.mark.skipif(
    kernels.cpu_library() is None, reason="the CPU kernels are not built: run `make build-ext`"
)
IMPLEMENTATIONS = [
    "transfer",
    "reference",
    pytest.param("baseline kernel", marks=needs_kernels),
    pytest.param("CUDA items on the CPU", marks=needs_kernels),
    "partly staged transfer",
]
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def packed_layout(
    heads: int, head_dim: int, block_size: int, dtype: torch.dtype, key: torch.Tensor, value: torch.Tensor
) -> KVLayout:
    return KVLayout("packed_cpu", heads, head_dim, block_size, dtype, key, value, block_size * head_dim)


@dataclass
class Case:
    """One randomly drawn transfer with its memory."""

    layout: KVLayout
    cache: torch.Tensor
    records: list[torch.Tensor]
    ranges: list[TransferRange]
    block_tables: list[int]
    rope: RopeTable

    def plan(self) -> TransferPlan:
        caches = KVCaches((self.cache,) * LAYERS, self.layout)
        return TransferPlan.build(self.ranges, self.block_tables, caches, self.records[0].dtype)


def make_orders(
    kind: str, block_size: int, head_dim: int, rng: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    plain = PackedOrder(1, 1, head_dim).offsets(block_size, head_dim)
    if kind == "transposed":
        return PackedOrder(block_size, 1, block_size * head_dim).offsets(block_size, head_dim), plain
    if kind == "tiled":
        return PackedOrder(4, 1, 4 * head_dim).offsets(block_size, head_dim), plain
    if kind == "vnni":
        key = PackedOrder(block_size // 2, 2, block_size // 2 * head_dim).offsets(block_size, head_dim)
        token, dim = torch.arange(block_size)[:, None], torch.arange(head_dim)[None, :]
        value = (token // 2) * 2 * head_dim + dim * 2 + token % 2
        return key, value.reshape(-1).to(torch.int32)
    shuffled = torch.randperm(block_size * head_dim, generator=rng).to(torch.int32)
    return shuffled, shuffled.flip(0).contiguous()


def make_cache(
    kind: str, heads: int, block_size: int, head_dim: int, dtype: torch.dtype, rng: torch.Generator
) -> tuple[torch.Tensor, KVLayout]:
    if kind == "nhd":
        rows = torch.randn(NUM_BLOCKS, block_size, heads, 2 * head_dim, generator=rng).to(dtype)
        return rows.permute(0, 2, 1, 3), gpu_layout(rows.permute(0, 2, 1, 3))
    cache = torch.randn(NUM_BLOCKS, heads, block_size, 2 * head_dim, generator=rng).to(dtype)
    if kind == "hnd":
        return cache, gpu_layout(cache)
    key, value = make_orders(kind, block_size, head_dim, rng)
    return cache, packed_layout(heads, head_dim, block_size, dtype, key, value)


@st.composite
def cases(draw: st.DrawFn, gpu: bool) -> Case:
    kind = draw(
        st.sampled_from(["nhd", "hnd"] if gpu else ["transposed", "tiled", "vnni", "shuffled", "nhd"])
    )
    dtype, storage = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
    heads = draw(st.integers(1, 4))
    head_dim = draw(st.sampled_from([2, 6, 8, 16, 18, 32, 64, 80]))
    block_size = draw(st.sampled_from([8, 32, 40] if head_dim > 16 else [8, 32]))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    cache, layout = make_cache(kind, heads, block_size, head_dim, dtype, rng)
    rotary_dim = 2 * draw(st.one_of(st.just(head_dim // 2), st.integers(1, head_dim // 2)))
    angles = torch.rand(3, rotary_dim // 2, generator=rng) * 2 * math.pi
    rope = RopeTable(angles.cos(), angles.sin(), neox=draw(st.booleans()))
    table = torch.randperm(NUM_BLOCKS, generator=rng).tolist()
    ranges, records = draw_ranges(draw, layout, storage, rng)
    return Case(layout, cache, records, ranges, table, rope)


def draw_ranges(
    draw: st.DrawFn, layout: KVLayout, storage: torch.dtype, rng: torch.Generator
) -> tuple[list[TransferRange], list[torch.Tensor]]:
    """Up to four ranges that fill parts of one or two block tables without touching each other."""
    first_of_second_table = draw(st.integers(1, NUM_BLOCKS - 1))
    free = {0: (0, first_of_second_table), first_of_second_table: (0, NUM_BLOCKS - first_of_second_table)}
    ranges, records = [], []
    for offset, (_, blocks) in free.items():
        position, end = 0, blocks * layout.block_size
        for _ in range(draw(st.integers(0, 2))):
            position = draw(st.integers(position, end))
            count = draw(st.integers(0, min(end - position, 3 * layout.block_size)))
            before, after = draw(st.integers(0, 3)), draw(st.integers(0, 3))
            record_tokens = max(before + count + after, 1)
            shape = (LAYERS, 2, record_tokens, layout.num_kv_heads, layout.head_dim)
            records.append(torch.randn(shape, generator=rng).to(storage))
            row = draw(st.integers(NO_ROTATION, 2))
            address = records[-1].data_ptr()
            ranges.append(TransferRange(address, record_tokens, before, count, position, offset, row))
            position += count
    if not records:
        records.append(torch.zeros(LAYERS, 2, 1, layout.num_kv_heads, layout.head_dim, dtype=storage))
    return ranges, records


def raw_offsets(case: Case, item: TransferRange, index: int, head: int) -> tuple[list[int], list[int]]:
    """Where each dim of key and value of token `index` lies, counted from the storage's first element."""
    layout, cache = case.layout, case.cache
    position = item.dst_token_start + index
    block = case.block_tables[item.block_table_offset + position // layout.block_size]
    token = position % layout.block_size
    area = cache.storage_offset() + block * cache.stride(0) + head * cache.stride(1)
    row = slice(token * layout.head_dim, (token + 1) * layout.head_dim)
    keys = [area + offset for offset in layout.key_order[row].tolist()]
    values = [area + layout.value_offset + offset for offset in layout.value_order[row].tolist()]
    return keys, values


def rotated(keys: torch.Tensor, rope: RopeTable, row: int) -> torch.Tensor:
    """R(Δ) of float32 heads [..., head_dim], by the indexes of the pairs."""
    out = keys.clone()
    if row != NO_ROTATION:
        pair = torch.arange(rope.rotary_dim // 2)
        i, j = (pair, pair + len(pair)) if rope.neox else (2 * pair, 2 * pair + 1)
        out[..., i] = keys[..., i] * rope.cos[row] - keys[..., j] * rope.sin[row]
        out[..., j] = keys[..., j] * rope.cos[row] + keys[..., i] * rope.sin[row]
    return out


def flat_storage(cache: torch.Tensor) -> torch.Tensor:
    size = cache.untyped_storage().nbytes() // cache.element_size()
    return torch.as_strided(cache, (size,), (1,), 0)


def brute_force_scatter(case: Case, layer: int) -> torch.Tensor:
    flat = flat_storage(case.cache).clone()
    for item, record in zip(case.ranges, case.records, strict=False):
        for index in range(item.num_tokens):
            for head in range(case.layout.num_kv_heads):
                keys, values = raw_offsets(case, item, index, head)
                source = record[layer, :, item.src_token_start + index, head].float()
                flat[keys] = rotated(source[0], case.rope, item.rope_row).to(flat.dtype)
                flat[values] = source[1].to(flat.dtype)
    return flat


def brute_force_gather(case: Case, layer: int) -> list[torch.Tensor]:
    flat, out = flat_storage(case.cache), [record.clone() for record in case.records]
    for item, record in zip(case.ranges, out, strict=False):
        for index in range(item.num_tokens):
            for head in range(case.layout.num_kv_heads):
                keys, values = raw_offsets(case, item, index, head)
                record[layer, 0, item.src_token_start + index, head] = flat[keys].to(record.dtype)
                record[layer, 1, item.src_token_start + index, head] = flat[values].to(record.dtype)
    return out


def brute_force_rotate(case: Case) -> torch.Tensor:
    flat = flat_storage(case.cache).clone()
    for item in case.ranges:
        for index in range(item.num_tokens):
            for head in range(case.layout.num_kv_heads):
                keys, _ = raw_offsets(case, item, index, head)
                flat[keys] = rotated(flat[keys].float(), case.rope, item.rope_row).to(flat.dtype)
    return flat


def run(implementation: str, kind: Kind, case: Case, layer: int) -> None:
    carry_out(implementation, kind, case.plan(), None if kind is Kind.GATHER else case.rope, layer)


def carry_out(
    implementation: str, kind: Kind, plan: TransferPlan, rope: RopeTable | None, layer: int
) -> None:
    """Do one layer in one of the implementations; drops the example if the CUDA kernels do not take it."""
    cache = plan.caches.layers[layer]
    if implementation == "transfer":
        Transfer(kind, plan, rope).run(layer)
    elif implementation == "reference":
        Reference(kind, plan, rope).run(cache, layer)
    elif implementation == "baseline kernel":
        kernels.CpuKernel(kind, plan, rope, kernels.BASELINE_ISA).run(cache, layer)
    elif implementation == "CUDA items on the CPU":
        run_cuda_items(kind, plan, rope, layer)
    else:
        staged = torch.arange(len(plan.ranges)) % 2 == 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transfer_module, "_must_be_staged", lambda *_: staged & (kind is not Kind.ROTATE))
            Transfer(kind, plan, rope).run(layer)


def run_cuda_items(kind: Kind, plan: TransferPlan, rope: RopeTable | None, layer: int) -> None:
    """Walk the CUDA kernel's work items on the CPU."""
    assume(kernels.CudaKernel.takes(plan, rope))
    kernel, library = kernels.CpuKernel(kind, plan, rope), kernels.cpu_library()
    assert library is not None
    kernel.point_at(plan.caches.layers[0], layer)
    assert library.daric_transfer_items(kernel.job, len(plan.ranges), kind) == 0


def case_strategy(implementation: str) -> st.SearchStrategy[Case]:
    return cases(gpu=implementation == "CUDA items on the CPU")


@each_implementation
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_scatter_writes_exactly_what_the_loops_write(implementation: str, data: st.DataObject) -> None:
    case, layer = data.draw(case_strategy(implementation)), data.draw(st.integers(0, LAYERS - 1))
    expected = brute_force_scatter(case, layer)
    before = [record.clone() for record in case.records]
    run(implementation, Kind.SCATTER, case, layer)
    assert torch.equal(flat_storage(case.cache), expected)
    assert all(torch.equal(a, b) for a, b in zip(before, case.records, strict=True))


@each_implementation
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_gather_reads_exactly_what_the_loops_read(implementation: str, data: st.DataObject) -> None:
    case, layer = data.draw(case_strategy(implementation)), data.draw(st.integers(0, LAYERS - 1))
    expected = brute_force_gather(case, layer)
    before = flat_storage(case.cache).clone()
    run(implementation, Kind.GATHER, case, layer)
    assert all(torch.equal(a, b) for a, b in zip(case.records, expected, strict=True))
    assert torch.equal(flat_storage(case.cache), before)


@each_implementation
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_rotate_turns_exactly_the_keys_the_loops_turn(implementation: str, data: st.DataObject) -> None:
    case = data.draw(case_strategy(implementation))
    expected = brute_force_rotate(case)
    case.ranges = [item._replace(record_address=NO_RECORD) for item in case.ranges]
    run(implementation, Kind.ROTATE, case, 0)
    assert torch.equal(flat_storage(case.cache), expected)


@each_implementation
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_gather_after_scatter_gives_the_records_back(implementation: str, data: st.DataObject) -> None:
    case, layer = data.draw(case_strategy(implementation)), data.draw(st.integers(0, LAYERS - 1))
    case.records = [record.to(case.cache.dtype) for record in case.records]
    case.ranges = [
        item._replace(rope_row=NO_ROTATION, record_address=record.data_ptr())
        for item, record in zip(case.ranges, case.records, strict=False)
    ]
    before = [record.clone() for record in case.records]
    run(implementation, Kind.SCATTER, case, layer)
    for item, record in zip(case.ranges, case.records, strict=False):
        record[layer, :, item.src_token_start : item.src_token_start + item.num_tokens] = float("nan")
    run(implementation, Kind.GATHER, case, layer)
    assert all(torch.equal(a, b) for a, b in zip(before, case.records, strict=True))


SPECIAL_VALUES = [
    0.0,
    -0.0,
    math.inf,
    -math.inf,
    65504.0,
    65519.9,
    65520.0,
    1e30,
    6e-8,
    2.9e-8,
    3e-8,
    6.1e-5,
    1e-40,
]


@needs_kernels
@pytest.mark.parametrize("isa", [kernels.BASELINE_ISA, kernels.BEST_ISA])
@pytest.mark.parametrize("target", DTYPES, ids=str)
@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_conversion_equals_torch_for_every_kind_of_value(
    source: torch.dtype, target: torch.dtype, isa: int
) -> None:
    every_16_bit = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    generator = torch.Generator().manual_seed(0)
    wide = torch.randint(-(2**31), 2**31, (2**15,), generator=generator).to(torch.int32).view(torch.float32)
    special = torch.tensor(SPECIAL_VALUES)
    values = torch.cat([every_16_bit.view(torch.float16).float(), wide, special.repeat(5), torch.zeros(31)])
    values = values[: len(values) // 32 * 32].to(source)
    record = values.view(1, 1, -1, 1, 32).repeat(1, 2, 1, 1, 1).contiguous()
    tokens = record.shape[2]
    cache = torch.zeros(1, 1, tokens, 64, dtype=target)
    caches = KVCaches((cache,), gpu_layout(cache))
    item = TransferRange(record.data_ptr(), tokens, 0, tokens, 0, 0)
    plan = TransferPlan.build([item], [0], caches, source)
    kernels.CpuKernel(Kind.SCATTER, plan, None, isa).run(cache, 0)
    expected = record[0, 0, :, 0].to(target)
    for found in (cache[0, 0, :, :32], cache[0, 0, :, 32:]):
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(
            found.nan_to_num(7.0, math.inf, -math.inf), expected.nan_to_num(7.0, math.inf, -math.inf)
        )


def test_a_missing_kernel_warns_once_and_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_module, "cpu_library", lambda: None)
    transfer_module._warn_once.cache_clear()
    record = torch.randn(2, 2, 40, 2, 16)
    plan = TransferPlan.build(*small_case(record_address=record.data_ptr(), rope_row=NO_ROTATION))
    with pytest.warns(RuntimeWarning, match="make build-ext"):
        scatter = Transfer(Kind.SCATTER, plan)
    scatter.run(1)
    assert torch.equal(plan.caches.layers[1][3, :, 16:, :16], record[1, 0, 8:24].transpose(0, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Transfer(Kind.SCATTER, plan)


def small_case(**changes: int) -> tuple[list[TransferRange], list[int], KVCaches, torch.dtype]:
    """Arguments of a valid TransferPlan.build with one range, changed in the named fields."""
    fields = {
        "record_address": 64,
        "record_tokens": 40,
        "src_token_start": 8,
        "num_tokens": 32,
        "dst_token_start": 16,
        "block_table_offset": 1,
        "rope_row": 0,
    } | {name: value for name, value in changes.items() if name in TransferRange._fields}
    caches = (torch.zeros(4, 2, 32, 32), torch.zeros(4, 2, 32, 32))
    tables = [9, 3, changes.get("last_block", 0)]
    return [TransferRange(**fields)], tables, KVCaches(caches, gpu_layout(caches[0])), torch.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"src_token_start": 9}, "src_token_start \\+ num_tokens must be at most record_tokens"),
        ({"src_token_start": -1}, "src_token_start must be 0 to"),
        ({"num_tokens": -1}, "num_tokens must be 0 to"),
        ({"num_tokens": 2**62}, "num_tokens must be 0 to"),
        ({"record_address": -8}, "record_address must be"),
        ({"rope_row": -2}, "rope_row must be -1"),
        ({"dst_token_start": -1}, "dst_token_start must be 0"),
        ({"dst_token_start": 33}, "below the 3 entries of block_tables"),
        ({"block_table_offset": 2}, "below the 3 entries of block_tables"),
        ({"block_table_offset": 0}, "block id 9 in block_tables, must be 0 to 3"),
        ({"last_block": -1}, "block id -1"),
        ({"last_block": 4}, "block id 4"),
    ],
)
def test_a_wrong_bound_is_refused_before_memory_is_touched(changes: dict[str, int], message: str) -> None:
    TransferPlan.build(*small_case())
    with pytest.raises(ValueError, match=message):
        TransferPlan.build(*small_case(**changes))


def test_what_does_not_fit_the_transfer_is_refused() -> None:
    plan = TransferPlan.build(*small_case())
    rope = RopeTable(torch.ones(1, 4), torch.zeros(1, 4), neox=True)
    for layer in (-1, 2):
        with pytest.raises(ValueError, match=f"layer is {layer}, must be 0 to 1"):
            Transfer(Kind.SCATTER, plan, rope).run(layer)
    with pytest.raises(ValueError, match="rope has 0 rows, the plan needs 1"):
        Transfer(Kind.SCATTER, plan)
    wide = RopeTable(torch.ones(1, 16), torch.zeros(1, 16), neox=True)
    with pytest.raises(ValueError, match="rotary_dim is 32"):
        Transfer(Kind.ROTATE, plan, wide)


def test_ranges_that_write_the_same_slot_are_refused() -> None:
    (first,), *rest = small_case(rope_row=NO_ROTATION)
    plan = TransferPlan.build([first, first._replace(dst_token_start=47, num_tokens=1)], *rest)
    with pytest.raises(ValueError, match="same slot"):
        Transfer(Kind.SCATTER, plan)


def test_a_plan_without_records_only_rotates() -> None:
    plan = TransferPlan.build(*small_case(record_address=NO_RECORD, rope_row=NO_ROTATION))
    with pytest.raises(ValueError, match="record_address 0"):
        Transfer(Kind.GATHER, plan)
    Transfer(Kind.ROTATE, plan).run(0)
