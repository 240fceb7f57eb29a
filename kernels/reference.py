"""Every operation in plain torch: the oracle of the tests, and the fallback where no C compiler is there.

Arithmetic is in float64 for float64 inputs and in float32 for all others; results are in the input's dtype.
Nothing here is written for speed.
"""

from __future__ import annotations

import torch

from kernels.plans import (
    BLOCK_SIZE,
    GAIN_ROW,
    RANK_PAGE,
    SHIFT_ROW,
    AttentionPlan,
    LoraPlan,
    LoraPool,
    RowVectors,
)
from kernels.sampling_batch import GREEDY_BELOW, AllowedTokens, Sampled, SamplingBatch, TokenEdits

UINT32 = 0xFFFFFFFF
GOLDEN = 0x9E3779B9


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """See ``norm.rms_norm``."""
    if residual is not None:
        residual.copy_(_wide(residual) + _wide(x))
        x = residual
    wide = _wide(x)
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * _wide(weight)).to(x.dtype)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See ``activation.silu_mul``."""
    gate, up = _wide(gate_up).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def rope_write_kv(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    plan: AttentionPlan,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    num_heads: int,
) -> None:
    """See ``kv_write.rope_write_kv``."""
    num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    live = (plan.slots >= 0).nonzero().flatten()
    heads = qkv[live].view(len(live), num_heads + 2 * num_kv_heads, head_dim)
    rotated = _wide(heads[:, : num_heads + num_kv_heads])
    cos, sin = cos_sin[plan.positions[live]].to(rotated.dtype)[:, None].chunk(2, dim=-1)
    low, high = rotated.chunk(2, dim=-1)
    heads[:, : num_heads + num_kv_heads] = torch.cat(
        (low * cos - high * sin, high * cos + low * sin), dim=-1
    ).to(qkv.dtype)
    qkv[live] = heads.flatten(1)
    blocks, offsets = plan.slots[live] // BLOCK_SIZE, plan.slots[live] % BLOCK_SIZE
    k_cache[blocks, :, offsets] = heads[:, num_heads : num_heads + num_kv_heads]
    v_cache[blocks, :, offsets] = heads[:, num_heads + num_kv_heads :]


def paged_attention(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: AttentionPlan,
    *,
    num_heads: int,
    scale: float,
) -> torch.Tensor:
    """See ``paged_attention.paged_attention``."""
    num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    group = num_heads // num_kv_heads
    out = torch.zeros(qkv.shape[0], num_heads * head_dim, dtype=qkv.dtype, device=qkv.device)
    starts = plan.query_starts.tolist()
    for s, context in enumerate(plan.context_lens.tolist()):
        start, count = starts[s], starts[s + 1] - starts[s]
        if count <= 0 or context <= 0:
            continue
        blocks = plan.block_tables[s, : -(-context // BLOCK_SIZE)].long()
        assert (blocks >= 0).all(), "a block table ends before its context"
        keys, values = (
            _wide(cache[blocks].transpose(1, 2).flatten(0, 1)[:context]) for cache in (k_cache, v_cache)
        )
        queries = _wide(qkv[start : start + count, : num_heads * head_dim])
        queries = queries.view(count, num_kv_heads, group, head_dim)
        scores = torch.einsum("qhgd,khd->hgqk", queries, keys) * scale
        visible = context - count + torch.arange(count, device=qkv.device)[:, None]
        hidden = torch.arange(context, device=qkv.device) > visible
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        attended = torch.einsum("hgqk,khd->qhgd", weights, values)
        out[start : start + count] = attended.reshape(count, num_heads * head_dim).to(qkv.dtype)
    return out


def _segments(plan: LoraPlan) -> list[tuple[int, int, list[tuple[int, int, int]]]]:
    """``(first, last + 1, pages)`` of each group of ``plan.rows``; a page is ``(index, id, live ranks)``."""
    starts, ranks = plan.segment_starts.tolist(), plan.segment_ranks.tolist()
    segments = []
    for n in range(plan.num_segments):
        pages = [
            (p, page, min(RANK_PAGE, ranks[n] - p * RANK_PAGE))
            for p, page in enumerate(plan.segment_pages[n].tolist())
            if page >= 0 and ranks[n] > p * RANK_PAGE
        ]
        segments.append((starts[n], starts[n + 1], pages))
    return segments


def lora_shrink(x: torch.Tensor, pool: LoraPool, plan: LoraPlan) -> torch.Tensor:
    """See ``lora.lora_shrink``."""
    num_projections = pool.a.shape[1]
    shape = (plan.rows.shape[0], plan.segment_pages.shape[1], num_projections, RANK_PAGE)
    out = torch.zeros(shape, dtype=_wide(x[:0]).dtype, device=x.device)
    for first, last, pages in _segments(plan):
        rows = _wide(x[plan.rows[first:last].long()])
        for p, page, live in pages:
            for m in range(num_projections):
                if pool.scales[page, m] != 0:
                    out[first:last, p, m, :live] = (
                        rows @ _wide(pool.a[page, m, :live]).T * pool.scales[page, m]
                    )
    return out


def lora_expand(shrunk: torch.Tensor, y: torch.Tensor, pool: LoraPool, plan: LoraPlan) -> None:
    """See ``lora.lora_expand``."""
    for first, last, pages in _segments(plan):
        rows = plan.rows[first:last].long()
        delta = torch.zeros(last - first, y.shape[1], dtype=shrunk.dtype, device=y.device)
        for p, page, live in pages:
            for m in range(pool.a.shape[1]):
                if pool.scales[page, m] != 0:
                    columns = slice(pool.splits[m], pool.splits[m + 1])
                    b = pool.b[page, :live, columns].to(shrunk.dtype)
                    delta[:, columns] += shrunk[first:last, p, m, :live] @ b
        y[rows] = (y[rows].to(shrunk.dtype) + delta).to(y.dtype)


def apply_vectors(y: torch.Tensor, pool: LoraPool, vectors: RowVectors) -> None:
    """See ``lora.apply_vectors``."""
    rows = _wide(y[vectors.rows])
    gain, shift = (_wide(pool.b[vectors.pages, row]) for row in (GAIN_ROW, SHIFT_ROW))
    y[vectors.rows] = (rows + (rows * gain + shift)).to(y.dtype)


def _fmix32(h: torch.Tensor) -> torch.Tensor:
    """The finaliser of MurmurHash3 on unsigned 32-bit values (held in int64): a bijection that mixes well."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B & UINT32
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & UINT32
    return h ^ (h >> 16)


