"""The Triton kernels of ``kernels.gpu.sampling``."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.launch import kernel, let_next_start, wait_for_inputs


@kernel(do_not_specialize=["num_entries"])
def edit(
    logits,
    rows,
    tokens,
    biases,
    counts,
    seen,
    presence,
    frequency,
    repetition,
    stride,
    num_entries,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Applies a block of ``TokenEdits`` to float32 logits, in place."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + e, e < num_entries, -1)
    mask = row >= 0
    target = logits + row.to(tl.int64) * stride + tl.load(tokens + e, mask, 0)
    value = tl.load(target, mask, 0.0) + tl.load(biases + e, mask, 0.0)
    factor = tl.load(repetition + row, mask, 1.0)
    repeated = tl.where(value > 0, value / factor, value * factor)
    value = tl.where(tl.load(seen + e, mask, 0) != 0, repeated, value)
    count = tl.load(counts + e, mask, 0)
    penalty = tl.load(frequency + row, mask, 0.0) * count + tl.load(presence + row, mask, 0.0)
    tl.store(target, tl.where(count > 0, value - penalty, value), mask)


@kernel
def restrict(
    logits,
    lists,
    bits,
    stride,
    vocab_size,
    num_words,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sets a chunk of a row to -inf where ``AllowedTokens`` does not allow the token, in place."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    index = tl.load(lists + row).to(tl.int64)
    if index >= 0:
        token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        word = token // 32
        held = tl.load(bits + index * num_words + word, (word < num_words) & (token < vocab_size), 0)
        is_banned = (held >> (token % 32)) & 1 == 0
        tl.store(logits + row * stride + token, float("-inf"), is_banned & (token < vocab_size))


@triton.jit
def _key_of(z):
    """An unsigned integer that orders as the float32 does."""
    bits = z.to(tl.uint32, bitcast=True)
    return bits ^ tl.where(bits >> 31 != 0, 0xFFFFFFFF, 0x80000000)


@triton.jit
def _value_of(key):
    bits = key ^ tl.where(key >> 31 != 0, 0x80000000, 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _block_of(logits, first, vocab_size, BLOCK: tl.constexpr):
    """A block of a row; what is NaN, +inf or past the end reads as -inf."""
    token = first + tl.arange(0, BLOCK)
    x = tl.load(logits + token, token < vocab_size, float("-inf")).to(tl.float32)
    return tl.where(x < float("inf"), x, float("-inf"))


@triton.jit
def _highest_key_with(
    logits,
    vocab_size,
    wanted,
    maximum,
    floor,
    inverse_temperature,
    BY_MASS: tl.constexpr,
    PASSES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The highest key that at least ``wanted`` tokens (or their mass, of those not below ``floor``) reach."""
    key = tl.full((), 0, tl.uint32)
    bit = tl.full((), 1 << 30, tl.uint32)
    for _ in range(PASSES):
        one = key | bit
        two = key | (bit << 1)
        three = two | bit
        sum_one = tl.zeros((BLOCK,), tl.float32)
        sum_two = tl.zeros((BLOCK,), tl.float32)
        sum_three = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, vocab_size, BLOCK):
            x = _block_of(logits, first, vocab_size, BLOCK)
            weight = tl.where(first + tl.arange(0, BLOCK) < vocab_size, 1.0, 0.0)
            if BY_MASS:
                weight = tl.where(x >= floor, tl.exp((x - maximum) * inverse_temperature), 0.0)
            keys = _key_of(x)
            sum_one += tl.where(keys >= one, weight, 0.0)
            sum_two += tl.where(keys >= two, weight, 0.0)
            sum_three += tl.where(keys >= three, weight, 0.0)
        if tl.sum(sum_three, 0) >= wanted:
            key = three
        elif tl.sum(sum_two, 0) >= wanted:
            key = two
        elif tl.sum(sum_one, 0) >= wanted:
            key = one
        bit = bit >> 2
    return key