def noise_bits(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Uniform 32-bit integers, int64 [S, vocab_size], from ``(seed, position, token)`` alone.

    With all sums and products modulo 2^32::

        k0 = fmix32(low32(seed) ^ fmix32(low32(position) + 0x9E3779B9))
        k1 = fmix32(high32(seed) ^ fmix32(k0 + 0x9E3779B9))
        bits = fmix32(k1 ^ fmix32(k0 + token))

    Only 32-bit unsigned integer operations, so that C, Triton and torch give the same bits. Two keys and two
    rounds: with one, two rows' noise could be the same sequence shifted by a few tokens.
    """
    k0 = _fmix32((seeds & UINT32) ^ _fmix32((positions & UINT32) + GOLDEN & UINT32))
    k1 = _fmix32((seeds >> 32 & UINT32) ^ _fmix32(k0 + GOLDEN & UINT32))
    tokens = torch.arange(vocab_size, device=seeds.device)
    return _fmix32(k1[:, None] ^ _fmix32((k0[:, None] + tokens) & UINT32))


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise, float32 [S, vocab_size]::

        v = clamp(float32(bits) * 2^-32, 2^-33, 1 - 2^-24)
        noise = -log(-log1p(-v))

    Large noise comes from small ``v``, where float32 is dense, so that the rare draws which decide between
    unlikely tokens are not quantised (``-log(-log(u))`` would take them from u near 1, where it is coarse).
    """
    v = (noise_bits(seeds, positions, vocab_size).float() * 2.0**-32).clamp(2.0**-33, 1 - 2.0**-24)
    return -torch.log(-torch.log1p(-v))


def edit_logits(logits: torch.Tensor, edits: TokenEdits) -> torch.Tensor:
    """A copy of ``logits`` with the changes that ``TokenEdits`` describes."""
    live = edits.rows >= 0
    rows, tokens = edits.rows[live].long(), edits.tokens[live].long()
    values = logits[rows, tokens] + edits.biases[live]
    repetition = edits.repetition[rows]
    values = torch.where(
        edits.seen[live], torch.where(values > 0, values / repetition, values * repetition), values
    )
    counts = edits.counts[live]
    values = values - torch.where(counts > 0, edits.frequency[rows] * counts + edits.presence[rows], 0)
    return logits.index_put((rows, tokens), values.to(logits.dtype))


def may_be_drawn(allowed: AllowedTokens, vocab_size: int) -> torch.Tensor:
    """Return ``allowed`` as bool [S, vocab_size]."""
    bits = allowed.bits
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    each = ((bits[:, :, None] >> shifts) & 1).bool().flatten(1)[:, :vocab_size]
    each = torch.nn.functional.pad(each, (0, vocab_size - each.shape[1]))
    free = torch.ones_like(each[:1])
    return torch.cat([each, free])[allowed.lists.long()]  # -1: the last, which allows all


def filter_logits(z: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """``z`` (logits over temperature) with -inf for every token that min-p, top-k or top-p drops."""
    vocab_size = z.shape[1]
    ordered, order = z.sort(dim=1, descending=True, stable=True)
    k = torch.where(batch.top_k > 0, batch.top_k.clamp(max=vocab_size), vocab_size).long()
    threshold = torch.maximum(
        ordered.gather(1, k[:, None] - 1), ordered[:, :1] + torch.log(batch.min_p.to(z.dtype))[:, None]
    )
    ordered = ordered.masked_fill(ordered < threshold, float("-inf"))
    mass = ordered.softmax(dim=1)
    above = mass.cumsum(dim=1) - mass
    # Equal logits stand or fall together: the mass above a token is the mass above the first of its equals.
    new_value = torch.ones_like(ordered, dtype=torch.bool)
    new_value[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    first = torch.where(new_value, torch.arange(vocab_size, device=z.device), 0).cummax(dim=1).values
    top_p = batch.top_p.to(z.dtype)[:, None]
    dropped = (above.gather(1, first) >= top_p) & (top_p < 1)
    ordered = ordered.masked_fill(dropped, float("-inf"))
    return torch.empty_like(z).scatter_(1, order, ordered)


def sample(logits: torch.Tensor, batch: SamplingBatch) -> Sampled:
    """See ``sampling.sample``."""
    raw = _wide(logits)
    highest = raw.amax(dim=1)
    finite = ~raw.isnan().any(dim=1) & highest.isfinite()
    # A spoilt row is drawn from zeros, so that nothing below needs to think of it.
    edited = torch.where(finite[:, None], raw, 0.0)
    if batch.edits is not None:
        edited = edit_logits(edited, batch.edits)
    if batch.allowed is not None:
        edited = edited.masked_fill(~may_be_drawn(batch.allowed, logits.shape[1]), float("-inf"))
    finite = finite & (edited.amax(dim=1) > float("-inf"))
    tokens = edited.argmax(dim=1)
    if not batch.all_greedy:
        greedy = batch.temperature < GREEDY_BELOW
        z = filter_logits(edited / torch.where(greedy, 1.0, batch.temperature)[:, None], batch)
        noise = gumbel_noise(batch.seeds, batch.positions, logits.shape[1])
        tokens = torch.where(greedy, tokens, (z + noise).argmax(dim=1))
    tokens = torch.where(finite, tokens, 0)
    if batch.num_logprobs is None:
        return Sampled(tokens, finite)
    logprobs = raw.log_softmax(dim=1)
    top_logprobs, top_tokens = logprobs.sort(dim=1, descending=True, stable=True)
    return Sampled(
        tokens,
        finite,
        logprobs.gather(1, tokens[:, None])[:, 0].float(),
        top_tokens[:, : batch.num_logprobs],
        top_logprobs[:, : batch.num_logprobs].float(),
    )