@kernel
def find_threshold(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    thresholds,
    stride,
    vocab_size,
    GREEDY_BELOW: tl.constexpr,
    PASSES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The least ``logits / temperature`` that the filters of a row keep; -inf where it has none.

    The search is over the logits themselves, which order as their quotients do: PASSES pairs of bits are all
    that their type has.
    """
    let_next_start(PDL)
    row = tl.program_id(0)
    wait_for_inputs(PDL)
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    threshold = tl.full((), float("-inf"), tl.float32)
    filters = ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0) | (min_p > 0.0)
    if filters & (temperature >= GREEDY_BELOW):
        logits += row.to(tl.int64) * stride
        inverse = 1.0 / temperature
        highest = tl.full((BLOCK,), float("-inf"), tl.float32)
        for first in range(0, vocab_size, BLOCK):
            highest = tl.maximum(highest, _block_of(logits, first, vocab_size, BLOCK))
        maximum = tl.maximum(tl.max(highest, 0), -3.0e38)
        floor = tl.full((), float("-inf"), tl.float32)
        if min_p > 0.0:
            threshold = tl.div_rn(maximum, temperature) + tl.log(min_p)
            floor = threshold * temperature
        if (top_k > 0) & (top_k < vocab_size):
            key = _highest_key_with(
                logits, vocab_size, top_k.to(tl.float32), maximum, floor, inverse, False, PASSES, BLOCK
            )
            floor = tl.maximum(floor, _value_of(key))
            threshold = tl.maximum(threshold, tl.div_rn(_value_of(key), temperature))
        if top_p < 1.0:
            mass = tl.zeros((BLOCK,), tl.float32)
            for first in range(0, vocab_size, BLOCK):
                x = _block_of(logits, first, vocab_size, BLOCK)
                mass += tl.where(x >= floor, tl.exp((x - maximum) * inverse), 0.0)
            wanted = tl.sum(mass, 0) * top_p
            key = _highest_key_with(logits, vocab_size, wanted, maximum, floor, inverse, True, PASSES, BLOCK)
            # At least the most probable tokens stay, also where top_p is 0 or the sums round against it.
            key_value = tl.minimum(_value_of(key), maximum)
            threshold = tl.maximum(threshold, tl.div_rn(key_value, temperature))
    tl.store(thresholds + row, threshold)


@triton.jit
def _mix(h):
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _gumbel(seed, position, token):
    """``reference.gumbel_noise`` of a block of tokens."""
    golden = tl.full((), 0x9E3779B9, tl.uint32)
    k0 = _mix(seed.to(tl.uint32) ^ _mix(position.to(tl.uint32) + golden))
    k1 = _mix((seed >> 32).to(tl.uint32) ^ _mix(k0 + golden))
    bits = _mix(k1 ^ _mix(k0 + token.to(tl.uint32)))
    v = tl.minimum(tl.maximum(bits.to(tl.float32) * 2.0**-32, 2.0**-33), 1 - 2.0**-24)
    # -log1p(-v): the logarithm of 1 - v would lose a small v, for which the series is short.
    series = v * (1 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * (1 / 5 + v * (1 / 6))))))
    return -tl.log(tl.where(v < 0.03125, series, -tl.log(1 - v)))


@kernel
def draw_chunk(
    logits,
    edited,
    temperatures,
    seeds,
    positions,
    thresholds,
    best,
    best_tokens,
    flags,
    stride,
    edited_stride,
    vocab_size,
    GREEDY_BELOW: tl.constexpr,
    ALL_GREEDY: tl.constexpr,
    HAS_EDITS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The best token of one chunk of a row.

    Flags: 1 a logit is NaN or +inf; 2 one of the model's is above -inf; 4 an edited one is.
    """
    let_next_start(PDL)
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = token < vocab_size
    wait_for_inputs(PDL)
    raw = tl.load(logits + row.to(tl.int64) * stride + token, mask, float("-inf")).to(tl.float32)
    spoilt = (raw != raw) | (raw == float("inf"))
    value = raw
    if HAS_EDITS:
        value = tl.load(edited + row.to(tl.int64) * edited_stride + token, mask, float("-inf")).to(tl.float32)
    value = tl.where(value == value, value, float("-inf"))
    flag = tl.max(spoilt.to(tl.int32), 0)
    flag += 2 * tl.max((raw > float("-inf")).to(tl.int32), 0)
    flag += 4 * tl.max((value > float("-inf")).to(tl.int32), 0)
    if not ALL_GREEDY:
        temperature = tl.load(temperatures + row)
        if temperature >= GREEDY_BELOW:
            value = tl.div_rn(value, temperature)
            value = tl.where(value >= tl.load(thresholds + row), value, float("-inf"))
            value += _gumbel(tl.load(seeds + row), tl.load(positions + row), token)
    highest, index = tl.max(value, 0, return_indices=True)
    cell = row * tl.num_programs(1) + chunk
    tl.store(best + cell, highest)
    tl.store(best_tokens + cell, chunk * CHUNK + index)
    tl.store(flags + cell, flag)


@kernel
def join_chunks(
    best,
    best_tokens,
    flags,
    tokens,
    finite,
    NUM_CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row = tl.program_id(0)
    chunk = tl.arange(0, BLOCK)
    mask = chunk < NUM_CHUNKS
    wait_for_inputs(PDL)
    cell = row * NUM_CHUNKS + chunk
    value = tl.load(best + cell, mask, float("-inf"))
    flag = tl.load(flags + cell, mask, 0)
    _, index = tl.max(value, 0, return_indices=True)
    token = tl.load(best_tokens + row * NUM_CHUNKS + index)
    spoilt = tl.max(flag & 1, 0)
    drawable = tl.max(flag & 2, 0) * tl.max(flag & 4, 0)
    good = (spoilt == 0) & (drawable != 0)
    tl.store(finite + row, good)
    tl.store(tokens + row, tl.where(good, token, 0).to(tl.int64))
